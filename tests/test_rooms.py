"""The rooms of the project: imports go down only, without a circle, those of types too."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import ROOT

# From the ground up. model.py stands between the kernels that it calls and what runs it.
ORDER = ["system", "configurator", "kernels", "model", "data", "compute", "estimate", "checkpoint", "export", "run"]
ORDER += ["generate", "serve", "train", "sample", "tasks", "bench"]
SCRIPTS = ["configurator", "model", "train", "sample", "export", "tasks"]


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Return the names of modules that a file imports, also within functions and for types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def room_of(module: str) -> str | None:
    """Return the room of one of our modules; None for others, and for export.py, which has a room's name."""
    first, *rest = module.split(".")
    if first == "deskgpt":
        return rest[0] if rest else None
    return first if first in ("data", "bench", *SCRIPTS) and first != "export" else None


def our_files() -> dict[str, Path]:
    """Return all our files by module name."""
    paths = [ROOT / f"{name}.py" for name in SCRIPTS]
    for folder in ("deskgpt", "data", "bench"):
        paths += (ROOT / folder).rglob("*.py")
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def test_imports_go_down_only():
    for module, path in our_files().items():
        room = room_of(module)
        if room is None:
            continue
        allowed = ORDER[: ORDER.index(room) + 1]
        for name in imports_of(path):
            there = room_of(name)
            assert there is None or there in allowed, f"{path} imports {name}"


def test_no_file_imports_itself_through_others():
    files = our_files()
    graph = {module: {name for name in imports_of(path) if name in files} for module, path in files.items()}
    for module, imported in graph.items():
        imported.discard(module)
        imported -= {name for name in imported if files[name].name == "__init__.py"}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert len(order) == len(files)
