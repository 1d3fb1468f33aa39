"""Ask by experiment which of two ways to train is better, and how sure that is.

    python bench/ask.py config/x.py --b "--learning_rate=1e-3" --min_effect=0.01 --minutes=60
    python bench/ask.py config/x.py --b docs/hacks/value_embeddings.patch

An arm is a text with settings of train.py and patches; a is the config as it is, unless --a says
otherwise. Other settings are settings of both arms, which take turns on the same seeds and are
judged on the same windows of val.bin. The same command resumes a question that was stopped.
--json prints the answer as one line. docs/asking.md says more.

Exit status: 0 if b is better than a, 1 if it is worse or not different by --min_effect, 3 if the
budget was not enough, 2 for every error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deskgpt.errors import ROOT, ConfigError, OneLineParser, clock, one_line_errors, require_torch

require_torch()

import torch
from filelock import FileLock

from bench.asking.statistics import LEAST, decide, difference
from data.token_files import dataset_folder
from deskgpt.device import code_digest, device_name, resolve_device
from deskgpt.files import cache_folder, file_sha256, locked_folder, sha256, write_atomically
from deskgpt.logger import read_events

# The end of a run evaluates at most so many tokens of val.bin, unless the config sets eval_tokens.
MAX_EVAL_TOKENS = 1 << 21
UNSEEN = 5e-5  # nats; a difference that four decimals do not show never matters
STATUS = {"better": 0, "worse": 1, "same": 1, "open": 3}  # of the script, by verdict
Events = list[dict[str, Any]]  # of a log.jsonl
# Every run has these, so that it ends at its last step and sends nothing.
TO_THE_END = {"max_minutes": 0.0, "max_hours": 0.0, "patience": 0, "sample_interval": 0}
TO_THE_END |= dict.fromkeys(("eval_only", "dry_run", "wandb_log"), False)
# The question gives these to each run, so an arm cannot have them.
GIVEN = {"seed", "out_dir", "dataset", "init_from", "device"}
GIVEN |= {"eval_interval", "eval_iters", "eval_tokens", *TO_THE_END}
# Git runs no hooks here, and commits also for a user who has no name.
GIT = f"git -c user.name=ask.py -c user.email=ask@localhost -c core.hooksPath={os.devnull}".split()

READ_SETTINGS = """
import json, sys
from configurator import build, read_settings
from deskgpt.errors import one_line_errors
from train import TrainConfig
with one_line_errors():
    settings = read_settings(TrainConfig, sys.argv[1:])
    build(TrainConfig, settings)
    print(json.dumps(settings))
"""


def main() -> int:
    a, common = read_arguments(sys.argv[1:])
    ledger = Path(a.ledger)
    ledger.mkdir(parents=True, exist_ok=True)
    with folder_for_worktrees(ledger) as below:
        arms = make_arms(a, common, below)
        run = partial(run_once, folder=ledger / "runs", context=context_of(arms[0].settings))
        for answer, budget in run_rounds(arms, run, a.min_effect, 60 * a.minutes):
            if answer["verdict"] == "open":
                line = f"round {answer['n']}: {answer['sentence']} {budget}"
                print(line, flush=True, file=sys.stderr if a.json else sys.stdout)
    print(json.dumps(answer) if a.json else answer["sentence"])
    return int(answer["status"])


def exit_status() -> int:
    """Return the exit status of main.

    Whatever fails has status 2, a defect too: 1 would be an answer.
    """
    try:
        with one_line_errors():
            return main()
    except SystemExit as e:
        return 2 if e.code == 1 else int(e.code or 0)
    except Exception:
        traceback.print_exc()
        return 2


# ---- the command line ----------------------------------------------------------------------------


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (our own arguments, the arguments of train.py for both arms). Raises ConfigError."""
    parser = OneLineParser(__doc__)
    parser.add_argument("--a", default="", help='"--name=value ...", a patch')
    parser.add_argument("--b", required=True)
    parser.add_argument("--min_effect", type=float, default=UNSEEN, help="in nats: what matters")
    parser.add_argument("--minutes", type=float, default=60.0, help="of all runs together")
    parser.add_argument("--ledger", default=cache_folder() / "ledger", help="folder of the runs")
    parser.add_argument("--json", action="store_true", help="print the answer as one line of JSON")
    # argparse takes a value that begins with dashes for an option: --b "--x=1" becomes --b=--x=1.
    words: list[str] = []
    for word in argv:
        if words and words[-1] in ("--a", "--b"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return parser.parse_known_args(words)


def make_arms(a: argparse.Namespace, common: list[str], below: Path) -> list[Arm]:
    """Return the two arms that the command line names, their worktrees below a folder.

    Raises ConfigError.
    """
    arms = [make_arm("a", a.a, common, below), make_arm("b", a.b, common, below)]
    first = arms[0].settings
    # The same for both arms, whatever their batch.
    given = TO_THE_END | {"dataset": str(dataset_folder(first["dataset"]).resolve())}
    given |= {"seed": first["seed"], "out_dir": ""}
    given["eval_tokens"] = first["eval_tokens"] or MAX_EVAL_TOKENS
    for arm in arms:
        arm.settings |= given | {"eval_interval": arm.settings["max_iters"]}
    if arms[0].code == arms[1].code and first == arms[1].settings:
        raise ConfigError(f"a and b are the same training: {arms[1].text}; change one of them")
    return arms


def context_of(settings: dict[str, Any]) -> list[Any]:
    """Return the machine and the content of the data, on which a result depends beside the arm."""
    name = device_name(resolve_device(settings["device"]))
    machine = f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    folder = Path(settings["dataset"])
    paths = sorted([*folder.glob("*.bin"), *folder.glob("*.mask")])
    return [machine, [[path.name, file_sha256(path)] for path in paths]]


# ---- the question --------------------------------------------------------------------------------


def run_rounds(
    arms: list[Arm], run: Callable[[Arm, int], dict[str, Any]], min_effect: float, budget_s: float
) -> Iterator[tuple[dict[str, Any], str]]:
    """Run rounds, one run of each arm with one seed, and give after each the answer and a line
    about the budget.

    run: returns the result of an arm with a seed. min_effect: the least difference that matters, in
    nats. Ends when the question is decided, or the next round does not fit into the budget. Raises
    as run_once does.
    """
    runs: list[list[dict[str, Any]]] = [[], []]  # results of a and b in the order of seeds
    for n in itertools.count(1):
        for arm, of_arm in zip(arms, runs, strict=True):
            of_arm.append(run(arm, arms[0].settings["seed"] + n - 1))
        results = runs[0] + runs[1]
        if len({result["eval_digest"] for result in results}) > 1:
            raise ConfigError(
                "the arms were evaluated on different windows, so their losses do not "
                "compare; leave block_size and the tokenizer equal"
            )
        answer = answer_of(arms, runs, min_effect)
        round_s = sum(result["wall_s"] for result in results) / n  # whenever the runs were made
        affordable = int(budget_s / round_s)
        budget = f"The budget, {clock(budget_s)}, pays {affordable:,} at {clock(round_s)} a round"
        if affordable < LEAST:
            budget += f", and no answer comes before {LEAST}: raise it to "
            budget += f"--minutes={math.ceil(LEAST * round_s / 60)} or more"
        yield answer, budget
        if answer["verdict"] != "open" or n >= affordable:
            return


def answer_of(
    arms: list[Arm], runs: list[list[dict[str, Any]]], min_effect: float
) -> dict[str, Any]:
    """Return the answer after these results of the arms: a sentence, its figures and the exit
    status of the script.
    """
    a = [result["val_loss"] for result in runs[0]]
    b = [result["val_loss"] for result in runs[1]]
    e = difference(b, a)
    verdict = decide(e, min_effect)
    texts = {"same": f"a and b do not differ by {min_effect:g} nats", "open": "Not enough yet"}
    text = texts.get(verdict, f"b ({arms[1].text}) is {verdict}")
    limits = "too few runs for an interval"
    if e.known:
        limits = f"95% interval {e.low:+z.4f} to {e.high:+z.4f}"
    text += f": val loss of b less that of a {e.d:+z.4f} nats ({limits}, n = {e.n}); means a "
    text += f"{statistics.fmean(a):.4f}, b {statistics.fmean(b):.4f}"
    for arm, of_arm in zip(arms, runs, strict=True):
        if diverged := sum(result["has_diverged"] for result in of_arm):
            text += f"; {diverged} of {e.n} runs of {arm.label} diverged and count as guessing"
    return {
        "verdict": verdict,  # of b: better, worse, same, or open
        "status": STATUS[verdict],
        "sentence": f"{text}.",
        "difference": e.d,  # val loss of b less that of a, in nats
        "interval": [e.low, e.high] if e.known else None,
        "n": e.n,
        "values": {"a": a, "b": b},
    }


# ---- arms ----------------------------------------------------------------------------------------
# Each arm has a git worktree of its own, made anew when the question is asked and removed when it
# ends. So you can keep working in the checkout while a question runs overnight.


@dataclass
class Arm:
    """One of the two ways to train that are compared. Its label is a or b."""

    label: str
    text: str  # as the user wrote it
    folder: Path  # the worktree that it runs in
    code: str  # digest of the code there
    settings: dict[str, Any]  # all of them, as that code reads them


def make_arm(label: str, text: str, common: list[str], below: Path) -> Arm:
    """Return an arm from the words of the user: settings, configs, patches.

    common: arguments of both arms. below: the folder for its worktree. Raises ConfigError.
    """
    what = f"--{label} {text}"
    arguments = list(common)
    patches = []
    for word in shlex.split(text):
        if word.removeprefix("--").partition("=")[0] in GIVEN:
            raise ConfigError(f"{what}: bench/ask.py sets this itself; leave {word} out")
        if word.startswith("--") or word.endswith(".py"):
            arguments.append(word)
        else:
            patches.append(word)
    folder = below / label
    code = check_out(folder, patches)
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
        with tempfile.TemporaryDirectory(dir=below) as folder:
            yield Path(folder).resolve()
    finally:
        git("worktree", "prune")


def check_out(folder: Path, patches: list[str]) -> str:
    """Make a worktree of this checkout with its changes, and apply patches.

    Return the code's digest. New files count from `git add` on. Raises ConfigError if git cannot
    do it.
    """
    # Refreshes git's index: without, `stash create` fails if a file was only touched.
    git("status")
    # A commit of the changes, which stay as they are; "" without changes.
    changes = git("stash", "create")
    git("worktree", "add", "--detach", str(folder), changes or "HEAD")
    for patch in patches:
        git("apply", "--index", "--whitespace=nowarn", os.path.abspath(patch), cwd=folder)
    return code_digest(folder)


def git(*arguments: str, cwd: Path = ROOT) -> str:
    """Return the output of git in a checkout. Raises ConfigError."""
    # A hook of git sets these, and they would name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run([*GIT, *arguments], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(
            f"git {shlex.join(arguments)}: {last_line(done.stderr)}; an arm has settings "
            "(--name=value) and paths of patches"
        )
    return done.stdout.strip()


def last_line(text: str) -> str:
    """Return the last line of an output."""
    return text.strip().rpartition("\n")[2]


# ---- runs of train.py ----------------------------------------------------------------------------
# Each is made once, and resumed if it was killed. Its out_dir is named by a digest of all that its
# result depends on. A finished run keeps its log.jsonl and a result.json there, which every later
# question finds.


def run_once(arm: Arm, seed: int, folder: Path, context: Any) -> dict[str, Any]:
    """Return the result of the arm's run with this seed: the kept one, or by train.py, which
    resumes a killed run.

    folder: of all runs. context: data and machine. Raises ValueError if train.py fails for another
    reason than a loss that has become infinite; KeyboardInterrupt if the user stops it, after it
    has saved.
    """
    settings = arm.settings | {"seed": seed}
    all_of_it = json.dumps([arm.code, settings, context])
    out_dir = folder.resolve() / sha256(all_of_it.encode())[:16]
    with FileLock(f"{out_dir}.lock"):  # another question may be at work on this run
        kept = out_dir / "result.json"
        if not kept.exists():
            t0 = time.perf_counter()
            found = result(arm, train_to_the_end(arm, seed, out_dir))
            found["wall_s"] = time.perf_counter() - t0
            write_atomically(kept, json.dumps(found).encode())
            for path in out_dir.glob("ckpt*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return dict(json.loads(kept.read_bytes()))


def train_to_the_end(arm: Arm, seed: int, out_dir: Path) -> Events:
    """Train until the last step, or until train.py says that the run has diverged.

    Return the events of the log. Raises as run_once.
    """
    # A run may have outlived its question, which was killed: wait until it has ended.
    with locked_folder(out_dir, wait_s=1e9):
        events = events_of(out_dir)
    if not has_ended(arm, events):
        message = train(arm, seed, out_dir)
        events = events_of(out_dir)
        if not has_ended(arm, events):
            raise ValueError(f"{arm.label} ({arm.text}) cannot run: {message}")
    return events


def events_of(out_dir: Path) -> Events:
    """Return the events of a run's log; none before its start."""
    log = out_dir / "log.jsonl"
    return read_events(log) if log.exists() else []


def train(arm: Arm, seed: int, out_dir: Path) -> str:
    """Follow a run of train.py to its end.

    Return the last line of its stderr, or its exit status if there is none.
    """
    settings = arm.settings | {"seed": seed, "out_dir": out_dir}
    if any(out_dir.glob("ckpt*")):
        settings["init_from"] = "resume"
    arguments = [f"--{name}={value}" for name, value in settings.items() if value != ""]
    print(f"{arm.label}, seed {seed}: training in {out_dir}", file=sys.stderr)
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=arm.folder,
        start_new_session=True,  # Ctrl+C reaches it once, from here
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate()
    except BaseException:
        process.terminate()  # it saves and ends
        process.communicate()
        raise
    return last_line(errors) or f"exit status {process.returncode}"


def has_diverged(events: Events) -> bool:
    """Return True if train.py has ended the run because its losses or gradients were not finite.

    An event of the log says so. An error's message may name anything, and a full disk may follow
    a single bad step.
    """
    return any(e["event"] == "diverged" for e in events)


def has_ended(arm: Arm, events: Events) -> bool:
    """Return True if the log has the end of the last step, or the run has diverged; a run that was
    stopped has an end too, before that.
    """
    ends = [e["iter"] for e in events if e["event"] == "end"]
    return has_diverged(events) or arm.settings["max_iters"] in ends


def result(arm: Arm, events: Events) -> dict[str, Any]:
    """Return the last val loss of a run that has ended, and a digest of the windows that it read.

    A run that diverged is worth no more than guessing: its loss is the logarithm of the vocabulary,
    or its last if higher. Raises ValueError if the loss was never finite: that is a defect of the
    arm.
    """
    evaluations = [e for e in events if e["event"] == "eval" and e["val_loss"] is not None]
    if not evaluations:
        raise ValueError(f"{arm.label} ({arm.text}) is broken: its val loss is never finite")
    diverged = has_diverged(events)
    loss = evaluations[-1]["val_loss"]
    if diverged:
        start = next(e for e in events if e["event"] == "start")
        loss = max(loss, math.log(start["model_args"]["vocab_size"]))
    digest_of_windows = evaluations[-1]["eval_digest"]
    return {"has_diverged": diverged, "val_loss": loss, "eval_digest": digest_of_windows}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(exit_status())
