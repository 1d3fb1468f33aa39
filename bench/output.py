"""What benchmarks write: Markdown tables, and pages in bench/results with their raw figures."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deskgpt.system.files import write_atomically

RESULTS = Path(__file__).resolve().parent / "results"


def markdown_row(cells: Sequence[str]) -> str:
    """One line of a Markdown table; a "|" within a cell would end it and becomes "/"."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left_columns: int = 0) -> str:
    """A Markdown table. The first left_columns columns are aligned to the left, the others to the right."""
    alignment = "---|" * left_columns + "--:|" * (len(head) - left_columns)
    return "\n".join([markdown_row(head), f"|{alignment}", *map(markdown_row, rows)])


def about(*starts: dict[str, Any]) -> str:
    """Today's date, and machine, versions and commit of the first of some runs, from its log's start event."""
    first = starts[0]
    return f"{time.strftime('%Y-%m-%d')}, {first['device']}; {first['versions']}, commit {first['git_commit']}"


def command_line(script: str) -> str:
    """The command that was typed, without the name of the user's home folder."""
    command = shlex.join(["python", f"bench/{script}", *sys.argv[1:]])
    return command.replace(str(Path.home()), "~")


def write_results(folder: Path, name: str, text: str, result: dict[str, Any]) -> None:
    """Writes folder/name.md and name.json. The name may contain dots."""
    write_atomically(folder / f"{name}.md", text.encode())
    write_atomically(folder / f"{name}.json", json.dumps(result).encode())
