"""The screen at the end of a run: why it ends, where the time went, the best model and its file, what to do next.

What it says about a file is read from that file.
"""

from __future__ import annotations

import os
import shlex
import string
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from deskgpt.checkpoint import store
from deskgpt.run.diagnosis import lowest, without_improvement
from deskgpt.run.loss_band import band_of
from deskgpt.run.report import Report
from deskgpt.run.settings import RunSettings, sensitive
from deskgpt.run.train_state import TrainState
from deskgpt.system import hardware
from deskgpt.system.formatting import clock


def end_screen(config: RunSettings, state: TrainState, report: Report, stop: str | None) -> None:
    """Prints the screen and logs the "end" event; nothing after eval_only.

    stop: why the run ends before max_iters, such as a signal's name.
    """
    if config.eval_only:
        return
    timer = report.timer
    print0 = report.print0
    if stop == "patience":
        n = without_improvement(state.evaluations)
        best = lowest(state.evaluations)
        print0(
            f"patience={config.patience}: the last {n} evaluations improved by no more than the standard error; the "
            f"lowest val loss was {best.val_loss:.4f} at step {best.step}"
        )
    elif stop and state.step > 0:
        print0(f"stopped by {stop} at step {state.step}")
    memory = hardware.peak_memory_bytes(report.dist.device)
    memory_gib = "n/a" if memory is None else f"{memory / 2**30:.2f} GiB"
    print0(
        f"{state.step - state.first_step} steps: {clock(timer.train_s())} of training ({clock(timer.wait_s)} waiting "
        f"for data), {clock(timer.eval_s)} of evaluation, {clock(timer.save_s)} of saving; "
        f"warm-up {clock(report.warm_up_s)}; peak memory {memory_gib}; best val loss {state.best_val_loss:.4f}"
    )
    counts = report.counts
    if counts.bad_steps or counts.spikes:
        print0(f"{counts.bad_steps} steps without an update, {counts.spikes} loss spikes, {counts.rewinds} rewinds")
    verdict = compare_with_band(state)
    if verdict:
        print0(verdict)
    found = [e.step for e in state.evaluations if e.val_loss == state.best_val_loss]
    report.log.write(
        "end",
        iter=state.step,
        stop=stop,
        train_s=timer.train_s(),
        data_wait_s=timer.wait_s,
        eval_s=timer.eval_s,
        save_s=timer.save_s,
        peak_memory_bytes=memory,
        best_val_loss=state.best_val_loss,
        best_iter=found[0] if found else None,  # unknown where an older checkpoint has only the loss
        bad_steps=counts.bad_steps,
        spikes=counts.spikes,
        rewinds=counts.rewinds,
    )
    if report.dist.is_first:
        next_commands(config, state, report)


def compare_with_band(state: TrainState) -> str:
    """Whether the val losses are those of other runs like this one; "" where no such runs are known."""
    data = state.metadata
    band = band_of(state.config, data["val data"]["fingerprint"], data["train data"]["tokens"])
    return band.verdict({e.step: e.val_loss for e in state.evaluations}) if band else ""


def next_commands(config: RunSettings, state: TrainState, report: Report) -> None:
    """The best model on the disk, and the commands to sample from it, to go on and to compare."""
    print0 = report.print0
    out_dir = store.folder_of(config.out_dir)
    best = store.best_of(out_dir)
    last = next(iter(store.candidates(out_dir)), None)
    model = best or last
    if model is None:
        print0(f"no checkpoint was saved in {out_dir}")
        return
    kind = "best model" if best else "last model"
    print0(f"{kind} of step {store.load(model, checksums=False).iter_num}: {model}")
    chat = ["--chat"] if state.chat is not None else []
    print0("sample:  " + command("python", "sample.py", f"--out_dir={model}", *chat))
    more = []  # the settings without which a resumed run would have nothing to do
    if 0 < config.patience <= without_improvement(state.evaluations):
        more = ["--patience=0"]
    if state.step >= config.max_iters:
        more = [f"--max_iters={2 * state.step}"]
        if config.decay_lr and not config.lr_decay_iters:  # the schedule gets another end
            more.append("--resume_changed=True")
    print0("resume:  " + resume_command(config, state, report.dist.world, *more))
    if "--resume_changed=True" in more:
        print0("         a longer run changes the learning rate; --resume_changed=True turns off the check for that")
    print0("report:  " + command("python", "bench/report.py", str(out_dir)))
    print0("compare: " + command("python", "bench/compare.py", str(out_dir), "OTHER_OUT_DIR"))


def resume_command(config: RunSettings, state: TrainState, world: int, *more: str) -> str:
    """What to type to go on with this run; the checkpoint knows most of its settings. more: further settings."""
    again = [f"--{name}={value}" for name, value in sensitive(asdict(state.config)).items()]
    out_dir = store.folder_of(config.out_dir)
    script = command("train.py", "--init_from=resume", f"--out_dir={out_dir}", *again, *more)
    if not state.dist.distributed:
        return f"python {script}"
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # several machines: torchrun's options have their addresses
        return f"torchrun (with its options as before) {script}"
    return f"torchrun --standalone --nproc_per_node={world} {script}"


def command(*words: str | Path) -> str:
    """A line to type in this system's shell."""
    texts = [str(word) for word in words]
    return subprocess.list2cmdline(texts) if sys.platform == "win32" else " ".join(map(quoted, texts))


def quoted(word: str) -> str:
    """A word for a POSIX shell. What the terminal would not show as it is becomes bytes, which bash and zsh read."""
    encoding = sys.stdout.encoding or "utf-8"
    if word.isprintable() and word.encode(encoding, "replace").decode(encoding) == word:
        return shlex.quote(word)
    plain = string.ascii_letters + string.digits + "-_./=:,+@%"
    escaped = [chr(byte) if chr(byte) in plain else f"\\x{byte:02x}" for byte in os.fsencode(word)]
    return f"$'{''.join(escaped)}'"
