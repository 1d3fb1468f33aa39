"""Records what the scripts of a checkout compute, bit for bit, to show that a change of the code changed nothing.

    python bench/record.py --root ../before --save before.json
    python bench/record.py --root . --save after.json
    python bench/record.py --compare before.json after.json

Everything runs as a user would start it, on small data made here: fifty steps in each of a dozen settings, resumed in
the middle; samples; the preparation of documents; --help; the messages for wrong input. Takes about ten minutes. Both
recordings must come from the same machine, since matmuls round differently on others. Writes the JSON file named with
--save; --compare exits with status 1 where a figure differs. Messages that differ are printed and are not a failure.
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
    explicit: bool = False  # attention as matmuls around a softmax
    ranks: int = 1
    accumulation: int = 1


CASES = {
    "GPT-2, float32": Case(GPT2),
    "GPT-2, float32, explicit attention": Case(GPT2, explicit=True),
    "GPT-2, bfloat16": Case(GPT2, "bfloat16"),
    "GPT-2 with biases, bfloat16, explicit attention": Case(GPT2 + " --bias=True", "bfloat16", explicit=True),
    "nanoGPT's GELU, float32, compiled": Case(NANOGPT, compiled=True),
    "nanoGPT's GELU, bfloat16, explicit attention, compiled": Case(NANOGPT, "bfloat16", True, True),
    "modern, float32, explicit attention in blocks": Case(MODERN + " --block_size=300 --batch_size=2", explicit=True),
    "modern, bfloat16, explicit attention, compiled": Case(MODERN, "bfloat16", True, True),
    "vocabulary of 50,304, accumulation": Case(LARGE, accumulation=4),
    "vocabulary of 50,304, bfloat16, compiled, accumulation": Case(LARGE, "bfloat16", True, accumulation=2),
    "two ranks, accumulation": Case(GPT2, ranks=2, accumulation=4),
    "two ranks, nanoGPT's GELU, compiled": Case(NANOGPT, compiled=True, ranks=2, accumulation=2),
    "modern, accumulation, documents aligned": Case(
        MODERN + " --align_documents=True --dataset={data}/documents", accumulation=2
    ),
}

# Each ends with one line on stderr.
WRONG = [
    "train.py --batchsize=8",
    "train.py --batch_size=many",
    "train.py --batch_size=0",
    "train.py --dtype=float8",
    "train.py --activation=silu",
    "train.py --n_embd=100 --n_head=3",
    "train.py --position=rope --n_embd=6 --n_head=2",
    "train.py config/train_shakespeare.py",
    "train.py --dataset=nowhere",
    "train.py --dataset={data}/chars --block_size=1000000",
    "train.py --dataset={data}/chars --device=cuda",
    "train.py --dataset={data}/chars --device=tpu",
    "train.py --dataset={data}/chars --backend=nccl --align_documents=True",
    "train.py --init_from=resume --out_dir=nowhere",
    "train.py --init_from=gpt3 --dataset={data}/gpt2",
    "train.py --out_dir=/dev/null/out --dataset={data}/chars --max_iters=0 --n_layer=1 --n_embd=8 --n_head=1",
    "sample.py --out_dir=nowhere",
    "sample.py --temperature=-1",
    "sample.py --top_p=0",
    "data/text/prepare.py nowhere.txt --name={data}/own",
    "bench/compare.py nowhere",
    "bench/speed.py --rounds 0",
]


def make_data(folder: Path) -> None:
    """chars: 40 characters, each followed by one of three; gpt2: the same of 40 GPT-2 tokens; documents.jsonl."""
    draw = np.random.default_rng(0)
    chars = [chr(ord("0") + i) for i in range(40)]
    ids = draw.integers(0, 3, 60_000).cumsum() % len(chars)
    for name, tokens in (("chars", ids), ("gpt2", 1000 * ids)):
        (folder / name).mkdir(parents=True)
        tokens.astype("<u2")[:50_000].tofile(folder / name / "train.bin")
        tokens.astype("<u2")[50_000:].tofile(folder / name / "val.bin")
    meta = {"tokenizer": {"name": "char", "chars": "".join(chars)}, "vocab_size": len(chars)}
    (folder / "chars" / "meta.json").write_text(json.dumps(meta))
    texts = ["".join(chars[i] for i in ids[first : first + 700]) for first in range(0, 60_000, 700)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "documents.jsonl").write_text("\n".join(lines) + "\n")


def run(root: Path, words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a script of the checkout, which ends within ten minutes."""
    return subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, timeout=600)


def must(done: subprocess.CompletedProcess[str]) -> str:
    """What a script printed. Ends this one where that failed."""
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


# ---- one case ------------------------------------------------------------------------------------------------


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


def record_case(root: Path, case: Case, folder: Path, data: Path, env: dict[str, str]) -> dict[str, Any]:
    """Losses, gradient norms, evaluations and the checkpoint of both halves."""
    out_dir = folder / "out"
    start = ["train.py"]
    if case.ranks > 1:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}", "train.py"]
    always = [f"--dataset={data}/chars", *case.settings.format(data=data).split(), f"--out_dir={out_dir}"]
    always += [f"--gradient_accumulation_steps={case.accumulation}", f"--dtype={case.dtype}", "--device=cpu"]
    always += ["--eval_iters=2", f"--eval_interval={HALF}", "--warmup_iters=5", "--learning_rate=1e-3"]
    always += [f"--lr_decay_iters={STEPS}", "--cooldown_iters=10"]
    # With dropout, attention's kind is not timed: nothing in this half depends on the machine's speed.
    must(run(root, [*start, *always, f"--max_iters={HALF}", "--dropout=0.1", "--compile=False"], env))
    path = out_dir / "ckpt.pt"
    checkpoint = torch.load(path, weights_only=True)
    middle = computed(checkpoint)
    form = {"dtype": case.dtype, "compiled": case.compiled, "explicit": case.explicit, "device": "cpu"}
    checkpoint.pop("format", None)  # which would say that the file has a checksum
    torch.save(checkpoint | {"form": form}, path)
    again = [f"--max_iters={STEPS}", "--dropout=0.0", f"--compile={case.compiled}", "--init_from=resume"]
    if "resume_changed" in (root / "train.py").read_text():  # the dropout is; older checkouts do not ask
        again.append("--resume_changed=True")
    must(run(root, [*start, *always, *again], env))
    events = read_events(out_dir / "log.jsonl")
    started = [e for e in events if e["event"] == "start"][-1]
    found = {name: started[name] for name in ("dtype", "compiled", "explicit_attention")}
    wanted = {"dtype": case.dtype, "compiled": case.compiled, "explicit_attention": case.explicit}
    if found != wanted:
        raise SystemExit(f"{case} ran as {found}")
    kept = ("event", "iter", "loss", "grad_norm", "lr", "tokens", "train_loss", "val_loss", "val_se")
    figures = [{k: e[k] for k in kept if k in e} for e in events if e["event"] in ("iter", "eval")]
    end = computed(torch.load(path, weights_only=True))
    return {"start": {k: started[k] for k in ("parameters", "flops_per_token", "val_sha256")}, "figures": figures} | {
        "checkpoint in the middle": middle,
        "checkpoint at the end": end,
    }


# ---- all of them ---------------------------------------------------------------------------------------------


def record(root: Path, only: str) -> dict[str, Any]:
    """What the scripts of the checkout compute and say; with `only`, the settings whose name has this in it."""
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as tmp:
        data = Path(tmp) / "data"
        make_data(data)
        # One thread: so many processes can run beside others. Nothing is remembered from the user's own runs.
        env = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": f"{tmp}/cache"}
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{tmp}/inductor"
        words = [f"--source={data}/documents.jsonl", "--encoding=bytes", "--shard_tokens=20000", "--val_tokens=5000"]
        must(run(root, ["data/fineweb_edu/prepare.py", *words, f"--out={data}/documents"], env))
        files = sorted((data / "documents").iterdir())
        out["documents"] = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files if p.suffix == ".bin"}
        for name, case in CASES.items():
            if only not in name:
                continue
            print(name, flush=True)
            folder = Path(tmp) / name
            out[name] = record_case(root, case, folder, data, env)
            if "gpt2" not in case.settings and case.ranks == 1:
                words = [f"--out_dir={folder}/out", "--num_samples=2", "--max_new_tokens=80", "--start=0123"]
                out[name]["samples"] = must(run(root, ["sample.py", *words], env))
                if case.compiled:
                    out[name]["samples, compiled"] = must(run(root, ["sample.py", *words, "--compile=True"], env))
        messages: dict[str, Any] = {}
        for command in [*WRONG, "train.py --help", "sample.py --help"] if not only else []:
            done = run(root, command.format(data=data).split(), env)
            messages[command] = {"status": done.returncode, "said": (done.stdout + done.stderr).replace(tmp, "TMP")}
        out["messages"] = messages
    return out


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Where two recordings are not the same."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = list(dict.fromkeys([*a, *b]))
        return [d for n in names for d in differences(a.get(n), b.get(n), f"{at} / {n}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, pair in enumerate(zip(a, b, strict=True)) for d in differences(*pair, f"{at} / {i}")]
    return [] if a == b else [f"{at}: {a!r} and {b!r}"]


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Prints what differs; the exit status."""
    faults: list[str] = []
    for command, old in before.pop("messages").items():
        new = after["messages"].get(command, {})
        if old["status"] != new.get("status"):
            faults.append(f"{command}: status {old['status']} and {new.get('status')}")
        if old["said"] != new.get("said"):
            print(f"{command}\n  - {old['said'].strip()}\n  + {str(new.get('said')).strip()}")
    after.pop("messages")
    faults += differences(before, after)
    for fault in faults:
        print(f"DIFFERS {fault}")
    print(f"{len(before)} recordings, {len(faults)} differences")
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="WORD", help="settings whose name has this in it, no messages")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE")
    a = parser.parse_args()
    if a.compare:
        before = json.loads(a.compare[0].read_text())
        after = json.loads(a.compare[1].read_text())
        return compare(before, after)
    found = record(a.root.resolve(), a.only)
    if a.save:
        a.save.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
