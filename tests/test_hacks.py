"""The patches of docs/hacks, each in a copy of the checkout: what a user would then do works.

This file is also the script that runs there: python test_hacks.py NAME DATASET CACHE
"""

import functools
import importlib.util
import math
import os
import re
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, "")  # the changed checkout comes before the one that this file is of
    sys.path.append(str(Path(__file__).parent))

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    assert_equal,
    copy_of_repository,
    events,
    logged,
    nightly,
    shell,
    slow,
    tiny,
)
from gloo import run
from plain_loop import plain_loop

import model as definition
import train
from deskgpt import kernels, saving
from deskgpt.checkpoint import load_checkpoint, save_checkpoint
from deskgpt.engine import GenerationConfig, generate
from deskgpt.kv_cache import KVCache
from model import GPT, GPTConfig
from train import TrainConfig

HACKS = ROOT / "docs" / "hacks"
PATCHES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(HACKS.glob("*.patch"))}
PAGE = (ROOT / "docs" / "hacking.md").read_text(encoding="utf-8")
LIST = (HACKS / "README.md").read_text(encoding="utf-8")
NUMBERS = {"z_loss": ["z_loss"], "weight_norms": ["weight_norm/0", "weight_norm/1"]}  # in the log
SETTINGS: dict[str, dict[str, Any]] = {
    "embd_scale": {"embd_scale": 2.0},
    "digits": {"dataset": "digits"},
    "fp8": {"learning_rate": 1e-3},  # a step of AdamW hides what its gradient lost by rounding
    "query_gain": {"qk_norm": True},
    "rope_base": {"position": "rope"},
    "muon_momentum_warmup": {"optimizer": "muon"},
    "lora": {"learning_rate": 1e-2},
}
IN_CI = ("z_loss", "lion", "sliding_window", "weight_averaging")
SHORT: dict[str, Any] = {
    "block_size": 144,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_iters": 8,
}
SHORT |= {"eval_interval": 4, "lr_decay_iters": 8, "cpu_kernels": "auto"}


# ---- in a copy of the checkout -------------------------------------------------------------------


def apply(name: str, folder: Path, *options: str) -> None:
    shell("git", "apply", *options, HACKS / f"{name}.patch", cwd=folder)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow if name in IN_CI else nightly) for name in PATCHES]
)
def test_hack_equals_a_plain_loop_resumes_samples_and_is_exported(name, chars, tmp_path):
    if name == "fp8" and not importlib.util.find_spec("torchao"):
        pytest.skip("pip install torchao")
    folder = copy_of_repository(tmp_path)
    apply(name, folder)
    shell("python", __file__, name, chars, os.environ["XDG_CACHE_HOME"], cwd=folder)


def code_lines(text: str) -> set[str]:
    """Return the lines without indents and comments."""
    return {line.split("#")[0].strip() for line in text.splitlines()}


def test_patches_apply_and_pages_list_them_and_show_their_lines_and_the_loops():
    for name in PATCHES:
        apply(name, ROOT, "--check")
        assert f"({name}.patch)" in LIST or f"(hacks/{name}.patch) |" in PAGE
    of_loop = code_lines(Path(train.__file__).read_text())
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        assert code_lines(block.replace("weighted =", "return")) <= of_loop
    shown = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    assert shown
    for diff in shown:
        lines = re.findall(r"^[+-].*", diff, re.M)
        assert any(lines == re.findall(r"^[+-].*", patch, re.M) for patch in PATCHES.values())


# ---- in plain torch ------------------------------------------------------------------------------


def plain_attention(q, k, v, context, dropout, window=10**9):
    T = q.size(2)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1) @ v


def plain_loss(model, x, targets):
    return F.cross_entropy(model.logits(x).flatten(0, 1), targets.flatten())


def smoothed_loss(model, x, targets):
    log_p = model.logits(x).log_softmax(-1)
    return -0.9 * log_p.gather(-1, targets[..., None]).mean() - 0.1 * log_p.mean()


# ---- the script ----------------------------------------------------------------------------------


def trained(c: TrainConfig, out_dir: str, ranks: int = 1, **settings: Any) -> list[float]:
    """Return the losses of a run with these settings."""
    run(ranks, replace(c, out_dir=out_dir, **settings))
    return logged(Path(out_dir), "iter", "loss")


def keep_checkpoint(step, folder):
    """Copy the checkpoint of a step, as a run that is stopped there leaves it."""
    save = save_checkpoint

    def keeping(checkpoint, out_dir, *more, **options):
        save(checkpoint, out_dir, *more, **options)
        if checkpoint.iter_num == step:
            folder.mkdir()
            shutil.copy(out_dir / "ckpt.pt", folder)

    saving.save_checkpoint = keeping


def check(name: str, dataset: str, cache: str) -> None:
    # It has the C++ kernels; importing conftest has made another.
    os.environ["XDG_CACHE_HOME"] = cache
    if name == "digits":
        runpy.run_path("data/digits/prepare.py", run_name="__main__")
    c = tiny(Path(dataset), Path("whole"), **SHORT | SETTINGS.get(name, {}))

    kernels.LOGITS_ON_CPU = 1000  # a loss in chunks, as of a large vocabulary
    kernels.BYTES_WITH_KERNEL = 20_000
    keep_checkpoint(4, Path("half"))
    losses = trained(c, "whole")
    assert losses[-1] < losses[0]
    for e in events(Path("whole"), "iter"):
        assert e.keys() >= {*NUMBERS.get(name, [])}
    trained(c, "half", init_from="resume")
    whole, half = load_checkpoint("whole"), load_checkpoint("half")
    for part in ("model", "optimizer", "best_val_loss", "extra_state"):
        assert_equal(getattr(half, part), getattr(whole, part))

    if name == "lora":
        torch.manual_seed(c.seed)
        start = GPT(GPTConfig(**whole.model_args)).state_dict()
        learned = {key for key in start if not torch.equal(start[key], whole.model[key])}
        assert learned == {key for key in start if ".lora_" in key}
        base = {key: w for key, w in start.items() if key not in learned}
        tuned = GPT.from_state(GPTConfig(**whole.model_args), base, "a base without adapters")
        assert not any(w.any() for key, w in tuned.state_dict().items() if "lora_b" in key)

    gpt: Any = GPT
    usual = definition.attention, gpt.loss
    window = 128 if name in ("sliding_window", "flex_attention") else 10**9
    definition.attention = functools.partial(plain_attention, window=window)
    gpt.loss = smoothed_loss if name == "label_smoothing" else plain_loss
    expected_weights, expected, _ = plain_loop(c, whole.model_args["vocab_size"], name)
    definition.attention, gpt.loss = usual
    assert losses == pytest.approx(expected, rel=0.05 if name == "fp8" else 5e-4)
    if name == "fp8":  # its rounding is torchao's own
        assert losses != pytest.approx(expected, rel=1e-5)
    # AdamW makes a whole step of a gradient that is mostly rounding: single weights may differ.
    b = torch.cat([w.flatten() for w in expected_weights.values()])
    a = torch.cat([whole.model[key].flatten() for key in expected_weights])
    assert (a - b).norm() <= (5e-3 if name == "fp8" else 2e-3) * b.norm()

    if name != "batch_ramp":  # it needs two micro-batches on each rank
        found = trained(c, "ranks", ranks=2, max_iters=2)
        assert found == pytest.approx(losses[:2], rel=1e-3)
    if name == "fp8" or "b/model.py" in PATCHES[name]:
        # Compiling takes 20 s. Whether the blocks are graphs that compute the same is seen without
        # that.
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
        found = trained(c, "compiled", compile=True, max_iters=2)
        assert found == pytest.approx(losses[:2], rel=1e-4)
        # Text beyond the context, with and without a cache, of several documents.
        if name == "flex_attention":
            definition.END_OF_TEXT = 2  # type: ignore[attr-defined]
        model = GPT.from_state(GPTConfig(**whole.model_args), whole.model, "whole").eval()
        long = GenerationConfig(max_new_tokens=150, temperature=0.5)
        text = functools.partial(generate, model, torch.arange(4)[None], long)
        recomputed = torch.stack([new for new, _ in text()])
        cached = torch.stack([new for new, _ in text(cache=KVCache(144))])
        assert torch.equal(cached, recomputed)
        done = shell("python", "export.py", "--out_dir=whole", "--to=exported", cwd=".")
        assert "transformers computes the same logits" in done.stdout, done.stderr


if __name__ == "__main__":
    check(*sys.argv[1:])
