"""Checkpoints of sharded models: a folder with a file of rows from each rank, which any layout of ranks can read.

    ckpt-00001000/shard-00001-model-00001-of-00001.safetensors ...   tensors, by torch.distributed.checkpoint
    ckpt-00001000/checkpoint.json   everything else
    ckpt-00001000/manifest.json     size and SHA-256 of each file, written last

A folder is written under another name, gets its own in one step, and is never changed. Reading it runs no code.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from deskgpt.system.files import file_sha256, new_folder, read_small, write_atomically
from deskgpt.system.terminal import reason

# torch.distributed.checkpoint takes a part of a second to import: only where a folder is read or written.

MANIFEST = "manifest.json"
REST = "checkpoint.json"
FORMAT = 1
MOST_BYTES = 16 << 20  # of each JSON file: a manifest of 10,000 ranks has 2 MB, a tokenizer's merges as much
NAME = re.compile(r"ckpt-(\d{8,})(?:-(\d+))?(\.pt)?")  # and of older files of runs that are not sharded

T = TypeVar("T")


# ---- names ---------------------------------------------------------------------------------------------------


def order_of(path: Path) -> tuple[int, int]:
    """The step in a checkpoint's name, and which one of that step it is."""
    found = NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 1)) if found else (-1, 0)


def is_folder(path: Path) -> bool:
    """Whether path is a checkpoint's folder, whole or damaged, and not a folder with checkpoints in it."""
    found = NAME.fullmatch(path.name)
    return (found is not None and found[3] is None and path.is_dir()) or (path / MANIFEST).is_file()


def new_path(out_dir: Path, step: int) -> Path:
    """The folder for a checkpoint of this step. A run that went back to a step may save it again."""
    path = out_dir / f"ckpt-{step:08}"
    n = 1
    while path.exists():
        n += 1
        path = out_dir / f"ckpt-{step:08}-{n}"
    return path


# ---- writing -------------------------------------------------------------------------------------------------


def agreed(group: ProcessGroup | None, call: Callable[[], T]) -> list[T]:
    """What call() returns on each rank of the group, all of which must call this; group None: on this rank alone.

    Where it fails on one rank, all raise the error of the first one.
    """
    if group is None:
        return [call()]
    value = None
    error: Exception | None = None
    try:
        value = call()
    except (OSError, ValueError) as e:
        error = e
    except Exception as e:  # a defect, which must not leave the others waiting
        error = RuntimeError(f"{type(e).__name__}: {e}")
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, (value, error), group)
    for _, failed in found:
        if failed is not None:
            raise failed
    return [value for value, _ in found]


def write(tensors: dict[str, Tensor], rest: dict[str, Any], path: Path, group: ProcessGroup | None = None) -> None:
    """Writes the folder `path`, durable when this returns, all of it or nothing.

    All ranks of the group call this with their rows of the same tensors. The first rank's `path` and `rest`, which
    JSON must be able to hold, count. Raises OSError or ValueError, the same on all ranks.
    """
    is_first = group is None or distributed.get_rank(group) == 0
    with ExitStack() as stack:  # removes what was written when an error passes
        (folder, *_) = agreed(group, lambda: stack.enter_context(new_folder(path)) if is_first else Path())
        files: dict[str, list[Any]] = {}
        for of_rank in agreed(group, lambda: write_rows(tensors, folder, group)):
            files |= of_rank

        def finish() -> None:
            if not is_first:
                return
            write_atomically(folder / REST, json.dumps(rest).encode())
            files[REST] = size_and_sha256(folder / REST)
            write_atomically(folder / MANIFEST, json.dumps({"format": FORMAT, "files": files}).encode())
            stack.close()  # makes it durable and gives it its name

        agreed(group, finish)


def write_rows(tensors: dict[str, Tensor], folder: Path, group: ProcessGroup | None) -> dict[str, list[Any]]:
    """Writes this rank's rows of all tensors. Returns its file by name, with size and SHA-256; none without rows."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        # Without a group torch warns that there is none. With one, warnings stay as they are: threads share them.
        with warnings.catch_warnings(action="ignore") if group is None else ExitStack():
            save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as e:  # which is no Exception
        raise first_failure(e) from None
    rank = 0 if group is None else distributed.get_rank(group)
    return {file.name: size_and_sha256(file) for file in folder.glob(f"shard-{rank + 1:05}-*")}


def first_failure(e: Any) -> Exception:
    """The error of the first rank that had one, of torch's CheckpointException; not its traceback."""
    failure = e.failures[min(e.failures)][0]
    if isinstance(failure, OSError):
        return OSError(failure.errno, failure.strerror)
    return ValueError(f"{type(failure).__name__}: {reason(failure)}")


def size_and_sha256(file: Path) -> list[Any]:
    return [file.stat().st_size, file_sha256(file)]


# ---- reading -------------------------------------------------------------------------------------------------


def check(folder: Path, checksums: bool = True) -> None:
    """Raises ValueError, with the reason, where files of a folder are missing or are not what was written.

    checksums: whether those of tensors are compared; that of checkpoint.json always is.
    """
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"it has no {MANIFEST}: its writing was broken off, or the file is lost")
    try:
        manifest = json.loads(read_small(folder / MANIFEST, MOST_BYTES))
        files = {str(name): (int(size), str(sha256)) for name, (size, sha256) in manifest["files"].items()}
        is_known = manifest["format"] == FORMAT and REST in files
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        is_known = False
    if not is_known:
        raise ValueError(f"its {MANIFEST} is damaged, or of another version")
    more = {file.name for file in folder.glob("*.safetensors")} - files.keys()
    if more:
        raise ValueError(f"its {MANIFEST} does not list {min(more)[:80]}")
    for name, (size, sha256) in sorted(files.items()):
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ValueError(f"its {name[:80]!r} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"its {name[:80]} has {path.stat().st_size:,} bytes, not {size:,}")
        if (checksums or name == REST) and file_sha256(path) != sha256:
            raise ValueError(f"the checksum of its {name[:80]} does not match")


def rest_of(folder: Path) -> Any:
    """What checkpoint.json holds. Raises OSError or ValueError."""
    try:
        return json.loads(read_small(folder / REST, MOST_BYTES))
    except RecursionError:
        raise ValueError(f"its {REST} is nested too deep") from None


def is_best(folder: Path) -> bool:
    """Whether it was saved as the best one; False where that cannot be read."""
    try:
        return bool(rest_of(folder)["best"])
    except (OSError, ValueError, TypeError, KeyError):
        return False


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by name, whole and without their numbers, on the meta device. Raises ValueError."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    try:
        found: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        return {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
            for name, tensor in found.items()
        }
    except Exception as e:  # those of safetensors, JSON and torch all differ
        raise ValueError(f"its tensors cannot be read: {reason(e)}") from None


def read(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fills tensors, whole or sharded, with those of the same names. Each rank reads its own rows.

    Raises ValueError where they are not there in these shapes.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings(action="ignore"):
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as e:
        raise ValueError(f"{folder} cannot be read: {first_failure(e)}") from None
