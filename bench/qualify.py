"""Checks and measures a card, in at most 27 minutes, and writes a page about it.

    python bench/qualify.py                        # or: make qualify; all stages that are not there yet
    python bench/qualify.py --stages=0-3           # of these, the ones that are not there yet
    python bench/qualify.py --stages=7 --again     # measures a stage again

Needs no data and no network. docs/figures.md says what it is for. After each stage the results so far are
written to out-qualify/ as .json and .md; a later call for the same device, torch and commit continues from them. A
stage that fails is a result too. Without a GPU everything runs on the CPU at toy sizes. Exit status: 1 if a stage that
was asked for has failed, 3 if none has failed but one ran out of time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import torch

from bench import output, stages
from deskgpt.compute import compiling
from deskgpt.run.log import git_commit, versions
from deskgpt.system import hardware
from deskgpt.system.errors import ConfigError, one_line_errors


class Stage(NamedTuple):
    heading: str
    limit_s: float  # after which it should end; together at most 27 minutes
    measure: Callable[[stages.Session], tuple[str, dict[str, Any]]]


# Numbers stay: earlier results and commands name them. bench/speed.py --profile shows where a step's time goes.
STAGES = {
    0: Stage("Facts", 20, stages.facts),
    1: Stage("Roofs", 60, stages.roofs),
    2: Stage("Parity with float32 on the CPU", 150, stages.parity),
    3: Stage("Tests on the card", 300, stages.tests),
    4: Stage("Micro-batches: memory and speed", 400, stages.batches),
    5: Stage("Ways to run a step", 300, stages.ways),
    7: Stage("Whole steps of four configs", 240, stages.steps),
    8: Stage("Sampling", 60, stages.sampling),
}


class Results:
    """The stages measured so far, kept in out_dir in files named after device, torch and commit."""

    def __init__(self, out_dir: Path, about: dict[str, Any], is_toy: bool) -> None:
        """Reads the results of earlier calls. Raises ValueError where they are damaged."""
        self.out_dir = out_dir
        self.about = about
        self.is_toy = is_toy
        name = f"{about['device']}-torch-{about['versions']['torch']}-{about['git_commit']}"
        self.name = re.sub(r"[^\w.+]+", "-", name.lower()).strip("-")
        self.entries: dict[int, dict[str, Any]] = {}  # by stage: seconds, text and figures, or error
        path = out_dir / f"{self.name}.json"
        if path.exists():
            try:
                earlier = json.loads(path.read_text(encoding="utf-8"))
                self.entries = {int(number): entry for number, entry in earlier["stages"].items()}
            except (ValueError, KeyError, AttributeError):
                raise ValueError(f"{path} is damaged: remove it, and the stages are measured again") from None

    def as_markdown(self) -> str:
        parts = [f"# {self.about['device']}", output.about(self.about)]
        if self.is_toy:
            parts.append("**Toy sizes: without a card, these figures only show that the code runs.**")
        for number, stage in STAGES.items():
            if number in self.entries:
                parts += [f"## {number}. {stage.heading}", section(self.entries[number])]
        missing = [str(number) for number in STAGES if number not in self.entries]
        if missing:
            parts.append(f"Not measured: stages {', '.join(missing)}.")
        best = self.entries.get(4, {}).get("figures", {}).get("best")
        if best and not self.is_toy:
            steps = stages.CARD_SEQUENCES // best
            line = f"python train.py config/train_fineweb_125m.py --batch_size={best}"
            parts.append(f"To train:\n\n```sh\n{line} --gradient_accumulation_steps={steps}\n```")
        return "\n\n".join(parts) + "\n"

    def write(self) -> None:
        found = {"about": self.about, "stages": self.entries}
        output.write_results(self.out_dir, self.name, self.as_markdown(), found)


def section(entry: dict[str, Any]) -> str:
    """What a stage found, or why it failed, and how long it took."""
    parts = [entry["text"]] if "text" in entry else []
    parts += [f"**Failed**: {line}" for line in entry.get("figures", {}).get("failed", [])]
    if "error" in entry:
        parts.append(f"**Failed**: {entry['error']}")
    if entry.get("figures", {}).get("unfinished"):
        parts.append(f"**Not finished**, for want of time: {'; '.join(entry['figures']['unfinished'])}")
    if "seconds" in entry:
        parts.append(f"This stage took {entry['seconds']:.0f} s.")
    return "\n\n".join(parts)


def outcome(entry: dict[str, Any]) -> str:
    """What became of a stage. One that ran out of time, and found nothing wrong until then, has not failed."""
    if "error" in entry or entry["figures"].get("failed"):
        return "failed"
    return "not finished" if entry["figures"].get("unfinished") else "passed"


def measure(s: stages.Session, stage: Stage) -> dict[str, Any]:
    """Text and figures of a stage, and its seconds; if it fails, its error in one line."""
    t0 = time.perf_counter()
    s.deadline = t0 + stage.limit_s
    torch.manual_seed(0)
    entry: dict[str, Any] = {}
    try:
        text, figures = stage.measure(s)
        hardware.synchronize(s.device)  # an error of a kernel shows only when its result is waited for
        # As a later call reads it: no NaN, and keys that are strings.
        entry = {"text": text, "figures": json.loads(json.dumps(figures), parse_constant=lambda _: None)}
    except (Exception, SystemExit) as e:  # a failed stage is a result, and the others may pass
        traceback.print_exc()
        entry = {"error": " ".join(f"{type(e).__name__}: {e}".split())[:300]}
    return entry | {"seconds": time.perf_counter() - t0}


def still_computes(device: torch.device) -> bool:
    """Whether the device still computes. CUDA never does after a kernel's fault."""
    try:
        hardware.release_memory(device)
        return torch.ones(2, device=device).sum().item() == 2
    except RuntimeError:
        return False


def numbers_of(text: str) -> list[int]:
    """The stages that text such as "0-3,7" names, in their order. Raises ConfigError."""
    named: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        numbers = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
        if not numbers or not {numbers[0], numbers[-1]} <= STAGES.keys():
            there = ", ".join(map(str, STAGES))
            raise ConfigError(f"--stages={text}: {part!r} is not among {there}; try --stages=0-3,7")
        named |= STAGES.keys() & set(numbers)
    return sorted(named)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = "stages:\n" + "\n".join(f"{number} {stage.heading}" for number, stage in STAGES.items())
    parser.add_argument("--stages", default=f"0-{max(STAGES)}", help="such as 0-3,7 (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure again what is there already")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--out_dir", default="out-qualify", help="folder of the results (default: %(default)s)")
    a = parser.parse_args()
    asked = numbers_of(a.stages)
    device = hardware.resolve_device(a.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32, as train.py has it
    about: dict[str, Any] = {
        "device": hardware.device_name(device),
        "versions": versions(),
        "compiler": compiling.compiler_name(device),
        "git_commit": git_commit(),
    }
    results = Results(Path(a.out_dir), about, stages.Session(device, Path()).is_toy)
    there = [n for n in asked if n in results.entries and not a.again]
    if there:
        outcomes = ", ".join(f"{n} {outcome(results.entries[n])}" for n in there)
        print(f"measured already: stages {outcomes}; --again measures them again")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        s = stages.Session(device, Path(tmp))
        s.results = {n: entry["figures"] for n, entry in results.entries.items() if "figures" in entry}
        for number in asked:
            if number in there:
                continue
            print(f"\n## {number}. {STAGES[number].heading}\n", flush=True)
            results.entries[number] = entry = measure(s, STAGES[number])
            s.results[number] = entry.get("figures", {})
            results.write()
            print(section(entry), flush=True)
            if not still_computes(device):
                print("\nthe device no longer computes; the same command continues with the stages that are left")
                break

    print(f"\nthe page: {results.out_dir / results.name}.md")
    found = [outcome(results.entries[n]) if n in results.entries else "failed" for n in asked]
    if "failed" in found:
        raise SystemExit(1)
    if "not finished" in found:
        raise SystemExit(3)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    with one_line_errors():
        main()
