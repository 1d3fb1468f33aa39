"""What several benchmarks print: Markdown tables, and where figures come from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def text_table(path: Path) -> list[list[str]]:
    """Return the cells of a file's rows, which "|" separates; a line with "#" at its start is a
    comment.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.split("|")] for line in lines if not line.startswith("#")
    ]


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left_columns: int = 0
) -> str:
    """Return a Markdown table.

    The first left_columns columns are aligned to the left, the others to the right.
    """
    alignment = ["---"] * left_columns + ["--:"] * (len(head) - left_columns)
    return "\n".join([markdown_row(head), f"|{'|'.join(alignment)}|", *map(markdown_row, rows)])


def markdown_row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table; a "|" within a cell would end it and becomes "/"."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def about(start: dict[str, Any]) -> str:
    """Return today's date, and device, versions and commit of a run, by its log's start event."""
    return (
        f"{time.strftime('%Y-%m-%d')}, {start['device']}; {start['versions']}, commit "
        f"{start['git_commit']}"
    )
