"""Settings of a script: a dataclass's defaults < Python config files < `--key=value`, checked and typed.

    python train.py config/train_shakespeare_char.py --batch_size=8 --compile=False

A config file is Python that runs in a namespace of its own, which starts with the values so far. The names that it
assigns are settings. Names that start with `_`, modules, functions and classes are the file's own business.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from deskgpt.system.errors import ConfigError
from deskgpt.system.formatting import shortened

Config = TypeVar("Config")

# ---- reading settings ----------------------------------------------------------------------------------------


def configure(cls: type[Config], argv: list[str]) -> Config:
    """An instance of dataclass `cls` from its defaults, the config files in argv and its --key=value.

    Raises ConfigError, one line, for unknown names, wrong types and unreadable files. --help prints the settings and
    exits.
    """
    return build(cls, read_settings(cls, argv))


def build(cls: type[Config], values: Mapping[str, Any]) -> Config:
    """An instance of `cls`. Raises ConfigError if the dataclass's own checks refuse the values."""
    try:
        return cls(**values)
    except ValueError as e:
        raise ConfigError(str(e)) from None


def read_settings(cls: type, argv: list[str], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The value of every setting, by name, from defaults, config files and command line. Raises ConfigError.

    `cls` has not checked the values yet. `base` holds values to use instead of the defaults, such as those of the run
    that is resumed.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(cls))
        raise SystemExit(0)
    types = get_type_hints(cls)
    values = {f.name: f.default for f in fields(cls)}
    for name, value in (base or {}).items():
        values[name] = check(value, types[name], f"the resumed run's {name}")

    # Config files come first, wherever they stand among the arguments.
    for argument in argv:
        if not argument.startswith("-"):
            values |= read_config_file(argument, types, values)
    for argument in argv:
        if argument.startswith("-"):
            name, value = read_argument(argument, types)
            values[name] = value
    return values


def read_argument(argument: str, types: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, value) of `--name=value`; `--name` alone means True if the setting can be True. Raises ConfigError."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or not name:
        raise ConfigError(f"{argument}: settings are written --key=value")
    check_known(name, types, f"--{name}")
    kind = types[name]
    if not equals:
        if kind is not bool and True not in get_args(kind):
            raise ConfigError(f"--{name} needs a value: --{name}={example(kind)}")
        text = "True"
    return name, parse(text, kind, f"--{name}")


def read_config_file(path: str, types: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a Python config file assigns. Raises ConfigError with file:line.

    types: of all settings, by name. values: the settings so far, which the file can use.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such config file{similar_file(Path(path))}")
    try:
        result = runpy.run_path(path, init_globals=dict(values), run_name="config_file")
        tree = ast.parse(Path(path).read_bytes())
    except (Exception, SystemExit) as e:  # a file that exits would end the script without a word
        raise ConfigError(f"{path}:{line_of_error(e, path)}: {type(e).__name__}: {e}") from None

    line_of = {}  # the last assignment to each name
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            line_of[node.id] = node.lineno

    settings: dict[str, Any] = {}
    for name, value in result.items():
        if not isinstance(name, str) or name.startswith("_") or isinstance(value, ModuleType) or callable(value):
            continue
        where = f"{path}:{line_of.get(name, 1)}: {name}"
        check_known(name, types, where)
        settings[name] = check(value, types[name], where)
    return settings


def similar_file(path: Path) -> str:
    """A hint at the config file in the same folder whose name is most like this one; empty if none is like it."""
    stems = [p.stem for p in path.parent.glob("*.py")]
    similar = difflib.get_close_matches(path.stem, stems, n=1)
    if not similar:
        return ""
    return f"; did you mean {path.with_name(similar[0]).as_posix()}.py?"


def line_of_error(e: BaseException, path: str) -> int:
    """The line of the config file at which running it raised e."""
    if isinstance(e, SyntaxError):
        return e.lineno or 1
    lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
    return (lines[-1] if lines else None) or 1


# ---- checking values -----------------------------------------------------------------------------------------

# A value of each type, for messages.
EXAMPLES = {int: "8", float: "3e-4", bool: "True", str: "text", NoneType: "None"}


def check_known(name: str, types: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError if there is no such setting."""
    if name in types:
        return
    similar = difflib.get_close_matches(name, types, n=1)
    hint = f"did you mean {similar[0]}?" if similar else "--help lists the settings"
    raise ConfigError(f"{where} is not a setting; {hint}")


def parse(text: str, kind: Any, where: str) -> Any:
    """The value of type `kind` that `text`, from the command line, stands for. Raises ConfigError."""
    if get_origin(kind) is Literal:
        choices = {str(choice).lower(): choice for choice in get_args(kind)}
        return check(choices.get(text.lower(), text), kind, where)
    alternatives = alternatives_of(kind)
    if NoneType in alternatives and text in ("None", "none"):
        return None
    if str in alternatives:
        return text
    if text in ("true", "false"):
        text = text.capitalize()
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = text  # which check refuses, and shows
    return check(value, kind, where)


def check(value: Any, kind: Any, where: str) -> Any:
    """`value` as type `kind`. Raises ConfigError, which begins with `where`: the place and the name.

    A whole float is accepted for int, and an int for float. NaN and infinity are refused, and whole numbers that do
    not fit into 64 bits, which neither torch nor NumPy can count with.
    """
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if any(type(value) is type(choice) and value == choice for choice in choices):  # True is not 1
            return value
        raise ConfigError(f"{where}={shortened(value)} is not one of {', '.join(map(str, choices))}")
    alternatives = alternatives_of(kind)
    if int in alternatives and type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and (int in alternatives or float in alternatives) and abs(value) >= 2**63:
        raise ConfigError(f"{where}={shortened(value)} must be below 2^63 in size")
    if int not in alternatives and float in alternatives and type(value) is int:
        value = float(value)
    is_finite = type(value) is not float or math.isfinite(value)
    if type(value) in alternatives and is_finite:
        return value
    name = where.split()[-1].removeprefix("--")
    raise ConfigError(f"{where}={shortened(value)} is not {type_name(kind)}; write it like --{name}={example(kind)}")


def alternatives_of(kind: Any) -> tuple[Any, ...]:
    """The types that a union such as `float | None` allows; the type itself if it is not a union."""
    return get_args(kind) if get_origin(kind) is UnionType else (kind,)


def type_name(kind: Any) -> str:
    """How messages and --help call a type: int, float|None, adamw|muon."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return "|".join("None" if t is NoneType else t.__name__ for t in alternatives_of(kind))


def example(kind: Any) -> str:
    """A value of a type, for messages."""
    choices = get_args(kind)
    first = choices[0] if choices else kind
    return EXAMPLES.get(first, str(first))


# ---- --help --------------------------------------------------------------------------------------------------


def help_text(cls: type) -> str:
    """The script's docstring, and every setting with its type, its default and its comment from the source.

    The settings of `cls` itself come first, then those that it inherits from other dataclasses; each once.
    """
    types = get_type_hints(cls)
    defaults = {f.name: f.default for f in fields(cls)}
    script = sys.modules[cls.__module__]
    lines = [inspect.getdoc(script) or "", "", "settings, each as --name=value or in a config file:"]
    heading = ""
    for base in filter(is_dataclass, cls.__mro__):
        for group, name, comment in settings_in_source(base):
            if name not in defaults:
                continue
            if group != heading:
                lines += ["", f"  {group}"]
                heading = group
            default = f"{type_name(types[name])} = {defaults.pop(name)!r}"
            lines.append(f"    --{name:<28} {default:<24} {comment}".rstrip())
    return "\n".join(lines)


def settings_in_source(cls: type) -> Iterator[tuple[str, str, str]]:
    """(heading of its group, name, comment) of each setting that the source of `cls` itself declares, one a line.

    A comment line before a setting is the heading of a group.
    """
    heading = ""
    for line in inspect.getsource(cls).splitlines():
        if found := re.fullmatch(r" {4}# (.*)", line):
            heading = found[1]
        elif found := re.fullmatch(r" {4}(\w+): [^#]*(?:# (.*))?", line):
            yield heading, found[1], found[2] or ""
