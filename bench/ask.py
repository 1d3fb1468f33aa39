"""Asks by experiment which of two or more ways to train is better, and says how sure that is and what it cost.

    python bench/ask.py config/x.py --a "--learning_rate=3e-4" --b "--learning_rate=1e-3" --min_effect=0.01 --budget=1h
    python bench/ask.py config/x.py --b docs/hacks/value_embeddings.patch
    python bench/ask.py config/x.py --b commit:HEAD~3 --at=time
    python bench/ask.py config/x.py --vary learning_rate=3e-4,1e-3,3e-3
    python bench/ask.py config/x.py --null=20 --jobs=2
    python bench/ask.py bench/questions/07-learning-rate.toml
    python bench/ask.py --ledger

An arm is a text with settings of train.py, patches and commit:REV; a is the config as it is, unless --a says otherwise.
A number as an arm is a figure that is known, such as a published loss. Settings outside of arms are those of all arms,
which take turns on the same seeds, for the same number of steps (--at), and are judged on the same windows of text. The
price is printed after each round; the same command goes on where the last one stopped. docs/asking.md says more.

Exit status: 0 where another arm is better than a, 1 where it is worse or not different by --min_effect, 3 where the
budget was not enough, 2 for what cannot be asked, also where an arm cannot run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import statistics
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    print("reading the question ...", file=sys.stderr, flush=True)  # importing torch takes seconds
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from tqdm import tqdm

import train
from bench.asking import running, words
from bench.asking.arms import Arm, make_arm, words_of
from bench.asking.band import make_band
from bench.asking.held_out import PARTS, set_aside, val_tokens
from bench.asking.ledger import Ledger, default_folder, digest, listing
from bench.asking.null import ask_itself
from bench.asking.page import write_page
from bench.asking.question import FIGURES, PILOT, Question
from bench.asking.running import Place
from configurator import read_argument
from deskgpt.system.errors import ConfigError, OneLineParser, one_line_errors

UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}
LABELS = "abcdefghijklmnopqrstuvwxyz"
TIMED_STEPS = 20  # of a run that only tells what a step costs
TIMED_ROUNDS = 3
TEXTS = ("--a", "--b", "--c", "--d", "--vary")  # options whose value may begin with dashes
SIZES = ("batch_size", "gradient_accumulation_steps", "block_size")  # of a step


# ---- the command line ----------------------------------------------------------------------------------------


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our own arguments, those of train.py for all arms). Raises ConfigError."""
    parser = OneLineParser(str(__doc__))
    for name in TEXTS[:-1]:
        parser.add_argument(name, metavar="ARM", help='"--name=value ...", a patch, commit:REV')
    parser.add_argument("--vary", metavar="NAME=A,B,...", help="an arm for each value of a setting")
    parser.add_argument("--together", action="store_true", help="an arm with all changes: do they add up?")
    parser.add_argument("--min_effect", "--resolve", type=float, help="the smallest difference that matters")
    parser.add_argument("--budget", default="1h", metavar="TIME", help="90s, 6min, 2h")
    parser.add_argument("--anyway", action="store_true", help="although the budget cannot answer")
    parser.add_argument("--at", choices=("steps", "tokens", "time", "flops"), default="steps", help="what is equal")
    parser.add_argument("--figure", choices=list(FIGURES), default="val_loss", help="what is asked about")
    parser.add_argument("--part", type=int, default=0, help=f"of the text to be judged by, 0 to {PARTS - 1}")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; losses only, not with --at=time")
    parser.add_argument("--null", type=int, metavar="N", help="N questions of the config against itself")
    parser.add_argument("--band", action="store_true", help="of a config: where the val losses of its runs lie")
    parser.add_argument("--json", action="store_true", help="a last line of JSON")
    parser.add_argument("--page", metavar="FILE", help="an HTML page, written anew after each round")
    parser.add_argument("--belief", metavar="TEXT", help="what people believe; printed first")
    parser.add_argument("--instead", metavar="TEXT", help="what to do instead; printed after the answer")
    parser.add_argument("--ledger", nargs="?", const="", metavar="FOLDER", help="alone: lists what was asked")
    files = [word for word in argv if word.endswith(".toml") and not word.startswith("-")]
    if len(files) > 1:
        raise ConfigError(f"{' '.join(files)}: ask one question at a time")
    of_file = words_of_file(files[0], parser) if files else []
    return parser.parse_known_args(of_file + joined([word for word in argv if word not in files]))


def joined(argv: list[str]) -> list[str]:
    """`--b "--x=1"` as `--b=--x=1`: argparse takes a value that begins with dashes for an option."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] in TEXTS:
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def words_of_file(file: str, parser: argparse.ArgumentParser) -> list[str]:
    """What a TOML file of options, with a table [settings], is on the command line. Raises ConfigError."""
    try:
        asked = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        configs = asked.pop("config", [])
        settings = asked.pop("settings", {})
        configs = [configs] if isinstance(configs, str) else configs
        if not isinstance(configs, list) or not all(isinstance(name, str) for name in configs):
            raise ConfigError('config: write config = "config/x.py", or a list of such names')
        if not isinstance(settings, dict):
            raise ConfigError("settings: make it a table, [settings], with a line for each")
        options = [word_of(name, value) for name, value in asked.items() if value is not False]
        for unknown in parser.parse_known_args(options)[1]:
            raise ConfigError(f"{unknown} is no option of bench/ask.py; settings of train.py go below [settings]")
        common = [word_of(name, value) for name, value in settings.items()]
        for setting in common:
            read_argument(setting, train.TrainConfig)
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{file}: {e}; write it as the files of bench/questions are written") from None
    return [*configs, *options, *common]


def word_of(name: str, value: Any) -> str:
    """A line of the file as it stands on the command line. Raises ConfigError."""
    if not isinstance(value, (str, int, float)):
        raise ConfigError(f"{name} = {value}: write a text in quotes, a number, true or false")
    return f"--{name}" if value is True else f"--{name}={value}"


def seconds(text: str) -> float:
    """90s, 6min, 2h or 1.5d in seconds. Raises ConfigError."""
    found = re.fullmatch(r"(\d+\.?\d*)(s|min|h|d)", text)
    if not found or not float(found[1]):
        raise ConfigError(f"--budget={text}: write it like 90s, 6min or 2h")
    return float(found[1]) * UNITS_S[found[2]]


# ---- the question --------------------------------------------------------------------------------------------


def arms_of(a: argparse.Namespace, common: list[str], ledger: Ledger) -> list[Arm]:
    """The arms that the command line names. Raises ConfigError where it names none, or two that are equal."""
    texts = [a.a or "", *(text for text in (a.b, a.c, a.d) if text)]
    if a.vary:
        name, _, values = a.vary.partition("=")
        if any((a.a, a.b, a.c, a.d)) or not 2 <= len(values.split(",")) <= len(LABELS):
            raise ConfigError(f"--vary {a.vary}: write it like learning_rate=3e-4,1e-3, without --a or --b")
        texts = [f"--{name}={value}" for value in values.split(",")]
    if len(texts) < 2 and not (a.null or a.band):
        raise ConfigError('nothing is compared: name another way to train, such as --b "--learning_rate=1e-3"')
    if a.together:
        names = [word.partition("=")[0] for text in texts[1:] for word in words_of(text)]
        if texts[0] or len(texts) < 3 or len(set(names)) < len(names):
            raise ConfigError("--together: name two different changes or more with --b and --c, and none with --a")
        texts.append(" ".join(texts[1:]))
    with ledger.lock:
        arms = [make_arm(LABELS[i], text, common, ledger.folder / "code") for i, text in enumerate(texts)]
    for i, x in enumerate(arms):
        for y in arms[:i]:
            if (x.code, x.learning_settings()) == (y.code, y.learning_settings()):
                raise ConfigError(f"{y.label} and {x.label} are the same training: {x.what}; change one of them")
    return arms


def question_of(a: argparse.Namespace, common: list[str]) -> Question:
    """The question that the command line asks. Raises ConfigError."""
    began = time.perf_counter()
    budget_s = seconds(a.budget)
    ledger = Ledger(Path(a.ledger) if a.ledger else default_folder())
    if a.min_effect is not None and not 0 < a.min_effect < float("inf"):
        raise ConfigError(f"--min_effect={a.min_effect}: a difference above 0")
    if a.null is not None and (a.null < 1 or any((a.b, a.c, a.d, a.vary, a.page))):
        raise ConfigError(f"--null={a.null}: 1 or more questions of one config, without --b, --vary and --page")
    if a.band and (a.null or any((a.a, a.b, a.c, a.d, a.vary)) or len(common) != 1):
        raise ConfigError("--band: name one config and nothing else; it is made of runs of the config as it is")
    if a.jobs < 1 or (a.jobs > 1 and (a.at == "time" or a.figure != "val_loss")):
        raise ConfigError(f"--jobs={a.jobs}: 1 at least, and no more where time is measured")
    if not 0 <= a.part < PARTS:
        raise ConfigError(f"--part={a.part}: 0 to {PARTS - 1}")
    arms = arms_of(a, common, ledger)
    first = arms[0].settings
    if len({arm.settings["dataset"] for arm in arms}) > 1:
        raise ConfigError("the arms have different data sets: their losses do not compare")
    data = train.DATA / first["dataset"]
    if a.figure == "val_loss" and any(arm.known is not None for arm in arms):
        print("beside a number, runs train on all of the training text and are judged by val.bin, as published ones")
    elif not a.band:
        with ledger.lock:
            data = set_aside(data, ledger.folder / "data", a.part)
    place = Place(ledger, data, first["device"], a.jobs, is_judged_often=not a.band)
    if FIGURES[a.figure].is_rate:
        place = replace(place, alone=digest([[arm.code, arm.learning_settings()] for arm in arms]))
    if a.figure == "val_loss" and not a.band:
        judge_equally(arms, first["eval_tokens"] or val_tokens(data))
    set_steps(arms, a.at, place)
    return Question(arms, place, a.min_effect, budget_s, first["seed"], a.figure, a.together, a.anyway, began=began)


def judge_equally(arms: list[Arm], tokens: int) -> None:
    """Has all arms evaluated on the same windows, `tokens` of each split. Raises ConfigError where that cannot be."""
    for arm in arms:
        if arm.settings["block_size"] != arms[0].settings["block_size"]:
            raise ConfigError(f"{arm.label} has another block_size, so it reads other windows: losses do not compare")
        if arm.known is None:
            arm.give("eval_tokens", tokens)


def set_steps(arms: list[Arm], at: str, place: Place) -> None:
    """The step at which each arm's runs end: for all runs of an arm the same one. Raises ConfigError."""
    arms = [arm for arm in arms if arm.known is None]
    steps = arms[0].settings["max_iters"]
    for arm in arms[1:]:
        if arm.settings["max_iters"] != steps:
            raise ConfigError(f"{arm.label} sets max_iters: the arms end after equal {at}; set it for all, before --b")
        if at != "steps" and arm.settings["lr_decay_iters"]:
            raise ConfigError(f"{arm.label}: --at={at} changes max_iters; leave lr_decay_iters at 0, which follows it")
    costs = costs_of_steps(arms, at, place)
    for arm, cost in zip(arms, costs, strict=True):
        arm.steps = max(1, round(steps * costs[0] / cost))


def tokens_per_step(arm: Arm) -> int:
    return math.prod(arm.settings.get(name, 1) for name in SIZES)


def costs_of_steps(arms: list[Arm], at: str, place: Place) -> list[float]:
    """What is equal, of a step of each arm: 1, tokens, FLOPs or milliseconds of short runs, which the ledger keeps."""
    if at == "steps":
        return [1.0] * len(arms)
    if at == "tokens":
        return [tokens_per_step(arm) for arm in arms]
    print("measuring what a step of each arm costs ...", flush=True)
    shorter = [replace(arm, steps=TIMED_STEPS, arguments=[*arm.arguments, "--log_interval=1"]) for arm in arms]
    place = replace(place, alone=digest([[arm.code, arm.learning_settings()] for arm in arms]))
    # Arms take turns, so that a slow spell of the machine hits all.
    rounds = [[running.run(place, arm, seed) for arm in shorter] for seed in range(TIMED_ROUNDS if at == "time" else 1)]
    if at == "flops":
        return [run["flops_per_token"] * tokens_per_step(arm) for arm, run in zip(arms, rounds[0], strict=True)]
    return [statistics.median(run["step_ms"] for run in of_arm) for of_arm in zip(*rounds, strict=True)]


def ask(question: Question, page: str | None = None) -> None:
    """Does the runs, and prints the price and what is known after each round. Raises ConfigError."""
    command = shlex.join(["python", "bench/ask.py", *sys.argv[1:]])
    if page:
        write_page(question, "No round of runs has ended yet.", Path(page), command)  # fails early where it cannot be
    for look in question.answered():
        if page:
            write_page(question, words.answer(question)[0], Path(page), command)
        if look.verdict == "open":
            price = f"; {question.price_line()}" if look.n >= PILOT else ""
            tqdm.write(f"round {look.n}: {words.so_far(question)}{price}")


def main() -> int:
    a, common = read_arguments(sys.argv[1:])
    if a.ledger is not None and not common and not any((a.a, a.b, a.c, a.d, a.vary)):
        print(listing(Ledger(Path(a.ledger) if a.ledger else default_folder())))
        return 0
    if a.belief:
        print(f"belief: {a.belief}")
    print("copying the code of each arm, setting text aside ...", file=sys.stderr, flush=True)
    question = question_of(a, common)
    with tqdm(bar_format="{desc} [{elapsed}]", disable=None) as bar:
        question.place = replace(question.place, tell=bar.set_description_str)
        if a.null:
            tqdm.write(ask_itself(question.place, question.arms[0], question.first_seed, a.null))
            return 0
        if a.band:
            tqdm.write(str(make_band(common[0], question.arms[0], question.place, question.first_seed)))
            return 0
        ask(question, a.page)
    sentence, status, data = words.answer(question)
    print(sentence)
    if a.instead:
        print(f"instead: {a.instead}")
    configs = " ".join(Path(word).name for word in common if not word.startswith("-"))
    about = {"question": question.digest, "windows": question.place.windows, "config": configs, "at": a.at}
    about |= {"machine": question.place.machine, "spent_s": question.spent_s(), "date": time.strftime("%Y-%m-%d")}
    question.place.ledger.add("answer", **about, **data)
    if a.json:
        print(json.dumps(data))
    return status


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with one_line_errors():
            status = main()
    except SystemExit as e:
        raise SystemExit(2 if e.code == 1 else e.code) from None  # 1 would be an answer
    raise SystemExit(status)
