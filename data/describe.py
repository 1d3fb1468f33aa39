"""Describes a folder of token files, compares their checksums and shows how they begin.

    python -m data.describe data/fineweb_edu

Exits with status 1 if a file is missing or damaged.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from data.token_files import assumptions, damaged, listed_with_masks, read_meta, read_record, read_tokens, token_files
from data.tokenizer import from_meta
from deskgpt.system.errors import one_line_errors

SHOWN_TOKENS = 60  # of the beginning of a split


def describe(folder: Path) -> bool:
    """Prints the description; returns whether folder holds every file that meta.json lists, unharmed.

    Raises ValueError if a split or the tokenizer is missing or cannot be read.
    """
    meta = read_meta(folder)
    record = read_record(folder)
    revision = f", revision {record['revision']}" if record.get("revision") else ""
    print(f"{folder}: {record.get('source', 'no meta.json')}{revision}")
    print(f"tokenizer: {meta['tokenizer'].get('name', 'unknown')}, vocabulary of {meta['vocab_size']:,}")
    entries = listed_with_masks(record)
    faults = damaged(folder, entries)
    print(f"checksums: {len(entries)} files listed in meta.json; faults: {len(faults)}")
    for name in faults:
        print(f"  {name} is missing or not what was written; prepare the data again")
    for line in assumptions(folder):
        print(f"warning: {line}")
    for split in ("train", "val"):
        shards = [read_tokens(path) for path in token_files(folder, split) if path.name not in faults]
        print(f"{split}: {sum(map(len, shards)):,} tokens, shards: {len(shards)}")
        ids = shards[0][:SHOWN_TOKENS].tolist() if shards else []
        if ids and max(ids) >= meta["vocab_size"]:
            raise ValueError(f"{folder}: {split} begins with {ids}, which are not tokens of this tokenizer")
        if ids and meta["tokenizer"]:
            print(f"  it begins: {from_meta(meta['tokenizer']).decode_bytes(ids).decode(errors='replace')!r}")
    return not faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    with one_line_errors():
        sys.exit(not describe(args.folder))
