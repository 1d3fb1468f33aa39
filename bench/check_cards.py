"""Compile what inductor makes of our configs for NVIDIA cards that are not there, and count its
work and memory.

    make check-cards                                          # all cards and configs: minutes each
    python bench/check_cards.py --cards "RTX 4070" --configs train_fineweb_125m
    python bench/check_cards.py --peer nanogpt:../nanoGPT     # counted beside an unmodified nanoGPT

For torch's CPU build, on Linux; triton is downloaded (0.2 GB) into ~/.cache/deskgpt. On a pretended
card (pretend_card.py) inductor writes its Triton kernels of a training step, of the loss's softmax
and of evaluation; ptxas, which triton brings, compiles every configuration that autotuning would
try. The step itself runs on fake tensors: launches, bytes moved, FLOPs and bytes alive are counted.
Exit status 1 if a kernel does not compile, wants more shared memory than the card has, or spills
more than a few registers in all configurations.

The time is a roofline, whose shares of the peaks are those of one H200. A micro-batch is one that
adds to gradients. An operator counts as one launch, and what the card waits for the CPU is not in
the time.
"""

# ruff: noqa: E402 (torch comes after the card that it is to see)

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections import defaultdict
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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
from bench.speed import nanogpts_model
from configurator import build, read_settings
from deskgpt import peaks
from deskgpt.compute import ComputeMode, apply_compute, autocast, default_dtype
from deskgpt.distributed import gradient_norms
from deskgpt.errors import ConfigError, OneLineParser, in_gib, one_line_errors
from deskgpt.files import cache_folder
from deskgpt.memory import StepShape, is_geforce, step_memory
from deskgpt.optim import step_if_finite
from model import GPT, GPTConfig

CONFIGS = ("train_shakespeare_char", "train_fineweb_125m", "train_fineweb_125m_fast")
BESIDE_PEER = ("train_fineweb_125m --batch_size=16", "train_shakespeare_char")
TRITON = "triton==3.7.1"  # which torch 2.13 requires

# Shares of the published peaks that matmuls and attention, and all other kernels, are taken to
# reach: with these nanoGPT's count gives the 26.8 ms that a micro-batch of 16 x 1024 took on an
# H200.
OF_FLOPS = 0.69
# nanoGPT's speeds on an RTX 4090 and an RTX 4070 need 0.67 and 1.0 (docs/figures.md)
OF_FLOPS_GEFORCE = 0.8
OF_MEMORY = 0.92
FEW = 16  # bytes of spilled registers, which cost nothing that shows

# Operators that move nothing; that write their first tensor and do not read it; and that read or
# write a part of it.
WITHOUT_WORK: tuple[str, ...] = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "device",
)
WITHOUT_WORK += ("is_same_size",)
OVERWRITES = (
    "copy_",
    "_foreach_copy_",
    "fill_",
    "zero_",
    "_foreach_zero_",
    "normal_",
    "scatter_",
    "index_put_",
)
READS_PART = ("embedding", "index", "gather")
WRITES_PART = ("scatter_", "scatter_add_", "index_put_", "index_add_")

# What does nothing while the CPU's work is timed.
IDLE: tuple[str, ...] = (
    "mm.default",
    "mm.out",
    "addmm.out",
    "bmm.out",
    "copy_.default",
    "add_.Tensor",
    "mul_.Tensor",
    "zero_.default",
)
IDLE += (
    "fill_.Scalar",
    "gather.default",
    "scatter_.src",
    "_foreach_norm.Scalar",
    "_foreach_mul_.Tensor",
)
IDLE += ("_fused_adamw_.default", "_scaled_dot_product_flash_attention.default")
IDLE += ("_scaled_dot_product_flash_attention_backward.default",)
ROUNDS = 40

# ---- in a process that pretends a card -----------------------------------------------------------


class Kernels:
    """The Triton kernels that inductor writes for a card.

    They compile, but do not run: `run` is called instead.
    """

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
        """Return the number of kernels, of cubins and of failures, and a line for each failure."""
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
                    failed.append(
                        f"{name} {config.kwargs}: "
                        f"{' '.join(f'{type(e).__name__}: {e}'.split())[:200]}"
                    )
                    continue
                cubins += 1
                spilled.append(of_config)
                if shared > self.card.shared_memory:
                    failed.append(f"{name} {config.kwargs}: {shared} bytes of shared memory")
            least = min(spilled, default=0)
            if least > FEW:
                failed.append(f"{name}: {least} bytes of registers spill")
        counts = f"{len({*self.sources.values()})}, {cubins}, {len(failed)}"
        return {"compiled": counts, "failed": failed}

    def memory_of(self, kernel: Any, config: Any) -> tuple[int, int]:
        """Compile one configuration; return its bytes of spilled registers and of shared memory."""
        import triton

        meta = kernel._create_compile_meta(config)
        code = triton.compiler.ASTSource(
            kernel.fn, meta["signature"], meta["constants"], meta["configs"][0]
        )
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

        driver = SimpleNamespace(
            get_current_target=lambda: self.target, get_current_device=lambda: 0
        )
        triton.runtime.driver.set_active(driver)
        # The same kernel again, too: its log is wanted.
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        inductor: Any = torch._inductor
        inductor.config.benchmark_kernel = True  # writes down how many bytes a kernel moves
        inductor.async_compile.AsyncCompile.triton = lambda *args, **kwargs: self.collect(
            *args, **kwargs
        )
        inductor.runtime.triton_helpers.set_driver_to_gpu = lambda: None
        # What graphs call in C++, which wants real tensors.
        guards: Any = torch._C._dynamo.guards
        guards._empty_strided_cuda = lambda *args: torch.empty_strided(
            *args[:2], dtype=args[2], device="cuda"
        )
        guards._reinterpret_tensor = lambda t, size, stride, n=0: t.as_strided(
            size, stride, t.storage_offset() + n
        )


class Work(TorchDispatchMode):
    """Count what runs on fake tensors: the bytes alive, launches, bytes moved, and FLOPs of matmuls
    and attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0  # bytes
        # Matmuls and attention, bound by their FLOPs, move no bytes here.
        self.launches = self.moved = self.flops = 0
        self._sizes: dict[int, int] = {}  # of the storages alive, by address

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile compiles although this mode is on, and its graphs run in
        it.
        """
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
            # Which is causal
            self.flops += flops // 2 if "attention" in operator.__name__ else flops
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
            size = given.element_size() * max(
                t.numel() for t in tree_leaves(args[1:]) if isinstance(t, Tensor)
            )
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
            size += t.element_size() * math.prod(
                n for n, step in zip(t.shape, t.stride(), strict=True) if step
            )
    return size


def card_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Compute F.scaled_dot_product_attention by the card's operator: torch's own choice would be
    the CPU's.
    """
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    if (
        torch.cuda.get_device_capability() >= (8, 0)
        and q.dtype != torch.float32
        and attn_mask is None
    ):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, True, dropout_p, is_causal
    )[0]


class Program:
    """What takes steps on the card: deskGPT, or an unmodified nanoGPT, each as its train.py
    does.
    """

    def __init__(self, config_name: str, peer: str) -> None:
        """Set it up. peer: nanoGPT's folder, or nothing for ours."""
        name, *flags = config_name.split()
        c = build(
            train.TrainConfig, read_settings(train.TrainConfig, [f"config/{name}.py", *flags])
        )
        self.config = GPTConfig.from_settings(c, 65 if "_char" in name else 50304)
        dtype = default_dtype(torch.device("cuda"))
        residual_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
        self.variant = ComputeMode(dtype, compiled=True, residual_dtype=residual_dtype)
        self.scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
        self.is_ours = not peer
        self.model: Any
        self.network: Any  # the model, maybe compiled
        self.idx = torch.zeros(c.batch_size, c.block_size, dtype=torch.int64)
        if self.is_ours:
            self.network = self.model = GPT(self.config)
            apply_compute(self.model, self.variant)
            self.optimizer = train.build_optimizer(c, self.model, dtype=dtype)
        else:
            self.model = nanogpts_model(Path(peer), self.config)
            self.network = torch.compile(self.model)
            betas = (c.beta1, c.beta2)
            self.optimizer = self.model.configure_optimizers(
                c.weight_decay, c.learning_rate, betas, "cuda"
            )

    def forward(self) -> None:
        """Compute the loss, and keep what the model returns until the next pass, as both loops
        do.
        """
        with autocast(self.idx.device, self.variant.dtype):
            self.out = self.network(self.idx, self.idx)

    def micro_batch(self) -> None:
        """Add the gradients of a micro-batch to those before."""
        self.forward()
        self.scaler.scale(self.out[1] / 2).backward()

    def step(self) -> None:
        """Clip the gradients and take an optimizer step."""
        parameters = [*self.model.parameters()]
        self.scaler.unscale_(self.optimizer)
        if self.is_ours:
            norm = torch.linalg.vector_norm(gradient_norms(parameters))
            torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
            step_if_finite(self.optimizer, self.scaler, norm)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def check(kernels: Kernels, config_name: str, peer: str) -> dict[str, Any]:
    """Return all that is found of one config on one card."""
    work = Work()
    kernels.run = work.run
    found: dict[str, Any] = {"compiled": "n/a", "failed": [], "predicted_bytes": None}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"), work:
        program = Program(config_name, peer)
        for _ in range(2):  # the second step has the optimizer's states
            work.peak = work.alive
            for _ in range(2):  # the second micro-batch adds to gradients
                work.take()
                program.micro_batch()
            found["micro_batch"] = work.take()
            program.step()
            found["optimizer_step"] = work.take()
        found |= {
            "dtype": program.variant.dtype,
            "tokens": program.idx.numel(),
            "peak_bytes": work.peak,
        }
        if peer:
            return found
        program.model.eval()
        with torch.no_grad():
            program.forward()
    step = StepShape(program.config, len(program.idx), program.variant, "cuda")
    return found | {"predicted_bytes": sum(step_memory(step).values())} | kernels.compile()


def idle(operator: Any) -> Any:
    """Return a function in place of an operator's kernel, which only allocates what the operator
    returns.
    """
    if not operator._schema.is_mutable:
        return operator.py_kernels[torch._C.DispatchKey.Meta]
    if not operator._schema.returns:
        return lambda *args, **kwargs: None
    return lambda first, *args, out=None, **kwargs: first if out is None else out


def cpu_time(kernels: Kernels, config_name: str, peer: str) -> list[float]:
    """Return the CPU's milliseconds for a micro-batch and an optimizer step whose kernels do
    nothing: medians.
    """
    with torch.device("cuda"):
        program = Program(config_name, peer)
    kernels.run = lambda size: None
    library = torch.library.Library("aten", "IMPL")
    for name in IDLE:
        operator = attrgetter(name)(torch.ops.aten)
        library.impl(operator, idle(operator), "CUDA")
    torch.set_num_threads(1)
    parts = {"micro_batch": [program.micro_batch] * 4, "optimizer_step": [program.step]}
    times_ms = defaultdict(list)
    for _ in range(ROUNDS):
        for part, functions in parts.items():
            for function in functions:
                t0 = time.process_time()
                function()
                times_ms[part].append(1e3 * (time.process_time() - t0))
    return [statistics.median(times) for times in times_ms.values()]


# ---- the command ---------------------------------------------------------------------------------


def triton_folder() -> str:
    """Return where triton is.

    In the environment itself it would change what torch.compile does on a CPU.
    """
    folder = cache_folder() / TRITON
    if not (folder / "triton").exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            f"--target={folder}",
            TRITON,
        ]
        subprocess.run(pip, check=True)
    return str(folder)


def checked(function: str, card: str, *arguments: str) -> Any:
    """Return what `check` or `cpu_time` finds in a process of its own.

    Raises SystemExit if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        }
        env |= {pretend_card.CARD: card}
        env |= {"PYTHONPATH": os.pathsep.join([triton_folder(), os.environ.get("PYTHONPATH", "")])}
        env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        command = [sys.executable, __file__, "--one", function, card, *arguments]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {arguments[0]} cannot be checked for {card}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    is_ours = not any(arguments[1:])
    if function == "check" and is_ours:  # its users would see these warnings
        found["failed"] += re.findall(r"^W\d{4} .*$", done.stderr, re.M)
    return found


class Predicted(NamedTuple):
    """The milliseconds that a card is expected to take, if it never waits for the CPU."""

    micro_batch: float
    optimizer_step: float


def predict(name: str, found: dict[str, Any]) -> Predicted:
    """Return a roofline for one of pretend_card.py's cards of what `check` has counted."""
    known = peaks.find_card(name)
    flops_per_ms = (
        known.flops[found["dtype"]] / 1e3 * (OF_FLOPS_GEFORCE if is_geforce(known) else OF_FLOPS)
    )
    bytes_per_ms = pretend_card.CARDS[name].gb_per_s * 1e6 * OF_MEMORY
    return Predicted(
        *(
            found[part]["flops"] / flops_per_ms + found[part]["bytes"] / bytes_per_ms
            for part in Predicted._fields
        )
    )


HEAD = [
    "card, program",
    "kernels, cubins, failed",
    "launches",
    "TFLOP",
    "GB moved",
    "ms",
    "tokens/s",
]
HEAD += ["optimizer's step: launches, GB, ms", "GiB counted, predicted"]


def row_of(card: str, program: str, found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    ms = predict(card, found)
    micro_batch, step = found["micro_batch"], found["optimizer_step"]
    return [
        f"{card}, {found['dtype']}, {program}",
        found["compiled"],
        str(micro_batch["launches"]),
        f"{micro_batch['flops'] / 1e12:.2f}",
        f"{micro_batch['bytes'] / 1e9:.1f}",
        f"{ms.micro_batch:.1f}",
        f"{found['tokens'] / ms.micro_batch * 1e3:,.0f}",
        f"{step['launches']}, {step['bytes'] / 1e9:.1f}, {ms.optimizer_step:.1f}",
        f"{in_gib(found['peak_bytes'])}, {in_gib(found['predicted_bytes'])}",
    ]


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument(
        "--cards", nargs="+", choices=pretend_card.CARDS, default=list(pretend_card.CARDS)
    )
    parser.add_argument(
        "--configs", nargs="+", metavar="NAME", help="of config/NAME.py, with settings"
    )
    parser.add_argument("--peer", help="nanogpt:PATH, counted beside ours")
    parser.add_argument("--cpu", action="store_true", help="time the CPU's work, in turns")
    a = parser.parse_args()
    programs = {"deskGPT": ""}
    if a.peer:
        kind, _, path = a.peer.partition(":")
        if kind != "nanogpt" or not Path(path, "model.py").exists():
            raise ConfigError(f"--peer {a.peer}: not nanogpt:PATH with a model.py in PATH")
        programs["nanoGPT"] = os.path.abspath(path)
    problems = []
    for config in a.configs or (BESIDE_PEER if a.peer else CONFIGS):
        rows = []
        for card in a.cards:
            for program, folder in programs.items():
                found = checked("check", card, config, folder)
                rows.append(row_of(card, program, found))
                problems += [f"{card}, {config}: {line}" for line in found["failed"]]
        print(
            f"\n## {config}: expected, not measured\n\n{markdown_table(HEAD, rows, 1)}\n",
            flush=True,
        )
        for program in [*programs] * 3 * a.cpu:
            cpu = checked("cpu_time", a.cards[0], config, programs[program])
            print(
                f"{program}, the CPU's ms of a micro-batch and an optimizer step: "
                f"{cpu[0]:.2f}, {cpu[1]:.2f}",
                flush=True,
            )
    if problems:
        sys.exit("\n".join(["", *problems]))


if IS_CHILD:
    function, card_name, *rest = sys.argv[2:]
    kernels = Kernels(pretend_card.CARDS[card_name])
    kernels.prepare_inductor()
    torch.nn.functional.scaled_dot_product_attention = card_attention  # type: ignore[assignment]
    print("\n" + json.dumps({"check": check, "cpu_time": cpu_time}[function](kernels, *rest)))
elif __name__ == "__main__":
    with one_line_errors():
        main()
