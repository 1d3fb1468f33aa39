"""An arm of a question: settings of train.py, and the code that runs, which may be changed by a patch or be a commit.

Each arm runs in a copy of the checkout as it was when the question was asked, with what is not committed. So the
checkout may change while a question runs overnight.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configurator import build, read_settings
from deskgpt.system.errors import ConfigError
from train import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
# What the question gives to each run, so that no arm can have it.
GIVEN = ("seed", "out_dir", "init_from", "eval_only", "dry_run", "plan_for", "world", "max_hours", "max_minutes")
NO_EFFECT = {"out_dir", "wandb_log", "wandb_project", "wandb_run_name", "log_interval", "keep_checkpoints"}
NO_EFFECT |= {"save_interval", "save_minutes", "save_async", "resume_changed", "sample_interval"}
NO_EFFECT |= {"dataset", "seed"}  # these two are a part of a run's key themselves

READ_SETTINGS = """
import json, sys
from configurator import build, read_settings
from train import TrainConfig
settings = read_settings(TrainConfig, sys.argv[1:])
build(TrainConfig, settings)
print(json.dumps(settings))
"""


@dataclass
class Arm:
    """One of the things that are compared. Its label is a, b, c ..."""

    label: str
    text: str  # as the user wrote it; empty for the checkout as it is
    arguments: list[str]  # of train.py: configs and settings
    folder: Path  # the copy of the checkout that it runs in
    code: str  # digest of the Python files that train.py is made of, there
    settings: dict[str, Any]  # all of them

    @property
    def what(self) -> str:
        """The arm in an answer."""
        return self.text or "the config as it is"

    @property
    def steps(self) -> int:
        """At which its runs end."""
        return int(self.settings["max_iters"])

    def learning_settings(self) -> dict[str, Any]:
        """The settings that affect what is learned."""
        return {name: value for name, value in self.settings.items() if name not in NO_EFFECT}

    def give(self, name: str, value: Any) -> None:
        """Sets a setting of the arm after all others."""
        self.arguments = [*self.arguments, f"--{name}={value}"]
        self.settings = self.settings | {name: value}


def make_arm(label: str, text: str, common: list[str], below: Path) -> Arm:
    """An arm from what the user wrote: settings, configs, patches, commit:REV.

    common: arguments of all arms. below: the folder of copies of the checkout. Raises ConfigError.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        raise ConfigError(f"{text}: a quotation mark has no second one") from None
    own: list[str] = []
    configs: list[str] = []
    patches: list[Path] = []
    commit = None
    for word in words:
        if word.startswith("--"):
            if word[2:].partition("=")[0] in GIVEN:
                raise ConfigError(f"--{label} {text}: bench/ask.py sets this itself; leave {word} out")
            own.append(word)
        elif word.startswith("commit:"):
            commit = word.removeprefix("commit:")
        elif word.endswith(".py"):
            configs.append(word)
        elif Path(word).is_file():
            patches.append(Path(word))
        else:
            raise ConfigError(
                f"--{label} {text}: {word} is not a patch file here; write settings as --name=value, a patch as its "
                "path, a commit as commit:REV"
            )
    folder, code = snapshot(below, commit, tuple(patches))
    arguments = [in_copy(word, folder) for word in [*common, *configs]] + own
    settings = settings_of(arguments, folder if patches or commit else ROOT)
    return Arm(label, text, arguments, folder, code, settings)


def in_copy(word: str, folder: Path) -> str:
    """A config file of the checkout by its place there, so that a patch or commit may have its own; else its path."""
    path = Path(word).resolve()
    if word.startswith("-"):
        return word
    if path.is_relative_to(ROOT) and (folder / path.relative_to(ROOT)).exists():
        return path.relative_to(ROOT).as_posix()
    return str(path)


def settings_of(arguments: list[str], folder: Path) -> dict[str, Any]:
    """All settings, as the code in the folder reads them, which may have some of its own. Raises ConfigError."""
    if folder == ROOT:
        settings = read_settings(TrainConfig, arguments)
        build(TrainConfig, settings)
        return settings
    command = [sys.executable, "-c", READ_SETTINGS, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{' '.join(arguments)}: {last_line(done.stderr)}")
    return dict(json.loads(done.stdout))


# ---- copies of the checkout ----------------------------------------------------------------------------------


@functools.cache
def snapshot(below: Path, commit: str | None, patches: tuple[Path, ...]) -> tuple[Path, str]:
    """(a copy of the checkout or of a commit, with patches applied; the digest of what train.py is made of there)

    Made by git in an index of its own; files that git ignores are left out. Raises ConfigError where that fails.
    """
    below.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=below) as staging:
        index = str(Path(staging).resolve() / "index")
        # What the user wrote is a revision or refused: git never reads it as an option.
        revision = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit or 'HEAD'}^{{commit}}"]
        sha = git(*revision, index=index, what=f"commit:{commit or 'HEAD'} is not a commit of this checkout")
        git("read-tree", sha, index=index)
        if commit is None:
            git("add", "--all", ".", index=index)
        for patch in patches:
            apply = ["apply", "--cached", "--whitespace=nowarn", str(patch.resolve())]
            git(*apply, index=index, what=f"{patch} does not apply")
        to = below / git("write-tree", index=index)[:16]
        if not to.exists():
            git("checkout-index", "--all", f"--prefix={index}.code/", index=index)
            Path(f"{index}.code").rename(to)
    digest = hashlib.sha256()
    for path in sorted(code_of_training(to)):
        digest.update(path.relative_to(to).as_posix().encode() + b"\0" + path.read_bytes())
    return to, digest.hexdigest()[:16]


def code_of_training(root: Path) -> set[Path]:
    """train.py, and the files below root that it imports, directly or through others."""
    found: set[Path] = set()
    to_do = [root / "train.py"]
    while to_do:
        path = to_do.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            to_do += [root / f"{name.replace('.', '/')}.py" for name in names]
    return found


def git(*arguments: str, index: str, what: str = "no copy of the code can be made") -> str:
    """What git prints about this checkout. Raises ConfigError, which begins with `what`."""
    env = os.environ | {"GIT_INDEX_FILE": index}
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError(f"{what}: git is not installed") from None
    if done.returncode:
        raise ConfigError(f"{what}: {last_line(done.stderr)}")
    return done.stdout.strip()


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].removeprefix("error: ")
