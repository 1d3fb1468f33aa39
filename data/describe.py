"""Describes a folder of token files, compares their checksums and shows how they begin.

    python -m data.describe data/fineweb_edu

Exits with status 1 where a file is missing or damaged.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.token_files import listed_with_masks, mask_of, read_meta, read_record, read_tokens, token_files
from data.tokenizer import from_meta
from deskgpt.machine.errors import one_line_errors
from deskgpt.machine.files import file_sha256

SHOWN_TOKENS = 60  # of the beginning of a split

Entries = dict[str, dict[str, Any]]  # of meta.json: file name to tokens, documents, sha256 ...


def describe(folder: Path) -> bool:
    """Prints the description; returns whether folder holds every file that meta.json lists, unharmed, and no other.

    Raises ValueError where a split or the list in meta.json is missing or cannot be read.
    """
    meta = read_meta(folder)
    recorded = read_record(folder)
    entries: Entries = listed_with_masks(recorded)
    shards = {split: token_files(folder, split) for split in ("train", "val")}

    revision = f", revision {recorded['revision']}" if recorded.get("revision") else ""
    print(f"{folder}: {recorded.get('source', 'no meta.json')}{revision}")
    print(f"tokenizer: {meta['tokenizer'].get('name', 'unknown')}, vocabulary of {meta['vocab_size']:,}")
    for split, paths in shards.items():
        print(f"{split}: {counts(paths, entries)}")

    tokens = [path for paths in shards.values() for path in paths]
    masks = [mask_of(path) for path in tokens if mask_of(path).exists()]
    if masks:
        learned = sum(int(np.count_nonzero(np.fromfile(path, np.uint8))) for path in masks)
        window = f", windows of {recorded['packed']:,} tokens" if recorded.get("packed") else ""
        print(f"loss mask: {learned:,} tokens are learned{window}")
    faults = check(folder, tokens + masks, entries)
    print(f"checksums: {len(entries)} files listed in meta.json; faults: {len(faults)}")
    for fault in faults:
        print(f"  {fault}; prepare the data again")

    try:
        tokenizer = from_meta(meta["tokenizer"])
    except ValueError as e:  # GPT-2's files may be neither cached nor within reach
        print(f"no text shown: {e}")
        return not faults
    for split, paths in shards.items():
        ids = read_tokens(paths[0])[:SHOWN_TOKENS].tolist()
        if max(ids) >= tokenizer.vocab_size:
            print(f"{split} begins with {ids}, which are not tokens of this tokenizer")
            continue
        beginning = tokenizer.decode_bytes(ids)
        print(f"{split} begins: {beginning.decode(errors='replace')!r}")
    return not faults


def counts(paths: list[Path], entries: Entries) -> str:
    """The numbers of tokens, documents and files of a split, in words."""
    tokens = [len(read_tokens(path)) for path in paths]
    documents: list[Any] = [entries.get(path.name, {}).get("documents") for path in paths]
    known = "" if None in documents else f", {sum(documents):,} documents"
    files = f"{len(paths)} files of {min(tokens):,} to {max(tokens):,}" if len(paths) > 1 else "1 file"
    return f"{sum(tokens):,} tokens{known}, {files}"


def check(folder: Path, paths: list[Path], entries: Entries) -> list[str]:
    """What differs between the token files at `paths` and the list in meta.json, if it has one."""
    if not entries:
        return []
    faults = [f"{name} is missing" for name in entries if not (folder / name).exists()]
    for path in tqdm(paths, "checksums", leave=False, disable=None):
        if path.name not in entries:
            faults.append(f"{path.name} is not listed in meta.json, and is read all the same")
        elif file_sha256(path) != entries[path.name]["sha256"]:
            faults.append(f"{path.name} is not what was written")
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    with one_line_errors():
        sys.exit(not describe(args.folder))
