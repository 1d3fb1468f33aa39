"""Settings of a script: a dataclass's defaults < Python config files < `--key=value`, checked and
typed.

    python train.py config/train_shakespeare_char.py --batch_size=8 --compile=False

A config file is Python that runs in a namespace of its own, which starts with the values so far.
The names that it assigns are settings. Names that start with `_`, modules, functions and classes
are ignored. Each value is checked by deskgpt/settings.py, as the dataclass says. Settings of
earlier versions, which the dataclass lists in a class attribute `retired`, have no effect; one line
says so, and what there is in their place.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import runpy
import sys
import traceback
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, TypeVar

from deskgpt.errors import ConfigError
from deskgpt.files import note_once
from deskgpt.settings import Setting, check, settings_of

Config = TypeVar("Config")
HELP = {"-h", "--help"}

# ---- reading settings ----------------------------------------------------------------------------


def configure(cls: type[Config], argv: list[str]) -> Config:
    """Return an instance of dataclass `cls` from its defaults, the config files in argv and its
    --key=value.

    Raises ConfigError, one line, for unknown names, wrong types and unreadable files. --help prints
    the settings and exits.
    """
    return build(cls, read_settings(cls, argv))


def build(cls: type[Config], values: Mapping[str, Any]) -> Config:
    """Return an instance of `cls`.

    Raises ConfigError if the dataclass's own checks refuse the values.
    """
    try:
        return cls(**values)
    except ValueError as e:
        raise ConfigError(str(e)) from None


def read_settings(
    cls: type, argv: list[str], base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the value of every setting, by name, from defaults, config files and command line.

    Raises ConfigError.

    base: values to use instead of the defaults, such as those of the run that is resumed; a path
    may be empty.
    """
    if HELP & {*argv}:
        print(help_text(cls))
        raise SystemExit(0)
    settings = settings_of(cls)
    values = {name: setting.default for name, setting in settings.items()}
    for name, value in (base or {}).items():
        is_empty_path = settings[name].is_path and isinstance(value, str) and not value
        values[name] = (
            "" if is_empty_path else check(value, settings[name], f"the resumed run's {name}")
        )

    # Config files come first, wherever they stand among the arguments.
    for argument in argv:
        if not argument.startswith("-"):
            values |= read_config_file(argument, cls, values)
    for argument in argv:
        if argument.startswith("-") and not is_retired(
            argument.removeprefix("--").partition("=")[0], cls
        ):
            name, value = read_argument(argument, cls)
            values[name] = value
    return values


def is_retired(name: str, cls: type) -> bool:
    """Return whether `cls` had this setting in an earlier version; then print that once."""
    retired: dict[str, str] = getattr(cls, "retired", {})
    if name in retired:
        note_once(": ".join(filter(None, (f"{name} is no longer used", retired[name]))))
    return name in retired


def read_argument(argument: str, cls: type) -> tuple[str, Any]:
    """Return (name, value) of `--name=value`; `--name` alone means True if the setting can be True.

    Raises ConfigError.
    """
    settings = settings_of(cls)
    name, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or not name:
        raise ConfigError(f"{argument}: settings are written --key=value")
    check_known(name, settings, f"--{name}")
    setting = settings[name]
    if not equals:
        if bool not in setting.types and True not in setting.choices:
            raise ConfigError(f"--{name} needs a value: {setting.example}")
        text = "True"
    return name, check(parse(text, setting), setting, f"--{name}")


def parse(text: str, setting: Setting) -> Any:
    """Return the value that `text`, from the command line, stands for; the text itself if it stands
    for none.
    """
    if setting.choices:
        return {str(choice).lower(): choice for choice in setting.choices}.get(text.lower(), text)
    if NoneType in setting.types and text in ("None", "none"):
        return None
    if str in setting.types:
        return text
    if text in ("true", "false"):
        text = text.capitalize()
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


# ---- config files --------------------------------------------------------------------------------


def read_config_file(path: str, cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a Python config file assigns. Raises ConfigError with file:line.

    values: the settings so far, which the file can use.
    """
    known = settings_of(cls)
    if not Path(path).is_file():
        similar = difflib.get_close_matches(path, map(str, Path(path).parent.glob("*.py")), n=1)
        hint = f"did you mean {similar[0]}?" if similar else "settings are written --key=value"
        raise ConfigError(f"{path!r} is not a config file; {hint}")
    line_of = {}  # the last assignment to each name
    try:
        tree = ast.parse(Path(path).read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                line_of[node.id] = node.lineno
        for node in tree.body:
            # As in YAML: Python forgets it
            if isinstance(node, ast.AnnAssign) and node.value is None:
                name, value = ast.unparse(node.target), ast.unparse(node.annotation)
                raise ConfigError(
                    f"{path}:{node.lineno}: {name}: {value} sets nothing; write {name} = {value}"
                )
        result = runpy.run_path(path, init_globals=dict(values), run_name="config_file")
    except ConfigError:
        raise
    except (Exception, SystemExit) as e:  # a file that exits would end the script without a word
        raise ConfigError(
            f"{path}:{line_of_error(e, path)}: {type(e).__name__}: {e}; {HOW_TO_WRITE}"
        ) from None

    settings: dict[str, Any] = {}
    for name, value in result.items():
        is_own = (
            not isinstance(name, str)
            or name.startswith("_")
            or isinstance(value, ModuleType)
            or callable(value)
        )
        if is_own or is_retired(name, cls):
            continue
        where = f"{path}:{line_of.get(name, 1)}: {name}"
        check_known(name, known, where)
        settings[name] = check(value, known[name], where)
    return settings


HOW_TO_WRITE = "config files are Python: batch_size = 8"


def line_of_error(e: BaseException, path: str) -> int:
    """Return the line of the config file at which running it raised e."""
    if isinstance(e, SyntaxError):
        return e.lineno or 1
    lines = [
        frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path
    ]
    return (lines[-1] if lines else None) or 1


def check_known(name: str, settings: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if there is no such setting."""
    if name in settings:
        return
    similar = difflib.get_close_matches(name, settings, n=1)
    hint = f"did you mean {similar[0]}?" if similar else "--help lists the settings"
    raise ConfigError(f"{where} is not a setting; {hint}")


# ---- --help --------------------------------------------------------------------------------------


def help_text(cls: type) -> str:
    """Return the script's docstring, and every setting with its type, default and comment from the
    source.

    Settings that `cls` inherits come first: those of the model.
    """
    settings = settings_of(cls)
    lines = [
        inspect.getdoc(sys.modules[cls.__module__]) or "",
        "",
        "settings, each as --name=value or in a config file:",
    ]
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        for line in inspect.getsource(base).splitlines():
            if heading := re.fullmatch(r" {4}# (.*)", line):
                lines += ["", f"  {heading[1]}"]
            declared = re.fullmatch(r" {4}(\w+): [^#]*(?:# (.*))?", line)
            if declared and declared[1] in settings:  # no class attribute
                setting = settings[declared[1]]
                left = f"    --{setting.name} {setting.type_name} = {setting.default!r}"
                lines.append(f"{left:<46}  {declared[2] or ''}")
    return "\n".join(lines)
