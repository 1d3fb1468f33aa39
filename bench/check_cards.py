"""Compile what inductor makes of our configs for NVIDIA cards that are not there, and count its work and memory.

    make check-cards                                                   # all cards and configs: minutes each
    python bench/check_cards.py --cards "RTX 4070" --configs train_fineweb_125m
    python bench/check_cards.py --peer nanogpt:../nanoGPT              # counted beside an unmodified nanoGPT

For torch's CPU build, on Linux; triton is downloaded (0.2 GB) into ~/.cache/deskgpt. On a pretended card
(pretend_card.py) inductor writes its Triton kernels of a training step, of the loss's softmax and of evaluation; ptxas,
which triton brings, compiles every configuration that autotuning would try. The step itself runs on fake tensors:
launches, bytes moved, FLOPs and bytes alive are counted. Exit status 1 if a kernel does not compile,
wants more shared memory than the card has, or spills more than a few registers in all configurations.

The time is a roofline, whose shares of the peaks are those of one H200. A micro-batch is one that adds to gradients. An
operator counts as one launch, and what the card waits for the CPU is not in the time.
"""
# ruff: noqa: E402 (torch comes after the card that it is to see)

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
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
from torch.utils.flop_counter import flop_registry

import train
from bench.output import markdown_table
from configurator import build, read_settings
from deskgpt.compute.distributed import gradient_norms
from deskgpt.compute.optimizer import step_if_finite
from deskgpt.compute.variant import Variant, apply_variant
from deskgpt.estimate.memory import Step, memory
from deskgpt.estimate.plan import is_geforce
from deskgpt.system import cache, hardware, peaks
from deskgpt.system.errors import ConfigError, OneLineParser, one_line_errors
from deskgpt.system.files import write_atomically
from model import GPT, NANOGPT_ARGS, GPTConfig

CONFIGS = ("train_shakespeare_char", "train_fineweb_125m", "train_fineweb_125m_fast")
BESIDE_PEER = ("train_fineweb_125m --batch_size=16", "train_shakespeare_char")
TRITON = "triton==3.7.1"  # which torch 2.13 requires
COUNTS = ROOT / "bench" / "results" / "check-cards.json"

# Shares of the published peaks that matmuls and attention, and all other kernels, are taken to reach: those with which
# nanoGPT's count is what it took on an H200, 26.8 ms for a micro-batch of 16 x 1024.
OF_FLOPS = 0.69
OF_FLOPS_GEFORCE = 0.8  # nanoGPT's speed on an RTX 4090 and an RTX 4070 (docs/figures.md) needs 0.67 and 1.0
OF_MEMORY = 0.92  # 4.4 TB/s
FEW = 16  # bytes of spilled registers, which cost nothing that shows

# Operators that move nothing; that write their first tensor and do not read it; and that read or write a part of it.
WITHOUT_WORK = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "device")
WITHOUT_WORK += ("is_same_size",)
OVERWRITES = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_", "uniform_", "bernoulli_")
OVERWRITES += ("scatter_", "index_copy_", "index_put_")
READS_PART = ("embedding", "index", "index_select", "gather")
WRITES_PART = ("scatter_", "scatter_add_", "index_copy_", "index_put_", "index_add_")

# ---- in a process that pretends a card -----------------------------------------------------------------------


class Kernels:
    """The Triton kernels that inductor writes for a card. They compile, but do not run: `run` is called instead."""

    def __init__(self, card: pretend_card.Card) -> None:
        from triton.backends.compiler import GPUTarget

        self.card = card
        self.target = GPUTarget("cuda", 10 * card.capability[0] + card.capability[1], 32)
        self.sources: dict[str, str] = {}  # source -> name
        self.run: Any = None  # takes the bytes that a kernel moves, once for each launch

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
    """Count what runs on fake tensors: the bytes alive, launches, bytes moved, and FLOPs of matmuls and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0  # bytes
        self.launches = self.moved = self.flops = 0  # matmuls and attention, bound by their FLOPs, move no bytes here
        self._sizes: dict[int, int] = {}  # of the storages alive, by address

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile compiles although this mode is on, and its graphs run in it."""
        return True

    def run(self, size: int) -> None:
        """Count a kernel of inductor's and its bytes."""
        self.launches += 1
        self.moved += size

    def take(self) -> dict[str, int]:
        """Return what was counted since the last call."""
        found = {"launches": self.launches, "bytes": self.moved, "flops": self.flops}
        self.launches = self.moved = self.flops = 0
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._note(t.untyped_storage())
        operator = func._overloadpacket
        if func.is_view or operator.__name__ in WITHOUT_WORK:
            return out
        if operator in flop_registry:
            flops = flop_registry[operator](*args, **kwargs, out_val=out)
            self.flops += flops // 2 if "attention" in operator.__name__ else flops  # which is causal
            self.run(0)
        else:
            self.run(bytes_moved(func, args, kwargs, out))
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


def bytes_moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operator reads and writes, each number once."""
    name = func._overloadpacket.__name__
    moved = 0 if func._schema.is_mutable else size_of(out)  # else it returns what it has written
    for i, argument in enumerate(func._schema.arguments):
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        size = size_of(given)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (is_written and argument.kwarg_only)  # as `out`
        if i == 0 and name in READS_PART:
            size = size_of(out)
        if i == 0 and name in WRITES_PART:  # as many numbers as it has positions or values
            size = given.element_size() * max(t.numel() for t in tree_leaves(args[1:]) if isinstance(t, Tensor))
        if i == 0 and (name in OVERWRITES or name.endswith("_like") or name.startswith("new_")):
            is_read = name == "index_put_" and args[3:] == (True,)  # which adds
        if argument.name == "grads":  # a fused optimizer's, which it scales
            is_written = kwargs.get("grad_scale") is not None
        moved += size * (is_read + is_written)
    return moved


def size_of(value: Any) -> int:
    """Return the bytes of the tensors in a value. A number that is expanded counts once."""
    size = 0
    for t in tree_leaves(value):
        if isinstance(t, Tensor):
            size += t.element_size() * math.prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step)
    return size


def card_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """Compute F.scaled_dot_product_attention by the card's operator: torch's own choice would be the CPU's."""
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    if torch.cuda.get_device_capability() >= (8, 0) and q.dtype != torch.float32 and attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, dropout_p, is_causal)[0]


@dataclass
class Program:
    """What takes the steps: deskGPT, or an unmodified nanoGPT."""

    model: torch.nn.Module
    network: Any  # the model, maybe compiled
    optimizer: torch.optim.Optimizer
    is_ours: bool

    def step(self, scaler: torch.amp.GradScaler) -> None:
        """Clip the gradients and take an optimizer step, as the loop of its train.py."""
        parameters = [*self.model.parameters()]
        scaler.unscale_(self.optimizer)
        if self.is_ours:
            norm = torch.linalg.vector_norm(gradient_norms(parameters))
            torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
            step_if_finite(self.optimizer, scaler, norm)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(self.optimizer)
            scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def ours(c: train.TrainConfig, config: GPTConfig, variant: Variant) -> Program:
    """Return deskGPT as train.py sets it up."""
    model = GPT(config)
    apply_variant(model, variant)
    return Program(model, model, train.build_optimizer(c, model, dtype=variant.dtype), True)


def nanogpt(path: str, c: train.TrainConfig, config: GPTConfig) -> Program:
    """Return nanoGPT as its train.py sets it up, by its model.py below path."""
    spec: Any = importlib.util.spec_from_file_location("nanogpt_model", f"{path}/model.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.GPT(module.GPTConfig(**{name: getattr(config, name) for name in NANOGPT_ARGS}))
    optimizer = model.configure_optimizers(c.weight_decay, c.learning_rate, (c.beta1, c.beta2), "cuda")
    return Program(model, torch.compile(model), optimizer, False)


def check(card_name: str, config_name: str, peer: str = "") -> dict[str, Any]:
    """Return all that is found of one config on one card, in a process of its own. peer: nanoGPT's folder, or ours."""
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
        program = nanogpt(peer, c, config) if peer else ours(c, config, variant)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
        idx = torch.zeros(c.batch_size, c.block_size, dtype=torch.int64)
        for _ in range(2):  # the second step has the optimizer's states
            work.peak = work.alive
            for _ in range(2):  # the second micro-batch adds to gradients
                work.take()
                with hardware.autocast(device, dtype):
                    out = program.network(idx, idx)
                    loss = out[1] / 2
                scaler.scale(loss).backward()
            micro_batch = work.take()
            program.step(scaler)
            optimizer_step = work.take()
        found = {
            "dtype": dtype,
            "tokens": idx.numel(),
            "micro_batch": micro_batch,
            "optimizer_step": optimizer_step,
            "peak_bytes": work.peak,
        }
        if peer:
            return found
        del out, loss
        program.model.eval()
        with torch.no_grad(), hardware.autocast(device, dtype):
            program.network(idx, idx)
    found["predicted_bytes"] = sum(memory(Step(config, c.batch_size, variant, "cuda")).values())
    return found | kernels.compile()


# ---- the command ---------------------------------------------------------------------------------------------


def triton_folder() -> str:
    """Return where triton is. In the environment itself it would change what torch.compile does on a CPU."""
    folder = cache.folder() / TRITON
    if not (folder / "triton").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}", TRITON]
        subprocess.run(pip, check=True)
    return str(folder)


def checked(*arguments: str) -> dict[str, Any]:
    """Return what `check` finds in a process of its own. Raises SystemExit if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        env |= {pretend_card.CARD: arguments[0]}
        env |= {"PYTHONPATH": os.pathsep.join([triton_folder(), os.environ.get("PYTHONPATH", "")])}
        env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        command = [sys.executable, __file__, "--one", *arguments]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: this cannot be checked: {', '.join(arguments)}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    found["warnings"] = re.findall(r"^W\d{4} .*$", done.stderr, re.M)  # which a user would see, too
    return found


@dataclass(frozen=True)
class Predicted:
    """What a card is expected to take by count, if it never waits for the CPU."""

    micro_batch_ms: float
    optimizer_ms: float
    launches: int  # of a micro-batch
    peak_bytes: int

    @classmethod
    def of(cls, card_name: str, found: dict[str, Any]) -> Predicted:
        """Return it for a card of pretend_card.py, from what `check` has found."""
        card = pretend_card.CARDS[card_name]
        known = peaks.find_card(card_name)
        flops_per_ms = known.flops[found["dtype"]] / 1e3 * (OF_FLOPS_GEFORCE if is_geforce(known) else OF_FLOPS)
        bytes_per_ms = card.gb_per_s * 1e6 * OF_MEMORY
        parts = (found["micro_batch"], found["optimizer_step"])
        times_ms = (part["flops"] / flops_per_ms + part["bytes"] / bytes_per_ms for part in parts)
        return cls(*times_ms, found["micro_batch"]["launches"], found["peak_bytes"])


def predict(device_name: str, config: str, program: str = "deskGPT", counts: Path = COUNTS) -> Predicted | None:
    """Return what a card takes, by the file that --save writes; None if it has no such card, config or program."""
    found = json.loads(counts.read_text()) if counts.exists() else {}
    with contextlib.suppress(ValueError):  # peaks has no such card
        name = peaks.find_card(device_name).name
        for card in pretend_card.CARDS:
            key = f"{card}, {config}, {program}"
            if peaks.find_card(card).name == name and key in found:
                return Predicted.of(card, found[key])
    return None


def row_of(card: str, program: str, found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    predicted = Predicted.of(card, found)
    micro, step = found["micro_batch"], found["optimizer_step"]
    kernels = (
        [f"{found['kernels']}, {found['cubins']}", str(len(found["failed"]))] if "kernels" in found else ["n/a"] * 2
    )
    in_gib = [f"{found[name] / 2**30:.2f}" if name in found else "n/a" for name in ("peak_bytes", "predicted_bytes")]
    return [
        f"{card}, {found['dtype']}",
        program,
        *kernels,
        str(micro["launches"]),
        f"{micro['flops'] / 1e12:.2f}",
        f"{micro['bytes'] / 1e9:.1f}",
        f"{predicted.micro_batch_ms:.1f}",
        f"{found['tokens'] / predicted.micro_batch_ms * 1e3:,.0f}",
        f"{step['launches']}, {step['bytes'] / 1e9:.1f}, {predicted.optimizer_ms:.1f}",
        ", ".join(in_gib),
    ]


HEAD = ["card", "program", "kernels, cubins", "failed", "launches", "TFLOP", "GB moved", "ms", "tokens/s"]
HEAD += ["optimizer: launches, GB, ms", "GiB counted, predicted"]


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("--cards", nargs="+", choices=pretend_card.CARDS, default=list(pretend_card.CARDS))
    parser.add_argument("--configs", nargs="+", metavar="NAME", help="of config/NAME.py, with settings")
    parser.add_argument("--peer", default="", help="nanogpt:PATH, counted beside ours")
    parser.add_argument("--save", action="store_true", help=f"keep the counts in {COUNTS.relative_to(ROOT)}")
    a = parser.parse_args()
    kind, _, path = a.peer.partition(":")
    if a.peer and (kind != "nanogpt" or not Path(path, "model.py").exists()):
        raise ConfigError(f"--peer {a.peer}: not nanogpt:PATH with a model.py in PATH")
    problems = []
    counts = {}
    for config in a.configs or (BESIDE_PEER if a.peer else CONFIGS):
        rows = []
        for card in a.cards:
            for program, more in (("deskGPT", ()), ("nanoGPT", (os.path.abspath(path),)))[: 1 + bool(a.peer)]:
                found = counts[f"{card}, {config}, {program}"] = checked(card, config, *more)
                rows.append(row_of(card, program, found))
                problems += [f"{card}, {config}: {line}" for line in found.pop("failed", [])]
        print(f"\n## {config}: expected, not measured\n\n{markdown_table(HEAD, rows, 2)}", flush=True)
    if a.save:
        write_atomically(COUNTS, json.dumps(counts, indent=1).encode())
    if problems:
        sys.exit("\n".join(["", *problems]))


if IS_CHILD:
    print("\n" + json.dumps(check(*sys.argv[2:])))
elif __name__ == "__main__":
    with one_line_errors():
        main()
