"""Draws the heat map of bench/sweep.py."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws sweep's rows: the micro-batch, or the grid's last setting, from left to right, all others downwards.

    The colour is tokens/s or, where cells are of different models, MFU. Cells without figures are white.
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
    by_mfu = len({r["flops_per_token"] for r in rows if not r["status"]}) > 1
    values = [[float("nan")] * len(columns) for _ in labels]
    size = (max(5.5, 1.5 * len(columns) + 2.5), 1.0 * len(labels) + 1.7)
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    for r in rows:
        x = columns.index(r["settings"][across])
        y = labels.index(label(r))
        text = textwrap.fill(r["status"].partition(":")[0], 14)
        if not r["status"]:
            values[y][x] = r["mfu"] if by_mfu else r["tokens_per_s"]
            memory = "" if r["memory_gb"] is None else f"\n{r['memory_gb']:.2f} GB"
            text = f"{r['tokens_per_s']:,.0f}/s\nMFU {r['mfu']:.1%}{memory}"
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
        axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=box)
    image = axes.imshow(values, vmin=0, aspect="auto")  # from 0: a difference of 5% looks like one
    axes.set(title=title)
    axes.set_xticks(range(len(columns)), list(map(str, columns)))
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("sequences in a micro-batch, at the same tokens per step" if across == "batch_size" else across)
    figure.colorbar(image, ax=axes, label="MFU" if by_mfu else "tokens/s")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
