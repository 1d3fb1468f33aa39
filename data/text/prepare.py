"""Make token files from anybody's own text.

    # A folder stands for its .txt and .md files.
    python data/text/prepare.py novel.txt notes/ --name mine --tokenizer gpt2
    # This one trains a vocabulary on the text.
    python data/text/prepare.py novel.txt --name mine --tokenizer bpe --vocab_size 4096
    python train.py config/train_shakespeare_char_cpu.py --dataset=mine

Writes data/NAME/train.bin, val.bin (the last tenth) and meta.json. Files are UTF-8, also packed
(.gz, .zst, .bz2). If lines with nothing but <|endoftext|> separate documents, each document
begins with that token.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deskgpt.errors import ROOT, ConfigError, OneLineParser, one_line_errors, require_torch

require_torch()

import numpy as np

from data.prepared import named_tokenizer, write_dataset
from data.text_files import (
    SEPARATOR,
    documents_in,
    expanded,
    names_of,
    next_document,
    packed,
    read_text,
)
from data.tokenizer import (
    END_OF_TEXT,
    LONGEST_TOKEN,
    MOST_IDS,
    SMALLEST_BPE,
    BpeTokenizer,
    CharTokenizer,
    Tokenizer,
    encoded_document,
    of_merges,
)
from deskgpt.files import sha256

DATA = ROOT / "data"
TRAIN_SHARE = 0.9  # of the characters; the rest is val

# A byte-pair encoding that is trained on the text. The trainer takes up to 140 times the size of
# the different words, which are nearly all of a text without spaces.
BPE_SIZE = 4096  # ids, unless asked otherwise
SAMPLE_BYTES = 16_000_000
BLOCK = 1 << 20  # characters
LONG_WORD = re.compile(r"(\S{256})(?=\S)")

# Data and markup that people take for text, by how they begin: JSON, HTML, XML, RTF.
STRUCTURED = re.compile(r'\s*([\[{]\s*[\[{"]|<[!?a-zA-Z]|{\\rtf)')


def main(args: argparse.Namespace) -> None:
    paths = expanded(args.files, packed(".txt", ".md"))
    texts = [read_text(path) for path in paths]
    for path, text in zip(paths, texts, strict=True):
        if STRUCTURED.match(text[:99]) or path.suffix.lower() in (".csv", ".tsv"):
            print(
                f"note: {path.name} looks like JSON, markup or CSV; the model will learn its "
                "quotes, keys or tags. To avoid this, convert it to text, or give it to "
                "data/chat/prepare.py (dialogues) or data/fineweb_edu/prepare.py --source"
            )
            break
    if len(texts) > 1:
        texts = [text if text.endswith("\n") else text + "\n" for text in texts]
    prepare("".join(texts), args.out, args.tokenizer, names_of(paths), args.vocab_size)


def prepare(
    text: str, folder: Path, tokenizer_name: str, source: str, vocab_size: int = BPE_SIZE
) -> None:
    """Write the token files of text, split by characters into 90% train and 10% val, and print
    their sizes.

    tokenizer_name may also be the path of a prepared folder, whose tokenizer is used. vocab_size is
    that of "bpe", which is trained on the train split. Raises ValueError for an unknown tokenizer
    or too short a text.
    """
    cut = next_document(text, int(len(text) * TRAIN_SHARE))
    if len(text) - cut < 2:
        raise ValueError(
            f"{source} has {len(text)} characters, too few to train on; give more text"
        )
    if tokenizer_name == "bpe":
        tokenizer: Tokenizer = train_bpe("".join(documents_in(text[:cut])), vocab_size)
    elif tokenizer_name == "char":
        tokenizer = CharTokenizer.of(text)
    else:
        tokenizer = named_tokenizer(tokenizer_name)
    name = tokenizer.meta()["name"]
    end_of_text = None
    if SEPARATOR.search(text):
        end_of_text = tokenizer.end_of_text
        token = f"letters, since {name} has no such token" if end_of_text is None else "a token"
        print(f"{len(documents_in(text)):,} documents, separated by {END_OF_TEXT} as {token}")
    splits = {}
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        if end_of_text is None:
            splits[split] = tokenizer.encode(part)
        else:
            documents = [encoded_document(tokenizer, document) for document in documents_in(part)]
            splits[split] = np.concatenate(documents)
    source = f"{source} (sha256 {sha256(text.encode())})"
    write_dataset(folder, splits, tokenizer, source, end_of_text=end_of_text)
    print(f"{folder.name}: tokenizer {name}, vocab_size {tokenizer.vocab_size:,}")
    for split, ids in splits.items():
        print(f"{split}.bin has {len(ids):,} tokens")


def train_bpe(text: str, vocab_size: int) -> BpeTokenizer:
    """Train a byte-pair encoding of vocab_size ids on a text; the same text makes the same one.

    Raises ValueError if the text has not enough pairs for so many.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    encoding = Tokenizer(models.BPE())
    # GPT-2's pattern splits a text into words first.
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # without END_OF_TEXT, which is not text
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    encoding.train_from_iterator(sample(text), trainer)
    merges = json.loads(encoding.to_str())["model"]["merges"]  # pairs of tokens
    tokenizer = of_merges("\n".join(" ".join(pair) for pair in merges))
    if tokenizer.vocab_size < vocab_size:
        raise ValueError(
            f"the training text has pairs for a vocabulary of at most {tokenizer.vocab_size:,}, "
            f"not {vocab_size:,}; use --vocab_size={tokenizer.vocab_size}, or more text"
        )
    return tokenizer


def sample(text: str) -> Iterator[str]:
    """Yield blocks from all over a text, about SAMPLE_BYTES or all of it.

    Long words are cut by newlines: the trainer goes through a whole word for each merge in it.
    """
    every = math.ceil(len(text.encode("utf-8", "surrogatepass")) / SAMPLE_BYTES)
    for begin in range(0, len(text), BLOCK * every):
        yield LONG_WORD.sub(r"\1\n", text[begin : begin + BLOCK])


def add_folder(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """Add the options for the folder to write to."""
    to = parser.add_mutually_exclusive_group(required=default is None)
    about = "folder below data/, or a path; later the value of --dataset"
    to.add_argument("--name", dest="out", type=DATA.joinpath, default=default, help=about)
    about = "any folder, instead of --name"
    to.add_argument("--out", type=Path, default=default, metavar="FOLDER", help=about)


def whole_number(text: str) -> int:
    """Return a whole number of at least 1, also written as 3e9 or 1_000. Raises ValueError."""
    number = float(text)
    if number < 1 or not number.is_integer():
        raise ValueError
    return int(number)


def arguments() -> argparse.Namespace:
    parser = OneLineParser(__doc__)
    add = parser.add_argument
    add("files", metavar="FILE", nargs="+", type=Path)
    add_folder(parser)
    about = "char, bytes, bpe (trained on this text), gpt2, or a prepared folder's path"
    add("--tokenizer", default="char", help=about)
    about = f"ids of --tokenizer bpe (default: {BPE_SIZE})"
    add("--vocab_size", type=int, default=BPE_SIZE, help=about)
    args = parser.parse_args()
    size = args.vocab_size
    if (size != BPE_SIZE and args.tokenizer != "bpe") or not SMALLEST_BPE <= size <= MOST_IDS:
        raise ConfigError(f"--vocab_size={size} is for --tokenizer=bpe, from 257 to 65,536")
    return args


if __name__ == "__main__":
    with one_line_errors():
        main(arguments())
