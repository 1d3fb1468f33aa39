"""Files that are either whole or as they were: written through a temporary name, compared by checksum."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces path when the block ends well."""
    tmp = path.with_name(path.name + ".tmp")
    try:
        with open(tmp, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except BaseException:
        with suppress(OSError):
            tmp.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes | bytearray) -> None:
    """Writes path through a temporary file, so that it holds the old content or the new, never a part."""
    tmp = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(tmp, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except OSError as e:
        with suppress(OSError):  # where the folder itself is none
            tmp.unlink(missing_ok=True)
        raise OSError(
            f"cannot write {path}: {e.strerror or e}; free some disk space or choose another folder"
        ) from None


def sha256(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def link_or_copy(path: Path, as_path: Path) -> None:
    """Makes as_path the same content as path: by a hard link, which costs no space, else by a copy."""
    tmp = as_path.with_name(as_path.name + ".tmp")
    tmp.unlink(missing_ok=True)
    try:
        os.link(path, tmp)
    except OSError:  # FAT and some network file systems have no hard links
        shutil.copyfile(path, tmp)
    os.replace(tmp, as_path)


def sync_folder(folder: Path) -> None:
    """Makes renames in folder durable; a no-op where folders cannot be opened (Windows)."""
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)
