"""The page about a card: what each stage found, and what follows for the README, the config files and train.py."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from bench import output
from bench.output import markdown_table
from bench.qualifying.session import Sizes
from bench.qualifying.stages import STAGES
from bench.timing import ROOT

RECIPE = "config/train_fineweb_125m.py"  # which has the model and the tokens per step of stages 4 to 7
TOY_REMARK = "**Toy sizes: without a card, these figures only show that the code runs.**"


def passed(entry: dict[str, Any]) -> bool:
    """Whether a stage ended and found nothing wrong."""
    return "error" not in entry and not entry["result"].get("failed")


def results_of(entries: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The results of the stages that ended, by number."""
    return {number: entry["result"] for number, entry in entries.items() if "result" in entry}


def as_markdown(
    about: dict[str, Any], commands: Iterable[str], entries: dict[int, dict[str, Any]], sizes: Sizes
) -> str:
    """The whole page. entries: by stage its seconds, and result and text, or its error."""
    parts = [f"# {about['device']}", output.about(about)]
    if sizes.is_toy:
        parts.append(TOY_REMARK)
    parts.append("\n".join(["```sh", *commands, "```"]))
    for number, stage in STAGES.items():
        if number in entries:
            parts += [f"## {number}. {stage.heading}", section(entries[number])]
    missing = [str(number) for number in STAGES if number not in entries]
    if missing:
        parts.append(f"Not measured: stages {', '.join(missing)}.")
    parts += ["## What follows", what_follows(about["device"], results_of(entries), sizes)]
    return "\n\n".join(parts) + "\n"


def section(entry: dict[str, Any]) -> str:
    """What a stage found, or why it failed, and how long it took."""
    parts = [entry["text"]] if "text" in entry else []
    if "error" in entry:
        parts.append(f"**Failed**: {entry['error']}")
    elif not passed(entry):
        parts.append("\n".join(f"- **Failed**: {line}" for line in entry["result"]["failed"]))
    if "seconds" in entry:
        parts.append(f"This stage took {entry['seconds']:.0f} s.")
    return "\n\n".join(parts)


def what_follows(device: str, results: dict[int, dict[str, Any]], sizes: Sizes) -> str:
    """The README's row, lines of config/gpu_*.py and the train.py command; what the results do not say is left out."""
    sequences = sizes.tokens_per_step // sizes.model.block_size
    best = results.get(4, {}).get("best")
    micro_batch = results.get(7, {}).get("batch_size") or (largest_divisor(sequences, best) if best else None)
    parts = []
    steps = results.get(7, {}).get("adamw", {})
    if steps.get("tokens_per_s"):
        head = ["card", "tokens/s", "MFU", "micro-batch", "peak memory"]
        mfu = "n/a" if steps["mfu"] is None else f"{steps['mfu']:.1%}"
        peak = "n/a" if steps["peak_bytes"] is None else f"{steps['peak_bytes'] / 2**30:.1f} GiB"
        row = [device, f"{steps['tokens_per_s']:,.0f}", mfu, str(micro_batch or "n/a"), peak]
        parts += ["For the README:", markdown_table(head, [row], left_columns=1)]
    presets = results.get(4, {}).get("best_for_gb", {})
    if presets:
        lines = [preset_line(gb, n and largest_divisor(sequences, n)) for gb, n in presets.items()]
        parts += ["For `config/gpu_*.py`:", "\n".join(lines)]
    if micro_batch:
        settings = f"--batch_size={micro_batch} --gradient_accumulation_steps={sequences // micro_batch}"
        parts += ["To train:", f"```sh\npython train.py {RECIPE} {settings}\n```"]
    return "\n\n".join(parts) or "Nothing yet: stages 4 and 7 say it."


def largest_divisor(sequences: int, largest: int) -> int:
    """The largest micro-batch of at most `largest` sequences that divides those of a step."""
    return max(n for n in range(1, largest + 1) if sequences % n == 0)


def preset_line(gb: str, largest: int | None) -> str:
    """What the preset of a card with gb GB should say, and what it says now."""
    name = f"config/gpu_{gb}gb.py"
    found = re.search(r"largest=(\d+)", (ROOT / name).read_text(encoding="utf-8"))
    now = f"now largest={found[1]}" if found else "which names no largest now"
    if largest is None:
        return f"- `{name}`: n/a ({now})"
    return f"- `{name}`: `largest={largest}` ({now})"
