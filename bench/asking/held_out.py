"""The data that questions are judged on: a part of the training text that is set aside, so that val.bin stays unseen.

Whoever chooses among many settings by one validation split fits them to that split, and its loss no longer says what
the chosen model does with new text. So arms train on the training text without its last tenth and are judged by that.
"""

from __future__ import annotations

from pathlib import Path

from bench.asking.ledger import digest
from data.meta_files import read_record, write_meta
from data.token_files import open_masks, open_shards, read_meta, read_tokens, write_tokens
from deskgpt.system.files import file_sha256

MOST_TOKENS = 1 << 21  # set aside, of the last tenth


def set_aside(folder: Path, to: Path) -> Path:
    """Write the training data of `folder` to a new folder, its end as the validation split. Return that folder.

    Shards that are not cut are links. Dialogues and other data with loss masks cannot be cut: their folder is returned
    as it is. Raises ValueError if a split is missing.
    """
    shards = open_shards(folder, "train")
    if read_record(folder).get("packed") or open_masks(folder, "train", shards):
        return folder
    to.mkdir(parents=True)
    *uncut, last = [shard.path for shard in shards]
    for path in uncut:
        (to / path.name).symlink_to(path.resolve())
    tokens = read_tokens(last)
    kept = len(tokens) - min(len(tokens) // 10, MOST_TOKENS)
    write_tokens(to / last.name, tokens[:kept])
    write_tokens(to / "val.bin", tokens[kept:])
    write_meta(to, read_meta(folder) | {"source": f"{folder.name}, cut by bench/ask.py"})
    return to


def data_digest(folder: Path) -> str:
    """Return a digest of the content of all files of a folder of token files."""
    paths = sorted([*folder.glob("*.bin"), *folder.glob("*.mask")])
    return digest([[path.name, file_sha256(path)] for path in paths])
