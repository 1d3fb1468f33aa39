"""Draws the heat map of bench/sweep.py."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws sweep's rows: the micro-batch, or the grid's last setting, from left to right, all others downwards.

    The colour is tokens/s or, where cells are of different models, MFU. Cells without figures are hatched.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in rows[0]["settings"] if name != "gradient_accumulation_steps"]
    across = "batch_size" if len({r["settings"]["batch_size"] for r in rows}) > 1 else names[-1]
    down = [name for name in names if name != across and len({str(r["settings"][name]) for r in rows}) > 1]

    def label(row: dict[str, Any]) -> str:
        return ", ".join(f"{name}={row['settings'][name]}" for name in down)

    columns = list(dict.fromkeys(r["settings"][across] for r in rows))
    labels = list(dict.fromkeys(map(label, rows)))
    measured = [r for r in rows if not r["status"]]
    by_mfu = len({r["flops_per_token"] for r in measured}) > 1
    key = "mfu" if by_mfu else "tokens_per_s"
    scale = matplotlib.colors.Normalize(0, max(r[key] for r in measured))  # from 0: a difference of 5% looks like one
    colours = pyplot.get_cmap("viridis")

    size = (max(5.5, 1.5 * len(columns) + 2.5), 1.0 * len(labels) + 1.7)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    for r in rows:
        x = columns.index(r["settings"][across])
        y = labels.index(label(r))
        if r["status"]:
            reason = textwrap.fill(r["status"].partition(":")[0], 14)
            axes.add_patch(square(pyplot, x, y, facecolor="0.93", edgecolor="0.6", hatch="//"))
            box = {"facecolor": "0.93", "edgecolor": "none", "pad": 1.5}
            axes.text(x, y, reason, color="black", ha="center", va="center", fontsize=9, bbox=box)
        else:
            colour = colours(scale(r[key]))
            ink = "black" if sum(colour[:3]) > 1.35 else "white"
            axes.add_patch(square(pyplot, x, y, facecolor=colour, edgecolor="white"))
            axes.text(x, y, figures_of(r), color=ink, ha="center", va="center", fontsize=9)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(labels) - 0.5, -0.5), title=title)
    axes.set_xticks(range(len(columns)), list(map(str, columns)))
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("sequences in a micro-batch, at the same tokens per step" if across == "batch_size" else across)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    mappable = matplotlib.cm.ScalarMappable(scale, colours)
    bar = figure.colorbar(mappable, ax=axes, label="MFU" if by_mfu else "tokens/s")
    form = "{:.1%}" if by_mfu else "{:,.0f}"
    bar.formatter = matplotlib.ticker.FuncFormatter(lambda value, _: form.format(value))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def square(pyplot: Any, x: int, y: int, **look: Any) -> Any:
    """One cell, centred on (x, y)."""
    return pyplot.Rectangle((x - 0.5, y - 0.5), 1, 1, **look)


def figures_of(row: dict[str, Any]) -> str:
    memory = "" if row["memory_gb"] is None else f"\n{row['memory_gb']:.2f} GB"
    return f"{row['tokens_per_s']:,.0f}/s\nMFU {row['mfu']:.1%}{memory}"
