"""The changes of docs/hacking.md and docs/hacks, each in a copy of the checkout: what a user would then do works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs" / "hacking.md").read_text(encoding="utf-8")
PATCHES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "hacks").glob("*.patch"))}
LONG = ("value_embeddings", "weight_averaging")  # test_candidates.py has all, for some steps
HACKS = dict(re.findall(r"^### (.+?)\n.*?```diff\n(.*?)```", PAGE, re.M | re.S)) | {n: PATCHES[n] for n in LONG}
NUMBERS = {"z-loss": ["z_loss"], "A logged number": ["weight_norm/0", "weight_norm/1"]}
SETTINGS = {"A setting": ["--embd_scale=2"], "A data set of one's own": ["--dataset=digits"]}
IN_CI = ("z-loss", "Lion in place of AdamW", "Grouped-query attention", "A data set of one's own")


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
    here = Checkout(tmp_path, HACKS[name], python, [])
    numbers = json.dumps(NUMBERS.get(name, []))
    changed = str("b/model.py" in HACKS[name])
    script = str(ROOT / "tests" / "changed.py")
    done = here.run(script, str(chars), os.environ["XDG_CACHE_HOME"], numbers, changed, *SETTINGS.get(name, []))
    assert done.returncode == 0, done.stdout + done.stderr
