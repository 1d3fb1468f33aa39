"""The patches of docs/hacks, each in a copy of the checkout: what a user would then do works.

This file is also the script that runs there: python test_hacks.py NAME DATASET CACHE
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, "")  # the changed checkout comes before the one that this file is of
    sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_equal, copy_of_repository, events, shell, weights
from gloo import run
from torch import Tensor

import model as definition
import train
from configurator import build, read_settings
from data.batches import Split
from data.token_files import dataset_folder
from deskgpt import kernels, saving
from deskgpt.checkpoint import load_checkpoint, save_checkpoint
from deskgpt.engine import GenerationConfig, generate
from deskgpt.kv_cache import KVCache
from model import GPT, GPTConfig
from train import TrainConfig

PATCHES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs" / "hacks").glob("*.patch"))
}
PAGE = (ROOT / "docs" / "hacking.md").read_text(encoding="utf-8")
LIST = (ROOT / "docs" / "hacks" / "README.md").read_text(encoding="utf-8")
NUMBERS = {"z_loss": ["z_loss"], "weight_norms": ["weight_norm/0", "weight_norm/1"]}  # in the log
SETTINGS = {
    "embd_scale": ["--embd_scale=2"],
    "digits": ["--dataset=digits"],
    "fp8": ["--learning_rate=1e-3"],  # a step of AdamW hides what its gradient lost by rounding
    "query_gain": ["--qk_norm=True"],
    "rope_base": ["--position=rope"],
    "muon_momentum_warmup": ["--optimizer=muon"],
}
IN_CI = ("z_loss", "lion", "sliding_window", "weight_averaging", "logit_softcap")
TINY = [
    *(
        "--n_layer=2",
        "--n_head=2",
        "--n_embd=16",
        "--block_size=144",
        "--batch_size=2",
        "--max_iters=8",
    ),
    *(
        "--gradient_accumulation_steps=2",
        "--eval_interval=4",
        "--eval_iters=2",
        "--learning_rate=1e-2",
    ),
    *(
        "--warmup_iters=2",
        "--lr_decay_iters=8",
        "--device=cpu",
        "--dtype=float32",
        "--compile=False",
    ),
]


# ---- in a copy of the checkout -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.nightly)
        for name in PATCHES
    ],
)
def test_hack_equals_a_plain_loop_resumes_samples_and_is_exported(name, chars, tmp_path):
    if name == "fp8" and not importlib.util.find_spec("torchao"):
        pytest.skip("pip install torchao")
    folder = copy_of_repository(tmp_path)
    subprocess.run(
        ["git", "apply", "--allow-empty", "-"],
        input=PATCHES[name],
        cwd=folder,
        check=True,
        text=True,
    )
    done = shell("python", __file__, name, chars, os.environ["XDG_CACHE_HOME"], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def test_patches_apply_and_pages_list_them_and_show_their_lines_and_the_loops():
    for name, diff in PATCHES.items():
        subprocess.run(
            ["git", "apply", "--check", "-"], input=diff, cwd=ROOT, check=True, text=True
        )
        added = len(re.findall(r"^\+(?!\+\+ )", diff, re.M))
        removed = len(re.findall("^-(?!-- )", diff, re.M))
        counts = f"+{added} -{removed}" if removed else f"+{added}"
        row = f"(hacks/{name}.patch) | {counts} |"
        assert f"({name}.patch)" in LIST or row in PAGE
    of_loop = {
        line.split("  #")[0].strip() for line in Path(train.__file__).read_text().splitlines()
    }
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        block = block.replace("weighted =", "return")
        quoted = {line.split("  #")[0].strip() for line in block.splitlines()}
        assert {line for line in quoted if line[0] != "#"} <= of_loop
    shown = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    assert shown
    for diff in shown:
        lines = re.findall(r"^[+-].*", diff, re.M)
        assert any(lines == re.findall(r"^[+-].*", patch, re.M) for patch in PATCHES.values())


# ---- the plain loop ------------------------------------------------------------------------------


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, context: Any, dropout: float, window: int = 10**9
) -> Tensor:
    T = q.size(2)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1) @ v


def plain_loss(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(x).flatten(0, 1), targets.flatten())


def smoothed_loss(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    log_p = model.logits(x).log_softmax(-1)
    return -0.9 * log_p.gather(-1, targets[..., None]).mean() - 0.1 * log_p.mean()


def lion_step(optimizer: Any, means: dict[Tensor, Tensor]) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            mean = means.get(p, torch.zeros_like(p))
            p -= group["lr"] * ((0.9 * mean + 0.1 * p.grad).sign() + 0.1 * p)
            means[p] = 0.99 * mean + 0.01 * p.grad


def plain_rate(name: str, c: TrainConfig, step: int) -> float:
    if name != "sqrt_decay" or step < c.warmup_iters:
        return train.learning_rate(c.schedule(), step)
    done = (step - c.warmup_iters) / (c.max_iters - c.warmup_iters)
    return c.learning_rate * (0.1 + 0.9 * (1 - math.sqrt(done)))


def plain_optimizer(name: str, c: TrainConfig, model: GPT) -> torch.optim.Optimizer:
    if name in ("muon_momentum_warmup", "embd_scale"):
        return train.build_optimizer(c, model)
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.dim() >= 2]}]
    groups += [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    decay = 0.0 if name == "cautious_weight_decay" else c.weight_decay
    return torch.optim.AdamW(
        groups, lr=c.learning_rate, betas=(c.beta1, c.beta2), weight_decay=decay
    )


def plain_loop(name: str, c: TrainConfig, vocab_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train as c says, in torch alone. Return the losses and the weights at the end."""
    torch.manual_seed(c.seed)
    model = GPT(GPTConfig.from_settings(c, vocab_size))
    optimizer = plain_optimizer(name, c, model)
    means: dict[Tensor, Tensor] = {}
    last: list[dict[str, Tensor]] = []  # the weights that are averaged
    losses = []
    split = Split(dataset_folder(c.dataset), "train", c.block_size, vocab_size, c.seed)
    B, n = c.batch_size, c.gradient_accumulation_steps

    @torch.no_grad()
    def update(rate: float, step: int) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
            if "momentum" in group:
                group["momentum"] = 0.85 + 0.1 * min(1.0, step / (c.max_iters / 3))
        before = [(p, p.clone()) for p in optimizer.param_groups[0]["params"]]
        if name == "lion":
            lion_step(optimizer, means)
        else:
            optimizer.step()
        if name == "cautious_weight_decay":
            for p, old in before:
                p -= rate * rate / c.learning_rate * c.weight_decay * old * ((p - old) * old < 0)
        optimizer.zero_grad()

    for step in range(c.max_iters):
        rate = plain_rate(name, c, step)
        is_small = name == "batch_ramp" and step < c.max_iters / 3
        losses.append(0.0)
        for micro in range(n):
            x, y = (
                torch.from_numpy(a)
                for a in split.train_batch(step, micro * B + np.arange(B), B * n)
            )
            if name == "short_context_first" and step < c.max_iters / 2:
                x, y = (a.reshape(2 * B, -1) for a in (x, y))
            _, loss, *further = model(x, y)
            total = sum(further[0].values(), loss) if further else loss
            (total if is_small else total / n).backward()
            losses[-1] += loss.item() / n
            if is_small:
                update(rate / math.sqrt(n), step)
        if not is_small:
            update(rate, step)
        if step + 1 >= 0.9 * c.max_iters:
            last.append({name: w.clone() for name, w in model.state_dict().items()})
    if name == "weight_averaging":
        model.load_state_dict({key: torch.stack([w[key] for w in last]).mean(0) for key in last[0]})
    return losses, model.state_dict()


# ---- the script ----------------------------------------------------------------------------------


def trained(words: list[str], out_dir: str, *more: str, ranks: int = 1) -> list[float]:
    """Return the losses of a run with these settings."""
    run(
        ranks,
        build(TrainConfig, read_settings(TrainConfig, [*words, f"--out_dir={out_dir}", *more])),
    )
    return [e["loss"] for e in events(Path(out_dir), "iter")]


def keep_checkpoint(step: int, folder: Path) -> None:
    """Copy the checkpoint of a step, as a run that is stopped there leaves it."""
    save = save_checkpoint

    def keeping(checkpoint: Any, out_dir: Path, *more: Any, **options: Any) -> None:
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
    words = [*TINY, f"--dataset={dataset}", *SETTINGS.get(name, [])]

    kernels.LOGITS_ON_CPU = 1000  # a loss in chunks, as of a large vocabulary
    kernels.BYTES_WITH_KERNEL = 20_000
    keep_checkpoint(4, Path("half"))
    losses = trained(words, "whole")
    assert losses[-1] < losses[0]
    for e in events(Path("whole"), "iter"):
        assert e.keys() >= {*NUMBERS.get(name, [])}
    trained(words, "half", "--init_from=resume")
    whole, half = (
        torch.load(f"{out_dir}/ckpt.pt", weights_only=True) for out_dir in ("whole", "half")
    )
    for part in ("model", "optimizer", "best_val_loss", "extra_state"):
        assert_equal(half.get(part), whole.get(part))

    gpt: Any = GPT
    usual = definition.attention, gpt.loss
    window = 128 if name in ("sliding_window", "flex_attention") else 10**9
    definition.attention = functools.partial(plain_attention, window=window)
    gpt.loss = smoothed_loss if name == "label_smoothing" else plain_loss
    model_args = load_checkpoint("whole").model_args
    c = build(TrainConfig, read_settings(TrainConfig, words))
    expected, expected_weights = plain_loop(name, c, model_args["vocab_size"])
    definition.attention, gpt.loss = usual
    assert losses == pytest.approx(expected, rel=0.05 if name == "fp8" else 5e-4)
    if name == "fp8":  # its rounding is torchao's own
        assert losses != pytest.approx(expected, rel=1e-5)
    # AdamW makes a whole step of a gradient that is mostly rounding: single weights may differ.
    found = weights(Path("whole"))
    a, b = (
        torch.cat([of_run[key].flatten() for key in expected_weights])
        for of_run in (found, expected_weights)
    )
    assert (a - b).norm() <= (5e-3 if name == "fp8" else 2e-3) * b.norm()

    if name != "batch_ramp":  # it needs two micro-batches on each rank
        assert trained(words, "ranks", "--max_iters=2", ranks=2) == pytest.approx(
            losses[:2], rel=1e-3
        )
    if name == "fp8" or "b/model.py" in PATCHES[name]:
        # Compiling takes 20 s. Whether the blocks are graphs that compute the same is seen without
        # that.
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
        compiled = trained(words, "compiled", "--compile=True", "--max_iters=2")
        assert compiled == pytest.approx(losses[:2], rel=1e-4)
        # Text beyond the context, with and without a cache, of several documents.
        if name == "flex_attention":
            definition.END_OF_TEXT = 2  # type: ignore[attr-defined]
        model = GPT.from_state(GPTConfig(**model_args), found, "whole").eval()
        long = GenerationConfig(max_new_tokens=150, temperature=0.5)
        text = functools.partial(generate, model, torch.arange(4)[None], long)
        recomputed = torch.stack([new for new, _ in text()])
        cached = torch.stack([new for new, _ in text(cache=KVCache(144))])
        assert torch.equal(cached, recomputed)
        done = shell("python", "export.py", "--out_dir=whole", "--to=exported", cwd=".")
        assert "transformers computes the same logits" in done.stdout, done.stderr


if __name__ == "__main__":
    check(*sys.argv[1:])
