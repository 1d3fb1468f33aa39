"""Run a script on an NVIDIA card that is not there, to see that it takes the card's ways without a
fault.

    python bench/pretend_card.py --card "RTX 4070" train.py config/x.py --max_iters=20
    python bench/pretend_card.py --card T4 -m pytest tests/test_gpu.py

For torch's CPU build, on Linux, with a C++ compiler. The device is "cuda": its memory is the host's
and its kernels are the CPU's (bench/pretend_card.cpp), so the numbers are right and every choice by
device, dtype rule of autocast, loss scale, copy, memory limit (torch.OutOfMemoryError as on the
card) and peak is the card's. What it cannot show: speed, the card's own kernels, asynchronous
execution, several cards. torch.compile traces the code and runs the graphs as they are: what
inductor generates is check_cards.py's.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
CARD = "DESKGPT_PRETEND_CARD"  # environment variable: the card's name
RNG_STATE_BYTES = 8192  # more than a state of torch's CPU generator


def rows_of(name: str) -> list[list[str]]:
    """Return the cells of a text file's rows in this folder; "#" begins a comment."""
    lines = SOURCE.with_name(name).read_text().splitlines()
    return [line.split(" | ") for line in lines if not line.startswith("#")]


def read_cards() -> dict[str, SimpleNamespace]:
    """Return the cards of pretend_cards.txt by what people call them, with the attributes that its
    first row names: those of torch's device properties.
    """
    cards = {}
    (_, *attributes), *rows = rows_of("pretend_cards.txt")
    for key, name, *numbers in rows:
        values = [name, *map(int, numbers)]
        cards[key] = SimpleNamespace(**dict(zip(attributes, values, strict=True)))
    return cards


CARDS = read_cards()
# Loads the card into each Python that starts, before it imports torch.
SITECUSTOMIZE = """
import runpy
runpy.run_path({path!r})["pretend"]()
"""


# ---- in the process of the script ----------------------------------------------------------------


def pretend(backend: str = "aot_eager_decomp_partition") -> None:
    """Make torch see the card that the environment names. Call it before torch is imported.

    backend: torch.compile's. The default traces, and splits the passes as inductor does, but
    generates no code.
    """
    if CARD not in os.environ:
        return
    assert "torch" not in sys.modules
    # CDLL keeps their symbols apart: llama.cpp's library would take some of them.
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name))
    library = ctypes.CDLL(str(build()))
    library.card_allocated.restype = library.card_peak.restype = (
        library.card_get_rng_state.restype
    ) = ctypes.c_int64

    import torch

    for name, value in functions(CARDS[os.environ[CARD]], library).items():
        setattr(torch.cuda, name, value)
        for module in (torch.cuda.random, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, value)
    set_internals(torch, library)
    torch.compile = functools.partial(torch.compile, backend=backend)


def functions(card: SimpleNamespace, library: ctypes.CDLL) -> dict[str, Any]:
    """Return the stand-ins for functions of torch.cuda, by name. All work is done when it is
    queued.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def set_fraction(value: float, device: Any = None) -> None:
        library.card_set_limit(ctypes.c_int64(int(value * card.total_memory)))

    def seed(number: int) -> None:
        library.card_seed(ctypes.c_uint64(int(number) % 2**64))

    def get_state(device: Any = "cuda") -> torch.Tensor:
        buffer = ctypes.create_string_buffer(RNG_STATE_BYTES)
        n = library.card_get_rng_state(buffer)
        return torch.frombuffer(bytearray(buffer.raw[:n]), dtype=torch.uint8)

    def set_state(state: torch.Tensor, device: Any = "cuda") -> None:
        raw = state.cpu().numpy().tobytes()
        library.card_set_rng_state(raw, ctypes.c_int64(len(raw)))

    class Graph(TorchDispatchMode):
        """A CUDA graph: what runs within it is undone, and runs in each replay, on the same tensors
        and numbers.
        """

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[Any, ...]] = []  # a function, its arguments and results

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Return True: what torch.compile has compiled runs within a graph as it is."""
            return True

        def pool(self) -> tuple[int, int]:
            return (0, 0)

        def __enter__(self) -> Any:
            self.random_state = get_state()
            return super().__enter__()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                raise RuntimeError("operation not permitted when stream is capturing")
            aliases = [argument.alias_info for argument in func._schema.arguments]
            written = [
                x for x, alias in zip(args, aliases, strict=False) if alias and alias.is_write
            ]
            before = [x.clone() for x in written]
            out = func(*args, **(kwargs or {}))
            self.calls.append((func, args, kwargs or {}, out, written, before))
            return out

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            for *_, written, before in reversed(self.calls):
                for x, value in zip(written, before, strict=True):
                    x.copy_(value)
            set_state(self.random_state)

        def replay(self) -> None:
            below_autograd = torch._C._AutoDispatchBelowAutograd()
            for func, args, kwargs, out, *_ in self.calls:
                for was, now in zip(
                    tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True
                ):
                    if isinstance(was, torch.Tensor) and was.data_ptr() != now.data_ptr():
                        was.copy_(now)
            del below_autograd

    set_fraction(1.0)
    # A function for each name: torch.compile has other rules for each.
    found = {}
    for name, value in rows_of("pretend_functions.txt"):
        if value.startswith("card_"):
            found[name] = without_arguments(getattr(library, value))
        else:
            found[name] = always(ast.literal_eval(value))
    return found | {
        "get_device_capability": always((card.major, card.minor)),
        "get_device_name": always(card.name),
        "get_device_properties": always(card),
        "CUDAGraph": Graph,
        "graph": lambda graph, **kwargs: graph,
        "device": nullcontext,
        "stream": nullcontext,
        "Event": Event,
        "Stream": Queue,
        "current_stream": lambda device=None: Queue(),
        "is_bf16_supported": lambda including_emulation=True: card.major > 7 or including_emulation,
        "mem_get_info": lambda device=None: (
            card.total_memory - library.card_allocated(),
            card.total_memory,
        ),
        "set_per_process_memory_fraction": set_fraction,
        "manual_seed": seed,
        "manual_seed_all": lambda number: seed(number),
        "get_rng_state": get_state,
        "set_rng_state": set_state,
    }


def always(value: Any) -> Callable[..., Any]:
    """Return a function of anything that returns the value."""
    return lambda *args, **kwargs: value


def without_arguments(function: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function of anything that calls this one."""
    return lambda *args, **kwargs: function()


class Event:
    def __init__(self, **kwargs: Any) -> None:
        self.record()

    query = always(True)
    synchronize = wait = always(None)

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Queue:
    """A stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    cuda_stream = stream_id = device_index = 0
    synchronize = wait_stream = wait_event = always(None)

    def record_event(self, event: Any = None) -> Event:
        return Event()


def set_internals(torch: Any, library: ctypes.CDLL) -> None:
    """Replace C++ functions that torch's own Python code calls and the CPU build lacks."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in ("getDevice", "getCurrentRawStream", "exchangeDevice", "maybeExchangeDevice"):
        setattr(torch._C, f"_cuda_{name}", always(0))
    torch._C._cuda_getDeviceCount = always(1)
    torch._C._cuda_set_sync_debug_mode = lambda mode: library.card_set_sync_debug_mode(mode)
    torch.backends.cuda.is_built = always(True)
    torch.version.cuda = "13.0"
    torch.Tensor.record_stream = always(None)
    # Compiling wants no more than this of the module.
    graphs = ModuleType("torch._inductor.cudagraph_trees")
    vars(graphs).update(reset_cudagraph_trees=always(None), mark_step_begin=always(None))
    sys.modules[graphs.__name__] = graphs
    setattr(FakeTensorMode, "avoid_device_init", property(always(True)))  # noqa: B010 (its type is a method's)
    torch.Tensor.__deepcopy__ = lambda t, memo: t.detach().clone().requires_grad_(t.requires_grad)


# ---- the command ---------------------------------------------------------------------------------


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    return Path(str(metadata.distribution("torch").locate_file("torch")))


def build() -> Path:
    """Return the compiled library, kept for this source and this torch.

    Raises SystemExit if it does not compile.
    """
    torch = torch_folder()
    key = hashlib.sha256(SOURCE.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"pretend_card-{os.getuid()}-{key}.so"
    if library.exists():
        return library
    new = library.with_suffix(f".{os.getpid()}")
    includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", *includes, f"-L{torch}/lib"]
    command = [os.environ.get("CXX", "g++"), *options, str(SOURCE), "-o", str(new)]
    done = subprocess.run([*command, "-ltorch_cpu", "-lc10"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {SOURCE} does not compile with this torch: {done.stderr[-2000:]}")
    os.replace(new, library)
    return library


def environment(card: str, folder: Path) -> dict[str, str]:
    """Return variables with which every Python pretends this card. folder: an empty one, kept while
    they are in use.
    """
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(path=__file__))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    build()  # now, and not in several processes at once
    return {CARD: card, "PYTHONPATH": path}


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="see the top of this file")
    parser.add_argument("--card", choices=CARDS, required=True)
    a, command = parser.parse_known_args()  # a script, or -m MODULE, with its arguments
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | environment(a.card, Path(folder))
        return subprocess.run([sys.executable, *command], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
