"""Trains, resumes, samples and exports the checkout in the current folder, in one process; see test_hacks.py.

python changed.py DATASET CACHE NUMBERS(json) IS_MODEL_CHANGED SETTING...
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import runpy
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, "")  # the checkout comes before the one that this file is of
sys.path.append(str(Path(__file__).parent))

from conftest import assert_equal, events
from gloo import run

import train
from configurator import build, read_settings
from deskgpt.checkpoint import store
from deskgpt.compute.inference import InferenceEngine
from deskgpt.sampling.trained import load

TINY = [
    *("--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=144", "--batch_size=2", "--max_iters=8"),
    *("--gradient_accumulation_steps=2", "--eval_interval=4", "--eval_iters=2", "--learning_rate=1e-2"),
    *("--warmup_iters=2", "--lr_decay_iters=8", "--device=cpu", "--dtype=float32", "--compile=False"),
]


def trained(out_dir: str, *more: str, ranks: int = 1) -> list[float]:
    words = [*TINY, f"--dataset={dataset}", *settings, f"--out_dir={out_dir}", *more]
    run(ranks, build(train.TrainConfig, read_settings(train.TrainConfig, words)))
    return [e["loss"] for e in events(Path(out_dir), "iter")]


def close(found: list[float], expected: list[float], rel: float) -> bool:
    return all(abs(a - b) <= rel * abs(b) for a, b in zip(found, expected, strict=True))


dataset, cache, numbers, is_model_changed, *settings = sys.argv[1:]
os.environ["XDG_CACHE_HOME"] = cache  # which has the C++ kernels; importing conftest has made another
if Path("data/digits").exists():
    runpy.run_path("data/digits/prepare.py", run_name="__main__")
Path("half").mkdir()
write = store.save


def keep_half(checkpoint: store.Checkpoint, out_dir: Path, *more: Any) -> None:
    write(checkpoint, out_dir, *more)
    if checkpoint.iter_num == 4:
        shutil.copy(out_dir / "ckpt.pt", "half")


store.save = keep_half  # type: ignore[assignment]
losses = trained("whole")
store.save = write
assert losses[-1] < losses[0]
for number in json.loads(numbers):
    assert all(number in e for e in events(Path("whole"), "iter")), number

# stopped at step 4 and resumed
trained("half", "--init_from=resume")
whole, half = (torch.load(f"{name}/ckpt.pt", weights_only=True) for name in ("whole", "half"))
for part in ("model", "optimizer", "best_val_loss", "extra_state"):
    assert_equal(half.get(part), whole.get(part))

assert close(trained("ranks", "--max_iters=2", ranks=2), losses[:2], 1e-5)
if is_model_changed == "False":
    sys.exit()

model = load("resume", "whole", torch.device("cpu")).model.eval()
prompt = torch.arange(4)[None]
engine = InferenceEngine(model, prompt, "float32")
with engine.replacing():
    cached = torch.stack(list(model.generate(prompt, 138, temperature=0.5)))
assert engine.cached
assert torch.equal(cached, torch.stack(list(model.generate(prompt, 138, temperature=0.5))))

# Compiling takes 20 s. Whether the model is one graph that computes the same is seen without that.
torch.compile = functools.partial(torch.compile, backend="aot_eager")
assert close(trained("compiled", "--compile=True", "--max_iters=2"), losses[:2], 1e-4)

sys.argv = ["export.py", "--out_dir=whole", "--to=exported"]
printed = io.StringIO()
code: object = 0
try:
    with redirect_stderr(printed):
        runpy.run_path("export.py", run_name="__main__")
except SystemExit as e:
    code = e.code
assert Path("exported").exists() == (not code)
if code:
    assert re.search(
        "does not compute what model.py does|cannot be exported|nothing was exported", printed.getvalue()
    ), printed.getvalue()
