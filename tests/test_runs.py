"""What follows from a run's log: parameters from MFU, time and tokens."""

from __future__ import annotations

import pytest
from conftest import ROOT
from logs import TIMES, nanogpt

from bench.analysis.learning import overfit
from bench.analysis.logs import read_run
from bench.analysis.runs import complete, give, implied_parameters

REAL = ROOT.parent / "shared" / "data" / "nanogpt_logs" / "fineweb_33m_rtx4070.txt"


def test_parameters_follow_from_mfu_time_and_tokens(tmp_path):
    (tmp_path / "log.txt").write_text(nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0))
    run = read_run(str(tmp_path / "log.txt"))
    sizes = {"n_layer": 2, "n_embd": 100, "block_size": 50, "batch_size": 10, "gradient_accumulation_steps": 2}
    for name, value in sizes.items():
        give(run, name, str(value))
    assert implied_parameters(run) is None
    complete(run)
    assert run.tokens_per_step == 1000
    # 6 N + 12 x 2 x 100 x 50 = 0.2 x 312e12 / 1000
    assert implied_parameters(run) == pytest.approx((6.24e10 - 120_000) / 6, rel=1e-3)
    give(run, "parameters", "7e9")
    complete(run)
    assert any("7,000.00M parameters" in note and "10,399.88M" in note for note in run.notes)


@pytest.mark.skipif(not REAL.exists(), reason="the log of a real nanoGPT run is not at hand")
def test_a_real_log_tells_its_model():
    run = read_run(str(REAL))
    sizes = {"n_layer": 12, "n_embd": 384, "block_size": 1024, "batch_size": 16, "gradient_accumulation_steps": 32}
    for name, value in sizes.items():
        give(run, name, str(value))
    complete(run)
    by_hand = 50304 * 384 + 12 * 12 * 384**2 + 25 * 384  # embedding, blocks, norms
    assert implied_parameters(run) == pytest.approx(by_hand, rel=1e-3)
    assert run.notes == []
    assert 3900 < sorted(run.step_ms)[len(run.step_ms) // 2] < 3915
    assert run.evals[2]["eval_s"] == pytest.approx(15.2, abs=0.1)
    assert overfit(run) is None  # its last evaluations differ by noise
