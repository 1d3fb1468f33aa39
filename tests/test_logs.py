"""Reading logs as they are found: ours, nanoGPT's, damaged, resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, assert_one_line
from hypothesis import given
from hypothesis import strategies as st
from logs import TIMES, log, nanogpt, rewrite

from bench import compare, report
from bench.analysis import logs
from bench.analysis.learning import overfit
from bench.analysis.logs import END_FACTS, EVAL_FIELDS, ITER_FIELDS, START_FACTS, read_run
from bench.analysis.runs import FACTS, SETTINGS, complete, give, implied_parameters
from deskgpt.run.log import read_events, with_checksum
from train import TrainConfig

REAL = ROOT.parent / "shared" / "data" / "nanogpt_logs" / "fineweb_33m_rtx4070.txt"


def test_evaluation_is_taken_out_of_nanogpts_times_and_mfu(tmp_path):
    (tmp_path / "log.txt").write_text(nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0))
    run = read_run(str(tmp_path / "log.txt"))
    sizes = {"n_layer": 2, "n_embd": 100, "block_size": 50, "batch_size": 10, "gradient_accumulation_steps": 2}
    for name, value in sizes.items():
        give(run, name, str(value))
    assert implied_parameters(run) is None
    complete(run)
    assert run.tokens_per_step == 1000
    assert run.step_ms == [1000, 1010, 990, 1000, 1000, 1000, 1000]
    assert [e["eval_s"] for e in run.evals] == [None, 5.0, 5.0]  # 6 s less the median step
    mfu = {e["iter"]: e["mfu"] for e in run.iters}
    assert mfu[40] is None
    assert mfu[20] == pytest.approx(0.2 / 1.01, rel=1e-3)
    assert mfu[90] == pytest.approx(0.2, rel=1e-3)  # printed: 15.9%
    # 0.2 of 312 TFLOP/s for a second, and 1000 tokens: 6 N + 12 x 2 x 100 x 50
    assert run.flops_per_token == pytest.approx(0.2 * 312e12 / 1000, rel=1e-3)
    assert implied_parameters(run) == pytest.approx((6.24e10 - 120_000) / 6, rel=1e-3)
    assert run.evals[1]["train_s"] == pytest.approx(11 * 1.0 + 10 * 1.01 + 10 * 0.99 + 9 * 1.0, rel=0.01)


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


@pytest.mark.parametrize("name", ["log.jsonl", "printed.txt"])
def test_log_of_an_absurd_size_is_not_read_whole(tmp_path, name, monkeypatch):
    monkeypatch.setattr(logs, "MOST_BYTES", 1 << 20)
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 40)  # without taking room on the disk
    with pytest.raises(ValueError, match="absurd size") as e:
        read_run(str(tmp_path / name))
    assert_one_line(e.value, name)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])  # PowerShell writes the latter
def test_damaged_logs_are_read_as_far_as_they_go(tmp_path, encoding):
    text = nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0)
    clean = tmp_path / "clean.txt"
    clean.write_text(text)
    lines = [f"\x1b[32m| 12:00 {line}\x1b[0m" for line in text.splitlines()]
    lines.insert(5, "UserWarning: iter is deprecated\n  warnings.warn(")
    lines.insert(9, "\ufffd\x00%%% step 7")
    lines[0] = "x" + lines[0]
    lines.append("iter 95: loss 3.1, ti")  # cut off
    (tmp_path / "damaged.txt").write_bytes("\r\n".join(lines).encode(encoding) + b"\xff\xfe")
    a, b = read_run(str(clean)), read_run(str(tmp_path / "damaged.txt"))
    assert (a.iters, a.evals) == (b.iters, b.evals)
    assert_one_line(*b.notes, "1 damaged")


def test_losses_that_are_not_numbers_are_said(tmp_path):
    lines = nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0).replace(
        "loss 3.2000, time 6000.00ms", "loss nan, time nanms"
    )
    (tmp_path / "a.txt").write_text(lines)
    run = read_run(str(tmp_path / "a.txt"))
    complete(run)
    assert "its loss is not a number at step 80" in run.notes
    compare.compare([run], [])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return Path(log(tmp_path_factory.mktemp("whole"), {0: 4.0, 3: 3.0}), "log.jsonl")


@given(share=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_damaged_byte_changes_nothing_that_is_read_without_a_note(whole, share, byte):
    content = bytearray(whole.read_bytes())
    content[int(share * len(content))] = byte
    damaged = whole.parent / "damaged" / "log.jsonl"
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(content)
    before = read_run(str(whole), "x")
    after = read_run(str(damaged), "x")
    assert not before.notes
    assert after == before or after.notes


def test_log_without_checksums_is_read_as_unverified(tmp_path):
    path = log(tmp_path / "a", {0: 4.0, 3: 3.0})
    verified = read_run(path)
    rewrite(path, lambda e: {}, checksum=False)
    run = read_run(path)
    assert (run.iters, run.evals, run.start) == (verified.iters, verified.evals, verified.start)
    assert len(run.notes) == 1
    assert_one_line(run.notes[0], "unverified")


odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.text(max_size=2),
    st.lists(st.integers(), max_size=1),
    st.dictionaries(st.text(max_size=1), st.integers(), max_size=1),
)
NAMES = [*TrainConfig.__dataclass_fields__, *FACTS, *START_FACTS, *EVAL_FIELDS, *ITER_FIELDS, *END_FACTS, "settings"]


@given(name=st.sampled_from(NAMES), value=odd_values)
def test_odd_values_of_an_unverified_log_are_left_out_and_said(whole, name, value):
    def odd(event: dict[str, Any]) -> dict[str, Any]:
        return {name: value} if name not in SETTINGS else {"settings": event.get("settings", {}) | {name: value}}

    runs = []
    for folder, changed in (("odd", odd), ("plain", lambda e: {})):
        path = whole.parent / folder
        path.mkdir(exist_ok=True)
        shutil.copy(whole, path)
        rewrite(str(path), changed, checksum=False)
        try:
            runs.append(read_run(str(path)))
        except ValueError as e:
            assert_one_line(str(e), path)
            return
        complete(runs[-1])
    read = [len(run.iters) + len(run.evals) for run in runs]
    assert name == "iter" or read[0] == read[1] or any("left out" in note for note in runs[0].notes)
    json.dumps(compare.compare(runs, [3.5])[2])
    report.describe(runs[0])


def test_setting_that_cannot_be_is_unknown_and_not_the_default(tmp_path):
    run = read_run(log(tmp_path / "a", {0: 4.0, 10: 3.0}, settings={"n_layer": 0, "of_another_version": "y"}))
    assert "n_layer" not in run.settings
    assert run.settings["of_another_version"] == "y"
    assert run.settings["n_head"] == 2


def test_speeds_that_differ_beyond_all_measure_have_a_noise(tmp_path):
    runs = []
    for seed, batch_size, ms in ((1, 4, 1e-20), (2, 4, 1e20), (1, 8, 1e-20), (2, 8, 1e20)):
        path = tmp_path / f"{seed}-{batch_size}"
        runs.append(read_run(log(path, {0: 4.0, 10: 3.0}, ms, seed=seed, batch_size=batch_size)))
        complete(runs[-1])
    tables, _, _ = compare.compare(runs, [3.5])
    assert "not distinguishable" in str(tables)


def test_a_log_that_goes_on_after_a_resume_counts_each_step_once(tmp_path):
    first, second = dict(list(TIMES.items())[:7]), dict(list(TIMES.items())[4:])
    path = tmp_path / "log.txt"
    path.write_text(nanogpt(first, (0, 40), 200.0) + nanogpt(second, (40, 80), 200.0))
    run = read_run(str(path))
    assert [e["iter"] for e in run.iters] == list(TIMES)
    assert [e["iter"] for e in run.evals] == [0, 40, 80]
    assert_one_line(*run.notes, "begins 2 times")


def test_settings_that_nanogpt_echoes_are_known_with_its_defaults(tmp_path):
    echo = "Overriding config with config/x.py:\n# a comment\nbatch_size = 16 # micro\nlearning_rate = 3e-4\n"
    echo += "Overriding: n_layer = 3\nOverriding: dataset = fineweb\neval_iters = 5 * 2\nfree = words here\n"
    echo += "n_head=6\nn_embd: int = 384\nbeta2 = 1 - 0.05\n"
    (tmp_path / "log.txt").write_text(echo + "number of parameters: 1.50M\n" + nanogpt(TIMES, (0, 40, 80), 200.0))
    run = read_run(str(tmp_path / "log.txt"))
    s = run.settings
    assert (s["batch_size"], s["learning_rate"], s["n_layer"], s["dataset"]) == (16, 3e-4, 3, "fineweb")
    assert (s["n_head"], s["n_embd"], s["eval_iters"]) == (6, 384, 10)
    assert (s["block_size"], s["lr_decay_iters"], s["activation"]) == (1024, 600000, "gelu")
    assert "beta2" not in s
    assert_one_line(*run.notes, "beta2 = 1 - 0.05")
    assert "device" not in s
    assert run.start["parameters"] == 1.5e6


def test_a_line_that_a_crash_tore_is_no_event(tmp_path):
    whole = '{"event": "iter", "iter": 1}\n'
    (tmp_path / "log.jsonl").write_text(
        whole + '{"event": "iter", "it\n' + "[]\n\n" + whole + "[" * 9999 + '\n{"event": "e'
    )
    assert read_events(tmp_path / "log.jsonl") == [{"event": "iter", "iter": 1}] * 2


def test_a_resumed_run_counts_on(tmp_path):
    file = Path(log(tmp_path / "a", {0: 4.0, 10: 3.0, 20: 2.5})) / "log.jsonl"
    lines = file.read_text().splitlines()
    start, *later = [e for e in read_events(file) if e["event"] == "start" or e["iter"] >= 10]
    resumed = [start | {"iter": 10}, *(e | {"train_s": e.get("train_s", 1.0) - 1.0} for e in later)]
    for e in resumed:
        del e["crc"]
    again = [with_checksum(json.dumps(e)).decode() for e in resumed]
    file.write_text("\n".join([*lines[:16], '{"event": "iter", "it', *again]))
    run = read_run(str(file.parent))
    assert [e["iter"] for e in run.iters] == list(range(20))
    assert [e["iter"] for e in run.evals] == [0, 10, 20]
    assert run.iters[-1]["train_s"] == pytest.approx(2.0)
    assert run.evals[-1]["train_s"] == pytest.approx(2.0)
    assert_one_line(*run.notes, "1 unreadable")
