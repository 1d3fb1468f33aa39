"""Output of several benchmarks: Markdown tables, and where figures come from."""

import time
from collections.abc import Sequence
from typing import Any


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left_columns: int = 0
) -> str:
    """Return a Markdown table.

    The first left_columns columns are aligned to the left, the others to the right.
    """
    alignment = ["---"] * left_columns + ["--:"] * (len(head) - left_columns)
    lines = [f"|{'|'.join(alignment)}|"]
    for row in rows:
        # A "|" within a cell would end it.
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")
    return "\n".join([f"| {' | '.join(head)} |", *lines])


def about(start: dict[str, Any]) -> str:
    """Return today's date, and device, versions and commit of a run, by its log's start event."""
    return (
        f"{time.strftime('%Y-%m-%d')}, {start['device']}; {start['versions']}, commit "
        f"{start['git_commit']}"
    )
