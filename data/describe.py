"""Describes a folder of token files, compares their checksums and shows how they begin.

    python -m data.describe data/fineweb_edu

Exits with status 1 where a file is missing or damaged.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.token_files import read_meta, read_tokens, token_files
from data.tokenizer import from_meta
from deskgpt.errors import one_line_errors
from deskgpt.files import file_sha256


def describe(folder: Path) -> bool:
    """Prints it; whether every file that meta.json lists is there, unharmed.

    Raises ValueError where folder has no token files, or some that are none.
    """
    meta, path = read_meta(folder), folder / "meta.json"
    recorded: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    entries: dict[str, dict[str, Any]] = recorded.get("files", {})
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError(f"{path}: its list of files is damaged; prepare the data again")
    paths = {split: token_files(folder, split) for split in ("train", "val")}
    revision = f", revision {recorded['revision']}" if recorded.get("revision") else ""
    print(f"{folder}: {recorded.get('source', 'no meta.json')}{revision}")
    print(f"tokenizer: {meta['tokenizer'].get('name', 'unknown')}, vocabulary of {meta['vocab_size']:,}")
    for split, shards in paths.items():
        counts = [len(read_tokens(p)) for p in shards]
        documents: list[Any] = [entries.get(p.name, {}).get("documents") for p in shards]
        known = "" if None in documents else f", {sum(documents):,} documents"
        each = f"{len(shards)} files of {min(counts):,} to {max(counts):,}" if len(shards) > 1 else "1 file"
        print(f"{split}: {sum(counts):,} tokens{known}, {each}")

    faults = [f"{name} is missing" for name in entries if not (folder / name).exists()]
    there = [p for shards in paths.values() for p in shards]
    listed = [p for p in there if "sha256" in entries.get(p.name, {})]
    for p in tqdm(listed, "checksums", leave=False, disable=None):
        if file_sha256(p) != entries[p.name]["sha256"]:
            faults.append(f"{p.name} is not what was written")
    if entries:
        faults += [f"{p.name} is not listed in meta.json, and is read all the same" for p in there if p not in listed]
    print(f"checksums: {len(listed)} files compared with meta.json; faults: {len(faults)}")
    for fault in faults:
        print(f"  {fault}; prepare the data again")
    try:
        tokenizer = from_meta(meta["tokenizer"])
    except ValueError as e:  # GPT-2's files may be neither cached nor within reach
        print(f"no text shown: {e}")
        return not faults
    for split, shards in paths.items():
        beginning = tokenizer.decode_bytes(read_tokens(shards[0])[:60].tolist())
        print(f"{split} begins: {beginning.decode(errors='replace')!r}")
    return not faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    with one_line_errors():
        sys.exit(not describe(args.folder))
