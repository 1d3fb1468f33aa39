"""An arm of a question: settings of train.py, and the code that runs, which may be changed by a patch or be a commit.

Each arm runs in a copy of the checkout as it was when the question was asked, with what is not committed. So the
checkout may change while a question runs overnight.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configurator import build, read_settings
from deskgpt.system.errors import ConfigError
from deskgpt.system.provenance import with_imports
from train import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
# What the question gives to each run, so that no arm can have it.
GIVEN = ("seed", "out_dir", "init_from", "eval_only", "dry_run", "plan_for", "world", "max_hours", "max_minutes")
NO_EFFECT = {"out_dir", "wandb_log", "wandb_project", "wandb_run_name", "log_interval", "keep_checkpoints"}
NO_EFFECT |= {"save_interval", "save_minutes", "save_async", "resume_changed", "sample_interval"}
NO_EFFECT |= {"dataset", "seed"}  # the last two are a part of a run's key themselves
UNUSED_S = 30 * 86400  # after which a copy of the checkout is removed
NUMBER = re.compile(r"\d+(\.\d*)?(e[+-]?\d+)?")

READ_SETTINGS = """
import json, sys
from configurator import build, read_settings
from dataclasses import asdict
from train import TrainConfig
from deskgpt.system.errors import one_line_errors
with one_line_errors():
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
    folder: Path  # of the copy of the checkout that it runs in
    code: str  # digest of the Python files that train.py is made of, there
    settings: dict[str, Any]  # all of them
    steps: int = 0  # at which its runs end
    known: float | None = None  # an arm that is a number has no runs

    @property
    def what(self) -> str:
        """The arm in an answer."""
        return self.text or "the config as it is"

    def learning_settings(self) -> dict[str, Any]:
        """The settings that affect what is learned."""
        return {name: value for name, value in self.settings.items() if name not in NO_EFFECT}


def make_arm(label: str, text: str, common: list[str], below: Path) -> Arm:
    """An arm from what the user wrote: settings, names of patches, commit:REV, or a number to compare with.

    common: arguments of all arms.
    below: where copies of the checkout lie. Raises ConfigError where something is not as it must be.
    """
    words = words_of(text)
    if len(words) == 1 and NUMBER.fullmatch(words[0]):
        return Arm(label, text, [], ROOT, words[0], settings_here(common), known=float(words[0]))
    own = [word for word in words if word.startswith("--")]
    commits = [word.removeprefix("commit:") for word in words if word.startswith("commit:")]
    configs = [word for word in words if word.endswith(".py")]
    patches = [Path(word) for word in words if word not in own + configs and not word.startswith("commit:")]
    if len(commits) > 1:
        raise ConfigError(f"--{label} {text}: one commit an arm")
    for name in GIVEN:
        if any(word.partition("=")[0] == f"--{name}" for word in own):
            raise ConfigError(f"--{label} {text}: bench/ask.py sets {name} itself; leave it out")
    for patch in patches:
        if not patch.is_file():
            raise ConfigError(
                f"--{label} {text}: {patch} is not a patch file here; write settings as --name=value, a patch as its "
                "path, a commit as commit:REV"
            )
    folder = snapshot(below, commits[0] if commits else None, patches)
    arguments = [in_copy(word, folder) for word in [*common, *configs]] + own
    settings = settings_there(arguments, folder) if patches or commits else settings_here(arguments)
    return Arm(label, text, arguments, folder, digest_of_code(folder), settings)


def words_of(text: str) -> list[str]:
    """The words of an arm, as a shell takes them apart. Raises ConfigError."""
    try:
        return shlex.split(text)
    except ValueError:
        raise ConfigError(f"{text}: a quotation mark has no second one") from None


def in_copy(word: str, folder: Path) -> str:
    """A config file of the checkout by its place there, so that a patch or commit may have its own; else its path."""
    if word.startswith("-"):
        return word
    path = Path(word).resolve()
    if path.is_relative_to(ROOT) and (folder / path.relative_to(ROOT)).exists():
        return path.relative_to(ROOT).as_posix()
    return str(path)


def settings_here(arguments: list[str]) -> dict[str, Any]:
    values = read_settings(TrainConfig, arguments)
    build(TrainConfig, values)
    return values


def settings_there(arguments: list[str], folder: Path) -> dict[str, Any]:
    """As the code in the folder reads them, which may have settings of its own."""
    command = [sys.executable, "-c", READ_SETTINGS, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
        raise ConfigError(f"{' '.join(arguments)}: {last.removeprefix('error: ')}")
    return dict(json.loads(done.stdout))


# ---- copies of the checkout ----------------------------------------------------------------------------------


def snapshot(below: Path, commit: str | None, patches: list[Path]) -> Path:
    """A copy of the checkout, or of a commit of it, with patches applied. Raises ConfigError where that fails.

    Removes copies that no question has used for a month.
    """
    below.mkdir(parents=True, exist_ok=True)
    for old in below.iterdir():
        with suppress(FileNotFoundError):  # another question that starts may rename or remove it
            if time.time() - old.stat().st_mtime > UNUSED_S:
                shutil.rmtree(old)
    staging = below / f"new-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir()
        if commit is None:
            copy_checkout(staging)
        else:
            copy_commit(commit, staging)
        for patch in patches:
            apply(patch, staging)
        to = below / digest_of_files(staging)
        if not to.exists():
            staging.rename(to)
        os.utime(to)
        return to
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def copy_checkout(to: Path) -> None:
    """The files that git knows or does not ignore; without git, the Python files that train.py needs."""
    listed = git("-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = [name for name in listed.stdout.split("\0") if name]
    if listed.returncode:
        names = [path.relative_to(ROOT).as_posix() for path in with_imports([ROOT / "train.py"], ROOT)]
        names += [path.relative_to(ROOT).as_posix() for path in (ROOT / "config").glob("*.py")]
    for name in names:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def copy_commit(commit: str, to: Path) -> None:
    archive = to / "commit.tar"
    done = git("-C", str(ROOT), "archive", f"--output={archive}", commit)
    if done.returncode:
        raise ConfigError(f"commit:{commit}: {last_line(done.stderr)}")
    shutil.unpack_archive(archive, to, filter="data")
    archive.unlink()


def apply(patch: Path, to: Path) -> None:
    done = git("apply", "--whitespace=nowarn", str(patch.resolve()), folder=to)
    if done.returncode:
        raise ConfigError(f"{patch} does not apply to this checkout: {last_line(done.stderr)}")


def git(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs git; where it is missing, as if it had failed. A repository above the folder is not taken for its own."""
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    try:
        return subprocess.run(["git", *arguments], cwd=folder, env=env, capture_output=True, text=True)
    except FileNotFoundError:
        return subprocess.CompletedProcess(arguments, 1, "", "git is not installed")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["failed"])[-1].removeprefix("error: ")


def digest_of_files(folder: Path) -> str:
    """Of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def digest_of_code(folder: Path) -> str:
    """Of train.py in a copy of the checkout and of the files that it imports: what a run's result depends on."""
    digest = hashlib.sha256()
    for path in sorted(with_imports([folder / "train.py"], folder)):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
