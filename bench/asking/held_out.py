"""The data that questions are judged on: a part of the training text that is set aside, so that val.bin stays unseen.

Whoever chooses among many settings by one validation split fits them to that split, and its loss no longer says what
the chosen model does with new text. So arms train on the training text without its last tenth and are judged by that.

Writes a folder of token files below the ledger's; shards that are not cut are links.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from data.meta_files import read_record, write_meta
from data.token_files import open_masks, open_shards, read_meta, read_tokens, write_tokens
from deskgpt.system.files import file_sha256, new_folder

MOST_TOKENS = 1 << 21  # set aside, of the last tenth


def set_aside(folder: Path, below: Path) -> Path:
    """A folder, below `below`, with the training data of `folder` without its end, which is its validation split.

    Dialogues and other data with loss masks are returned as they are, since they cannot be cut. Raises ValueError where
    a split is missing.
    """
    shards = open_shards(folder, "train")
    if read_record(folder).get("packed") or open_masks(folder, "train", shards):
        return folder
    to = below / f"{folder.name}-{fingerprint(folder)}"
    if (to / "meta.json").exists():
        return to
    below.mkdir(parents=True, exist_ok=True)
    *whole, cut = [shard.path for shard in shards]
    with new_folder(to) as new:
        for path in whole:
            (new / path.name).symlink_to(path.resolve())
        last = read_tokens(cut)
        kept = len(last) - min(len(last) // 10, MOST_TOKENS)
        write_tokens(new / cut.name, last[:kept])
        write_tokens(new / "val.bin", last[kept:])
        files = sorted(new.glob("*.bin"))
        listed = {path.name: {"tokens": len(read_tokens(path)), "sha256": file_sha256(path)} for path in files}
        write_meta(new, read_meta(folder) | {"files": listed, "source": f"{folder.name}, cut by bench/ask.py"})
    return to


def val_tokens(folder: Path) -> int:
    return sum(len(shard) for shard in open_shards(folder, "val"))


def fingerprint(folder: Path) -> str:
    """Ten hex digits that tell data apart: of the token files' names, sizes and first million tokens."""
    files = []
    for path in sorted(folder.glob("*.bin")):
        ids = read_tokens(path)
        files.append([path.name, len(ids), hashlib.sha256(ids[: 1 << 20].tobytes()).hexdigest()])
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:10]
