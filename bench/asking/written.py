"""Questions that are written down: a TOML file whose keys are options of bench/ask.py, and a table of settings.

    belief = "A lower learning rate converges better."
    config = "config/train_shakespeare_char_cpu.py"
    vary = "learning_rate=3e-4,1e-3"
    instead = "Try three rates a factor of 3 apart."

    [settings]
    max_iters = 400

So there is one way to ask, and a file says no more than a command line can.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

from configurator import read_argument
from deskgpt.system.errors import ConfigError
from train import TrainConfig


def spelled_out(argv: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The command line with the words of its TOML file in place of the file's name, first, so that the rest wins.

    parser: of the options. Raises ConfigError, one line with the file and the remedy.
    """
    files = [word for word in argv if word.endswith(".toml") and not word.startswith("-")]
    if len(files) > 1:
        raise ConfigError(f"{' '.join(files)}: ask one question at a time")
    rest = [word for word in argv if word not in files]
    return [word for file in files for word in words_of(file, parser)] + rest


def words_of(file: str, parser: argparse.ArgumentParser) -> list[str]:
    """The words of the command line that the file stands for. Raises ConfigError."""
    try:
        asked = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{file}: {e.strerror}; bench/questions has files to ask, and to begin with") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{file}: {e}; write it as the files of bench/questions are written") from None
    configs = asked.pop("config", [])
    configs = [configs] if isinstance(configs, str) else configs
    settings = asked.pop("settings", {})
    try:
        if not isinstance(configs, list) or not all(isinstance(name, str) for name in configs):
            raise ConfigError('config: write config = "config/x.py", or a list of such names')
        if not isinstance(settings, dict):
            raise ConfigError("settings: make it a table, [settings], with a line for each")
        options = [word(name, value) for name, value in asked.items() if value is not False]
        for unknown in parser.parse_known_args(options)[1]:
            raise ConfigError(f"{unknown} is no option of bench/ask.py; settings of train.py go below [settings]")
        common = [word(name, value) for name, value in settings.items()]
        for setting in common:
            read_argument(setting, TrainConfig)
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from None
    return [*configs, *options, *common]


def word(name: str, value: Any) -> str:
    """A line of the file as it stands on the command line. Raises ConfigError."""
    if not isinstance(value, (str, int, float)):
        raise ConfigError(f"{name} = {value}: write a text in quotes, a number, true or false")
    return f"--{name}" if value is True else f"--{name}={value}"
