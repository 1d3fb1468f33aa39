"""Make token files of FineWeb-Edu or another data set, streamed from the Hugging Face hub, or of
your own documents.

    python data/fineweb_edu/prepare.py  # sample-10BT: 10B tokens, 20 GB
    python data/fineweb_edu/prepare.py --tokens 3e9                     # the first 3B of them
    python data/fineweb_edu/prepare.py --source more/ a.parquet --out data/mine
    python data/fineweb_edu/prepare.py --hub roneneldan/TinyStories --out data/stories
    python data/fineweb_edu/prepare.py --tokenizer data/novel-bpe --out data/own_vocabulary

Writes a shard for each source file, train_000000.bin and so on (uint16 token ids), and meta.json,
which lists them; the beginning of the first file is val_000000.bin. Small files of --source share a
shard. Every document begins with <|endoftext|>. If it is stopped, at any point, the same command
continues there.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deskgpt.errors import (
    ConfigError,
    OneLineParser,
    one_line_errors,
    python_command,
    require_torch,
    shortened,
)

require_torch()

from tqdm import tqdm

from data.prepared import BATCH_CHARS, forget, named_tokenizer, resumed, write_shards
from data.sources import FINEWEB_EDU, add_hub, hub_source, local_source, text_of
from data.text.prepare import add_folder, whole_number
from data.token_files import read_record, to_json
from data.tokenizer import encoded_document
from deskgpt.files import file_sha256, locked_folder, remove_leftovers, write_atomically

HERE = Path(__file__).resolve().parent
ALL_TOKENS = 1 << 62

Record = dict[str, Any]  # the content of meta.json


def main(args: argparse.Namespace) -> None:
    with locked_folder(args.out):
        print_totals(args.out, make(args))


# ---- make ----------------------------------------------------------------------------------------


def make(args: argparse.Namespace) -> Record:
    """Make the shards that args.out lacks.

    Return the record in meta.json. Raises ValueError, OSError.
    """
    folder: Path = args.out
    tokenizer = named_tokenizer(args.tokenizer)
    if tokenizer.end_of_text is None:
        raise ValueError(f"--tokenizer={args.tokenizer} has no token between documents; take bytes")
    if args.source:
        source = local_source(args.source, args.text_column)
    else:
        revision = read_record(folder).get("revision")
        source = hub_source(args.hub, args.subset, args.split, revision, args.text_column)
    settings = {
        "tokenizer": tokenizer.meta(),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "source": source.name,
        "text_column": args.text_column,
        "val_tokens": args.val_tokens or source.val_tokens,
        "shards": len(source.shards),
        "revision": source.revision,
    }
    record = recorded(folder, settings)
    save(folder, record)
    for name, entry in tqdm(record["files"].items(), "checksums", leave=False, disable=None):
        path = folder / name
        if not path.is_file() or file_sha256(path) != entry["sha256"]:
            print(f"{name} is missing or damaged (its checksum does not match) and is made again")
            (folder / name.replace("val", "train")).unlink(missing_ok=True)
    while found := next_shard(folder, record, args.tokens):
        number, tokens = found
        sizes = {train_shard(number): tokens}
        if number == 0:
            sizes = {"val_000000.bin": settings["val_tokens"]} | sizes
        remove_leftovers(folder, *sizes)
        saved = folder / ".shard.tokens"
        text = functools.partial(text_of, args.text_column)
        encode = functools.partial(encoded_document, tokenizer)
        pieces = resumed(saved, settings, source, number, text, BATCH_CHARS, encode)
        entries = write_shards(folder, sizes, pieces)
        record["files"] |= entries
        if train_shard(number) not in entries:  # it has no tokens
            record["empty"].append(number)
        save(folder, record)
        forget(saved)
    return record


def train_shard(number: int) -> str:
    """Return the name of a shard's file of train."""
    return f"train_{number:06}.bin"


def next_shard(folder: Path, record: Record, tokens: int) -> tuple[int, int] | None:
    """Return the number of the next shard to make, and the train tokens that are still needed.

    tokens: of train in all.
    """
    wanted = tokens
    for number in range(record["shards"]):
        if wanted <= 0:
            break
        name = train_shard(number)
        entry = record["files"].get(name, {"tokens": 0})
        is_short = "cut" in entry and entry["tokens"] < wanted
        is_made = number in record["empty"] or (entry["tokens"] and (folder / name).is_file())
        if is_short or not is_made:
            return number, wanted
        wanted -= entry["tokens"]
    return None


def recorded(folder: Path, settings: Record) -> Record:
    """Return the record in the folder's meta.json, or a new one without shards.

    Raises ValueError if the shards that it lists were made with other settings.
    """
    record = read_record(folder)
    if not record.get("files"):  # settings that made no shard do not count
        return settings | {"files": {}, "empty": []}
    for key, wanted in settings.items():
        if record.get(key) != wanted:
            raise ValueError(
                f"{folder} was not made with {key}={shortened(wanted)}; choose another --out, "
                "or delete the folder"
            )
    return record


def save(folder: Path, record: Record) -> None:
    """Write the folder's meta.json, its shards in the order of their names."""
    remove_leftovers(folder, "meta.json")
    record["files"] = dict(sorted(record["files"].items()))
    write_atomically(folder / "meta.json", to_json(record))


def print_totals(folder: Path, record: Record) -> None:
    """Print the size of the folder's splits. Raises ValueError if the source left no tokens for
    train.
    """
    tokens = {"train": 0, "val": 0}
    for name, entry in record["files"].items():
        tokens[name.partition("_")[0]] += entry["tokens"]
    if not tokens["train"]:
        raise ValueError(
            f"{record['source']} has only {tokens['val']:,} tokens, which went into val; try "
            "another --out with fewer --val_tokens, or another --text_column"
        )
    print(
        f"{tokens['train']:,} train and {tokens['val']:,} val tokens in "
        f"{len(record['files'])} shards; train on them:\n"
        f"{python_command()} train.py config/train_fineweb_125m.py --dataset={folder.resolve()}"
    )


# ---- command line --------------------------------------------------------------------------------


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(__doc__)
    add = parser.add_argument
    either = add_hub(parser, FINEWEB_EDU)
    about = "files *.parquet, .arrow, .jsonl, .csv, .txt (text also packed), or folders"
    either.add_argument("--source", nargs="+", type=Path, metavar="PATH", help=about)
    about = "column, or key of a jsonl line, with the text (default: text)"
    add("--text_column", default="text", help=about)
    add("--tokenizer", default="gpt2", help="gpt2, bytes, or a prepared folder's path")
    about = "to make for train, such as 3e9 (default: all there are)"
    add("--tokens", type=whole_number, default=ALL_TOKENS, help=about)
    about = "(default: 1e8; of --source a tenth of the first shard at most)"
    add("--val_tokens", type=whole_number, help=about)
    add_folder(parser, HERE)
    args = parser.parse_args(argv)
    if args.hub == FINEWEB_EDU:
        args.subset = args.subset or "sample-10BT"
    elif args.out == HERE:
        raise ConfigError(f"--hub={args.hub} needs --name or --out, a folder of its own")
    return args


if __name__ == "__main__":
    with one_line_errors():
        main(arguments(sys.argv[1:]))
