"""Checks and measures everything about a card, in at most 25 minutes, and writes a page about it.

    python bench/qualify.py                        # or: make qualify; all stages that are not there yet
    python bench/qualify.py --stages=0-3,7         # of these, the ones that are not there yet
    python bench/qualify.py --stages=7 --again     # a stage that is there is measured again
    python bench/qualify.py --nanogpt=../nanoGPT   # with an unmodified checkout of nanoGPT for stage 10
    python bench/qualify.py --save                 # also writes bench/results/DATE-qualify-CARD.md and .json

Needs no data and no network. docs/qualify.md says what each stage measures. After each stage the results so far are
written to out-qualify/ as .json and .md; a later call for the same device, torch and commit continues from them. A
stage that fails is a result too. Without a GPU everything runs on the CPU at toy sizes. Ends with exit status 1 where
one of the stages asked for has failed, and with 3 where none has, but one ran out of time.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import torch

from bench import output
from bench.qualifying import facts, page, work
from bench.qualifying.session import CARD, TOY, Session, Sizes
from bench.qualifying.stages import STAGES, Stage, numbers_of
from deskgpt.compute import compiling
from deskgpt.system import hardware, provenance
from deskgpt.system.errors import ConfigError, one_line_errors

KILLED = "did not end: its process was killed"
STATUS_IF_NOT_FINISHED = 3


# ---- results -------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What is known about a card; kept in out_dir, in files named after device, torch and commit."""

    out_dir: Path
    about: dict[str, Any]  # as output.about has it
    sizes: Sizes
    commands: list[str] = field(default_factory=list)
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)  # by stage: seconds, result and text, or error

    def name(self) -> str:
        about = self.about
        return file_name(f"{about['device']}-torch-{about['versions']['torch']}-{about['git_commit']}")

    def read(self) -> None:
        """Takes the results of earlier calls, if there are any; not those of stages that did not end."""
        path = self.out_dir / f"{self.name()}.json"
        if not path.exists():
            return
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            self.commands = earlier["commands"]
            entries = {int(number): entry for number, entry in earlier["stages"].items()}
        except (ValueError, KeyError, AttributeError):
            raise ValueError(f"{path} is damaged: remove it, and the stages are measured again") from None
        self.entries = {number: entry for number, entry in entries.items() if entry.get("error") != KILLED}

    def text(self) -> str:
        return page.as_markdown(self.about, self.commands, self.entries, self.sizes)

    def as_json(self) -> dict[str, Any]:
        return {"about": self.about, "sizes": asdict(self.sizes), "commands": self.commands, "stages": self.entries}

    def write(self) -> None:
        output.write_results(self.out_dir, self.name(), self.text(), self.as_json())


def file_name(text: str) -> str:
    return re.sub(r"[^\w.+]+", "-", text.lower()).strip("-")


def about_machine(device: torch.device) -> dict[str, Any]:
    driver = facts.nvidia_smi(device).get("driver")
    return {
        "device": hardware.device_name(device),
        "versions": provenance.versions() | ({"driver": driver} if driver else {}),
        "compiler": compiling.compiler_name(device),
        "git_commit": provenance.git_commit(),
    }


# ---- stages --------------------------------------------------------------------------------------------------


def measure_stages(s: Session, report: Report, due: list[int]) -> None:
    """Measures the stages that are due, one after the other, until the device no longer computes."""
    for number in due:
        stage = STAGES[number]
        s.print0(f"\n## {number}. {stage.heading}\n")
        report.entries[number] = {"error": KILLED}  # unless this process lives to replace it
        s.results.pop(number, None)
        report.write()
        entry = measured(s, stage)
        answers = is_ready_again(s.device)
        report.entries[number] = entry
        if "result" in entry:
            s.results[number] = entry["result"]
        report.write()
        s.print0(page.section(entry))
        if not answers:
            s.print0("\nthe device no longer computes; the same command goes on with the stages that are left")
            return


def measured(s: Session, stage: Stage) -> dict[str, Any]:
    """The seconds of a stage, its result and that as text; where it fails, its error in one line."""
    t0 = time.perf_counter()
    s.deadline = t0 + stage.limit_s
    torch.manual_seed(0)
    entry: dict[str, Any] = {}
    try:
        result = stage.measure(s)
        hardware.synchronize(s.device)  # an error of a kernel shows only when its result is waited for
        # As a later call reads it: no NaN, and keys that are strings.
        entry["result"] = json.loads(json.dumps(result), parse_constant=lambda _: None)
        entry["text"] = stage.describe(entry["result"])
    except (Exception, SystemExit) as e:  # a failed stage is a result, and the others may pass
        traceback.print_exc()
        entry["error"] = work.problem_of(e)
    return entry | {"seconds": time.perf_counter() - t0}


def is_ready_again(device: torch.device) -> bool:
    """Frees what a stage held; returns whether the device still computes. CUDA never does after a kernel's fault."""
    try:
        hardware.release_memory(device)
        return torch.ones(2, device=device).sum().item() == 2
    except RuntimeError:
        return False


# ---- script --------------------------------------------------------------------------------------------------


def read_arguments() -> argparse.Namespace:
    """The arguments. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = "\n".join(f"{number} {stage.heading}" for number, stage in STAGES.items())
    parser.epilog = f"stages:\n{stages}"
    everything = f"0-{max(STAGES)}"
    parser.add_argument("--stages", default=everything, help="such as 0-3,7 (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure again what is there already")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--nanogpt", metavar="PATH", type=Path, help="an unmodified checkout of nanoGPT")
    parser.add_argument("--out_dir", default="out-qualify", help="folder of the results (default: %(default)s)")
    parser.add_argument("--save", metavar="NAME", nargs="?", const="", help="NAME is qualify-CARD if not given")
    a = parser.parse_args()
    output.check_name(a.save or None)
    if a.nanogpt is not None and not (a.nanogpt / "train.py").is_file():
        raise ConfigError(f"--nanogpt={a.nanogpt} holds no train.py; name a checkout of nanoGPT")
    return a


def stages_due(a: argparse.Namespace, report: Report, asked: list[int]) -> list[int]:
    """The stages to measure; says which ones are there already."""
    there = [n for n in asked if n in report.entries and not a.again]
    if there:
        outcomes = [f"{n} {page.outcome(report.entries[n])}" for n in there]
        print(f"there already: stages {', '.join(outcomes)}; --again measures them again")
    return [n for n in asked if n not in there]


def main() -> None:
    a = read_arguments()
    asked = numbers_of(a.stages)
    device = hardware.resolve_device(a.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32, as train.py has it
    report = Report(Path(a.out_dir), about_machine(device), CARD if device.type == "cuda" else TOY)
    report.read()
    command = output.command_line("qualify.py")
    if command not in report.commands:
        report.commands.append(command)

    due = stages_due(a, report, asked)
    with tempfile.TemporaryDirectory() as tmp:
        results = page.results_of(report.entries)
        s = Session(device, report.sizes, Path(tmp), a.nanogpt, results)
        measure_stages(s, report, due)

    report.write()
    print(f"\n## What follows\n\n{page.what_follows(report.about['device'], results, report.sizes)}")
    print(f"\nthe page: {report.out_dir / report.name()}.md")
    if a.save is not None:
        name = a.save or file_name(f"qualify-{report.about['device'].partition(' (')[0]}")
        output.save(name, report.text(), report.as_json())
    outcomes = {page.outcome(report.entries[n]) if n in report.entries else "failed" for n in asked}
    if outcomes != {"passed"}:
        raise SystemExit(1 if "failed" in outcomes else STATUS_IF_NOT_FINISHED)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    with one_line_errors():
        main()
