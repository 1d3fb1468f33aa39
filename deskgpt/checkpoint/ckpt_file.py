"""A checkpoint as one file: torch.save with a SHA-256 of its bytes, read by torch.load(weights_only=True).

The checksum is the comment at the end of the zip archive, which torch, Python and nanoGPT ignore. weights_only runs no
code from the file. Numbers are read rather than memory-mapped: a file that is cut while it is mapped ends the process.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import stat
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from deskgpt.system import terminal
from deskgpt.system.files import file_sha256, replacing

COMMENT = b"deskgpt sha256 "  # followed by 64 hex digits
COMMENT_BYTES = len(COMMENT) + 64
MOST_PICKLE_BYTES = 4 << 20  # that of GPT-2 XL with AdamW has 0.3 MB
NO_ARCHIVE = "it is not of torch.save, but cut short, empty, an error page or a git-LFS pointer: fetch it again"
OFFSET = "_checkpoint_offset"  # what torch.load to the device meta gives a storage: where its numbers are in the file
PLAIN = (Tensor, nn.Parameter)  # not those of sharded models
# NumPy's numbers, which forks of nanoGPT keep as losses.
scalar = np._core.multiarray.scalar  # type: ignore[attr-defined]
NUMPY = [scalar, (scalar, "numpy.core.multiarray.scalar"), np.dtype, *map(type, map(np.dtype, "fdeil?"))]


def write(content: Any, path: Path) -> None:
    """Write torch.save(content) with its checksum, in one step. Raises OSError."""
    with replacing(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as e:  # torch wraps a failed write
            raise e.__context__ if isinstance(e.__context__, OSError) else OSError(None, reason(e)) from None
        file.flush()
        comment = COMMENT + file_sha256(Path(file.name)).encode()
        file.seek(-2, io.SEEK_END)  # the length of the comment, 0 so far, is the last field of the archive
        file.write(COMMENT_BYTES.to_bytes(2, "little") + comment)


def refuse_unreadable(content: Any) -> None:
    """Raise ValueError if `load` would not read back what `write` writes."""
    file = io.BytesIO()
    try:
        refuse_odd_tensors(content)
        torch.save(tree_map_only(Tensor, lambda x: torch.empty(0, dtype=x.dtype), content), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as e:  # pickle's errors and torch's all differ
        raise ValueError(reason(e)) from None


def refuse_odd_tensors(content: Any, plain: tuple[type, ...] = ()) -> None:
    """Raise ValueError for a tensor that is not dense numbers, or not of a `plain` class if any are given.

    RecursionError if content holds itself.
    """
    for x in (x for x in tree_leaves(content) if isinstance(x, Tensor)):
        if x.is_meta and x.layout == torch.strided and getattr(x.untyped_storage(), OFFSET) is None:
            raise ValueError("its numbers are in shards of an older version, whose export.py --to=ckpt.pt joins them")
        is_dense = x.layout == torch.strided and not (x.is_nested or x.is_quantized)
        if is_dense and type(x) in PLAIN:
            is_dense = x.nbytes <= x.untyped_storage().nbytes()  # no number that is expanded to many
        if not is_dense or (plain and type(x) not in plain):
            raise ValueError("it holds a tensor that is sparse, nested, quantized, expanded or sharded")


def load(path: Path, checksums: bool = True, numbers: bool = True) -> Any:
    """Return what a file holds, its tensors on the CPU. Raises ValueError with the reason if it is damaged; OSError.

    checksums: whether to compare the file's checksum. Its structure is always checked. numbers: False leaves tensors
    with their shapes alone, except single numbers, which takes no time and no memory.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait, and a device might never end
        raise ValueError("it is not a plain file but a pipe, a device or a folder")
    with open(path, "rb") as file:
        before = os.fstat(file.fileno())
        has_checksum = check(file, checksums)
        file.seek(0)
        try:
            with torch.serialization.safe_globals(NUMPY):
                found = torch.load(file, map_location="cpu" if numbers else "meta", weights_only=True)
            refuse_odd_tensors(found, PLAIN)
            if not numbers:
                found = tree_map_only(Tensor, lambda x: x if x.dim() else single_number(x, file), found)
        except Exception as e:  # pickle, zip and storage errors all differ
            raise ValueError(reason(e)) from None
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ValueError("it was changed while it was read")
    if not isinstance(found, dict):
        raise ValueError("it holds no dictionary")
    if "format" in found and not has_checksum:
        raise ValueError("its checksum is missing")
    return found


def single_number(x: Tensor, file: BinaryIO) -> Tensor:
    """Return the number of a tensor () on the device meta, as its file has it."""
    file.seek(getattr(x.untyped_storage(), OFFSET) + x.storage_offset() * x.itemsize)
    return torch.frombuffer(bytearray(file.read(x.itemsize)), dtype=x.dtype).reshape(())


def check(file: BinaryIO, checksums: bool) -> bool:
    """Return whether a file has a checksum, which is compared if `checksums`. Raises ValueError for damage; OSError."""
    try:
        archive = zipfile.ZipFile(file)
    except Exception:  # zip's errors all differ
        raise ValueError(NO_ARCHIVE) from None
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED:  # to unpack it may take hours
            raise ValueError("it is compressed, which torch.save does not do")
        if entry.filename.endswith("data.pkl") and entry.file_size > MOST_PICKLE_BYTES:
            raise ValueError(f"its data.pkl has more than {MOST_PICKLE_BYTES:,} bytes, an absurd size")
    has_checksum = archive.comment.startswith(COMMENT)
    try:
        is_intact = not checksums or (matches_checksum(file) if has_checksum else archive.testzip() is None)
    except Exception:  # zip's errors all differ
        is_intact = False
    if not is_intact:
        raise ValueError("its checksum does not match")
    return has_checksum


def matches_checksum(file: BinaryIO) -> bool:
    """Return whether the comment of a file that has one is the checksum of all before it."""
    n_bytes = file.seek(-2 - COMMENT_BYTES, io.SEEK_END)
    end = file.read()
    file.seek(0)
    sha256 = hashlib.sha256()
    while block := file.read(min(1 << 20, n_bytes - file.tell())):
        sha256.update(block)
    sha256.update(bytes(2))  # the length of no comment
    return end == COMMENT_BYTES.to_bytes(2, "little") + COMMENT + sha256.hexdigest().encode()


def reason(e: Exception) -> str:
    """Return what an error says, in one line, without torch's advice to run the file's code."""
    if isinstance(e, pickle.UnpicklingError) and "eights only" in str(e):
        found = re.search(r"(?:GLOBAL|global:?|class)\s([\w.]+\.[\w.]+)", str(e))
        which = f" ({found[1]})" if found else ""
        return f"it holds more than tensors and plain values{which}, which only its maker's code can read"
    return terminal.reason(e)
