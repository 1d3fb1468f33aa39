"""Stage 2: whether the device computes what float32 on the CPU does.

Loss and every parameter's gradient, for two models in each dtype, plain and compiled. Steps of the optimizers and the
loss in chunks are compared in tests/test_gpu.py.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from bench.timing import ROOT
from configurator import build, read_settings
from deskgpt.compute import checks
from deskgpt.compute.runner import Runner, Variant
from deskgpt.kernels.verify import full_float32
from deskgpt.system import hardware
from model import GPT, MODERN_CHOICES, GPTConfig
from train import TrainConfig

MODERN_RECIPE = ROOT / "config" / "train_shakespeare_char_fast.py"
# As checks.py names them. float32 is without TF32, and so shows defects that TF32's rounding would hide.
PRECISIONS = ("float32", "bfloat16", "float16", "tf32")
BATCH_SIZE = 4


def measure(s: Session) -> dict[str, Any]:
    references = {name: Reference(config) for name, config in models_of(s).items()}
    cases = [
        (f"{name}, {precision}, {'compiled' if compiled else 'plain'}", reference, precision, compiled)
        for compiled in (False, True)  # compiling takes most of the time, so it comes last
        for precision, (name, reference) in itertools.product(precisions_of(s, compiled), references.items())
    ]
    rows = []
    for case, reference, precision, compiled in s.while_there_is_time(cases):
        s.print0(f"  {case}")
        rows.append({"case": case} | found_by(s, reference, precision, compiled))
    failed = [f"{row['case']}: {row['wrong']}" for row in rows if row["wrong"]]
    return {"gradients": rows, "failed": failed, "unfinished": [case for case, *_ in cases[len(rows) :]]}


def models_of(s: Session) -> dict[str, GPTConfig]:
    """GPT-2 and the fast recipe's choices, in two layers with heads of 64."""
    size: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 256, "block_size": 256}
    if s.sizes.is_toy:
        size = {"n_layer": 1, "n_head": 2, "n_embd": 128, "block_size": 64}
    plain = replace(s.sizes.model, **size)
    recipe = build(TrainConfig, read_settings(TrainConfig, [str(MODERN_RECIPE)]))
    modern = {name: getattr(recipe, name) for name in MODERN_CHOICES}
    return {"GPT-2": plain, "modern": replace(plain, **modern)}


def precisions_of(s: Session, compiled: bool) -> list[str]:
    """Those that a run on this device may have. The toy compiles for one of them only: each takes half a minute."""
    if s.sizes.is_toy and compiled:
        return ["bfloat16"]
    return [p for p in PRECISIONS if p != "tf32" or s.device.type == "cuda"]


def found_by(s: Session, reference: Reference, precision: str, compiled: bool) -> dict[str, Any]:
    """What a comparison found; "wrong" says in one line what is wrong, and is None if nothing is."""
    form = Variant("float32" if precision == "tf32" else precision, compiled)
    try:
        return reference.compare(form, precision, s.device)
    except Exception as e:  # the other cases may be right
        return {"wrong": work.problem_of(e)}
    finally:
        hardware.release_memory(s.device)


class Reference:
    """Loss and gradients of a model in float32 on the CPU. None of its matrices is zero, which would hide others."""

    def __init__(self, config: GPTConfig) -> None:
        torch.manual_seed(0)
        self.config = config
        self.batch = batch_of(config)
        model = GPT(config)
        with checks.nothing_is_zero(model):
            self.state = {name: value.clone() for name, value in model.state_dict().items()}
            self.loss, self.gradients = checks.plain_float32(model, self.batch, Variant())

    def compare(self, form: Variant, precision: str, device: torch.device) -> dict[str, Any]:
        """How far the device's loss and gradients are off, and where most."""
        model = GPT(self.config)
        model.load_state_dict(self.state)
        runner = Runner(model.to(device), form)
        x, y = self.batch
        with nullcontext() if precision == "tf32" else full_float32():
            loss = runner.forward_backward(x.to(device), y.to(device)).item()
        gradients = [g.cpu() for g in checks.taken_gradients(runner, 1)]

        errors = checks.gradient_errors(runner.names, gradients, self.gradients, precision)
        worst = max(errors, key=lambda name: errors[name])
        row = {"wrong": None, "worst": worst, "gradient_off": errors[worst], "allowed": checks.TOLERANCE[precision]}
        row["loss_off"] = abs(loss - self.loss) / abs(self.loss)
        try:
            checks.compare(form, precision, runner.names, loss, gradients, self.loss, self.gradients, by_norms=False)
        except checks.Mismatch as e:
            row["wrong"] = str(e)
        return row


def batch_of(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (B, T) each: the next token is 1 or 2 higher."""
    draw = torch.Generator().manual_seed(0)
    first = torch.randint(0, config.vocab_size, (BATCH_SIZE, 1), generator=draw)
    ahead = torch.randint(1, 3, (BATCH_SIZE, config.block_size), generator=draw).cumsum(1)
    ids = torch.cat((first, first + ahead), 1) % config.vocab_size
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def describe(result: dict[str, Any]) -> str:
    head = ["case", "verdict", "worst parameter", "loss off by", "gradient off by", "allowed"]
    body = []
    for row in result["gradients"]:
        figures = [f"{row[key]:.2g}" if key in row else "n/a" for key in ("loss_off", "gradient_off", "allowed")]
        body.append([row["case"], row["wrong"] or "right", row.get("worst", "n/a"), *figures])
    about = "Against float32 on the CPU; errors are relative, and `allowed` is what rounding explains."
    return f"{about}\n\n{markdown_table(head, body, left_columns=3)}"
