"""What untrusted files may hold: checks before a record's values are used. They raise nothing but ValueError."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from pathlib import PureWindowsPath
from typing import Any

LARGEST_NUMBER = 1 << 53  # what JSON readers agree about
Fields = dict[str, Callable[[Any], bool]]  # what may be in a record: key to whether a value is right


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
            raise ValueError(f"{key}={' '.join(reprlib.repr(value).split())} cannot be right")


def is_number(value: Any) -> bool:
    """Whether a value is a whole number that can count something."""
    return type(value) is int and 0 <= value < LARGEST_NUMBER  # True is an int too


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_local(dataset: Any) -> bool:
    """Whether a checkpoint's dataset names a folder of this machine. Windows logs in to the host of \\\\host\\share."""
    return isinstance(dataset, str) and not PureWindowsPath(dataset).drive.startswith("\\\\")
