"""Checks that training is right on lesser processors than this one, by acting as them and comparing with float32.

    python bench/check_machines.py                       # or: make check-machines; about two minutes
    python bench/check_machines.py --only "AVX2"         # machines with this in their name

Each machine is a process that uses only a part of the processor, by the variables of ATen, oneDNN and inductor. There,
small models in the shapes of the fast recipe and of GPT-2 go through the check that train.py makes, in several forms
(dtype, compiled or not, kind of attention; the kernels in C++ where the machine can run them). A form that is refused
does no harm. A form that passes must learn as plain float32 does, step by step. Ends with exit status 1 where one does
not, or where a form that is not compiled is refused.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import torch
from torch import Tensor

from bench.output import markdown_row
from bench.timing import ROOT
from deskgpt.compute import checks, compiling, implementation
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.compute.runner import Runner, Variant
from deskgpt.kernels import cpu_kernels
from deskgpt.system import hardware
from deskgpt.system.errors import one_line_errors
from model import GPT, GPTConfig

STEPS = 4
AT_ONCE = 2
TIMEOUT_S = 480  # far longer than a machine takes: against one that hangs
# Relative error of a loss. After a few steps the weights differ by rounding too.
LOSS_OFF = {"float32": 1e-3, "bfloat16": 2e-2}

# One layer of config/train_shakespeare_char_fast.py and of nanoGPT's small models, with fewer sequences.
MODELS: dict[str, dict[str, Any]] = {
    "fast": {
        "position": "rope",
        "norm": "rms",
        "qk_norm": True,
        "activation": "relu2",
        "tie_weights": False,
        "zero_init": True,
        "token_shift": True,
        "n_embd": 256,
    },
    "GPT-2": {"activation": "gelu", "n_embd": 128},
}
SIZES: dict[str, Any] = {"n_layer": 1, "n_head": 4, "block_size": 128}
BATCH_SIZE = 4
VOCAB_SIZE = 65
FORMS = {
    "fast": [
        Variant("bfloat16"),
        Variant("bfloat16", attention="kernels"),
        Variant("bfloat16", compiled=True, attention="explicit"),
    ],
    "GPT-2": [Variant("float32", attention="kernels"), Variant("bfloat16", attention="explicit")],
}
# Compiling takes most of the time: float32 compiles on two machines only, whose other kernels differ as well.
FLOAT32_COMPILED = Variant("float32", compiled=True)
WITH_FLOAT32_COMPILED = ("this processor", "AVX2")
# And the code that inductor writes without AMX is the same as with it.
NOT_COMPILED = "no AMX"


def machines() -> dict[str, dict[str, str]]:
    """What makes a process act as each machine: environment variables, inductor's simdlen, or what torch is told.

    Machines that this processor cannot act as are left out.
    """
    sets = set(hardware.processor()[1])
    out: dict[str, dict[str, str]] = {"this processor": {}}
    if sets & {"AVX2", "AVX-512"}:
        v3 = {"TORCHINDUCTOR_CPP_MARCH": "x86-64-v3", "simdlen": "256"}
        out["AVX2"] = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", **v3}
    out["no vectors"] = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "simdlen": "0"}
    if "AVX-512" in sets:
        v4 = {"TORCHINDUCTOR_CPP_MARCH": "x86-64-v4", "torch": "no"}
        out["AVX-512 without bfloat16"] = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", **v4}
    if "AMX-BF16" in sets:
        out["no AMX"] = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    return out


# ---- in a machine --------------------------------------------------------------------------------------------


def act_as(told: dict[str, str]) -> None:
    """Sets what no environment variable can, before torch chooses its kernels."""
    import torch._inductor.config as inductor

    if "simdlen" in told:
        inductor.cpp.simdlen = int(told["simdlen"])
    if "torch" in told:
        # torch has no setting for this, so its questions about the processor are answered with no.
        for question in ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_is_avx512_bf16_supported", "_init_amx"):
            setattr(torch.cpu, question, lambda: False)


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    """Tokens and their targets, (rows, T) each: the next token is 1 or 2 higher, which a few steps can learn."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB_SIZE, (rows, 1), generator=draw)
    steps = torch.randint(1, 3, (rows, SIZES["block_size"]), generator=draw)
    ids = torch.cat((ids, ids + steps.cumsum(1)), 1) % VOCAB_SIZE
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def learn(runner: Runner) -> tuple[list[float], list[Tensor]]:
    """Losses of a few steps of AdamW, always from the same weights, and the gradients after them."""
    torch.manual_seed(0)
    fresh = GPT(runner.model.config)
    runner.model.load_state_dict(fresh.state_dict())
    optimizer = make_optimizer(runner.model, "adamw", 0.1, 3e-3, (0.9, 0.95), 0.95)
    losses = []
    for _ in range(STEPS):
        losses.append(runner.forward_backward(*batch_of(BATCH_SIZE)).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    losses.append(runner.forward_backward(*batch_of(BATCH_SIZE)).item())
    return losses, checks.taken_gradients(runner, 1)


def check_form(model: GPT, name: str, form: Variant) -> dict[str, Any]:
    """What became of one form: why it was refused, or how far its losses and gradients are from plain float32's."""
    torch.compiler.reset()
    cpu = torch.device("cpu")
    batching = Batching(BATCH_SIZE, block_size=SIZES["block_size"])
    search = implementation.Tuner(
        model, batching, implementation.Options(), DistContext(cpu), batch_of, lambda batching, *_: batching
    )
    t0 = time.perf_counter()
    with redirect_stdout(io.StringIO()) as said:
        runner = implementation.try_variant(search, form)
    found: dict[str, Any] = {"model": name, "form": str(form), "compiled": form.compiled}
    found["compiler"] = compiling.compiler_name(cpu)
    if runner is None:
        return found | {"refused": said.getvalue().splitlines()[-1], "seconds": time.perf_counter() - t0}
    losses, gradients = learn(runner)
    expected_losses, _ = learn(Runner(model, Variant()))
    # float32 has come to slightly other weights. The gradients are compared at the weights that this form came to.
    learn(runner)
    _, expected_gradients = checks.plain_float32(model, batch_of(BATCH_SIZE), form)

    errors = checks.gradient_errors(runner.names, gradients, expected_gradients, form.dtype)
    worst = max(errors, key=lambda name: errors[name])
    loss_off = max(abs(a - b) / b for a, b in zip(losses, expected_losses, strict=True))
    right = loss_off <= LOSS_OFF[form.dtype] and errors[worst] <= checks.TOLERANCE[form.dtype]
    found |= {"loss_off": loss_off, "gradient_off": errors[worst], "parameter": worst, "right": right}
    return found | {"seconds": time.perf_counter() - t0}


def child(name: str) -> None:
    """Prints a JSON line for each form on the machine called `name`, which this process acts as."""
    act_as(machines()[name])
    if cpu_kernels.may_exist():
        cpu_kernels.load()
    for model_name, some in FORMS.items():
        model = GPT(GPTConfig(vocab_size=VOCAB_SIZE, bias=False, **SIZES, **MODELS[model_name]))
        wanted = [*some, FLOAT32_COMPILED] if model_name == "fast" and name in WITH_FLOAT32_COMPILED else some
        for form in wanted:
            if form.compiled and name == NOT_COMPILED:
                continue
            if form.attention == "kernels" and not cpu_kernels.may_exist():
                continue
            print(json.dumps(check_form(model, model_name, form)), flush=True)


# ---- all of them ---------------------------------------------------------------------------------------------


def run(name: str, told: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    """The lines of one machine's process, with `failed` in a last one where it ended too early."""
    env = os.environ | {key: value for key, value in told.items() if key.isupper()}
    # What is remembered and what is compiled is each machine's own: inductor's cache would take code that was made for
    # wider vectors. The path has no blanks, with which inductor's g++ fails.
    own = folder / name.replace(" ", "-")
    env |= {"XDG_CACHE_HOME": str(own), "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor")}
    # More threads that compile would be processes, which import torch first.
    env |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, __file__, "--child", name]
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as e:
        printed = (e.stdout or b"").decode()  # bytes, even for text=True
        return [*json_lines(printed), {"failed": f"took more than {TIMEOUT_S} s"}]
    lines = json_lines(done.stdout)
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        lines.append({"failed": errors[-1]})
    return lines


def json_lines(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def verdict(line: dict[str, Any]) -> str:
    """What became of a form in words: right, refused, or what is wrong."""
    if "failed" in line:
        return f"FAILED: {line['failed']}"
    if "refused" in line:
        expected = line["compiled"] and ("disagree with plain float32" in line["refused"] or not line["compiler"])
        return f"{'refused' if expected else 'REFUSED, which it should not be'}: {line['refused']}"
    return "right" if line["right"] else "WRONG, and not refused"


def is_bad(line: dict[str, Any]) -> bool:
    """Whether the form of a line is neither right nor rightly refused."""
    return verdict(line) != "right" and not verdict(line).startswith("refused")


def row(machine: str, line: dict[str, Any]) -> list[str]:
    """The table's row for a form on a machine."""
    errors = ["", ""]
    if "loss_off" in line:
        errors = [f"{line['loss_off']:.1e}", f"{line['gradient_off']:.1e}"]
    return [machine, line.get("model", ""), line.get("form", ""), *errors, verdict(line)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="machines with this in their name")
    parser.add_argument("--child", metavar="MACHINE", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child:
        child(a.child)
        return 0
    chosen = {name: told for name, told in machines().items() if a.only in name}
    if not chosen:
        raise ValueError(f"--only {a.only!r}: no machine has this in its name; there are {', '.join(machines())}")

    print(f"{len(chosen)} machines, {AT_ONCE} at a time", flush=True)
    bad = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp, ThreadPoolExecutor(AT_ONCE) as pool:
        pending = {name: pool.submit(run, name, told, Path(tmp)) for name, told in chosen.items()}
        for name, future in pending.items():
            for line in future.result():
                print(markdown_row(row(name, line)), flush=True)
                bad += is_bad(line)
    print(f"{bad} wrong" if bad else "every form that passes the check learns as plain float32 does")
    return 1 if bad else 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
