"""The benchmarks end to end on tiny models, and the arithmetic of their tables; what they find is not judged here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, flags, shell

from bench import speed, time_to_loss

SMALL = {k: v for k, v in TINY.items() if k not in ("max_iters", "eval_interval", "eval_iters", "warmup_iters")}

# Stands for a checkout of nanoGPT, which cannot be had offline: takes its settings and prints its lines.
NANOGPT = """
import os, sys
assert "--device=cpu" in sys.argv and "--compile=False" in sys.argv and "--n_embd=16" in sys.argv, sys.argv
data = next(a for a in sys.argv if a.startswith("--dataset=")).split("=")[1]
assert os.path.exists(os.path.join(data, "meta.pkl")) and os.getcwd() == os.path.dirname(os.path.abspath(__file__))
print("step 0: train loss 4.2, val loss 4.2")
for i in range(1000):
    print(f"iter {i}: loss 4.2000, time {500 if i == 0 else 20 + i % 2}.00ms, mfu -100.00%")
"""


def test_speed_times_the_peers_on_the_same_work(tmp_path):
    (tmp_path / "train.py").write_text(NANOGPT)
    peers = [f"--peer=nanogpt:{tmp_path}", "--peer", f"nanogpt+malloc:{tmp_path}", "--peer=ours:--n_layer=1"]
    own = ["--steps=12", "--rounds=2", "--vocab_size=65", *peers]
    done = shell("python", "bench/speed.py", *flags(**SMALL), *own)
    assert done.returncode == 0, done.stderr
    rows = {line.split("|")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("|")}
    assert list(rows) == ["", "---", "deskGPT", "nanoGPT", "nanoGPT+malloc", "--n_layer=1"]
    assert re.search(
        r"\| deskGPT \| [\d.]+ \([\d.]+, [\d.]+\) \| [\d,]+ \| [\d.]+ \| [\d.]+% \| [\d.]+ s \|", done.stdout
    )
    assert rows["nanoGPT"].split("|")[2].startswith(" 20.5 (20, 21)")
    assert "first step" in rows[""]
    assert "1.00 (1.00 to 1.00)" in rows["deskGPT"]
    assert "MFU refers to" in done.stdout


def test_speed_says_what_is_wrong_with_a_peer(tmp_path):
    for peer, reason in (
        (f"nanogpt:{tmp_path}", f"{tmp_path} holds no train.py; name a checkout of nanoGPT"),
        ("llamacpp", "not nanogpt:PATH, nanogpt+malloc:PATH, ours:'--key=value' or hf"),
    ):
        done = shell("python", "bench/speed.py", *flags(**SMALL), f"--peer={peer}")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert reason in done.stderr


def test_figures_of_the_speed_table_are_these():
    ours = speed.Contestant(
        "ours", [], Path(), [[10.0, 12.0, 11.0], [20.0, 22.0, 21.0]], [3.0, 1.0], [2 * 10**9, 10**9]
    )
    ours.start, ours.waits = {"flops_per_token": 6e6, "peak_flops": 1e12}, [0.0, 0.1]
    peer = speed.Contestant("peer", [], Path(), [[22.0, 22.0, 22.0], [63.0, 63.0, 63.0]], [0.5, 0.5], [10**9, 10**9])
    a, b = speed.table([ours, peer], tokens_per_step=1000)
    assert (a["ms"], a["p10"], a["p90"]) == (16.0, 10.0, 22.0)
    assert a["tokens_per_s"] == pytest.approx(62_500)
    assert a["tflops"] == pytest.approx(0.375)  # 6e9 FLOPs in 16 ms
    assert a["mfu"] == pytest.approx(0.375)
    assert (a["first_s"], a["memory_gb"], a["data_wait"]) == (2.0, 2.0, pytest.approx(0.05))
    assert (b["ms"], b["data_wait"]) == (42.5, None)
    assert (b["ours_faster"], b["ours_faster_least"], b["ours_faster_most"]) == (2.5, 2.0, 3.0)


def test_profile_shows_the_operations_of_our_steps():
    done = shell("python", "bench/speed.py", *flags(**SMALL), "--vocab_size=65", "--profile", "--steps=2")
    assert done.returncode == 0, done.stderr
    [adamw] = [line for line in done.stdout.splitlines() if "Optimizer.step#AdamW.step" in line]
    assert adamw.split()[-1] == "2"  # calls


def test_time_to_loss_stops_at_the_target_or_says_that_it_was_missed(chars, tmp_path):
    settings = flags(**TINY | {"dataset": chars, "max_iters": 40, "eval_interval": 2})
    sure = time_to_loss.run([*settings], 1, 4.2, tmp_path / "a")
    assert sure["reached"]
    assert sure["val_loss"] <= 4.2
    assert sure["steps"] < 40
    assert sure["tokens"] == sure["steps"] * 64
    assert sure["seconds"] == sure["steps_s"] + sure["compile_s"]
    assert sure["process_s"] > sure["seconds"] + sure["eval_s"]
    assert [n for _, n, _ in sure["curve"]] == list(range(0, sure["steps"] + 1, 2))
    command = ["python", "bench/time_to_loss.py", *settings, "--target=0.1", "--seeds=2", "--max_iters=4"]
    done = shell(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(", above 0.1 |") == 2
    assert re.search(r"\| mean \| [\d.]+ \(± [\d.]+\) \|", done.stdout)


def test_time_to_loss_of_a_run_that_fails_tells_why(tmp_path):
    done = shell("python", "bench/time_to_loss.py", "--dataset=/nowhere", "--target=1")
    assert done.returncode == 1
    assert re.fullmatch(r"error: the run ended before its first evaluation: error: .*/nowhere.*\n", done.stderr)
    assert sys.executable not in done.stderr
    assert str(ROOT) not in done.stdout
