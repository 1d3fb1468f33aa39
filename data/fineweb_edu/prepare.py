"""Makes token files of FineWeb-Edu, streamed from the Hugging Face hub, or of your own documents.

    python data/fineweb_edu/prepare.py                                  # sample-10BT: 10B tokens, 20 GB
    python data/fineweb_edu/prepare.py --tokens 3e9                     # the first 3B of them
    python data/fineweb_edu/prepare.py --pretokenized --tokens 1e9      # token files that somebody made: minutes
    python data/fineweb_edu/prepare.py --source more/ a.parquet --out data/mine
    python data/fineweb_edu/prepare.py --encoding bpe --vocab_size 16384 --out data/own_vocabulary
    python data/fineweb_edu/prepare.py --workers 8 --out data/mine      # in 8 processes
    python data/fineweb_edu/prepare.py --part 0/3 --out /scratch/mine    # files 0, 3, 6 ...; others make parts 1/3, 2/3
    python data/fineweb_edu/prepare.py --merge --out /scratch/mine       # once all of them are made

Writes val_000000.bin, then train_000001.bin and so on (llm.c's format: 1024 bytes of header, uint16 token ids) and
meta.json, which lists them. Every document begins with <|endoftext|>; a document may go on in the next shard.
If it is stopped, at any point, the same command goes on after the last finished shard.

With --workers or --part, each part of the source files has shards of its own, train_<part>_<shard>.bin, and a record
of them, parts/<part>.json; the beginning of the first part is val. --merge lists all of them in meta.json.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data import bpe
from data.fineweb_edu import parts, pretokenized, sequence
from data.fineweb_edu.common import Part
from data.token_files import locked
from deskgpt.system.errors import ConfigError, one_line_errors

ENVIRONMENT = {
    "USE_TORCH": "0",  # `datasets` would import it without need
    "RAYON_NUM_THREADS": "1",  # more threads inside fastokens bring nothing
    "HF_HUB_DISABLE_XET": "1",  # its network errors cannot be told from its other errors
}


def main(args: argparse.Namespace) -> None:
    if args.part:
        parts.make(args, args.part)
        print(f"part {args.part} is made; once all are: the same command with --merge instead of --part")
        return
    if args.workers:
        parts.make_in_processes(args)
    with locked(args.out):
        if args.workers or args.merge:
            parts.merge(args)
        else:
            sequence.prepare(args, Part())


# ---- command line --------------------------------------------------------------------------------------------


def whole_number(text: str) -> int:
    """A whole number of at least 1, also written as 3e9 or 1_000."""
    try:
        number = float(text)
        if 1 <= number <= 1e15 and number == int(number):
            return int(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1e15, such as 100000 or 3e9")


def part(text: str) -> Part:
    """Part i of n, from i/n."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if match and int(match[1]) < int(match[2]) > 1:
        return Part(int(match[1]), int(match[2]))
    raise argparse.ArgumentTypeError(f"{text!r} is not one of several parts, such as 0/8, the first of 8")


def named_path(text: str) -> Path:
    """A path that is not empty, which would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("it names nothing")
    return Path(text)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The options, with their defaults. Raises ConfigError where two of them do not go together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        *("--subset",),
        default="sample-10BT",
        help="sample-10BT (default), sample-100BT, sample-350BT, default or CC-MAIN-2024-10 ...",
    )
    add(
        "--source", nargs="+", type=named_path, metavar="PATH", help=".parquet, .jsonl[.gz|.zst], .txt files or folders"
    )
    add("--pretokenized", action="store_true", help=f"fetch token files of {pretokenized.REPO} instead")
    add("--text_column", default="text", help="column, or key of a jsonl line, with the text (default: text)")
    add(
        *("--encoding", "--tokenizer"),
        default="gpt2",
        help="gpt2 (default), another tiktoken encoding below 65,537 ids, bytes, bpe (trained on this text), or the "
        "path of a prepared folder, to use its tokenizer",
    )
    add(
        *("--vocab_size",),
        type=whole_number,
        default=bpe.USUAL_SIZE,
        help=f"ids of --encoding bpe (default: {bpe.USUAL_SIZE})",
    )
    add("--tokens", type=whole_number, default=math.inf, help="to make for train, such as 3e9 (default: all there are)")
    add("--val_tokens", type=whole_number, help="made first (default: a shard; of --source a tenth at most)")
    add("--shard_tokens", type=whole_number, default=100_000_000, help="per file (default: 1e8)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add(
        "--num_proc", type=whole_number, help=f"threads that tokenize (default: all cores, {cores}, over all --workers)"
    )
    in_parts = parser.add_mutually_exclusive_group()
    in_parts.add_argument(
        "--workers", type=whole_number, metavar="N", help="make N parts, each in a process of its own, and merge them"
    )
    in_parts.add_argument("--part", type=part, metavar="I/N", help="make only source files I, I + N, I + 2N ...")
    in_parts.add_argument("--merge", action="store_true", help="write meta.json once all parts are made")
    here = Path(__file__).resolve().parent
    add("--out", type=named_path, default=here, metavar="FOLDER", help="(default: data/fineweb_edu)")
    args = parser.parse_args(argv)
    args.workers = None if args.workers == 1 else args.workers  # one part is the whole
    check_options(args, {name for name, value in vars(args).items() if value != parser.get_default(name)})
    args.num_proc = args.num_proc or max(1, (cores or 1) // (args.workers or 1))
    return args


def check_options(args: argparse.Namespace, given: set[str]) -> None:
    """Raises ConfigError where one of the given options has no meaning beside the others, ValueError."""
    of_text = {"source", "subset", "text_column", "encoding", "vocab_size", "shard_tokens", "val_tokens"}
    rules = [
        (args.source, {"subset"}, "with --source; leave one of them out"),
        (args.pretokenized, of_text | {"workers", "part", "merge"}, "with --pretokenized; leave one of them out"),
        (args.encoding != "bpe", {"vocab_size"}, "without --encoding bpe; leave it out"),
    ]
    for applies, options, remedy in rules:
        for option in sorted(options & given):
            if applies:
                raise ConfigError(f"--{option} has no meaning {remedy}")
    if (args.workers or args.part or args.merge) and args.encoding == "bpe":
        raise ConfigError(
            "--encoding bpe trains before any part can be made: prepare a small folder with it first (--encoding bpe "
            "--tokens 1e8 --out SMALL), then give --encoding SMALL here"
        )
    bpe.check_size(args.vocab_size)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT | os.environ)
    with one_line_errors():
        main(arguments(sys.argv[1:]))
