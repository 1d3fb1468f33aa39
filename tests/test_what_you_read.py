"""What you read is what runs: a changed model or loop does what a plain loop would do, and nothing
else runs it.
"""

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import (
    CPU,
    POSIX,
    ROOT,
    assert_equal,
    events,
    logged,
    raises_one_line,
    run_tiny,
    tiny,
    trajectory,
    weights,
)
from gloo import resumed, run
from plain_loop import plain_loop
from tiny_models import TINIEST
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import model as definition
import train
from deskgpt.checkpoint import load_checkpoint
from deskgpt.compiling import apply_compute
from deskgpt.compute import ComputeMode, autocast
from deskgpt.monitor import LossMonitor
from deskgpt.resume import NOT_LEARNING, SCHEDULE, known_settings
from deskgpt.train_state import TrainState
from model import GPT, GPTConfig, Transformer
from train import TrainConfig, main, main_that_fits

SOURCE = (ROOT / "train.py").read_text(encoding="utf-8")

# ---- a changed model -----------------------------------------------------------------------------


def extend(monkeypatch, cls, more):
    """Let more(self, config) follow the class's own __init__."""
    init = cls.__init__

    def extended(self, config):
        init(self, config)
        more(self, config)

    monkeypatch.setattr(cls, "__init__", extended)


def test_model_with_a_state_that_every_pass_moves_trains_as_a_plain_loop_trains_it(
    chars, tmp_path, monkeypatch, capsys
):
    """It drops whole positions by a generator of numpy: more, the more passes it has counted."""
    forward = Transformer.forward

    def with_generator(self, config):
        self.generator = np.random.default_rng(0)
        self.passes = 0

    def dropping(self, idx, cache=None):
        x = forward(self, idx, cache)
        if not self.training:
            return x
        self.passes += 1
        kept = self.generator.random(idx.size(1)) > 0.05 * self.passes
        return x * torch.from_numpy(kept)[:, None]

    extend(monkeypatch, Transformer, with_generator)
    monkeypatch.setattr(Transformer, "forward", dropping)
    c = tiny(chars, tmp_path, gradient_accumulation_steps=2, max_iters=5)
    main(c)
    assert not re.search("warning|disagrees|wrong", capsys.readouterr().out)
    expected, losses, _ = plain_loop(c, load_checkpoint(tmp_path).model_args["vocab_size"])
    assert logged(tmp_path, "iter", "loss") == pytest.approx(losses, rel=1e-5)
    for name, w in weights(tmp_path).items():
        assert (w - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


def test_passes_of_a_run_are_its_micro_batches_and_its_evaluations(chars, tmp_path, monkeypatch):
    passes = {True: 0, False: 0}  # in training mode, and in evaluations
    forward = Transformer.forward

    def count(self, idx, cache=None):
        passes[self.training] += 1
        return forward(self, idx, cache)

    monkeypatch.setattr(Transformer, "forward", count)
    run_tiny(chars, tmp_path, gradient_accumulation_steps=2, dtype="auto", auto_batch=True)
    # Evaluations at 0, 3 and 6 read 2 batches of 2 splits.
    assert passes == {True: 6 * 2, False: 3 * 2 * 2}


class ParallelBlock(nn.Module):
    """Attention and MLP side by side."""

    calls = 0

    def __init__(self, config):
        super().__init__()
        self.norm = definition.make_norm(config)
        self.attn = definition.CausalSelfAttention(config)
        self.mlp = definition.MLP(config)
        self.passes: Any = 0

    def forward(self, x, context):
        self.passes += 1
        if not torch.compiler.is_compiling():
            ParallelBlock.calls += 1
        h = self.norm(x)
        return x + self.attn(h, context) + self.mlp(h, context)


def test_block_of_a_new_class_is_computed_again_in_the_backward_pass_and_compiled(
    chars, tmp_path, monkeypatch
):
    monkeypatch.setattr(definition, "Block", ParallelBlock)
    calls = {}
    for which in ("none", "full"):
        ParallelBlock.calls = 0
        run_tiny(chars, tmp_path / which, activation_checkpoint=which, eval_interval=6, max_iters=2)
        calls[which] = ParallelBlock.calls
    assert calls["full"] - calls["none"] == 2 * 2  # layers x steps
    assert_equal(weights(tmp_path / "full"), weights(tmp_path / "none"))
    counter = CompileCounter()  # runs graphs as they are
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    run_tiny(chars, tmp_path / "compiled", compile=True, max_iters=12)
    assert counter.op_count > 10
    assert counter.frame_count < 12  # although it counts its passes


@POSIX
def test_experts_of_which_a_rank_uses_only_one_train_on_two_ranks(chars, tmp_path, monkeypatch):
    """The first token decides which; the loss is computed in chunks."""
    forward = Transformer.forward

    def with_experts(self, config):
        self.experts = nn.ModuleList(nn.Linear(config.n_embd, config.n_embd) for _ in range(3))

    def routed(self, idx, cache=None):
        x = forward(self, idx, cache)
        return x + self.experts[int(idx[0, 0]) % 3](x)

    extend(monkeypatch, Transformer, with_experts)
    monkeypatch.setattr(Transformer, "forward", routed)
    monkeypatch.setattr("deskgpt.kernels.LOGITS_ON_CPU", 1000)
    losses = []
    for ranks in (1, 2):
        c = tiny(chars, tmp_path / str(ranks), gradient_accumulation_steps=4, batch_size=2, seed=3)
        run(ranks, c)
        losses.append(logged(tmp_path / str(ranks), "iter", "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# ---- --dry_run tells what the loop does ----------------------------------------------------------


def with_a_head_for_a_further_loss(self, idx, targets=None):
    x = self.transformer(idx)
    self.kept = x.mean()  # which no copy of the model takes
    if targets is None:
        return self.logits(x), None
    return None, self.loss(x, targets), {"further": self.head(x).square().mean()}


def test_model_that_keeps_a_tensor_and_has_a_head_for_a_further_loss_passes(
    chars, tmp_path, monkeypatch, capsys
):
    def with_head(self, config):
        self.head = nn.Linear(config.n_embd, 2)

    extend(monkeypatch, GPT, with_head)
    monkeypatch.setattr(GPT, "forward", with_a_head_for_a_further_loss)
    for dry_run in (False, True):
        main_that_fits(tiny(chars, tmp_path, dry_run=dry_run, max_iters=1))
    assert "gradients reach all parameters" in capsys.readouterr().out


def returning(result):
    """Return a GPT.forward whose loss comes in another form."""

    def forward(self, idx, targets=None):
        x = self.transformer(idx)
        return (self.logits(x), None) if targets is None else result(self.loss(x, targets))

    return forward


def mean_in_training(self, idx, cache=None):
    x = self.wte(idx)
    return self.ln_f(x + x.mean((0, 1)) if self.training else x)


def other_tokens(self, x):
    return self.lm_head(x + x.roll(1, -2))


def with_a_list(config, model, dtype):
    optimizer = torch.optim.SGD(model.parameters(), config.learning_rate)
    optimizer.seen = []  # type: ignore[attr-defined]
    return optimizer


def lbfgs(config, model, dtype):
    return torch.optim.LBFGS(model.parameters())


@pytest.mark.parametrize(
    ("changed", "change", "named"),
    [
        ("model.GPT.forward", returning(lambda loss: loss), ["tensor(", "(None, loss)"]),
        ("model.GPT.forward", returning(lambda loss: {"loss": loss}), ["'loss': tensor"]),
        ("model.GPT.forward", returning(lambda loss: (None, loss, {"aux": 0.0})), ["aux"]),
        ("model.GPT.forward", returning(lambda loss: (None, loss, {"lr": loss})), ["'lr'"]),
        ("train.build_optimizer", with_a_list, ["SGD", "seen"]),
        ("train.build_optimizer", lbfgs, ["LBFGS", "closure"]),
        ("model.Transformer.forward", mean_in_training, ["in training tokens see later"]),
        ("model.GPT.logits", other_tokens, ["GPT.logits of one token alone"]),
    ],
)
def test_dry_run_refuses_in_one_line_what_the_run_does_or_what_is_wrong(
    changed, change, named, chars, tmp_path, monkeypatch
):
    monkeypatch.setattr(changed, change)
    is_checked_only = change in (mean_in_training, other_tokens)
    for dry_run in (True,) if is_checked_only else (True, False):
        with raises_one_line(*named):
            main_that_fits(tiny(chars, tmp_path / str(dry_run), dry_run=dry_run, max_iters=2))


def test_model_without_position_embeddings_trains_and_a_complex_parameter_is_refused(
    chars, tmp_path, monkeypatch
):
    gains: list[Tensor] = []

    def without_wpe(self, config):
        del self.wpe
        for gain in gains:
            self.gain = nn.Parameter(gain)

    extend(monkeypatch, Transformer, without_wpe)
    monkeypatch.setattr(Transformer, "forward", lambda self, idx: self.ln_f(self.wte(idx)))
    run_tiny(chars, tmp_path, max_iters=1)
    gains.append(torch.ones(3, dtype=torch.complex64))
    with raises_one_line("transformer.gain is complex", "torch.view_as_complex"):
        run_tiny(chars, tmp_path / "complex", max_iters=1)


# ---- a changed loop ------------------------------------------------------------------------------


def edited_train(monkeypatch, old, new, source=SOURCE):
    """Return train.py as a module of its own, with a text replaced."""
    assert source.count(old) == 1
    module = ModuleType("edited")
    module.__file__ = str(ROOT / "train.py")
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the script extends
    monkeypatch.setitem(sys.modules, "edited", module)
    exec(source.replace(old, new), vars(module))
    return module


def run_of(module, data, out_dir, **settings):
    module.main(tiny(data, out_dir, **settings))
    return trajectory(out_dir), events(out_dir, "bad_step")


def test_order_of_the_lines_in_the_log_block_puts_no_figure_into_another_step(
    chars, tmp_path, monkeypatch
):
    """The second step has a NaN, whose batch is reported, too."""

    def with_nan(self, idx, targets):
        loss = self.loss(self.transformer(idx), targets)
        calls.append(self.training)
        return None, loss * (math.nan if self.training and sum(calls) == 2 else 1.0)

    monkeypatch.setattr(GPT, "forward", with_nan)
    block = re.findall(r"# ---- log -+\n(.*?)    except \(DataError", SOURCE, re.S)[0]
    lines = re.findall(r"^ {12}\S.*?\n(?= {12}[^ )]|\Z)", block, re.M | re.S)
    assert "".join(lines) == block
    assert len(lines) == 5
    calls: list[bool] = []
    settings = {"max_iters": 4, "eval_interval": 2}
    usual = run_of(train, chars, tmp_path / "usual", **settings)
    assert usual[1][0]["iter"] == 1
    module = edited_train(monkeypatch, "".join(lines), "".join(reversed(lines)))
    calls = []
    found = run_of(module, chars, tmp_path / "reversed", **settings)
    assert repr(found) == repr(usual)  # as texts, in which NaN equals NaN


def test_other_schedule_in_the_code_is_noticed_by_a_resumed_run_and_one_in_main_is_said(
    chars, tmp_path, monkeypatch, capsys
):
    run_tiny(chars, tmp_path, max_iters=4, lr_decay_iters=8)
    rate = train.learning_rate
    with monkeypatch.context() as patch:
        patch.setattr(
            train, "learning_rate", lambda *given: rate(*given) * (1 - 0.01 * (given[1] > 2))
        )
        with raises_one_line("learning rate at step 3", "resume_changed=True"):
            main(resumed(tmp_path, max_iters=6))
    main(resumed(tmp_path, max_iters=5))
    assert "changed: learning rate" not in capsys.readouterr().out
    lr = "lr = learning_rate(state.schedule, step)"
    edited_train(monkeypatch, lr, lr.replace("= ", "= 0.5 * ")).main(resumed(tmp_path, max_iters=7))
    changed = re.findall("^changed: learning rate .*", capsys.readouterr().out, re.M)
    # groups
    assert [line.split(" times")[0] for line in changed] == [
        "changed: learning rate at step 5: 0.5"
    ] * 2


def test_group_with_a_learning_rate_of_its_own_keeps_its_share(chars, tmp_path, monkeypatch):
    make = train.build_optimizer
    shares: list[list[float]] = []

    def with_own(config, model, dtype):
        optimizer = make(config, model, dtype)
        biases = optimizer.param_groups[1]
        biases["lr"] = own * config.learning_rate
        optimizer.register_step_pre_hook(
            lambda *_: shares.append([g["lr"] for g in optimizer.param_groups])
        )
        return optimizer

    monkeypatch.setattr(train, "build_optimizer", with_own)
    for own in (0.25, 0.0):
        run_tiny(chars, tmp_path / str(own), max_iters=3, lr_decay_iters=6)
        main(resumed(tmp_path / str(own), max_iters=6))
        assert len(shares) == 6
        assert all(bias == own * matrix for matrix, bias in shares)
        shares.clear()
    assert weights(tmp_path / "0.0")["transformer.ln_f.weight"].eq(1).all()


def test_scheduler_of_torch_has_a_line_since_the_loop_sets_the_rates(
    chars, tmp_path, monkeypatch, capsys
):
    restore = "    restore(start, state, trains=not config.eval_only)\n"
    scheduler = "    torch.optim.lr_scheduler.StepLR(optimizer, 2)\n"
    module = edited_train(monkeypatch, restore, restore + scheduler)
    run_of(module, chars, tmp_path, max_iters=2)
    assert capsys.readouterr().out.count("lr_scheduler has no effect") == 1


def test_layer_that_is_frozen_when_the_optimizer_is_made_is_not_trained_later_without_a_word(
    chars, tmp_path, monkeypatch
):
    freeze = "    model.transformer.wpe.requires_grad_(False)\n"
    thaw = "            model.transformer.wpe.requires_grad_(step > 1)\n"
    made = "    optimizer = build_optimizer(config, model, compute.dtype)\n"
    begins = "            # ---- one optimizer step --"
    source = SOURCE.replace(begins, thaw + begins)
    module = edited_train(monkeypatch, made, made + freeze, source)
    run_of(module, chars, tmp_path, max_iters=4)
    optimizer = load_checkpoint(tmp_path).optimizer
    moments = optimizer["state"][optimizer["names"].index("transformer.wpe.weight")]
    assert moments["step"] == 2
    module = edited_train(monkeypatch, made, freeze + made, source)
    with raises_one_line("transformer.wpe.weight is trained now", "after build_optimizer"):
        run_of(module, chars, tmp_path / "refused", max_iters=4)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("in loader.step(step)", "in [*loader.step(step), *loader.step(step)]", "--gradient_acc"),
        ("in loader.step(step)", "in [next(loader.step(step))]", "--gradient_acc"),
        ("**loss_sums,", "**loss_sums, time_ms=0.5", "logger.step(time_ms=...)"),
        ("**loss_sums,", "**loss_sums, shares=torch.ones(3)", "logger.step(shares=...)"),
    ],
)
def test_edit_of_main_that_would_train_or_log_wrong_is_refused(
    old, new, named, chars, tmp_path, monkeypatch
):
    module = edited_train(monkeypatch, old, new)
    with raises_one_line(named):
        run_of(module, chars, tmp_path, max_iters=3, gradient_accumulation_steps=2)


SMALLEST = TINIEST.as_args()
# A choice of a Literal, and what must not take a new one for its last branch.
NEW_CHOICES: list[tuple[str, Callable[[Any], Any]]] = [
    ("position", GPT),
    ("norm", GPT),
    ("activation", lambda c: GPT(c)(torch.zeros(1, 4, dtype=torch.long))),
    ("optimizer", lambda c: train.build_optimizer(c, GPT(GPTConfig(**SMALLEST)))),
    ("lr_schedule", lambda c: train.learning_rate(c.schedule(), c.max_iters // 2)),
    (
        "activation_checkpoint",
        lambda c: apply_compute(MagicMock(), ComputeMode(recompute=c.activation_checkpoint)),
    ),
    ("on_spike", lambda c: LossMonitor(MagicMock(), MagicMock(), MagicMock(), c.on_spike)),
    ("dtype", lambda c: autocast(CPU, c.dtype)),
]


@pytest.mark.parametrize(("name", "compute"), NEW_CHOICES)
def test_choice_that_nobody_computes_is_an_error_and_not_another_choice(name, compute):
    config: Any = (
        GPTConfig(**SMALLEST) if name in definition.MODERN_CHOICES else TrainConfig(dtype="float32")
    )
    compute(config)
    object.__setattr__(config, name, "new")  # as if its Literal had it
    with pytest.raises((ValueError, KeyError), match="new"):
        compute(config)


def test_new_default_of_the_model_leaves_what_a_checkpoint_computes(monkeypatch):
    modern = {"norm": "rms", "activation": "relu2", "qk_norm": True}
    saved = GPTConfig(**SMALLEST).as_args(), GPTConfig(**SMALLEST | modern).as_args()
    assert saved[0].keys() == {*definition.NANOGPT_ARGS}
    initialise = GPTConfig.__init__
    monkeypatch.setattr(
        GPTConfig, "__init__", lambda self, **given: initialise(self, **modern | given)
    )
    assert GPTConfig(**SMALLEST).norm == "rms"
    assert [GPTConfig.from_args(args, "").norm for args in saved] == ["layer", "rms"]
    assert [GPTConfig.from_args(args, "").as_args() for args in saved] == [*saved]
    assert GPTConfig(**SMALLEST).as_args() == saved[1]
    # Which has no other schedule and optimizer.
    nanogpts = known_settings(TrainConfig, {"learning_rate": 1e-3})
    found = [nanogpts[name] for name in ("norm", "optimizer", "lr_schedule")]
    assert found == ["layer", "adamw", "cosine"]


@dataclasses.dataclass(eq=False)
class CountingState(TrainState):
    tokens_seen: int = 0

    def checkpoint(self, *given):
        self.tokens_seen = 10 + self.step
        return super().checkpoint(*given)


def test_plain_field_that_somebody_adds_to_the_training_state_is_in_checkpoints(
    chars, tmp_path, monkeypatch
):
    found = []
    resume = TrainState.resume

    def noting(self, *given):
        resume(self, *given)
        found.append(self.tokens_seen)

    monkeypatch.setattr(TrainState, "resume", noting)
    monkeypatch.setattr(train, "TrainState", CountingState)
    run_tiny(chars, tmp_path, max_iters=2)
    main(resumed(tmp_path))
    assert found == [12]


# Each setting is of learning unless deskgpt/resume.py lists it. Whoever adds one decides, and
# writes it here or there.
OF_LEARNING = {f.name for f in dataclasses.fields(definition.ModelSettings)} | {*SCHEDULE}
OF_LEARNING |= {"optimizer", "weight_decay", "beta1", "beta2", "momentum", "grad_clip", "seed"}


def test_each_setting_is_of_learning_or_listed_as_one_that_is_not():
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    assert names - NOT_LEARNING == OF_LEARNING
    assert names > NOT_LEARNING
