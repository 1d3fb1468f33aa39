"""Compile what inductor makes of our configs for NVIDIA cards that are not there, and count its
work and memory.

    make check-cards                                          # all cards and configs: minutes each
    python bench/check_cards.py --cards "RTX 4070" --configs train_fineweb_125m
    python bench/check_cards.py --peer nanogpt:../nanoGPT     # counted beside an unmodified nanoGPT

For torch's CPU build, on Linux; triton is downloaded (0.2 GB) into ~/.cache/deskgpt. On a pretended
card (pretend_card.py) inductor writes its Triton kernels of a training step, of the loss's softmax
and of evaluation; ptxas, which triton brings, compiles every configuration that autotuning would
try. The step itself runs on fake tensors: launches, bytes moved, FLOPs and bytes alive are counted.
Exit status 1 if a kernel does not compile, or wants more shared memory than the card has.

The time is a roofline, whose shares of the peaks are those of one H200. A micro-batch is one that
adds to gradients. An operator counts as one launch, and what the card waits for the CPU is not in
the time.
"""

from __future__ import annotations

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

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import train
from bench import pretend_card
from bench.output import markdown_table
from bench.qualify import nanogpt, our_model
from bench.speed import ROOT, nanogpt_checkout, vocab_size_of
from configurator import configure
from deskgpt import peaks
from deskgpt.compute import autocast
from deskgpt.distributed import DistContext
from deskgpt.errors import OneLineParser, in_gib, one_line_errors
from deskgpt.files import cache_folder
from deskgpt.memory import StepShape
from model import GPTConfig

BESIDE_PEER = ("train_shakespeare_char", "train_fineweb_125m --batch_size=16")
CONFIGS = (*BESIDE_PEER, "train_fineweb_125m_fast")
TRITON = "triton==3.7.1"  # which torch 2.13 requires

# Shares of the published peaks that matmuls and attention, and all other kernels, are taken to
# reach: with these nanoGPT's count gives the 26.8 ms that a micro-batch of 16 x 1024 took on an
# H200.
OF_FLOPS = 0.69
# nanoGPT's speeds on an RTX 4090 and an RTX 4070 need 0.67 and 1.0 (docs/figures.md)
OF_FLOPS_GEFORCE = 0.8
OF_MEMORY = 0.92

# Operators that move nothing, and that write their first tensor and do not read it.
WITHOUT_WORK = ("empty", "empty_like", "empty_strided", "_unsafe_view")
OVERWRITES = ("copy_", "fill_", "zero_", "scatter_", "zeros_like", "ones_like")

# ---- in a process that pretends a card -----------------------------------------------------------

CHILD = """
from bench import pretend_card
pretend_card.pretend(backend="inductor")
from bench import check_cards
check_cards.check()
"""


class Kernels:
    """The Triton kernels that inductor writes for a card.

    They compile, but do not run: `launch` is called instead.
    """

    def __init__(self, card: SimpleNamespace, launch: Any) -> None:
        """launch takes the bytes that a kernel moves, once for each launch."""
        from triton.backends.compiler import GPUTarget

        self.card = card
        self.launch = launch
        self.target = GPUTarget("cuda", 10 * card.major + card.minor, 32)
        self.sources: dict[str, str] = {}  # source -> name

    def collect(self, compiler: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
        """Take a kernel in place of AsyncCompile.triton; return what the graph calls."""
        self.sources[source] = name
        found = re.search(r"'kernel_num_gb': ([\d.e+-]+)", source)
        size = round(1e9 * float(found[1])) if found else 0
        return SimpleNamespace(run=lambda *args, **kwargs: self.launch(size))

    def compile(self) -> list[str]:
        """Compile all configurations of the kernels; return a line for each failure."""
        from torch._inductor.codecache import PyCodeCache

        failed = []
        for source, name in self.sources.items():
            kernel = getattr(PyCodeCache.load(source), name)
            for config in kernel.configs:
                try:
                    shared = self.shared_memory_of(kernel, config)
                except Exception as e:  # of no common class
                    failed.append(f"{name} {config.kwargs}: {type(e).__name__}: {e}"[:300])
                    continue
                if shared > self.card.shared_memory_per_block_optin:
                    failed.append(f"{name} {config.kwargs}: {shared} bytes of shared memory")
        return failed

    def shared_memory_of(self, kernel: Any, config: Any) -> int:
        """Compile one configuration; return its bytes of shared memory."""
        import triton

        meta = kernel._create_compile_meta(config)
        code = triton.compiler.ASTSource(
            kernel.fn, meta["signature"], meta["constants"], meta["configs"][0]
        )
        binary = triton.compile(code, self.target, kernel._create_compile_options(config, meta))
        return int(binary.metadata.shared)

    def prepare_inductor(self) -> None:
        """Make inductor write code for the card, and its graphs run on fake tensors."""
        import torch._inductor.async_compile
        import torch._inductor.runtime.triton_helpers
        import triton.runtime

        driver = SimpleNamespace(
            get_current_target=lambda: self.target, get_current_device=lambda: 0
        )
        triton.runtime.driver.set_active(driver)
        inductor: Any = torch._inductor
        inductor.config.benchmark_kernel = True  # writes down how many bytes a kernel moves
        inductor.async_compile.AsyncCompile.triton = lambda *args, **kwargs: self.collect(
            *args, **kwargs
        )
        inductor.runtime.triton_helpers.set_driver_to_gpu = lambda: None
        # What graphs call in C++, which wants real tensors.
        guards: Any = torch._C._dynamo.guards
        guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
            size, stride, dtype=dtype, device="cuda"
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

    def launch(self, size: int) -> None:
        """Count a kernel and the bytes that it moves."""
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
        name = operator.__name__
        if func.namespace != "aten" or func.is_view or name in WITHOUT_WORK:
            return out
        if operator in flop_registry:
            flops = flop_registry[operator](*args, **kwargs, out_val=out)
            self.flops += flops // 2 if "attention" in name else flops  # which is causal
            self.launch(0)
        else:
            self.launch(bytes_moved(func, args, kwargs, out))
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
    """Return the bytes that an operator of a step reads and writes, each number once."""
    name = func._overloadpacket.__name__
    arguments = func._schema.arguments
    given = dict(zip([x.name for x in arguments], args, strict=False)) | kwargs
    moved = 0 if func._schema.is_mutable else size_of(out)  # else it returns what it has written
    for i, argument in enumerate(arguments):
        value = given.get(argument.name)
        size = size_of(value)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (is_written and argument.kwarg_only)  # as `out`
        if i == 0 and name in OVERWRITES:
            is_read = False
        if i == 0 and name == "scatter_":  # only as many numbers as it has positions
            size = value.element_size() * given["index"].numel()
        moved += size * (is_read + is_written)
    return moved


def size_of(value: Any) -> int:
    """Return the bytes of the tensors in a value. A number that is expanded counts once."""
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)


def card_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    **as_in_training: Any,
) -> Tensor:
    """Compute causal F.scaled_dot_product_attention by the card's operator: torch's own choice
    would be the CPU's.
    """
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    aten = torch.ops.aten
    if torch.cuda.get_device_capability() >= (8, 0) and q.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, True)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, True)[0]


def check() -> None:
    """Print, as JSON, all that is found of the config that sys.argv names, computed by deskGPT or
    by an unmodified nanoGPT, each as its train.py does.
    """
    peer, config_name, *flags = sys.argv[1:]
    work = Work()
    kernels = Kernels(pretend_card.CARDS[os.environ[pretend_card.CARD]], work.launch)
    kernels.prepare_inductor()
    torch.nn.functional.scaled_dot_product_attention = card_attention  # type: ignore[assignment]
    c = configure(train.TrainConfig, [f"config/{config_name}.py", *flags])
    config = GPTConfig.from_settings(c, vocab_size_of(c.dataset))
    device = torch.device("cuda")
    found: dict[str, Any] = {"failed": [], "predicted_bytes": None}
    with FakeTensorMode(allow_non_fake_inputs=True), device, work:
        model: Any
        if peer:
            model, compute = nanogpt(Path(peer), config, device)
            betas = (c.beta1, c.beta2)
            optimizer = model.configure_optimizers(
                c.weight_decay, c.learning_rate, betas, device.type
            )
        else:
            model, compute = our_model(c, config, DistContext(device))
            optimizer = train.build_optimizer(c, model, dtype=compute.dtype)
        scaler = torch.amp.GradScaler("cuda", enabled=compute.dtype == "float16")
        idx = torch.zeros(c.batch_size, c.block_size, dtype=torch.int64)
        for _ in range(2):  # the second step has the optimizer's states
            work.peak = work.alive
            for _ in range(2):  # the second micro-batch adds to gradients
                work.take()
                train.forward_backward(model, scaler, compute, idx, idx, 0.5)
            found["micro_batch"] = work.take()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        found |= {"dtype": compute.dtype, "peak_bytes": work.peak}
        if not peer:
            model.eval()
            with torch.no_grad(), autocast(device, compute.dtype):
                model(idx, idx)
    if not peer:
        found["predicted_bytes"] = StepShape(config, c.batch_size, compute, "cuda").peak_bytes
        found["failed"] = kernels.compile()
    print("\n" + json.dumps(found))


# ---- the command ---------------------------------------------------------------------------------


def triton_folder() -> Path:
    """Return where triton is.

    In the environment itself it would change what torch.compile does on a CPU.
    """
    folder = cache_folder() / TRITON
    if not (folder / "triton").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", TRITON]
        subprocess.run([*pip, f"--target={folder}"], check=True)
    return folder


def checked(card: str, config: str, peer: str) -> Any:
    """Return what `check` finds in a process of its own.

    Raises SystemExit if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            pretend_card.CARD: card,
            "PYTHONPATH": os.pathsep.join([str(triton_folder()), os.environ.get("PYTHONPATH", "")]),
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        }
        command = [sys.executable, "-c", CHILD, peer, *config.split()]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {config} cannot be checked for {card}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not peer:  # our users would see these warnings
        found["failed"] += re.findall(r"^W\d{4} .*$", done.stderr, re.M)
    return found


HEAD = [
    "card, program",
    "launches",
    "TFLOP",
    "GB moved",
    "ms",
    "GiB counted, predicted",
]


def expected_ms(card: str, dtype: str, part: dict[str, int]) -> float:
    """Return a roofline for what was counted on one of pretend_card.py's cards: ms, if it never
    waits for the CPU.
    """
    known = peaks.find_card(card)
    of_flops = OF_FLOPS_GEFORCE if "GeForce" in known.name else OF_FLOPS
    bytes_per_s = 1e9 * pretend_card.CARDS[card].gb_per_s * OF_MEMORY
    return 1e3 * (part["flops"] / known.flops[dtype] / of_flops + part["bytes"] / bytes_per_s)


def row_of(card: str, program: str, found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    micro_batch = found["micro_batch"]
    ms = expected_ms(card, found["dtype"], micro_batch)
    return [
        f"{card}, {found['dtype']}, {program}",
        str(micro_batch["launches"]),
        f"{micro_batch['flops'] / 1e12:.2f}",
        f"{micro_batch['bytes'] / 1e9:.1f}",
        f"{ms:.1f}",
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
    a = parser.parse_args()
    programs = {"deskGPT": ""}
    if a.peer:
        programs["nanoGPT"] = str(nanogpt_checkout(a.peer, train.TrainConfig()))
    problems = []
    for config in a.configs or (BESIDE_PEER if a.peer else CONFIGS):
        rows = []
        for card in a.cards:
            for program, folder in programs.items():
                found = checked(card, config, folder)
                rows.append(row_of(card, program, found))
                problems += [f"{card}, {config}: {line}" for line in found["failed"]]
        table = markdown_table(HEAD, rows, 1)
        print(f"\n## {config}: expected, not measured\n\n{table}\n", flush=True)
    if problems:
        sys.exit("\n".join(["", *problems]))


if __name__ == "__main__":
    with one_line_errors():
        main()
