"""The page about a card: what each stage found, and what follows for the README and train.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from bench import output
from bench.output import markdown_table
from bench.qualifying.session import Sizes
from bench.qualifying.stages import STAGES

RECIPE = "config/train_fineweb_125m.py"  # which has the model and the tokens per step of stages 4 to 7
TOY_REMARK = "**Toy sizes: without a card, these figures only show that the code runs.**"


def outcome(entry: dict[str, Any]) -> Literal["failed", "not finished", "passed"]:
    """What became of a stage. One that ran out of time, and found nothing wrong until then, has not failed."""
    if "error" in entry or entry["result"].get("failed"):
        return "failed"
    return "not finished" if entry["result"].get("unfinished") else "passed"


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
    else:
        lines = [f"- **Failed**: {line}" for line in entry["result"].get("failed", [])]
        unfinished = entry["result"].get("unfinished")
        if unfinished:
            lines.append(f"- **Not finished**, for want of time: {'; '.join(unfinished)}")
        parts += ["\n".join(lines)] if lines else []
    if "seconds" in entry:
        parts.append(f"This stage took {entry['seconds']:.0f} s.")
    return "\n\n".join(parts)


def what_follows(device: str, results: dict[int, dict[str, Any]], sizes: Sizes) -> str:
    """The README's row and the train.py command; what the results do not say is left out."""
    sequences = sizes.tokens_per_step // sizes.model.block_size
    micro_batch = results.get(4, {}).get("best")
    steps = results.get(7, {})
    parts = []
    if steps.get("rows"):
        adamw = steps["rows"][0]
        head = ["card", "tokens/s", "MFU", "micro-batch", "peak memory"]
        mfu = f"{adamw['mfu']:.1%}" if steps["is_published"] else "n/a"
        peak = "n/a" if adamw["memory_gb"] is None else f"{adamw['memory_gb']:.1f} GB"
        row = [device, f"{adamw['tokens_per_s']:,.0f}", mfu, str(micro_batch), peak]
        parts += ["For the README:", markdown_table(head, [row], left_columns=1)]
    if micro_batch:
        settings = f"--batch_size={micro_batch} --gradient_accumulation_steps={sequences // micro_batch}"
        parts += ["To train:", f"```sh\npython train.py {RECIPE} {settings}\n```"]
    return "\n\n".join(parts) or "Nothing yet: stages 4 and 7 say it."
