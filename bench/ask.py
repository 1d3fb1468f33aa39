"""Asks by experiment which of two or more ways to train is better, and says how sure that is and what it cost.

    python bench/ask.py config/x.py --a "--learning_rate=3e-4" --b "--learning_rate=1e-3" --min_effect=0.01 --budget=1h
    python bench/ask.py config/x.py --b docs/hacks/value_embeddings.patch
    python bench/ask.py config/x.py --b commit:HEAD~3
    python bench/ask.py config/x.py --vary learning_rate=3e-4,1e-3,3e-3
    python bench/ask.py @bench/questions/07-learning-rate.txt
    python bench/ask.py --ledger

An arm is a text with settings of train.py, patches and commit:REV; a is the config as it is, unless --a says otherwise.
Settings outside of arms are settings of all arms, which take turns on the same seeds and are judged on the same windows
of text. @FILE stands for the words of a file. The same command resumes a question that was stopped. docs/asking.md says
more.

Exit status: 0 if another arm is better than a, 1 if it is worse or not different by --min_effect, 3 if the budget was
not enough, 2 for every error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    print("reading the question ...", file=sys.stderr, flush=True)  # importing torch takes seconds
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from tqdm import tqdm

import train
from bench.asking.arms import TO_THE_END, Arm, folder_for_worktrees, make_arm
from bench.asking.band import make_band
from bench.asking.held_out import MOST_TOKENS, data_digest, set_aside
from bench.asking.ledger import Ledger
from bench.asking.question import Question
from bench.asking.running import Trainer
from bench.asking.statistics import PILOT
from deskgpt.system import hardware
from deskgpt.system.errors import ConfigError, OneLineParser, one_line_errors

UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}
LABELS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = ("--a", "--b", "--c", "--d", "--vary")  # options whose value may begin with dashes

# ---- the command line ----------------------------------------------------------------------------------------


class Parser(OneLineParser):
    def convert_arg_line_to_args(self, line: str) -> list[str]:
        return joined(shlex.split(line, comments=True))


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (our own arguments, the arguments of train.py for all arms). Raises ConfigError."""
    parser = Parser(str(__doc__))
    parser.fromfile_prefix_chars = "@"
    for name in TEXTS[:-1]:
        parser.add_argument(name, metavar="ARM", help='"--name=value ...", a patch, commit:REV')
    parser.add_argument("--vary", metavar="NAME=A,B,...", help="an arm for each value of a setting")
    parser.add_argument("--min_effect", type=float, help="the smallest difference that matters, in nats")
    parser.add_argument("--budget", default="1h", metavar="TIME", help="90s, 6min, 2h")
    parser.add_argument("--band", action="store_true", help="of a config: write the band of its val losses")
    parser.add_argument("--json", action="store_true", help="a last line of JSON")
    parser.add_argument("--ledger", nargs="?", const="", metavar="FOLDER", help="alone: lists what was asked")
    a, common = parser.parse_known_args(joined(argv))
    a.arms = [text for text in (a.b, a.c, a.d) if text]
    a.budget_s = seconds(a.budget)
    if a.min_effect is not None and not 0 < a.min_effect < math.inf:
        raise ConfigError(f"--min_effect={a.min_effect}: a difference above 0")
    if a.band and (a.a or a.arms or a.vary or len(common) != 1):
        raise ConfigError("--band: name one config and nothing else; it is made of runs of the config as it is")
    if a.vary and (a.a or a.arms or not 2 <= len(values_of(a.vary)) <= len(LABELS)):
        raise ConfigError(f"--vary {a.vary}: write it like learning_rate=3e-4,1e-3, without --a or --b")
    return a, common


def joined(argv: list[str]) -> list[str]:
    """Return `--b "--x=1"` as `--b=--x=1`: argparse takes a value that begins with dashes for an option."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] in TEXTS:
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def values_of(vary: str) -> list[str]:
    """Return the values in the text of --vary."""
    return vary.partition("=")[2].split(",")


def seconds(text: str) -> float:
    """Return 90s, 6min, 2h or 1.5d in seconds. Raises ConfigError."""
    found = re.fullmatch(r"(\d+\.?\d*)(s|min|h|d)", text)
    if not found or not float(found[1]):
        raise ConfigError(f"--budget={text}: write it like 90s, 6min or 2h")
    return float(found[1]) * UNITS_S[found[2]]


# ---- the question --------------------------------------------------------------------------------------------


def make_arms(a: argparse.Namespace, common: list[str], below: Path) -> list[Arm]:
    """Return the arms that the command line names, their worktrees below a folder. Raises ConfigError."""
    texts = [a.a or "", *a.arms]
    if a.vary:
        name = a.vary.partition("=")[0]
        texts = [f"--{name}={value}" for value in values_of(a.vary)]
    if len(texts) < 2 and not a.band:
        raise ConfigError('nothing is compared: name another way to train, such as --b "--learning_rate=1e-3"')
    arms = [make_arm(label, text, common, below) for label, text in zip(LABELS, texts, strict=False)]
    for i, x in enumerate(arms):
        for y in arms[:i]:
            if x.identity() == y.identity():
                raise ConfigError(f"{y.label} and {x.label} are the same training: {x.name}; change one of them")
        if x.settings["block_size"] != arms[0].settings["block_size"]:
            raise ConfigError(f"{x.label} has another block_size: it reads other windows, so losses do not compare")
    return arms


def make_question(
    a: argparse.Namespace, common: list[str], ledger: Ledger, below: Path, show: Callable[[str], None] = print
) -> Question:
    """Return the question that the command line asks. below: a folder for worktrees and data. Raises ConfigError."""
    arms = make_arms(a, common, below)
    first = arms[0].settings
    data = train.DATA / first["dataset"]
    if a.band:
        arms[0].give(**TO_THE_END, dataset=data)  # all of the data, and evaluated as often as the config says
    else:
        data = set_aside(data, below / "data" / data.name)
        windows = first["eval_tokens"] or MOST_TOKENS  # the same for all arms, whatever their batch
        for arm in arms:
            arm.give(**TO_THE_END, dataset=data, device=first["device"], eval_tokens=windows, eval_interval=arm.steps)
    machine = hardware.device_name(hardware.resolve_device(first["device"]))
    return Question(arms, Trainer(ledger, data_digest(data), machine, show), a.min_effect, a.budget_s, first["seed"])


def ask(question: Question) -> None:
    """Run the question, and print what is known after each round that decides nothing. Raises ConfigError."""
    for verdict in question.run_rounds():
        if verdict == "open":
            cost = f"; {question.cost_line()}" if question.rounds >= PILOT else ""
            tqdm.write(f"round {question.rounds}: {question.summary()}{cost}")


def main() -> int:
    a, common = read_arguments(sys.argv[1:])
    ledger = Ledger(Path(a.ledger) if a.ledger else None)
    if a.ledger is not None and not (common or a.a or a.arms or a.vary):
        print(ledger.listing())
        return 0
    print("checking out the code of each arm, setting text aside ...", file=sys.stderr, flush=True)
    with folder_for_worktrees(ledger.folder) as below, tqdm(bar_format="{desc} [{elapsed}]", disable=None) as bar:
        question = make_question(a, common, ledger, below, bar.set_description_str)
        if a.band:
            tqdm.write(str(make_band(common[0], question.arms[0], question.trainer)))
            return 0
        ask(question)
    answer = question.answer()
    print(answer["sentence"])
    configs = " ".join(Path(word).name for word in common if not word.startswith("-"))
    about = {"question": question.digest, "date": time.strftime("%Y-%m-%d"), "config": configs}
    ledger.add("answer", **about, spent_s=question.spent_s(), **answer)
    if a.json:
        print(json.dumps(answer))
    return int(answer["status"])


def exit_status() -> int:
    """Return the exit status of main. Whatever fails has status 2, a defect too: 1 would be an answer."""
    try:
        with one_line_errors():
            return main()
    except SystemExit as e:
        return 2 if e.code == 1 else int(e.code or 0)
    except Exception:
        traceback.print_exc()
        return 2


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(exit_status())
