"""Step speed of one setting, by running train.py itself, and of others on the same work, taking turns.

    python bench/speed.py config/train_shakespeare_char_cpu.py --peer nanogpt:../nanoGPT
    python bench/speed.py --n_layer=4 --peer nanogpt+malloc:../nanoGPT --peer hf --peer ours:--compile=False
    python bench/speed.py config/train_gpt2.py --batch_size=2 --profile

Settings are those of train.py. Each contestant is a real run on random tokens, stopped after --steps steps; --rounds
times one after the other. Peers: nanogpt:PATH is its train.py, unmodified, in float32 and not compiled on a CPU and
compiled in bfloat16 on CUDA, as its README has it; nanogpt+malloc:PATH the same after hardware.keep_freed_memory;
ours:"--key=value ..." train.py with other settings; hf is transformers' GPT-2 in bench/peer_hf.py. --memory_gb 12 makes
a larger CUDA card act as one of 12 GB, for all of them.

Prints a table; --save NAME writes it with every step's time to bench/results/DATE-NAME.md, .json and .png.
--profile shows instead where the time of our steps goes, by operation.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, Python looks beside this file only

import train
from bench import timing
from bench.timing import ENDLESS, LEAST_STEPS, OURS, PYTHON, ROOT, Contestant, memory_cap, run, start_with, write_data
from configurator import build, read_settings
from deskgpt import hardware
from deskgpt.errors import one_line_errors
from model import CHOICES

# What nanoGPT's train.py knows too and what makes its work the same.
SHARED: tuple[str, ...] = (
    "n_layer",
    "n_head",
    "n_embd",
    "dropout",
    "bias",
    "batch_size",
    "block_size",
    "gradient_accumulation_steps",
)
SHARED += ("learning_rate", "weight_decay", "beta1", "beta2", "grad_clip")
WITH_MALLOC = """
import sys
sys.path.insert(0, {path!r})
from deskgpt import hardware
assert hardware.keep_freed_memory()
sys.path.remove({path!r})
"""


def contestants(
    c: train.TrainConfig, given: list[str], peers: list[str], folder: Path, memory_gb: float | None = None
) -> list[Contestant]:
    """Ours and the peers, each as the command of a run of more than enough steps."""
    device = hardware.resolve_device(c.device)
    on_cpu = device.type == "cpu"
    cap = memory_cap(memory_gb, str(device))
    ours = [*PYTHON, *start_with(cap, "train.py"), *given, *OURS, f"--dataset={folder}"]
    out = [Contestant("deskGPT", [*ours, f"--out_dir={folder}/ours"], ROOT)]
    for number, peer in enumerate(peers):
        kind, _, what = peer.partition(":")
        values: dict[str, Any] = {name: getattr(c, name) for name in SHARED}
        if kind == "ours" and what:
            out.append(Contestant(what, [*ours, *shlex.split(what), f"--out_dir={folder}/{number}"], ROOT))
        elif kind in ("nanogpt", "nanogpt+malloc"):
            check_same_work(c, peer)
            path = Path(what).expanduser().resolve()
            if not (path / "train.py").is_file():
                raise ValueError(f"--peer {peer}: {path} holds no train.py; name a checkout of nanoGPT")
            known: dict[str, Any] = {"compiled": not on_cpu, "dtype": "float32" if on_cpu else "bfloat16"}
            values |= {"device": str(device), "compile": known["compiled"], "dtype": known["dtype"]}
            flags = [f"--{k}={v}" for k, v in values.items()]
            flags += [*ENDLESS, f"--dataset={folder}", f"--out_dir={folder}/{number}"]
            code = cap if kind == "nanogpt" else WITH_MALLOC.format(path=str(ROOT)) + cap
            command = [*PYTHON, *start_with(code, "train.py"), *flags]
            out.append(Contestant("nanoGPT" + kind[7:], command, path, start=known))
        elif peer == "hf":
            check_same_work(c, peer)
            values |= {"device": str(device), "dtype": c.dtype, "dataset": str(folder)}
            command = [*PYTHON, *start_with(cap, "bench/peer_hf.py"), json.dumps(values)]
            out.append(Contestant("transformers", command, ROOT, start={"compiled": False}))
        else:
            raise ValueError(f"--peer {peer}: not nanogpt:PATH, nanogpt+malloc:PATH, ours:'--key=value' or hf")
    for x in out:
        x.on_gpu = not on_cpu
    return out


def check_same_work(c: train.TrainConfig, peer: str) -> None:
    """ValueError where c is not GPT-2 with AdamW, which is all that a peer knows. Both GELUs pass as the same work."""
    plain = train.TrainConfig()
    for name in (*CHOICES, "optimizer"):
        value, same = getattr(c, name), getattr(plain, name)
        if value != same and value != "gelu":
            raise ValueError(
                f"--peer {peer} has no {name}={value}: its work would not be the same; leave out the peer, "
                f"or take --{name}={same}"
            )


def table(runs: list[Contestant], tokens_per_step: int) -> list[dict[str, Any]]:
    """A row of figures for each contestant, all with the FLOPs and the peak of ours, the first."""
    rows = []
    for x in runs:
        start = runs[0].start | x.start  # of ours what a peer does not tell: the same work
        tokens = start.get("tokens_per_step", tokens_per_step)  # of ours with another batch, another number
        flops, peak = start["flops_per_token"] * tokens, runs[0].start["peak_flops"]
        ms = sorted(t for times in x.rounds for t in times)
        median = statistics.median(ms)
        # of rounds taken one after the other, so that a slow spell of the machine hits both
        ratios = [
            statistics.median(x_i) / statistics.median(o_i) * tokens_per_step / tokens
            for x_i, o_i in zip(x.rounds, runs[0].rounds, strict=True)
        ]
        row = {"name": x.name, "ms": median, "p10": ms[len(ms) // 10], "p90": ms[len(ms) * 9 // 10]}
        row |= {"dtype": start.get("dtype"), "compiled": start.get("compiled")}
        row |= {"tokens_per_s": tokens / median * 1e3, "tflops": flops / median / 1e9}
        row |= {"mfu": flops / median * 1e3 / peak}
        row["first_s"] = statistics.median_low(x.first_s)  # of two rounds the one with a warm compile cache
        memory = x.logged_memory or x.memory
        row |= {
            "memory_gb": max(memory) / 1e9 if memory else None,
            "data_wait": statistics.mean(x.waits) if x.waits else None,
        }
        row |= {
            "ours_faster": statistics.median(ratios),
            "ours_faster_least": min(ratios),
            "ours_faster_most": max(ratios),
        }
        rows.append(row)
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    head = "dtype | compiled | ms/step (p10, p90) | tokens/s | TFLOP/s | MFU | first step, warm cache | peak memory"
    lines = [f"| | {head} | data wait | time / ours |", "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for r in rows:
        memory = "n/a" if r["memory_gb"] is None else f"{r['memory_gb']:.2f} GB"
        wait = "n/a" if r["data_wait"] is None else f"{r['data_wait']:.1%}"
        compiled = "n/a" if r["compiled"] is None else "yes" if r["compiled"] else "no"
        lines.append(
            f"| {r['name']} | {r['dtype'] or 'n/a'} | {compiled} | {r['ms']:.4g} ({r['p10']:.4g}, {r['p90']:.4g}) | "
            f"{r['tokens_per_s']:,.0f} | {r['tflops']:.3f} | {r['mfu']:.1%} | {r['first_s']:.1f} s | "
            f"{memory} | {wait} | "
            f"{r['ours_faster']:.2f} ({r['ours_faster_least']:.2f} to {r['ours_faster_most']:.2f}) |"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """A bar per contestant, with the middle 80% of its steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(rows) + 1.2), layout="constrained")
    names, ms = [r["name"] for r in rows], [r["ms"] for r in rows]
    spread = [[r["ms"] - r["p10"] for r in rows], [r["p90"] - r["ms"] for r in rows]]
    axes.barh(names, ms, xerr=spread, color=["C0"] + ["0.7"] * (len(rows) - 1), capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="ms per step: median, and 10% to 90% of the steps", title=title)
    figure.savefig(path, dpi=120)


def profile(c: train.TrainConfig, folder: Path, steps: int) -> None:
    """Runs ours in this process and prints where so many steps spend their time, after three that are left out."""
    import torch

    profiler, taken, original = torch.profiler.profile(), 0, train.Loader.next
    skipped = 3 * c.gradient_accumulation_steps

    def next_batch(self: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == skipped + 1:
            profiler.start()
        if taken == skipped + steps * c.gradient_accumulation_steps + 1:
            profiler.stop()
        return original(self)

    train.Loader.next = next_batch  # type: ignore[method-assign]
    same: dict[str, Any] = {"dataset": str(folder), "out_dir": str(folder / "ours"), "max_iters": 4 + steps}
    same["compile"] = c.compile is not False
    train.main(replace(c, **same, eval_interval=1_000_000, eval_iters=1, eval_tokens=0, always_save_checkpoint=False))
    print(
        profiler.key_averages().table(sort_by=f"self_{hardware.resolve_device(c.device).type}_time_total", row_limit=25)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], help="nanogpt:PATH, nanogpt+malloc:PATH, ours:FLAGS, hf")
    parser.add_argument("--steps", type=int, default=0, help="of each run; 0 = about ten seconds of ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--vocab_size", type=int, default=0, help="0 = 65 for a dataset named *_char, else GPT-2's 50257"
    )
    parser.add_argument("--memory_gb", type=float, help="let a CUDA card act as one of so many GB (2^30 bytes)")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.md, .json and .png")
    parser.add_argument("--profile", action="store_true")
    a, given = parser.parse_known_args()
    timing.check_name(a.save)
    if a.save:
        import matplotlib  # noqa: F401 (before the runs, not after them, if it is missing)
    if a.rounds < 1 or a.steps < 0 or (0 < a.steps < LEAST_STEPS and not a.profile):
        raise ValueError(f"--rounds {a.rounds} --steps {a.steps}: at least one round and {LEAST_STEPS} steps")
    c = build(train.TrainConfig, read_settings(train.TrainConfig, given))
    vocab_size = a.vocab_size or (65 if c.dataset.endswith("_char") else 50257)
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "data"
        write_data(folder, vocab_size)
        if a.profile:
            return profile(c, folder, a.steps or 5)
        runs = contestants(c, given, a.peer, folder, a.memory_gb)
        if not a.steps or a.rounds == 1:  # which leaves a warm cache as well
            trial = replace(runs[0], rounds=[], first_s=[], memory=[], waits=[], logged_memory=[])
            run(trial, 3)
            a.steps = a.steps or max(5, min(300, round(10e3 / trial.rounds[0][-1])))
        for number in range(a.rounds):
            for x in runs:
                run(x, a.steps)
                print(f"round {number + 1}, {x.name}: {statistics.median(x.rounds[-1]):.4g} ms/step", flush=True)
    rows = table(runs, c.batch_size * c.gradient_accumulation_steps * c.block_size)
    start = runs[0].start
    sizes = {**{n: getattr(c, n) for n in SHARED[:8]}, "vocab_size": start["model_args"]["vocab_size"]}
    about = (
        f"{timing.about(*(x.start for x in runs))}. "
        f"MFU refers to {start['peak_flops'] / 1e12:.2f} TFLOP/s ({start['peak_source']}). "
        f"{a.rounds} rounds of {a.steps} steps."
    )
    about += f" The card acts as one of {a.memory_gb:g} GB." if a.memory_gb else ""
    command = timing.command_line("speed.py")
    text = f"{about}\n\n{sizes}\n\n```sh\n{command}\n```\n\n{as_markdown(rows)}\n"
    print("\n" + text)
    if a.save:
        raw = [{"name": x.name, "rounds_ms": x.rounds, "first_s": x.first_s} for x in runs]
        result = {"command": command, "settings": sizes, "start": start, "rows": rows, "raw": raw}
        title = f"{a.save}: {c.n_layer} layers, {c.n_embd} wide, T {c.block_size}"
        timing.save(a.save, f"# Step speed: {a.save}\n\n{text}", result, lambda path: plot(rows, path, title))


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    with one_line_errors():
        main()
