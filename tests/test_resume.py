"""Runs that end, are stopped or killed, and resume bit for bit; what may change; nanoGPT's runs."""

import itertools
import os
import pickle
import re
import shlex
import shutil
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import (
    CUDA,
    POSIX,
    TINY,
    assert_equal,
    assert_one_line,
    assert_same_run,
    contents,
    logged,
    raises_one_line,
    run_tiny,
    slow,
    tiny,
)
from gloo import forked, in_forks, resumed, run
from tiny_models import MODERN_SETTINGS
from torch import nn

import model
import train
from data.batches import Loader, Split
from deskgpt.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from deskgpt.compute import ComputeMode
from deskgpt.device import code_digest
from deskgpt.distributed import ALONE, DistContext
from deskgpt.logger import RunLogger
from deskgpt.resume import Start, choose_compute_and_batch, resumed_settings
from deskgpt.stopping import ONE_REQUEST_S, SIGNALS, StopConditions, signal_handler
from model import Block
from train import TrainConfig, main

LONG = {"max_iters": 60, "eval_interval": 5, "lr_decay_iters": 60, "dropout": 0.1}

RUNS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.3},
    "float16": {"dtype": "float16"},
    "muon": MODERN_SETTINGS | {"optimizer": "muon", "lr_schedule": "linear", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[slow] * (n != "dropout")) for n in RUNS])
def test_resumed_run_is_bit_identical_to_one_that_was_not_interrupted(chars, tmp_path, name):
    """Computing activations again, in one half, changes no bit."""
    settings = RUNS[name] | {"lr_decay_iters": 6}
    run_tiny(chars, tmp_path / "full", **settings)
    run_tiny(chars, tmp_path / "halves", max_iters=3, **settings)
    run_tiny(
        chars, tmp_path / "halves", init_from="resume", activation_checkpoint="full", **settings
    )
    assert_same_run(tmp_path / "full", tmp_path / "halves")
    assert logged(tmp_path / "halves", "iter") == list(range(6))
    one = vars(load_checkpoint(tmp_path / "full"))["progress"]
    other = vars(load_checkpoint(tmp_path / "halves"))["progress"]
    assert_equal(one, other)
    assert one["losses"] == logged(tmp_path / "full", "iter", "loss")


class Passes(nn.Module):
    """Counts in its extra state, and draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.n = 0
        self.generator = torch.Generator().manual_seed(1)

    def get_extra_state(self):
        return self.n

    def set_extra_state(self, state):
        self.n = state

    def forward(self, x):
        self.n += 1
        return x / self.n * torch.rand((), generator=self.generator)


class ChangedBlock(Block):
    """A block as users change it, also by a number of a tensor and a mask of -inf."""

    def __init__(self, config):
        super().__init__(config)
        self.passes = Passes()
        self.rate = torch.linspace(0, 1, 3)[1].item()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf))
        self.calls = torch.zeros(())

    def forward(self, x, context):
        self.calls += 1
        y = super().forward(x, context)
        return y + self.rate * self.passes(x) if self.training else y


def test_changed_model_and_loop_resume_bit_for_bit_and_what_is_lost_is_said(
    chars, tmp_path, monkeypatch, capsys
):
    drawn = []
    step_of = Loader.step
    restore = train.restore
    parts = [nn.Linear(1, 1) for _ in range(6)]  # two that main registers, of each run
    unused = iter(parts)

    def restored(*args, **options):
        args[1].register_state("early", next(unused))
        restore(*args, **options)
        args[1].register_state("late", next(unused))

    def step(self, number):
        drawn.append(float(torch.rand(())))  # as main may draw before the first micro-batch
        return step_of(self, number)

    def rate(schedule, step):
        return np.interp(step, [0, 6], [0.01, 0.001])  # a number of NumPy

    monkeypatch.setattr(Loader, "step", step)
    monkeypatch.setattr(train, "restore", restored)
    monkeypatch.setattr(model, "Block", ChangedBlock)
    monkeypatch.setattr(train, "learning_rate", rate)
    run_tiny(chars, tmp_path / "full")
    run_tiny(chars, tmp_path / "halves", max_iters=3)
    main(resumed(tmp_path / "halves", max_iters=6))
    assert_same_run(tmp_path / "full", tmp_path / "halves")
    assert drawn[:6] == drawn[6:]
    for before, after in (parts[2::2], parts[3::2]):
        assert torch.equal(before.weight, after.weight)
    [lost] = re.findall("^changed: attributes of the model .*", capsys.readouterr().out, re.M)
    assert_one_line(lost, "'transformer.h.0.calls, transformer.h.1.calls'", "buffers")


def test_rows_and_tokens_of_a_run_are_counted_also_with_another_batch(chars, tmp_path, monkeypatch):
    rows = set()
    offsets = Split.sequence_offsets

    def noted(self, numbers):
        rows.update(numbers)
        return offsets(self, numbers)

    run_tiny(chars, tmp_path, max_iters=3, lr_decay_iters=9)
    monkeypatch.setattr(Split, "sequence_offsets", noted)
    main(resumed(tmp_path, batch_size=8, resume_changed=True, max_iters=6))
    assert {*range(3 * 4, 3 * 4 + 3 * 8)} <= rows
    assert min(rows) == 3 * 4
    assert [n / 16 for n in logged(tmp_path, "eval", "tokens")] == [0, 12, 12, 36]
    assert [n / 16 for n in logged(tmp_path, "iter", "tokens")] == [4, 8, 12, 20, 28, 36]


# ---- stopped and killed runs ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_run(chars, tmp_path_factory):
    """Return the folder of a run that nothing has stopped."""
    out_dir = tmp_path_factory.mktemp("full")
    run_tiny(chars, out_dir, **LONG)
    return out_dir


def train_until_stopped(c, prepare):
    """Train as train.py does, which handles signals, after a call that sees to it that the run is
    stopped.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # whoever started the tests may ignore some
    signal_handler.install()
    prepare()
    main(c)


def stopped(c, prepare):
    """Do so in a fork. Return its exit status."""
    (status,) = in_forks(partial(train_until_stopped, c, prepare))
    return status


def at_step(step, action):
    """Call a function when a step is logged."""
    log_step = RunLogger.step

    def logged(self, at, tokens, **numbers):
        log_step(self, at, tokens, **numbers)
        if at == step:
            action()

    setattr(RunLogger, "step", logged)  # noqa: B010


def send(number):
    """Signal this process, and wait until its handler was called."""
    os.kill(os.getpid(), number)
    while signal_handler.signal is None:
        time.sleep(0.001)


@slow
@POSIX
def test_run_stopped_by_each_signal_and_killed_resumes_bit_for_bit(
    chars, full_run, tmp_path, capfd
):
    out_dir = tmp_path / "it's stopped"
    for n, number in enumerate(SIGNALS):
        c = tiny(chars, out_dir, init_from="resume" if n else "scratch", **LONG)
        assert stopped(c, partial(at_step, 6 + 6 * n, partial(send, number))) == 128 + number
        assert load_checkpoint(out_dir).iter_num == 7 + 6 * n
        out, err = capfd.readouterr()
        assert_one_line(err, number.name, "saving")
        words = f"train.py --init_from=resume {shlex.quote(f'--out_dir={out_dir}')}"
        assert words in out.replace("\\\n    ", "")
    c = tiny(chars, out_dir, init_from="resume", **LONG)
    assert stopped(c, partial(at_step, 43, partial(send, signal.SIGKILL))) == -signal.SIGKILL
    assert 30 < load_checkpoint(out_dir).iter_num < 43
    main(c)
    assert_same_run(full_run, out_dir)


@slow
@POSIX
def test_signal_ends_an_evaluation_and_max_hours_a_run_which_resumes(
    chars, full_run, tmp_path, capfd
):
    """The resumed run repeats the evaluation."""
    evaluate = train.evaluate
    calls = itertools.count(1)

    def signalled(*args):
        if next(calls) == 2 * 3 + 1:  # two splits each: in that of step 15
            send(signal.SIGTERM)
        return evaluate(*args)

    stopped(tiny(chars, tmp_path, **LONG), lambda: setattr(train, "evaluate", signalled))
    assert load_checkpoint(tmp_path).iter_num == 15
    assert logged(tmp_path, "eval") == [0, 5, 10]
    now = time.perf_counter
    an_hour_later = partial(setattr, time, "perf_counter", lambda: now() + 3600)
    c = tiny(chars, tmp_path, init_from="resume", max_hours=1.0, **LONG)
    assert stopped(c, partial(at_step, 21, an_hour_later)) == 0
    assert "stopped by max_hours at step 22\n" in capfd.readouterr().out
    main(c)
    assert_same_run(full_run, tmp_path)


def test_second_signal_leaves_at_once_but_an_echo_of_the_first_does_not(monkeypatch, capfd):
    """With the status of the first, as a run that ends after its step."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(signal_handler, "signal", None)
    stops = StopConditions(TrainConfig(), ALONE)
    again = partial(signal_handler._handle, signal.SIGINT, None)
    signal_handler._handle(signal.SIGTERM, None)
    again()  # as systemd and shells of closing terminals send them
    signal_handler._heard_at -= ONE_REQUEST_S
    assert stops.note_signal()
    for leave in (stops.exit, again):
        with pytest.raises(SystemExit) as exit:
            leave()
        assert exit.value.code == 143
    assert_one_line(capfd.readouterr().err.splitlines()[-1], "SIGINT", "leaving at once")


@slow
@POSIX
def test_ranks_stop_at_the_same_step_whichever_of_them_is_hit(chars, tmp_path, capfd):
    settings = LONG | {"gradient_accumulation_steps": 2, "max_iters": 80, "eval_interval": 40}
    run(2, tiny(chars, tmp_path / "full", **settings))

    def work(rank):
        hit_at = 20 if rank == 1 else -1
        c = tiny(chars, tmp_path / "stopped", **settings)
        train_until_stopped(c, partial(at_step, hit_at, partial(send, signal.SIGTERM)))

    assert forked(2, work, failing=2) == [143, 143]
    out, err = capfd.readouterr()
    assert "resume: torchrun --standalone --nproc_per_node=2 train.py --init" in out
    assert "Traceback" not in err
    run(2, resumed(tmp_path / "stopped"))
    assert_same_run(tmp_path / "full", tmp_path / "stopped")


# ---- what has changed ----------------------------------------------------------------------------


def write_random(folder: Path, train: int = 0, val: int = 0) -> Path:
    """Write a data folder of random tokens from two seeds, without meta.json, as in nanoGPT."""
    folder.mkdir(exist_ok=True)
    chars = {i: chr(i + 40) for i in range(64)}
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64, "itos": chars}))
    for split, seed in (("train", train), ("val", val)):
        np.random.default_rng(seed).integers(0, 64, 4000).astype(np.uint16).tofile(
            folder / f"{split}.bin"
        )
    return folder


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Return a folder with data/, and with out/, which holds the first half of a run."""
    folder = tmp_path_factory.mktemp("half")
    run_tiny(
        write_random(folder / "data"), folder / "out", max_iters=4, lr_decay_iters=6, dropout=0.1
    )
    return folder


@pytest.fixture
def out(half, tmp_path):
    """Return a copy of the first half's folder, to resume in."""
    return Path(shutil.copytree(half / "out", tmp_path / "out"))


def test_settings_override_the_checkpoints_except_the_models_size_in_a_config_file(out, tmp_path):
    """As in nanoGPT."""
    (tmp_path / "config.py").write_text("n_layer = 5\nbias = True\neval_interval = 5\n")
    argv = [str(tmp_path / "config.py"), f"--out_dir={out}", "--learning_rate=1e-4"]
    found = resumed_settings(TrainConfig, argv, str(out))
    expected = {"n_layer": 2, "bias": False, "eval_interval": 5, "max_iters": 4}
    assert found.items() >= (expected | {"learning_rate": 1e-4}).items()


def test_untrusted_checkpoint_sends_no_data_to_another_machine(out, capfd):
    saved = load_checkpoint(out)

    def settings_of(*argv, **settings):
        save_checkpoint(replace(saved, config=saved.config | settings), out, best=False)
        return resumed_settings(TrainConfig, list(argv), str(out))

    assert settings_of(wandb_log=True)["wandb_log"] is False
    assert_one_line(capfd.readouterr().err, out, "--wandb_log=")
    assert settings_of("--wandb_log=True", wandb_log=True)["wandb_log"] is True
    with raises_one_line("host", out, "--dataset="):
        settings_of(dataset=r"\\host\share")
    settings_of("--dataset=//host/share", dataset=r"\\host\share")


def test_another_experiment_is_refused_and_changes_no_file(half, tmp_path):
    out = half / "out"
    before = contents(out)
    other = write_random(tmp_path / "other", train=1, val=2)
    changes: dict[str, Any] = {  # the new value, and what the error names
        "batch_size": (8, "sequences per step: 4 before, 8 now"),
        "seed": (1, "seed: 1337 before, 1 now"),
        "eval_iters": (3, "windows per evaluation: 8 before, 12 now"),
        "lr_decay_iters": (7, "learning rate at step 3", "lr_decay_iters"),
        "learning_rate": (1e-3, "learning rate at step 0", "learning_rate"),
        "dataset": (other, "train data, ", "val data, "),
    }
    for name, (value, *named) in changes.items():
        named += ["another experiment", out, "--resume_changed=True", f"--init_from={out}"]
        with raises_one_line(*named):
            main(resumed(out, **{name: value}))
    assert contents(out) == before


def test_best_losses_of_other_val_data_are_not_compared(out, tmp_path, capsys):
    best = (out / "ckpt_best.pt").read_bytes()
    # Which the other data never has
    save_checkpoint(replace(load_checkpoint(out), best_val_loss=0.5), out, best=False)
    other = write_random(tmp_path / "other", val=3)
    main(resumed(out, dataset=other, resume_changed=True, eval_interval=4, max_iters=6))
    printed = capsys.readouterr().out
    assert re.findall("^changed: (.*?) data, ", printed, re.M) == ["val"]
    assert str(out / "previous-1") in printed
    assert (out / "previous-1" / "ckpt_best.pt").read_bytes() == best
    assert load_checkpoint(out / "ckpt_best.pt").best_val_loss > 0.5
    assert [e[0] for e in (load_checkpoint(out).progress or {})["evaluations"]] == [4, 6]
    main(resumed(out))  # from now on it is this data's run
    assert "changed" not in capsys.readouterr().out


def test_rule_takes_larger_micro_batches_on_a_card_only_if_what_is_learned_stays(monkeypatch):
    """Neither with dropout, whose masks would change, nor in a resumed run."""
    monkeypatch.setattr("deskgpt.resume.choose_compute", lambda *_: ComputeMode())
    monkeypatch.setattr("deskgpt.device.memory_bytes", lambda device: 1 << 40)
    monkeypatch.setattr("deskgpt.memory.larger_batch", lambda *_: 480)
    for dropout, is_new in itertools.product((0.0, 0.1), (True, False)):
        c = TrainConfig(dropout=dropout)
        start = Start("", c.model_config(9), Checkpoint({}, {}), None if is_new else c)
        batching = choose_compute_and_batch(c, start, DistContext(CUDA))[1]
        assert (batching.batch_size > c.batch_size) == (is_new and not dropout)


def test_weights_of_a_run_are_finetuned_with_the_dropout_and_context_that_are_asked_for(
    half, out, tmp_path
):
    wanted = {"dropout": 0.3, "block_size": 8}
    main(tiny(half / "data", tmp_path / "fine", init_from=str(out), max_iters=0, **wanted))
    assert load_checkpoint(tmp_path / "fine").model_args.items() >= wanted.items()


def test_finished_run_that_is_resumed_prints_changed_code_and_a_damaged_best_model(out, capsys):
    saved = load_checkpoint(out)
    metadata = vars(saved)["metadata"]
    metadata["code_digest"] = "0"
    metadata["versions"]["torch"] = "1.0"
    save_checkpoint(saved, out, best=False)
    (out / "ckpt_best.pt").write_bytes(b"cut")
    main(resumed(out, dtype="bfloat16"))
    assert logged(out, "eval") == [0, 3, 4, 4]  # a finished run evaluates
    printed = capsys.readouterr().out
    # Also if both are the same commit "+changes".
    code, versions, variant = re.findall("^changed: .*", printed, re.M)
    assert_one_line(code, "code_digest: '0' before", code_digest())
    assert_one_line(versions, "torch: '1.0' before", torch.__version__)
    assert_one_line(variant, "float32", "bfloat16")
    damaged, last = printed.split("best val loss")[-1].splitlines()[1:3]
    assert_one_line(damaged, out / "ckpt_best.pt", "cut short")
    assert last == f"best intact model, of step 4: {out / 'ckpt.pt'}"


def test_resume_changed_is_not_saved_and_another_micro_batch_evaluates_the_same_tokens(out):
    main(resumed(out, seed=5, resume_changed=True, max_iters=5))
    smaller = {"batch_size": 2, "gradient_accumulation_steps": 2}
    c = resumed(out, **smaller)
    assert (c.resume_changed, c.eval_tokens) == (False, 2 * 4 * 16)
    assert resumed(out, **smaller, eval_iters=3).eval_tokens == 0


def test_resumed_run_keeps_the_steps_that_its_minutes_came_to(half, capsys):
    out = str(half / "out")
    argv = [f"--out_dir={out}", "--max_minutes=0.01", "--max_iters=9"]
    found = resumed_settings(TrainConfig, argv, out)
    assert (found["init_from"], found["max_iters"], found["max_minutes"]) == ("resume", 4, 0.0)
    assert_one_line(capsys.readouterr().err, "max_minutes", "max_iters=4")


# ---- nanoGPT's runs, and ours for nanoGPT --------------------------------------------------------


def nanogpt_checkpoint(half: Path) -> dict[str, Any]:
    """Return our run's checkpoint as nanoGPT writes it, of a compiled model."""
    saved = torch.load(half / "out" / "ckpt.pt")
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(2)}
    machine = {"device": "cuda", "dtype": "float16", "compile": True, "backend": "nccl"}
    config = {name: saved["config"][name] for name in (*TINY, "dataset", "lr_decay_iters")}
    return {
        "model": {f"_orig_mod.{k}": v for k, v in (saved["model"] | masks).items()},
        "optimizer": {name: saved["optimizer"][name] for name in ("state", "param_groups")},
        "model_args": saved["model_args"],
        "iter_num": 4,
        "best_val_loss": torch.tensor(9.0),
        "config": config | machine | {"out_dir": "out", "max_iters": 6},
    }


def test_nanogpts_run_is_resumed_and_sampled_from_as_it_is(half, tmp_path, script):
    torch.save(nanogpt_checkpoint(half), tmp_path / "ckpt.pt")
    machine = ("--compile=False", "--cpu_kernels=False", "--device=cpu")
    done = script("train.py", "--init_from=resume", f"--out_dir={tmp_path}", *machine)
    assert done.code == 0, done.err
    saved = load_checkpoint(tmp_path)
    assert saved.iter_num == 6
    assert saved.model_args["activation"] == "gelu"
    assert saved.config["dtype"] == "auto"  # not that of its machine
    assert {int(s["step"]) for s in saved.optimizer["state"].values()} == {6}
    assert saved.best_val_loss < 9
    assert logged(tmp_path, "iter") == [4, 5]
    assert logged(tmp_path, "eval", "tokens")[-1] == 6 * 4 * 16  # as if all steps were alike
    done = script("sample.py", f"--out_dir={tmp_path}", "--start=ab", "--max_new_tokens=30")
    assert done.code == 0, done.err
    assert re.match("ab[(-g]{30}\n", done.out)


def test_our_checkpoints_have_what_nanogpt_reads(half):
    saved = torch.load(half / "out" / "ckpt.pt", weights_only=True)
    assert saved.keys() >= nanogpt_checkpoint(half).keys()
    model_args = "n_layer n_head n_embd block_size bias vocab_size dropout"
    assert saved["model_args"].keys() == {*model_args.split()}
    assert not [k for k in saved["model"] if k.startswith(("_orig_mod.", "module."))]
    assert saved["config"]["dataset"] == str(half / "data")
