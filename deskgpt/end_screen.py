"""The screen at the end of a run: where its time went, its best model, and the next commands."""

import math

from deskgpt.checkpoint import best_on_disk, run_folder
from deskgpt.device import peak_memory_bytes
from deskgpt.errors import clock, in_gib, python_command, to_type
from deskgpt.files import untrusted_settings
from deskgpt.logger import RunLogger
from deskgpt.loss_bands import compare_with_bands
from deskgpt.train_state import TrainState


def end_run(logger: RunLogger, state: TrainState, stop: str | None) -> float:
    """Print the screen, log the "end" event, and return the best val loss, inf without one.

    stop: why the run ends before max_iters, such as a signal's name.
    """
    timer = logger.timer
    best = min(state.evaluations, key=lambda e: e.val_loss, default=None)
    best_val_loss = best.val_loss if best else math.inf
    if state.settings["eval_only"]:
        return best_val_loss
    if stop:
        logger.print0(f"stopped by {stop} at step {state.step}")
    memory = peak_memory_bytes(state.dist.device)
    logger.print0(
        f"{state.step - state.first_step} steps: {clock(timer.train_s())} of training, "
        f"{clock(timer.total_s['evaluation'])} of evaluation, "
        f"{clock(timer.total_s['saving'])} of saving"
    )
    logger.print0(
        f"{clock(logger.warm_up_s)} to start, {clock(logger.loader.wait_s)} of waiting for data, "
        f"peak memory {in_gib(memory)} GiB"
    )
    none = "n/a: the run ended before its first evaluation"
    logger.print0(f"best val loss {f'{best_val_loss:.4f}' if best else none}")
    of_data = (state.data.metadata["val data"]["fingerprint"], state.data.train.tokens)
    val_losses = {e.step: e.val_loss for e in state.evaluations}
    sentence = compare_with_bands(state.settings_now(), of_data, val_losses)
    if sentence:
        logger.print0(sentence)
    logger.log.write(
        "end",
        iter=state.step,
        stop=stop,
        train_s=timer.train_s(),
        data_wait_s=logger.loader.wait_s,
        eval_s=timer.total_s["evaluation"],
        save_s=timer.total_s["saving"],
        peak_memory_bytes=memory,
        best_val_loss=best_val_loss,
        best_iter=best.step if best else None,
    )
    if state.dist.is_first:
        print_next_commands(state, stop)
    return best_val_loss


def print_next_commands(state: TrainState, stop: str | None) -> None:
    """Print the best model on the disk, and the commands to sample from it, to resume and to
    compare.
    """
    settings = state.settings
    out_dir = run_folder(settings["out_dir"])
    found = best_on_disk(out_dir, print)
    if found is None:
        print(f"no intact checkpoint is in {out_dir}")
        return
    model, step = found
    python = python_command()
    is_chat = state.data.chat is not None
    # Answers may become better while the val loss rises: whoever saves at each evaluation wants the
    # last model (docs/data.md).
    chosen = out_dir if is_chat and settings["always_save_checkpoint"] else model
    sample = [python, "sample.py", f"--out_dir={chosen}"]
    # The settings that the checkpoint does not give, and those without which a resumed run would
    # have nothing to do.
    resume = ["train.py", "--init_from=resume", f"--out_dir={out_dir}"]
    resume += [f"--{name}={value}" for name, value in untrusted_settings(settings).items()]
    is_done = state.step >= state.schedule.max_iters
    if is_done:
        resume.append(f"--max_iters={2 * state.step}")
        # More steps move the end of the learning rate's decay, which counts as a change.
        if state.schedule.decay_lr and not state.schedule.lr_decay_iters:
            resume.append("--resume_changed=True")
    elif stop == "patience":
        resume.append("--patience=0")
    how = "train longer" if is_done else "resume"
    launcher = [python]
    if state.dist.local_world < state.dist.world:  # several machines
        how += ", torchrun with its options as before"
        launcher = ["torchrun", "..."]
    elif state.dist.distributed:
        launcher = ["torchrun", "--standalone", f"--nproc_per_node={state.dist.world}"]
    print(f"best intact model, of step {step}: {model}")
    for name, words in {
        "sample:  ": [*sample, "--chat" if is_chat else "--num_samples=3"],
        "page:    ": [*sample, "--serve", "--open_page"],
        f"{how}: ": launcher + resume,
        "report:  ": [python, "bench/report.py", str(out_dir)],
        "compare: ": [python, "bench/compare.py", str(out_dir), "OTHER_OUT_DIR"],
    }.items():
        print(to_type(name, *words))
