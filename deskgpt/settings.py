"""Check settings: type, range, whether it is a path.

A dataclass declares them:

    batch_size: AtLeast1 = 12                          # a number without a range must be at least 0
    beta1: Fraction = 0.9                              # 0 <= beta1 < 1
    port: Annotated[int, Range(0, below=2**16)] = 0    # any other range
    out_dir: FilePath = "out"                          # not empty; "~" becomes the home folder

`__post_init__` calls check_fields(self), which also serves code that reads no command line, and
then checks only rules about several settings together.
"""

import functools
import math
import os
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from deskgpt.errors import ConfigError, shortened


@dataclass(frozen=True)
class Range:
    """The numbers that a setting can have."""

    low: float = 0
    high: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and value < self.below

    def __str__(self) -> str:
        limits = {"at most": self.high, "below": self.below}
        finite = [f" and {words} {limit:,}" for words, limit in limits.items() if limit < math.inf]
        return f"at least {self.low:,}" + "".join(finite)


# Settings of earlier versions, which old config files have, and what there is in their place.
REMOVED_SETTINGS = {"fp8": "docs/hacks/fp8.patch trains the blocks' linear layers in 8 bits"}
IS_PATH = "path"
AtLeast1 = Annotated[int, Range(1)]
Fraction = Annotated[float, Range(0, below=1)]
FilePath = Annotated[str, IS_PATH]


@dataclass(frozen=True)
class Setting:
    """A field of a dataclass, as declared."""

    name: str
    types: tuple[Any, ...]  # all those of a union; () if there are choices
    choices: tuple[Any, ...]  # of a Literal
    default: Any
    range: Range
    is_path: bool

    @property
    def type_name(self) -> str:
        """Return the name of its type in messages and --help: int, float|None, adamw|muon."""
        names = ["None" if t is NoneType else t.__name__ for t in self.types]
        return "|".join([*map(str, self.choices), *names])

    @property
    def example(self) -> str:
        """Return how to write it, for messages: with its default, or with a value of its type."""
        examples = {int: "8", float: "3e-4", bool: "True", str: "text"}
        value = self.default if self.default not in (None, "") else examples[self.types[0]]
        return f"--{self.name}={value}"


@functools.cache
def settings_of(cls: type) -> dict[str, Setting]:
    """Return the settings that a dataclass declares, by name."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for field in fields(cls):
        kind, extras = hints[field.name], []
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        types = get_args(kind) if get_origin(kind) is UnionType else (kind,)
        if choices:
            types = ()
        allowed = next((extra for extra in extras if isinstance(extra, Range)), Range())
        found[field.name] = Setting(
            field.name, types, choices, field.default, allowed, IS_PATH in extras
        )
    return found


def check_fields(config: Any) -> None:
    """Check all fields of a dataclass's instance, and give them their types. Raises ConfigError."""
    cls: type = type(config)
    for name, setting in settings_of(cls).items():
        object.__setattr__(config, name, check(getattr(config, name), setting, name))


def check(value: Any, setting: Setting, where: str) -> Any:
    """Return `value` in the setting's type.

    Raises ConfigError, which begins with `where`: file, line and name.

    Floats such as 1e3 become ints if an int is needed, and ints become floats. Whole numbers must
    fit into 64 bits: neither torch nor NumPy can count with larger ones.
    """
    if setting.choices:
        # Compare types, too, since True == 1.
        if any(type(value) is type(choice) and value == choice for choice in setting.choices):
            return value
        raise ConfigError(
            f"{where}={shortened(value)} is not one of {', '.join(map(str, setting.choices))}"
        )
    if int in setting.types and type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and {int, float} & {*setting.types} and abs(value) >= 2**63:
        raise ConfigError(f"{where}={shortened(value)} must be below 2^63 in size")
    if type(value) is int and float in setting.types:
        value = float(value)
    if type(value) not in setting.types or (type(value) is float and not math.isfinite(value)):
        raise ConfigError(
            f"{where}={shortened(value)} is not {setting.type_name}; write it like "
            f"{setting.example}"
        )
    if type(value) in (int, float) and value not in setting.range:
        raise ConfigError(f"{where}={value} must be {setting.range}")
    if setting.is_path:
        value = os.path.expanduser(value)
        if value.startswith("~") or not (value or setting.default == ""):
            raise ConfigError(
                f"{where}={value} names no folder or file; write it like {setting.example}"
            )
    return value
