"""Asks by experiment which of two or more ways to train is better, and says how sure that is and what it cost.

    python bench/ask.py config/x.py --a "--learning_rate=3e-4" --b "--learning_rate=1e-3" --resolve=0.01 --budget=1h
    python bench/ask.py config/x.py --b docs/hacks/value_embeddings.patch
    python bench/ask.py config/x.py --b commit:HEAD~3 --at=time
    python bench/ask.py config/x.py --vary learning_rate=3e-4,1e-3,3e-3
    python bench/ask.py config/x.py --null=200 --jobs=2
    python bench/ask.py bench/questions/07-learning-rate.toml
    python bench/ask.py --ledger

An arm is a text with settings of train.py, patches and commit:REV; a is the config as it is, unless --a says otherwise.
A number as an arm is a figure that is known, such as a published loss. With --together, another arm has the changes of
b, c ..., and the answer says whether their gains add up. --tune learning_rate gives each arm the best of three rates
first: without it, a larger model may lose by a rate that does not suit it.
Configs and settings outside of arms are those of all. Arms take turns on the same seeds, with the same number of
steps; --at makes tokens, time or flops equal instead. They train on the training text without its last tenth and are
judged by that. After two runs of each arm the price is said: the noise between seeds, and the difference that the
budget resolves. The intervals hold however often one looks (bench/asking/statistics.py), so a question stops as soon
as it is decided, and the same command goes on where the last one stopped. The same words with --confirm ask a win
again: on fresh seeds, text that no question was judged by, and a model twice as deep. --null asks a config against
itself, as many times as it says, and counts false answers. --band writes config/loss_bands/NAME.json.

Exit status: 0 where another arm is better than a, 1 where it is worse or not different by --resolve, 3 where the budget
was not enough, 2 for what cannot be asked, also where an arm cannot run.
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
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from tqdm import tqdm

import train
from bench import timing
from bench.asking import confirm, words
from bench.asking.arms import Arm, make_arm, words_of
from bench.asking.band import make_band
from bench.asking.held_out import set_aside
from bench.asking.ledger import Ledger, default_folder, digest
from bench.asking.null import ask_itself
from bench.asking.page import write_page
from bench.asking.question import FIGURES, PILOT, Question
from bench.asking.running import DistEnv
from bench.asking.tune import tokens_per_step, tuned_arms
from bench.asking.written import spelled_out
from deskgpt.system.errors import ConfigError, OneLineParser, one_line_errors

UNITS_S = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
ARMS = "abcdefghijklmnopqrstuvwxyz"
TIMED_ROUNDS = 3
TIMED_S = 5.0  # of steps, each round
TEXTS = ("--a", "--b", "--c", "--d", "--vary")  # options whose value may begin with dashes


def seconds(text: str) -> float:
    """90s, 6min, 2h or 1.5d in seconds. Raises ConfigError."""
    found = re.fullmatch(r"(\d+\.?\d*)(s|min|m|h|d)", text)
    if not found or not float(found[1]):
        raise ConfigError(f"--budget={text}: write it like 90s, 6min or 2h")
    return float(found[1]) * UNITS_S[found[2]]


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our own arguments, those of train.py for all arms). Raises ConfigError."""
    parser = OneLineParser(str(__doc__))
    for name in TEXTS[:-1]:
        parser.add_argument(name, metavar="ARM", help='"--name=value ...", a patch, commit:REV')
    parser.add_argument("--band", action="store_true", help="of a config: where the val losses of its runs lie")
    parser.add_argument("--confirm", action="store_true", help="asks a win again, on fresh seeds and text, and deeper")
    parser.add_argument("--tune", default="", metavar="NAME", help="a setting that is tuned for each arm first")
    parser.add_argument("--together", action="store_true", help="an arm with all changes: do they add up?")
    parser.add_argument("--vary", metavar="NAME=A,B,...", help="an arm for each value of a setting")
    parser.add_argument("--resolve", type=float, help="the smallest difference that matters")
    parser.add_argument("--budget", default="1h", metavar="TIME", help="90s, 6min, 2h")
    parser.add_argument("--at", choices=("steps", "tokens", "time", "flops"), default="steps", help="what is equal")
    parser.add_argument("--figure", choices=list(FIGURES), default="val_loss", help="what is asked about")
    parser.add_argument("--anyway", action="store_true", help="although the budget cannot answer")
    parser.add_argument("--null", type=int, metavar="N", help="N questions of the config against itself")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; losses only, not with --at=time")
    parser.add_argument("--json", action="store_true", help="a last line of JSON")
    parser.add_argument("--page", metavar="FILE", help="an HTML page, written anew after each round")
    parser.add_argument("--belief", metavar="TEXT", help="what people believe; said first")
    parser.add_argument("--instead", metavar="TEXT", help="what to do instead; said after the answer")
    parser.add_argument("--ledger", nargs="?", const="", metavar="FOLDER", help="alone: lists what was asked")
    return parser.parse_known_args(spelled_out(joined(argv), parser))


def joined(argv: list[str]) -> list[str]:
    """`--b "--x=1"` as `--b=--x=1`: argparse takes a value that begins with dashes for an option."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] in TEXTS:
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def arms_of(a: argparse.Namespace, common: list[str], ledger: Ledger) -> list[Arm]:
    """The arms that the command line names. Raises ConfigError where it names none, or two that are equal."""
    if a.vary:
        name, _, values = a.vary.partition("=")
        if any((a.a, a.b, a.c, a.d)) or len(values.split(",")) < 2:
            raise ConfigError(f"--vary {a.vary}: write it like learning_rate=3e-4,1e-3, without --a or --b")
        texts = [f"--{name}={value}" for value in values.split(",")]
        if len(texts) > len(ARMS):
            raise ConfigError(f"--vary {name}: {len(texts)} values; name {len(ARMS)} at most")
    else:
        texts = [a.a or "", *(text for text in (a.b, a.c, a.d) if text)]
    if len(texts) < 2 and not (a.null or a.band):
        raise ConfigError('nothing is compared: name another way to train, such as --b "--learning_rate=1e-3"')
    if a.together:
        texts.append(both(texts))
    arms = [make_arm(ARMS[i], text, common, ledger.folder / "code") for i, text in enumerate(texts)]
    for i, x in enumerate(arms):
        for y in arms[:i]:
            if (x.code, x.learning_settings()) == (y.code, y.learning_settings()):
                raise ConfigError(f"{y.label} and {x.label} are the same training: {x.what}; change one of them")
    return arms


def both(texts: list[str]) -> str:
    """The arm with the changes of all arms but the first. Raises ConfigError where that is none."""
    first, *alone = texts
    words = [word for text in alone for word in words_of(text)]
    names = [word.partition("=")[0] for word in words]
    if first or len(alone) < 2:
        raise ConfigError("--together: name two changes or more with --b and --c, and none with --a")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--together: two arms have {name}; their changes cannot be put together")
    return " ".join(alone)


def question_of(a: argparse.Namespace, common: list[str]) -> Question:
    """The question that the command line asks. Raises ConfigError."""
    began = time.perf_counter()
    budget_s = seconds(a.budget)
    ledger = Ledger(Path(a.ledger) if a.ledger else default_folder())
    if a.resolve is not None and not 0 < a.resolve < float("inf"):
        raise ConfigError(f"--resolve={a.resolve}: a difference above 0")
    if a.tune and (a.null or a.figure != "val_loss"):
        raise ConfigError(f"--tune {a.tune}: only for questions about the val loss")
    if a.null is not None and (a.null < 1 or any((a.b, a.c, a.d, a.vary, a.page))):
        raise ConfigError(f"--null={a.null}: 1 or more questions of one config, without --b, --vary and --page")
    if a.band and (a.null or any((a.a, a.b, a.c, a.d, a.vary)) or len(common) != 1):
        raise ConfigError("--band: name one config and nothing else; it is made of runs of the config as it is")
    if a.jobs < 1 or (a.jobs > 1 and (a.at == "time" or a.figure != "val_loss")):
        raise ConfigError(f"--jobs={a.jobs}: 1 at least, and no more where time is measured")
    arms = arms_of(a, common, ledger)
    if len({arm.settings["dataset"] for arm in arms}) > 1:
        raise ConfigError("the arms have different data sets: their losses do not compare")
    folder = train.DATA / arms[0].settings["dataset"]
    place = DistEnv(ledger, set_aside(folder, ledger.folder / "data"), arms[0].settings["device"], a.jobs)
    if a.band:
        place = replace(place, data=folder, evaluations=0)
    if FIGURES[a.figure].is_rate:
        place = replace(place, alone=digest([[arm.code, arm.learning_settings()] for arm in arms]))
    set_steps(arms, a.at, place)
    first_seed = arms[0].settings["seed"]
    if a.tune:
        arms = tuned_arms(arms, a.tune, place, first_seed, math.inf if a.anyway else budget_s)
    return Question(arms, place, a.resolve, budget_s, first_seed, a.figure, a.together, a.tune, a.anyway, began=began)


def set_steps(arms: list[Arm], at: str, place: DistEnv) -> None:
    """The step at which each arm's runs end: for all runs of an arm the same one. Raises ConfigError."""
    arms = [arm for arm in arms if arm.known is None]
    steps = arms[0].settings["max_iters"]
    for arm in arms[1:]:
        if arm.settings["max_iters"] != steps:
            raise ConfigError(f"{arm.label} sets max_iters: the arms end after equal {at}; set it for all, before --b")
        if at != "steps" and arm.settings["lr_decay_iters"]:
            raise ConfigError(f"{arm.label}: --at={at} changes max_iters; leave lr_decay_iters at 0, which follows it")
    costs = [1.0] * len(arms)
    if at == "tokens":
        costs = [float(tokens_per_step(arm.settings)) for arm in arms]
    if at in ("time", "flops"):
        costs = measured_costs(arms, at, place)
    for arm, cost in zip(arms, costs, strict=True):
        arm.steps = max(1, round(steps * costs[0] / cost))


def measured_costs(arms: list[Arm], at: str, place: DistEnv) -> list[float]:
    """Milliseconds or FLOPs of a step of each arm, which are remembered, so that the question can go on later.

    Arms take turns, so that a slow spell of the machine hits all.
    """
    key = digest([at, [[arm.code, arm.learning_settings()] for arm in arms], place.machine, place.threads])
    known = [e["costs"] for e in place.ledger.events if e["event"] == "costs" and e["key"] == key]
    if known:
        return list(known[0])
    with tempfile.TemporaryDirectory() as tmp:
        timed = []
        for arm in arms:
            command = [*timing.PYTHON, "train.py", *arm.arguments, *timing.OURS, f"--dataset={place.data.resolve()}"]
            timed.append(timing.Contestant(arm.label, [*command, f"--out_dir={tmp}/{arm.label}"], arm.folder))
        for _ in range(TIMED_ROUNDS if at == "time" else 1):
            for x in timed:
                timing.run(x, 0 if at == "time" else timing.LEAST_STEPS, TIMED_S)
    if at == "time":
        costs = [x.step_ms()["ms"] for x in timed]
    else:
        costs = [x.start["flops_per_token"] * x.start["tokens_per_step"] for x in timed]
    place.ledger.add("costs", key=key, at=at, costs=costs)
    return costs


def ask(question: Question, page: str | None = None) -> None:
    """Does the runs, and says the price after the pilot and what is known after each round. Raises ConfigError."""
    show(question, "No round of runs has ended yet.", page)  # says at once what keeps the page from being written
    with tqdm(desc="first round", unit="round", disable=None) as bar:
        for look in question.answered():
            show(question, words.answer(question)[0], page)
            bar.update()
            bar.total = question.affordable()
            bar.set_description_str(words.so_far(question))
            if not question.anyway:
                question.check_affordable()
            if look.n == PILOT:
                price = question.price()
                for line in price.lines(question):
                    tqdm.write(line)
                if not question.anyway:
                    price.check(question)
            if look.n >= PILOT:
                tqdm.write(f"round {look.n}: {words.so_far_with_means(question)}")


def show(question: Question, sentence: str, page: str | None) -> None:
    """Writes the page, where one is wanted. Raises ValueError or OSError where that cannot be."""
    if page:
        write_page(question, sentence, Path(page), shlex.join(["python", "bench/ask.py", *sys.argv[1:]]))


def listing(ledger: Ledger) -> str:
    """What was asked and answered."""
    lines = [f"{e['date']}  {e['config']}  {e['sentence']}" for e in ledger.answers()]
    return "\n".join(lines) or f"{ledger.file}: nothing was asked yet"


def main() -> int:
    import scipy  # noqa: F401 (says what is missing before anything runs)

    a, common = read_arguments(sys.argv[1:])
    if a.ledger is not None and not common and not any((a.a, a.b, a.c, a.d, a.vary)):
        print(listing(Ledger(Path(a.ledger) if a.ledger else default_folder())))
        return 0
    if a.belief:
        print(f"belief: {a.belief}")
    question = question_of(a, common)
    if a.null:
        real, simulated = ask_itself(question.place, question.arms[0], question.first_seed, a.null)
        print(f"{question.arms[0].what} against itself: {real}; of simulated questions {simulated}")
        return 0
    if a.band:
        print(make_band(common[0], question.arms[0], question.place, question.first_seed))
        return 0
    if a.confirm:
        won, again = confirm.questions(question, train.DATA / question.arms[0].settings["dataset"])
        for one in again:
            ask(one, a.page)
        sentence, status, data = confirm.answer(won, again)
        question = again[0]
    else:
        ask(question, a.page)
        sentence, status, data = words.answer(question)
        show(question, sentence, a.page)
    print(sentence)
    if a.instead:
        print(f"instead: {a.instead}")
    asked = question.place.ledger.questions_of(question.place.windows, but=question.digest)
    configs = " ".join(Path(word).name for word in common if not word.startswith("-"))
    about = {"question": question.digest, "windows": question.place.windows, "config": configs, "at": a.at}
    about |= {"machine": question.place.machine, "spent_s": question.spent_s(), "date": time.strftime("%Y-%m-%d")}
    question.place.ledger.add("answer", **about, **data)
    if asked:
        print(f"other questions asked of these validation windows: {asked}; the more, the likelier a win by luck")
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
