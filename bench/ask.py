"""Ask by experiment which of two ways to train is better, how sure that is and what it costs.

    python bench/ask.py config/x.py --b "--learning_rate=1e-3" --min_effect=0.01 --budget=1h
    python bench/ask.py config/x.py --b docs/hacks/value_embeddings.patch
    python bench/ask.py config/x.py --b commit:HEAD~3
    python bench/ask.py @bench/questions/07-learning-rate.txt

An arm is a text with settings of train.py, patches and commit:REV; a is the config as it is, unless
--a says otherwise. Other settings are settings of both arms, which take turns on the same seeds and
are judged on the same windows of val.bin. @FILE stands for the words of a file. The same command
resumes a question that was stopped. --json prints the answer as one line. docs/asking.md says more.

Exit status: 0 if b is better than a, 1 if it is worse or not different by --min_effect, 3 if the
budget was not enough, 2 for every error.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.asking.arms import TO_THE_END, Arm, folder_for_worktrees, make_arm
from bench.asking.running import Question, Trainer, data_digest
from data.token_files import dataset_folder
from deskgpt.device import device_name, resolve_device
from deskgpt.errors import ConfigError, OneLineParser, one_line_errors
from deskgpt.files import cache_folder
from deskgpt.logger import RunLog

UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}
# Of val.bin, evaluated at the end of a run if the config does not set eval_tokens.
MAX_EVAL_TOKENS = 1 << 21


class Parser(OneLineParser):
    def convert_arg_line_to_args(self, line: str) -> list[str]:
        return join_arms(shlex.split(line, comments=True))


def join_arms(argv: list[str]) -> list[str]:
    """Return `--b "--x=1"` as `--b=--x=1`: argparse takes a value that begins with dashes for an
    option.
    """
    out: list[str] = []
    for word in argv:
        if out and out[-1] in ("--a", "--b"):
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (our own arguments, the arguments of train.py for both arms). Raises ConfigError."""
    parser = Parser(__doc__)
    parser.fromfile_prefix_chars = "@"
    parser.add_argument("--a", default="", help='"--name=value ...", a patch, commit:REV')
    parser.add_argument("--b", required=True)
    parser.add_argument("--min_effect", type=float, help="the least difference that matters (nats)")
    parser.add_argument("--budget", type=seconds, default="1h", help="of all runs: 90s, 6min, 2h")
    parser.add_argument("--ledger", default=cache_folder() / "ledger", help="folder of the runs")
    parser.add_argument("--json", action="store_true", help="print the answer as one line of JSON")
    a, common = parser.parse_known_args(join_arms(argv))
    if a.min_effect is not None and not 0 < a.min_effect < math.inf:
        raise ConfigError(f"--min_effect={a.min_effect}: a difference above 0")
    return a, common


def seconds(text: str) -> float:
    """Return the seconds of "90s", "6min" or "2h". Raises ValueError."""
    found = re.fullmatch(r"([\d.]+)(s|min|h|d)", text)
    if not found:
        raise ValueError
    return float(found[1]) * UNITS_S[found[2]]


def make_arms(a: argparse.Namespace, common: list[str], below: Path) -> tuple[Arm, Arm]:
    """Return the two arms that the command line names, their worktrees below a folder.

    Raises ConfigError.
    """
    x = make_arm("a", a.a, common, below)
    y = make_arm("b", a.b, common, below)
    if x.identity() == y.identity():
        raise ConfigError(f"a and b are the same training: {y.text}; change one of them")
    if x.settings["block_size"] != y.settings["block_size"]:
        raise ConfigError(
            "b has another block_size: it reads other windows, so losses do not compare"
        )
    return x, y


def make_question(a: argparse.Namespace, common: list[str], ledger: Path, below: Path) -> Question:
    """Return the question that the command line asks. below: a folder for worktrees.

    Raises ConfigError.
    """
    arms = make_arms(a, common, below)
    first = arms[0].settings
    data = dataset_folder(first["dataset"]).resolve()
    device = first["device"]
    # The same for both arms, whatever their batch.
    given = TO_THE_END | {"dataset": data, "device": device}
    given["eval_tokens"] = first["eval_tokens"] or MAX_EVAL_TOKENS
    for arm in arms:
        given["eval_interval"] = arm.settings["max_iters"]
        # Of these, a commit has those that its code knows.
        arm.settings |= {name: value for name, value in given.items() if name in arm.settings}
    name = device_name(resolve_device(device))
    machine = f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    trainer = Trainer(ledger / "runs", data_digest(data), machine)
    return Question(*arms, trainer, a.min_effect, a.budget, first["seed"])


def main() -> int:
    a, common = read_arguments(sys.argv[1:])
    ledger = Path(a.ledger)
    ledger.mkdir(parents=True, exist_ok=True)
    with folder_for_worktrees(ledger) as below:
        question = make_question(a, common, ledger, below)
        for line in question.run_rounds():
            print(line, flush=True, file=sys.stderr if a.json else sys.stdout)
    answer = question.answer()
    print(json.dumps(answer) if a.json else answer["sentence"])
    asked = {"date": time.strftime("%Y-%m-%d"), "command": shlex.join(sys.argv)}
    RunLog(ledger / "ledger.jsonl").write("answer", **asked, **answer)
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


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(exit_status())
