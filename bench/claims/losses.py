"""The claims about losses: runs of train.py's main, evaluated on the same windows each time."""

from __future__ import annotations

import io
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

import train
from bench.analysis.noise import difference, interval
from bench.claims.sizes import CHARS, EVAL_TOKENS, Events, Found, Options, Settings
from bench.claims.speeds import factor, log_ratios, of_times, timed
from data.loader import eval_batches
from data.splits import Split
from data.token_files import read_tokens, token_files
from deskgpt.checkpoint import store
from deskgpt.compute.batching import Batching
from deskgpt.compute.ranks import Ranks
from deskgpt.compute.runner import Form, Runner
from deskgpt.machine import peak_flops
from deskgpt.run.log import read_events
from model import GPT, GPTConfig


def folder_of(o: Options, name: str = "shakespeare_char") -> Path:
    """The folder of token files for an experiment. Raises ValueError, naming prepare.py, where there are none."""
    folder = Path(o.data).resolve() if o.data else train.DATA / name
    token_files(folder, "train")
    return folder


def trained(o: Options, folder: Path, settings: Settings, out: Path | None = None) -> Events:
    """The log of a complete run of train.py's main; its checkpoints stay in `out`, where that is given."""
    with tempfile.TemporaryDirectory(dir=o.tmp) as unnamed:
        out_dir = out or Path(unnamed)
        same: Settings = {
            "dataset": str(folder),
            "out_dir": str(out_dir),
            "device": str(o.device),
            "eval_tokens": EVAL_TOKENS,
            "compile": o.sizes.compile,
            "eval_interval": 10**6,
            "always_save_checkpoint": False,
        }
        c = train.TrainConfig(**(same | settings | {"max_iters": capped(o, settings["max_iters"])}))
        torch.compiler.reset()  # otherwise the models before this one count as recompilations
        with redirect_stdout(io.StringIO()):
            train.main(c)
        events = read_events(out_dir / "log.jsonl")
    o.compilers |= {e["compiler"] for e in events if e.get("compiler")}
    own = ", ".join(f"{k} {settings[k]}" for k in ("batch_size", "learning_rate", "dtype", "seed") if k in settings)
    print(f"{own}: val loss {evals(events)[-1]['val_loss']:.4f} after {c.max_iters:,} steps", flush=True)
    return events


def capped(o: Options, steps: int) -> int:
    """These steps, but at most those of --steps."""
    return min(steps, o.steps or steps)


def evals(events: Events) -> Events:
    return [e for e in events if e["event"] == "eval"]


def curve(events: Events) -> list[float]:
    """The training loss of every step."""
    return [e["loss"] for e in events if e["event"] == "iter"]


def seeds(o: Options) -> range:
    return range(1337, 1337 + o.seeds)


def mean_of(values: Sequence[float], digits: int = 4) -> str:
    """The mean, with half the width of its 95% interval."""
    mean, half = interval(values)
    return f"{mean:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def versus(a: Sequence[float], b: Sequence[float], digits: int = 4, unit: str = "") -> str:
    """mean of b - mean of a, with Welch's 95% interval and what that says."""
    gap, half = difference(a, b)
    if half is None:
        return f"{gap:+.{digits}f}{unit} (one seed)"
    same = "" if abs(gap) > half else ", which cannot be told from 0"
    return f"{gap:+.{digits}f} ± {half:.{digits}f}{unit}{same}"


# ---- claim 4 -------------------------------------------------------------------------------------------------


def accumulation(o: Options) -> Found:
    folder = folder_of(o)
    steps = capped(o, 40)
    model: Settings = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "block_size": 32,
        "warmup_iters": 5,
        "learning_rate": 1e-3,
        "dtype": "float32",
        "compile": False,
        "decay_lr": False,
    }
    rows: list[dict[str, Any]] = []
    curves: list[list[float]] = []
    for batch, accumulated, n in ((8, 1, steps), (4, 2, steps), (8, 2, steps // 2)):
        split = {"batch_size": batch, "gradient_accumulation_steps": accumulated, "max_iters": n}
        events = trained(o, folder, model | split)
        losses = curve(events)
        curves.append(losses)
        rows.append(
            {
                "batch_size": batch,
                "accumulation": accumulated,
                "tokens per step": batch * accumulated * 32,
                "steps": len(losses),
                "tokens": max(e["tokens"] for e in events if e["event"] == "iter"),
                "last training loss": losses[-1],
            }
        )
    apart = max(abs(a - b) for a, b in zip(curves[0], curves[1], strict=True))
    says = [
        f"Twice the accumulation with half the micro-batch: {len(curves[1])} steps as before, losses of the steps at "
        f"most {apart:.1e} apart.",
        f"Twice the accumulation with the same micro-batch: {len(curves[2])} steps for the same tokens, since a step "
        "takes twice as many.",
    ]
    return Found(rows, says, curves, {"float32"})


# ---- claim 7 -------------------------------------------------------------------------------------------------


def low_learning_rate(o: Options) -> Found:
    folder = folder_of(o, o.sizes.text)
    rates = (3e-4, 1e-3, 3e-3)
    losses: dict[float, list[float]] = {lr: [] for lr in rates}
    for seed, lr in itertools.product(seeds(o), rates):
        run = {"learning_rate": lr, "seed": seed, "max_iters": o.sizes.learned_steps}
        events = trained(o, folder, o.sizes.learned | run)
        losses[lr].append(evals(events)[-1]["val_loss"])
    steps = capped(o, o.sizes.learned_steps)
    rows = [{"learning rate": lr, "steps": steps, "val loss": mean_of(v)} for lr, v in losses.items()]
    says = [f"{lr:g} against 3e-4: {versus(losses[3e-4], losses[lr])}." for lr in rates[1:]]
    return Found(rows, says, {f"{lr:g}": v for lr, v in losses.items()}, {events[0]["dtype"]})


# ---- claim 8 -------------------------------------------------------------------------------------------------


def precision(o: Options) -> Found:
    folder = folder_of(o, o.sizes.text)
    dtypes = o.sizes.dtypes
    curves: dict[str, list[list[float]]] = {dtype: [] for dtype in dtypes}
    val: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for seed, dtype in itertools.product(seeds(o), dtypes):
        run = {"dtype": dtype, "seed": seed, "max_iters": o.sizes.learned_steps}
        events = trained(o, folder, o.sizes.learned | run)
        curves[dtype].append(curve(events))
        val[dtype].append(evals(events)[-1]["val_loss"])

    rows = [{"dtype": dtype, "steps": len(curves[dtype][0]), "val loss": mean_of(v)} for dtype, v in val.items()]
    says = []
    for dtype in dtypes[1:]:
        same = mean_distance(list(zip(curves["float32"], curves[dtype], strict=True)))
        paired, half = interval([b - a for a, b in zip(val["float32"], val[dtype], strict=True)])
        says.append(
            f"{dtype} against float32, same weights and batches: a step's training loss is {same:.4f} apart in the "
            f"mean; val loss {versus(val['float32'], val[dtype])}; seed by seed {paired:+.4f} ± {half or math.nan:.4f}."
        )
    if o.seeds > 1:
        others = mean_distance(list(itertools.combinations(curves["float32"], 2)))
        val_apart = statistics.fmean(abs(a - b) for a, b in itertools.combinations(val["float32"], 2))
        says.append(
            f"Two seeds in float32: a step's training loss is {others:.4f} apart in the mean, val loss {val_apart:.4f}."
        )
    rounded = {
        dtype: [[round(loss, 5) for loss in losses] for losses in of_dtype] for dtype, of_dtype in curves.items()
    }
    return Found(rows, says, {"val_loss": val, "curves": rounded}, set(dtypes))


def mean_distance(pairs: list[tuple[list[float], list[float]]]) -> float:
    """The mean distance between the losses of the same step in two runs, over pairs of runs."""
    return statistics.fmean(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))


# ---- claim 9 -------------------------------------------------------------------------------------------------


def random_evaluation(o: Options) -> Found:
    folder = folder_of(o)
    T = CHARS["block_size"]
    B = CHARS["batch_size"]
    trained(o, folder, CHARS | {"max_iters": 500, "dtype": "float32"}, o.tmp / "evaluated")
    saved = store.load(o.tmp / "evaluated")
    model = GPT.from_state(GPTConfig.from_args(saved.model_args, "checkpoint"), saved.model, "checkpoint").to(o.device)
    split = Split(folder, "val", T, model.config.vocab_size)
    runner = Runner(model, Form())
    at_random = random_evaluator(model, folder, T, B, o.device)

    rows, says, raw = [], [], {}

    def evaluated(at_most: int) -> float:
        batches = eval_batches(split, Batching(B, eval_windows=at_most), o.device)
        return runner.evaluate(batches, Ranks(o.device)).loss

    whole = evaluated(10**9)
    for batches, repeats in ((20, 30), (200, 20)):
        repeats = capped(o, repeats)
        random = [at_random(batches) for _ in range(repeats)]
        fixed = [evaluated(batches * B) for _ in range(2)]
        raw[f"random {batches}"] = random
        raw[f"fixed {batches}"] = fixed
        for way, losses in (("random", random), ("fixed", fixed)):
            rows.append(
                {
                    "windows": f"{batches} x {B}, {way}",
                    "evaluations": len(losses),
                    "mean": statistics.fmean(losses),
                    "standard deviation": statistics.stdev(losses),
                    "lowest": min(losses),
                    "highest": max(losses),
                }
            )
        apart = 1.96 * math.sqrt(2) * statistics.stdev(random)
        says.append(
            f"{batches} x {B} random windows: two evaluations of one model differ by up to {apart:.4f} (95%; most of "
            f"these {repeats}: {max(random) - min(random):.4f}); fixed ones by {max(fixed) - min(fixed):.4f}, and "
            f"they are {fixed[0] - whole:+.4f} from the whole split, always."
        )
    rows.append({"windows": "the whole split", "evaluations": 1, "mean": whole})
    return Found(rows, says, raw, {"float32"})


def random_evaluator(model: GPT, folder: Path, T: int, B: int, device: torch.device) -> Callable[[int], float]:
    """nanoGPT's way to evaluate: a function that gives the mean loss of n batches of windows from random offsets."""
    ids = read_tokens(token_files(folder, "val")[0])
    draw = np.random.default_rng(0)

    def evaluate(batches: int) -> float:
        model.eval()
        losses = []
        with torch.no_grad():
            for _ in range(batches):
                offsets = draw.integers(0, len(ids) - T, B)
                windows = np.stack([ids[i : i + T + 1] for i in offsets]).astype(np.int64)
                x = torch.from_numpy(windows).to(device)
                losses.append(model(x[:, :-1], x[:, 1:])[1].item())
        return statistics.fmean(losses)

    return evaluate


# ---- claim 10 ------------------------------------------------------------------------------------------------


def characters(o: Options) -> Found:
    folder = folder_of(o)
    lengths = sorted({capped(o, steps) for steps in (2000, 10_000)})  # of the schedule
    asked = {capped(o, step) for step in (2000, 5000, 10_000)}
    # Only losses matter here, and they are the same in the faster dtype and compiled (claim 8).
    settings = CHARS | {
        "eval_tokens": 1 << 17,
        "eval_interval": min(1000, *asked),
        "dtype": peak_flops.fast_dtype(o.device),
        "compile": "auto",
    }
    found: dict[tuple[int, int], Events] = {}  # evaluations of each seed, by length and step
    for seed, length in itertools.product(seeds(o), lengths):
        for e in evals(trained(o, folder, settings | {"seed": seed, "max_iters": length})):
            if e["iter"] in asked:
                found.setdefault((length, e["iter"]), []).append(e)
    rows = []
    for (length, step), of_seeds in sorted(found.items()):
        val = [e["val_loss"] for e in of_seeds]
        rows.append(
            {
                "schedule's length": length,
                "at step": step,
                "val loss": mean_of(val),
                "train loss": mean_of([e["train_loss"] for e in of_seeds]),
                "val loss by seed": ", ".join(f"{loss:.4f}" for loss in val),
            }
        )
    raw = [{"length": length, "step": step, "evaluations": v} for (length, step), v in found.items()]
    says = ["The losses are those of the whole validation split and of as many training tokens."]
    return Found(rows, says, raw, {settings["dtype"]})


# ---- claim 12 ------------------------------------------------------------------------------------------------


def larger_batch(o: Options) -> Found:
    target = 2.3
    # Each size has two rates of its own, those of 24 higher by the square root of 2, so that neither is at a
    # disadvantage by the other's.
    rates = ((12, 3e-3), (12, 6e-3), (24, 4.2e-3), (24, 8.5e-3))
    reached, curves = steps_with_each(o, rates, target)
    runs = timed(o, {f"batch {b}": CHARS | {"batch_size": b, "dtype": "float32"} for b in (12, 24)}, 65)
    step_s = {12: runs[0].step_ms()["ms"] / 1e3, 24: runs[1].step_ms()["ms"] / 1e3}

    rows: list[dict[str, Any]] = []
    best_rate: dict[int, float] = {}
    best_steps: dict[int, list[float]] = {}  # of each seed, with the best rate
    for (batch, lr), of_seeds in sorted(reached.items()):
        steps = [n for n in of_seeds if n is not None]
        row = {"batch": batch, "learning rate": lr, "seeds at the target": f"{len(steps)} of {o.seeds}"}
        if len(steps) == o.seeds:
            mean = statistics.fmean(steps)
            row |= {
                "steps": mean_of(steps, 0),
                "tokens": mean * batch * CHARS["block_size"],
                "ms per step": step_s[batch] * 1e3,
                "seconds": mean * step_s[batch],
            }
            if batch not in best_steps or mean < statistics.fmean(best_steps[batch]):
                best_rate[batch] = lr
                best_steps[batch] = steps
        rows.append(row)

    says = [f"A step of 24 takes {factor(log_ratios(*runs))} times as long as one of 12."]
    if len(best_steps) == 2:
        seconds = {b: [n * step_s[b] for n in steps] for b, steps in best_steps.items()}
        tokens = {b: [n * b * CHARS["block_size"] for n in steps] for b, steps in best_steps.items()}
        says.append(
            f"To val loss {target}, each at its best rate ({best_rate[12]:g} and {best_rate[24]:g}): "
            f"{statistics.fmean(seconds[12]):.1f} s with 12, {statistics.fmean(seconds[24]):.1f} s with 24, "
            f"{versus(seconds[12], seconds[24], 1, ' s')}; tokens {versus(tokens[12], tokens[24], 0)}."
        )
    raw = {
        "steps": {f"{batch}, {lr:g}": steps for (batch, lr), steps in reached.items()},
        "curves": curves,
        "times": of_times(runs, []).raw,
    }
    return Found(rows, says, raw, {"float32"})


def steps_with_each(
    o: Options, rates: Sequence[tuple[int, float]], target: float
) -> tuple[dict[tuple[int, float], list[float | None]], list[dict[str, Any]]]:
    """(steps to the target of each seed by batch and learning rate, the curves of all runs)."""
    folder = folder_of(o)
    reached: dict[tuple[int, float], list[float | None]] = {pair: [] for pair in rates}
    curves = []
    for seed, (batch, lr) in itertools.product(seeds(o), rates):
        # The same tokens and evaluations for each size, at a constant rate: the end of a schedule would decide else.
        scale = 24 // batch
        run = {
            "batch_size": batch,
            "learning_rate": lr,
            "min_lr": lr,
            "seed": seed,
            "dtype": "float32",
            "max_iters": 240 * scale,
            "eval_interval": capped(o, 15 * scale),
            "warmup_iters": 50 * scale,
            "eval_tokens": 1 << 13,  # few, because there are many evaluations
        }
        evaluations = evals(trained(o, folder, CHARS | run))
        reached[batch, lr].append(steps_to(evaluations, target))
        points = [(e["iter"], e["val_loss"]) for e in evaluations]
        curves.append({"seed": seed, "batch": batch, "learning_rate": lr, "val_loss": points})
    return reached, curves


def steps_to(evaluations: Events, target: float) -> float | None:
    """The step at which the val loss crosses the target, on a line between evaluations; None where it does not."""
    for a, b in itertools.pairwise(evaluations):
        if b["val_loss"] <= target < a["val_loss"]:
            share = (a["val_loss"] - target) / (a["val_loss"] - b["val_loss"])
            return a["iter"] + (b["iter"] - a["iter"]) * share
    return None
