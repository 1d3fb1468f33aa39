"""Makes token files from anybody's own text.

    python data/text/prepare.py novel.txt notes/*.txt --name mine --tokenizer gpt2
    python train.py config/train_shakespeare_char_cpu.py --dataset=mine

Writes data/NAME/train.bin, val.bin (the last tenth) and meta.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data.token_files import is_prepared, write_dataset
from data.tokenizer import CharTokenizer, Ids, Tokenizer, from_meta, pieces
from deskgpt.errors import one_line_errors
from deskgpt.files import sha256

DATA = Path(__file__).resolve().parents[1]
TRAIN_SHARE = 0.9  # of the characters; the rest is val
NAMED_FILES = 10  # in the source that meta.json names


def main(args: argparse.Namespace) -> None:
    if args.name in ("", "."):
        raise ValueError(f"--name={args.name!r}: give the data a name")
    source = ", ".join(path.name for path in args.files[:NAMED_FILES])
    prepare(read_text(args.files), DATA / args.name, args.tokenizer, source)


def prepare(text: str, folder: Path, tokenizer_name: str, source: str) -> None:
    """Writes the token files of text, split by characters into 90% train and 10% val, and prints their sizes.

    Does nothing if folder already holds them unharmed. Raises ValueError for an unknown tokenizer or too short a text.
    """
    cut = int(len(text) * TRAIN_SHARE)
    if len(text) - cut < 2:
        raise ValueError(f"{source} has {len(text)} characters, too few to train on; give more text")
    source = f"{source} (sha256 {sha256(text.encode('utf-8', 'surrogatepass'))}), {tokenizer_name}"
    if is_prepared(folder, source):
        print(f"{folder.name}: already prepared")
        return
    tokenizer = CharTokenizer.of(text) if tokenizer_name == "char" else from_meta({"name": tokenizer_name})
    splits = {
        "train": encode(text[:cut], tokenizer, "tokenizing train"),
        "val": encode(text[cut:], tokenizer, "tokenizing val"),
    }
    write_dataset(folder, splits, tokenizer, source)
    print(f"{folder.name}: tokenizer {tokenizer_name}, vocab_size {tokenizer.vocab_size:,}")
    for split, ids in splits.items():
        print(f"{split}.bin has {len(ids):,} tokens")


def encode(text: str, tokenizer: Tokenizer, label: str) -> Ids:
    """The token ids (n,) of a long text, with a progress bar on a terminal."""
    encoded = []
    with tqdm(total=len(text), desc=label, unit="char", unit_scale=True, disable=None) as bar:
        for piece in pieces(text):
            encoded.append(tokenizer.encode(piece))
            bar.update(len(piece))
    return np.concatenate(encoded)


def read_text(paths: list[Path]) -> str:
    """The texts of UTF-8 files, joined; with several files, a newline ends each. Raises ValueError, OSError."""
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8-sig")  # -sig: drops the mark that Windows editors put first
        except UnicodeDecodeError as e:
            raise ValueError(
                f"{path} is not UTF-8 text (byte {e.start:,}); convert it first, for instance with iconv"
            ) from None
        except OSError as e:
            raise OSError(f"cannot read {path}: {e.strerror}; is its name right?") from None
        if len(paths) > 1 and not text.endswith("\n"):
            text += "\n"
        texts.append(text)
    return "".join(texts)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--name", required=True, help="folder below data/, or a path; later the value of --dataset")
    parser.add_argument(
        "--tokenizer", default="char", help="char, bytes, gpt2 or another tiktoken encoding below 65,537 ids"
    )
    return parser.parse_args()


if __name__ == "__main__":
    with one_line_errors():
        main(arguments())
