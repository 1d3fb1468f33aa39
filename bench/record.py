"""Records what train.py of a checkout computes, bit for bit, to show that a change of the code changed nothing.

    python bench/record.py --root ../before > before.json
    python bench/record.py > after.json
    diff before.json after.json

Each of a dozen settings trains fifty steps on small data made here, resumed in the middle; where it can, sample.py
writes from the result. Takes about ten minutes. Both recordings must come from the same machine, since matmuls round
differently on others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from deskgpt.run.log import read_events
from deskgpt.system.errors import one_line_errors

HALF, STEPS = 25, 50

GPT2 = "--n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=8"
NANOGPT = GPT2 + " --activation=gelu"
MODERN = GPT2 + (
    " --position=rope --norm=rms --qk_norm=True --activation=relu2 --tie_weights=False --zero_init=True"
    " --token_shift=True --optimizer=muon --lr_schedule=trapezoid"
)
LARGE = "--n_layer=2 --n_head=2 --n_embd=32 --block_size=128 --batch_size=8 --dataset={data}/gpt2"


@dataclass
class Case:
    """A run of two halves. The second is resumed, without dropout and in a form of its own."""

    settings: str
    dtype: str = "float32"
    compiled: bool = False
    attention: str = "flash"
    ranks: int = 1
    accumulation: int = 1


CASES = {
    "GPT-2, float32": Case(GPT2),
    "GPT-2, float32, explicit attention": Case(GPT2, attention="explicit"),
    "GPT-2, bfloat16": Case(GPT2, "bfloat16"),
    "GPT-2 with biases, bfloat16, explicit attention": Case(GPT2 + " --bias=True", "bfloat16", attention="explicit"),
    "nanoGPT's GELU, float32, compiled": Case(NANOGPT, compiled=True),
    "nanoGPT's GELU, bfloat16, explicit attention, compiled": Case(NANOGPT, "bfloat16", True, "explicit"),
    "modern, float32, explicit attention, 300 tokens": Case(
        MODERN + " --block_size=300 --batch_size=2", attention="explicit"
    ),
    "modern, bfloat16, explicit attention, compiled": Case(MODERN, "bfloat16", True, "explicit"),
    "vocabulary of 50,304, accumulation": Case(LARGE, accumulation=4),
    "vocabulary of 50,304, bfloat16, compiled, accumulation": Case(LARGE, "bfloat16", True, accumulation=2),
    "two ranks, accumulation": Case(GPT2, ranks=2, accumulation=4),
    "two ranks, nanoGPT's GELU, compiled": Case(NANOGPT, compiled=True, ranks=2, accumulation=2),
}


def make_data(folder: Path) -> None:
    """chars: 40 characters, each followed by one of three; gpt2: the same of 40 GPT-2 tokens."""
    draw = np.random.default_rng(0)
    chars = [chr(ord("0") + i) for i in range(40)]
    ids = draw.integers(0, 3, 60_000).cumsum() % len(chars)
    for name, tokens in (("chars", ids), ("gpt2", 1000 * ids)):
        (folder / name).mkdir(parents=True)
        tokens.astype("<u2")[:50_000].tofile(folder / name / "train.bin")
        tokens.astype("<u2")[50_000:].tofile(folder / name / "val.bin")
    meta = {"tokenizer": {"name": "char", "chars": "".join(chars)}, "vocab_size": len(chars)}
    (folder / "chars" / "meta.json").write_text(json.dumps(meta))


def run(root: Path, words: list[str], env: dict[str, str]) -> str:
    """What a script of the checkout prints. Ends this one where that fails."""
    done = subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def digest(value: Any) -> Any:
    """value with each tensor as its dtype, shape and the SHA-256 of its bytes."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"
    if isinstance(value, dict):
        return {str(k): digest(v) for k, v in value.items()}
    return [digest(v) for v in value] if isinstance(value, list | tuple) else value


def computed(checkpoint: dict[str, Any]) -> Any:
    """What training has computed of a checkpoint."""
    return digest({name: checkpoint[name] for name in ("model", "optimizer", "scaler", "iter_num", "best_val_loss")})


def record_case(root: Path, case: Case, out_dir: Path, data: Path, env: dict[str, str]) -> dict[str, Any]:
    """Losses, gradient norms, evaluations and the checkpoint of both halves, and samples."""
    start = ["train.py"]
    if case.ranks > 1:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}", "train.py"]
    always = [f"--dataset={data}/chars", *case.settings.format(data=data).split(), f"--out_dir={out_dir}"]
    always += [f"--gradient_accumulation_steps={case.accumulation}", f"--dtype={case.dtype}", "--device=cpu"]
    always += ["--eval_iters=2", f"--eval_interval={HALF}", "--warmup_iters=5", "--learning_rate=1e-3"]
    always += [f"--lr_decay_iters={STEPS}", "--cooldown_iters=10"]
    # Nothing in this half depends on the machine's speed.
    run(root, [*start, *always, f"--max_iters={HALF}", "--dropout=0.1", "--compile=False", "--attention=flash"], env)
    path = out_dir / "ckpt.pt"
    checkpoint = torch.load(path, weights_only=True)
    middle = computed(checkpoint)
    form = {"dtype": case.dtype, "compiled": case.compiled, "attention": case.attention, "device": "cpu"}
    checkpoint.pop("format", None)  # which would say that the file has a checksum
    torch.save(checkpoint | {"form": form}, path)
    again = [f"--max_iters={STEPS}", "--dropout=0.0", f"--compile={case.compiled}", "--init_from=resume"]
    run(root, [*start, *always, *again, "--resume_changed=True"], env)
    events = read_events(out_dir / "log.jsonl")
    started = [e for e in events if e["event"] == "start"][-1]
    kept = ("event", "iter", "loss", "grad_norm", "lr", "tokens", "train_loss", "val_loss", "val_se")
    found = {
        "form": {name: started[name] for name in ("dtype", "compiled", "attention")},
        "start": {name: started[name] for name in ("parameters", "flops_per_token", "val_sha256")},
        "figures": [{k: e[k] for k in kept if k in e} for e in events if e["event"] in ("iter", "eval")],
        "checkpoint in the middle": middle,
        "checkpoint at the end": computed(torch.load(path, weights_only=True)),
    }
    if "gpt2" not in case.settings and case.ranks == 1:
        words = ["sample.py", f"--out_dir={out_dir}", "--num_samples=2", "--max_new_tokens=80", "--start=0123"]
        found["samples"] = run(root, [*words, f"--compile={case.compiled}"], env)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    parser.add_argument("--only", default="", metavar="WORD", help="settings whose name has this in it")
    a = parser.parse_args()
    out = {}
    with tempfile.TemporaryDirectory() as tmp:
        data = Path(tmp) / "data"
        make_data(data)
        # One thread: so many processes can run beside others. Nothing is remembered from the user's own runs.
        env = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": f"{tmp}/cache"}
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{tmp}/inductor"
        for name, case in CASES.items():
            if a.only in name:
                print(name, file=sys.stderr)
                out[name] = record_case(a.root.resolve(), case, Path(tmp) / name, data, env)
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    with one_line_errors():
        main()
