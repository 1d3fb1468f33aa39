"""Makes token files from anybody's own text.

    python data/text/prepare.py novel.txt notes/*.txt --name mine --tokenizer gpt2
    python data/text/prepare.py novel.txt --name mine --tokenizer bpe --vocab_size 4096   # a vocabulary of its own
    python train.py config/train_shakespeare_char_cpu.py --dataset=mine

Writes data/NAME/train.bin, val.bin (the last tenth) and meta.json. Files may be UTF-8, or UTF-16 and UTF-32 with a
mark, also packed (gzip, bzip2, xz, zstd). If lines with nothing but <|endoftext|> separate documents, each document
begins with that token.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data import bpe
from data.prepared import is_prepared, named_tokenizer, write_dataset
from data.text_files import SEPARATOR, documents_in, expanded, next_document, read_text
from data.tokenizer import END_OF_TEXT, CharTokenizer, Tokenizer, encoded_document, from_meta, pieces, short_name
from deskgpt.system.errors import ConfigError, OneLineParser, one_line_errors
from deskgpt.system.files import sha256

DATA = Path(__file__).resolve().parents[1]
TRAIN_SHARE = 0.9  # of the characters; the rest is val
NAMED_FILES = 10  # in the source that meta.json names


def main(args: argparse.Namespace) -> None:
    paths = expanded(args.files)
    source = ", ".join(path.name for path in paths[:NAMED_FILES])
    texts = [read_text(path) for path in paths]
    if len(texts) > 1:
        texts = [text if text.endswith("\n") else text + "\n" for text in texts]
    vocab_size = bpe.USUAL_SIZE if args.vocab_size is None else args.vocab_size
    prepare("".join(texts), args.out, args.tokenizer, source, vocab_size)


def prepare(text: str, folder: Path, tokenizer_name: str, source: str, vocab_size: int = bpe.USUAL_SIZE) -> None:
    """Writes the token files of text, split by characters into 90% train and 10% val, and prints their sizes.

    tokenizer_name may also be the path of a prepared folder, whose tokenizer is used. vocab_size is that of "bpe",
    which is trained on the train split. Does nothing if folder already holds the files unharmed. Raises ValueError for
    an unknown tokenizer or too short a text.
    """
    cut = next_document(text, int(len(text) * TRAIN_SHARE))
    if len(text) - cut < 2:
        raise ValueError(f"{source} has {len(text)} characters, too few to train on; give more text")
    described = named_tokenizer(tokenizer_name)
    source = f"{source} (sha256 {sha256(text.encode('utf-8', 'surrogatepass'))}), {short_name(described)}"
    if tokenizer_name == "bpe":
        bpe.check_size(vocab_size)
        source += f" of {vocab_size}"
    if is_prepared(folder, source):
        print(f"{folder.name}: already prepared")
        return
    if tokenizer_name == "bpe":
        print(f"training a vocabulary of {vocab_size:,} on train")
        tokenizer: Tokenizer = bpe.train(bpe.sample(SEPARATOR.sub("", text[:cut])), vocab_size)
    elif tokenizer_name == "char":
        tokenizer = CharTokenizer.of(text)
    else:
        tokenizer = from_meta(described)
    documents = documents_in(text)
    separated = SEPARATOR.search(text) is not None
    end_of_text = tokenizer.end_of_text if separated else None
    if separated:
        unknown = f"the tokenizer {tokenizer.meta()['name']} has no such token, so they are spelt out as text"
        how = unknown if end_of_text is None else "one token each"
        print(f"{len(documents):,} documents, separated by {END_OF_TEXT}: {how}")
    within = sum(document.count(END_OF_TEXT) for document in documents)
    if within:
        print(f"note: {within:,} times {END_OF_TEXT} is not alone on its line, and is spelt out as text")
    splits = {}
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        texts = pieces(part) if end_of_text is None else documents_in(part)
        encode = tokenizer.encode if end_of_text is None else functools.partial(encoded_document, tokenizer)
        splits[split] = np.concatenate([encode(t) for t in tqdm(texts, f"tokenizing {split}", disable=None)])
    write_dataset(folder, splits, tokenizer, source, end_of_text=end_of_text)
    print(f"{folder.name}: tokenizer {tokenizer.meta()['name']}, vocab_size {tokenizer.vocab_size:,}")
    for split, ids in splits.items():
        print(f"{split}.bin has {len(ids):,} tokens")


def folder(name: str) -> Path:
    if name in ("", "."):
        raise argparse.ArgumentTypeError("it names no folder")
    return Path(name)


def add_folder(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """The options that say where to write."""
    to = parser.add_mutually_exclusive_group(required=default is None)
    about = "folder below data/, or a path; later the value of --dataset"
    to.add_argument("--name", dest="out", type=lambda name: DATA / folder(name), default=default, help=about)
    to.add_argument("--out", type=folder, default=default, metavar="FOLDER", help="any folder, instead of --name")


def arguments() -> argparse.Namespace:
    parser = OneLineParser(str(__doc__))
    add = parser.add_argument
    add("files", metavar="FILE", nargs="+", type=Path)
    add_folder(parser)
    add(
        *("--tokenizer", "--encoding"),
        default="char",
        help="char, bytes, bpe (trained on this text), gpt2 or another tiktoken encoding below 65,537 ids, or the path "
        "of a prepared folder, to use its tokenizer",
    )
    add("--vocab_size", type=int, help=f"ids of --tokenizer bpe (default: {bpe.USUAL_SIZE})")
    args = parser.parse_args()
    if args.tokenizer != "bpe" and args.vocab_size is not None:
        raise ConfigError(f"--vocab_size has no meaning with --tokenizer {args.tokenizer}; leave it out")
    return args


if __name__ == "__main__":
    with one_line_errors():
        main(arguments())
