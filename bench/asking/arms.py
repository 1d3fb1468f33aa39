"""An arm of a question: settings of train.py, and the code that runs: this checkout's, a patched
one or a commit.

Each arm has a git worktree of its own, made anew when the question is asked and removed when it
ends. So you can keep working in the checkout while a question runs overnight.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskgpt.device import code_digest
from deskgpt.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
# Every run has these, so that it ends at its last step and sends nothing. A commit may lack some.
TO_THE_END = {"max_minutes": 0.0, "max_hours": 0.0, "patience": 0, "sample_interval": 0}
TO_THE_END |= dict.fromkeys(("eval_only", "dry_run", "wandb_log"), False)
# The question gives these to each run, so an arm cannot have them.
GIVEN = {"seed", "out_dir", "dataset", "init_from", "device"}
GIVEN |= {"eval_interval", "eval_iters", "eval_tokens", *TO_THE_END}
# Without hooks, and also if the user has no name.
GIT = f"git -c user.name=ask.py -c user.email=ask@localhost -c core.hooksPath={os.devnull}".split()

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
    """One of the two ways to train that are compared. Its label is a or b."""

    label: str
    text: str  # as the user wrote it
    folder: Path  # the worktree that it runs in
    code: str  # digest of the code there
    settings: dict[str, Any]  # all of them, as that code reads them

    def identity(self) -> list[Any]:
        """Return code and settings: all that its results depend on, besides data, seed and
        machine.
        """
        others = dict.fromkeys(("dataset", "seed", "out_dir"))
        return [self.code, self.settings | others]


def make_arm(label: str, text: str, common: list[str], below: Path) -> Arm:
    """Return an arm from what the user wrote: settings, configs, patches, commit:REV.

    common: arguments of both arms. below: the folder for its worktree. Raises ConfigError.
    """
    what = f"--{label} {text}"
    try:
        words = shlex.split(text)
    except ValueError:
        raise ConfigError(f"{what}: a quotation mark has no second one") from None
    arguments = list(common)
    patches = []
    commit = ""
    for word in words:
        if word.removeprefix("--").partition("=")[0] in GIVEN:
            raise ConfigError(f"{what}: bench/ask.py sets this itself; leave {word} out")
        if word.startswith("commit:"):
            commit = word.removeprefix("commit:")
        elif word.startswith("--") or word.endswith(".py"):
            arguments.append(word)
        else:
            patches.append(word)
    folder = below / label
    code = check_out(folder, commit, patches)
    # Settings are read by the code in the worktree, from its own configs, or from others' by path.
    command = [sys.executable, "-c", READ_SETTINGS]
    for word in arguments:
        is_there = word.startswith("-") or (folder / word).exists()
        command.append(word if is_there else os.path.abspath(word))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{what}: {last_line(done.stderr)}")
    settings = json.loads(last_line(done.stdout))
    return Arm(label, text or "the config as it is", folder, code, settings)


# ---- worktrees -----------------------------------------------------------------------------------


@contextmanager
def folder_for_worktrees(below: Path) -> Iterator[Path]:
    """Give a new folder below `below`, which is removed at the end with all worktrees in it."""
    try:
        with tempfile.TemporaryDirectory(
            prefix="question-", dir=below, ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder).resolve()
    finally:
        git("worktree", "prune")


def check_out(folder: Path, commit: str, patches: list[str]) -> str:
    """Make a worktree of a commit, or if "" of this checkout with its changes, and apply patches.

    Return the code's digest.

    New files count from `git add` on. Raises ConfigError if git cannot do it.
    """
    # What the user wrote is a revision or an error: git never reads it as an option.
    what = f"commit:{commit} is not a commit of this checkout"
    revision = f"{commit or 'HEAD'}^{{commit}}"
    sha = git("rev-parse", "--verify", "--quiet", "--end-of-options", revision, what=what)
    if not commit:
        # Refreshes git's index: without, `stash create` fails if a file was only touched.
        git("status")
        # A commit of the changes, which stay as they are; "" without changes.
        sha = git("stash", "create") or sha
    git("worktree", "add", "--detach", str(folder), sha)
    for patch in patches:
        what = (
            f"{patch} does not apply; an arm has settings (--name=value), paths of "
            "patches and commit:REV"
        )
        path = os.path.abspath(patch)
        git("apply", "--index", "--whitespace=nowarn", path, cwd=folder, what=what)
    return code_digest(folder)


def git(
    *arguments: str, cwd: Path = ROOT, what: str = "git cannot make a worktree of this checkout"
) -> str:
    """Return what git prints about a checkout. Raises ConfigError, which begins with `what`."""
    # As a hook sets them
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run([*GIT, *arguments], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{what}: {last_line(done.stderr)}")
    return done.stdout.strip()


def digest(value: Any) -> str:
    """Return sixteen hex digits of the SHA-256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def last_line(text: str) -> str:
    """Return the last line of an output, without git's "error: " and the class of our own errors
    before it.
    """
    line = text.strip().rpartition("\n")[2]
    return line.removeprefix("error: ").removeprefix("deskgpt.errors.ConfigError: ")
