"""A checkpoint as one file: torch.save with a SHA-256 of its bytes, read by torch.load(weights_only=True).

The checksum is the comment at the end of the zip archive, which torch, Python and nanoGPT ignore. weights_only runs no
code from the file. A crafted pickle can still take memory: only the pickle's size is limited.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deskgpt.system.files import file_sha256, replacing

COMMENT = b"deskgpt sha256 "  # followed by 64 hex digits
COMMENT_BYTES = len(COMMENT) + 64
MOST_PICKLE_BYTES = 4 << 20  # that of GPT-2 XL with AdamW has 0.3 MB
NOT_CHECKPOINTS = {
    b"": "it is empty: fetch it again",
    b"version https://git-lfs": "it is a pointer of git-LFS, not the file: git lfs pull",
    b"<": "it is an HTML page, perhaps an error of the download: fetch the file again",
}
# NumPy's numbers, which forks of nanoGPT keep as losses.
scalar = np._core.multiarray.scalar  # type: ignore[attr-defined]
NUMPY = [scalar, (scalar, "numpy.core.multiarray.scalar"), np.dtype, *map(type, map(np.dtype, "fdeil?"))]


def write(content: Any, path: Path) -> None:
    """Writes torch.save(content) with its checksum, in one step. Raises OSError."""
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
    """Raises ValueError where torch.load(weights_only=True) would not read back what torch.save writes."""
    file = io.BytesIO()
    try:
        torch.save(tree_map_only(Tensor, lambda x: torch.empty(0, dtype=x.dtype), content), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as e:  # pickle's errors and torch's all differ
        raise ValueError(reason(e)) from None


def check(path: Path, checksums: bool = True) -> bool:
    """Whether a file has a checksum, which is compared if `checksums`. Raises ValueError for damage; OSError."""
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait, and a device might never end
        raise ValueError("it is not a plain file but a pipe, a device or a folder")
    with open(path, "rb") as file:
        head = file.read(100).lstrip()
    for start, what in NOT_CHECKPOINTS.items():
        if head.startswith(start) and bool(head) == bool(start):
            raise ValueError(what)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            has_checksum = archive.comment.startswith(COMMENT)
            damaged = archive.testzip() if checksums and not has_checksum else None
    except Exception as e:  # zip's errors all differ
        raise ValueError(f"it is cut short, damaged, or not torch.save's: {reason(e)}") from None
    if damaged or (checksums and has_checksum and not matches_checksum(path)):
        raise ValueError("its checksum does not match")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed, which torch.save does not do")
    if any(e.filename.endswith("data.pkl") and e.file_size > MOST_PICKLE_BYTES for e in entries):
        raise ValueError(f"its data.pkl has more than {MOST_PICKLE_BYTES:,} bytes, an absurd size")
    return has_checksum


def matches_checksum(path: Path) -> bool:
    """Whether the comment of a file that has one is the checksum of all before it."""
    content = np.memmap(path, np.uint8, "r")
    end = 2 + COMMENT_BYTES
    sha256 = hashlib.sha256(content[:-end].data)
    sha256.update(bytes(2))  # the length of no comment
    comment = COMMENT + sha256.hexdigest().encode()
    return content[-end:].tobytes() == COMMENT_BYTES.to_bytes(2, "little") + comment


def load(path: Path) -> Any:
    """What a checked file holds, its tensors memory-mapped on the CPU. Raises ValueError with the reason."""
    # torch's C++ maps no file whose name has bytes that Python could not decode (LC_ALL=C and "ö").
    is_unicode = not any("\udc80" <= char <= "\udcff" for char in str(path))
    try:
        with torch.serialization.safe_globals(NUMPY):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_unicode)
    except Exception as e:  # pickle, zip and storage errors all differ
        raise ValueError(reason(e)) from None


def reason(e: Exception) -> str:
    """What an error says, in one line, without torch's advice to run the file's code."""
    text = " ".join(str(e).split()) or type(e).__name__
    if isinstance(e, pickle.UnpicklingError) and "eights only" in text:
        found = re.search(r"(?:GLOBAL|global:?|class) ([\w.]+\.[\w.]+)", text)
        which = f" ({found[1]})" if found else ""
        return f"it holds more than tensors and plain values{which}, which only its maker's code can read"
    return text[:120]
