from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_equal, assert_one_line, events, tiny, weights
from gloo import on_ranks
from tiny_models import MODERN_SETTINGS
from torch import Tensor

from deskgpt.compute import checks, implementation
from deskgpt.compute.batching import Batching
from deskgpt.compute.checks import gradient_errors, nothing_is_zero
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.implementation import EarlierVariant, Options, Tuner, choose_implementation, drop_unfinished
from deskgpt.compute.inference import InferenceEngine
from deskgpt.compute.runner import Runner, Variant
from deskgpt.estimate import fit
from deskgpt.kernels import cpu_kernels, replacements, verify
from deskgpt.kernels.overridable import overridable
from deskgpt.run.settings import resumed_settings
from deskgpt.system import cache, hardware, terminal
from deskgpt.system.terminal import not_silent
from model import GPT, MLP, GPTConfig, causal_mask
from train import TrainConfig, main
from train import build_optimizer as make_optimizer

SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 4}
SIZES |= {"gradient_accumulation_steps": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def _nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "remembered"))


def a_model(**settings: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, vocab_size=100, n_layer=2, n_head=2, n_embd=32, bias=False, **settings))


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 100, (rows, 33), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Listening(DistContext):
    """One rank that keeps its lines instead of printing them."""

    said: list[str] = field(default_factory=list)

    def print0(self, line: str) -> None:
        self.said.append(line)


def search_of(
    model: GPT,
    ranks: DistContext | None = None,
    earlier: EarlierVariant | None = None,
    said: list[str] | None = None,
    **settings: Any,
) -> Tuner:
    """What a run of this model with these settings searches. Its lines go to said."""
    c = TrainConfig(**SIZES | settings)
    wanted = Options.of(asdict(c), earlier or EarlierVariant(), c.max_iters, None)
    make = functools.partial(make_optimizer, c)
    smaller = functools.partial(fit.smaller_batch, model.config, make, CPU, wanted.may_split_anew(CPU))
    ranks = ranks or Listening(CPU, said=[] if said is None else said)
    return Tuner(model, Batching.of(asdict(c), ranks.rank, ranks.world), wanted, ranks, batch_of, smaller)


def settled(said: list[str] | None = None, earlier: dict[str, Any] | None = None, **settings: Any) -> Runner:
    """The runner of a run with these settings; its lines go to said."""
    model = a_model(**{k: v for k, v in settings.items() if k in MODERN_SETTINGS or k == "dropout"})
    return choose_implementation(search_of(model, None, EarlierVariant(**(earlier or {})), said, **settings))[0]


@pytest.fixture(autouse=True)
def _without_cpu_kernels(monkeypatch):
    """tests/test_cpu_kernels.py has them."""
    monkeypatch.setattr(cpu_kernels, "may_exist", lambda: False)


# ---- the check -----------------------------------------------------------------------------------------------


@pytest.fixture
def wrong_attention(monkeypatch):
    """Explicit attention whose last of 32 positions is wrong in bfloat16, by a little and without a NaN."""
    plant(monkeypatch, [torch.bfloat16], "explicit_attention")


def plant(monkeypatch: pytest.MonkeyPatch, dtypes: list[torch.dtype], *forms: str) -> None:
    for name in forms:

        def wrong(right: Any, *args: Any) -> Tensor:
            y = right(*args)
            is_planted = args[1].dtype in dtypes
            return torch.cat((y[:, :, :-1], 0.0 * y[:, :, -1:]), 2) if is_planted else y

        monkeypatch.setattr(replacements, name, functools.partial(wrong, getattr(replacements, name)))


def assert_names_the_worst_gradient(line: str, *named: str) -> None:
    """A form with wrong gradients: one line that names the form, the parameter, by how much and what is allowed."""
    assert_one_line(line, "bfloat16, explicit attention, not compiled", *named)
    assert re.search(r"transformer\.h\.\d\.\S+ .*0\.\d+, at most 0\.1 ", line), line


def test_wrong_kernel_is_found_and_the_run_goes_on_with_the_plain_form(wrong_attention):
    earlier = {"dtype": "bfloat16", "attention": "explicit", "compiled": False}
    for is_remembered in (False, True):
        said: list[str] = []
        runner = settled(said, earlier, compile=False)
        assert runner.form == Variant()
        assert_names_the_worst_gradient(said[-1], "going on in float32")
        assert (str(cache.path_of(verify.FILE)) in said[-1]) == is_remembered
    with pytest.raises(ValueError, match="dtype=bfloat16") as e:  # a user who has asked for it
        settled([], earlier, dtype="bfloat16", compile=False)
    assert_names_the_worst_gradient(str(e.value), "--dtype=float32")


def test_kernel_that_is_wrong_in_float32_too_is_left_out_and_a_line_says_so(monkeypatch):
    plant(monkeypatch, [torch.float32, torch.bfloat16], "flash_attention")
    earlier = {"dtype": "bfloat16", "attention": "explicit", "compiled": False}
    for _ in range(2):  # it is remembered, too
        said: list[str] = []
        runner = settled(said, earlier, compile=False)
        assert runner.form == Variant("bfloat16", attention="explicit", reference_only=("attention",))
        assert "attention" not in runner.forms
        assert_one_line(said[0], "attention", "model.py", "may be slower")


def define_attention(monkeypatch: pytest.MonkeyPatch, weights_of: Callable[[Tensor, float], Tensor]) -> None:
    """Attention in model.py now has the weights that weights_of makes of its masked scores and the dropout."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, query_positions: Tensor, key_positions: Tensor, dropout: float
    ) -> Tensor:
        scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(
            ~causal_mask(query_positions[:, None], key_positions), -1e9
        )
        return weights_of(scores, dropout) @ v

    attention.__qualname__ = "attention"
    monkeypatch.setattr("model.attention", overridable(attention))


def usual_weights(scores: Tensor, dropout: float) -> Tensor:
    return F.dropout(scores.softmax(-1), dropout)


RANDOM: dict[str, Callable[[Tensor, float], Tensor]] = {
    "little noise": lambda scores, dropout: usual_weights(scores + 1e-5 * torch.randn_like(scores), dropout),
    "rarely": lambda scores, dropout: usual_weights(scores * (torch.rand(()) > 0.01), dropout),
    "another rate": lambda scores, dropout: F.dropout(scores.softmax(-1), dropout / 2 + 0.01),
    "dropped scores": lambda scores, dropout: F.dropout(scores, dropout).softmax(-1),
}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["as it is", *RANDOM])
def test_no_kernel_leaves_out_randomness_that_attention_has_in_model_py(kind, dropout, monkeypatch):
    define_attention(monkeypatch, RANDOM.get(kind, usual_weights))
    is_usual = kind == "as it is" or (kind == "dropped scores" and not dropout)
    said: list[str] = []
    form = settled(said, {"attention": "flash"}, dtype="float32", compile=False, dropout=dropout).form
    assert form.reference_only == (() if is_usual else ("attention",)), said
    assert len(said) == (not is_usual)


def test_run_whose_kernel_is_refused_says_so_once_and_trains_as_model_py_says(chars, tmp_path, monkeypatch, capsys):
    forward = MLP.forward
    monkeypatch.setattr("model.sees", lambda query, key: (key <= query) & (query - key < 4))
    monkeypatch.setattr(
        MLP, "forward", lambda mlp, x, span: forward(mlp, x.cumsum(1), span)
    )  # no cache knows these sums
    main(tiny(chars, tmp_path / "run", sample_interval=1))
    said = capsys.readouterr().out
    assert len(re.findall(r"^.*attention differs from model\.py.*$", said, re.M)) == 1
    assert said.count("writing without a cache") == 1
    monkeypatch.setattr(replacements, "replacements_for", lambda *args, **options: {})
    main(tiny(chars, tmp_path / "as-written"))
    assert_equal(weights(tmp_path / "run"), weights(tmp_path / "as-written"))


@pytest.mark.parametrize("in_place", [True, False])
def test_trials_of_a_model_with_a_running_mean_all_start_from_its_mean_and_leave_it(in_place):
    def subtract_mean(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, span = args
        if block.training and in_place:
            block.mean.lerp_(x.detach().mean((0, 1)), 0.5)
        elif block.training:
            block.mean = block.mean.lerp(x.detach().mean((0, 1)), 0.5)
        return x - block.mean, span

    model = a_model()
    block: Any = model.transformer.h[0]
    block.register_buffer("mean", torch.ones(32))
    block.register_forward_pre_hook(subtract_mean)
    search = search_of(model, None, EarlierVariant("float32", False, "explicit"), dtype="float32", compile=False)
    runner, _ = choose_implementation(search)  # raises ValueError where the forms differ
    assert runner.form.attention == "explicit"
    runner.forward_backward(*batch_of(4))
    InferenceEngine(model.train(), batch_of(1)[0][:, :4], "float32", remembers=False)
    assert torch.equal(block.mean, torch.ones(32))


def test_right_kernel_is_taken_and_checked_once():
    said: list[str] = []
    earlier = {"dtype": "bfloat16", "attention": "explicit", "compiled": False}
    for settings, n_checks in (({}, 1), ({}, 0), ({"activation_checkpoint": "full"}, 1)):
        said.clear()
        form = settled(said, earlier, compile=False, **settings).form
        assert replace(form, checkpoint="none") == Variant("bfloat16", attention="explicit")
        assert len(said) == n_checks


@pytest.mark.slow
def test_wrong_kernel_of_the_compiler_is_found():
    """Inductor has a bug to order, for tests: its ReLU adds one."""
    import torch._inductor.config as inductor

    said: list[str] = []
    settings: dict[str, Any] = {"activation": "relu2", "dtype": "float32"}
    earlier = {"compiled": True, "attention": "flash"}
    with inductor.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        assert settled(said, earlier, **settings).form == Variant()
        if "there is no C++ compiler" in said[-1]:
            pytest.skip("no working C++ compiler here")
        assert_one_line(said[-1], "in float32, compiled", "NOT compiled")
        with pytest.raises(ValueError, match="compile=True") as e:  # a user who has asked for it
            settled(said, earlier, **settings, compile=True)
        assert_one_line(str(e.value), "in float32, compiled", "--compile=False")


def test_compiling_that_fails_ends_a_run_that_asked_for_it_and_is_said_aloud_in_others(monkeypatch):
    """As on a GPU without Triton."""
    from torch._inductor.exc import InductorError, TritonMissing

    def compile(*args: Any, **kwargs: Any) -> Any:
        raise InductorError(TritonMissing(None), None)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(sys, "platform", "linux")
    said: list[str] = []
    earlier = {"dtype": "float32", "attention": "flash", "compiled": True}
    with pytest.raises(ValueError, match="compile=True") as e:
        settled(said, earlier, compile=True)
    assert_one_line(str(e.value), "Triton", "pip install triton", "--compile=auto", "--compile=False")
    assert not said
    assert settled(said, earlier, compile="auto").form == Variant()
    (line,) = said
    assert_one_line(line, "NOT compiled", "slower", "pip install triton")


def test_each_part_of_a_gradient_counts_by_itself_and_rounding_of_nothing_does_not():
    torch.manual_seed(0)
    names = ["h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias", "lm_head.weight"]
    right = [torch.randn(12, 4), torch.randn(12), torch.randn(50, 4)]
    right[0][:4] *= 1e-2  # queries
    right[1][4:8] *= 1e-9  # a key's bias
    found = [g.clone() for g in right]
    assert max(gradient_errors(names, found, right, "float32").values()) == 0
    found[1][4:8] = torch.randn(4) * 1e-7
    assert max(gradient_errors(names, found, right, "float32").values()) < 1e-3
    found[0][:4] = 0
    errors = gradient_errors(names, found, right, "float32")
    assert max(errors, key=lambda name: errors[name]) == "h.0.attn.c_attn.weight (q)"
    assert errors["h.0.attn.c_attn.weight (q)"] == pytest.approx(1)
    found[2][0, 0] = torch.nan
    assert gradient_errors(names, found, right, "float32")["lm_head.weight"] == torch.inf
    assert gradient_errors(["scalar"], [torch.tensor(2.0)], [torch.tensor(1.0)], "float32") == {"scalar": 1.0}


def test_bfloat16s_rounding_of_queries_that_learn_nothing_is_no_error_and_a_lost_gradient_is_one():
    """As after some steps on random tokens."""
    torch.manual_seed(0)
    names = ["h.0.attn.c_attn.weight"]
    right = [torch.randn(12, 4)]
    right[0][:4] *= 1e-4  # queries
    found = [right[0].clone()]
    found[0][:4] *= 1.3
    assert max(gradient_errors(names, found, right, "bfloat16").values()) < 1e-3
    assert gradient_errors(names, found, right, "float32")["h.0.attn.c_attn.weight (q)"] == pytest.approx(0.3)
    right[0][:4] *= 100  # as at the start
    found[0][:4] = 0
    assert gradient_errors(names, found, right, "bfloat16")["h.0.attn.c_attn.weight (q)"] == pytest.approx(1)


def test_matrices_of_zeros_hide_no_gradient_from_the_check_and_are_zero_again():
    model = a_model(**MODERN_SETTINGS)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    runner = Runner(model, Variant())
    runner.forward_backward(*batch_of(4))
    assert not all(g.any() for g in runner.gradients())  # which is why
    for p in model.parameters():
        p.grad = None
    with nothing_is_zero(model):
        runner.forward_backward(*batch_of(4))
    assert all(g.any() for g in runner.gradients())
    assert_equal(dict(model.state_dict()), before)


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.2}, MODERN_SETTINGS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_passes_the_check_with_all_choices_of_the_model(settings, dtype):
    said: list[str] = []
    assert settled(said, {"attention": "flash"}, dtype=dtype, compile=False, **settings).form.dtype == dtype
    assert said[0].startswith("comparing loss and gradients")


def test_dropout_hides_no_kernel_that_is_not_finite(monkeypatch):
    right = replacements.F.scaled_dot_product_attention
    wrong_in: list[torch.dtype] = []

    def not_finite(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        return v * torch.nan if v.dtype in wrong_in else right(q, k, v, **kwargs)

    monkeypatch.setattr(replacements.F, "scaled_dot_product_attention", not_finite)
    wrong_in = [torch.bfloat16]
    with pytest.raises(ValueError, match="dtype=bfloat16: .* nan"):
        settled([], {"attention": "flash"}, dtype="bfloat16", compile=False, dropout=0.2)
    cache.path_of(verify.FILE).unlink()
    wrong_in = [torch.bfloat16, torch.float32]
    said: list[str] = []
    form = settled(said, {"attention": "flash"}, dtype="bfloat16", compile=False, dropout=0.2).form
    assert form.reference_only == ("attention",)
    assert_one_line(said[0], "attention", "inf")


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_noise_where_gradients_are_wanted_counts_as_random(dropout):
    model = a_model(dropout=dropout)
    assert checks.draws_random_numbers(model, batch_of(2), Variant()) == (dropout > 0)
    model.transformer.drop.register_forward_hook(
        lambda module, args, x: x + 0.1 * torch.randn_like(x) if torch.is_grad_enabled() else x
    )
    assert checks.draws_random_numbers(model, batch_of(2), Variant())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_weights_that_are_not_finite_are_not_taken_for_a_wrong_form(dropout):
    settings: dict[str, Any] = {"dtype": "bfloat16", "compile": False, "dropout": dropout}
    model = a_model(dropout=dropout)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="nan") as e:
        choose_implementation(search_of(model, None, EarlierVariant(attention="flash"), **settings))
    assert_one_line(str(e.value), "plain float32", "weights", "take another checkpoint")
    assert settled([], {"attention": "flash"}, **settings).form == Variant("bfloat16")


def test_float32_takes_few_sequences_and_none_of_the_memory_that_a_run_reports(monkeypatch, wrong_attention):
    plain = checks.plain_float32
    seen: list[Any] = []

    def watched(model: GPT, batch: tuple[Tensor, Tensor], form: Variant) -> Any:
        seen.append(batch[0].size(0))
        return plain(model, batch, form)

    monkeypatch.setattr(checks, "COMPARED_TOKENS", 40)  # of contexts of 32
    monkeypatch.setattr(checks, "plain_float32", watched)
    monkeypatch.setattr(hardware, "forget_peak", lambda device: seen.append("forgotten"))
    earlier = {"dtype": "bfloat16", "compiled": False}
    settings: dict[str, Any] = {"compile": False, "batch_size": 12}
    assert settled([], earlier | {"attention": "flash"}, **settings).form.dtype == "bfloat16"
    said: list[str] = []
    assert settled(said, earlier | {"attention": "explicit"}, **settings).form == Variant()
    assert_names_the_worst_gradient(said[-1])
    assert seen == [2, "forgotten"] * 2


@pytest.mark.parametrize(
    ("B", "T", "rows"),
    [(16, 1024, 2), (16, 4096, 2), (12, 64, 12), (64, 64, 16), (13, 1024, 1), (9, 1024, 3), (1, 8, 1), (3, 512, 3)],
)
def test_batch_of_repeated_sequences_has_their_loss_and_gradients(B, T, rows):
    assert checks.compared_rows(B, T) == rows
    ids = torch.randint(0, 100, (B, T + 1), generator=torch.Generator().manual_seed(1))
    x, y = ids[:, :-1], ids[:, 1:]
    runner = Runner(GPT(GPTConfig(block_size=T, vocab_size=100, n_layer=1, n_head=1, n_embd=16)), Variant())
    found = []
    for batch in (checks.repeating((x, y)), (x[:rows], y[:rows])):
        loss = runner.forward_backward(*batch).item()
        found.append((loss, checks.taken_gradients(runner, 1)))
    assert checks.repeating((x, y))[0].shape == x.shape
    assert found[0][0] == pytest.approx(found[1][0])
    assert max(gradient_errors(runner.names, found[0][1], found[1][1], "float32").values()) < 1e-4


@pytest.mark.parametrize("micro_steps", [1, 64, 4096])
def test_float16_is_compared_in_full_however_small_a_part_of_the_step_a_micro_batch_is(micro_steps, monkeypatch):
    compare = checks.compare
    errors: list[float] = []

    def watched(form: Variant, precision: str, names: list[str], *found: Any) -> None:
        compare(form, precision, names, *found)
        errors.append(max(gradient_errors(names, found[1], found[3], precision).values()))

    monkeypatch.setattr(checks, "compare", watched)
    said: list[str] = []
    settings: dict[str, Any] = {"dtype": "float16", "compile": False, "gradient_accumulation_steps": micro_steps}
    assert settled(said, {"attention": "flash"}, **settings).form == Variant("float16"), said
    assert errors[0] < 0.01  # what float16 rounds, as with one micro-batch; underflow loses far more


def test_float32_of_mps_is_compared_once_with_a_cpu_and_refused_where_it_differs(monkeypatch):
    """Here the CPU counts as MPS, and its layers are wrong for one model."""
    monkeypatch.setattr(checks, "REFERENCES", ())
    settings: dict[str, Any] = {"dtype": "float32", "compile": False}
    for n_lines in (1, 0):  # the second time it is remembered
        said: list[str] = []
        assert settled(said, {"attention": "flash"}, **settings).form == Variant()
        assert len(said) == n_lines
    cache.path_of(verify.FILE).unlink()

    model = a_model()
    block: Any = model.transformer.h[0]
    matrix = block.mlp.c_fc.weight
    linear = F.linear
    monkeypatch.setattr(
        F, "linear", lambda x, weight, bias=None: linear(x, weight, bias) * (1.01 if weight is matrix else 1.0)
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="plain float32") as e:
            choose_implementation(search_of(model, None, EarlierVariant(attention="flash"), **settings))
        assert_one_line(str(e.value), "float32", "try --device=cpu")


@pytest.mark.skipif(os.name == "nt", reason="needs gloo as Linux and macOS have it")
def test_what_fails_on_one_rank_is_given_up_by_all(tmp_path, monkeypatch):
    """Rank 1 finds bfloat16 wrong, and cannot compile."""
    compare = checks.compare

    def work(ranks: DistContext) -> list[str]:
        def planted(*args: Any) -> None:
            if ranks.rank == 1:
                raise verify.Mismatch("planted")
            compare(*args)

        def not_compiled(*args: Any, **kwargs: Any) -> Any:
            if ranks.rank == 1:
                raise RuntimeError("no compiler")
            return args[0]

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"remembered-{ranks.rank}"))
        monkeypatch.setattr(checks, "compare", planted)
        monkeypatch.setattr(torch, "compile", not_compiled)
        settings: dict[str, Any] = {"gradient_accumulation_steps": 2}
        found = []
        earlier = EarlierVariant("bfloat16", compiled=False, attention="flash")
        runner, _ = choose_implementation(search_of(a_model(), ranks, earlier, **settings))
        found.append(str(runner.form))
        monkeypatch.setattr(checks, "compare", compare)
        with pytest.raises(ValueError, match="compile=True") as e:
            choose_implementation(search_of(a_model(), ranks, EarlierVariant("float32"), **settings, compile=True))
        return [*found, str(e.value)]

    first, second = on_ranks(work, 2, tmp_path)
    assert first[0] == second[0] == "float32, not compiled"
    assert "another rank" in first[1]
    assert "no compiler" in second[1]


# ---- the fastest ---------------------------------------------------------------------------------------------


def times_of(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> list[list[Variant]]:
    """A machine on which forms take these seconds, in order of trial; returns the forms that were timed."""
    asked = []

    def in_turns(s: Tuner, runners: list[Runner], batch: Any) -> list[float]:
        asked.append([runner.form for runner in runners])
        return list(seconds[: len(runners)])

    monkeypatch.setattr(implementation, "in_turns", in_turns)
    monkeypatch.setattr(implementation, "HOPELESS", math.inf)  # whatever this machine really takes
    return asked


EXPLICIT = Variant("float32", attention="explicit")
FOUR = [Variant(), EXPLICIT, Variant("bfloat16"), Variant("bfloat16", attention="explicit")]


def test_auto_takes_what_was_fastest_here_and_measures_once_on_a_machine(tmp_path, monkeypatch):
    asked = times_of(monkeypatch, 3.0, 2.0, 5.0, 4.0)
    said: list[str] = []
    assert settled(said, compile=False).form == EXPLICIT
    assert_one_line(said[1], "float32 with explicit attention", "3e+03 ms", "2e+03 ms", "5e+03 ms", "4e+03 ms")
    said.clear()
    assert settled(said, compile=False).form == EXPLICIT
    (line,) = said
    path = cache.path_of(verify.FILE)
    assert_one_line(line, "float32 with explicit attention", path)
    assert asked == [FOUR]
    settled([], compile=False, activation="relu2")  # another model
    assert len(asked) == 2
    for damage in ("", "[1]", '{"a": 1', path.read_text().replace('"float32 with explicit', '"fast')):
        path.write_text(damage)
        assert settled([], compile=False).form == EXPLICIT
    assert len(asked) == 6
    monkeypatch.setattr(hardware, "device_name", lambda device: "another processor")
    settled([], compile=False)
    assert len(asked) == 7
    (tmp_path / "a-file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a-file"))  # where nothing can be remembered
    assert settled([], compile=False).form == EXPLICIT


@pytest.mark.parametrize(("slow_s", "timed"), [(0.3, FOUR), (0.5, FOUR[:2])])
def test_form_that_is_hopeless_with_one_sequence_is_not_timed_with_more(slow_s, timed, monkeypatch):
    asked = times_of(monkeypatch, 0.2, 0.1, 0.3, 0.3)
    monkeypatch.setattr(implementation, "HOPELESS", 4.0)
    monkeypatch.setattr(
        implementation, "seconds", lambda s, runner, batch: slow_s if runner.form.dtype == "bfloat16" else 0.1
    )
    assert settled([], compile=False).form == EXPLICIT
    assert asked == [timed]


def test_explicit_settings_and_what_the_run_had_before_are_not_asked_again(monkeypatch):
    asked = times_of(monkeypatch, 1.0, 0.5)
    earlier = {"dtype": "bfloat16", "attention": "explicit", "compiled": False}
    assert settled([], earlier).form == Variant("bfloat16", attention="explicit")
    assert not asked
    assert settled([], dtype="bfloat16", compile=False).form == Variant("bfloat16", attention="explicit")
    assert settled([], compile=False, dropout=0.1).form == Variant("bfloat16")  # explicit attention has no dropout
    assert asked == [FOUR[2:], [Variant(), Variant("bfloat16")]]


def test_attention_that_a_user_chooses_is_not_timed_and_refused_where_it_is_not_possible(monkeypatch):
    asked = times_of(monkeypatch, 1.0, 0.5)
    assert settled([], dtype="float32", compile=False, attention="explicit").form == EXPLICIT
    assert settled([], {"attention": "explicit"}, dtype="float32", compile=False, attention="flash").form == Variant()
    assert not asked
    with pytest.raises(ValueError, match="attention=explicit") as e:
        settled([], attention="explicit", dropout=0.1)
    assert_one_line(e.value, "dropout=0.1", "--attention=flash")
    plant(monkeypatch, [torch.float32, torch.bfloat16], "flash_attention")
    with pytest.raises(ValueError, match="attention=explicit"):
        settled([], attention="explicit", activation="relu2")  # another model: nothing is remembered of its kernels


def test_explicit_attention_that_a_user_chooses_ends_the_run_where_its_gradients_are_wrong(wrong_attention):
    with pytest.raises(ValueError, match="attention=explicit") as e:
        settled([], dtype="bfloat16", compile=False, attention="explicit")
    assert_names_the_worst_gradient(str(e.value), "--attention=flash")


def test_fresh_runs_are_equal_bit_for_bit_where_no_setting_leaves_the_form_to_timing(chars, tmp_path, monkeypatch):
    for name, attention, is_same in (("chosen", "explicit", True), ("timed", "auto", False)):
        run = tiny(chars, tmp_path / name, attention=attention)
        for times in ((2.0, 1.0), (1.0, 2.0)):  # of another moment
            times_of(monkeypatch, *times)
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"{name}-{times[0]}"))
            main(run)
        files = [folder / "ckpt.pt" for folder in (tmp_path / name, tmp_path / name / "previous-1")]
        assert (files[0].read_bytes() == files[1].read_bytes()) == is_same


def test_auto_leaves_a_short_run_uncompiled_and_the_terminal_says_so(chars, tmp_path, capsys):
    main(tiny(chars, tmp_path, compile="auto", dtype="auto"))
    assert not events(tmp_path, "start")[0]["compiled"]
    assert "compile=auto: not compiling, which takes about" in capsys.readouterr().out


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Passes take a second and nothing is compiled; returns the forms that would have been."""
    asked = []

    def try_variant(s: Tuner, form: Variant) -> Runner:
        if form.compiled:
            asked.append(form)
        runner = Runner(s.model, replace(form, compiled=False))
        runner.form = form
        return runner

    monkeypatch.setattr(implementation, "try_variant", try_variant)
    monkeypatch.setattr(implementation, "seconds", lambda *_: 1.0)
    return asked


@pytest.mark.parametrize(("attention", "kind"), [("auto", "explicit"), ("flash", "flash"), ("explicit", "explicit")])
def test_compiled_form_has_the_attention_that_a_user_chooses(attention, kind, monkeypatch):
    asked = compilations(monkeypatch)
    times_of(monkeypatch, 1.0, 0.9)
    settled([], dtype="bfloat16", attention=attention, max_iters=100)
    assert asked == [Variant("bfloat16", compiled=True, attention=kind)]


@pytest.mark.parametrize(
    ("max_iters", "times", "best", "tried"),
    [
        (50, (), Variant(), 0),  # 50 s of steps: compiling with an empty cache takes longer than it saves
        (100, (1.0, 0.9), Variant(compiled=True), 1),
        (10**6, (1.0, 0.98), Variant(), 1),  # the plainer form stays: the other is not clearly faster
    ],
)
def test_auto_compiles_long_runs_where_that_is_faster(max_iters, times, best, tried, monkeypatch):
    asked = compilations(monkeypatch)
    times_of(monkeypatch, *times)
    for again in (False, True):
        said: list[str] = []
        asked.clear()
        assert settled(said, {"dtype": "float32", "attention": "flash"}, max_iters=max_iters).form == best
        assert len(asked) == (best.compiled if again else tried)
        assert all(line.startswith("compile=auto: ") for line in said)


# ---- the fastest micro-batch ---------------------------------------------------------------------------------


@pytest.fixture
def searched(monkeypatch):
    """Searches on this CPU as on CUDA. Sequences take these seconds by micro-batch; others do not fit."""
    seconds: dict[int, float] = {}
    asked: list[int] = []
    monkeypatch.setattr(implementation, "BATCH_IS_SEARCHED_ON", ("cpu",))
    forward_backward = Runner.forward_backward

    def timed(s: Tuner, runner: Runner, batch: tuple[Tensor, Tensor]) -> float:
        rows = batch[0].size(0)
        asked.append(rows)
        if rows not in seconds:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        forward_backward(runner, *batch)
        return seconds[rows] * rows

    monkeypatch.setattr(implementation, "seconds", timed)
    monkeypatch.setattr(implementation, "LEAST_ROUNDS", 0)
    return SimpleNamespace(seconds=seconds, asked=asked)


def batch_found(said: list[str], before: int | None = None, **settings: Any) -> tuple[int, int, int]:
    """(micro-batch, accumulation, tokens of an evaluation) of a run that begins with 2 x 12 sequences.

    before: the micro-batch of the run that it resumes, if it does.
    """
    c = TrainConfig(**SIZES | {"batch_size": 2, "gradient_accumulation_steps": 12} | settings)
    kept = EarlierVariant(None if c.init_from == "scratch" else "float32", False, "flash", before)
    model = a_model(dropout=c.dropout)
    search = search_of(model, None, kept, said, **asdict(replace(c, compile=False)))
    _, batching = choose_implementation(search)
    assert all(p.grad is None for p in model.parameters())
    c = TrainConfig(**asdict(c) | batching.changed(asdict(c)))
    return c.batch_size, c.gradient_accumulation_steps, c.eval_tokens


@pytest.mark.parametrize(
    ("seconds", "settings", "found"),
    [
        ({2: 1.0, 4: 0.9, 8: 0.8}, {}, (8, 3)),  # 3 micro-batches have no half
        ({2: 1.0, 4: 0.9, 8: 0.89}, {}, (4, 6)),
        ({2: 1.0, 4: 0.99, 8: 0.1}, {}, (2, 12)),
        ({2: 1.0, 4: 0.9}, {}, (4, 6)),
        ({}, {}, (2, 12)),  # it may fit compiled, and else it is halved
        ({2: 1.0, 4: 0.9, 8: 0.8}, {"dtype": "float16"}, (8, 3)),
        ({2: 1.0, 4: 0.9, 8: 0.8}, {"auto_batch": False}, (2, 12)),
        ({2: 1.0, 4: 0.9, 8: 0.8}, {"dropout": 0.1}, (2, 12)),  # with another size it would have other masks
        ({2: 1.0, 4: 0.9, 8: 0.8}, {"dropout": 0.1, "auto_batch": True}, (8, 3)),
        ({2: 1.0, 4: 0.9, 8: 0.8}, {"init_from": "resume"}, (2, 12)),
        ({2: 1.0, 4: 0.9, 8: 0.8}, {"init_from": "resume", "before": 2}, (2, 12)),
        ({2: 1.0, 4: 0.9, 8: 0.8}, {"init_from": "resume", "before": 8}, (8, 3)),  # the command names 2 once more
        ({2: 1.0, 4: 0.9, 8: 0.8}, {"eval_only": True}, (2, 12)),
    ],
)
def test_micro_batch_doubles_while_that_is_clearly_faster_and_fits(seconds, settings, found, searched):
    searched.seconds |= seconds
    batch, accumulation, eval_tokens = batch_found([], **{"dtype": "float32"} | settings)
    assert (batch, accumulation) == found
    assert eval_tokens == (0 if batch == 2 else 200 * 2 * 32)


def test_micro_batch_is_kept_without_timing_where_there_is_nothing_to_double_and_without_cuda(searched, monkeypatch):
    assert batch_found([], gradient_accumulation_steps=3, dtype="float32")[:2] == (2, 3)
    monkeypatch.setattr(implementation, "BATCH_IS_SEARCHED_ON", ())
    assert batch_found([], dtype="float32", auto_batch=True)[:2] == (2, 12)
    assert searched.asked == []


def test_identical_runs_take_the_same_micro_batch_though_timing_differs(searched):
    said: list[str] = []
    searched.seconds |= {2: 1.0, 4: 0.9}
    assert batch_found(said, dtype="float32")[0] == 4
    searched.seconds |= {4: 1.1}
    searched.asked.clear()
    assert batch_found(said, dtype="float32")[0] == 4
    assert searched.asked == []
    assert_one_line(said[-1], "auto_batch", "batch_size=4", str(cache.path_of(verify.FILE)))
    assert batch_found(said, dtype="float32", gradient_accumulation_steps=6)[0] == 2  # another run


def test_larger_micro_batch_leaves_some_memory_free_and_the_given_one_need_not(searched, monkeypatch):
    taken: list[int] = []
    empty = torch.empty

    def limited(*size: Any, **options: Any) -> Tensor:
        if options.get("dtype") == torch.uint8:
            taken.append(size[0])
        return empty(*size, **options)

    monkeypatch.setattr(hardware, "usable_memory_bytes", lambda device: 1000)
    monkeypatch.setattr(torch, "empty", limited)
    searched.seconds |= {2: 1.0, 4: 0.9}
    assert batch_found([], dtype="float32")[0] == 4
    assert taken == [0, 100, 100]


def test_resumed_run_keeps_its_form(chars, tmp_path, monkeypatch):
    times_of(monkeypatch, 2.0, 3.0, 1.0, 4.0)
    chosen = {"dtype": "auto", "attention": "auto"}
    main(tiny(chars, tmp_path / "whole", **chosen))
    main(tiny(chars, tmp_path / "halves", max_iters=3, lr_decay_iters=6, **chosen))
    assert events(tmp_path / "halves", "start")[0]["dtype"] == "bfloat16"
    monkeypatch.setattr(implementation, "in_turns", lambda *_: pytest.fail("asked again"))
    argv = [f"--out_dir={tmp_path / 'halves'}", "--init_from=resume", "--max_iters=6"]
    main(TrainConfig(**resumed_settings(TrainConfig, argv, str(tmp_path / "halves"))))
    assert [e["dtype"] for e in events(tmp_path / "halves", "start")] == ["bfloat16"] * 2
    assert_equal(*(weights(tmp_path / name) for name in ("whole", "halves")))


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        {"compiled": None},
        {"device": "cpu"},
        {"device": "cuda", "dtype": "bfloat16", "compiled": True},
        {"device": "cpu", "dtype": "int8", "compiled": "yes", "attention": 3},
    ],
)
def test_form_of_another_device_or_none_of_ours_is_not_taken_from_a_checkpoint(saved):
    assert EarlierVariant.of(saved, CPU) == EarlierVariant()
    # Older checkpoints say only whether they were compiled.
    assert EarlierVariant.of({"compiled": True}, CPU) == EarlierVariant(compiled=True)


# ---- the rest ------------------------------------------------------------------------------------------------


def test_what_takes_long_is_not_silent(monkeypatch):
    monkeypatch.setattr(terminal, "SILENCE_S", 0.02)
    said: list[str] = []
    with not_silent("still compiling", said.append):
        time.sleep(0.2)
    assert len(said) >= 2
    assert re.fullmatch(r"still compiling \(\d\.\ds\)", said[0])
    count = len(said)
    time.sleep(0.1)
    assert len(said) == count


def test_library_that_a_killed_compilation_left_unfinished_is_deleted_and_no_other(tmp_path):
    unfinished, since = tmp_path / "kernel.so", time.time() + 1
    unfinished.touch()
    with pytest.raises(OSError, match="file too short") as caught:
        ctypes.CDLL(str(unfinished))
    assert not drop_unfinished(caught.value, since - 60)  # newer than this run: another may be writing it
    assert drop_unfinished(caught.value, since)
    assert not unfinished.exists()
    assert not drop_unfinished(caught.value, since)  # so the run goes on uncompiled, rather than trying for ever
    assert not drop_unfinished(RuntimeError("no C++ compiler"), since)
