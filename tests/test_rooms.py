"""The rooms of deskgpt/: imports go down only, without a circle. Those of types alone (TYPE_CHECKING) may go up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import ROOT

# From the ground up. model.py stands between what is below the definition and what runs it. The choice of a variant
# asks estimate/ what fits, which knows the variants.
ORDER = ["system", "configurator", "kernels", "model", "compute", "estimate", "compute.implementation"]
ORDER += ["checkpoint", "export", "run", "data", "sampling", "serve"]
ABOVE = {"bench", "config", "export", "sample", "tasks", "tests", "train"}


def imports_of(path: Path) -> Iterator[str]:
    """The names of modules that a file imports when it runs, also within functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_CHECKING:")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}: a relative import"
            assert not node.level, f"{path}: a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str | None:
    """The room of one of our modules; None of others."""
    first, *rest = module.split(".")
    if first == "deskgpt":
        file = ".".join(rest[:2])
        if file in ORDER:
            return file
        return rest[0] if rest else None
    return first if first in ("model", "configurator", "data") or first in ABOVE else None


def our_files() -> dict[str, Path]:
    """By module name: model.py and all files of deskgpt/."""
    files = {"model": ROOT / "model.py", "configurator": ROOT / "configurator.py"}
    for path in (ROOT / "deskgpt").rglob("*.py"):
        files[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return files


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
        imported -= {name for name in imported if files[name].name == "__init__.py"}  # which import nothing
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert len(order) == len(files)
