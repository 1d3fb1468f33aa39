"""torch.save's files with a checksum over every byte, and read with care: a file may be damaged, or a stranger's.

The checksum is the comment at the end of the zip archive, where torch, Python and nanoGPT do not mind it. torch's own
checksums (CRC-32) leave out what lies between the tensors, and torch.load does not look at them.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from deskgpt.system.untrusted import PLAIN, instructions

COMMENT = b"deskgpt sha256 "  # followed by 64 hex digits
COMMENT_BYTES = len(COMMENT) + 64
PIECE_BYTES = 1 << 20
MOST_PICKLE_BYTES = 4 << 20  # that of GPT-2 XL with AdamW has 0.3 MB; its objects take up to 70 times as much memory
MOST_BUILDS = 4
FOREIGN = "it holds more than tensors and plain values, which only its maker's code can read"

# What a checkpoint is pickled with. torch.load admits more, such as bytearray, which takes any amount of memory.
GLOBALS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
STORAGES: dict[str, torch.dtype] = {"Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16}
STORAGES |= {"Double": torch.float64, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16}
STORAGES |= {"Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool}
GLOBALS |= {f"torch {kind}Storage" for kind in STORAGES}
DTYPES = set(STORAGES.values())
OPCODES = PLAIN | {"GLOBAL", "REDUCE", "BUILD", "BINPERSID", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}


class HashingWriter:
    """Passes on what is written to a file, and computes its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        self.file.flush()


class Sparing:
    """A file to read in pieces: zipfile reads the list of an archive's entries in one, however long it is."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def read(self, n: int = -1) -> bytes:
        if n > MOST_PICKLE_BYTES:
            raise ValueError(f"its list of entries has {n:,} bytes, an absurd size")
        return self.file.read(n)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def write(content: Any, file: BinaryIO) -> None:
    """torch.save(content, file), followed by the checksum. Raises what torch.save does."""
    writer = HashingWriter(file)
    torch.save(content, writer)  # type: ignore[arg-type]
    comment = COMMENT + writer.sha256.hexdigest().encode()
    file.seek(-2, io.SEEK_END)  # the length of the comment, 0 so far, is the last field of the archive
    file.write(len(comment).to_bytes(2, "little") + comment)


def check(path: Path) -> bool:
    """Whether a file has a checksum. Raises ValueError with the reason where it is damaged or not such a file.

    Afterwards `load` runs no code in it, and the memory that it can take is bounded.
    """
    try:
        has_checksum = matches_checksum(path)
        with open(path, "rb") as raw, zipfile.ZipFile(Sparing(raw)) as file:
            check_pickle(file.read(pickle_of(file, path.stat().st_size)))
            damaged = None if has_checksum else file.testzip()
    except Exception as e:  # zip and pickle errors all differ
        raise ValueError(first_line(e)) from None
    if damaged:
        raise ValueError(f"the checksum of {damaged} does not match")
    return has_checksum


def load(path: Path) -> Any:
    """What a checked file holds, its tensors memory-mapped on the CPU. Raises ValueError with the reason."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_unicode(path))
    except Exception as e:  # pickle, zip and storage errors all differ
        raise ValueError(first_line(e)) from None


def is_unicode(path: Path) -> bool:
    """Whether torch can map the file: its C++ takes no name whose bytes Python could not decode (LC_ALL=C and "ö")."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def first_line(e: Exception) -> str:
    lines = str(e).strip().splitlines() or [type(e).__name__]
    return lines[0][:120]


def matches_checksum(path: Path) -> bool:
    """Whether path has a checksum, which then matches. Raises ValueError where it does not match."""
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END) - COMMENT_BYTES  # of the archive without its comment
        if size < 2:
            return False
        file.seek(size - 2)
        end = file.read()
        if end[: 2 + len(COMMENT)] != COMMENT_BYTES.to_bytes(2, "little") + COMMENT:
            return False
        file.seek(0)
        sha256 = hashlib.sha256()
        left = size - 2
        while left:
            piece = file.read(min(left, PIECE_BYTES))
            sha256.update(piece)
            left -= len(piece)
    sha256.update(bytes(2))
    if sha256.hexdigest().encode() != end[2 + len(COMMENT) :]:
        raise ValueError("its checksum does not match")
    return True


def pickle_of(file: zipfile.ZipFile, file_bytes: int) -> zipfile.ZipInfo:
    """The entry that holds the pickle. Raises ValueError where entries are not what torch.save writes."""
    entries = file.infolist()
    if any(e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size for e in entries):
        raise ValueError("it is compressed, which torch.save does not do")
    if sum(e.file_size for e in entries) > file_bytes:
        raise ValueError("its parts are larger than the file")
    names = [e.filename.lower() for e in entries]  # torch looks them up without regard to case
    pickles = [e for e in entries if e.filename.lower().endswith("data.pkl")]
    if len(set(names)) != len(names) or len(pickles) != 1:
        raise ValueError("it is not an archive of torch.save's")
    if pickles[0].file_size > MOST_PICKLE_BYTES:
        raise ValueError(f"{pickles[0].filename} has {pickles[0].file_size:,} bytes, an absurd size")
    return pickles[0]


def check_pickle(content: bytes) -> None:
    """Raises ValueError where unpickling would do anything else than make tensors and plain values.

    Nor can a small pickle make many copies of a large part of itself: an OrderedDict starts empty, and few of them get
    attributes (a state_dict has one, for its versions).
    """
    ordered_dicts = set()  # where the unpickler's memo holds the class
    expected = ""  # the next opcode after that class
    builds = 0
    for name, argument in instructions(content, OPCODES):
        if name == "GLOBAL" and argument not in GLOBALS:
            raise ValueError(FOREIGN)
        if name in ("BINPUT", "LONG_BINPUT"):
            if expected == "EMPTY_TUPLE":
                ordered_dicts.add(argument)
            else:
                ordered_dicts.discard(argument)
            continue
        builds += name == "BUILD"
        if expected not in ("", name) or builds > MOST_BUILDS:
            raise ValueError(FOREIGN)
        if expected == "EMPTY_TUPLE":
            expected = "REDUCE"
        elif argument == "collections OrderedDict" or (name.endswith("BINGET") and argument in ordered_dicts):
            expected = "EMPTY_TUPLE"
        else:
            expected = ""
