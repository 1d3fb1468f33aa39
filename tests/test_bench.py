"""The benchmarks end to end on tiny models, and the arithmetic of their tables; what they find is not judged here."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY, assert_one_line, flags, tiny

from bench import output, speed, timing

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


@pytest.mark.slow
def test_speed_times_the_peers_on_the_same_work_and_saves_every_step(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(NANOGPT)
    monkeypatch.setattr(output, "RESULTS", tmp_path / "results")
    peers = [f"--peer=nanogpt:{tmp_path}", "--peer=ours:--n_layer=1"]
    own = ["--steps=4", "--rounds=1", "--vocab_size=65", *peers, "--save=speed-1.5b"]
    monkeypatch.setattr(sys, "argv", ["speed.py", *flags(**SMALL), *own])
    speed.main()
    printed = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line for line in printed.splitlines() if line.startswith("|")}
    assert list(rows) == ["", "---", "deskGPT", "nanoGPT", "--n_layer=1"]
    assert re.search(
        r"\| deskGPT \| float32 \| no \| [\d.]+ \([\d.]+, [\d.]+\) \| [\d,]+ \| [\d.]+ \| [\d.]+% \| [\d.]+ s \|",
        printed,
    )
    assert rows["nanoGPT"].split("|")[2:5] == [" float32 ", " no ", " 21 (20, 21) "]
    assert "1.00 (1.00 to 1.00)" in rows["deskGPT"]
    assert "MFU refers to" in printed
    page, figures = sorted((tmp_path / "results").iterdir(), key=lambda path: path.suffix, reverse=True)
    assert [path.name[11:] for path in (page, figures)] == ["speed-1.5b.md", "speed-1.5b.json"]  # a dot in the name
    assert rows["deskGPT"] in page.read_text()
    assert [len(r) for r in json.loads(figures.read_text())["raw"][0]["rounds_ms"]] == [3]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_signal_that_ends_a_benchmark_ends_the_run_that_it_times(tmp_path, script):
    code = "import os, signal, time; print(os.getpid(), file=open('pid', 'w'), flush=True); "
    code += "os.kill(os.getppid(), signal.SIGTERM); time.sleep(100)"
    (tmp_path / "train.py").write_text(code)
    done = script("bench/speed.py", *flags(**SMALL), "--steps=3", "--vocab_size=65", f"--peer=nanogpt:{tmp_path}")
    assert done.code == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--peer=nanogpt:/nowhere", ["/nowhere", "nanoGPT"]),
        ("--peer=llamacpp", ["llamacpp", "nanogpt:PATH", "ours:", "checkout:PATH"]),
        ("--peer=nanogpt:. --norm=rms", ["nanogpt:.", "norm=rms", "leave out the peer"]),
        ("--peer=nanogpt:. --optimizer=muon", ["optimizer=muon", "--optimizer=adamw"]),
        ("--steps=2", ["--steps 2", "3 steps"]),
        ("--save=a/b", ["a/b", "letters"]),
    ],
)
def test_speed_says_what_is_wrong(option, named, script):
    done = script("bench/speed.py", *flags(**SMALL), *option.split())
    assert done.code in (1, 2)
    assert_one_line(done.err, *named)


def test_both_gelus_are_the_same_work(tmp_path):
    for gelu in ("gelu", "gelu_tanh"):
        assert len(speed.contestants(tiny(tmp_path, tmp_path, activation=gelu), [], [f"nanogpt:{ROOT}"], tmp_path)) == 2


def test_a_run_that_ends_says_why(tmp_path):
    for code, reason in (
        ("print('error: no such file')", "failed: no such file"),
        ("print('error: out of memory: batch_size=4 does not fit')", "out of memory"),
        ("import os; os.kill(os.getpid(), 9)", "out of memory, killed by the system"),
        ("raise SystemExit(3)", "failed: exit status 3"),
    ):
        first = "print('iter 0: loss 4.2, time 20.00ms', flush=True)\n"
        x = timing.Contestant("x", [sys.executable, "-c", first + code], tmp_path)
        with pytest.raises(timing.Failed) as e:
            timing.run(x, 2)
        assert e.value.reason == reason
        assert_one_line(e.value, "x ended after 1 steps")
        assert not x.rounds_ms


def test_a_run_that_the_system_killed_is_known_where_python_has_no_sigkill(monkeypatch):
    monkeypatch.delattr(signal, "SIGKILL", raising=False)  # as on Windows
    assert timing.failure("ours", timing.Seen(), -9).reason == "out of memory, killed by the system"
    assert timing.failure("ours", timing.Seen(), 1).reason == "failed: exit status 1"


def test_a_round_by_the_clock_takes_at_least_three_steps(tmp_path):
    code = "for i in range(99):\n    print(f'iter {i}: loss 4.2, time 400.00ms', flush=True)"
    x = timing.Contestant("x", [sys.executable, "-c", code], tmp_path)
    timing.run(x, 0, 0.1)
    timing.run(x, 0, 4.0)
    timing.run(x, 5)
    assert [len(r) for r in x.rounds_ms] == [2, 8, 4]
    assert x.first_s == [0.4, 0.4, 0.4]


def test_figures_of_the_speed_table_are_these():
    ours = speed.Contestant(
        "ours", [], Path(), [[10.0, 12.0, 11.0], [20.0, 22.0, 21.0]], [3.0, 1.0], [2 * 10**9, 10**9]
    )
    ours.start = {"flops_per_token": 6e6, "peak_flops": 1e12, "dtype": "bfloat16", "compiled": True}
    ours.data_waits = [0.0, 0.1]
    peer = speed.Contestant("peer", [], Path(), [[22.0, 22.0, 22.0], [63.0, 63.0, 63.0]], [0.5, 0.5], [10**9, 10**9])
    peer.start = {"compiled": False}
    a, b = speed.table([ours, peer], tokens_per_step=1000)
    assert (a["ms"], a["p10"], a["p90"]) == (16.0, 10.0, 22.0)
    assert a["tokens_per_s"] == pytest.approx(62_500)
    assert a["tflops"] == pytest.approx(0.375)  # 6e9 FLOPs in 16 ms
    assert a["mfu"] == pytest.approx(0.375)
    assert (a["first_s"], a["memory_gb"], a["data_wait"]) == (1.0, 2.0, pytest.approx(0.05))
    assert (b["ms"], b["data_wait"]) == (42.5, None)
    assert (a["dtype"], b["dtype"], b["compiled"]) == ("bfloat16", "bfloat16", False)
    assert (b["ours_faster"], b["ours_faster_least"], b["ours_faster_most"]) == (2.5, 2.0, 3.0)


@pytest.mark.slow
def test_profile_shows_the_operations_of_our_steps(script):
    done = script("bench/speed.py", *flags(**SMALL), "--vocab_size=65", "--profile", "--steps=2")
    assert done.code == 0, done.err
    [adamw] = [line for line in done.out.splitlines() if "Optimizer.step#AdamW.step" in line]
    assert adamw.split()[-1] == "2"  # calls


def test_check_of_machines_fails_what_is_wrong_and_not_refused():
    from bench.check_machines import is_bad, verdict

    compiled: dict[str, Any] = {"compiled": True, "compiler": "g++ 12"}
    wrong, no_compiler = "gradients disagree with plain float32", "compile=auto: NOT compiled, so steps are slower"
    assert not is_bad(compiled | {"right": True})
    assert not is_bad(compiled | {"refused": wrong})
    assert not is_bad(compiled | {"refused": no_compiler, "compiler": None})
    bad: list[dict[str, Any]] = [
        compiled | {"right": False},
        compiled | {"refused": no_compiler},
        {"failed": "exit status -4"},
    ]
    for line in (*bad, {"compiled": False, "refused": wrong}):
        assert is_bad(line), verdict(line)


@pytest.mark.slow
def test_check_of_machines_finds_a_kernel_that_is_wrong(monkeypatch):
    from bench import check_machines

    model = check_machines.GPT(check_machines.GPTConfig(vocab_size=65, **check_machines.SIZES, n_embd=32))
    right = check_machines.check_form(model, "GPT-2", check_machines.Variant("float32", attention="explicit"))
    assert right["right"]
    # It passes the check of a run and is wrong afterwards: the steps show it.
    monkeypatch.setattr("deskgpt.compute.checks.compare", lambda *_: None)
    forward_backward = check_machines.Runner.forward_backward

    def planted(self, *args):
        loss = forward_backward(self, *args)
        if self.form.attention == "explicit":
            self.parameters[0].grad *= 3
        return loss

    monkeypatch.setattr(check_machines.Runner, "forward_backward", planted)
    wrong = check_machines.check_form(model, "GPT-2", check_machines.Variant("float32", attention="explicit"))
    assert not wrong["right"]
