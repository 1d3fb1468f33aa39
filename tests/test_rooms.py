"""The rooms of the project: imports go down only, without a circle, those of types too."""

from __future__ import annotations

import ast
import subprocess
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

# From the ground up. model.py stands between the kernels that it calls and what runs it.
ORDER = ["system", "configurator", "kernels", "model", "data", "compute", "estimate", "checkpoint", "export", "run"]
ORDER += ["generate", "serve", "train", "sample", "tasks", "bench"]
SCRIPTS = ["configurator", "model", "train", "sample", "export", "tasks"]


def room_of(module: str) -> str | None:
    """Return the room of one of our modules; None for others, and for export.py, which has a room's name."""
    first, *rest = module.split(".")
    if first == "deskgpt":
        return rest[0] if rest else None
    return first if first in ("data", "bench", *SCRIPTS) and first != "export" else None


def test_imports_go_down_only_and_no_file_imports_itself_through_others():
    paths = [ROOT / f"{name}.py" for name in SCRIPTS]
    for folder in ("deskgpt", "data", "bench"):
        paths += (ROOT / folder).rglob("*.py")
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    graph = {}
    for module, path in files.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module, f"{path}: a relative import"
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[module] = {m for m in imported if m in files and m != module and files[m].name != "__init__.py"}
        if room := room_of(module):
            assert {room_of(name) for name in imported} <= {None, *ORDER[: ORDER.index(room) + 1]}, path
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_tracked_files_are_no_checkpoints_no_logs_and_small():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    assert len(paths) > 100
    assert [path for path in paths if path.suffix in (".pt", ".bin", ".safetensors", ".gguf", ".log")] == []
    assert [path for path in paths if path.name == "log.jsonl" or path.stat().st_size > 256_000] == []
