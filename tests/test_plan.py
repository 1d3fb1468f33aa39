from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import flags

import model
from deskgpt.compute.ranks import Ranks
from deskgpt.compute.runner import Form
from deskgpt.faster import held, kernels
from deskgpt.faster.definition import may_be_faster
from deskgpt.machine import gpu_peaks, remembered
from deskgpt.predict import fit, known_runs, plan
from deskgpt.predict.memory import Step, memory
from model import GPTConfig
from train import TrainConfig, dry_run, main

GPT2 = GPTConfig(block_size=1024, vocab_size=50304)
COMPILED = Form("bfloat16", compiled=True)
ALONE = Ranks(torch.device("cpu"))
TINY: dict[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": 16, "block_size": 32}
TINY_CONFIG = GPTConfig(vocab_size=64, **TINY)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan_of_tiny(capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    """What a dry run of a tiny model says."""
    dry_run(TrainConfig(**TINY, **settings), TINY_CONFIG, ALONE)
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
    parts = memory(Step(GPTConfig(bias=False), 8, COMPILED, "cuda"))
    assert float(total[1]) == pytest.approx(sum(parts.values()) / 2**30, abs=0.01)
    fits = re.search(r"--batch_size=(\d+) --gradient_accumulation_steps=(\d+)$", done.out, re.M)
    assert fits
    batch_size = int(fits[1])
    assert batch_size * int(fits[2]) == 8 * 64
    for n, is_below in ((batch_size, True), (2 * batch_size, False)):
        needed = sum(memory(Step(GPTConfig(bias=False), n, COMPILED, "cuda")).values())
        assert (needed <= fit.USABLE * 12 * 2**30) is is_below
    assert "of these sizes on GeForce RTX 4070 took 9.34s per step of 524,288 tokens" in done.out
    assert "at 82.3% (known run of these sizes) of 1 x 58.29 TFLOP/s" in done.out
    assert "9.34s per step, 2.0 days for 18,750 steps" in done.out
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_plan_for_all_is_a_table_of_cards_by_speed(tmp_path, script):
    small = flags(**TINY | {"block_size": 128}, plan_for="all", dataset=tmp_path / "none", max_iters=1_000_000)
    done = script("train.py", *small)
    assert (done.code, done.err) == (0, "")
    found = {}
    for line in done.out.splitlines():
        cells = re.split(r"  +", line)
        if len(cells) >= 7 and cells[0] != "card":
            found[cells[0], cells[1]] = cells[2:]
    cards = [card for card in gpu_peaks.table() if card.maker != "Apple"]
    assert len(found) == sum(len(card.memory_gb) or 1 for card in cards)
    assert found["GeForce RTX 4070", "12"][:2] == ["bfloat16", "480"]
    assert found["Tesla T4", "16"][0] == "float16"
    assert found["B300", "n/a"][1] == "n/a"  # its memory is not known, its speed is
    assert found["Tesla P40", "24"][2:] == ["n/a", "n/a", "n/a"]  # its speed is not known, its memory is
    order = [name for name, _ in found]
    assert order.index("H200") < order.index("GeForce RTX 4090") < order.index("GeForce RTX 3060")
    assert order[-2:] == ["Tesla P40", "GeForce RTX 3050 6GB"]


@pytest.mark.slow
def test_table_rehearses_each_micro_batch_once_for_all_cards(monkeypatch, capsys):
    asked = []

    def counted(step: Step) -> dict[str, int]:
        asked.append((step.batch_size, step.form.dtype, step.loss_logits))
        return memory(step)

    monkeypatch.setattr(plan, "memory", counted)
    plan_of_tiny(capsys, plan_for="all", batch_size=2, gradient_accumulation_steps=2)
    assert {dtype for _, dtype, _ in asked} == {"bfloat16", "float16"}
    assert len(asked) == len(set(asked)) <= 2 * 3 * 3  # two dtypes, micro-batches of 1, 2 and 4, three sizes of chunks


@pytest.mark.slow
def test_card_into_which_nothing_fits_has_no_time(monkeypatch, capsys):
    monkeypatch.setattr(plan, "USABLE", 1e-6)
    assert "at the same tokens per step: none" in plan_of_tiny(capsys, plan_for="RTX 4070")
    assert re.search(
        r"GeForce RTX 4070  +12  bfloat16 +none +n/a +n/a +n/a$", plan_of_tiny(capsys, plan_for="all"), re.M
    )


def test_machine_whose_peak_cannot_be_measured_has_no_time(monkeypatch, capsys):
    monkeypatch.setattr(plan.peak_flops, "measured_matmul_flops", lambda *_: math.nan)
    assert "time: n/a, because no peak of " in plan_of_tiny(capsys, dtype="float32")


def test_apples_memory_is_the_machines_and_its_plan_says_no_size(capsys):
    out = plan_of_tiny(capsys, plan_for="Apple M2 Max")
    assert re.search(r"predicted peak memory of Apple M2 Max, float32: \S+ GiB$", out, re.M)
    assert "13.60 TFLOP/s (Apple newsroom, float32)" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RTX 4700", "plan_for='RTX 4700' is not a card of .*did you mean .*GeForce RTX 4070.*'all' lists them"),
        ("RTX 4070 24GB", "GeForce RTX 4070 has 12 GB"),
        ("A100 60GB", "has 40 or 80 GB"),
        ("???", "plan_for='\\?\\?\\?' is not a card of deskgpt/machine/gpu_peaks.py; 'all' lists them"),
    ],
)
def test_unknown_card_is_an_error_of_one_line(name, message, script):
    done = script("train.py", f"--plan_for={name}")
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert re.search(message, line), line


def test_plan_for_is_a_dry_run(tmp_path):
    c = TrainConfig(plan_for="RTX 4070", out_dir=str(tmp_path / "out"), dataset=str(tmp_path / "none"), **TINY)
    assert c.dry_run
    main(c)
    assert not (tmp_path / "out").exists()


def test_micro_batches_of_a_plan_divide_the_step_and_the_largest_that_fits_is_found(planned):
    step: dict[str, Any] = {"batch_size": 12, "gradient_accumulation_steps": 5}
    fitting = plan.Fitting(planned(**step))
    assert fitting.batch_sizes == [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]
    assert plan.Fitting(planned(**step, world=5)).batch_sizes == [1, 2, 3, 4, 6, 12]
    card = plan.Machine.of_card(gpu_peaks.find_card("RTX 4070"), "auto")
    for n in fitting.batch_sizes:
        needed = sum(memory(Step(TINY_CONFIG, n, COMPILED, "cuda", accumulates=n < 60)).values())
        enough, too_little = (replace(card, free_bytes=(needed + d) / fit.USABLE) for d in (0.5, -0.5))
        assert fitting.largest(enough) == n
        assert fitting.largest(too_little) in [0, *(smaller for smaller in fitting.batch_sizes if smaller < n)]
    assert fitting.largest(replace(card, free_bytes=None)) is None


def test_largest_micro_batch_of_a_plan_follows_activation_checkpoints(planned):
    parts = memory(Step(TINY_CONFIG, 12, replace(COMPILED, checkpoint="full"), "cuda"))
    fitting = plan.Fitting(planned(batch_size=12, activation_checkpoint="full"))
    assert fitting.peak_bytes(12, "bfloat16", kernels.LEAST_LOGITS_ON_GPU) == sum(parts.values())


@pytest.mark.slow
def test_memory_of_a_plan_follows_activation_checkpoints(capsys):
    said = set()
    for which in ("none", "selective", "full"):
        said |= set(
            plan_of_tiny(capsys, plan_for="RTX 4070", batch_size=4096, activation_checkpoint=which).splitlines()
        )
    assert len([line for line in said if line.startswith("predicted peak memory")]) == 3


# ---- the speed that a plan expects ---------------------------------------------------------------------------


def test_mfu_of_the_known_runs_is_what_their_figures_say():
    large, small = known_runs.KNOWN_RUNS
    assert large.tokens_per_step / large.step_s == pytest.approx(56_100, rel=0.001)
    assert large.mfu() == pytest.approx(0.82, abs=0.005)
    assert 0.6 < small.mfu() < 0.75


def test_card_with_a_known_run_of_other_sizes_has_the_mfu_of_the_nearest_and_names_it():
    card = gpu_peaks.find_card("RTX 4070")
    known = "known run of a GPT-2"
    medium = GPTConfig(n_layer=24, n_head=16, n_embd=1024)
    large, small = known_runs.KNOWN_RUNS
    assert known_runs.expected_mfu(card, medium, "bfloat16") == (large.mfu(), f"{known}, 12 layers, 768 wide")
    assert known_runs.expected_mfu(card, TINY_CONFIG, "bfloat16") == (small.mfu(), f"{known}, 12 layers, 384 wide")
    modern = replace(GPT2, norm="rms")  # as many FLOPs, but not the same model
    assert known_runs.expected_mfu(card, modern, "bfloat16") == (large.mfu(), f"{known}, 12 layers, 768 wide")
    assert known_runs.expected_mfu(card, GPT2, "float32") == (0.4, "assumed")  # its runs were of 16 bits
    assert known_runs.expected_mfu(gpu_peaks.find_card("RTX 4090"), GPT2, "bfloat16") == (0.4, "assumed")


def test_mfu_that_was_qualified_here_comes_before_a_known_run(capsys):
    known_runs.remember_mfu("NVIDIA GeForce RTX 4070", "bfloat16", 0.61)
    known_runs.remember_mfu("NVIDIA A100-SXM4-80GB", "bfloat16", 0.5)
    assert known_runs.expected_mfu(gpu_peaks.find_card("RTX 4070"), GPT2, "bfloat16") == (0.61, "qualified here")
    assert known_runs.expected_mfu(gpu_peaks.find_card("A100 40GB"), GPT2, "bfloat16") == (0.5, "qualified here")
    assert known_runs.expected_mfu(gpu_peaks.find_card("RTX 4070"), GPT2, "float16") == (0.4, "assumed")
    assert known_runs.expected_mfu(gpu_peaks.find_card("RTX 4070 Ti"), GPT2, "bfloat16") == (0.4, "assumed")
    assert "at 61.0% (qualified here) of 1 x" in plan_of_tiny(capsys, plan_for="RTX 4070")


@pytest.mark.parametrize("value", ["fast", -1.0, 0.0, None, [0.5]])
def test_damaged_entry_of_a_qualified_card_is_ignored(value):
    remembered.keep("qualified", "NVIDIA GeForce RTX 4090, bfloat16", value)
    assert known_runs.expected_mfu(gpu_peaks.find_card("RTX 4090"), GPT2, "bfloat16") == (0.4, "assumed")
