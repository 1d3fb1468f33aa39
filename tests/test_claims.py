"""The experiments of bench/claims: what counts runs for real, the rest at a tiny size; and what their page names."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from bench.claims import losses, run, sizes, speeds
from bench.claims.sizes import CPU, CUDA, Options, Sizes
from data.text.prepare import prepare

PAGE = ROOT / "bench" / "claims" / "README.md"


def options(tmp: Path, **given: Any) -> Options:
    same: dict[str, Any] = {"data": "", "rounds": 2, "seeds": 2, "steps": 4, "log": "", "documents": "", "sizes": CPU}
    return Options(device=torch.device("cpu"), tmp=tmp, **(same | given))


def test_list_names_the_claims(script):
    done = script("bench/claims/run.py", "--list")
    assert done.code == 0
    assert [int(line.split(".")[0]) for line in done.out.splitlines()] == list(range(1, 13))


def test_unknown_numbers_are_one_line_errors(script):
    done = script("bench/claims/run.py", "13")
    assert (done.code, done.err) == (2, "error: claim 13 is not one of 1 to 12; --list shows them\n")
    done = script("bench/claims/run.py", "6", "--seeds=0")
    assert done.code == 2
    assert done.err.count("\n") == 1


def test_data_that_is_not_there_is_a_one_line_error_that_names_prepare(script, monkeypatch, tmp_path):
    folder = tmp_path / "data" / "shakespeare_char"
    folder.mkdir(parents=True)
    (folder / "prepare.py").touch()
    done = script("bench/claims/run.py", "4", f"--data={folder}")
    assert done.code == 1
    assert re.fullmatch(r"error: .* has no train\*\.bin; run: python .*prepare\.py\n", done.err)


def test_parameters_are_counted_by_hand(script):
    done = script("bench/claims/run.py", "6")
    assert done.code == 0, done.err
    # qkv 3, projection 1, the MLP 4 and 4 times the width squared; two norms in a block, one after all blocks
    blocks = 12 * (12 * 384**2 + 2 * 384)
    for name, n in {
        "12 blocks": blocks,
        "token embedding, which is the head too (50,304 x 384)": 50304 * 384,
        "sum, as nanoGPT prints it": blocks + 50304 * 384 + 384,
        "with position embeddings (1,024 x 384)": blocks + 50304 * 384 + 384 + 1024 * 384,
    }.items():
        assert f"| {name} | {n:,} |" in done.out
    assert "40,560,000" in done.out
    flops = 6 * 40_560_000 + 12 * 12 * 384 * 1024
    assert f"{flops:,} FLOPs a token" in done.out
    assert f"{flops * 524_288 / 3.9 / 312e12:.1%} of an A100's" in done.out
    assert "33M would be about 8 layers" in done.out


def test_perplexity_is_the_exponential_of_the_loss(script, tmp_path):
    (tmp_path / "log.txt").write_text(
        "step 0: train loss 10.8, val loss 10.9\niter 0: loss 10.9\nstep 500: train loss 3.1, val loss 3.0\n"
    )
    (tmp_path / "documents.jsonl").write_text(json.dumps({"text": "the cat sat on the mat"}) + "\n")
    done = script("bench/claims/run.py", "11", f"--log={tmp_path / 'log.txt'}")
    assert done.code == 0, done.err
    assert f"| loss 3.358 | 3.358 | {math.exp(3.358):.4g} | {3.358 / math.log(2):.4g} | n/a |" in done.out
    assert f"| perplexity 22 | {math.log(22):.4g} | 22 |" in done.out
    assert "| the log's step 0 | 10.9 |" in done.out
    assert "| the log's step 500 | 3 | 20.09 |" in done.out
    assert str(tmp_path) not in done.out
    empty = script("bench/claims/run.py", "11", f"--log={tmp_path / 'documents.jsonl'}")
    assert empty.code == 1
    assert "has no line like nanoGPT's" in empty.err


@pytest.mark.slow
def test_accumulation_at_the_same_tokens_per_step_keeps_steps_and_losses(chars, tmp_path):
    found = losses.accumulation(options(tmp_path, data=str(chars), steps=10))
    assert [(r["tokens per step"], r["steps"], r["tokens"]) for r in found.rows] == [
        (256, 10, 2560),
        (256, 10, 2560),
        (512, 5, 2560),
    ]
    assert found.raw[0] == pytest.approx(found.raw[1], abs=1e-5)
    assert found.raw[0][1:5] != pytest.approx(found.raw[2][1:5], abs=1e-5)


@pytest.mark.slow
def test_step_times_end_to_end_at_a_tiny_size(tmp_path):
    tiny = Sizes(
        **{name: getattr(CPU, name) for name in CPU.__dataclass_fields__}
        | {"timed": {"n_layer": 1, "block_size": 16}, "widths": (64,), "sequences": 4, "micro_batches": (1, 4)}
    )
    found = speeds.micro_batch(options(tmp_path, sizes=tiny))
    assert [r["run"] for r in found.rows] == ["64 wide, 1 x 4", "64 wide, 4 x 1"]
    assert all(r["ms per step"] > 0 and 0 < r["MFU %"] < 100 for r in found.rows)
    [says] = found.says
    assert re.fullmatch(r"64 wide: micro-batches of 1 take [\d.]+ \([\d.]+ to [\d.]+\) times as long as of 4\.", says)
    assert str(tmp_path) not in json.dumps(found.raw)


@pytest.mark.slow
def test_random_evaluations_differ_and_fixed_ones_do_not(text, tmp_path):
    prepare(text[:20_000], tmp_path / "few", "char", "test text")
    found = losses.random_evaluation(options(tmp_path, data=str(tmp_path / "few"), steps=2))
    spread = {r["windows"]: r["standard deviation"] for r in found.rows[:-1]}
    assert spread["20 x 12, random"] > 0
    assert spread["20 x 12, fixed"] == spread["200 x 12, fixed"] == 0


def test_the_step_of_a_loss_lies_on_a_line_between_evaluations():
    evaluations = [{"iter": 0, "val_loss": 4.0}, {"iter": 10, "val_loss": 3.0}, {"iter": 20, "val_loss": 1.0}]
    assert losses.steps_to(evaluations, 2.5) == 12.5
    assert losses.steps_to(evaluations, 3.0) == 10
    assert losses.steps_to(evaluations, 0.5) is None


def test_factors_and_differences_say_how_sure_they_are():
    assert speeds.factor([math.log(2.0)]) == "2.00 (one round)"
    assert speeds.factor([math.log(2.0)] * 3) == "2.00 (2.00 to 2.00)"
    assert losses.versus([1.0, 1.1, 1.2], [1.05, 1.15, 1.25]).endswith("which cannot be told from 0")
    assert losses.versus([1.0, 1.0, 1.1], [2.0, 2.1, 2.1]).startswith("+1.0333 ± ")


def test_both_tables_of_sizes_make_runs():
    from train import TrainConfig

    for s in (CPU, CUDA):
        for model in (s.timed | sizes.heads(s.widths[-1]), s.widened, s.learned, *s.compiled):
            TrainConfig(**model)
        assert all(s.sequences % b == 0 for b in s.micro_batches)


def test_results_that_the_page_names_exist_and_hold_what_was_claimed():
    text = PAGE.read_text(encoding="utf-8")
    names = set(re.findall(r"\]\((\.\./results/[^)]+)\)", text))
    assert names
    for name in names:
        path = PAGE.parent / name
        assert path.exists(), name
        if found := re.search(r"claim-(\d+)", name):
            result = json.loads(path.with_suffix(".json").read_text())
            assert result["claim"] == run.CLAIMS[int(found[1])][0]
            assert "+changes" not in result["commit"]
            assert result["commit"] in path.with_suffix(".md").read_text()
    for number, (claim, _) in run.CLAIMS.items():
        assert f"\n## {number}. {claim}\n" in text
