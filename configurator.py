"""Settings of a script: a dataclass's defaults < Python config files < `--key=value`, checked and typed.

    python train.py config/train_shakespeare_char.py --batch_size=8 --compile=False

A config file is Python, run in a namespace of its own that starts with the values so far. What it assigns are
settings; names that start with `_`, modules, functions and classes are its own business.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import runpy
import sys
import tokenize
import traceback
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from deskgpt.errors import ConfigError

Config = TypeVar("Config")

EXAMPLES = {int: "8", float: "3e-4", bool: "True", str: "text", NoneType: "None"}


def configure(cls: type[Config], argv: list[str]) -> Config:
    """An instance of dataclass `cls` from its defaults, the config files in argv and its --key=value.

    Raises ConfigError, one line, for unknown names, wrong types and unreadable files. Exits after printing the
    settings on --help.
    """
    return build(cls, read_settings(cls, argv))


def build(cls: type[Config], values: Mapping[str, Any]) -> Config:
    """An instance of `cls`; ConfigError where the dataclass's own checks refuse the values."""
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as e:
        raise ConfigError(str(e)) from None


def read_settings(cls: type, argv: list[str], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `configure` makes its instance from, by name, before `cls` has checked ranges. Raises ConfigError.

    `base` holds values that stand in for the defaults, such as a checkpoint's settings.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(cls))
        raise SystemExit(0)
    types = get_type_hints(cls)
    values = {f.name: f.default for f in fields(cls)}
    values |= {name: check(value, types[name], f"what is resumed has {name}") for name, value in (base or {}).items()}
    overrides: dict[str, Any] = {}
    for arg in argv:
        if not arg.startswith("-"):
            values |= read_config_file(arg, types, values)
            continue
        key, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or not key:
            raise ConfigError(f"{arg}: settings are written --key=value")
        check_known(key, types, f"--{key}")
        if not equals and types[key] is not bool and True not in get_args(types[key]):
            raise ConfigError(f"--{key} needs a value: --{key}={example(types[key])}")
        overrides[key] = parse(text if equals else "True", types[key], f"--{key}")
    return values | overrides


def read_config_file(path: str, types: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a Python config file assigns, starting from `values`. Raises ConfigError with file:line."""
    if not Path(path).is_file():
        near = difflib.get_close_matches(Path(path).stem, (p.stem for p in Path(path).parent.glob("*.py")), n=1)
        hint = f"; did you mean {Path(path).with_name(near[0]).as_posix()}.py?" if near else ""
        raise ConfigError(f"{path}: no such config file{hint}")
    try:
        result = runpy.run_path(path, init_globals=dict(values), run_name="config_file")
        tree = ast.parse(Path(path).read_bytes())
    except Exception as e:
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        line = (e.lineno or 1) if isinstance(e, SyntaxError) else lines[-1] if lines else 1
        raise ConfigError(f"{path}:{line}: {type(e).__name__}: {e}") from None
    lineno = {n.id: n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    out: dict[str, Any] = {}
    for name, value in result.items():
        if name.startswith("_") or isinstance(value, ModuleType) or callable(value):
            continue
        where = f"{path}:{lineno.get(name, 1)}: {name}"
        check_known(name, types, where)
        out[name] = check(value, types[name], where)
    return out


def check_known(name: str, types: Mapping[str, Any], where: str) -> None:
    if name not in types:
        near = difflib.get_close_matches(name, types, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists the settings"
        raise ConfigError(f"{where} is not a setting; {hint}")


def parse(text: str, kind: Any, where: str) -> Any:
    """The value of type `kind` that command-line text stands for."""
    options = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if NoneType in options and text in ("None", "none"):
        return None
    if get_origin(kind) is Literal:
        spelled = {str(v).lower() if isinstance(v, bool) else v: v for v in get_args(kind)}
        return check(spelled.get(text.lower() if text in ("True", "False") else text, text), kind, where)
    if str in options:
        return check(text, kind, where)
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    return check(value, kind, where)


def check(value: Any, kind: Any, where: str) -> Any:
    """`value` as type `kind`; whole floats serve as int and ints as float. Raises ConfigError."""
    if get_origin(kind) is Literal:
        if value in get_args(kind) and type(value) in map(type, get_args(kind)):
            return value
        raise ConfigError(f"{where}={value!r} is none of {', '.join(map(str, get_args(kind)))}")
    for option in get_args(kind) if get_origin(kind) is UnionType else (kind,):
        if type(value) is option and not (option is float and not math.isfinite(value)):
            return value
        if option is int and type(value) is float and value.is_integer():
            return int(value)
        if option is float and type(value) is int:
            return float(value)
    raise ConfigError(
        f"{where}={value!r} is not {type_name(kind)}; write it like --{where.split()[-1].lstrip('-')}={example(kind)}"
    )


def type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return "|".join("None" if t is NoneType else t.__name__ for t in (get_args(kind) or (kind,)))


def example(kind: Any) -> str:
    first = get_args(kind)[0] if get_args(kind) else kind
    return EXAMPLES.get(first, str(first))


def help_text(cls: type) -> str:
    """The script's docstring and every setting with type, default and the trailing comment from the source."""
    types = get_type_hints(cls)
    source = inspect.getsource(cls).splitlines(keepends=True)
    comments, lines = {}, iter(source)
    heading: dict[int, str] = {}
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if token.line.strip().startswith("#"):
                heading[token.start[0]] = text
            else:
                comments[token.line.split(":")[0].strip()] = text
    module = sys.modules[cls.__module__]
    out = [inspect.getdoc(module) or "", "", "settings, each as --name=value or in a config file:"]
    names = {f.name: f for f in fields(cls)}
    for number, line in enumerate(source, 1):
        if number in heading:
            out.append(f"\n  {heading[number]}")
        name = line.split(":")[0].strip()
        if name in names:
            default = f"{type_name(types[name])} = {names[name].default!r}"
            out.append(f"    --{name:<28} {default:<24} {comments.get(name, '')}".rstrip())
    return "\n".join(out)
