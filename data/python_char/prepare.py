"""Makes token files of the running Python's own standard library, one token per character: no download.

    python data/python_char/prepare.py

Real text that is on every machine, for a first run without a network. Writes train.bin, val.bin and meta.json
into this script's folder. Their sizes depend on the Python version, so losses compare within one version only.
"""

from __future__ import annotations

import platform
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data.text.prepare import add_folder, prepare
from deskgpt.system.errors import OneLineParser, one_line_errors
from deskgpt.system.files import sha256

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
SKIPPED |= {"encodings", "pydoc_data", "__pycache__"}
SIZE = 2_000_000  # characters: about twice tiny Shakespeare


def standard_library(size: int) -> str:
    """About `size` characters of ASCII-only modules, in an order that mixes the packages. Raises ValueError."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in folder.rglob("*.py") if not SKIPPED & set(path.relative_to(folder).parts)]
    # Sort by hash of the name: val, the end of the text, is then a sample and not the letter z.
    paths.sort(key=lambda path: sha256(path.relative_to(folder).as_posix().encode()))
    texts = []
    n_bytes = 0
    for path in paths:
        content = path.read_bytes()
        if n_bytes < size and content.isascii():  # other scripts would add characters that occur once
            texts.append(content.decode().replace("\r\n", "\n"))
            n_bytes += len(content)
    if n_bytes < size / 4:
        raise ValueError(
            f"{folder} holds only {n_bytes:,} characters of Python sources; give a text to data/text/prepare.py"
        )
    return "".join(texts)


if __name__ == "__main__":
    with one_line_errors():
        parser = OneLineParser(str(__doc__))
        add_folder(parser, Path(__file__).resolve().parent)
        source = f"standard library of Python {platform.python_version()}"
        prepare(standard_library(SIZE), parser.parse_args().out, "char", source)
