"""The claims about losses: runs of train.py's main, evaluated on the same windows each time."""

from __future__ import annotations

import io
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

import train
from bench.analysis.noise import difference, interval
from bench.claims.sizes import CHARS, EVAL_TOKENS, Events, Found, Options, Settings
from bench.claims.speeds import factor, log_ratios, of_times, timed
from data.splits import Split
from data.token_files import read_tokens, token_files
from deskgpt import checkpoint, peak_flops
from deskgpt.runner import Form, Runner
from model import GPT, GPTConfig


def folder_of(o: Options, name: str = "shakespeare_char") -> Path:
    """The folder of token files for an experiment. Raises ValueError, naming prepare.py, where there are none."""
    folder = Path(o.data).resolve() if o.data else train.DATA / name
    token_files(folder, "train")
    return folder


def trained(o: Options, folder: Path, settings: Settings, out: Path | None = None) -> Events:
    """The log of a run of train.py's main, to its end; checkpoints, too, where `out` is given."""
    with tempfile.TemporaryDirectory(dir=o.tmp) as unnamed:
        out_dir = out or Path(unnamed)
        same: Settings = {
            "dataset": str(folder),
            "out_dir": str(out_dir),
            "device": str(o.device),
            "eval_tokens": EVAL_TOKENS,
        }
        same |= {"compile": o.sizes.compile, "eval_interval": 10**6, "always_save_checkpoint": False}
        c = train.TrainConfig(**(same | settings | {"max_iters": capped(o, settings["max_iters"])}))
        torch.compiler.reset()  # or the models before this one count as recompilations
        with redirect_stdout(io.StringIO()):
            train.main(c)
        events = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    o.compilers |= {e["compiler"] for e in events if e.get("compiler")}
    own = ", ".join(f"{k} {settings[k]}" for k in ("batch_size", "learning_rate", "dtype", "seed") if k in settings)
    print(f"{own}: val loss {evals(events)[-1]['val_loss']:.4f} after {c.max_iters:,} steps", flush=True)
    return events


def capped(o: Options, steps: int) -> int:
    return min(steps, o.steps or steps)


def evals(events: Events) -> Events:
    return [e for e in events if e["event"] == "eval"]


def curve(events: Events) -> list[float]:
    """The training loss of every step."""
    return [e["loss"] for e in events if e["event"] == "iter"]


def seeds(o: Options) -> range:
    return range(1337, 1337 + o.seeds)


def mean_of(values: Sequence[float], digits: int = 4) -> str:
    """The mean with the half width of its 95% interval."""
    mean, half = interval(values)
    return f"{mean:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def versus(a: Sequence[float], b: Sequence[float], digits: int = 4, unit: str = "") -> str:
    """mean of b - mean of a, with Welch's 95% interval and what that tells."""
    d, half = difference(a, b)
    if half is None:
        return f"{d:+.{digits}f}{unit} (one seed)"
    return f"{d:+.{digits}f} ± {half:.{digits}f}{unit}" + ("" if abs(d) > half else ", which cannot be told from 0")


# ---- the experiments -----------------------------------------------------------------------------------------


def accumulation(o: Options) -> Found:
    folder, steps = folder_of(o), capped(o, 40)
    model: Settings = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "block_size": 32,
        "warmup_iters": 5,
        "learning_rate": 1e-3,
    }
    model |= {"dtype": "float32", "compile": False, "decay_lr": False}
    rows: list[dict[str, Any]] = []
    curves: list[list[float]] = []
    for batch, accumulated, n in ((8, 1, steps), (4, 2, steps), (8, 2, steps // 2)):
        split = {"batch_size": batch, "gradient_accumulation_steps": accumulated, "max_iters": n}
        events = trained(o, folder, model | split)
        curves.append(curve(events))
        row = {"batch_size": batch, "accumulation": accumulated, "tokens per step": batch * accumulated * 32}
        tokens = max(e["tokens"] for e in events if e["event"] == "iter")
        rows.append(row | {"steps": len(curves[-1]), "tokens": tokens, "last training loss": curves[-1][-1]})
    apart = max(abs(a - b) for a, b in zip(curves[0], curves[1], strict=True))
    says = [
        f"Twice the accumulation with half the micro-batch: {len(curves[1])} steps as before, losses of the steps at "
        f"most {apart:.1e} apart.",
        f"Twice the accumulation with the same micro-batch: {len(curves[2])} steps for the same tokens, since a step "
        "takes twice as many.",
    ]
    return Found(rows, says, curves, {"float32"})


def low_learning_rate(o: Options) -> Found:
    folder, rates = folder_of(o, o.sizes.text), (3e-4, 1e-3, 3e-3)
    losses: dict[float, list[float]] = {lr: [] for lr in rates}
    for seed, lr in itertools.product(seeds(o), rates):
        run = {"learning_rate": lr, "seed": seed, "max_iters": o.sizes.learned_steps}
        events = trained(o, folder, o.sizes.learned | run)
        losses[lr].append(evals(events)[-1]["val_loss"])
    steps = capped(o, o.sizes.learned_steps)
    rows = [{"learning rate": lr, "steps": steps, "val loss": mean_of(v)} for lr, v in losses.items()]
    says = [f"{lr:g} against 3e-4: {versus(losses[3e-4], losses[lr])}." for lr in rates[1:]]
    return Found(rows, says, {f"{lr:g}": v for lr, v in losses.items()}, {events[0]["dtype"]})


def precision(o: Options) -> Found:
    folder, dtypes = folder_of(o, o.sizes.text), o.sizes.dtypes
    runs: dict[str, list[Events]] = {dtype: [] for dtype in dtypes}
    for seed, dtype in itertools.product(seeds(o), dtypes):
        run = {"dtype": dtype, "seed": seed, "max_iters": o.sizes.learned_steps}
        runs[dtype].append(trained(o, folder, o.sizes.learned | run))
    curves = {dtype: [curve(e) for e in x] for dtype, x in runs.items()}
    val = {dtype: [evals(e)[-1]["val_loss"] for e in x] for dtype, x in runs.items()}

    def apart(pairs: list[tuple[list[float], list[float]]]) -> float:
        return statistics.fmean(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))

    rows = [{"dtype": dtype, "steps": len(curves[dtype][0]), "val loss": mean_of(v)} for dtype, v in val.items()]
    says = []
    for dtype in dtypes[1:]:
        same = apart(list(zip(curves["float32"], curves[dtype], strict=True)))
        paired, half = interval([b - a for a, b in zip(val["float32"], val[dtype], strict=True)])
        says.append(
            f"{dtype} against float32, same weights and batches: a step's training loss is {same:.4f} apart in the "
            f"mean; val loss {versus(val['float32'], val[dtype])}; seed by seed {paired:+.4f} ± {half or math.nan:.4f}."
        )
    if o.seeds > 1:
        others = apart(list(itertools.combinations(curves["float32"], 2)))
        val_apart = statistics.fmean(abs(a - b) for a, b in itertools.combinations(val["float32"], 2))
        says.append(
            f"Two seeds in float32: a step's training loss is {others:.4f} apart in the mean, val loss {val_apart:.4f}."
        )
    rounded = {dtype: [[round(loss, 5) for loss in x] for x in of_dtype] for dtype, of_dtype in curves.items()}
    return Found(rows, says, {"val_loss": val, "curves": rounded}, set(dtypes))


def random_evaluation(o: Options) -> Found:
    folder, T, B = folder_of(o), CHARS["block_size"], CHARS["batch_size"]
    trained(o, folder, CHARS | {"max_iters": 500, "dtype": "float32"}, o.tmp / "evaluated")
    saved = checkpoint.load(o.tmp / "evaluated")
    model = GPT.from_state(GPTConfig.of(saved["model_args"], "checkpoint"), saved["model"], "checkpoint").to(o.device)
    split, ids = Split(folder, "val", T, model.config.vocab_size), read_tokens(token_files(folder, "val")[0])
    draw = np.random.default_rng(0)
    runner = Runner(model, Form())

    def at_random(batches: int) -> float:
        """nanoGPT's way: the mean loss of so many batches from random offsets."""
        model.eval()
        losses = []
        with torch.no_grad():
            for _ in range(batches):
                block = np.stack([ids[i : i + T + 1] for i in draw.integers(0, len(ids) - T, B)]).astype(np.int64)
                x = torch.from_numpy(block).to(o.device)
                losses.append(model(x[:, :-1], x[:, 1:])[1].item())
        return statistics.fmean(losses)

    rows, says, raw = [], [], {}
    whole = runner.evaluate(split, 10**9, B)[0]
    for batches, repeats in ((20, 30), (200, 20)):
        repeats = capped(o, repeats)
        random = raw[f"random {batches}"] = [at_random(batches) for _ in range(repeats)]
        fixed = raw[f"fixed {batches}"] = [runner.evaluate(split, batches * B, B)[0] for _ in range(2)]
        for way, values in (("random", random), ("fixed", fixed)):
            row = {"windows": f"{batches} x {B}, {way}", "evaluations": len(values), "mean": statistics.fmean(values)}
            row |= {"standard deviation": statistics.stdev(values), "lowest": min(values), "highest": max(values)}
            rows.append(row)
        apart = 1.96 * math.sqrt(2) * statistics.stdev(random)
        says.append(
            f"{batches} x {B} random windows: two evaluations of one model differ by up to {apart:.4f} (95%; most of "
            f"these {repeats}: {max(random) - min(random):.4f}); fixed ones by {max(fixed) - min(fixed):.4f}, and "
            f"they are {fixed[0] - whole:+.4f} from the whole split, always."
        )
    rows.append({"windows": "the whole split", "evaluations": 1, "mean": whole})
    return Found(rows, says, raw, {"float32"})


def characters(o: Options) -> Found:
    folder = folder_of(o)
    lengths, asked = ({capped(o, n) for n in steps} for steps in ((2000, 10_000), (2000, 5000, 10_000)))
    # Losses only, which are the same in the faster dtype and compiled (claim 8).
    settings = CHARS | {"eval_tokens": 1 << 17, "eval_interval": min(1000, *asked)}
    settings |= {"dtype": peak_flops.fast_dtype(o.device), "compile": "auto"}
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for seed, length in itertools.product(seeds(o), sorted(lengths)):
        for e in evals(trained(o, folder, settings | {"seed": seed, "max_iters": length})):
            if e["iter"] in asked:
                found.setdefault((length, e["iter"]), []).append(e)
    rows = []
    for (length, step), of_seeds in sorted(found.items()):
        val, fit = ([e[k] for e in of_seeds] for k in ("val_loss", "train_loss"))
        row = {"schedule's length": length, "at step": step, "val loss": mean_of(val), "train loss": mean_of(fit)}
        rows.append(row | {"val loss by seed": ", ".join(f"{v:.4f}" for v in val)})
    raw = [{"length": k[0], "step": k[1], "evaluations": v} for k, v in found.items()]
    return Found(
        rows,
        ["The losses are those of the whole validation split and of as many training tokens."],
        raw,
        {settings["dtype"]},
    )


def larger_batch(o: Options) -> Found:
    # Two rates for each size, those of 24 higher by a square root of 2: neither is held back by the other's.
    folder, target, rates = folder_of(o), 2.3, ((12, 3e-3), (12, 6e-3), (24, 4.2e-3), (24, 8.5e-3))
    reached: dict[tuple[int, float], list[float | None]] = {}
    curves = []
    for seed, (batch, lr) in itertools.product(seeds(o), rates):
        scale = 24 // batch  # the same tokens and evaluations; a constant rate: no schedule's end decides
        run = {"batch_size": batch, "learning_rate": lr, "min_lr": lr, "seed": seed, "dtype": "float32"}
        run |= {"max_iters": 240 * scale, "eval_interval": capped(o, 15 * scale), "warmup_iters": 50 * scale}
        run |= {"eval_tokens": 1 << 13}  # there are many evaluations
        events = trained(o, folder, CHARS | run)
        reached.setdefault((batch, lr), []).append(steps_to(evals(events), target))
        curve_of = [(e["iter"], e["val_loss"]) for e in evals(events)]
        curves.append({"seed": seed, "batch": batch, "learning_rate": lr, "val_loss": curve_of})
    runs = timed(o, {f"batch {b}": CHARS | {"batch_size": b, "dtype": "float32"} for b in (12, 24)}, 65)
    step_s = {b: statistics.median(t for r in x.rounds for t in r) / 1e3 for b, x in zip((12, 24), runs, strict=True)}
    rows: list[dict[str, Any]] = []
    best: dict[int, tuple[float, list[float]]] = {}  # of a batch size: the best rate, the steps with it
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
            if batch not in best or mean < statistics.fmean(best[batch][1]):
                best[batch] = (lr, steps)
        rows.append(row)
    says = [f"A step of 24 takes {factor(log_ratios(*runs))} times as long as one of 12."]
    if len(best) == 2:
        with_12, with_24 = ([n * step_s[b] for n in best[b][1]] for b in (12, 24))
        tokens_12, tokens_24 = ([n * b * CHARS["block_size"] for n in best[b][1]] for b in (12, 24))
        rates_of = " and ".join(f"{best[b][0]:g}" for b in (12, 24))
        says.append(
            f"To val loss {target}, each at its best rate ({rates_of}): {statistics.fmean(with_12):.1f} s with 12, "
            f"{statistics.fmean(with_24):.1f} s with 24, {versus(with_12, with_24, 1, ' s')}; tokens "
            f"{versus(tokens_12, tokens_24, 0)}."
        )
    raw = {
        "steps": {f"{b}, {lr:g}": v for (b, lr), v in reached.items()},
        "curves": curves,
        "times": of_times(runs, []).raw,
    }
    return Found(rows, says, raw, {"float32"})


def steps_to(evaluations: Events, target: float) -> float | None:
    """The step at which the val loss crosses the target, by a line between evaluations; None where it does not."""
    for a, b in itertools.pairwise(evaluations):
        if b["val_loss"] <= target < a["val_loss"]:
            return a["iter"] + (b["iter"] - a["iter"]) * (a["val_loss"] - target) / (a["val_loss"] - b["val_loss"])
    return None
