"""Runs one small experiment for each of twelve beliefs about training on small hardware.

    python bench/claims/run.py 6 11             # by number; without one, all of them
    python bench/claims/run.py --list
    python bench/claims/run.py 7 --device=cuda --save

Step times are those of train.py itself, in child processes that take turns, on random tokens. Losses are those of
train.py's main on --data, evaluated on the same windows each time. sizes.py says what runs on a CPU and what on CUDA.
Prints a table and what follows from it; --save writes both to bench/results/DATE-claim-NN-cpu.md (-cuda) and .json.
bench/claims/README.md has the verdicts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from bench import output
from bench.claims import counts, losses, speeds
from bench.claims.sizes import CPU, CUDA, Found, Options
from bench.output import markdown_table
from deskgpt.machine import hardware, provenance
from deskgpt.machine.errors import ConfigError, one_line_errors

CLAIMS: dict[int, tuple[str, Callable[[Options], Found]]] = {
    1: ("A smaller micro-batch at the same tokens per step gives higher MFU.", speeds.micro_batch),
    2: ("torch.compile works better with smaller micro-batches.", speeds.compile_and_micro_batch),
    3: ("torch.compile gives 20 to 30% on a CPU.", speeds.compile_gain),
    4: ("More accumulation means fewer optimizer steps.", losses.accumulation),
    5: ("Widening from 384 to 768 alone raises MFU.", speeds.widening),
    6: ("A 12-layer, 384-wide model with GPT-2's vocabulary has about 33M parameters.", counts.parameters),
    7: ("A lower learning rate (3e-4 against 1e-3) converges better at 125M.", losses.low_learning_rate),
    8: ("float32 on a CPU converges more slowly than 16-bit autocast on a GPU, because of noise.", losses.precision),
    9: ("Random evaluation batches make two evaluations of one model differ.", losses.random_evaluation),
    10: ("Characters of Shakespeare, 4 x 128: val 2.0 at 2k steps, 1.5 to 1.8 at 5k, 1.3 at 10k.", losses.characters),
    11: ("A val loss of 22 on FineWeb-Edu.", counts.perplexity),
    12: ("Batch 24 in place of 12 trains faster to a given loss on a CPU.", losses.larger_batch),
}


def cell(value: Any) -> str:
    """A figure in a table."""
    if value is None:
        return "n/a"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def as_markdown(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[cell(row.get(name)) for name in columns] for row in rows]
    return markdown_table(columns, cells, left_columns=len(columns))


def page(o: Options, number: int, given: list[str]) -> None:
    """Runs one experiment, prints what it finds, and writes that where --save is among the given arguments."""
    claim, experiment = CLAIMS[number]
    print(f"{number}. {claim}", flush=True)
    found = experiment(o)

    device = hardware.device_name(o.device)
    versions = provenance.versions()
    commit = provenance.git_commit()
    about = f"{time.strftime('%Y-%m-%d')}, {device}; {versions}, commit {commit}"
    made_with = [*sorted(found.dtypes), *sorted(o.compilers)]
    if made_with:
        about += f"; {', '.join(made_with)}"
    threads = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("OMP_")]
    command = " ".join([*threads, "python", "bench/claims/run.py", str(number), *given])
    says = "".join(f"- {line}\n" for line in found.says)
    text = f"{about}.\n\n```sh\n{command}\n```\n\n{as_markdown(found.rows)}\n\n{says}"
    print(f"\n{text}", flush=True)
    if "--save" in given:
        result = {
            "claim": claim,
            "command": command,
            "device": device,
            "versions": versions,
            "compilers": sorted(o.compilers),
            "commit": commit,
            "rows": found.rows,
            "says": found.says,
            "raw": found.raw,
        }
        output.save(f"claim-{number:02}-{o.device.type}", f"# Claim {number}: {claim}\n\n{text}", result, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", type=int, nargs="*", metavar="N", help="claims; without one, all")
    parser.add_argument("--list", action="store_true", help="print the claims and do nothing")
    parser.add_argument("--save", action="store_true", help="write bench/results/DATE-claim-NN-DEVICE.md and .json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", default="", help="folder of token files; empty = the claim's own below data/")
    parser.add_argument("--rounds", type=int, default=4, help="of timed runs")
    parser.add_argument("--seeds", type=int, default=3, help="1337, 1338, ...")
    parser.add_argument("--steps", type=int, default=0, help="at most this many in any run, to try it out; 0 = all")
    parser.add_argument("--log", default="", help="claim 11: a log of nanoGPT's")
    parser.add_argument("--documents", default="", help="claim 11: a file or folder of documents, for bytes per token")
    a = parser.parse_args()
    if a.list:
        return print("\n".join(f"{n:2}. {claim}" for n, (claim, _) in CLAIMS.items()))
    for n in a.numbers:
        if n not in CLAIMS:
            raise ConfigError(f"claim {n} is not one of 1 to {len(CLAIMS)}; --list shows them")
    if a.rounds < 1 or a.seeds < 1 or a.steps < 0:
        raise ConfigError(f"--rounds={a.rounds} --seeds={a.seeds} --steps={a.steps}: at least 1, 1 and 0")
    given = given_arguments(a, parser)
    device = hardware.resolve_device(a.device)
    sizes = CUDA if device.type == "cuda" else CPU
    options = {name: getattr(a, name) for name in ("data", "rounds", "seeds", "steps", "log", "documents")}
    for n in a.numbers or CLAIMS:
        with tempfile.TemporaryDirectory() as tmp:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tmp}/cache"  # so that everything is compiled anew
            page(Options(device=device, sizes=sizes, tmp=Path(tmp), **options), n, given)


def given_arguments(a: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """What was given on the command line, for the page: folders without their place on this machine."""
    out = []
    for name in ("device", "rounds", "seeds", "steps"):
        value = getattr(a, name)
        if value != parser.get_default(name):
            out.append(f"--{name}={value}")
    for name in ("data", "log", "documents"):
        if getattr(a, name):
            out.append(f"--{name}={Path(getattr(a, name)).name}")
    if a.save:
        out.append("--save")
    return out


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    with one_line_errors():
        main()
