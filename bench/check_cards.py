"""Compile what inductor makes of our configs for NVIDIA cards that are not there, and count its work and memory.

    make check-cards                                                   # all cards and configs: minutes each
    python bench/check_cards.py --cards "RTX 4070" --configs train_fineweb_125m

For torch's CPU build, on Linux; triton is downloaded (0.2 GB) into ~/.cache/deskgpt. On a pretended card
(pretend_card.py) inductor writes its Triton kernels of a training step, of the loss's softmax and of evaluation; ptxas,
which triton brings, compiles every configuration that autotuning would try. The step itself runs on fake tensors: the
bytes that kernels move and the bytes alive are counted. Exit status 1 if a kernel does not compile, wants more shared
memory than the card has, or spills more than a few registers in all configurations.

The speed is a roofline, whose shares of the peaks are those of one H200 and of one user's RTX 4070.
"""
# ruff: noqa: E402 (torch comes after the card that it is to see)

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the repository; Python adds only this folder

from bench import pretend_card

IS_CHILD = __name__ == "__main__" and sys.argv[1:2] == ["--one"]
if IS_CHILD:
    pretend_card.pretend(backend="inductor")  # before torch is imported

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from bench.output import markdown_table
from configurator import build, read_settings
from deskgpt.compute.variant import Variant, apply_variant
from deskgpt.estimate.memory import Step, memory
from deskgpt.estimate.plan import is_geforce
from deskgpt.system import cache, hardware, peaks
from deskgpt.system.errors import OneLineParser, one_line_errors
from model import GPT, GPTConfig

CONFIGS = ("train_shakespeare_char", "train_fineweb_125m", "train_fineweb_125m_fast")
TRITON = "triton==3.7.1"  # which torch 2.13 requires

# Shares of the published peaks that a step's matmuls and attention, and its other kernels, are taken to reach. An H200
# has shown 0.69 (20.6 ms for 14.0 TFLOP of 124M at 16 x 1024) and about 0.9; GeForce cards clock above their rating.
OF_FLOPS = 0.69
OF_FLOPS_GEFORCE = 0.8
OF_MEMORY = 0.9
FEW = 16  # bytes of spilled registers, which cost nothing that shows

# Operators that move no bytes, and those that touch as much of their first tensor as they return.
WITHOUT_WORK = ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach", "alias", "device")
BY_CUBLAS = ("mm", "attention")  # bound by FLOPs
READ_IN_PART = ("embedding", "index", "index_put_", "gather")

# ---- in a process that pretends a card -----------------------------------------------------------------------


class Kernels:
    """The Triton kernels that inductor writes for a card. They compile, but do not run: `run` is called instead."""

    def __init__(self, card: pretend_card.Card) -> None:
        from triton.backends.compiler import GPUTarget

        self.card = card
        self.target = GPUTarget("cuda", 10 * card.capability[0] + card.capability[1], 32)
        self.sources: dict[str, str] = {}  # source -> name
        self.run: Any = None  # takes the bytes that a kernel moves

    def collect(self, compiler: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
        """Take a kernel in place of AsyncCompile.triton; return what the graph calls."""
        self.sources[source] = name
        found = re.search(r"'kernel_num_gb': ([\d.e+-]+)", source)
        size = round(1e9 * float(found[1])) if found else 0
        return SimpleNamespace(run=lambda *args, **kwargs: self.run(size))

    def compile(self) -> dict[str, Any]:
        """Return the number of kernels and of cubins, and a line for each failure."""
        from torch._inductor.codecache import PyCodeCache

        cubins = 0
        failed = []
        for source, name in self.sources.items():
            kernel = getattr(PyCodeCache.load(source), name)
            spilled = []  # bytes, by configuration
            for config in kernel.configs:
                try:
                    of_config, shared = self.memory_of(kernel, config)
                except Exception as e:  # of no common class
                    failed.append(f"{name} {config.kwargs}: {' '.join(f'{type(e).__name__}: {e}'.split())[:200]}")
                    continue
                cubins += 1
                spilled.append(of_config)
                if shared > self.card.shared_memory:
                    failed.append(f"{name} {config.kwargs}: {shared} bytes of shared memory")
            least = min(spilled, default=0)
            if least > FEW:
                failed.append(f"{name}: {least} bytes of registers spill")
        return {"kernels": len({*self.sources.values()}), "cubins": cubins, "failed": failed}

    def memory_of(self, kernel: Any, config: Any) -> tuple[int, int]:
        """Compile one configuration; return its bytes of spilled registers and of shared memory."""
        import triton

        meta = kernel._create_compile_meta(config)
        code = triton.compiler.ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            binary = triton.compile(code, self.target, kernel._create_compile_options(config, meta))
        [spilled] = re.findall(r"(\d+) bytes spill stores", log.getvalue())
        return int(spilled), binary.metadata.shared

    def prepare_inductor(self) -> None:
        """Make inductor write code for the card, and its graphs run on fake tensors."""
        import torch._inductor.async_compile
        import torch._inductor.runtime.triton_helpers
        import triton.runtime

        driver = SimpleNamespace(get_current_target=lambda: self.target, get_current_device=lambda: 0)
        triton.runtime.driver.set_active(driver)
        triton.knobs.compilation.always_compile = True  # the same kernel again, too: its log is wanted
        triton.knobs.nvidia.dump_ptxas_log = True
        inductor: Any = torch._inductor
        inductor.config.benchmark_kernel = True  # writes down how many bytes a kernel moves
        inductor.async_compile.AsyncCompile.triton = lambda *args, **kwargs: self.collect(*args, **kwargs)
        inductor.runtime.triton_helpers.set_driver_to_gpu = lambda: None
        # What graphs call in C++, which wants real tensors.
        guards: Any = torch._C._dynamo.guards
        guards._empty_strided_cuda = lambda *args: torch.empty_strided(*args[:2], dtype=args[2], device="cuda")
        guards._reinterpret_tensor = lambda t, size, stride, n=0: t.as_strided(size, stride, t.storage_offset() + n)


class Work(TorchDispatchMode):
    """Count what runs on fake tensors: the bytes alive, and the bytes that kernels and operators move."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.moved = 0  # bytes
        self._sizes: dict[int, int] = {}  # of the storages alive, by address

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile compiles although this mode is on, and its graphs run in it."""
        return True

    def run(self, size: int) -> None:
        """Count the bytes of a kernel of inductor's."""
        self.moved += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._note(t.untyped_storage())
        if not func.is_view and name not in WITHOUT_WORK and not any(word in name for word in BY_CUBLAS):
            touched = (args[1:], None if name == "index_put_" else out) if name in READ_IN_PART else (args, kwargs, out)
            self.moved += sum(t.nbytes for t in tree_leaves(touched) if isinstance(t, Tensor))
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)


def card_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """Compute F.scaled_dot_product_attention by the card's operator: torch's own choice would be the CPU's."""
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    if torch.cuda.get_device_capability() >= (8, 0) and q.dtype != torch.float32 and attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, dropout_p, is_causal)[0]


def check(card_name: str, config_name: str) -> dict[str, Any]:
    """Return all that is found of one config on one card, in a process of its own."""
    kernels = Kernels(pretend_card.CARDS[card_name])
    kernels.prepare_inductor()
    torch.nn.functional.scaled_dot_product_attention = card_attention  # type: ignore[assignment]
    device = torch.device("cuda")
    name, *flags = config_name.split()
    c = build(train.TrainConfig, read_settings(train.TrainConfig, [f"config/{name}.py", *flags]))
    config = GPTConfig.from_settings(c, 65 if "_char" in config_name else 50304)
    dtype = peaks.fast_dtype(device)
    residual_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    variant = Variant(dtype, compiled=True, residual_dtype=residual_dtype)
    work = Work()
    kernels.run = work.run
    with FakeTensorMode(allow_non_fake_inputs=True), device, work:
        model = GPT(config)
        apply_variant(model, variant)
        optimizer = train.build_optimizer(c, model, dtype=dtype)
        idx = torch.zeros(c.batch_size, c.block_size, dtype=torch.int64)
        for _ in range(2):  # the second step has the optimizer's states
            work.peak = work.alive
            for _ in range(2):  # the second micro-batch adds to gradients
                work.moved = 0
                with hardware.autocast(device, dtype):
                    loss = model(idx, idx)[1] / 2
                loss.backward()
                del loss
            moved = work.moved
            torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        peak_bytes = work.peak

        model.eval()
        with torch.no_grad(), hardware.autocast(device, dtype):
            model(idx, idx)
    step = Step(config, c.batch_size, variant, "cuda")
    found = {
        "dtype": dtype,
        "bytes": moved,
        "peak_bytes": peak_bytes,
        "predicted_bytes": sum(memory(step).values()),
    }
    found |= {"tokens": idx.numel(), "flops": GPT.without_storage(config).estimate_flops() * idx.numel()}
    return found | kernels.compile()


# ---- the command ---------------------------------------------------------------------------------------------


def triton_folder() -> str:
    """Return where triton is. In the environment itself it would change what torch.compile does on a CPU."""
    folder = cache.folder() / TRITON
    if not (folder / "triton").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}", TRITON]
        subprocess.run(pip, check=True)
    return str(folder)


def checked(card: str, config: str) -> dict[str, Any]:
    """Return what `check` finds in a process of its own. Raises SystemExit if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        env |= {pretend_card.CARD: card}
        env |= {"PYTHONPATH": os.pathsep.join([triton_folder(), os.environ.get("PYTHONPATH", "")])}
        env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        command = [sys.executable, __file__, "--one", card, config]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {config} cannot be checked for {card}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    found["failed"] += re.findall(r"^W\d{4} .*$", done.stderr, re.M)  # which a user would see, too
    return found


def row_of(name: str, found: dict[str, Any]) -> list[str]:
    """Return a card's row of the table, with a roofline of a micro-batch."""
    card = pretend_card.CARDS[name]
    known = peaks.find_card(name)
    share = OF_FLOPS_GEFORCE if is_geforce(known) else OF_FLOPS
    matmul_s = found["flops"] / share / known.flops[found["dtype"]]
    memory_s = found["bytes"] / OF_MEMORY / card.gb_per_s / 1e9
    return [
        f"{name} (sm_{card.capability[0]}{card.capability[1]}), {found['dtype']}",
        f"{found['kernels']}, {found['cubins']}",
        str(len(found["failed"])),
        f"{found['bytes'] / 1e9:.1f} ({memory_s / (matmul_s + memory_s):.0%})",
        f"{found['tokens'] / (matmul_s + memory_s):,.0f}",
        f"{found['peak_bytes'] / 2**30:.2f}, {found['predicted_bytes'] / 2**30:.2f}",
    ]


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("--cards", nargs="+", choices=pretend_card.CARDS, default=list(pretend_card.CARDS))
    parser.add_argument(
        "--configs", nargs="+", metavar="NAME", default=CONFIGS, help="of config/NAME.py, with settings"
    )
    a = parser.parse_args()
    head = ["card", "kernels, cubins", "failed", "GB moved (share of the time)", "tokens/s", "GiB counted, predicted"]
    problems = []
    for config in a.configs:
        rows = []
        for card in a.cards:
            found = checked(card, config)
            rows.append(row_of(card, found))
            problems += [f"{card}, {config}: {line}" for line in found["failed"]]
        print(f"\n## {config}: expected, not measured\n\n{markdown_table(head, rows, 1)}", flush=True)
    if problems:
        sys.exit("\n".join(["", *problems]))


if IS_CHILD:
    print("\n" + json.dumps(check(*sys.argv[2:])))
elif __name__ == "__main__":
    with one_line_errors():
        main()
