"""The patches of docs/hacks, each in a copy of the checkout: what a user would then do works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

PATCHES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "hacks").glob("*.patch"))}
PAGE = (ROOT / "docs" / "hacking.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^\| \[(\w+)\]\(hacks/\1\.patch\)", PAGE, re.M)
HACKS = (*EXAMPLES, "value_embeddings", "weight_averaging")  # test_candidates.py has the others, for some steps
NUMBERS = {"z_loss": ["z_loss"], "weight_norms": ["weight_norm/0", "weight_norm/1"]}
SETTINGS = {"embd_scale": ["--embd_scale=2"], "digits": ["--dataset=digits"]}
IN_CI = ("z_loss", "lion", "grouped_query_attention", "digits")


class Checkout:
    """A copy of the code with a change, and the scripts as a user starts them there."""

    def __init__(self, folder: Path, diff: str, python: Path, settings: list[str]) -> None:
        self.folder = folder
        self.python = python
        self.settings = settings
        for name in ("config", "data", "deskgpt", "bench"):
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.bin", "results", "__pycache__")
            )
        for path in ROOT.glob("*.py"):
            shutil.copy(path, folder)
        subprocess.run(["git", "apply", "--allow-empty", "-"], input=diff, cwd=folder, check=True, text=True)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run([self.python, *words], cwd=self.folder, capture_output=True, text=True, timeout=240)
        except subprocess.TimeoutExpired as e:  # it holds what was printed, and what each thread was doing
            printed = [(part or b"").decode() for part in (e.stdout, e.stderr)]
            pytest.fail("\n".join([str(e), *printed]))

    def losses(self, out_dir: str) -> list[float]:
        lines = (self.folder / out_dir / "log.jsonl").read_text().splitlines()
        return [e["loss"] for e in map(json.loads, lines) if e["event"] == "iter"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.nightly) for name in HACKS]
)
def test_hack_trains_resumes_samples_and_is_exported_or_refused(name, python, chars, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here = Checkout(tmp_path, PATCHES[name], python, [])
    numbers = json.dumps(NUMBERS.get(name, []))
    changed = str("b/model.py" in PATCHES[name])
    script = str(ROOT / "tests" / "changed.py")
    done = here.run(script, str(chars), os.environ["XDG_CACHE_HOME"], numbers, changed, *SETTINGS.get(name, []))
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_list_all_patches_and_show_their_lines():
    listed = (ROOT / "docs" / "hacks" / "README.md").read_text(encoding="utf-8")
    assert [name for name in PATCHES if name not in EXAMPLES and f"({name}.patch)" not in listed] == []
    shown = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    assert shown
    for diff in shown:
        lines = re.findall(r"^[+-].*", diff, re.M)
        assert any(lines == re.findall(r"^[+-].*", patch, re.M) for patch in PATCHES.values())
