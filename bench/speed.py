"""Step speed of train.py with given settings, and of other programs that do the same work, in turns.

    python bench/speed.py config/train_shakespeare_char_cpu.py --peer nanogpt:../nanoGPT
    python bench/speed.py --n_layer=4 --peer checkout:../before --peer ours:--compile=False
    python bench/speed.py config/train_gpt2.py --batch_size=2 --profile

Settings are those of train.py. Each contestant is a real run on random tokens that is stopped after --steps steps; they
take turns for --rounds rounds. The peers:

    nanogpt:PATH          its unmodified train.py: on a CPU in float32 and not compiled, on CUDA in bfloat16 and
                          compiled, as its README has it
    ours:"--key=value"    train.py with other settings
    checkout:PATH         train.py of another checkout of deskGPT, such as the commit before a change

Prints a table; --save NAME writes it with every step's time to bench/results/DATE-NAME.md and .json.
--profile shows instead where the time of our steps goes, by operation.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import train
from bench import output
from bench.output import markdown_table
from bench.timing import (
    ENDLESS,
    LEAST_STEPS,
    OURS,
    PYTHON,
    ROOT,
    Contestant,
    run,
    vocab_size_for,
    write_data,
)
from configurator import build, read_settings
from deskgpt.system import hardware
from deskgpt.system.errors import one_line_errors
from model import MODERN_CHOICES

# Settings that make the work the same, and that nanoGPT's train.py knows too.
SIZES = (
    "n_layer",
    "n_head",
    "n_embd",
    "dropout",
    "bias",
    "batch_size",
    "block_size",
    "gradient_accumulation_steps",
)
SHARED = (*SIZES, "learning_rate", "weight_decay", "beta1", "beta2", "grad_clip")
NOT_PROFILED = 3  # steps at the start of a profiled run


# ---- who takes part ------------------------------------------------------------------------------------------


def contestants(c: train.TrainConfig, given: list[str], peers: list[str], folder: Path) -> list[Contestant]:
    """Ours and the peers, each with the command of a run of more than enough steps. Raises ValueError."""
    device = hardware.resolve_device(c.device)
    ours = [*PYTHON, "train.py", *given, *OURS, f"--dataset={folder}"]
    out = [Contestant("deskGPT", [*ours, f"--out_dir={folder}/ours"], ROOT)]
    for number, peer in enumerate(peers):
        kind, _, what = peer.partition(":")
        out_dir = f"{folder}/{number}"
        if kind == "ours" and what:
            out.append(Contestant(what, [*ours, *shlex.split(what), f"--out_dir={out_dir}"], ROOT))
        elif kind == "checkout":
            out.append(Contestant(peer, [*ours, f"--out_dir={out_dir}"], checkout_of(what, peer, "deskGPT")))
        elif kind == "nanogpt":
            check_same_work(c, peer)
            out.append(nanogpt(c, checkout_of(what, peer, "nanoGPT"), str(device), folder, out_dir))
        else:
            raise ValueError(f"--peer {peer}: not nanogpt:PATH, ours:'--key=value' or checkout:PATH")
    for x in out:
        x.on_gpu = device.type != "cpu"
    return out


def checkout_of(path: str, peer: str, project: str) -> Path:
    """The folder at path. Raises ValueError where it does not hold a train.py."""
    folder = Path(path).expanduser().resolve()
    if not (folder / "train.py").is_file():
        raise ValueError(f"--peer {peer}: {folder} holds no train.py; name a checkout of {project}")
    return folder


def nanogpt(c: train.TrainConfig, checkout: Path, device: str, folder: Path, out_dir: str) -> Contestant:
    """nanoGPT's train.py."""
    on_cpu = device == "cpu"
    known: dict[str, Any] = {"compiled": not on_cpu, "dtype": "float32" if on_cpu else "bfloat16"}
    settings = {name: getattr(c, name) for name in SHARED} | {
        "device": device,
        "compile": known["compiled"],
        "dtype": known["dtype"],
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    flags += [*ENDLESS, f"--dataset={folder}", f"--out_dir={out_dir}"]
    return Contestant("nanoGPT", [*PYTHON, "train.py", *flags], checkout, start=known)


def check_same_work(c: train.TrainConfig, peer: str) -> None:
    """Raises ValueError where c is not GPT-2 with AdamW, all that a peer can do. Both GELUs pass as the same work."""
    plain = train.TrainConfig()
    for name in (*MODERN_CHOICES, "optimizer"):
        value = getattr(c, name)
        same = getattr(plain, name)
        if value != same and value != "gelu":
            raise ValueError(
                f"--peer {peer} has no {name}={value}: its work would not be the same; leave out the peer, "
                f"or take --{name}={same}"
            )


# ---- figures -------------------------------------------------------------------------------------------------


def table(runs: list[Contestant], tokens_per_step: int) -> list[dict[str, Any]]:
    """A row of figures for each contestant; MFU refers to the peak of ours, the first, for all of them."""
    ours = runs[0]
    rows = []
    for x in runs:
        start = ours.start | x.start  # a peer does the same work: what it does not say is as in ours
        tokens = start.get("tokens_per_step", tokens_per_step)  # ours with another batch has its own number
        flops = start["flops_per_token"] * tokens
        times = x.step_ms()
        ms = times["ms"]
        ratios = [
            statistics.median(theirs) / statistics.median(our_round) * tokens_per_step / tokens
            for theirs, our_round in zip(x.rounds_ms, ours.rounds_ms, strict=True)
        ]
        memory = x.logged_bytes or x.process_bytes
        rows.append(
            {
                "name": x.name,
                **times,
                "dtype": start.get("dtype"),
                "compiled": start.get("compiled"),
                "tokens_per_s": tokens / ms * 1e3,
                "tflops": flops / ms / 1e9,
                "mfu": flops / ms * 1e3 / ours.start["peak_flops"],
                "first_s": statistics.median_low(x.first_s),  # of two rounds the one with a warm compile cache
                "memory_gb": max(memory) / 1e9 if memory else None,
                "data_wait": statistics.mean(x.data_waits) if x.data_waits else None,
                # Medians over rounds that follow one another, so that a slow spell of the machine hits both.
                "ours_faster": statistics.median(ratios),
                "ours_faster_least": min(ratios),
                "ours_faster_most": max(ratios),
            }
        )
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    head = ["", "dtype", "compiled", "ms/step (p10, p90)", "tokens/s", "TFLOP/s", "MFU", "first step, warm cache"]
    head += ["peak memory", "data wait", "time / ours"]
    body = []
    for r in rows:
        compiled = {None: "n/a", True: "yes", False: "no"}[r["compiled"]]
        memory = "n/a" if r["memory_gb"] is None else f"{r['memory_gb']:.2f} GB"
        wait = "n/a" if r["data_wait"] is None else f"{r['data_wait']:.1%}"
        times = f"{r['ms']:.4g} ({r['p10']:.4g}, {r['p90']:.4g})"
        ratio = f"{r['ours_faster']:.2f} ({r['ours_faster_least']:.2f} to {r['ours_faster_most']:.2f})"
        cells = [r["name"], r["dtype"] or "n/a", compiled, times]
        cells += [f"{r['tokens_per_s']:,.0f}", f"{r['tflops']:.3f}", f"{r['mfu']:.1%}", f"{r['first_s']:.1f} s"]
        body.append([*cells, memory, wait, ratio])
    return markdown_table(head, body, left_columns=3)


# ---- profile -------------------------------------------------------------------------------------------------


def profiled(c: train.TrainConfig, folder: Path, steps: int) -> Any:
    """Trains in this process on the tokens in folder; returns torch's profile of `steps` steps after the first three.

    The log of the run is in folder/ours.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    device = hardware.resolve_device(c.device)
    profiler = torch.profiler.profile(record_shapes=True)
    taken = 0

    def after_step(*_: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == NOT_PROFILED:
            hardware.synchronize(device)
            profiler.start()
        if taken == NOT_PROFILED + steps:
            hardware.synchronize(device)
            profiler.stop()

    own: dict[str, Any] = {"dataset": str(folder), "out_dir": str(folder / "ours"), "compile": c.compile is not False}
    own |= {"max_iters": NOT_PROFILED + steps, "max_minutes": 0.0, "log_interval": 1, "auto_batch": False}
    own |= {"eval_interval": 1_000_000, "eval_iters": 1, "eval_tokens": 0, "always_save_checkpoint": False}
    hook = register_optimizer_step_post_hook(after_step)
    try:
        train.main(replace(c, **own))
    finally:
        hook.remove()
    return profiler


# ---- script --------------------------------------------------------------------------------------------------


def read_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(our own arguments, those of train.py). Raises ValueError."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], help="see above; may be given several times")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0 = about ten seconds of ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--vocab_size", type=int, default=0, help="0 = 65 for a dataset named *_char, else GPT-2's 50257"
    )
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.md and .json")
    parser.add_argument("--profile", action="store_true")
    a, given = parser.parse_known_args()
    output.check_name(a.save)
    if a.rounds < 1 or a.steps < 0 or (0 < a.steps < LEAST_STEPS and not a.profile):
        raise ValueError(f"--rounds {a.rounds} --steps {a.steps}: at least one round and {LEAST_STEPS} steps")
    return a, given


def measure(runs: list[Contestant], rounds: int, steps: int) -> int:
    """Runs all contestants in turns; returns the steps of each run, about ten seconds of ours for steps 0."""
    if not steps or rounds == 1:
        # A short run tells how long a step takes, and leaves a warm compile cache.
        trial = replace(runs[0], rounds_ms=[], first_s=[], process_bytes=[], data_waits=[], logged_bytes=[])
        run(trial, 3)
        steps = steps or max(5, min(300, round(10e3 / trial.rounds_ms[0][-1])))
    for number in range(rounds):
        for x in runs:
            run(x, steps)
            print(f"round {number + 1}, {x.name}: {statistics.median(x.rounds_ms[-1]):.4g} ms/step", flush=True)
    return steps


def main() -> None:
    a, given = read_arguments()
    c = build(train.TrainConfig, read_settings(train.TrainConfig, given))
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "data"
        write_data(folder, a.vocab_size or vocab_size_for(c.dataset))
        if a.profile:
            device = hardware.resolve_device(c.device)
            averages = profiled(c, folder, a.steps or 5).key_averages()
            print(averages.table(sort_by=f"self_{device.type}_time_total", row_limit=25))
            return
        runs = contestants(c, given, a.peer, folder)
        steps = measure(runs, a.rounds, a.steps)

    rows = table(runs, c.batch_size * c.gradient_accumulation_steps * c.block_size)
    start = runs[0].start
    sizes = {name: getattr(c, name) for name in SIZES} | {"vocab_size": start["model_args"]["vocab_size"]}
    about = (
        f"{output.about(*(x.start for x in runs))}. "
        f"MFU refers to {start['peak_flops'] / 1e12:.2f} TFLOP/s ({start['peak_source']}). "
        f"{a.rounds} rounds of {steps} steps."
    )
    command = output.command_line("speed.py")
    text = f"{about}\n\n{sizes}\n\n```sh\n{command}\n```\n\n{as_markdown(rows)}\n"
    print("\n" + text)
    if a.save:
        raw = [{"name": x.name, "rounds_ms": x.rounds_ms, "first_s": x.first_s} for x in runs]
        result = {"command": command, "settings": sizes, "start": start, "rows": rows, "raw": raw}
        output.save(a.save, f"# Step speed: {a.save}\n\n{text}", result)


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C; else the run that is timed would train on
    with one_line_errors():
        main()
