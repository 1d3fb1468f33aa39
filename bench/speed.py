"""Step speed of one setting, by running train.py itself, and of others on the same work, taking turns.

    python bench/speed.py config/train_shakespeare_char_cpu.py --peer nanogpt:../nanoGPT
    python bench/speed.py --n_layer=4 --peer nanogpt+malloc:../nanoGPT --peer hf --peer ours:--compile=False
    python bench/speed.py config/train_gpt2.py --batch_size=2 --profile

Settings are those of train.py. Each contestant is a real run on random tokens, stopped after --steps steps; --rounds
times one after the other. Peers: nanogpt:PATH is its train.py, unmodified, in float32 and not compiled on a CPU and
compiled in bfloat16 on CUDA, as its README has it; nanogpt+malloc:PATH the same after hardware.keep_freed_memory;
ours:"--key=value ..." train.py with other settings; hf is transformers' GPT-2 in bench/peer_hf.py.

Prints a table; --save NAME writes it with every step's time to bench/results/DATE-NAME.md, .json and .png.
--profile shows instead where the time of our steps goes, by operation.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script, Python looks beside this file only

import hardware
import train
from configurator import build, one_line_errors, read_settings
from data.tokens import sha256, write_tokens

ROOT = Path(__file__).resolve().parents[1]
ITER = re.compile(r"iter (\d+): loss \S+, time ([\d.]+)ms")
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
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
import hardware
assert hardware.keep_freed_memory()
sys.argv.pop(0)
sys.path[0] = ""
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class Contestant:
    name: str
    command: list[str]
    cwd: Path
    rounds: list[list[float]] = field(default_factory=list)  # ms of each step, without the first ones
    first_s: list[float] = field(default_factory=list)  # of the first step, with what was compiled before it
    memory: list[int] = field(default_factory=list)  # peak bytes
    start: dict[str, Any] = field(default_factory=dict)  # our log's first line
    waits: list[float] = field(default_factory=list)  # share of the time in which our loop waited for data


def write_data(folder: Path, vocab_size: int) -> None:
    """Random tokens in the files of both programs: the work is the same whatever they are."""
    draw = np.random.default_rng(0)
    folder.mkdir()
    tokens = {split: draw.integers(0, vocab_size, n, np.uint16) for split, n in (("train", 1 << 20), ("val", 1 << 16))}
    for split, ids in tokens.items():
        write_tokens(folder / f"{split}.bin", ids)
    files = {f"{s}.bin": {"tokens": len(ids), "sha256": sha256(ids.astype("<u2"))} for s, ids in tokens.items()}
    small = "".join(map(chr, range(0x4E00, 0x4E00 + vocab_size))) if vocab_size < 50000 else ""
    tokenizer = {"name": "char", "chars": small} if small else {"name": "gpt2"}
    meta = {"tokenizer": tokenizer, "vocab_size": vocab_size, "source": "random", "files": files}
    (folder / "meta.json").write_text(json.dumps(meta))
    if small:  # nanoGPT takes 50304 where there is none
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))


def contestants(c: train.TrainConfig, given: list[str], peers: list[str], folder: Path) -> list[Contestant]:
    """Ours and the peers, each as the command of a run of more than enough steps."""
    endless = ["--max_iters=1000000", "--eval_interval=1000000", "--eval_iters=1", "--log_interval=1"]
    endless += ["--wandb_log=False"]
    python = [sys.executable, "-u"]  # unbuffered, for nanoGPT's lines
    # compile=auto is to decide for a long run
    ours = [*python, "train.py", *given, *endless, "--eval_tokens=0", "--init_from=scratch", f"--dataset={folder}"]
    out = [Contestant("deskGPT", [*ours, f"--out_dir={folder}/ours"], ROOT)]
    device = hardware.resolve_device(c.device)
    on_cpu = device.type == "cpu"
    for number, peer in enumerate(peers):
        kind, _, what = peer.partition(":")
        values: dict[str, Any] = {name: getattr(c, name) for name in SHARED}
        if kind == "ours" and what:
            out.append(Contestant(what, [*ours, *shlex.split(what), f"--out_dir={folder}/{number}"], ROOT))
        elif kind in ("nanogpt", "nanogpt+malloc"):
            path = Path(what).expanduser().resolve()
            if not (path / "train.py").is_file():
                raise ValueError(f"--peer {peer}: {path} holds no train.py; name a checkout of nanoGPT")
            values |= {"device": str(device), "compile": not on_cpu, "dtype": "float32" if on_cpu else "bfloat16"}
            flags = [f"--{k}={v}" for k, v in values.items()]
            flags += [*endless, f"--dataset={folder}", f"--out_dir={folder}/{number}"]
            begin = [] if kind == "nanogpt" else ["-c", WITH_MALLOC, str(ROOT)]
            out.append(Contestant("nanoGPT" + kind[7:], [*python, *begin, "train.py", *flags], path))
        elif peer == "hf":
            values |= {"device": str(device), "dtype": c.dtype, "dataset": str(folder)}
            out.append(Contestant("transformers", [*python, "bench/peer_hf.py", json.dumps(values)], ROOT))
        else:
            raise ValueError(f"--peer {peer}: not nanogpt:PATH, nanogpt+malloc:PATH, ours:'--key=value' or hf")
    return out


def run(x: Contestant, steps: int) -> None:
    """One round: starts x, reads the times it logs of so many steps, stops it."""
    process = subprocess.Popen(x.command, cwd=x.cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    times, seen, warm_up_s = [], [], 0.0
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line.rstrip())
        if found := re.search(r"warm-up took ([\d.]+)s", line):
            warm_up_s = float(found[1])
        if found := re.search(r"data wait ([\d.]+)%", line):
            x.waits.append(float(found[1]) / 100)
        if found := ITER.search(line):
            times.append(float(found[2]))
            if len(times) == steps:
                break
    if len(times) == steps:
        x.memory.append(peak_memory(process.pid))
    process.kill()
    process.wait()
    if len(times) < steps:
        raise ValueError(f"{x.name} ended after {len(times)} steps: " + " / ".join(seen[-3:]))
    x.first_s.append(warm_up_s + times[0] / 1e3)
    x.rounds.append(times[max(1, min(10, steps // 5)) :])  # the first ones still allocate
    log = [a for a in x.command if a.startswith("--out_dir=")]
    path = Path(log[-1].split("=", 1)[1], "log.jsonl") if log else Path("none")
    if path.exists():
        x.start = json.loads(path.open().readline())
        del x.start["settings"]  # those of this machine's folders among them


def peak_memory(pid: int) -> int:
    """Peak bytes of a process: on the GPU where it has some there, else in RAM; 0 where the system does not say."""
    try:
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        rows = [line.split(",") for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines()]
        if here := [int(mib) * 2**20 for p, mib in rows if int(p) == pid]:
            return here[0]
    except (OSError, ValueError):
        pass
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


def table(runs: list[Contestant], tokens_per_step: int) -> list[dict[str, Any]]:
    """A row of figures for each contestant, all with the FLOPs and the peak of ours, the first."""
    rows = []
    for x in runs:
        start = x.start or runs[0].start  # of ours where a peer has none: the same work
        flops, peak = start["flops_per_token"] * tokens_per_step, runs[0].start["peak_flops"]
        ms = sorted(t for times in x.rounds for t in times)
        median = statistics.median(ms)
        # of rounds taken one after the other, so that a slow spell of the machine hits both
        ratios = [
            statistics.median(x_i) / statistics.median(o_i) for x_i, o_i in zip(x.rounds, runs[0].rounds, strict=True)
        ]
        row = {"name": x.name, "ms": median, "p10": ms[len(ms) // 10], "p90": ms[len(ms) * 9 // 10]}
        row |= {"tokens_per_s": tokens_per_step / median * 1e3, "tflops": flops / median / 1e9}
        row |= {"mfu": flops / median * 1e3 / peak, "first_s": statistics.median(x.first_s)}
        row |= {"memory_gb": max(x.memory) / 1e9, "data_wait": statistics.mean(x.waits) if x.waits else None}
        row |= {
            "ours_faster": statistics.median(ratios),
            "ours_faster_least": min(ratios),
            "ours_faster_most": max(ratios),
        }
        rows.append(row)
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| | ms/step (p10, p90) | tokens/s | TFLOP/s | MFU | first step | peak memory | data wait | time / ours |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for r in rows:
        wait = "n/a" if r["data_wait"] is None else f"{r['data_wait']:.1%}"
        lines.append(
            f"| {r['name']} | {r['ms']:.4g} ({r['p10']:.4g}, {r['p90']:.4g}) | {r['tokens_per_s']:,.0f} | "
            f"{r['tflops']:.3f} | {r['mfu']:.1%} | {r['first_s']:.1f} s | {r['memory_gb']:.2f} GB | {wait} | "
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
    parser.add_argument("--save", metavar="NAME", help="write bench/results/DATE-NAME.md, .json and .png")
    parser.add_argument("--profile", action="store_true")
    a, given = parser.parse_known_args()
    if a.save:
        import matplotlib  # noqa: F401 (before the runs, not after them, if it is missing)
    if a.rounds < 1 or a.steps < 0:
        raise ValueError(f"--rounds {a.rounds} --steps {a.steps}: at least one round, and 0 or more steps")
    c = build(train.TrainConfig, read_settings(train.TrainConfig, given))
    vocab_size = a.vocab_size or (65 if c.dataset.endswith("_char") else 50257)
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "data"
        write_data(folder, vocab_size)
        if a.profile:
            return profile(c, folder, a.steps or 5)
        runs = contestants(c, given, a.peer, folder)
        if not a.steps:
            run(runs[0], 3)
            a.steps = max(5, min(300, round(10e3 / runs[0].rounds[0][-1])))
            runs[0] = Contestant(runs[0].name, runs[0].command, runs[0].cwd)
        for number in range(a.rounds):
            for x in runs:
                run(x, a.steps)
                print(f"round {number + 1}, {x.name}: {statistics.median(x.rounds[-1]):.4g} ms/step", flush=True)
    rows = table(runs, c.batch_size * c.gradient_accumulation_steps * c.block_size)
    start = runs[0].start
    sizes = {**{n: getattr(c, n) for n in SHARED[:8]}, "vocab_size": start["model_args"]["vocab_size"]}
    about = (
        f"{time.strftime('%Y-%m-%d')}, {start['device']}; {start['versions']}, commit {start['git_commit']}; "
        f"{start['dtype']}, {'compiled' if start['compiled'] else 'not compiled'} (ours, with a warm "
        f"cache; peers as --help says). MFU refers to "
        f"{start['peak_flops'] / 1e12:.2f} TFLOP/s ({start['peak_source']}). {a.rounds} rounds of {a.steps} steps."
    )
    command = shlex.join(["python", "bench/speed.py", *sys.argv[1:]]).replace(str(Path.home()), "~")
    text = f"{about}\n\n{sizes}\n\n```sh\n{command}\n```\n\n{as_markdown(rows)}\n"
    print("\n" + text)
    if a.save:
        path = ROOT / "bench" / "results" / f"{time.strftime('%Y-%m-%d')}-{a.save}"
        path.with_suffix(".md").write_text(f"# Step speed: {a.save}\n\n{text}\n![]({path.name}.png)\n")
        raw = [{"name": x.name, "rounds_ms": x.rounds, "first_s": x.first_s} for x in runs]
        result = {"command": command, "settings": sizes, "start": start, "rows": rows, "raw": raw}
        path.with_suffix(".json").write_text(json.dumps(result))
        plot(rows, path.with_suffix(".png"), f"{a.save}: {c.n_layer} layers, {c.n_embd} wide, T {c.block_size}")


if __name__ == "__main__":
    os.environ.setdefault("WANDB_MODE", "offline")
    with one_line_errors():
        main()
