"""Stage 2: whether the device computes what float32 on the CPU does.

Three checks: loss and every parameter's gradient, for two models in each dtype, plain and compiled; the loss in chunks
whose last one is not full; and 20 steps of each optimizer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.output import markdown_table
from bench.qualifying.session import Session, float32_precision
from bench.timing import ROOT
from configurator import build, read_settings
from deskgpt.compute import checks
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.compute.runner import Form, Runner
from deskgpt.faster import kernels
from deskgpt.machine import hardware, peak_flops
from model import GPT, MODERN_CHOICES, GPTConfig
from train import TrainConfig

MODERN_RECIPE = ROOT / "config" / "train_shakespeare_char_fast.py"
# As checks.py names them. float32 is without TF32, and so shows defects that TF32's rounding would hide.
PRECISIONS = ("float32", "bfloat16", "float16", "tf32")
BATCH_SIZE = 4

# The loss in chunks: two whole ones, and one that is not.
CHUNK = 256  # tokens
CHUNKED_TOKENS = 2 * CHUNK + 88

STEPS = 20
STEPS_VOCABULARY = 512  # the CPU takes these steps too
SETTINGS: dict[str, Any] = {"weight_decay": 0.1, "learning_rate": 1e-3, "betas": (0.9, 0.95), "momentum": 0.95}
# How far the loss of each of the 20 steps may be from the CPU's. A CPU in bfloat16 is off by up to 2.3e-4.
STEP_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-3, "float16": 5e-3, "tf32": 5e-3}

OUT_OF_TIME = "not reached: the stage's time was over"


def measure(s: Session) -> dict[str, Any]:
    models = models_of(s)
    expected = {name: Expected(config) for name, config in models.items()}
    gradients = gradient_rows(s, expected, compiled=False)
    steps = step_rows(s, models)
    chunks = chunk_rows(s, compiled=False)
    # Compiling takes most of the time, so it comes last.
    chunks += chunk_rows(s, compiled=True)
    gradients += gradient_rows(s, expected, compiled=True)
    failed = [f"{row['case']}: {row['wrong']}" for row in (*gradients, *chunks, *steps) if row["wrong"]]
    sizes = {name: vars(config) for name, config in models.items()}
    return {"models": sizes, "gradients": gradients, "chunks": chunks, "steps": steps, "failed": failed}


def models_of(s: Session) -> dict[str, GPTConfig]:
    """GPT-2 and the fast recipe's choices, in two layers with heads of 64."""
    size: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 256, "block_size": 256}
    if s.sizes.is_toy:
        size = {"n_layer": 1, "n_head": 2, "n_embd": 128, "block_size": 64}
    plain = replace(s.sizes.model, **size)
    recipe = build(TrainConfig, read_settings(TrainConfig, [str(MODERN_RECIPE)]))
    modern = {name: getattr(recipe, name) for name in MODERN_CHOICES}
    return {"GPT-2": plain, "modern": replace(plain, **modern)}


def precisions_of(s: Session, compiled: bool = False) -> list[str]:
    """Those that a run on this device may have. The toy compiles for one of them only: each takes half a minute."""
    if s.sizes.is_toy and compiled:
        return ["bfloat16"]
    return [p for p in PRECISIONS if p != "tf32" or s.device.type == "cuda"]


def dtype_of(precision: str) -> str:
    return "float32" if precision == "tf32" else precision


def row_of(s: Session, case: str, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a check found; "wrong" says in one line what is wrong, and is None where nothing is."""
    s.say(f"  {case}")
    row: dict[str, Any] = {"case": case, "wrong": None}
    if not s.seconds_left():
        return row | {"wrong": OUT_OF_TIME}
    try:
        row |= check()
    except Exception as e:  # the other cases may be right
        row["wrong"] = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
    hardware.release_memory(s.device)
    return row


# ---- loss and gradients --------------------------------------------------------------------------------------


def gradient_rows(s: Session, expected: dict[str, Expected], compiled: bool) -> list[dict[str, Any]]:
    """A row for each model in each precision."""
    rows = []
    for precision, name in itertools.product(precisions_of(s, compiled), expected):
        form = Form(dtype_of(precision), compiled)
        case = f"{name}, {precision}, {'compiled' if compiled else 'plain'}"
        rows.append(row_of(s, case, lambda: expected[name].compare(form, precision, s.device)))  # noqa: B023
    return rows


class Expected:
    """Loss and gradients of a model in float32 on the CPU. None of its matrices is zero, which would hide others."""

    def __init__(self, config: GPTConfig) -> None:
        torch.manual_seed(0)
        self.config = config
        self.batch = batch_of(config, step=0)
        model = GPT(config)
        with checks.nothing_is_zero(model):
            self.state = {name: value.clone() for name, value in model.state_dict().items()}
            found = checks.plain_float32(model, self.batch, Form())
        assert found is not None
        self.loss, self.gradients = found

    def compare(self, form: Form, precision: str, device: torch.device) -> dict[str, Any]:
        """How far the device's loss and gradients are off, and where most."""
        model = GPT(self.config)
        model.load_state_dict(self.state)
        runner = Runner(model.to(device), form)
        x, y = self.batch
        with float32_precision(tf32=precision == "tf32"):
            loss = runner.forward_backward(x.to(device), y.to(device)).item()
        gradients = [g.cpu() for g in checks.taken_gradients(runner, 1)]
        names = [name for name, _ in model.named_parameters()]
        row = errors_of(names, loss, gradients, self.loss, self.gradients, precision)
        try:
            checks.compare(form, precision, names, loss, gradients, self.loss, self.gradients, by_norms=False)
        except checks.Wrong as e:
            row["wrong"] = str(e)
        return row


def errors_of(
    names: list[str], loss: float, gradients: list[Tensor], expected_loss: float, expected: list[Tensor], precision: str
) -> dict[str, Any]:
    errors = checks.gradient_errors(names, gradients, expected, precision)
    worst = max(errors, key=lambda name: errors[name])
    return {
        "loss": loss,
        "expected_loss": expected_loss,
        "loss_off": abs(loss - expected_loss) / abs(expected_loss),
        "worst": worst,
        "gradient_off": errors[worst],
        "allowed": checks.TOLERANCE[precision],
    }


def batch_of(config: GPTConfig, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (B, T) each: the next token is 1 or 2 higher, which a few steps can learn."""
    draw = torch.Generator().manual_seed(step)
    first = torch.randint(0, config.vocab_size, (BATCH_SIZE, 1), generator=draw)
    ahead = torch.randint(1, 3, (BATCH_SIZE, config.block_size), generator=draw).cumsum(1)
    ids = torch.cat((first, first + ahead), 1) % config.vocab_size
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# ---- the loss in chunks --------------------------------------------------------------------------------------


def chunk_rows(s: Session, compiled: bool) -> list[dict[str, Any]]:
    """A row for each precision: the loss in chunks, as plain and compiled models call it, against the plain loss."""
    c = s.sizes.model
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(CHUNKED_TOKENS, c.n_embd, generator=draw)
    weight = torch.randn(c.vocab_size, c.n_embd, generator=draw) * 0.02
    targets = torch.randint(-1, c.vocab_size, (CHUNKED_TOKENS,), generator=draw)  # some are ignored
    targets[-1] = -1

    def plain(h: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(h @ weight.t(), targets, ignore_index=-1)

    expected_loss, expected = loss_and_gradients(plain, h, weight)

    operator: Callable[..., Any] = kernels.ChunkedCrossEntropy.apply
    if compiled:
        kernels.register_operators()
        operator = torch.ops.deskgpt.chunked_cross_entropy.default

    def check(precision: str) -> dict[str, Any]:
        dtype = hardware.DTYPES[dtype_of(precision)]
        on_device = targets.to(s.device)

        def in_chunks(h: Tensor, weight: Tensor) -> Tensor:
            total = operator(h, weight, on_device, dtype, CHUNK, True)
            total = total[0] if isinstance(total, tuple) else total
            return total / (on_device >= 0).sum()

        with float32_precision(tf32=precision == "tf32"):
            loss, gradients = loss_and_gradients(in_chunks, h.to(s.device), weight.to(s.device))
        row = errors_of(["hidden states", "head"], loss, gradients, expected_loss, expected, precision)
        off = row["loss_off"] > checks.LOSS_TOLERANCE[precision] or not row["gradient_off"] <= row["allowed"]
        return row | {"wrong": "loss or gradients are further off than rounding explains" if off else None}

    rows = []
    for precision in precisions_of(s, compiled):
        case = f"loss in chunks, {precision}, {'compiled' if compiled else 'plain'}"
        rows.append(row_of(s, case, lambda: check(precision)))  # noqa: B023
    return rows


def loss_and_gradients(
    loss_of: Callable[[Tensor, Tensor], Tensor], h: Tensor, weight: Tensor
) -> tuple[float, list[Tensor]]:
    h = h.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    loss = loss_of(h, weight)
    return loss.item(), [g.cpu() for g in torch.autograd.grad(loss, (h, weight))]


# ---- steps of the optimizers ---------------------------------------------------------------------------------


def step_rows(s: Session, models: dict[str, GPTConfig]) -> list[dict[str, Any]]:
    """A row for each optimizer, model and dtype: how far the losses of 20 steps are from the CPU's."""
    rows = []
    for optimizer, (name, with_head) in itertools.product(("adamw", "muon"), models.items()):
        # From zeros the first gradients are so small that AdamW makes steps of their rounding.
        config = replace(with_head, vocab_size=STEPS_VOCABULARY, zero_init=False)
        expected = losses_of(config, optimizer, "float32", torch.device("cpu"))
        for precision in precisions_of(s):
            case = f"{STEPS} steps of {optimizer}, {name}, {precision}"

            def check() -> dict[str, Any]:
                losses = losses_of(config, optimizer, precision, s.device)  # noqa: B023
                return compare_losses(losses, expected, STEP_TOLERANCE[precision])  # noqa: B023

            rows.append(row_of(s, case, check))
    return rows


def losses_of(config: GPTConfig, name: str, precision: str, device: torch.device) -> list[float]:
    """The loss of each of the steps, taken as train.py takes them, from the same weights and on the same batches."""
    torch.manual_seed(0)
    runner = Runner(GPT(config).to(device), Form(dtype_of(precision)))
    muon_dtype = "float32" if precision == "float32" else peak_flops.fast_dtype(device)
    optimizer = make_optimizer(runner.model, name, muon_dtype=muon_dtype, **SETTINGS)
    losses: list[Tensor] = []
    with float32_precision(tf32=precision == "tf32"):
        for step in range(STEPS):
            x, y = batch_of(config, step)
            losses.append(runner.forward_backward(x.to(device), y.to(device)))
            runner.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(runner.parameters, 1.0)
            runner.scaler.step(optimizer)
            runner.scaler.update()
            optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).tolist()


def compare_losses(losses: list[float], expected: list[float], allowed: float) -> dict[str, Any]:
    off = [abs(a - b) / b for a, b in zip(losses, expected, strict=True)]
    furthest = max(off) if all(map(math.isfinite, off)) else math.inf
    wrong = None
    if not furthest <= allowed:
        step = next(i for i, x in enumerate(off) if not x <= allowed)
        wrong = f"the loss of step {step} is {losses[step]:.6g}, on the CPU {expected[step]:.6g}"
    return {"losses": losses, "expected": expected, "loss_off": furthest, "allowed": allowed, "wrong": wrong}


# ---- as Markdown ---------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    head = ["case", "verdict", "worst parameter", "loss off by", "gradient off by", "allowed"]
    body = []
    for row in (*result["gradients"], *result["chunks"]):
        figures = [share(row.get(key)) for key in ("loss_off", "gradient_off", "allowed")]
        body.append([row["case"], row["wrong"] or "right", row.get("worst", "n/a"), *figures])
    steps = []
    for row in result["steps"]:
        ends = [f"{row[key][-1]:.4f}" if key in row else "n/a" for key in ("expected", "losses")]
        off = [share(row.get(key)) for key in ("loss_off", "allowed")]
        steps.append([row["case"], row["wrong"] or "right", *ends, *off])
    return "\n\n".join(
        [
            "Against float32 on the CPU; errors are relative, and `allowed` is what rounding explains. "
            f"Chunks are of {CHUNK} tokens, the last one of {CHUNKED_TOKENS % CHUNK}.",
            markdown_table(head, body, left_columns=3),
            markdown_table(["case", "verdict", "last loss on the CPU", "here", "off by", "allowed"], steps, 2),
        ]
    )


def share(x: float | None) -> str:
    return "n/a" if x is None else f"{x:.2g}"
