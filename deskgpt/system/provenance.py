"""What a figure comes from: versions of packages, the commit of the code, and a digest of it."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """Versions of what a run's figures depend on."""
    packages = {p: metadata.version(p) for p in ("numpy", "torch")}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"python": platform.python_version(), **packages, **cuda, "platform": platform.platform()}


def git_commit() -> str | None:
    """Commit of the code that runs, with "+changes" where files differ from it; None outside a git checkout."""
    try:
        describe = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--abbrev=12"]
        # --exclude=* leaves tags out: the commit itself, not a distance to some tag
        out = subprocess.run([*describe, "--dirty=+changes", "--exclude=*"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() or None


@functools.cache
def digest_of_code(files: Iterable[Path]) -> bytes:
    """SHA-256 of these Python files and of all files of this repository that they import."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(with_imports(files, root)):
        digest.update(path.read_bytes())
    return digest.digest()


def with_imports(files: Iterable[Path], root: Path) -> set[Path]:
    """The files, and those below root that they import, directly or through others."""
    found: set[Path] = set()
    to_do = list(files)
    while to_do:
        path = to_do.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            to_do += [root / f"{name.replace('.', '/')}.py" for name in names]
    return found
