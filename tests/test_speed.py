"""Programs of bench/ that measure: speed.py and lab.py beside other programs, and qualify.py on a
card.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, TINY, assert_refused, flags, until
from logs import nanogpt_checkout

from bench import lab, qualify, speed
from bench.speed import BenchRun

SMALL = {
    k: v
    for k, v in TINY.items()
    if k not in ("max_iters", "eval_interval", "eval_iters", "warmup_iters")
}


# ---- speed.py ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_settings_and_peers_are_timed_on_the_same_work(tmp_path, script):
    peers = [nanogpt_checkout(tmp_path), "--peer=ours:--n_layer=1", "--grid=batch_size=4,2"]
    done = script(
        "bench/speed.py", *flags(**SMALL), "--start", "--rounds=1", "--vocab_size=65", *peers
    )
    assert done.code == 0, done.err
    rows = {
        line.split("|")[1].strip(): line.split("|")[2:]
        for line in done.out.splitlines()
        if line.startswith("|")
    }
    cells = [f"--batch_size={n} --gradient_accumulation_steps={4 // n}" for n in (4, 2)]
    assert list(rows) == ["", "---", *cells, "nanoGPT", "--n_layer=1"]
    assert [cell.strip() for cell in rows["nanoGPT"][:3]] == ["float32", "no", "64"]
    # By the clock, not as it prints.
    assert float(rows["nanoGPT"][3].split()[0]) == pytest.approx(200, rel=0.2)
    assert rows[cells[1]][2].strip() == "64"  # with twice the accumulation
    assert "1.00 (1.00 to 1.00)" in rows[cells[0]][-2]
    seconds = [float(rows[name][-3].split()[0]) for name in (cells[0], "nanoGPT")]
    # From the command on: one imports torch, the other sleeps for 0.3 s.
    assert seconds[0] > 1 > seconds[1]
    assert seconds[1] > 0.3


def test_what_is_wrong_is_one_line(script):
    wrong = {
        "--peer=nanogpt:/nowhere": "/nowhere",
        "--peer=llamacpp": "llamacpp",
        "--steps=2": "--steps 2",
    }
    wrong |= {
        "--grid=batchsize=4": "batch_size",
        "--grid=batch_size=3": "batch_size=3",
        "--grid=compile": "compile",
    }
    for option, named in wrong.items():
        assert_refused(script("bench/speed.py", *flags(**SMALL), option), named)


def test_figures_of_the_table_are_these():
    start = {
        "flops_per_token": 6e6,
        "peak_flops": 1e12,
        "peak_source": "measured",
        "tokens_per_step": 1000,
    }
    start |= {"dtype": "bfloat16", "compiled": True}
    ours = BenchRun(
        "ours", [], Path(), start=start, first_s=[3.0, 1.0], peak_bytes=[2 * 10**9, 10**9]
    )
    ours.rounds_ms = [[10.0, 12.0, 11.0], [20.0, 22.0, 21.0]]
    peer = BenchRun("peer", [], Path(), start={"compiled": False}, first_s=[3.0, 1.0])
    peer.rounds_ms = [[22.0, 22.0, 22.0], [63.0, 63.0, 63.0]]
    failed = BenchRun("failed", [], Path(), status="out of memory")
    a, b, c = (
        row.strip("| ").split(" | ") for row in speed.table([ours, peer, failed]).splitlines()[2:5]
    )
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
    runs = [BenchRun(code, [sys.executable, "-c", code or lines], tmp_path) for code in reasons]
    speed.in_turns(runs, 2, steps=0)
    assert [x.status for x in runs] == list(reasons.values())
    assert [len(x.rounds_ms) for x in runs] == [2, 0, 0]
    out = capsys.readouterr().out
    assert "    why\n    no such file" in out  # its own output
    assert out.count("failed: no such file") == 1  # it is not tried again


@pytest.mark.slow
def test_what_was_measured_before_ctrl_c_is_printed(tmp_path):
    options = [*flags(**SMALL), nanogpt_checkout(tmp_path), "--vocab_size=65", "--steps=3"]
    command = [sys.executable, "-u", "bench/speed.py", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]  # two more rounds follow
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert [line.split(":")[0] for line in sorted(lines)] == [
        "round 1, deskGPT",
        "round 1, nanoGPT",
    ]
    assert "| nanoGPT | float32 | no | 64 |" in rest


# ---- lab.py --------------------------------------------------------------------------------------


def test_busy_time_and_gaps_are_those_of_the_passes_after_the_first():
    one_pass = [
        (0.0, 100.0, "nvjet_tst_128x256"),
        (103.0, 203.0, "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"),
        (150.0, 190.0, "Memcpy DtoD"),  # while another runs
        (233.0, 333.0, "triton_red_fused_native_layer_norm_1"),
    ]
    kernels = [
        (begin + at, end + at, name)
        for at in (0.0, 1000.0, 1500.0)
        for begin, end, name in one_pass
    ]
    found = lab.profile_of(kernels[::-1], 3)
    assert found.kernels == 4
    assert found.busy_ms == pytest.approx(0.3)
    # The last one between two passes
    assert found.gaps_ms == pytest.approx([0.003, 0.03, (1500 - 1333) / 2000])
    expected = {"attention": 0.1, "matmul": 0.1, "triton": 0.1, "other": 0.04}
    assert found.by_class_ms == pytest.approx(expected)


@pytest.mark.slow
def test_micro_batches_of_both_programs_are_timed_in_one_process(tmp_path, script):
    peer = nanogpt_checkout(tmp_path)
    command = ["bench/lab.py", *flags(**SMALL), "--vocab_size=65", "--rounds=2", "--passes=2"]
    done = script(*command, peer)
    assert done.code == 0, done.err
    for name in ("ours", "nanoGPT"):
        assert qualify.number(done.out, name, "loss") == pytest.approx(math.log(65), rel=0.1)
        alone, queueing, wall = (
            qualify.number(done.out, name, word) or 0 for word in ("alone", "queueing", "wall")
        )
        assert 0 < queueing <= alone
        assert 0 < wall < 10 * alone
        assert qualify.figure(done.out, name, "busy") is None  # a CPU has no profile
    (tmp_path / "model.py").write_text("raise RuntimeError('not today')")
    done = script(*command, peer)
    assert done.code == 1
    assert "nanoGPT: failed: not today" in done.out
    assert qualify.number(done.out, "ours", "wall")
    assert_refused(script(*command, "--peer=ours:--dropout=0.1"), "--peer ours")


# ---- qualify.py ----------------------------------------------------------------------------------


def test_stage_that_is_cut_keeps_its_output_and_ends_its_processes_and_one_that_fails_has_failed(
    tmp_path,
):
    child = "import time; time.sleep(100)"
    popen = f"subprocess.Popen([sys.executable, '-c', {child!r}])"
    code = f"import subprocess, sys; print({popen}.pid, flush=True); {child}"
    assert qualify.run(["-c", code], tmp_path / "a.txt", 2.0) == "cut after 2 s"
    lines = qualify.lines_of(tmp_path / "a.txt")
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


def texts_of(**changed):
    """Return what the stages of a card print, by stage, with other figures of the contestants at
    16x1024.
    """
    found = {
        "ours": {"wall": 27.0, "busy": 24.5, "loss": 10.5},
        "ours + graph": {"wall": 25.0, "loss": 10.5},
    }
    found |= {"nanoGPT": {"wall": 26.0, "busy": 26.0, "loss": 10.6}}
    for key, value in changed.items():
        name, _, word = key.rpartition("_")
        found[name.replace("_", " + ")][word] = value
    lines = [
        f"{name}: " + ", ".join(f"{word} {x}" for word, x in of.items())
        for name, of in found.items()
    ]
    return dict.fromkeys(qualify.stages(qualify.Session(torch.device("cpu"))), "") | {
        "16x1024": "\n".join(lines)
    }


def test_page_reads_the_last_line_that_a_stage_has_printed():
    x = lab.Contestant("ours + graph", lambda: torch.zeros(()), [25.0], [26.0], [0.1])
    text = x.figures()
    x.wall_ms.append(27.0)
    x.profile = lab.Profile(512, 24.5, [0.2, 0.1, 0.0], {"matmul": 16.0})
    text += "\nours: wall 1.00\n" + x.figures() + "\nround 2"
    words = ("wall", "alone", "queueing", "busy", "gaps", "matmul", "kernels")
    found = [qualify.figure(text, "ours + graph", word) for word in words]
    assert found == ["26.00", "26.00", "0.10", "24.50", "0.30", "16.00", "512"]
    assert qualify.figure(x.name + ": busy n/a, gaps n/a", x.name, "busy") is None


def test_figures_stand_beside_what_was_predicted_for_the_card():
    for card, outcomes in {
        "H200": ["2% below", "within", "within"],
        "H100": ["16% below", "7% below", "11% below"],
    }.items():
        table = qualify.comparison(texts_of(), card)
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        walls = {row[1]: row for row in rows if row[0] == "16x1024" and row[2] == "wall"}
        assert [walls[name][-1] for name in ("nanoGPT", "ours", "ours + graph")] == outcomes
        assert walls["ours"][3] == "27.0"
        assert walls["nanoGPT + graph"][3] == "n/a"
    names = set(texts_of())
    assert {p.stage for p in qualify.PREDICTED} | set(qualify.AIMS) <= names


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, "16x1024: without a graph the card waits for the CPU, 2.5 of 27.0 ms."),
        (
            {"ours_busy": 26.4},
            "16x1024: wall less busy is 0.6 ms without a graph: a graph gains nothing here.",
        ),
        ({"ours_busy": 28.0, "ours_wall": 31.0}, "16x1024: busy 28.0 ms, above 27: kernels."),
        ({"ours_busy": 26.5}, "16x1024: kernels: ours take 26.5 ms, nanoGPT's 26.0."),
        ({"ours_busy": "n/a"}, "16x1024: no profile"),
        ({"ours_graph_wall": 20.0}, "16x1024: a graph takes 7.00 of 27.00 ms away."),
        (
            {"ours_graph_wall": 20.0},
            "nanoGPT 0.96 times as fast without a graph, 1.30 with one; the aim is 1.15.",
        ),
        (
            {"ours_graph_loss": 10.500001},
            "16x1024: WRONG: the loss is 10.5 without and 10.500001 with a graph.",
        ),
    ],
)
def test_page_says_which_explanation_holds(changed, holds):
    said = qualify.explanations(texts_of(**changed), "H200")
    assert holds in " ".join(said)
    assert (" busy 28.0" in " ".join(said)) == ("busy 28.0" in holds)
    assert "64x256: not measured." in said


def test_gradients_that_are_not_flash_attentions_fail(monkeypatch, capsys):
    session = qualify.Session(torch.device("cpu"))
    qualify.gradients(session)
    assert "differs most" in capsys.readouterr().out
    results = qualify.loss_and_gradients

    def damaged(model, variant, *batch):
        loss, gradients = results(model, variant, *batch)
        gradients["transformer.h.0.attn.c_attn.weight"][5] = math.nan
        monkeypatch.setattr(qualify, "loss_and_gradients", results)
        return loss, gradients

    monkeypatch.setattr(qualify, "loss_and_gradients", damaged)
    with pytest.raises(ValueError, match=r"attn\.c_attn\.weight differs most, by inf"):
        qualify.gradients(session)


@pytest.mark.slow
def test_later_call_continues_and_the_page_has_all_stages(tmp_path, script):
    ours = ["bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path}"]
    done = script(*ours, "--only", "facts", "right")
    [page] = tmp_path.glob("*/page.md")
    text = page.read_text()
    assert done.code == 0, text
    assert "## facts: passed" in text
    assert "::test_every_variant" in text
    assert "## tests: not run" in text
    done = script(*ours, "--minutes=0")
    assert done.code == 1
    assert "no time was left for gradients, 16x1024" in done.out
    assert page.read_text() == text
