"""Read logs as they are found: ours, nanoGPT's, damaged, resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import assert_one_line
from logs import TIMES, log, nanogpt

from bench.analysis.logs import read_run
from deskgpt.run.log import read_events


def test_evaluation_is_taken_out_of_nanogpts_times_and_mfu(tmp_path):
    text = "number of parameters: 1.50M\ntokens per iteration will be: 1,000\n"
    (tmp_path / "log.txt").write_text(text + nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0))
    run = read_run(str(tmp_path / "log.txt"))
    assert run.tokens_per_step == 1000
    assert run.step_ms == [1000, 1010, 990, 1000, 1000, 1000, 1000]
    assert run.start["nanogpt_mfu"] == pytest.approx(0.2, rel=1e-3)  # printed last: 15.9%
    # 0.2 of 312 TFLOP/s for a second, and 1000 tokens
    assert run.flops_per_token == pytest.approx(0.2 * 312e12 / 1000, rel=1e-3)
    assert run.start["parameters"] == 1.5e6
    assert run.evals[1]["train_s"] == 40.0


def test_flops_of_a_nanogpt_run_on_several_gpus_are_those_of_all(tmp_path):
    of_8 = 854.8e6 * 491520 / 8 / 0.25 / 312e12  # the MFU of GPT-2 in steps of 250 ms
    lines = ["tokens per iteration will be: 491,520", "number of parameters: 123.59M"]
    lines += [f"iter {i}: loss 3.0, time 250.00ms, mfu {100 * of_8:.2f}%" for i in range(10, 200, 10)]
    (tmp_path / "log.txt").write_text("\n".join(lines))
    run = read_run(str(tmp_path / "log.txt"))
    assert run.flops_per_token == pytest.approx(854.8e6, rel=1e-3)
    assert_one_line(*run.notes, "8 GPUs")


def test_settings_that_nanogpt_prints_are_read(tmp_path):
    lines = ["Overriding config with config/train_x.py:", "# a comment", "learning_rate = 1e-3 # a reason"]
    lines += ["wandb_project='x'", "gradient_accumulation_steps = 5 * 8", "mine = 3", "Overriding: max_iters = 200"]
    lines += ["Overriding: compile = False", "using fused AdamW: True", "step 0: train loss 4.0, val loss 4.0"]
    (tmp_path / "log.txt").write_text("\n".join([*lines, "n_layer = 3"]))
    run = read_run(str(tmp_path / "log.txt"))
    known = {"learning_rate": 1e-3, "wandb_project": "x", "max_iters": 200, "compile": False}
    assert run.settings == known  # what is not a plain value, a setting or before the first step is not known


@pytest.mark.parametrize("name", ["log.jsonl", "printed.txt"])
def test_log_of_an_absurd_size_is_refused(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 40)  # without taking room on the disk
    with pytest.raises(ValueError, match="absurd size") as e:
        read_run(str(tmp_path / name))
    assert_one_line(e.value, name)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])  # PowerShell writes the latter
def test_damaged_printed_logs_are_read_as_far_as_they_go(tmp_path, encoding):
    text = nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0)
    (tmp_path / "clean.txt").write_text(text)
    lines = [f"| 12:00 {line}" for line in text.splitlines()]
    lines.insert(5, "UserWarning: iter is deprecated\n  warnings.warn(")
    lines.insert(9, "\ufffd\x00%%% step 7")
    lines.append("iter 95: loss 3.1, ti")  # cut off
    (tmp_path / "damaged.txt").write_bytes("\r\n".join(lines).encode(encoding) + b"\xff\xfe")
    a, b = (read_run(str(tmp_path / name)) for name in ("clean.txt", "damaged.txt"))
    assert (a.iters, a.evals, a.notes) == (b.iters, b.evals, b.notes)


def test_a_log_that_continues_after_a_restart_counts_each_step_once(tmp_path):
    first, second = dict(list(TIMES.items())[:7]), dict(list(TIMES.items())[4:])
    path = tmp_path / "log.txt"
    path.write_text(nanogpt(first, (0, 40), 200.0) + nanogpt(second, (40, 80), 200.0))
    run = read_run(str(path))
    assert [e["iter"] for e in run.iters] == list(TIMES)
    assert [e["iter"] for e in run.evals] == [0, 40, 80]
    assert_one_line(*run.notes, "begins 2 times")


@pytest.mark.parametrize("kind", ["start", "rewind"])
def test_a_resumed_or_rewound_run_counts_each_step_once_and_the_time_of_all_parts(tmp_path, kind):
    file = Path(log(tmp_path / "a", {0: 4.0, 10: 3.0, 20: 2.5}), "log.jsonl")
    lines = file.read_text().splitlines()
    start, *later = [e for e in read_events(file) if e["event"] == "start" or e["iter"] >= 10]
    before_s = 1.0 if kind == "start" else 0.0  # a resumed run counts its seconds from 0
    again = [start | {"event": kind, "iter": 10}]
    again += [e | {"train_s": e.get("train_s", 1) - before_s} for e in later]
    file.write_text("\n".join([*lines[:16], '{"event": "iter", "it', *map(json.dumps, again)]))
    run = read_run(str(file.parent))
    assert [e["iter"] for e in run.iters] == list(range(20))
    assert [e["iter"] for e in run.evals] == [0, 10, 20]
    assert run.iters[-1]["train_s"] == pytest.approx(2.0)
    assert sum(e["eval_s"] for e in run.evals) == 6.0  # of both parts
    assert_one_line(*run.notes, "1 unreadable")
