"""Compares training runs: what changed, what it did to speed and to learning, and how sure that is.

    python bench/compare.py out-a out-b
    python bench/compare.py log.txt out-b --set A.batch_size=16 A.n_layer=12 --device "A=RTX 4070"
    python bench/compare.py out-a-seed1 out-a-seed2 out-b-seed1 out-b-seed2 --html report.html

A run is an out_dir with its log.jsonl, or a text file with what nanoGPT or train.py printed. Runs are called A, B, C in
the order given; those that differ in their seed alone count as repeats of one arm. What a log does not say is given
with --set, any setting of train.py or a fact: parameters, tokens_per_step, tokenizer, val_tokens, bytes_per_token,
world_size, peak_flops (that the log's MFU refers to). Time is that of training and, where the log has it, of compiling,
without evaluation. What stands behind ± is a 95% interval.

Prints three tables and a verdict; --html FILE, --png FILE and --json FILE write them for a browser, as a picture and
for programs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, Python looks beside this file only

from bench.analysis.arms import Arm, Row, arms_of, changes, letters, millions, over_runs, unknown
from bench.analysis.learning import learning, not_comparable
from bench.analysis.noise import difference
from bench.analysis.page import Table, page, picture
from bench.analysis.runs import Run, complete, give, implied_parameters, read_run
from bench.analysis.verdict import verdict
from deskgpt.errors import one_line_errors
from deskgpt.gpu_peaks import published_peak
from deskgpt.runlog import clock

# ---- speed ---------------------------------------------------------------------------------------------------


SAME_SPEED = 1.05  # a ratio that single runs do not tell from 1


def own_peak(run: Run) -> tuple[float, str] | None:
    """(FLOP/s, source) of the device that the run was on, all of its ranks: from --device, else from its own log."""
    if name := run.start.get("gpu"):
        dtype = run.start.get("dtype") or run.settings.get("dtype")
        # As train.py and nanoGPT compute: float32 in TF32 where there is one, bfloat16 where that is not emulated.
        kinds = {"float32": ("tf32", "float32"), "float16": ("float16",)}.get(str(dtype), ("bfloat16", "float16"))
        for kind in kinds:
            if found := published_peak(name, kind):
                return found[0] * run.start.get("world_size", 1), f"{name}, {found[1]}"
        raise ValueError(f"--device {name}: no published peak is known of it for {' or '.join(kinds)}; leave it out")
    if run.start.get("device") and run.start.get("peak_flops"):
        return run.start["peak_flops"], run.start.get("peak_source", "")
    return None


def median_ms(run: Run) -> float | None:
    return statistics.median(run.step_ms) if run.step_ms else None


def band(runs: list[Run]) -> tuple[float, float] | None:
    """(10th, 90th percentile) of the runs' steps in ms."""
    times = [t for r in runs for t in r.step_ms]
    return tuple(np.quantile(times, (0.1, 0.9))) if times else None


def speed(arms: list[Arm]) -> list[Row]:
    first = [a.runs[0] for a in arms]

    def of(label: str, figure: Callable[[Run], Any], text: Callable[[Any], str]) -> Row:
        """The mean over the runs of what may need something that is not known."""

        def known(run: Run) -> Any:
            try:
                return figure(run)
            except (KeyError, TypeError, ZeroDivisionError):
                return None

        return over_runs(label, arms, known, text)

    def per_s(run: Run) -> Any:
        return run.tokens_per_step / median_ms(run) * 1e3  # type: ignore[operator]

    def flops_per_s(run: Run) -> Any:
        return per_s(run) * run.flops_per_token

    def mfu(run: Run) -> Any:
        if run.flops_per_token and run.tokens_per_step:
            return flops_per_s(run) / run.start["peak_flops"]
        logged = [e["mfu"] for e in run.iters if e["mfu"]]
        return statistics.median(logged) if logged else None

    def micro_batches(run: Run) -> float:
        return run.settings["gradient_accumulation_steps"] / run.start.get("world_size", 1)

    peaks: dict[int, Any] = {id(r): own_peak(r) for a in arms for r in a.runs}
    tokens = of("tokens/s", per_s, lambda v: f"{v:,.0f}")
    if None not in tokens.values and len(arms) > 1:
        tokens.lead, tokens.winner = fastest(arms, [[per_s(r) for r in a.runs] for a in arms])
    rows = [of("ms per step, median", median_ms, lambda v: f"{v:,.4g}")]
    rows += [Row("10% to 90% of the steps", [band(a.runs) for a in arms], lambda b: f"{b[0]:,.4g} to {b[1]:,.4g}")]
    rows += [of("ms per micro-batch", lambda r: median_ms(r) / micro_batches(r), lambda v: f"{v:,.4g}"), tokens]  # type: ignore[operator]
    rows += [Row("parameters, as stated", [r.start.get("parameters") for r in first], millions)]
    rows += [Row("parameters, from MFU, time and tokens", [implied_parameters(r) for r in first], millions)]
    rows += [Row("MFLOPs per token", [r.flops_per_token for r in first], lambda v: f"{v / 1e6:,.4g}")]
    rows += [of("TFLOP/s", flops_per_s, lambda v: f"{v / 1e12:.4g}")]
    rows += [Row("MFU as printed at the end", [r.start.get("printed_mfu") for r in first], percent)]
    rows += [of("MFU on the log's peak", mfu, percent)]
    rows += [of("the log's peak, TFLOP/s", lambda r: r.start["peak_flops"] / 1e12, lambda v: f"{v:,.4g}")]
    rows += [of("MFU on the device's own peak", lambda r: flops_per_s(r) / peaks[id(r)][0], percent)]
    rows += [of("its own peak, TFLOP/s", lambda r: peaks[id(r)][0] / 1e12, lambda v: f"{v:,.4g}")]
    rows += [Row("evaluation: time, and share of all", [evaluation(r) for r in first], spent)]
    rows += [of("warm-up and compiling", lambda r: r.start["warm_up_s"], clock)]
    rows += [of("peak memory, GiB", lambda r: r.end["peak_memory_bytes"] / 2**30, lambda v: f"{v:.2f}")]
    return [r for r in rows if any(v is not None for v in r.values)]


def percent(v: float) -> str:
    return f"{v:.2%}"


def spent(v: tuple[float, float]) -> str:
    return f"{clock(v[0])}, {v[1]:.1%}"


def evaluation(run: Run) -> tuple[float, float] | None:
    """(seconds, share of training and evaluation); where the time of some is not known, it is that of the others."""
    times = [e["eval_s"] for e in run.evals if e["eval_s"] is not None]
    ends = [e["train_s"] for e in run.evals + run.iters if e["train_s"]]
    if not times or not ends:
        return None
    total = statistics.fmean(times) * len(run.evals)
    return total, total / (total + max(ends))


def fastest(arms: list[Arm], per_s: list[list[float]]) -> tuple[str, int | None]:
    """(who trains most tokens per second, and how sure that is; the arm's number where it leads beyond the noise).

    The noise is that between runs, as a ratio, where there are several of both arms. Of single runs it is the drift
    within each, and 5% at least: a machine is not the same from one run to the next.
    """
    rates = [statistics.fmean(values) for values in per_s]
    best, next_, *_ = sorted(range(len(arms)), key=lambda i: -rates[i])
    times, names = rates[best] / rates[next_], (arms[best].label, arms[next_].label)
    half = difference([math.log(v) for v in per_s[next_]], [math.log(v) for v in per_s[best]])[1]
    if half is None:
        drifts = [drift(r) for i in (best, next_) for r in arms[i].runs]
        half = None if None in drifts else max(math.log(SAME_SPEED), 1.96 * math.hypot(*(d for d in drifts if d)))
    if half is None:
        return f"{names[0]}, {times:.2f} x {names[1]} (noise not known)", None
    noise = f"noise a factor of {math.exp(half):.2f}"
    if math.log(times) <= half:
        return f"{names[0]} and {names[1]}: not distinguishable ({times:.2f} x, {noise})", None
    return f"{names[0]}, {times:.2f} x {names[1]} ({noise})", best


def drift(run: Run) -> float | None:
    """Relative standard deviation of the median step between tenths of the run; None for fewer than 20 steps."""
    times = run.step_ms
    if len(times) < 20:
        return None
    return statistics.stdev(math.log(np.median(tenth)) for tenth in np.array_split(np.array(times), 10))


# ---- main ----------------------------------------------------------------------------------------------------


def as_table(title: str, arms: list[Arm], rows: list[Row], note: str = "") -> Table:
    heads = [f"{a.label}: {a.runs[0].name}" + (f" and {len(a.runs) - 1} more" if len(a.runs) > 1 else "") for a in arms]
    return Table(title, ["", *heads, "leads" if title != "What changed" else ""], [r.cells() for r in rows], note)


def as_markdown(table: Table) -> str:
    rows = [f"| {' | '.join(c.replace('|', '/') for c in row)} |" for row in (table.columns, *table.rows)]
    lines = [f"## {table.title}", "", rows[0], "|---" + "|--:" * len(table.columns[1:]) + "|", *rows[1:]]
    return "\n".join(lines + ([f"\n{table.note}"] if table.note else []))


def compare(runs: list[Run], levels: list[float]) -> tuple[list[Table], list[str], dict[str, Any]]:
    """(tables, verdict, the same figures for programs) of runs that are complete."""
    arms, reasons = arms_of(runs), not_comparable(runs)
    groups = {"What changed": changes(arms, runs), "Speed": speed(arms), "Learning": learning(arms, levels, reasons)}
    notes = [f"Not known of {label}: {', '.join(names)}." for label, names in unknown(arms).items()]
    notes += [f"{x}: {n}." for x, r in zip(letters(len(runs)), runs, strict=True) for n in r.notes]
    peaks = {f"{a.label}: {p[1]}" for a in arms if (p := own_peak(a.runs[0]))}
    said = {"Speed": f"Own peaks: {'; '.join(sorted(peaks))}." if peaks else "", "What changed": " ".join(notes)}
    said["Learning"] = f"Not ranked: {'; '.join(reasons)}." if reasons else ""
    tables = [as_table(title, arms, rows, said[title]) for title, rows in groups.items() if rows]
    lines = verdict(arms, groups["Speed"], groups["Learning"], reasons)
    data = {
        "arms": [{"label": a.label, "runs": [r.name for r in a.runs], "settings": a.runs[0].settings} for a in arms],
        "rows": {
            t: [{"label": r.label, "values": r.values, "lead": r.lead} for r in rows] for t, rows in groups.items()
        },
        "not_ranked": reasons,
        "verdict": lines,
    }
    return tables, lines, data


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an out_dir, a log.jsonl or a printed log")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="[A.]NAME=VALUE")
    parser.add_argument("--device", action="append", default=[], metavar="[A=]NAME", help='such as "A=RTX 4070"')
    parser.add_argument("--loss", nargs="+", type=float, default=[], help="val losses to be reached, in nats per token")
    parser.add_argument("--html", metavar="FILE")
    parser.add_argument("--png", metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    for file in filter(None, (a.html, a.png, a.json)):
        if not Path(file).resolve().parent.is_dir():
            raise ValueError(f"{file}: its folder does not exist; make it, or choose another")
    if a.png and not a.png.endswith(".png"):
        raise ValueError(f"--png {a.png}: name a .png file")
    if not all(map(math.isfinite, a.loss)):
        raise ValueError(f"--loss {' '.join(map(str, a.loss))}: losses are finite numbers")
    named = dict(zip(letters(len(a.runs)), (read_run(path) for path in a.runs), strict=True))
    for word in a.set:
        name, equals, value = word.partition("=")
        letter, dot, key = name.rpartition(".")
        if not equals or (dot and letter not in named):
            raise ValueError(f"--set {word}: write {'|'.join(named)}.NAME=VALUE, or NAME=VALUE for all")
        for run in [named[letter]] if dot else named.values():
            give(run, key, value)
    for word in a.device:
        letter, equals, name = word.partition("=")
        if equals and letter not in named:
            raise ValueError(f"--device {word}: write {'|'.join(named)}=NAME, or NAME for all")
        for run in [named[letter]] if equals else named.values():
            run.start["gpu"] = name if equals else word
    runs = list(named.values())
    for run in runs:
        complete(run)
    tables, lines, data = compare(runs, a.loss)
    for letter, run in named.items():  # as the tables name them, each name once
        run.name = f"{letter}: {run.name}"
    for table in tables:
        print(as_markdown(table) + "\n")
    print("\n".join(f"- {line}" for line in lines))
    if a.json:
        Path(a.json).write_text(json.dumps(data, indent=1), encoding="utf-8")
    if a.html:
        title = " and ".join(r.name for r in runs) if len(runs) < 4 else f"{len(runs)} runs"
        Path(a.html).write_text(page(title, runs, tables, lines), encoding="utf-8")
    if a.png:
        picture(runs, a.png)


if __name__ == "__main__":
    with one_line_errors():
        main()
