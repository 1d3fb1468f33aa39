"""Compile what inductor makes of our configs for NVIDIA cards that are not there, and count its
launches and memory.

    make check-cards                                 # all cards and configs: minutes each
    python bench/check_cards.py --cards "RTX 4070"   # these cards

For torch's CPU build, on Linux; triton is downloaded (0.2 GB) into ~/.cache/deskgpt. On a pretended
card (pretend_card.py) inductor writes its Triton kernels of a training step, of the loss's softmax
and of evaluation; ptxas, which triton brings, compiles every configuration that autotuning would
try. The step itself runs on fake tensors: launches of a micro-batch that adds to gradients, and
bytes alive are counted. An operator counts as one launch. Exit status 1 if a kernel does not
compile, or wants more shared memory than the card has.
"""

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

from deskgpt.errors import ROOT, OneLineParser, in_gib, one_line_errors, require_torch

require_torch()

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from bench import pretend_card
from bench.output import markdown_table
from bench.qualify import our_start
from bench.speed import vocab_size_of
from configurator import configure
from deskgpt.compiling import apply_compute
from deskgpt.compute import autocast
from deskgpt.distributed import DistContext
from deskgpt.files import cache_folder
from deskgpt.memory import StepShape
from model import GPT

CONFIGS = ["train_shakespeare_char", "train_fineweb_125m --batch_size=16"]
CONFIGS += ["train_fineweb_125m_fast"]
TRITON = "triton==3.7.1"  # which torch 2.13 requires

WITHOUT_WORK = ("empty", "empty_like", "empty_strided", "_unsafe_view")  # operators

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
        from triton.backends.compiler import GPUTarget

        self.card = card
        self.launch = launch
        self.target = GPUTarget("cuda", 10 * card.major + card.minor, 32)
        self.sources: dict[str, str] = {}  # source -> name

    def collect(self, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
        """Take a kernel in place of AsyncCompile.triton; return what the graph calls."""
        self.sources[source] = name
        return SimpleNamespace(run=lambda *args, **kwargs: self.launch())

    def compile(self) -> list[str]:
        """Compile all configurations of the kernels; return a line for each failure."""
        from torch._inductor.codecache import PyCodeCache

        failed = []
        for source, name in self.sources.items():
            kernel = getattr(PyCodeCache.load(source), name)
            for config in kernel.configs:
                try:
                    self.compile_one(kernel, config)
                except Exception as e:  # of no common class
                    failed.append(f"{name} {config.kwargs}: {type(e).__name__}: {e}"[:300])
        return failed

    def compile_one(self, kernel: Any, config: Any) -> None:
        """Compile one configuration. Raises ValueError if it wants too much shared memory."""
        import triton

        meta = kernel._create_compile_meta(config)
        code = triton.compiler.ASTSource(
            kernel.fn, meta["signature"], meta["constants"], meta["configs"][0]
        )
        binary = triton.compile(code, self.target, kernel._create_compile_options(config, meta))
        if binary.metadata.shared > self.card.shared_memory_per_block_optin:
            raise ValueError(f"{binary.metadata.shared} bytes of shared memory")

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
        inductor.async_compile.AsyncCompile.triton = self.collect
        inductor.runtime.triton_helpers.set_driver_to_gpu = lambda: None
        # Graphs call these in C++, which wants real tensors.
        guards: Any = torch._C._dynamo.guards
        guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
            size, stride, dtype=dtype, device="cuda"
        )
        guards._reinterpret_tensor = lambda t, size, stride, n=0: t.as_strided(
            size, stride, t.storage_offset() + n
        )


class Work(TorchDispatchMode):
    """Count the work on fake tensors: launches, and the bytes alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0  # bytes
        self.launches = 0
        self._sizes: dict[int, int] = {}  # of the storages alive, by address

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch.compile compiles although this mode is on, and its graphs run in
        it.
        """
        return True

    def launch(self) -> None:
        self.launches += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._note(t.untyped_storage())
        name = func._overloadpacket.__name__
        self.launches += func.namespace == "aten" and not func.is_view and name not in WITHOUT_WORK
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
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **as_in_training: Any
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
    """Print, as JSON, all that is found of the config that sys.argv names."""
    config_name, *flags = sys.argv[1:]
    work = Work()
    kernels = Kernels(pretend_card.CARDS[os.environ[pretend_card.CARD]], work.launch)
    kernels.prepare_inductor()
    torch.nn.functional.scaled_dot_product_attention = card_attention  # type: ignore[assignment]
    c = configure(train.TrainConfig, [f"config/{config_name}.py", *flags])
    config = c.model_config(vocab_size_of(c.dataset))
    device = torch.device("cuda")
    _, compute = our_start(c, config, DistContext(device))
    with FakeTensorMode(allow_non_fake_inputs=True), device, work:
        model = GPT(config)
        apply_compute(model, compute)
        optimizer = train.build_optimizer(c, model, dtype=compute.dtype)
        scaler = torch.amp.GradScaler("cuda", enabled=compute.dtype == "float16")
        idx = torch.zeros(c.batch_size, c.block_size, dtype=torch.int64)
        for _ in range(2):  # the second step has the optimizer's states
            work.peak = work.alive
            for _ in range(2):  # the second micro-batch adds to gradients
                work.launches = 0
                train.forward_backward(model, scaler, compute, idx, idx, 0.5)
            launches = work.launches
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        peak_bytes = work.peak
        model.eval()
        with torch.no_grad(), autocast(device, compute.dtype):
            model(idx, idx)
    predicted_bytes = StepShape(config, c.batch_size, compute, "cuda").peak_bytes
    row = [compute.dtype, str(launches), in_gib(peak_bytes), in_gib(predicted_bytes)]
    print("\n" + json.dumps([row, kernels.compile()]))


# ---- the command ---------------------------------------------------------------------------------

HEAD = ["card", "dtype", "launches", "GiB counted", "predicted"]


def triton_folder() -> Path:
    """Return where triton is.

    In the environment itself it would change what torch.compile does on a CPU.
    """
    folder = cache_folder() / TRITON
    if not (folder / "triton").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", TRITON]
        subprocess.run([*pip, f"--target={folder}"], check=True)
    return folder


def checked(card: str, config: str) -> tuple[list[str], list[str]]:
    """Return a row of figures and the failures that `check` finds, in a process of its own.

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
        command = [sys.executable, "-c", CHILD, *config.split()]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {config} cannot be checked for {card}:\n{done.stderr[-3000:]}")
    row, failed = json.loads(done.stdout.splitlines()[-1])
    warnings = re.findall(r"^W\d{4} .*$", done.stderr, re.M)  # which our users would see
    return row, failed + warnings


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("--cards", nargs="+", choices=pretend_card.CARDS)
    cards = parser.parse_args().cards or pretend_card.CARDS
    problems = []
    for config in CONFIGS:
        rows = []
        for card in cards:
            row, failed = checked(card, config)
            rows.append([card, *row])
            problems += [f"{card}, {config}: {line}" for line in failed]
        table = markdown_table(HEAD, rows, 2)
        print(f"\n## {config}: counted, not measured\n\n{table}\n", flush=True)
    if problems:
        sys.exit("\n".join(["", *problems]))


if __name__ == "__main__":
    with one_line_errors():
        main()
