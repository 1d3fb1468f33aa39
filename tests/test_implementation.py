"""Which variant a run takes: what is right is found by comparing with model.py, what is fast by timing."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
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
from deskgpt.compute.implementation import EarlierVariant, Options, Tuner, choose_implementation
from deskgpt.compute.runner import Runner, Variant, compared_rows, count_flops
from deskgpt.estimate import fit
from deskgpt.kernels import cpu_kernels, replacements, verify
from deskgpt.kernels.overridable import overridable, replacing
from deskgpt.system import cache, hardware
from model import GPT, MLP, GPTConfig, causal_mask
from train import TrainConfig, build_optimizer, main

SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 4}
SIZES |= {"gradient_accumulation_steps": 1, "device": "cpu"}
CPU = torch.device("cpu")
EXPLICIT = Variant("float32", attention="explicit")


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
    model: GPT,
    ranks: DistContext | None = None,
    earlier: EarlierVariant | None = None,
    printed: list[str] | None = None,
    **settings: Any,
) -> Tuner:
    """What a run of this model with these settings tries. Its lines go to printed."""
    c = TrainConfig(**SIZES | settings)
    wanted = Options.of(asdict(c), earlier or EarlierVariant(), c.max_iters, None)
    make = functools.partial(build_optimizer, c)
    smaller = functools.partial(fit.smaller_batch, model.config, make, CPU, wanted.may_split_anew(CPU))
    ranks = ranks or Listening(CPU, printed=[] if printed is None else printed)
    T = model.config.block_size
    return Tuner(
        model, Batching.of(asdict(c), ranks.rank, ranks.world), wanted, ranks, lambda n: batch_of(n, T), smaller
    )


def chosen(printed: list[str] | None = None, earlier: dict[str, Any] | None = None, **settings: Any) -> Runner:
    """The runner of a run with these settings; its lines go to printed."""
    model = a_model(**{k: v for k, v in settings.items() if k in MODERN_SETTINGS or k == "dropout"})
    return choose_implementation(tuner_of(model, None, EarlierVariant(**(earlier or {})), printed, **settings))[0]


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
        runner = chosen(printed, {"dtype": "bfloat16", "attention": "flash"}, compile=False)
        assert runner.variant == Variant("bfloat16", refused=("flash_attention",))
        assert runner.variant.attention_in_use("cpu") == "reference"
        (line,) = [line for line in printed if "flash attention" in line and "using" in line]
        assert_one_line(line, "bfloat16", "disagrees with model.py", "relative error", "using model.py itself")
    assert chosen([], {"attention": "flash"}, dtype="float32", compile=False).variant == Variant()


def test_dtype_that_is_wrong_is_left_out_or_an_error_where_the_user_asks_for_it(monkeypatch):
    linear = F.linear

    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = linear(x, weight, bias)
        return y * 1.5 if y.dtype == torch.bfloat16 and y.size(-1) == 32 else y

    monkeypatch.setattr(F, "linear", wrong)
    printed: list[str] = []
    assert chosen(printed, {"dtype": "bfloat16", "attention": "flash"}, compile=False).variant == Variant()
    assert_one_line(printed[-1], "bfloat16", "disagrees with model.py", "going on in float32")
    with pytest.raises(ValueError, match="dtype=bfloat16") as e:
        chosen([], {"attention": "flash"}, dtype="bfloat16", compile=False)
    assert_one_line(str(e.value), "--dtype=float32")


@pytest.mark.slow
def test_wrong_kernel_of_the_compiler_is_found():
    """Inductor has a bug to order, for tests: its ReLU adds one."""
    import torch._inductor.config as inductor

    printed: list[str] = []
    settings: dict[str, Any] = {"activation": "relu2", "dtype": "float32"}
    earlier = {"compiled": True, "attention": "flash"}
    with inductor.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        assert chosen(printed, earlier, **settings).variant == Variant()
        if "there is no C++ compiler" in printed[-1]:
            pytest.skip("no working C++ compiler here")
        assert_one_line(printed[-1], "float32, compiled", "NOT compiled")
        with pytest.raises(ValueError, match="compile=True") as e:  # a user who has asked for it
            chosen(printed, earlier, **settings, compile=True)
        assert_one_line(str(e.value), "float32, compiled", "--compile=False")


def test_compiling_that_fails_ends_a_run_that_asked_for_it_and_others_print_it(monkeypatch):
    """As on a GPU without Triton."""

    def compile(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Cannot find a working triton installation. " + "Words " * 100)

    monkeypatch.setattr(torch, "compile", compile)
    printed: list[str] = []
    earlier = {"dtype": "float32", "attention": "flash", "compiled": True}
    with pytest.raises(ValueError, match="compile=True") as e:
        chosen(printed, earlier, compile=True)
    assert_one_line(str(e.value), "triton", "--compile=auto", "--compile=False")
    assert chosen(printed, earlier, compile="auto").variant == Variant()
    assert_one_line(printed[-1], "NOT compiled", "slower", "triton")


LIMIT = 1e9  # what the changes below look at, as a module's global


def weighted(weights_of: Callable[[Tensor, float], Tensor]) -> Any:
    """Attention with the weights that weights_of makes of its masked scores and the dropout."""

    def attention(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, dropout: float) -> Tensor:
        scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~causal_mask(query[:, None], key), -1e9)
        return weights_of(scores, dropout) @ v

    attention.__qualname__ = "attention"
    return overridable(attention)


def usual(scores: Tensor, dropout: float) -> Tensor:
    return F.dropout(scores.softmax(-1), dropout)


def alibi(scores: Tensor, dropout: float) -> Tensor:
    """Switched on by an environment variable."""
    at = torch.arange(scores.size(-1))
    slope = float(os.environ.get("SLOPE", "0"))
    return usual(scores - slope * (at[:, None] - at).abs(), dropout)


def window(scores: Tensor, dropout: float) -> Tensor:
    """Of LIMIT tokens."""
    at = torch.arange(scores.size(-1))
    return usual(scores.masked_fill(at[:, None] - at >= LIMIT, -1e9), dropout)


LOGGED: dict[str, Any] = {}


def logging_entropy(scores: Tensor, dropout: float) -> Tensor:
    p = usual(scores, dropout)
    LOGGED["entropy"] = -(p * p.clamp(min=1e-9).log()).sum(-1).mean().detach()
    return p


RANDOM: dict[str, Callable[[Tensor, float], Tensor]] = {
    "little noise": lambda scores, dropout: usual(scores + 1e-5 * torch.randn_like(scores), dropout),
    "rarely": lambda scores, dropout: usual(scores * (torch.rand(()) > 0.01), dropout),
    "another rate": lambda scores, dropout: F.dropout(scores.softmax(-1), dropout / 2 + 0.01),
    "dropped scores": lambda scores, dropout: F.dropout(scores, dropout).softmax(-1),
    "logged entropy": logging_entropy,
}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["as it is", *RANDOM])
def test_no_kernel_leaves_out_what_attention_of_model_py_draws_or_keeps(kind, dropout, monkeypatch):
    monkeypatch.setattr("model.attention", weighted(RANDOM.get(kind, usual)))
    is_usual = kind == "as it is" or (kind == "dropped scores" and not dropout)
    printed: list[str] = []
    refused = chosen(printed, {"attention": "flash"}, dtype="float32", compile=False, dropout=dropout).variant.refused
    assert refused == (() if is_usual else ("flash_attention",)), printed
    assert len(printed) == (not is_usual)


def refused_by(monkeypatch: pytest.MonkeyPatch, change: Any, name: str = "attention", **sizes: Any) -> tuple[str, ...]:
    """What a run leaves out after a change of model.py."""
    monkeypatch.setattr(f"model.{name}", change)
    tuner = tuner_of(a_model(**sizes), None, EarlierVariant(attention="flash"), dtype="float32", compile=False)
    return choose_implementation(tuner)[0].variant.refused


def test_change_that_depends_on_an_environment_variable_is_seen_at_each_start(monkeypatch):
    assert refused_by(monkeypatch, weighted(alibi)) == ()
    monkeypatch.setenv("SLOPE", "0.5")
    assert refused_by(monkeypatch, weighted(alibi)) == ("flash_attention",)


def test_change_that_depends_on_a_modules_global_is_seen_at_each_start(monkeypatch):
    assert refused_by(monkeypatch, weighted(window)) == ()
    monkeypatch.setitem(globals(), "LIMIT", 8)
    assert refused_by(monkeypatch, weighted(window)) == ("flash_attention",)


def test_difference_from_the_third_layer_on_is_seen(monkeypatch):
    calls = 0

    def scores_of_layer(scores: Tensor, dropout: float) -> Tensor:
        nonlocal calls
        calls += 1
        return usual(scores * (1.0 if calls < 3 else 3.0), dropout)

    assert refused_by(monkeypatch, weighted(scores_of_layer), n_layer=3) == ("flash_attention",)


def test_window_that_only_the_end_of_a_long_context_feels_is_seen(monkeypatch):
    monkeypatch.setitem(globals(), "LIMIT", 200)
    assert refused_by(monkeypatch, weighted(window), block_size=256) == ("flash_attention",)


def test_mask_that_only_some_sequences_have_is_seen(monkeypatch):
    """Attention that does not look back beyond token 7, which a sequence may lack: a global holds the tokens."""
    held: dict[str, Tensor] = {}
    forward = definition.Transformer.forward

    def holding(self: Any, idx: Tensor, cache: Any = None) -> Tensor:
        held["document"] = (idx == 7).cumsum(1)
        return forward(self, idx, cache)

    def attention(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, dropout: float) -> Tensor:
        document = held["document"][:, None]
        seen = causal_mask(query[:, None], key) & (document[..., :, None] == document[..., None, :])
        return (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~seen, -1e9).softmax(-1) @ v

    attention.__qualname__ = "attention"
    monkeypatch.setattr(definition.Transformer, "forward", holding)
    x, _ = batch_of(4)
    assert not (x[0] == 7).any()
    assert (x == 7).any()
    assert refused_by(monkeypatch, overridable(attention)) == ("flash_attention",)


def test_limit_that_only_large_activations_reach_is_seen(monkeypatch):
    @overridable
    def activation(x: Tensor, name: str) -> Tensor:
        return F.relu(x).clamp(max=3).square()

    candidates = {"activation": [replacements.kernel_activation]}
    monkeypatch.setattr(replacements, "kernel_activation", unlimited := relu2_replacement)
    written: Any = activation
    written.__wrapped__.__qualname__ = "activation"
    monkeypatch.setattr("model.activation", overridable(written.__wrapped__))
    candidates = {"activation": [unlimited]}
    assert list(verify.wrong_replacements(a_model(activation="relu2"), candidates, *batch_of(1))) == [
        "relu2_replacement"
    ]


def relu2_replacement(reference: Any, x: Tensor, name: str) -> Tensor:
    return F.relu(x).square()


# ---- once more, as training goes on --------------------------------------------------------------------------


def test_change_after_the_start_is_found_later_and_the_run_goes_on_as_model_py_says(chars, tmp_path, monkeypatch):
    """A window that narrows at step 4: before, after the last comparison, and what is marked."""
    monkeypatch.setattr("model.attention", weighted(window))
    run = tiny(chars, tmp_path / "run", max_iters=8, eval_interval=2, lr_decay_iters=8)
    forward = GPT.forward
    step = 0

    def narrowing(self: GPT, idx: Tensor, targets: Tensor | None = None) -> Any:
        nonlocal step
        step += self.training and torch.is_grad_enabled()
        globals()["LIMIT"] = 4 if step > 6 else 1e9
        return forward(self, idx, targets)

    monkeypatch.setattr(GPT, "forward", narrowing)
    try:
        main(run)
    finally:
        globals()["LIMIT"] = 1e9
    (warning,) = events(tmp_path / "run", "warning")
    assert re.search(r"flash attention.*disagrees with model\.py.*Steps after \d+ may be wrong", warning["text"])
    saved = torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)
    assert saved["facts"]["doubts"] == [warning["text"]]


def test_low_precision_that_goes_wrong_later_falls_back_to_float32():
    runner = chosen([], {"attention": "flash"}, dtype="bfloat16", compile=False)
    ranks = Listening(CPU)
    x, y = batch_of(4)
    assert runner.verify_again(0, ranks) == [] == ranks.printed  # it was compared just now
    runner.forward_backward(x, y)
    runner.drop_gradients()
    assert runner.verify_again(10, ranks) == []
    assert_one_line(ranks.printed[0], "bfloat16", "against model.py again took", "1% of the time")
    assert runner.verify_again(20, ranks) == []
    assert runner.right_until == 10  # that was too soon for another
    runner.model.transformer.ln_f.register_forward_hook(
        lambda module, args, y: y * (1.5 if torch.is_autocast_enabled("cpu") else 1.0)
    )
    (line,) = runner.verify_again(30, ranks, must=True)
    assert_one_line(line, "bfloat16", "disagrees", "going on in float32", "Steps after 10 may be wrong")
    assert runner.variant.dtype == "float32"
    assert runner.doubts == [line]
    assert runner.forward_backward(x, y).dtype == torch.float32


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
    tuner = tuner_of(model, None, EarlierVariant("bfloat16", False, "flash"), dropout=0.1)
    runner, _ = choose_implementation(tuner)
    runner.last = batch_of(4)
    runner.verify_again(1, tuner.ranks, must=True)
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


# ---- the comparison of a pass ----------------------------------------------------------------------------------


def test_each_part_of_a_gradient_counts_by_itself_and_rounding_of_nothing_does_not():
    torch.manual_seed(0)
    names = ["h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias", "lm_head.weight"]
    right = [torch.randn(12, 4), torch.randn(12), torch.randn(50, 4)]
    right[0][:4] *= 1e-2  # queries
    right[1][4:8] *= 1e-9  # a key's bias
    found = [g.clone() for g in right]
    assert max(verify.gradient_errors(names, found, right, "float32").values()) == 0
    found[1][4:8] = torch.randn(4) * 1e-7
    assert max(verify.gradient_errors(names, found, right, "float32").values()) < 1e-3
    found[0][:4] = 0
    errors = verify.gradient_errors(names, found, right, "float32")
    assert max(errors, key=lambda name: errors[name]) == "h.0.attn.c_attn.weight (q)"
    found[2][0, 0] = torch.nan
    assert verify.gradient_errors(names, found, right, "float32")["lm_head.weight"] == torch.inf


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.2}, MODERN_SETTINGS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_passes_with_all_choices_of_the_model_and_zeros_stay_zeros(settings, dtype):
    printed: list[str] = []
    runner = chosen(printed, {"attention": "flash"}, dtype=dtype, compile=False, **settings)
    assert runner.variant == Variant(dtype), printed
    assert runner.model.lm_head.weight.any() == (not settings.get("zero_init", False))


@pytest.mark.parametrize("micro_steps", [64, 4096])
def test_float16_passes_however_small_a_part_of_the_step_a_micro_batch_is(micro_steps):
    settings: dict[str, Any] = {"dtype": "float16", "compile": False, "gradient_accumulation_steps": micro_steps}
    assert chosen([], {"attention": "flash"}, **settings).variant == Variant("float16")


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_weights_that_are_not_finite_are_not_taken_for_a_wrong_variant(dropout):
    model = a_model(dropout=dropout)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    settings: dict[str, Any] = {"dtype": "bfloat16", "compile": False, "dropout": dropout}
    with pytest.raises(ValueError, match="nan") as e:
        choose_implementation(tuner_of(model, None, EarlierVariant(attention="flash"), **settings))
    assert_one_line(str(e.value), "float32", "weights", "take another checkpoint")


@pytest.mark.parametrize(
    ("B", "T", "rows"), [(16, 1024, 2), (12, 64, 12), (64, 64, 16), (13, 1024, 1), (9, 1024, 3), (1, 8, 1)]
)
def test_few_sequences_are_compared_and_divide_the_batch(B, T, rows):
    assert compared_rows(B, T) == rows


def test_float32_of_mps_is_compared_with_a_cpu_and_refused_where_it_differs(monkeypatch):
    """Here the CPU counts as MPS, and its layers are wrong for one model."""
    monkeypatch.setattr("deskgpt.compute.runner.REFERENCES", ())
    monkeypatch.setattr("deskgpt.compute.implementation.is_reference", lambda variant, device: False)
    settings: dict[str, Any] = {"dtype": "float32", "compile": False}
    assert chosen([], {"attention": "flash"}, **settings).variant == Variant()
    model = a_model()
    first: Any = model.transformer.h[0]
    matrix = first.mlp.c_fc.weight
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, bias=None: linear(x, w, bias) * (1.01 if w is matrix else 1.0))
    with pytest.raises(ValueError, match="disagrees") as e:
        choose_implementation(tuner_of(model, None, EarlierVariant(attention="flash"), **settings))
    assert_one_line(str(e.value), "float32", "try --device=cpu")


@pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")
def test_what_fails_on_one_rank_is_given_up_by_all(tmp_path, monkeypatch):
    """Rank 1 finds bfloat16 wrong."""

    def work(ranks: DistContext) -> str:
        compare = verify.compare_passes

        def planted(*args: Any) -> None:
            if ranks.rank == 1:
                raise verify.Mismatch("planted")
            compare(*args)

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"remembered-{ranks.rank}"))
        monkeypatch.setattr(verify, "compare_passes", planted)
        earlier = EarlierVariant("bfloat16", compiled=False, attention="flash")
        tuner = tuner_of(a_model(), ranks, earlier, gradient_accumulation_steps=2)
        return str(choose_implementation(tuner)[0].variant)

    assert on_ranks(work, 2, tmp_path) == ["float32, not compiled"] * 2


# ---- the fastest ---------------------------------------------------------------------------------------------


def times_of(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> list[list[Variant]]:
    """A machine on which variants take these seconds, in order of trial; returns the variants that were timed."""
    asked = []

    def in_turns(s: Tuner, runners: list[Runner], batch: Any) -> list[float]:
        asked.append([runner.variant for runner in runners])
        return list(seconds[: len(runners)])

    monkeypatch.setattr(implementation, "in_turns", in_turns)
    monkeypatch.setattr(implementation, "HOPELESS", math.inf)  # whatever this machine really takes
    return asked


FOUR = [Variant(), EXPLICIT, Variant("bfloat16"), Variant("bfloat16", attention="explicit")]


def test_auto_takes_what_was_fastest_here_and_measures_once_on_a_machine(monkeypatch):
    asked = times_of(monkeypatch, 3.0, 2.0, 5.0, 4.0)
    printed: list[str] = []
    assert chosen(printed, compile=False).variant == EXPLICIT
    assert_one_line(printed[0], "float32, explicit attention", "3e+03 ms", "2e+03 ms", "5e+03 ms", "4e+03 ms")
    printed.clear()
    assert chosen(printed, compile=False).variant == EXPLICIT
    assert_one_line(printed[0], "float32, explicit attention", cache.path_of(implementation.CACHE))
    assert asked == [FOUR]
    chosen([], compile=False, activation="relu2")  # another model
    assert len(asked) == 2
    monkeypatch.setattr(hardware, "device_name", lambda device: "another processor")
    chosen([], compile=False)
    assert len(asked) == 3


def test_explicit_settings_and_what_the_run_had_before_are_not_timed(monkeypatch):
    asked = times_of(monkeypatch, 1.0, 0.5)
    earlier = {"dtype": "bfloat16", "attention": "explicit", "compiled": False}
    assert chosen([], earlier).variant == Variant("bfloat16", attention="explicit")
    assert chosen([], dtype="float32", compile=False, attention="explicit").variant == EXPLICIT
    assert not asked
    assert chosen([], compile=False, dropout=0.1).variant == Variant("bfloat16")  # explicit attention has no dropout
    assert asked == [[Variant(), Variant("bfloat16")]]
    with pytest.raises(ValueError, match="attention=explicit") as e:
        chosen([], attention="explicit", dropout=0.1)
    assert_one_line(e.value, "dropout=0.1", "--attention=flash")


@pytest.mark.parametrize(
    ("max_iters", "times", "best"),
    [
        (50, (), Variant()),  # 50 s of steps: compiling takes longer than it saves
        (1000, (1.0, 0.9), Variant(compiled=True)),
        (10**6, (1.0, 0.98), Variant()),  # the plainer variant stays: the other is not clearly faster
    ],
)
def test_auto_compiles_long_runs_where_that_is_faster(max_iters, times, best, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(implementation, "seconds", lambda *_: 1.0)
    times_of(monkeypatch, *times)
    for _ in range(2):
        printed: list[str] = []
        variant = chosen(printed, {"dtype": "float32", "attention": "flash"}, max_iters=max_iters).variant
        assert variant == best
        assert printed[0].startswith("compile=auto: ")


def test_resumed_run_keeps_its_variant(chars, tmp_path, monkeypatch):
    times_of(monkeypatch, 2.0, 3.0, 1.0, 4.0)
    settings = {"dtype": "auto", "attention": "auto"}
    main(tiny(chars, tmp_path / "whole", **settings))
    main(tiny(chars, tmp_path / "halves", max_iters=3, lr_decay_iters=6, **settings))
    assert events(tmp_path / "halves", "start")[0]["dtype"] == "bfloat16"
    monkeypatch.setattr(implementation, "in_turns", lambda *_: pytest.fail("timed again"))
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


# ---- the fastest micro-batch ---------------------------------------------------------------------------------


@pytest.fixture
def searched(monkeypatch):
    """Searches on this CPU as on CUDA. Sequences take these seconds by micro-batch; others do not fit."""
    seconds: dict[int, float] = {}
    asked: list[int] = []

    def timed(s: Tuner, runner: Runner, batch: tuple[Tensor, Tensor]) -> float:
        rows = batch[0].size(0)
        asked.append(rows)
        if rows not in seconds:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return seconds[rows] * rows

    monkeypatch.setattr(implementation, "BATCH_IS_SEARCHED_ON", ("cpu",))
    monkeypatch.setattr(implementation, "seconds", timed)
    return SimpleNamespace(seconds=seconds, asked=asked)


def batch_found(printed: list[str], before: int | None = None, **settings: Any) -> tuple[int, int]:
    """(micro-batch, accumulation) of a run that begins with 2 x 12 sequences. before: that of a run that it resumes."""
    c = TrainConfig(**SIZES | {"batch_size": 2, "gradient_accumulation_steps": 12} | settings)
    kept = EarlierVariant(None if c.init_from == "scratch" else "float32", False, "flash", before)
    c.compile = False
    _, batching = choose_implementation(tuner_of(a_model(dropout=c.dropout), None, kept, printed, **asdict(c)))
    return batching.batch_size, batching.accumulation


FASTER = {2: 1.0, 4: 0.9, 8: 0.8}


@pytest.mark.parametrize(
    ("seconds", "settings", "found"),
    [
        (FASTER, {}, (8, 3)),  # 3 micro-batches have no half
        ({2: 1.0, 4: 0.9, 8: 0.89}, {}, (4, 6)),
        ({2: 1.0, 4: 0.99, 8: 0.1}, {}, (2, 12)),
        ({2: 1.0, 4: 0.9}, {}, (4, 6)),
        ({}, {}, (2, 12)),  # it may fit compiled, and else it is halved
        (FASTER, {"auto_batch": False}, (2, 12)),
        (FASTER, {"dropout": 0.1}, (2, 12)),  # with another size it would have other masks
        (FASTER, {"dropout": 0.1, "auto_batch": True}, (8, 3)),
        (FASTER, {"init_from": "resume"}, (2, 12)),
        (FASTER, {"init_from": "resume", "before": 2}, (2, 12)),
        (FASTER, {"init_from": "resume", "before": 8}, (8, 3)),  # the command names 2 once more
        (FASTER, {"eval_only": True}, (2, 12)),
    ],
)
def test_micro_batch_doubles_while_that_is_clearly_faster_and_fits(seconds, settings, found, searched):
    searched.seconds |= seconds
    assert batch_found([], **{"dtype": "float32"} | settings) == found


def test_identical_runs_take_the_same_micro_batch_though_timing_differs(searched):
    printed: list[str] = []
    searched.seconds |= {2: 1.0, 4: 0.9}
    assert batch_found(printed, dtype="float32")[0] == 4
    searched.seconds |= {4: 1.1}
    searched.asked.clear()
    assert batch_found(printed, dtype="float32")[0] == 4
    assert searched.asked == []
    assert_one_line(printed[-2], "auto_batch", "4", str(cache.path_of(implementation.CACHE)))


def test_micro_batch_that_does_not_fit_is_halved_at_the_same_tokens_per_step(monkeypatch):
    forward = Runner.forward

    def limited(self: Runner, x: Tensor, y: Tensor, *more: Any) -> Any:
        if x.size(0) > 2:
            raise RuntimeError("CUDA out of memory.")
        return forward(self, x, y, *more)

    monkeypatch.setattr(Runner, "forward", limited)
    printed: list[str] = []
    settings: dict[str, Any] = {"dtype": "float32", "attention": "flash", "compile": False, "batch_size": 8}
    tuner = tuner_of(a_model(), None, None, printed, auto_batch=True, **settings)
    _, batching = choose_implementation(tuner)
    assert (batching.batch_size, batching.accumulation) == (2, 4)
    assert_one_line(printed[-1], "out of memory", "--batch_size=2", "the same training")
    with pytest.raises(ValueError, match="out of memory") as e:
        choose_implementation(tuner_of(a_model(), auto_batch=False, **settings))
    assert_one_line(str(e.value), "--batch_size=4", "--auto_batch=True")


# ---- FLOPs -----------------------------------------------------------------------------------------------------


def test_flops_are_nanogpts_for_a_gpt_and_counted_for_a_changed_model():
    sizes: dict[str, Any] = {"n_embd": 128, "n_layer": 2, "block_size": 64}
    model = a_model(**sizes)
    assert count_flops(model, *batch_of(1, 64)) == model.estimate_flops()
    shared = a_model(**sizes)
    shared.transformer.h[1] = shared.transformer.h[0]  # a block applied twice
    assert count_flops(shared, *batch_of(1, 64)) == pytest.approx(model.estimate_flops(), rel=0.01)
    assert shared.estimate_flops() < 0.8 * model.estimate_flops()


def test_replacements_get_arguments_by_name_and_one_that_does_not_know_an_argument_is_left_out(monkeypatch):
    q, at = torch.randn(1, 2, 8, 4), torch.arange(8)
    with replacing({"attention": replacements.flash_attention}):
        found = definition.attention(q, q, q, at, at, 0.0)
    assert torch.allclose(found, definition.attention(q, q, q, at, at, dropout=0.0))

    def attention(*args: Any, scale: float = 1.0) -> Tensor:
        return usual_attention(scale * args[0], *args[1:])

    usual_attention = definition.attention.__wrapped__  # type: ignore[attr-defined]
    attention.__qualname__ = "attention"
    changed = overridable(attention)
    assert refused_by(monkeypatch, lambda *args: changed(*args, scale=2.0)) == ("flash_attention",)
