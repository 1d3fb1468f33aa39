from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import assert_refused, flags

import model
from configurator import read_settings
from deskgpt.compute.ranks import Ranks
from deskgpt.compute.runner import Form
from deskgpt.faster import held
from deskgpt.faster.definition import may_be_faster
from deskgpt.machine import gpu_peaks, known_runs, remembered
from deskgpt.predict import fit, plan
from deskgpt.predict.memory import Step, memory
from model import GPT, GPTConfig
from train import TrainConfig, dry_run, main

GPT2 = GPTConfig(block_size=1024, vocab_size=50304)
PLAIN = Form("bfloat16")
ALONE = Ranks(torch.device("cpu"))
SIZES: dict[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": 16, "block_size": 32}
TINY: dict[str, Any] = SIZES | {"compile": False}  # whose rehearsal takes a tenth of the time
TINY_CONFIG = GPTConfig(vocab_size=64, **SIZES)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan_of_tiny(capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    """What a dry run of a tiny model says."""
    dry_run(TrainConfig(**TINY | settings), TINY_CONFIG, ALONE)
    return capsys.readouterr().out


@pytest.fixture
def planned(monkeypatch) -> Callable[..., plan.Planned]:
    """What train.py makes of a tiny model's settings for a plan."""

    def of(**settings: Any) -> plan.Planned:
        found: list[plan.Planned] = []
        with monkeypatch.context() as patched:
            patched.setattr(plan, "dry_run", lambda run, *rest: found.append(run))
            dry_run(TrainConfig(**TINY, **settings), TINY_CONFIG, ALONE)
        return found[0]

    return of


# ---- on this machine -----------------------------------------------------------------------------------------


def test_dry_run_says_what_is_needed_and_does_nothing(tmp_path, script):
    out = tmp_path / "out"
    options = flags(dry_run=True, device="cpu", dtype="bfloat16", out_dir=out, dataset=tmp_path / "none")
    done = script("train.py", "config/train_fineweb_125m.py", *options)
    assert (done.code, done.err) == (0, "")
    assert "number of parameters: 123.59M" in done.out
    assert "tokens per step: 524,288 = 8 x 64 x 1024" in done.out
    assert "for the same experiment: 1, 2, 4, 8, 16, 32, 64; they divide gradient_accumulation_steps=64\n" in done.out
    assert "FLOPs per step, forward and backward: 4.481e+14" in done.out  # 524288 * 6 * 123.6M + 12 * 12 * 768 * 1024
    parts = re.search(r"weights (\S+), gradients (\S+), optimizer (\S+), activations (\S+), logits (\S+) GiB", done.out)
    total = re.search(r"predicted peak memory .*: (\S+) of \S+ GiB", done.out)
    assert parts
    assert total
    assert sum(map(float, parts.groups())) == pytest.approx(float(total[1]), abs=0.03)
    assert "at 40.0% (assumed) of 1 x" in done.out
    assert '--plan_for="RTX 4070", or --plan_for=all' in done.out
    assert not out.exists()


def test_attention_that_was_changed_is_planned_as_it_is_written(monkeypatch):
    plain = inspect.unwrap(model.attention)

    def attention(q, *rest):
        return plain(5.0 * (q / 5.0).tanh(), *rest)

    def peak_bytes() -> int:
        form = Form("bfloat16", as_written=plan.functions_as_written(config))
        return sum(memory(Step(config, 4, form, "cuda")).values())

    config = replace(TINY_CONFIG, block_size=256)
    unchanged = peak_bytes()
    assert plan.functions_as_written(config) == ()
    attention.__qualname__ = "attention"
    monkeypatch.setattr(model, "attention", may_be_faster(attention))
    remembered.path_of(held.FILE).unlink()  # a digest of files does not see this change
    assert plan.functions_as_written(config) == ("attention",)
    assert peak_bytes() > 1.2 * unchanged


def test_model_whose_passes_depend_on_numbers_is_refused_in_one_line(monkeypatch):
    plain = model.Block.forward
    monkeypatch.setattr(model.Block, "forward", lambda block, x, span: plain(block, x, span) if x.any() else x)
    with pytest.raises(ValueError, match=r"cannot be rehearsed, .*_local_scalar_dense"):
        memory(Step(TINY_CONFIG, 4, Form(), "cpu"))


@pytest.mark.parametrize(
    ("dp_shard", "worlds"),
    [
        (-1, "1, 2, 4, 5, 8, 10, 20, 40; they divide "),
        (4, "4, 8, 20, 40; they divide "),
        (3, "none; they divide .*=40 and are multiples of dp_shard=3"),
    ],
)
def test_worlds_of_the_same_experiment_can_share_the_micro_batches_of_a_step(dp_shard, worlds):
    assert re.search(rf"^numbers of ranks for the same experiment: {worlds}", plan.worlds_in_words(40, dp_shard))


# ---- for a card ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plan_for_a_4070_says_what_fits_into_12_gb_and_what_the_known_run_took(tmp_path, script):
    options = flags(plan_for="rtx 4070", device="cuda", out_dir=tmp_path / "out", dataset=tmp_path / "none")
    done = script("train.py", "config/train_fineweb_125m.py", *options)  # device=cuda, on a machine without
    assert (done.code, done.err) == (0, "")
    total = re.search(r"^predicted peak memory of GeForce RTX 4070, bfloat16: (\S+) of 12.0 GiB$", done.out, re.M)
    assert total
    assert 4 < float(total[1]) < 8
    fits = re.search(r"--batch_size=(\d+) --gradient_accumulation_steps=(\d+)$", done.out, re.M)
    assert fits
    assert int(fits[1]) * int(fits[2]) == 8 * 64
    assert "of these sizes on GeForce RTX 4070 took 9.34s per step of 524,288 tokens" in done.out
    assert "at 82.3% (known run of these sizes) of 1 x 58.30 TFLOP/s" in done.out
    assert "9.34s per step, 2.0 days for 18,750 steps" in done.out
    assert not (tmp_path / "out").exists()


def table_of(out: str) -> dict[tuple[str, str], list[str]]:
    """The cells of the table of all cards, by card and GB."""
    found = {}
    for line in out.splitlines():
        cells = re.split(r"  +", line)
        if len(cells) >= 7 and cells[0] != "card":
            found[cells[0], cells[1]] = cells[2:]
    return found


@pytest.mark.slow
def test_plan_for_all_is_a_table_of_cards_by_their_peaks_which_rehearses_each_step_once(capsys):
    plan.rehearsed.cache_clear()
    sizes: dict[str, Any] = {"batch_size": 12, "gradient_accumulation_steps": 1, "max_iters": 1_000_000}
    found = table_of(plan_of_tiny(capsys, plan_for="all", **sizes))
    cards = [card for card in gpu_peaks.table() if card.maker != "Apple"]
    assert len(found) == sum(len(card.memory_gb) or 1 for card in cards)
    assert found["GeForce RTX 4070", "12"][:2] == ["bfloat16", "12"]
    assert found["Tesla T4", "16"][0] == "float16"
    assert found["B300", "n/a"][1] == "n/a"  # its memory is not known, its speed is
    assert found["Tesla P40", "24"][2:] == ["n/a", "n/a", "n/a"]  # its speed is not known, its memory is
    order = [name for name, _ in found]
    # At its known share of its peak the 4070 would come before the 4080 with an assumed one.
    names = ["H200", "GeForce RTX 4090", "GeForce RTX 4080", "GeForce RTX 4070", "GeForce RTX 3060"]
    assert names == sorted(names, key=order.index)
    assert {*order[-2:]} == {"Tesla P40", "GeForce RTX 3050 6GB"}
    # two dtypes, the six divisors of 12, three sizes of the loss's chunks
    assert plan.rehearsed.cache_info().misses <= 2 * 6 * 3


@pytest.mark.slow
def test_plan_that_does_not_fit_has_no_time(capsys):
    large: dict[str, Any] = {"block_size": 2**22, "batch_size": 1, "gradient_accumulation_steps": 1}
    out = plan_of_tiny(capsys, plan_for="GTX 1650 SUPER", **large)
    assert "at the same tokens per step: none" in out
    assert "time: n/a" in out
    assert "TFLOP/s" not in out
    cells = table_of(plan_of_tiny(capsys, plan_for="all", **large))["GeForce GTX 1650 SUPER", "4"]
    assert cells == ["float16", "none", "n/a", "n/a", "n/a"]
    half = plan_of_tiny(capsys, plan_for="RTX 4070", block_size=2**20, batch_size=64, gradient_accumulation_steps=1)
    assert "time: n/a" in half
    assert "--batch_size=1 " in half


def test_optimizer_that_cannot_be_rehearsed_is_named(capsys, planned):
    card = plan.Machine.of_card(gpu_peaks.find_card("RTX 4070"), "auto")
    line = "that of AdamW"
    for make, is_rehearsed in ((torch.optim.SGD, True), (torch.optim.Adafactor, False), (torch.optim.LBFGS, False)):
        run = replace(planned(), make_optimizer=lambda model, make=make: make(model.parameters()))
        assert plan.say_memory(run, card, ALONE)
        assert (line in capsys.readouterr().out) is not is_rehearsed


def test_machine_whose_peak_cannot_be_measured_has_no_time(monkeypatch, capsys):
    monkeypatch.setattr(plan.peak_flops, "measured_matmul_flops", lambda *_: math.nan)
    assert "time: n/a, because no peak of " in plan_of_tiny(capsys, dtype="float32")


def test_apples_memory_is_the_machines_and_its_plan_says_no_size(capsys):
    out = plan_of_tiny(capsys, plan_for="Apple M2 Max")
    assert re.search(r"predicted peak memory of Apple M2 Max, float32: \S+ GiB$", out, re.M)
    assert "13.60 TFLOP/s (Apple newsroom, float32)" in out


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("RTX 4700", ["plan_for='RTX 4700'", "GeForce RTX 4070", "'all'"]),
        ("RTX 4070 24GB", ["GeForce RTX 4070", "12 GB"]),
        ("A100 60GB", ["40 or 80 GB"]),
        ("???", ["plan_for='???'", "deskgpt/machine/gpu_peaks.py", "'all'"]),
    ],
)
def test_unknown_card_is_an_error_of_one_line(name, named, script):
    assert_refused(script("train.py", f"--plan_for={name}"), *named)


def test_plan_for_is_a_dry_run(tmp_path):
    c = TrainConfig(plan_for="RTX 4070", out_dir=str(tmp_path / "out"), dataset=str(tmp_path / "none"), **TINY)
    assert c.dry_run
    main(c)
    assert not (tmp_path / "out").exists()


def test_micro_batches_of_a_plan_divide_the_step_and_the_largest_that_fits_is_found(planned):
    step: dict[str, Any] = {"batch_size": 12, "gradient_accumulation_steps": 5}
    run = planned(**step)
    batch_sizes = plan.micro_batches(run)
    assert batch_sizes == [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]
    assert plan.micro_batches(planned(**step, world=5)) == [1, 2, 3, 4, 6, 12]
    card = plan.Machine.of_card(gpu_peaks.find_card("RTX 4070"), "auto")
    for n in batch_sizes:
        needed = sum(memory(Step(TINY_CONFIG, n, PLAIN, "cuda", accumulates=n < 60)).values())
        enough, too_little = (replace(card, free_bytes=(needed + d) / fit.USABLE) for d in (0.5, -0.5))
        assert plan.largest_micro_batch(run, enough) == n
        assert plan.largest_micro_batch(run, too_little) in [0, *(smaller for smaller in batch_sizes if smaller < n)]
    assert plan.largest_micro_batch(run, replace(card, free_bytes=None)) is None


@pytest.mark.slow
def test_memory_of_a_plan_follows_activation_checkpoints(capsys):
    said = set()
    for which in ("none", "selective", "full"):
        said |= set(
            plan_of_tiny(capsys, plan_for="RTX 4070", batch_size=4096, activation_checkpoint=which).splitlines()
        )
    assert len([line for line in said if line.startswith("predicted peak memory")]) == 3


# ---- the speed that a plan expects ---------------------------------------------------------------------------

FLOPS_PER_TOKEN = GPT.without_storage(GPT2).estimate_flops()


def expected_mfu(card: str, flops_per_token: float = FLOPS_PER_TOKEN, dtype: str = "bfloat16") -> tuple[float, str]:
    return known_runs.expected_mfu(gpu_peaks.find_card(card), flops_per_token, dtype)


def test_known_runs_are_of_the_configs_that_they_name():
    for run, tokens_per_s, mfu in zip(known_runs.KNOWN_RUNS, (56_100, 134_400), (0.82, 0.69), strict=True):
        assert run.tokens_per_step / run.step_s == pytest.approx(tokens_per_s, rel=0.001)
        assert run.mfu() == pytest.approx(mfu, abs=0.005)
        c = TrainConfig(**read_settings(TrainConfig, [run.source]))
        assert run.tokens_per_step == c.batch_size * c.gradient_accumulation_steps * c.block_size
        assert run.is_of(GPT.without_storage(GPTConfig.from_settings(c, vocab_size=50304)).estimate_flops())


def test_card_with_a_known_run_of_other_sizes_has_the_mfu_of_the_nearest_and_names_it():
    large, small = known_runs.KNOWN_RUNS
    assert expected_mfu("RTX 4070") == (large.mfu(), "known run of these sizes")
    assert expected_mfu("RTX 4070", 3 * FLOPS_PER_TOKEN) == (large.mfu(), "known run of 12 layers, 768 wide")
    assert expected_mfu("RTX 4070", 1e6) == (small.mfu(), "known run of 12 layers, 384 wide")
    assert expected_mfu("RTX 4070", dtype="float32") == (0.4, "assumed")  # its runs were of 16 bits
    assert expected_mfu("RTX 4090") == (0.4, "assumed")


def test_mfu_that_was_qualified_here_comes_before_a_known_run(capsys):
    known_runs.remember_mfu("NVIDIA GeForce RTX 4070", "bfloat16", 0.61)
    known_runs.remember_mfu("NVIDIA A100-SXM4-80GB", "bfloat16", 0.5)
    assert expected_mfu("RTX 4070") == (0.61, "qualified here")
    assert expected_mfu("A100 40GB") == (0.5, "qualified here")
    assert expected_mfu("RTX 4070", dtype="float16") == (0.4, "assumed")
    assert expected_mfu("RTX 4070 Ti") == (0.4, "assumed")
    assert "at 61.0% (qualified here) of 1 x" in plan_of_tiny(capsys, plan_for="RTX 4070")


@pytest.mark.parametrize("value", ["fast", -1.0, 0.0, None, [0.5]])
def test_damaged_entry_of_a_qualified_card_is_ignored(value):
    remembered.keep("qualified", "NVIDIA GeForce RTX 4090, bfloat16", value)
    assert expected_mfu("RTX 4090") == (0.4, "assumed")


def test_activations_computed_again_take_time(capsys):
    times = []
    for which in ("none", "selective", "full"):
        out = plan_of_tiny(capsys, plan_for="H100", activation_checkpoint=which)
        assert (", with activations computed again: " in out) is (which != "none")
        times.append(float(re.findall(r": (\S+)s per step", out)[0]))
    assert times == [pytest.approx(factor * times[0], rel=0.01) for factor in (1, 1.14, 1.26)]
