"""Which variant a run takes: what is right is found by comparing with model.py, what is fast by timing."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_equal, assert_one_line, events, tiny, weights
from gloo import on_ranks
from tiny_models import MODERN_SETTINGS
from torch import Tensor

import model as definition
from deskgpt.compute import implementation
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.implementation import EarlierVariant, Tuner
from deskgpt.compute.runner import Runner, Variant, count_flops
from deskgpt.kernels import cpu_kernels, replacements, verify
from deskgpt.kernels.overridable import overridable
from deskgpt.system import cache, hardware
from model import GPT, MLP, GPTConfig, causal_mask
from train import TrainConfig, build_optimizer, main

SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 4}
SIZES |= {"gradient_accumulation_steps": 1, "device": "cpu", "attention": "flash", "compile": False}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "remembered"))


@pytest.fixture(autouse=True)
def _without_cpu_kernels(request, monkeypatch):
    """tests/test_cpu_kernels.py has them."""
    monkeypatch.setattr(cpu_kernels, "may_exist", lambda: False)


def a_model(**settings: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"block_size": 32, "vocab_size": 100, "n_layer": 2, "n_head": 2, "n_embd": 32, "bias": False}
    return GPT(GPTConfig(**sizes | settings))


def batch_of(rows: int, T: int = 32) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 100, (rows, T + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True)
class Listening(DistContext):
    """One rank that keeps its lines instead of printing them."""

    printed: list[str] = field(default_factory=list)

    def print0(self, line: str) -> None:
        self.printed.append(line)


def tuner_of(
    printed: list[str] | None = None,
    model: GPT | None = None,
    dist: DistContext | None = None,
    earlier: dict[str, Any] | None = None,
    **settings: Any,
) -> Tuner:
    """The tuner of a run of this model, or a new one, with these settings. Its lines go to printed."""
    c = TrainConfig(**SIZES | settings)
    if model is None:
        model = a_model(**{k: v for k, v in settings.items() if k in MODERN_SETTINGS or k == "dropout"})
    T = model.config.block_size
    dist = dist or Listening(CPU, printed=[] if printed is None else printed)
    return Tuner(
        model,
        c,
        Batching.of(asdict(c), dist.rank, dist.world),
        dist,
        lambda n: batch_of(n, T),
        functools.partial(build_optimizer, c),
        EarlierVariant(**(earlier or {})),
        steps=0 if c.eval_only else c.max_iters,
    )


def chosen(printed: list[str] | None = None, model: GPT | None = None, **settings: Any) -> Runner:
    """The runner that tuner_of's tuner chooses."""
    return tuner_of(printed, model, **settings).choose()[0]


# ---- what differs from model.py --------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, dtypes: list[torch.dtype], name: str) -> None:
    """A replacement whose last position is wrong in these dtypes, without a NaN."""
    right = getattr(replacements, name)

    @functools.wraps(right)
    def wrong(*args: Any) -> Tensor:
        y = right(*args)
        return torch.cat((y[:, :, :-1], 0.0 * y[:, :, -1:]), 2) if args[1].dtype in dtypes else y

    monkeypatch.setattr(replacements, name, wrong)


def test_kernel_that_is_wrong_in_one_dtype_is_left_out_there_and_a_line_says_so(monkeypatch):
    plant(monkeypatch, [torch.bfloat16], "flash_attention")
    printed: list[str] = []
    for _ in range(2):  # nothing is remembered
        printed.clear()
        runner = chosen(printed, earlier={"dtype": "bfloat16"})
        assert runner.variant == Variant("bfloat16", refused=("flash_attention",))
        assert runner.variant.attention_in_use("cpu") == "reference"
        (line,) = [line for line in printed if "flash attention" in line and "using" in line]
        assert_one_line(line, "bfloat16", "disagrees with model.py", "relative error", "using model.py itself")
    assert chosen(dtype="float32").variant == Variant()


def test_dtype_that_is_wrong_is_left_out_or_an_error_where_the_user_asks_for_it(monkeypatch):
    linear = F.linear

    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = linear(x, weight, bias)
        return y * 1.5 if y.dtype == torch.bfloat16 and y.size(-1) == 32 else y

    monkeypatch.setattr(F, "linear", wrong)
    printed: list[str] = []
    assert chosen(printed, earlier={"dtype": "bfloat16"}).variant == Variant()
    assert_one_line(printed[-1], "bfloat16", "disagrees with model.py", "going on in float32")
    with pytest.raises(ValueError, match="dtype=bfloat16") as e:
        chosen(dtype="bfloat16")
    assert_one_line(str(e.value), "--dtype=float32")


@pytest.mark.slow
def test_wrong_kernel_of_the_compiler_is_found():
    """Inductor has a bug to order, for tests: its ReLU adds one."""
    import torch._inductor.config as inductor

    printed: list[str] = []
    settings: dict[str, Any] = {"activation": "relu2", "dtype": "float32", "compile": "auto"}
    with inductor.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        assert chosen(printed, earlier={"compiled": True}, **settings).variant == Variant()
    if "there is no C++ compiler" in printed[-1]:
        pytest.skip("no working C++ compiler here")
    assert_one_line(printed[-1], "float32, compiled", "NOT compiled")


def test_compiling_that_fails_ends_a_run_that_asked_for_it_and_others_print_it(monkeypatch):
    """As on a GPU without Triton."""

    def compile(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Cannot find a working triton installation. " + "Words " * 100)

    monkeypatch.setattr(torch, "compile", compile)
    printed: list[str] = []
    with pytest.raises(ValueError, match="compile=True") as e:
        chosen(printed, dtype="float32", compile=True)
    assert_one_line(str(e.value), "triton", "--compile=auto", "--compile=False")
    assert chosen(printed, earlier={"compiled": True}, dtype="float32", compile="auto").variant == Variant()
    assert_one_line(printed[-1], "NOT compiled", "slower", "triton")


# ---- changes of model.py ---------------------------------------------------------------------------------------

WINDOW = 1e9  # tokens; what a change looks at, as a module's global
LOGGED: dict[str, Any] = {}


def attention_with(weights_of: Callable[[Tensor, float], Tensor]) -> Any:
    """Attention with the weights that weights_of makes of its masked scores and the dropout."""

    def attention(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, dropout: float) -> Tensor:
        scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~causal_mask(query[:, None], key), -1e9)
        return weights_of(scores, dropout) @ v

    attention.__qualname__ = "attention"
    return overridable(attention)


def usual(scores: Tensor, dropout: float) -> Tensor:
    return F.dropout(scores.softmax(-1), dropout)


def distances(scores: Tensor) -> Tensor:
    at = torch.arange(scores.size(-1))
    return at[:, None] - at


def alibi(scores: Tensor, dropout: float) -> Tensor:
    return usual(scores - float(os.environ["SLOPE"]) * distances(scores).abs(), dropout)


def window(scores: Tensor, dropout: float) -> Tensor:
    return usual(scores.masked_fill(distances(scores) >= WINDOW, -1e9), dropout)


def logging_entropy(scores: Tensor, dropout: float) -> Tensor:
    p = usual(scores, dropout)
    LOGGED["entropy"] = -(p * p.clamp(min=1e-9).log()).sum(-1).mean().detach()
    return p


GATE = torch.nn.Parameter(torch.tensor(1e-6))


def with_small_gate(scores: Tensor, dropout: float) -> Tensor:
    """Without its gradient it would stay as small as it is."""
    return usual(scores - GATE * distances(scores).abs(), dropout)


CHANGES: dict[str, tuple[Callable[[Tensor, float], Tensor], dict[str, Any]]] = {
    "an environment variable": (alibi, {}),
    "what is logged": (logging_entropy, {}),
    "a small gate": (with_small_gate, {}),
    "little noise": (lambda scores, dropout: usual(scores + 1e-5 * torch.randn_like(scores), dropout), {}),
    "another rate": (lambda scores, dropout: F.dropout(scores.softmax(-1), dropout / 2 + 0.01), {"dropout": 0.2}),
}


def refused_by(monkeypatch: pytest.MonkeyPatch, change: Any, name: str = "attention", **sizes: Any) -> tuple[str, ...]:
    """What a run leaves out after a change of model.py."""
    monkeypatch.setattr(f"model.{name}", change)
    printed: list[str] = []
    refused = chosen(printed, dtype="float32", **sizes).variant.refused
    assert sum("model.py" in line for line in printed) == len(refused), printed
    return refused


@pytest.mark.parametrize("name", CHANGES)
def test_attention_of_model_py_that_computes_draws_or_keeps_something_else_is_not_replaced(name, monkeypatch):
    change, sizes = CHANGES[name]
    monkeypatch.setenv("SLOPE", "0.5")
    assert refused_by(monkeypatch, attention_with(change), **sizes) == ("flash_attention",)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_that_is_only_written_in_another_way_is_replaced(dropout, monkeypatch):
    monkeypatch.setenv("SLOPE", "0")
    for change in (usual, alibi, window):
        assert refused_by(monkeypatch, attention_with(change), dropout=dropout) == ()


def relu2_replacement(reference: Any, x: Tensor, name: str) -> Tensor:
    return F.relu(x).square()


def test_limit_that_only_large_activations_reach_is_seen(monkeypatch):
    def activation(x: Tensor, name: str) -> Tensor:
        return F.relu(x).clamp(max=3).square()

    activation.__qualname__ = "activation"
    monkeypatch.setattr("model.activation", overridable(activation))
    model = a_model(activation="relu2")
    assert verify.wrong_replacements(model, {"activation": [relu2_replacement]}, *batch_of(1))


# ---- once more, as training goes on --------------------------------------------------------------------------


def test_change_after_the_start_is_found_later_and_the_run_goes_on_as_model_py_says(chars, tmp_path, monkeypatch):
    """A window that narrows at step 4: before, after the last comparison, and what is marked."""
    monkeypatch.setattr("model.attention", attention_with(window))
    run = tiny(chars, tmp_path / "run", max_iters=8, eval_interval=2, lr_decay_iters=8)
    forward = GPT.forward
    step = 0

    def narrowing(self: GPT, idx: Tensor, targets: Tensor | None = None) -> Any:
        nonlocal step
        step += self.training and torch.is_grad_enabled()
        globals()["WINDOW"] = 4 if step > 6 else 1e9
        return forward(self, idx, targets)

    monkeypatch.setattr(GPT, "forward", narrowing)
    try:
        main(run)
    finally:
        globals()["WINDOW"] = 1e9
    (warning,) = events(tmp_path / "run", "warning")
    assert re.search(r"flash attention.*disagrees with model\.py.*Steps after \d+ may be wrong", warning["text"])
    saved = torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)
    assert saved["facts"]["doubts"] == [warning["text"]]


def test_low_precision_that_goes_wrong_later_falls_back_to_float32():
    runner = chosen(dtype="bfloat16")
    ranks = Listening(CPU)
    x, y = batch_of(4)
    assert runner.verify_again(0, ranks) == [] == ranks.printed  # it was compared just now
    runner.forward_backward(x, y)
    runner.model.zero_grad()
    assert runner.verify_again(10, ranks) == []
    runner.model.transformer.ln_f.register_forward_hook(
        lambda module, args, y: y * (1.5 if torch.is_autocast_enabled("cpu") else 1.0)
    )
    (line,) = runner.verify_again(30, ranks, must=True)
    assert_one_line(line, "bfloat16", "disagrees", "going on in float32", "Steps after 10 may be wrong")
    assert runner.variant.dtype == "float32"
    assert runner.doubts == [line]
    assert runner.forward_backward(x, y).dtype == torch.float32


def test_a_run_whose_memory_is_too_short_to_compare_again_goes_on(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner = chosen(dtype="bfloat16")
    ranks = Listening(CPU)
    runner.forward_backward(*batch_of(4))
    monkeypatch.setattr(runner.model, "forward", fail)
    assert runner.verify_again(10, ranks) == []
    assert_one_line(ranks.printed[0], "memory is too short to check bfloat16")
    assert runner.verify_again(20, ranks) == []
    assert len(ranks.printed) == 1
    assert runner.variant.dtype == "bfloat16"


def test_comparisons_leave_weights_buffers_modes_and_random_numbers_as_they_are():
    model = a_model(dropout=0.1)
    block: Any = model.transformer.h[0]
    block.register_buffer("mean", torch.ones(32))

    def subtract_mean(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, context = args
        if block.training:
            block.mean = block.mean.lerp(x.detach().mean((0, 1)), 0.5)
        return x - block.mean, context

    block.register_forward_pre_hook(subtract_mean)
    model.transformer.h[1].eval()  # as a frozen part
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tuner = tuner_of(None, model, dtype="bfloat16", dropout=0.1)
    runner, _ = tuner.choose()
    runner.last = batch_of(4)
    runner.verify_again(1, tuner.dist, must=True)
    assert torch.equal(torch.rand(3), expected)
    assert_equal(dict(model.state_dict()), before)
    assert [module.training for module in model.transformer.h] == [True, False]
    assert all(p.grad is None for p in model.parameters())


def test_run_whose_kernel_is_refused_prints_it_once_and_trains_as_model_py_says(chars, tmp_path, monkeypatch, capsys):
    forward = MLP.forward
    monkeypatch.setattr(definition, "causal_mask", lambda query, key: (key <= query) & (query - key < 4))
    monkeypatch.setattr(MLP, "forward", lambda mlp, x, context: forward(mlp, x.cumsum(1), context))  # no cache has this
    main(tiny(chars, tmp_path / "run", sample_interval=1))
    printed = capsys.readouterr().out
    assert len(re.findall(r"^flash attention in float32 disagrees with model\.py.*$", printed, re.M)) == 1
    assert printed.count("writing without a cache") == 1
    assert events(tmp_path / "run", "start")[0]["attention"] == "reference"
    monkeypatch.setattr(replacements, "candidates_for", lambda *args, **options: {})
    main(tiny(chars, tmp_path / "reference"))
    assert_equal(weights(tmp_path / "run"), weights(tmp_path / "reference"))


def test_model_in_float64_trains(chars, tmp_path, monkeypatch):
    init = GPT.__init__

    def in_float64(self: GPT, config: GPTConfig) -> None:
        init(self, config)
        self.double()

    monkeypatch.setattr(GPT, "__init__", in_float64)
    main(tiny(chars, tmp_path, max_iters=3))
    assert events(tmp_path, "start")[0]["attention"] == "flash"


class Experts(MLP):
    """Each token takes one of four layers; rounding sends some of them to another."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.router = torch.nn.Linear(config.n_embd, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(config.n_embd, config.n_embd) for _ in range(4))

    def forward(self, x: Tensor, context: Any) -> Tensor:
        chosen = F.one_hot(self.router(x).argmax(-1), 4)  # (B, T, 4)
        return sum(expert(x) * chosen[..., i, None] for i, expert in enumerate(self.experts))


def test_blocks_that_compute_something_else_the_second_time_are_not_recomputed(monkeypatch):
    """A global counts the calls: a block that is computed again finds another number."""
    forward = MLP.forward
    calls = 0

    def scaled_by_layer(mlp: MLP, x: Tensor, context: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return forward(mlp, x * (1 + calls % 2), context)

    monkeypatch.setattr(MLP, "forward", scaled_by_layer)
    with pytest.raises(ValueError, match="activation_checkpoint=full") as e:
        chosen(dtype="float32", activation_checkpoint="full")
    assert_one_line(e.value, "the second time", "leave it out")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_experts_train_in_low_precision_though_rounding_sends_tokens_elsewhere(dtype, monkeypatch):
    monkeypatch.setattr(definition, "MLP", Experts)
    for width in (32, 64):
        assert chosen(model=a_model(n_layer=4, n_embd=width), dtype=dtype).variant == Variant(dtype)


# ---- the comparison of a pass ----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.2}, MODERN_SETTINGS, {"gradient_accumulation_steps": 4096}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_passes_with_all_choices_of_the_model_and_zeros_stay_zeros(settings, dtype):
    printed: list[str] = []
    runner = chosen(printed, dtype=dtype, **settings)
    assert runner.variant == Variant(dtype), printed
    assert runner.model.lm_head.weight.any() == (not settings.get("zero_init", False))


def test_weights_that_are_not_finite_are_not_taken_for_a_wrong_variant():
    model = a_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="nan") as e:
        chosen(model=model, dtype="bfloat16")
    assert_one_line(str(e.value), "float32", "weights", "take another checkpoint")


def test_float32_of_mps_is_compared_with_a_cpu_and_refused_where_it_differs(monkeypatch):
    """Here the CPU counts as MPS, and its layers are wrong for one model."""
    monkeypatch.setattr("deskgpt.compute.runner.REFERENCES", ())
    monkeypatch.setattr("deskgpt.compute.implementation.is_reference", lambda variant, device: False)
    assert chosen(dtype="float32").variant == Variant()
    model = a_model()
    first: Any = model.transformer.h[0]
    matrix = first.mlp.c_fc.weight
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, bias=None: linear(x, w, bias) * (1.01 if w is matrix else 1.0))
    with pytest.raises(ValueError, match="disagrees") as e:
        chosen(model=model, dtype="float32")
    assert_one_line(str(e.value), "float32", "try --device=cpu")


@pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")
def test_what_fails_on_one_rank_is_given_up_by_all(tmp_path, monkeypatch):
    """Rank 1 finds bfloat16 wrong."""

    def work(ranks: DistContext) -> str:
        compare = verify.compare_passes

        def planted(*args: Any, **options: Any) -> None:
            if ranks.rank == 1:
                raise verify.Mismatch("planted")
            compare(*args, **options)

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"remembered-{ranks.rank}"))
        monkeypatch.setattr(verify, "compare_passes", planted)
        return str(chosen(dist=ranks, earlier={"dtype": "bfloat16"}, gradient_accumulation_steps=2).variant)

    assert on_ranks(work, 2, tmp_path) == ["float32, not compiled"] * 2


# ---- the fastest ---------------------------------------------------------------------------------------------


def pretend_times(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[Variant]:
    """A machine on which a pass takes these seconds, by dtype; returns the variants that are timed."""
    timed: list[Variant] = []

    def pass_s(tuner: Tuner, runner: Runner, batch: Any) -> float:
        timed.append(runner.variant)
        return seconds[runner.variant.dtype]

    monkeypatch.setattr(Tuner, "pass_s", pass_s)
    return timed


def test_auto_takes_what_was_fastest_here_and_measures_once_on_a_machine(monkeypatch):
    timed = pretend_times(monkeypatch, float32=3.0, bfloat16=2.0)
    printed: list[str] = []
    assert chosen(printed).variant == Variant("bfloat16")
    assert_one_line(printed[0], "bfloat16", "3e+03 ms", "2e+03 ms")
    assert set(timed) == {Variant(), Variant("bfloat16")}
    timed.clear()
    printed.clear()
    assert chosen(printed).variant == Variant("bfloat16")
    assert_one_line(printed[0], "bfloat16", cache.path_of(implementation.CACHE))
    assert not timed
    chosen(activation="relu2")  # another model
    assert timed
    pretend_times(monkeypatch, float32=1.0, bfloat16=0.99)  # not clearly faster
    monkeypatch.setattr(hardware, "device_name", lambda device: "another processor")
    assert chosen().variant == Variant()


@pytest.mark.slow
def test_resumed_run_keeps_its_variant(chars, tmp_path, monkeypatch):
    pretend_times(monkeypatch, float32=2.0, bfloat16=1.0)
    settings = {"dtype": "auto", "attention": "auto"}
    main(tiny(chars, tmp_path / "whole", **settings))
    main(tiny(chars, tmp_path / "halves", max_iters=3, lr_decay_iters=6, **settings))
    assert events(tmp_path / "halves", "start")[0]["dtype"] == "bfloat16"
    monkeypatch.setattr(Tuner, "pass_s", lambda *_: pytest.fail("timed again"))
    main(tiny(chars, tmp_path / "halves", init_from="resume", **settings))
    assert [e["dtype"] for e in events(tmp_path / "halves", "start")] == ["bfloat16"] * 2
    assert_equal(*(weights(tmp_path / name) for name in ("whole", "halves")))


@pytest.mark.parametrize(
    "saved",
    [None, {}, {"device": "cuda", "dtype": "bfloat16"}, {"device": "cpu", "dtype": "int8", "compiled": "yes"}],
)
def test_variant_of_another_device_or_none_of_ours_is_not_taken_from_a_checkpoint(saved):
    assert EarlierVariant.of(saved, CPU) == EarlierVariant()
    # Older checkpoints hold only whether they were compiled, or whether attention was explicit.
    assert EarlierVariant.of({"compiled": True}, CPU) == EarlierVariant(compiled=True)
    assert EarlierVariant.of({"explicit": True}, CPU) == EarlierVariant(attention="explicit")


# ---- FLOPs -----------------------------------------------------------------------------------------------------


def test_flops_are_nanogpts_for_a_gpt_and_counted_for_a_changed_model():
    sizes: dict[str, Any] = {"n_embd": 128, "n_layer": 2, "block_size": 64}
    model = a_model(**sizes)
    assert count_flops(model, *batch_of(1, 64)) == model.estimate_flops()
    shared = a_model(**sizes)
    shared.transformer.h[1] = shared.transformer.h[0]  # a block applied twice
    assert count_flops(shared, *batch_of(1, 64)) == pytest.approx(model.estimate_flops(), rel=0.01)
    assert shared.estimate_flops() < 0.8 * model.estimate_flops()


def test_tokens_per_second_are_those_that_a_changed_loop_trains_on(chars, tmp_path, monkeypatch):
    """As with a context that grows."""
    forward = Runner.forward
    monkeypatch.setattr(Runner, "forward", lambda self, x, y, *more: forward(self, x[:, :4], y[:, :4], *more))
    main(tiny(chars, tmp_path, max_iters=3))
    for e in events(tmp_path, "iter"):
        assert e["tokens_per_s"] * e["time_ms"] / 1e3 == pytest.approx(4 * 4)


def test_replacement_that_does_not_know_an_argument_is_left_out(monkeypatch):
    def attention(*args: Any, scale: float = 1.0) -> Tensor:
        return usual_attention(scale * args[0], *args[1:])

    usual_attention = definition.attention.__wrapped__  # type: ignore[attr-defined]
    attention.__qualname__ = "attention"
    changed = overridable(attention)
    assert refused_by(monkeypatch, lambda *args: changed(*args, scale=2.0)) == ("flash_attention",)
