"""Numbers and times as messages print them."""

from __future__ import annotations

from typing import Any

LONGEST_VALUE = 100  # characters of a value in a message
COUNTS = {"trillion": 1e12, "billion": 1e9, "million": 1e6}
BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6}
DAY_S = 24 * 60 * 60


def with_unit(n: float, units: dict[str, float]) -> str:
    """n in the largest of these units that it reaches, else in the smallest, such as 124.4 million."""
    for name, unit in units.items():
        if n >= unit:
            return f"{n / unit:,.1f} {name}"
    smallest = list(units)[-1]
    return f"{n / units[smallest]:,.1f} {smallest}"


def millions(parameters: int) -> str:
    """A model's size as nanoGPT prints it, such as 123.59M."""
    return f"{parameters / 1e6:.2f}M"


def in_gib(size: float | None) -> str:
    """Bytes in GiB."""
    return "n/a" if size is None else f"{size / 2**30:.2f}"


def in_tera(per_s: float | None) -> str:
    """FLOP/s in TFLOP/s."""
    return "n/a" if per_s is None else f"{per_s / 1e12:.4g}"


def clock(seconds: float) -> str:
    """Seconds as 42.0s, 3m07s, 5h02m or, from two days on, 3.4 days."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:,.1f} days"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}m{s:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def shortened(value: Any) -> str:
    """A value in a message: its repr, shortened; its type where it has none, as very large numbers have."""
    try:
        text = repr(value)
    except Exception:  # a config file can define any class
        return f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
