"""What a training run recorded, from its out_dir."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITER = ("iter", "loss", "time_ms", "mfu", "tokens_per_s", "lr", "grad_norm", "tokens", "train_s")
EVAL = ("iter", "train_loss", "val_loss", "val_se", "lr", "tokens", "train_s", "eval_s")


@dataclass
class Run:
    name: str  # unique among those compared
    settings: dict[str, Any]  # train.py's, as far as known
    start: dict[str, Any]  # the "start" event of log.jsonl without settings; {} for a printed log
    iters: list[dict[str, Any]]  # per logged step, each of ITER or None
    evals: list[dict[str, Any]]  # per evaluation, each of EVAL or None
    end: dict[str, Any]  # the "end" event, {} where there is none
    flops_per_token: float | None
    notes: list[str]  # what was odd in the log


def read_run(path: str) -> Run:
    """The run in an out_dir. Raises ValueError where there is none."""
    log = Path(path) / "log.jsonl"
    if not log.is_file():
        raise ValueError(f"{path} holds no log.jsonl; name the out_dir of a run")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    kinds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("start", "iter", "eval", "save", "end")}
    for e in events:
        kinds[e.pop("event")].append(e)
    start = kinds["start"][-1] if kinds["start"] else {}
    settings = start.pop("settings", {})
    iters, evals = (
        [{name: e.get(name) for name in names} for _, e in sorted({e["iter"]: e for e in kinds[kind]}.items())]
        for kind, names in (("iter", ITER), ("eval", EVAL))
    )
    end = kinds["end"][-1] if kinds["end"] else {}
    return Run(Path(path).name, settings, start, iters, evals, end, start.get("flops_per_token"), [])
