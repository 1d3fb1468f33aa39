"""The changes of docs/hacking.md and docs/hacks, each in a copy of the checkout: what a user would then do works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ROOT, assert_equal

PAGE = (ROOT / "docs" / "hacking.md").read_text(encoding="utf-8")
PATCHES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "hacks").glob("*.patch"))}
LONG = ("value_embeddings", "weight_averaging")  # test_candidates.py has all, for some steps
HACKS = dict(re.findall(r"^### (.+?)\n.*?```diff\n(.*?)```", PAGE, re.M | re.S)) | {n: PATCHES[n] for n in LONG}
NUMBERS = {"z-loss": ["z_loss"], "A logged number": ["weight_norm/0", "weight_norm/1"]}
SETTINGS = {"A setting": ["--embd_scale=2"], "A data set of one's own": ["--dataset=digits"]}
TINY = [
    *("--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=144", "--batch_size=2", "--max_iters=8"),
    *("--gradient_accumulation_steps=2", "--eval_interval=4", "--eval_iters=2", "--learning_rate=1e-2"),
    *("--warmup_iters=2", "--lr_decay_iters=8", "--device=cpu", "--dtype=float32"),
]
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py")
# Compiling takes 20 s for each hack. Whether its model is one graph that computes the same is seen without that.
CAPTURED = """
import functools, runpy, sys, torch
torch.compile = functools.partial(torch.compile, backend="aot_eager")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
BOTH_WAYS = """
import torch
from deskgpt.compute.inference import InferenceEngine
from deskgpt.sampling.trained import load
model = load("resume", "whole", torch.device("cpu")).model.eval()
prompt = torch.arange(4)[None]
engine = InferenceEngine(model, prompt, "float32")
with engine.replacing():
    cached = torch.stack(list(model.generate(prompt, 138, temperature=0.5)))
plain = torch.stack(list(model.generate(prompt, 138, temperature=0.5)))
print("cache" if engine.cached else "no cache", torch.equal(cached, plain))
"""


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

    def train(self, out_dir: str, *more: str, script: tuple[str, ...] = ("train.py",)) -> str:
        done = self.run(*script, *TINY, *self.settings, f"--out_dir={out_dir}", *more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def losses(self, out_dir: str) -> list[float]:
        lines = (self.folder / out_dir / "log.jsonl").read_text().splitlines()
        return [e["loss"] for e in map(json.loads, lines) if e["event"] == "iter"]

    def checkpoint(self, path: str) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / path, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", HACKS)
def test_hack_trains_resumes_samples_and_is_exported_or_refused(name, python, chars, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here = Checkout(tmp_path, HACKS[name], python, [f"--dataset={chars}", *SETTINGS.get(name, [])])
    if "prepare.py" in HACKS[name]:
        assert here.run("data/digits/prepare.py").returncode == 0

    said = here.train("whole", "--compile=False", "--keep_checkpoints=9")
    losses = here.losses("whole")
    assert losses[-1] < losses[0]
    for number in NUMBERS.get(name, []):
        assert f", {number} " in said
        assert all(
            number in json.loads(line)
            for line in (tmp_path / "whole/log.jsonl").read_text().splitlines()
            if '"iter"' in line[:20]
        )

    # stopped at step 4 and resumed
    (tmp_path / "half").mkdir()
    shutil.copy(tmp_path / "whole" / "ckpt-00000004.pt", tmp_path / "half" / "ckpt.pt")
    here.train("half", "--compile=False", "--init_from=resume")
    whole, half = here.checkpoint("whole/ckpt.pt"), here.checkpoint("half/ckpt.pt")
    for part in ("model", "optimizer", "best_val_loss", "parts"):
        assert_equal(half.get(part), whole.get(part))

    here.train("ranks", "--compile=False", "--max_iters=2", script=RANKS)
    assert here.losses("ranks") == pytest.approx(losses[:2], rel=1e-5)
    if "b/model.py" not in HACKS[name]:  # what follows depends on the model alone
        return

    here.train("compiled", "--compile=True", "--max_iters=2", script=("-c", CAPTURED, "train.py"))
    assert here.losses("compiled") == pytest.approx(losses[:2], rel=1e-4)
    done = here.run("-c", BOTH_WAYS)
    assert done.stdout == "cache True\n", done.stdout + done.stderr
    done = here.run("export.py", "--out_dir=whole", "--to=exported")
    if done.returncode:
        assert re.fullmatch(
            r"error: .+ (does not compute what model.py does|cannot be exported|nothing was exported).*\n", done.stderr
        )
        assert not (tmp_path / "exported").exists()
    else:
        assert "the same logits" in done.stdout
