"""Makes token files of the running Python's own standard library, one token per character: no download.

    python data/python_char/prepare.py

Real text that is on every machine, for a first run without a network. Writes train.bin, val.bin and meta.json
beside this file. Their sizes depend on the Python version, so losses compare within one version only.
"""

from __future__ import annotations

import argparse
import platform
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, Python looks for modules beside this file only

from data.text.prepare import prepare  # noqa: E402
from deskgpt.errors import one_line_errors  # noqa: E402
from deskgpt.files import sha256  # noqa: E402

SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
SIZE = 2_000_000  # characters: about twice tiny Shakespeare


def standard_library(size: int) -> str:
    """About `size` characters of ASCII-only modules, in an order that mixes the packages. Raises ValueError."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in folder.rglob("*.py") if not SKIPPED & set(p.relative_to(folder).parts)]
    # By hash of the name: the validation tenth, the end of the text, is then a sample and not the letter z.
    paths.sort(key=lambda p: sha256(p.relative_to(folder).as_posix().encode()))
    texts, held = [], 0
    for path in paths:
        content = path.read_bytes()
        if held < size and content.isascii():  # other scripts would add characters that occur once
            texts.append(content.decode().replace("\r\n", "\n"))
            held += len(content)
    if held < size / 4:
        raise ValueError(
            f"{folder} holds only {held:,} characters of Python sources; give a text to data/text/prepare.py"
        )
    return "".join(texts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, default=ROOT / "data" / "python_char", help="where to write"
    )
    args = parser.parse_args()
    with one_line_errors():
        prepare(standard_library(SIZE), args.out, "char", f"standard library of Python {platform.python_version()}")
