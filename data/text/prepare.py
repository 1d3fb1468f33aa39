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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, Python looks for modules beside this file only

from data.token_files import is_prepared, write_dataset  # noqa: E402
from data.tokenizer import CharTokenizer, Tokenizer, from_meta, pieces  # noqa: E402
from deskgpt.errors import one_line_errors  # noqa: E402
from deskgpt.files import sha256  # noqa: E402


def prepare(text: str, folder: Path, tokenizer_name: str, source: str) -> None:
    """Writes the token files of text, split by characters into 90% train and 10% val, and prints their sizes.

    Does nothing where folder already holds them whole. Raises ValueError for an unknown tokenizer or no text.
    """
    cut = int(len(text) * 0.9)
    if len(text) - cut < 2:
        raise ValueError(f"{source} has {len(text)} characters, too few to train on; give more text")
    source = f"{source} (sha256 {sha256(text.encode('utf-8', 'surrogatepass'))}), {tokenizer_name}"
    if is_prepared(folder, source):
        print(f"{folder.name}: already prepared")
        return
    tokenizer: Tokenizer = CharTokenizer.of(text) if tokenizer_name == "char" else from_meta({"name": tokenizer_name})
    splits = {}
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        encoded = []
        with tqdm(total=len(part), desc=f"tokenizing {split}", unit="char", unit_scale=True, disable=None) as bar:
            for piece in pieces(part):
                encoded.append(tokenizer.encode(piece))
                bar.update(len(piece))
        splits[split] = np.concatenate(encoded)
    write_dataset(folder, splits, tokenizer, source)
    print(f"{folder.name}: tokenizer {tokenizer_name}, vocab_size {tokenizer.vocab_size:,}")
    for split, ids in splits.items():
        print(f"{split}.bin has {len(ids):,} tokens")


def read_text(paths: list[Path]) -> str:
    """The texts of UTF-8 files in one, a newline after each. Raises ValueError, OSError."""
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
        texts.append(text if len(paths) == 1 or text.endswith("\n") else text + "\n")
    return "".join(texts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--name", required=True, help="folder below data/, or a path; what --dataset is given later")
    parser.add_argument(
        "--tokenizer", default="char", help="char, bytes, gpt2 or another tiktoken encoding below 65,537 ids"
    )
    args = parser.parse_args()
    with one_line_errors():
        if args.name in ("", "."):
            raise ValueError(f"--name={args.name!r}: give the data a name")
        prepare(
            read_text(args.files), ROOT / "data" / args.name, args.tokenizer, ", ".join(p.name for p in args.files[:10])
        )
