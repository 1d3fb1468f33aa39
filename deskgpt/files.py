"""Files that hold either their old content or the new one, never a part; checksums; one process in
a folder.

Also the folder of files that save work on this machine, ~/.cache/deskgpt or
XDG_CACHE_HOME/deskgpt: peaks.json and compiled kernels. Nothing depends on them: if one is missing,
damaged or another user's, or cannot be written, it is made again.
"""

import functools
import hashlib
import os
import reprlib
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PureWindowsPath
from typing import Any, BinaryIO

TEMPORARY = ".tmp"  # the end of a file's name while it is written


def temporary_name(path: Path) -> Path:
    """Return a new name beside path.

    It is random: another host may have a process with the same number.
    """
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` in one step when the block ends well.

    Until then it has a temporary name beside `path`, so several processes may write `path` at once.
    If the block or the disk fails, the new file is removed, `path` keeps its old content, and the
    error passes through unchanged.
    """
    tmp = temporary_name(path)
    try:
        with open(tmp, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the new name on an empty file
        os.replace(tmp, path)
    finally:
        with suppress(OSError):  # it has its name, or the folder is missing
            tmp.unlink()


def remove_leftovers(folder: Path, *names: str) -> None:
    """Remove the temporary files of these names that killed processes have left."""
    for name in names:
        for path in folder.glob(f"{name}.*{TEMPORARY}"):
            with suppress(OSError):  # a folder
                path.unlink()


def write_atomically(path: Path, content: bytes | bytearray) -> None:
    """Write path, and make its folder if need be.

    Raises OSError, one line, with the old content unharmed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content)
    except OSError as e:
        raise cannot_write(path, e) from None


def cannot_write(path: Path, e: OSError) -> OSError:
    """Return the error to raise for a file or folder that cannot be written."""
    return OSError(
        f"cannot write {path}: {e.strerror or e}; free some disk space or choose another folder"
    )


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder with a temporary name to write into, which becomes `path` when the block ends
    well.

    If the block or the disk fails, it is removed. Raises OSError if it cannot be written,
    ValueError if `path` is used.
    """
    check_unused(path)
    tmp = temporary_name(path)
    try:
        tmp.mkdir()
        yield tmp
        if path.is_dir():
            path.rmdir()  # it is empty; Windows renames no folder to an existing one
        os.rename(tmp, path)
    except OSError as e:
        raise cannot_write(path, e) from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def check_unused(path: Path) -> None:
    """Raise ValueError if a new folder cannot become `path`: something is there, or its parent is
    missing.
    """
    is_empty = path.is_dir() and not any(path.iterdir())
    is_taken = path.is_symlink() or (path.exists() and not is_empty)
    if is_taken or not path.parent.is_dir():
        raise ValueError(
            f"{path} must be a new or empty folder, in a folder that exists: choose another name"
        )


def read_small(path: Path, at_most: int) -> bytes:
    """Return the content of a file that has no reason to be larger than `at_most` bytes.

    Raises ValueError if it is larger, or a pipe, device or folder, which might never end; OSError.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > at_most:
        raise ValueError(f"{path.name} is not a file of at most {at_most:,} bytes")
    return path.read_bytes()


def copy_file(path: Path, to: Path) -> None:
    """Copy path to a file of its own: damage to one leaves the other alone. Raises OSError."""
    with open(path, "rb") as source, replacing(to) as target:
        shutil.copyfileobj(source, target)


def sync_folder(folder: Path) -> None:
    """Make renames in folder durable, if its file system can: SMB, sshfs and others cannot, and a
    note says so once.
    """
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        note_once(
            f"the file system of {folder} cannot flush folders ({e.strerror}): a power cut "
            "may lose a rename"
        )


@functools.cache
def note_once(message: str) -> None:
    """Print a note on stderr, the first time in this process, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {message}", file=sys.stderr)


def sha256(content: Any) -> str:
    """Return the SHA-256 of bytes or of an array's bytes, in hex digits."""
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex digits. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- untrusted values ----------------------------------------------------------------------------

LARGEST_NUMBER = 1 << 53  # JSON readers agree about integers up to here
Fields = dict[str, Callable[[Any], bool]]  # by key: whether a value is allowed


def check_record(record: Any, fields: Fields, required: Iterable[str] = ()) -> None:
    """Raise ValueError if a record lacks a required key, or has a value that is not allowed."""
    if not isinstance(record, dict):
        raise ValueError(f"{reprlib.repr(record)} is not a record")
    for key in required:
        if key not in record:
            raise ValueError(f"it has no {key}")
    for key, value in record.items():
        if key in fields and not fields[key](value):
            raise ValueError(f"{key}={' '.join(reprlib.repr(value).split())} cannot be right")


def is_number(value: Any) -> bool:
    """Return whether a value is a whole number that can count something."""
    return type(value) is int and 0 <= value < LARGEST_NUMBER  # True is an int too


def is_local(dataset: Any) -> bool:
    """Return whether a checkpoint's dataset is on this machine.

    Windows logs in to the host of \\\\host\\share.
    """
    return isinstance(dataset, str) and not PureWindowsPath(dataset).drive.startswith("\\\\")


# ---- one process in a folder ---------------------------------------------------------------------

# A file server keeps the lock of a host that is gone for so long; NFS has 90 seconds.
RESTART_S = 100.0


@contextmanager
def locked_folder(folder: Path, name: str = "", wait_s: float = 0.0) -> Iterator[None]:
    """Make the folder if need be, and hold its lock of this name during the block.

    The lock is the system's and ends with its process. wait_s: how long another process may take to
    leave. Raises ValueError if one stays, OSError if the folder cannot be written. On a
    file system without locks a note says so once.
    """
    # tasks.py reads this file before any package is installed.
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f".lock{name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if has_locks(folder):
            lock.acquire(timeout=wait_s, poll_interval=0.3)
        else:
            note_once(
                f"the file system of {folder} has no locks: see to it that only one run is there"
            )
        if hasattr(os, "O_DIRECTORY"):  # Windows moves no folder in which a file is open
            # While it is open, no other folder gets its number.
            _locked[folder] = os.open(folder, os.O_RDONLY)
    except Timeout:
        raise ValueError(
            f"{folder} is in use by another process: wait for it, stop it, or choose another folder"
        ) from None
    except OSError as e:
        raise cannot_write(folder, e) from None
    try:
        yield
    finally:
        with suppress(OSError, ValueError):  # Windows removes no open file
            check_not_replaced(folder)
            os.unlink(lock.lock_file)
        lock.release()
        if folder in _locked:
            os.close(_locked.pop(folder))


_locked: dict[Path, int] = {}  # open folders of this process's locks


def check_not_replaced(folder: Path) -> None:
    """Raise ValueError if a folder that this process has locked was removed or renamed.

    Another run may have begun in its place: call this before writing there.
    """
    if folder not in _locked:
        return
    try:
        is_there = os.path.samestat(os.fstat(_locked[folder]), folder.stat())
    except (FileNotFoundError, NotADirectoryError):
        is_there = False
    except OSError:  # a file server does not answer; writing will say so
        return
    if not is_there:
        raise ValueError(
            f"{folder} was removed or renamed while this run was in it: the run ends, and nothing "
            "more is written; to go on from its last checkpoint, resume it where that is now"
        )


def has_locks(folder: Path) -> bool:
    """Return whether files in this folder can be locked: network file systems refuse with many
    errors.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    with tempfile.TemporaryFile(dir=folder) as probe:
        try:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


# ---- files that save work on this machine --------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of all these files, made if need be: in the temporary folder if the home
    cannot be used.

    A path that is not absolute, such as "~/cache", is ignored, as XDG's specification asks.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        path = (caches if caches.is_absolute() else Path.home() / ".cache") / "deskgpt"
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    user = os.getuid() if hasattr(os, "getuid") else "user"
    path = Path(tempfile.gettempdir(), f"deskgpt-{user}")
    with suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
    return path


def is_trusted(path: Path) -> bool:
    """Return whether a file and its folder belong to this user, nobody else may write there, and it
    is no link.
    """
    if path.is_symlink() or not path.is_file():
        return False
    if not hasattr(os, "getuid"):  # Windows: the home is the user's
        return True
    found = [path.stat(), path.parent.stat()]
    return all(s.st_uid == os.getuid() and not s.st_mode & stat.S_IWOTH for s in found)


def untrusted_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that a user must type again to have them in a resumed one.

    wandb_log sends data away, and Windows logs in to the host that a path names.
    """
    return {
        name: value
        for name, value in settings.items()
        if (name == "wandb_log" and value is not False)
        or (name == "dataset" and not is_local(value))
    }
