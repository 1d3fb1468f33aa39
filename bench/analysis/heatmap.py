"""The heat map of bench/sweep.py."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Micro-batches (or the last setting of the grid) from left to right, all else from top to bottom.

    Colours are tokens/s or, where the cells are of different models, MFU; hatched is what has no figures.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [k for k in rows[0]["settings"] if k != "gradient_accumulation_steps"]
    across = "batch_size" if len({r["settings"]["batch_size"] for r in rows}) > 1 else names[-1]
    down = [k for k in names if k != across and len({str(r["settings"][k]) for r in rows}) > 1]
    columns = list(dict.fromkeys(r["settings"][across] for r in rows))
    labels = list(dict.fromkeys(", ".join(f"{k}={r['settings'][k]}" for k in down) for r in rows))
    by_mfu = len({r["flops_per_token"] for r in rows if not r["status"]}) > 1
    key, unit = ("mfu", "MFU") if by_mfu else ("tokens_per_s", "tokens/s")
    values = [r[key] for r in rows if not r["status"]]
    scale = matplotlib.colors.Normalize(0, max(values))  # from 0: a difference of 5% should look like one
    colours = pyplot.get_cmap("viridis")
    size = (max(5.5, 1.5 * len(columns) + 2.5), 1.0 * len(labels) + 1.7)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    for r in rows:
        x = columns.index(r["settings"][across])
        y = labels.index(", ".join(f"{k}={r['settings'][k]}" for k in down))
        look: dict[str, Any] = {"facecolor": "0.93", "edgecolor": "0.6", "hatch": "//"}
        text, ink = textwrap.fill(r["status"].partition(":")[0], 14), "black"
        if not r["status"]:
            colour = colours(scale(r[key]))
            look = {"facecolor": colour, "edgecolor": "white"}
            memory = "" if r["memory_gb"] is None else f"\n{r['memory_gb']:.2f} GB"
            text = f"{r['tokens_per_s']:,.0f}/s\nMFU {r['mfu']:.1%}{memory}"
            ink = "black" if sum(colour[:3]) > 1.35 else "white"
        axes.add_patch(pyplot.Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
        box = {"facecolor": "0.93", "edgecolor": "none", "pad": 1.5} if r["status"] else None
        axes.text(x, y, text, color=ink, ha="center", va="center", fontsize=9, bbox=box)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(labels) - 0.5, -0.5), title=title)
    axes.set_xticks(range(len(columns)), list(map(str, columns)))
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("sequences in a micro-batch, at the same tokens per step" if across == "batch_size" else across)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(matplotlib.cm.ScalarMappable(scale, colours), ax=axes, label=unit)
    bar.formatter = matplotlib.ticker.FuncFormatter((lambda v, _: f"{v:.1%}") if by_mfu else (lambda v, _: f"{v:,.0f}"))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
