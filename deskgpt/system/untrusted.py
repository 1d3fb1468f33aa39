"""What files from strangers may hold: checks before a pickle is read, and before a record's values are used.

Whatever the content is, checking it takes bounded memory, runs no code, and raises nothing but ValueError.
"""

from __future__ import annotations

import pickletools
import reprlib
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import PureWindowsPath
from typing import Any

LARGEST_NUMBER = 1 << 53  # what JSON readers agree about

# What a pickle of dicts, lists, strings and numbers is made of. Left out is what imports or calls something, what takes
# memory before it is read (BYTEARRAY8), tuples (Python hashes nested ones without a limit to their depth), and what
# only Python 2 wrote.
PLAIN = {
    *("PROTO", "FRAME", "STOP", "MARK", "POP"),
    *("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("NONE", "NEWTRUE", "NEWFALSE"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
}

Fields = dict[str, Callable[[Any], bool]]  # what may be in a record: key to whether a value is right


def instructions(pickled: bytes, admitted: Set[str]) -> Iterator[tuple[str, Any]]:
    """The name and argument of each instruction of a pickle. Raises ValueError at one that is not admitted."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name not in admitted:
            raise ValueError(f"it asks for {opcode.name}, and only plain values are read")
        yield opcode.name, argument


def check_record(record: Any, fields: Fields, required: Iterable[str] = (), only_known: bool = False) -> None:
    """Raises ValueError where a record lacks a key, or has a wrong value, or an unknown key though only_known."""
    if not isinstance(record, dict):
        raise ValueError(f"{reprlib.repr(record)} is not a record")
    for key in required:
        if key not in record:
            raise ValueError(f"it has no {key}")
    for key, value in record.items():
        if key not in fields:
            if only_known:
                raise ValueError(f"it has an unknown key, {reprlib.repr(key)}")
        elif not fields[key](value):
            raise ValueError(f"{key}={reprlib.repr(value)} cannot be right")


def is_number(value: Any) -> bool:
    """Whether a value is a whole number that can count something."""
    return type(value) is int and 0 <= value < LARGEST_NUMBER  # True is an int too


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_local(dataset: Any) -> bool:
    """Whether a checkpoint's dataset names a folder of this machine. Windows logs in to the host of \\\\host\\share."""
    return isinstance(dataset, str) and not PureWindowsPath(dataset).drive.startswith("\\\\")
