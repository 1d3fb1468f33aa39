"""The shards of a sharded run's checkpoint: a folder with a file of rows from each rank, which any layout can read.

    shards-00001000-1a2b3c4d/shard-00001-model-00001-of-00001.safetensors ...   tensors, by torch.distributed.checkpoint

ckpt.pt names the folder, with size and SHA-256 of each file; a folder that no checkpoint names is removed. The format
is safetensors: torch.distributed.checkpoint's own one has a pickle, which runs code when it is read.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from deskgpt.compute.sharding import is_dtensor, local, rows_of
from deskgpt.system.files import file_sha256, sync_folder
from deskgpt.system.terminal import reason

# torch.distributed.checkpoint takes a part of a second to import, so only functions that read or write import it.

NAME = re.compile(r"shards-[0-9]{8,}-[0-9a-f]{8}")

T = TypeVar("T")


def agreed(group: ProcessGroup | None, call: Callable[[], T]) -> list[T]:
    """Return what call() returns on each rank of the group, all of which must call this; group None: on this one alone.

    If it fails on one rank, all raise the error of the first one.
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


def write(tensors: dict[str, Tensor], folder: Path, group: ProcessGroup | None = None) -> dict[str, list[Any]]:
    """Write the ranks' rows of the same tensors into a new folder; return each file's size and SHA-256.

    All ranks of the group call this. The files are durable when it returns. Raises OSError or ValueError on all ranks.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    rank = 0 if group is None else distributed.get_rank(group)
    agreed(group, lambda: folder.mkdir() if rank == 0 else None)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        # Without a group torch warns that there is none. With one, warnings stay as they are: threads share them.
        with warnings.catch_warnings(action="ignore") if group is None else ExitStack():
            save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as e:  # which is no Exception, and is raised on all ranks
        raise first_failure(e) from None

    def make_durable() -> dict[str, list[Any]]:
        found = {}
        for file in folder.glob(f"shard-{rank + 1:05}-*"):
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
            found[file.name] = [file.stat().st_size, file_sha256(file)]
        sync_folder(folder)
        sync_folder(folder.parent)
        return found

    return {name: file for of_rank in agreed(group, make_durable) for name, file in of_rank.items()}


def first_failure(e: Any) -> Exception:
    """Return the error of the first rank that had one, from torch's CheckpointException, without its traceback."""
    failure = e.failures[min(e.failures)][0]
    if isinstance(failure, OSError):
        return OSError(failure.errno, failure.strerror)
    return ValueError(f"{type(failure).__name__}: {reason(failure)}")


def check(folder: Path, files: dict[str, Any], checksums: bool) -> int:
    """Return the size of all files. Raises ValueError with the reason if one is missing or not what was written."""
    total = 0
    for name, (size, sha256) in sorted(files.items()):
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ValueError(f"its {folder.name}/{name[:80]} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"its {folder.name}/{name[:80]} has {path.stat().st_size:,} bytes, not {size:,}")
        if checksums and file_sha256(path) != sha256:
            raise ValueError(f"the checksum of its {folder.name}/{name[:80]} does not match")
        total += size
    return total


def read(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors, full or sharded, with those of the same names. Each rank reads its own rows.

    Raises ValueError if they are not there in these shapes.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings(action="ignore"):
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as e:
        raise ValueError(f"{folder} cannot be read: {first_failure(e)}") from None


@torch.no_grad()
def fill(tensors: dict[str, Tensor], saved: dict[str, Tensor], folder: Path | None) -> None:
    """Copy saved tensors into those of the same names, full or sharded; from the folder's shards unless it is None.

    Each rank reads its own rows, and no rank waits for another. Raises ValueError if they cannot be read.
    """
    if folder is not None:
        read(tensors, folder)
        return
    for name, tensor in tensors.items():
        source = saved[name]
        if is_dtensor(tensor) and not is_dtensor(source):
            source = rows_of(source, tensor)
        local(tensor).copy_(local(source))
