"""Settings of a script: a dataclass's defaults < Python config files < `--key=value`, checked and
typed.

    python train.py config/train_shakespeare_char.py --batch_size=8 --compile=False

A config file is Python that runs in a namespace of its own, which starts with the values so far.
The names that it assigns are settings. Names that start with `_`, modules, functions and classes
are ignored. Each value is checked by deskgpt/settings.py, as the dataclass says. Settings of
earlier versions, which the dataclass lists in a class attribute `retired`, have no effect; one line
says so, and what there is in their place.
"""

import ast
import inspect
import re
import runpy
import sys
import traceback
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from deskgpt.errors import ConfigError, did_you_mean
from deskgpt.files import note_once
from deskgpt.settings import Setting, check, settings_of

Config = TypeVar("Config")
HELP = {"-h", "--help"}
# The names of our settings in other programs. A name that is spelled alike may mean another thing.
OTHER_NAMES = {
    "activation_checkpoint": "checkpointing gradient_checkpointing",
    "batch_size": "bs mini_batch micro_batch",
    "block_size": "context_length context ctx n_ctx seq_len seq_length sequence_length max_length",
    "dataset": "data_dir data_path",
    "device": "gpu gpus cuda cpu",
    "dtype": "precision fp16 bf16 amp",
    "eval_interval": "eval_every eval_steps save_every save_interval",
    "grad_clip": "clip_grad max_grad_norm",
    "gradient_accumulation_steps": "accum grad_accum accumulation accumulation_steps",
    "init_from": "resume load",
    "learning_rate": "lr",
    "max_iters": "steps num_steps n_steps iterations epoch epochs n_epochs num_epochs max_epochs",
    "max_minutes": "time max_time",
    "max_new_tokens": "n_tokens tokens max_tokens length max_length",
    "n_embd": "hidden_size hidden d_model dim embed_dim embedding_size",
    "n_head": "heads num_heads num_attention_heads",
    "n_layer": "layers num_layers num_hidden_layers",
    "num_samples": "n num",
    "optimizer": "opt",
    "out_dir": "save_dir output ckpt checkpoint model",
    "start": "prompt text input",
    "temperature": "temp greedy",
    "top_k": "k",
    "weight_decay": "wd",
}

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
        setting = settings[name]
        if not (setting.is_path and value == ""):
            value = check(value, setting, f"the resumed run's {name}")
        values[name] = value

    # Config files come first, wherever they stand among the arguments.
    for argument in argv:
        if not argument.startswith("-"):
            values |= read_config_file(argument, cls, values)
    for argument in argv:
        if argument.startswith("-"):
            values |= read_argument(argument, cls)
    return values


def read_argument(argument: str, cls: type) -> dict[str, Any]:
    """Return the value of `--name=value` by its name, or nothing if an earlier version had it.

    `--name` alone means True if the setting can be True. Raises ConfigError.
    """
    option, equals, text = argument.partition("=")
    name = option.removeprefix("--")
    if name in ("", option):
        raise ConfigError(f"{argument}: settings are written --key=value")
    if not is_known(name, cls, option):
        return {}
    setting = settings_of(cls)[name]
    if not equals:
        if bool not in setting.types and True not in setting.choices:
            raise ConfigError(f"{option} needs a value: {setting.example}")
        text = "True"
    return {name: check(parse(text, setting), setting, option)}


def is_known(name: str, cls: type, where: str) -> bool:
    """Return whether `cls` has this setting; print a note once if an earlier version had it.

    Raises ConfigError if there never was one.
    """
    if name in settings_of(cls):
        return True
    retired: dict[str, str] = getattr(cls, "retired", {})
    if name not in retired:
        hint = did_you_mean(name, settings_of(cls), "--help lists the settings")
        meant = [ours for ours in settings_of(cls) if name in OTHER_NAMES.get(ours, "").split()]
        negated = re.sub("^no[-_]", "", name)
        if name == "vocab_size":
            hint = "the tokenizer of the data has it"
        elif meant:
            hint = f"did you mean {meant[0]}?"
        elif negated in settings_of(cls):
            hint = f"write --{negated}=False"
        raise ConfigError(f"{where} is not a setting; {hint}")
    note_once(f"{name} is no longer used: {retired[name]}")
    return False


def parse(text: str, setting: Setting) -> Any:
    """Return the value that `text`, from the command line, stands for; the text itself if it stands
    for none.
    """
    for choice in setting.choices:
        if text.lower() == str(choice).lower():
            return choice
    if setting.choices or str in setting.types:
        return text
    if text in ("none", "true", "false"):
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
    if not Path(path).is_file():
        files = map(str, Path(path).parent.glob("*.py"))
        hint = did_you_mean(path, files, "settings are written --key=value")
        if Path(path, "ckpt.pt").exists() and "out_dir" in settings_of(cls):
            hint = f"for the run in this folder write --out_dir={path}"
        raise ConfigError(f"{path!r} is not a config file; {hint}")
    try:
        tree = ast.parse(Path(path).read_bytes())
        result = runpy.run_path(path, init_globals=dict(values), run_name="config_file")
    except (Exception, SystemExit) as e:  # a file that exits would end the script without a word
        frames = traceback.extract_tb(e.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        line = lines[-1] if lines else getattr(e, "lineno", 0)
        raise ConfigError(
            f"{path}:{line or 1}: {type(e).__name__}: {e}; config files are Python: batch_size = 8"
        ) from None

    line_of = {}  # the last assignment to each name
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            line_of[node.id] = node.lineno
    for node in tree.body:
        # `name: 8`, as in YAML, is an annotation to Python, which forgets the value.
        if isinstance(node, ast.AnnAssign) and node.value is None:
            text = ast.unparse(node)
            remedy = text.replace(":", " =", 1)
            raise ConfigError(f"{path}:{node.lineno}: {text} sets nothing; write {remedy}")
    settings = {}
    for name, value in result.items():
        if name.startswith("_") or isinstance(value, ModuleType) or callable(value):
            continue
        where = f"{path}:{line_of.get(name, 1)}: {name}"
        if is_known(name, cls, where):
            settings[name] = check(value, settings_of(cls)[name], where)
    return settings


# ---- --help --------------------------------------------------------------------------------------


def help_text(cls: type) -> str:
    """Return the script's docstring, and every setting with its type, default and comment from the
    source.

    Settings that `cls` inherits come first: those of the model.
    """
    about = inspect.getdoc(sys.modules[cls.__module__])
    lines = [f"{about}\n\nsettings, each as --name=value or in a config file:"]
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        for line in inspect.getsource(base).splitlines():
            if heading := re.fullmatch(r" {4}# (.*)", line):
                lines.append(f"\n  {heading[1]}")
            declared = re.fullmatch(r" {4}(\w+): [^#]*(?:# (.*))?", line)
            if declared and declared[1] in settings_of(cls):  # no class attribute
                setting = settings_of(cls)[declared[1]]
                left = f"    --{setting.name} {setting.type_name} = {setting.default!r}"
                lines.append(f"{left:<46}  {declared[2] or ''}")
    return "\n".join(lines)
