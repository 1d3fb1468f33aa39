"""Runs that are told to stop: they save, print how to resume, and resume bit for bit."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from conftest import TINY, TORCHRUN, assert_one_line, assert_same_run, events, flags, tiny, until
from gloo import resumed, run

import train
from deskgpt.checkpoint import store
from deskgpt.run.report import Report
from deskgpt.run.stopping import ONE_REQUEST_S, SIGNALS, SignalHandler, signal_handler
from train import main

NEEDS_SIGNALS = pytest.mark.skipif(os.name == "nt", reason="Windows ends a process that it signals")
LONG = {"max_iters": 30, "eval_interval": 5, "lr_decay_iters": 30, "dropout": 0.1}


@pytest.fixture
def listening() -> Iterator[None]:
    """Let this process handle signals as a run does, also those that whoever started the tests ignores."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    signal_handler.install()
    yield
    signal_handler.signal = None
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def full_run(chars, tmp_path_factory) -> Path:
    """Return the folder of a run that nothing has stopped."""
    out_dir = tmp_path_factory.mktemp("full")
    main(tiny(chars, out_dir, **LONG))
    return out_dir


def send(number: int) -> None:
    """Signal this process, and wait until its handler was called."""
    os.kill(os.getpid(), number)
    while signal_handler.signal is None:
        time.sleep(0.001)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Call a function when a step is logged."""
    log_step = Report.step

    def logged(self, at, lr, tokens, **numbers):
        log_step(self, at, lr, tokens, **numbers)
        if at == step:
            action()

    monkeypatch.setattr(Report, "step", logged)


@pytest.mark.slow
@NEEDS_SIGNALS
def test_run_stopped_by_each_signal_resumes_bit_for_bit(chars, full_run, tmp_path, listening, monkeypatch, capfd):
    out_dir = tmp_path / "it's stopped"
    for n, number in enumerate(SIGNALS):
        c = tiny(chars, out_dir, init_from="resume" if n else "scratch", **LONG)
        with monkeypatch.context() as patch:
            at_step(patch, 6 + 6 * n, partial(send, number))
            with pytest.raises(SystemExit) as exit:
                main(c)
        assert exit.value.code == 128 + number
        assert store.load(out_dir).iter_num == 7 + 6 * n
        out, err = capfd.readouterr()
        assert_one_line(err, number.name, "saving")
        assert f"train.py --init_from=resume {shlex.quote(f'--out_dir={out_dir}')}" in out
        signal_handler.install()
    main(tiny(chars, out_dir, init_from="resume", **LONG))
    assert_same_run(full_run, out_dir)


@pytest.mark.slow
@NEEDS_SIGNALS
def test_signal_ends_an_evaluation_and_max_hours_a_run_which_resumes(
    chars, full_run, tmp_path, listening, monkeypatch, capsys
):
    """The resumed run repeats the evaluation."""
    eval_batches = train.eval_batches
    batches = itertools.count(1)

    def signalled(*args):
        for batch in eval_batches(*args):
            if next(batches) == 4 * 3 + 2:  # two of each split and evaluation: in that of step 15
                send(signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(train, "eval_batches", signalled)
        with pytest.raises(SystemExit):
            main(tiny(chars, tmp_path, **LONG))
    assert store.load(tmp_path).iter_num == 15
    assert [e["iter"] for e in events(tmp_path, "eval")] == [0, 5, 10]
    signal_handler.install()
    now = time.perf_counter
    with monkeypatch.context() as patch:
        at_step(patch, 21, lambda: patch.setattr(time, "perf_counter", lambda: now() + 3600))
        main(tiny(chars, tmp_path, init_from="resume", max_hours=1.0, always_save_checkpoint=False, **LONG))
    assert "stopped by max_hours at step 22\n" in capsys.readouterr().out
    main(tiny(chars, tmp_path, init_from="resume", max_hours=1.0, **LONG))
    assert_same_run(full_run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "steps"), [(0.0, [6, 8]), (1e-9, list(range(1, 9)))])
def test_save_minutes_saves_between_evaluations(minutes, steps, chars, tmp_path):
    main(tiny(chars, tmp_path, max_iters=8, eval_interval=6, save_minutes=minutes))
    assert [e["iter"] for e in events(tmp_path, "save")] == steps


def test_second_signal_leaves_at_once_but_an_echo_of_the_first_does_not(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    handler = SignalHandler()
    handler._handle(signal.SIGTERM, None)
    handler._handle(signal.SIGINT, None)  # as systemd and shells of closing terminals send them
    assert handler.signal == signal.SIGTERM
    handler._heard_at -= ONE_REQUEST_S
    with pytest.raises(SystemExit) as exit:
        handler._handle(signal.SIGINT, None)
    assert exit.value.code == 143
    assert_one_line(capfd.readouterr().err.splitlines()[-1], "SIGINT", "leaving at once")


@pytest.mark.slow
@NEEDS_SIGNALS
def test_signal_during_set_up_ends_the_run_at_once(chars, tmp_path, begin):
    terminal = tmp_path / "terminal"
    process = begin(terminal, sys.executable, "train.py", *flags(**TINY, dataset=chars, out_dir=tmp_path / "out"))
    until(lambda: "number of parameters" in terminal.read_text())
    process.terminate()
    assert process.wait() in (-signal.SIGTERM, 0, 128 + signal.SIGTERM)
    assert "Traceback" not in terminal.read_text()


@pytest.mark.slow
@NEEDS_SIGNALS
def test_ranks_stop_at_the_same_step_whichever_of_them_is_hit(chars, tmp_path, begin):
    settings = TINY | LONG | {"gradient_accumulation_steps": 2, "max_iters": 80, "eval_interval": 40}
    run(2, tiny(chars, tmp_path / "full", **settings))
    terminal = tmp_path / "terminal"
    flags_of_run = flags(**settings, dataset=chars, out_dir=tmp_path / "stopped")
    process = begin(terminal, sys.executable, *TORCHRUN[1:], *flags_of_run)
    until(lambda: "iter 20:" in terminal.read_text())
    psutil.Process(process.pid).children()[-1].terminate()
    assert process.wait(60) == 1
    printed = terminal.read_text()
    assert "resume:  torchrun --standalone --nproc_per_node=2 train.py --init" in printed
    assert 'File "train.py"' not in printed
    run(2, resumed(tmp_path / "stopped"))
    assert_same_run(tmp_path / "full", tmp_path / "stopped")
