"""Programs of bench/ that measure: speed.py beside other programs, qualify.py on a card, and what
check_cards.py counts of cards that are not here.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT, TINY, assert_refused, flags, slow, until
from logs import nanogpt_checkout
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import check_cards, qualify, speed
from bench.pretend_card import rows_of
from bench.speed import BenchRun

SMALL = TINY | {"dataset": "tiny_char"}  # by its name, a vocabulary of 65


# ---- speed.py ------------------------------------------------------------------------------------


@slow
def test_settings_and_peers_are_timed_on_the_same_work_until_ctrl_c(tmp_path):
    options = [*flags(**SMALL), "--seconds=0", "--grid=batch_size=4,2", "--peer=ours:--n_layer=1"]
    command = [sys.executable, "-u", "bench/speed.py", *options, nanogpt_checkout(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline().startswith("round 1, ")  # two more rounds follow
        process.send_signal(signal.SIGINT)
        out = process.stdout.read()
    assert process.returncode == 130
    lines = [line.split("|") for line in out.splitlines() if line.startswith("|")]
    rows = {line[1].strip(): line[2:] for line in lines}
    cells = [f"--batch_size={n} --gradient_accumulation_steps={4 // n}" for n in (4, 2)]
    assert list(rows) == ["", "---", *cells, "--n_layer=1", "nanoGPT"]
    assert [cell.strip() for cell in rows["nanoGPT"][:3]] == ["float32", "False", "64"]
    # By the clock, not as it prints.
    assert float(rows["nanoGPT"][3].split()[0]) == pytest.approx(200, rel=0.2)
    ours_s, nanogpt_s = (float(rows[name][-3].split()[0]) for name in (cells[0], "nanoGPT"))
    assert ours_s > 1 > nanogpt_s > 0.3  # one imports torch, the other sleeps for 0.3 s


@pytest.mark.parametrize("peer", ["nanogpt:/nowhere", "llamacpp"])
def test_peer_that_is_none_is_refused_in_one_line(peer, script):
    assert_refused(script("bench/speed.py", *flags(**SMALL), f"--peer={peer}"), peer)


def test_figures_of_the_table_are_these():
    start: dict[str, Any] = {"flops_per_token": 6e6, "peak_flops": 1e12, "tokens_per_step": 1000}
    start |= {"dtype": "bfloat16", "compiled": True}
    ours = BenchRun("ours", [], Path(), start=start, first_s=[3.0, 1.0])
    ours.rounds_ms = [[10.0, 12.0, 11.0], [20.0, 22.0, 21.0]]
    other = {"compiled": False, "tokens_per_step": 2000}
    peer = BenchRun("peer", [], Path(), start=other, first_s=[3.0, 1.0])
    peer.rounds_ms = [[44.0] * 3, [126.0] * 3]
    failed = BenchRun("failed", [], Path(), status="out of memory")
    at = "2.00 s (1.00 to 3.00)"
    # 6e9 FLOPs in 16 ms, and 12e9 in 85
    assert speed.table([ours, peer, failed]).splitlines()[2:] == [
        f"| ours | bfloat16 | True | 1,000 | 16 | 62,500 | 37.5% | {at} | 1.00 (1.00 to 1.00) |",
        f"| peer | bfloat16 | False | 2,000 | 85 | 23,529 | 14.1% | {at} | 2.50 (2.00 to 3.00) |",
        "| failed | out of memory |  |  |  |  |  |  |  |",
    ]


def test_run_that_fails_says_why_and_the_others_continue(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed, "LEAST_STEPS", 60)
    lines = "for i in range(99): print(f'iter {i}: loss 4.2, time 10.00ms', flush=True)\n"
    why = "failed with exit status 3: no such file"
    reasons = {"": "", "print('why'); print('no such file'); raise SystemExit(3)": why}
    runs = [BenchRun(code, [sys.executable, "-c", code or lines], tmp_path) for code in reasons]
    speed.in_turns(runs, 2, seconds=0.0)
    assert [x.status for x in runs] == list(reasons.values())
    assert [[*map(len, x.rounds_ms)] for x in runs] == [[49, 49], []]  # without the first ten
    out = capsys.readouterr().out
    assert "    why\n    no such file" in out  # its own output
    assert out.count(why) == 1  # it is not tried again


def test_each_batch_size_of_a_grid_keeps_the_sequences_of_a_step():
    config = speed.train.TrainConfig(batch_size=4, gradient_accumulation_steps=3)
    for run in speed.grid_of("batch_size=2,3,6", config, [], Path()):
        batch_size, steps = map(int, re.findall(r"\d+", run.name))
        assert batch_size * steps == 12


def test_runs_take_turns_in_both_orders(monkeypatch):
    runs = [BenchRun(name, [], Path()) for name in "ab"]
    order = []

    def run(x, seconds):
        order.append(x.name)
        x.rounds_ms.append([1.0])
        x.first_s.append(1.0)

    monkeypatch.setattr(speed, "run", run)
    speed.in_turns(runs, 3, 0.0)
    assert "".join(order) == "abbaab"


# ---- qualify.py ----------------------------------------------------------------------------------


@slow
def test_stage_that_is_cut_keeps_its_output_and_ends_its_processes_and_one_that_fails_has_failed(
    tmp_path,
):
    child = "import time; time.sleep(100)"
    popen = f"subprocess.Popen([sys.executable, '-c', {child!r}])"
    code = f"import subprocess, sys; print({popen}.pid, flush=True); {child}"
    assert qualify.run(["-c", code], tmp_path / "a.txt", 2.0) == "cut after 2 s"
    lines = (tmp_path / "a.txt").read_text().splitlines()
    assert "KeyboardInterrupt" in lines  # as pytest gets it, which then prints what has failed
    assert lines[-1] == "cut after 2 s"
    pid = int(lines[0])
    until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )
    assert (
        qualify.run(["-c", "raise SystemExit(3)"], tmp_path / "b.txt", 60.0)
        == "failed with exit status 3"
    )


def test_page_has_what_a_stage_printed_last_beside_what_was_predicted(tmp_path):
    ours = qualify.Contestant("ours", torch.Tensor, [25.0, 27.0, 29.0], 24.5)
    text = f"ours: bfloat16, compiled, loss 10.5\nours: wall 25\nhours: wall 1\n{ours.figures()}\n"
    files = {name: tmp_path / name for name, *_ in rows_of("stages.txt")}
    files["16x1024"].write_text(text + "ours: wall 1.00x\nround 2\nours + graph: wall 20\npassed\n")
    page = qualify.page_of(files, "a card")
    for row in (
        "16x1024 | ours | wall | 27 | 25.0 to 30.0 | 29.0 to 33.0",
        "16x1024 | ours | busy | 24.5 | 24.5 to 26.0 | 28.0 to 30.0",
        "16x1024 | ours + graph | gaps | n/a | 0.3 to 0.6 | 0.3 to 0.6",
        "16x1024 | ours + graph | wall | 20 | 24.0 to 26.5 | 28.0 to 30.5",
    ):
        assert f"| {row} |\n" in page


# ---- check_cards.py ------------------------------------------------------------------------------


def test_launches_and_bytes_alive_are_counted_and_a_view_is_neither():
    with FakeTensorMode(), check_cards.Work() as work:
        a = torch.empty(8, 16, device="cuda")
        product = a @ a.T
        assert (work.launches, work.alive) == (1, 4 * (8 * 16 + 8 * 8))
        del product
    assert (work.alive, work.peak) == (4 * 8 * 16, 4 * (8 * 16 + 8 * 8))
