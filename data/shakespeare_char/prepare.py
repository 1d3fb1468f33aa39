"""Make token files of Shakespeare's plays, one token per character (vocab_size 65).

    python data/shakespeare_char/prepare.py [--input FILE]

Reads FILE, else input.txt in this script's folder, which it downloads. Writes train.bin (1,003,854
tokens), val.bin (111,540) and meta.json there too.
"""

import http.client
import sys
import urllib.request
from pathlib import Path

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.text.prepare import DATA, add_folder, prepare
from data.text_files import read_text
from deskgpt.errors import OneLineParser, one_line_errors
from deskgpt.files import sha256, write_atomically

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT_S = 20


def download(url: str, path: Path, checksum: str) -> None:
    """Fetch url to path, completely or not at all.

    Raises ValueError for any fault of the network or the content.
    """
    try:
        # Raises on a status of 400 and more.
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            content = response.read()
        if sha256(content) != checksum:
            raise ValueError("its checksum is not that of the text")
    except (OSError, http.client.HTTPException, ValueError) as e:
        # URLError, time-outs and TLS faults are OSErrors.
        remedy = f"save the text as {path} or give it with --input FILE"
        raise ValueError(f"cannot download {url} ({e}); {remedy}") from None
    write_atomically(path, content)


def main(name: str, tokenizer: str) -> None:
    """Prepare the text of --input, else of input.txt, which is downloaded, in the folder
    data/`name`.
    """
    parser = OneLineParser(
        f"Make data/{name}/train.bin and val.bin.\n\n    python data/{name}/prepare.py --input FILE"
    )
    parser.add_argument(
        "--input", metavar="FILE", type=Path, help="the text, instead of downloading it"
    )
    add_folder(parser, DATA / name)
    with one_line_errors():
        args = parser.parse_args()
        path = args.input or DATA / "shakespeare_char" / "input.txt"
        if not args.input and not path.exists():
            download(URL, path, SHA256)
        prepare(read_text(path), args.out, tokenizer, "tiny Shakespeare")


if __name__ == "__main__":
    main("shakespeare_char", "char")
