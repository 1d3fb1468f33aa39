"""Programs of bench/ that measure: speed.py beside other programs, and qualify.py on a card."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, TINY, assert_refused, flags, until

from bench import qualify, speed
from bench.speed import Contestant

SMALL = {k: v for k, v in TINY.items() if k not in ("max_iters", "eval_interval", "eval_iters", "warmup_iters")}
# Stands for a checkout of nanoGPT, which cannot be had offline: takes its settings and prints its lines.
NANOGPT = """
import os, sys, time
assert "--device=cpu" in sys.argv and "--compile=False" in sys.argv and "--n_embd=16" in sys.argv, sys.argv
data = next(a for a in sys.argv if a.startswith("--dataset=")).split("=")[1]
assert os.path.exists(os.path.join(data, "meta.pkl")) and os.getcwd() == os.path.dirname(os.path.abspath(__file__))
time.sleep(0.3)
for i in range(1000):
    print(f"iter {i}: loss 4.2000, time 0.50ms, mfu -100.00%")  # as if its clock stopped before the step has ended
    time.sleep(0.2)
"""


# ---- speed.py ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_settings_and_peers_are_timed_on_the_same_work(tmp_path, script):
    (tmp_path / "train.py").write_text(NANOGPT)
    peers = [f"--peer=nanogpt:{tmp_path}", "--peer=ours:--n_layer=1", "--grid=batch_size=4,2"]
    done = script("bench/speed.py", *flags(**SMALL), "--start", "--rounds=1", "--vocab_size=65", *peers)
    assert done.code == 0, done.err
    rows = {line.split("|")[1].strip(): line.split("|")[2:] for line in done.out.splitlines() if line.startswith("|")}
    cells = [f"--batch_size={n} --gradient_accumulation_steps={4 // n}" for n in (4, 2)]
    assert list(rows) == ["", "---", *cells, "nanoGPT", "--n_layer=1"]
    assert [cell.strip() for cell in rows["nanoGPT"][:3]] == ["float32", "no", "64"]
    assert float(rows["nanoGPT"][3].split()[0]) == pytest.approx(200, rel=0.2)  # by the clock, not as it prints
    assert rows[cells[1]][2].strip() == "64"  # with twice the accumulation
    assert "1.00 (1.00 to 1.00)" in rows[cells[0]][-2]
    seconds = [float(rows[name][-3].split()[0]) for name in (cells[0], "nanoGPT")]
    assert seconds[0] > 1 > seconds[1]  # from the command on: one imports torch, the other sleeps for 0.3 s
    assert seconds[1] > 0.3


def test_what_is_wrong_is_one_line(script):
    wrong = {"--peer=nanogpt:/nowhere": "/nowhere", "--peer=llamacpp": "llamacpp", "--steps=2": "--steps 2"}
    wrong |= {"--grid=batchsize=4": "batch_size", "--grid=batch_size=3": "batch_size=3", "--grid=compile": "compile"}
    for option, named in wrong.items():
        assert_refused(script("bench/speed.py", *flags(**SMALL), option), named)


def test_figures_of_the_table_are_these():
    start = {"flops_per_token": 6e6, "peak_flops": 1e12, "peak_source": "measured", "tokens_per_step": 1000}
    start |= {"dtype": "bfloat16", "compiled": True}
    ours = Contestant("ours", [], Path(), start=start, first_s=[3.0, 1.0], peak_bytes=[2 * 10**9, 10**9])
    ours.rounds_ms = [[10.0, 12.0, 11.0], [20.0, 22.0, 21.0]]
    peer = Contestant("peer", [], Path(), start={"compiled": False}, first_s=[3.0, 1.0])
    peer.rounds_ms = [[22.0, 22.0, 22.0], [63.0, 63.0, 63.0]]
    failed = Contestant("failed", [], Path(), status="out of memory")
    a, b, c = (row.strip("| ").split(" | ") for row in speed.table([ours, peer, failed]).splitlines()[2:5])
    assert a[1:5] == ["bfloat16", "yes", "1,000", "16 (10, 22)"]
    assert a[5:8] == ["62,500 (47,619 to 90,909)", "37.5%", "2.00 GB"]  # 6e9 FLOPs in 16 ms
    assert a[8:] == ["2.00 s (1.00 to 3.00)", "1.00 (1.00 to 1.00)"]
    assert b[1:5] == ["bfloat16", "no", "1,000", "42.5 (22, 63)"]
    assert b[7:] == ["n/a", "2.00 s (1.00 to 3.00)", "2.50 (2.00 to 3.00)"]
    assert c[:2] == ["failed", "out of memory"]


def test_run_that_fails_says_why_and_the_others_continue(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed, "ROUND_S", 0.0)
    lines = "for i in range(9): print(f'iter {i}: loss 4.2, time 10.00ms', flush=True)\n"
    reasons = {"": "", "print('why'); print('no such file')": "failed: no such file"}
    reasons["raise SystemExit(3)"] = "failed: exit status 3"
    runs = [Contestant(code, [sys.executable, "-c", code or lines], tmp_path) for code in reasons]
    speed.in_turns(runs, 2, steps=0)
    assert [x.status for x in runs] == list(reasons.values())
    assert [len(x.rounds_ms) for x in runs] == [2, 0, 0]
    out = capsys.readouterr().out
    assert "    why\n    no such file" in out  # its own output
    assert out.count("failed: no such file") == 1  # it is not tried again


@pytest.mark.slow
def test_what_was_measured_before_ctrl_c_is_printed(tmp_path):
    (tmp_path / "train.py").write_text(NANOGPT)
    options = [*flags(**SMALL), f"--peer=nanogpt:{tmp_path}", "--vocab_size=65", "--steps=3"]
    command = [sys.executable, "-u", "bench/speed.py", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]  # two more rounds follow
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert [line.split(":")[0] for line in sorted(lines)] == ["round 1, deskGPT", "round 1, nanoGPT"]
    assert "| nanoGPT | float32 | no | 64 |" in rest


# ---- qualify.py ----------------------------------------------------------------------------------------------


def test_stage_that_is_cut_keeps_its_output_and_ends_its_processes_and_one_that_fails_has_failed(tmp_path):
    child = "import time; time.sleep(100)"
    popen = f"subprocess.Popen([sys.executable, '-c', {child!r}])"
    code = f"import subprocess, sys; print({popen}.pid, flush=True); {child}"
    assert qualify.run(["-c", code], tmp_path / "a.txt", 2.0) == "cut after 2 s"
    lines = qualify.lines_of(tmp_path / "a.txt")
    assert "KeyboardInterrupt" in lines  # as pytest gets it, which then prints what has failed
    assert lines[-1] == "cut after 2 s"
    pid = int(lines[0])
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert qualify.run(["-c", "raise SystemExit(3)"], tmp_path / "b.txt", 60.0) == "failed with exit status 3"


@pytest.mark.slow
def test_later_call_continues_and_the_page_has_all_stages(tmp_path, script):
    ours = ["bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path}"]
    done = script(*ours, "--only", "facts", "check")
    [page] = tmp_path.glob("*/page.md")
    text = page.read_text()
    assert done.code == 0, text
    assert "## facts: passed" in text
    assert "8 passed" in text  # four dtypes, two models
    assert "## tests: not run" in text
    done = script(*ours, "--minutes=0")
    assert done.code == 1
    assert "no time was left for first, speed" in done.out
    assert page.read_text() == text
