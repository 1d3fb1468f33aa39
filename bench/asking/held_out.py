"""The data that questions are judged on: a part of the training text that is set aside, so that val.bin stays unseen.

Whoever chooses among many settings by one validation split fits them to that split, and its loss no longer says what
the chosen model does with new text. So arms train on the training text without its last tenth and are judged by that.
A win is confirmed on the validation split itself, on an eighth of it that no question has seen.

Writes folders of token files below the ledger's; shards that are not cut are links.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from data.token_files import open_masks, open_shards, read_meta, read_record, read_tokens, write_meta, write_tokens
from deskgpt.machine.files import file_sha256, new_folder

PART = 10  # of the training tokens, one in so many is set aside
MOST_TOKENS = 1 << 21  # set aside; the eight parts of val are as long as val allows
PARTS_OF_VAL = 8


def set_aside(folder: Path, below: Path, part_of_val: int | None = None) -> Path:
    """A folder with the data of `folder`, judged on the last training tokens or on a part of val.bin (0 to 7).

    Dialogues and other data with loss masks are returned as they are. Raises ValueError where a split is missing.
    """
    shards = open_shards(folder, "train")
    if read_record(folder).get("packed") or open_masks(folder, "train", shards):
        return folder
    to = below / f"{folder.name}-{fingerprint(folder)}-{'chosen' if part_of_val is None else f'val{part_of_val}'}"
    if (to / "meta.json").exists():
        return to
    below.mkdir(parents=True, exist_ok=True)
    sizes = [len(shard) for shard in shards]
    paths = [shard.path for shard in shards]
    with new_folder(to) as new:
        if part_of_val is None:
            kept = sizes[-1] - min(sum(sizes) // PART, sizes[-1] // 2, MOST_TOKENS)
            link(paths[:-1], new)
            last = read_tokens(paths[-1])
            write_tokens(new / paths[-1].name, last[:kept])
            write_tokens(new / "val.bin", last[kept:])
        else:
            link(paths, new)
            val = read_tokens(open_shards(folder, "val")[0].path)
            size = len(val) // PARTS_OF_VAL
            write_tokens(new / "val.bin", val[part_of_val * size : (part_of_val + 1) * size])
        listed = {path.name: file_entry(path) for path in sorted(new.glob("*.bin"))}
        write_meta(new, read_meta(folder) | {"files": listed, "source": f"{folder.name}, cut by bench/ask.py"})
    return to


def link(paths: list[Path], folder: Path) -> None:
    for path in paths:
        (folder / path.name).symlink_to(path.resolve())


def file_entry(path: Path) -> dict[str, object]:
    return {"tokens": len(read_tokens(path)), "sha256": file_sha256(path)}


def fingerprint(folder: Path) -> str:
    """Ten hex digits that tell data apart: of the token files' names, sizes and first million tokens."""
    facts = []
    for path in sorted(folder.glob("*.bin")):
        ids = read_tokens(path)
        facts.append([path.name, len(ids), hashlib.sha256(ids[: 1 << 20].tobytes()).hexdigest()])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:10]
