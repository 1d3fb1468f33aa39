"""The data that questions are judged on: a part of the training text that is set aside, so that val.bin stays unseen.

Whoever chooses among many settings by one validation split fits them to that split, and its loss no longer says what
the chosen model does with new text. So arms train on the training text without its last tenth and are judged by that.

Writes a folder of token files below the ledger's; shards that are not cut are links.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from data.token_files import open_masks, open_shards, read_meta, read_record, read_tokens, write_meta, write_tokens
from deskgpt.machine.files import file_sha256, new_folder

PART = 10  # of the training tokens, one in so many is set aside
MOST_TOKENS = 1 << 21  # set aside


def set_aside(folder: Path, below: Path) -> Path:
    """A folder, below `below`, with the training data of `folder`, whose last tokens are the validation split.

    Dialogues and other data with loss masks are returned as they are. Raises ValueError where a split is missing.
    """
    shards = open_shards(folder, "train")
    if read_record(folder).get("packed") or open_masks(folder, "train", shards):
        return folder
    to = below / f"{folder.name}-{fingerprint(folder)}"
    if (to / "meta.json").exists():
        return to
    below.mkdir(parents=True, exist_ok=True)
    sizes = [len(shard) for shard in shards]
    paths = [shard.path for shard in shards]
    with new_folder(to) as new:
        kept = sizes[-1] - min(sum(sizes) // PART, sizes[-1] // 2, MOST_TOKENS)
        for path in paths[:-1]:
            (new / path.name).symlink_to(path.resolve())
        last = read_tokens(paths[-1])
        write_tokens(new / paths[-1].name, last[:kept])
        write_tokens(new / "val.bin", last[kept:])
        listed = {path.name: file_entry(path) for path in sorted(new.glob("*.bin"))}
        write_meta(new, read_meta(folder) | {"files": listed, "source": f"{folder.name}, cut by bench/ask.py"})
    return to


def file_entry(path: Path) -> dict[str, object]:
    return {"tokens": len(read_tokens(path)), "sha256": file_sha256(path)}


def fingerprint(folder: Path) -> str:
    """Ten hex digits that tell data apart: of the token files' names, sizes and first million tokens."""
    facts = []
    for path in sorted(folder.glob("*.bin")):
        ids = read_tokens(path)
        facts.append([path.name, len(ids), hashlib.sha256(ids[: 1 << 20].tobytes()).hexdigest()])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:10]
