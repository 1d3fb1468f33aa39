"""The kernels of cpu_kernels.cpp as operators of torch, which inductor leaves alone. Compiled once per machine.

Without a C++ compiler, or on a processor without AVX2, there are none, and a run goes on with torch's own. What they
compute is held to model.py as every form is (faster/held.py, compute/checks.py).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from deskgpt.system import cache, hardware

SOURCE = Path(__file__).with_suffix(".cpp")

# What the compiler may use, by the vectors that ATen uses here.
ARCHITECTURES = {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}

# GCC up to 13 deletes stores without the last one (compute/compiling.py).
FLAGS = ("-O3", "-std=c++20", "-fopenmp", "-shared", "-fPIC", "-mno-align-stringops")
COMPILE_S = 300  # it takes 5; longer, and the compiler hangs

ACTIVATIONS = ("gelu_tanh", "relu2")  # as the library numbers them

ATTENTION = "deskgpt.causal_attention.default"  # the operator's name

# Set by load:
_library: ctypes.CDLL | None = None
_dtypes: tuple[torch.dtype, ...] = ()


class Unavailable(RuntimeError):
    """There are no kernels here; the message says why in one line."""


# ---- compiling and loading -----------------------------------------------------------------------------------


def may_exist() -> bool:
    """Whether this is a machine that the kernels are for."""
    return sys.platform == "linux" and torch.backends.cpu.get_cpu_capability() in ARCHITECTURES


def is_ready() -> bool:
    """Whether `load` takes no time."""
    if _library is not None:
        return True
    try:
        return may_exist() and path().is_file()
    except RuntimeError:
        return False


def path() -> Path:
    """Of the library for this processor, this torch and this source. Raises RuntimeError where the user has no home."""
    made_of = SOURCE.read_bytes() + repr((flags(), torch.__version__)).encode()
    digest = hashlib.sha256(made_of).hexdigest()[:16]
    return cache.path_of("forms").with_name(f"cpu_kernels-{digest}.so")


def flags() -> list[str]:
    """For the compiler, by what ATen uses here and what the processor has."""
    capability = torch.backends.cpu.get_cpu_capability()
    found = [*FLAGS, f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    found.append(f"-march={ARCHITECTURES[capability]}")
    if capability == "AVX512" and "AVX512-BF16" in hardware.processor()[1]:
        found.append("-mavx512bf16")
    return found


def load() -> None:
    """Makes the operators known, from the library on disk or, the first time, by compiling. Raises Unavailable."""
    global _library, _dtypes
    if _library is not None:
        return
    if not may_exist():
        raise Unavailable("the C++ kernels are for Linux on a processor with AVX2 or AVX-512")
    try:
        library = path()
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock")):  # another run may be compiling it
            if not library.is_file():
                compile_to(library)
            try:
                loaded = ctypes.CDLL(str(library))
            except OSError:  # damaged on the disk
                compile_to(library)
                loaded = ctypes.CDLL(str(library))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as e:
        raise Unavailable(" ".join(str(e).split())[:200]) from None
    for name in ("attention_forward", "attention_backward", "activation", "softmax_in_place"):
        getattr(loaded, name).restype = ctypes.c_char_p
    _library = loaded
    _dtypes = tuple(dtype for dtype in (torch.float32, torch.bfloat16) if is_multiplied(dtype))
    register_operators()


def compile_to(library: Path) -> None:
    """Compiles the kernels. A run that is killed leaves no half of a library under this name. Raises RuntimeError."""
    wanted = os.environ.get("CXX") or "c++"
    compiler = shlex.split(wanted)  # which may be "ccache g++"
    if not compiler or shutil.which(compiler[0]) is None:
        raise RuntimeError(f"there is no C++ compiler {wanted}: install g++, or set CXX")
    said = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=COMPILE_S)
    if "clang" in said.stdout:
        raise RuntimeError(f"{wanted} is clang, whose OpenMP threads compete with torch's: set CXX=g++")
    torch_folder = Path(torch.__file__).parent
    unfinished = library.with_suffix(".tmp")
    command = [*compiler, *flags(), f"-I{torch_folder / 'include'}", str(SOURCE), "-o", str(unfinished)]
    command += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_S)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{wanted} fails: {errors[0]}")
    os.replace(unfinished, library)


def is_multiplied(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type here; it refuses bfloat16 on some processors."""
    x = torch.zeros(1, 1, 1, 1, dtype=dtype)
    try:
        attention_forward(x, x, x)
    except RuntimeError:
        return False
    return True


def dtypes() -> tuple[torch.dtype, ...]:
    """What the kernels are for on this machine; nothing before `load`."""
    return _dtypes


# ---- calls ---------------------------------------------------------------------------------------------------


class Heads(ctypes.Structure):
    """A tensor (B, H, T, D) whose last dimension is contiguous."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    )


def heads(x: Tensor) -> Any:
    return ctypes.byref(Heads(x.data_ptr(), *x.stride()[:3]))


def pointer(x: Tensor | None) -> Any:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def call(name: str, dtype: torch.dtype, *args: Any) -> None:
    """A function of the library. Raises RuntimeError where it fails."""
    sized = [ctypes.c_int64(a) if isinstance(a, int) else a for a in args]
    problem = getattr(_library, name)(dtype == torch.bfloat16, *sized)
    if problem:
        raise RuntimeError(f"{name}: {problem.decode(errors='replace').splitlines()[0]}")


def by_rows(x: Tensor) -> Tensor:
    """x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_like_heads(x: Tensor) -> Tensor:
    """Room for (B, H, T, D), laid out (B, T, H, D), as the layers before and after attention have it."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


def attention_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of q, k, v (B, H, T, D), and the log-sum-exp of each query's scores (B, H, T), for backward."""
    q = by_rows(q)
    k = by_rows(k)
    v = by_rows(v)
    o = empty_like_heads(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    call("attention_forward", q.dtype, heads(q), heads(k), heads(v), heads(o), pointer(lse), *q.shape)
    return o, lse


def attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by q, k and v. g: that by o, the result of attention_forward."""
    inputs = [by_rows(x) for x in (g.to(q.dtype), q, k, v, o)]
    dq = empty_like_heads(q)
    dk = empty_like_heads(q)
    dv = empty_like_heads(q)
    outputs = (dq, dk, dv)
    call("attention_backward", q.dtype, *map(heads, inputs), pointer(lse), *map(heads, outputs), *q.shape)
    return dq, dk, dv


def activation(x: Tensor, name: str) -> Tensor:
    """One of ACTIVATIONS, elementwise, or the exact GELU, which is torch's and needs no `load`."""
    x = x.contiguous()
    if name == "gelu":
        return torch.ops.aten.gelu.default(x)
    y = torch.empty_like(x)
    call("activation", x.dtype, ACTIVATIONS.index(name), pointer(x), pointer(None), pointer(y), x.numel())
    return y


def activation_backward(g: Tensor, x: Tensor, name: str) -> Tensor:
    """The gradient by x; g: that by activation(x, name)."""
    g = g.to(x.dtype).contiguous()
    x = x.contiguous()
    if name == "gelu":
        return torch.ops.aten.gelu_backward.default(g, x)
    y = torch.empty_like(x)
    call("activation", x.dtype, ACTIVATIONS.index(name), pointer(x), pointer(g), pointer(y), x.numel())
    return y


def softmax_(logits: Tensor, targets: Tensor) -> Tensor:
    """As kernels.softmax_: turns logits (N, V) into probabilities, in place; the logarithms (N,) of the targets'."""
    log_p = logits.new_empty(len(logits), dtype=torch.float32)
    call("softmax_in_place", logits.dtype, pointer(logits), pointer(targets), pointer(log_p), *logits.shape)
    return log_p


# ---- operators -----------------------------------------------------------------------------------------------


@functools.cache
def register_operators() -> None:
    """torch.ops.deskgpt.causal_attention and deskgpt.activation, with their gradients. Later calls do nothing."""
    library = torch.library
    library.define("deskgpt::causal_attention", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
    library.impl("deskgpt::causal_attention", "CPU", attention_forward)
    library.register_fake(
        "deskgpt::causal_attention",
        lambda q, k, v: (empty_like_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
    )
    library.define(
        "deskgpt::causal_attention_backward",
        "(Tensor g, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) -> (Tensor, Tensor, Tensor)",
    )
    library.impl("deskgpt::causal_attention_backward", "CPU", attention_backward)
    library.register_fake(
        "deskgpt::causal_attention_backward",
        lambda g, q, k, v, o, lse: (empty_like_heads(q), empty_like_heads(q), empty_like_heads(q)),
    )
    library.register_autograd(
        "deskgpt::causal_attention",
        lambda ctx, g, _: torch.ops.deskgpt.causal_attention_backward(g, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    )

    library.define("deskgpt::activation", "(Tensor x, str name) -> Tensor")
    library.impl("deskgpt::activation", "CPU", activation)
    library.register_fake("deskgpt::activation", lambda x, name: x.new_empty(x.shape))
    library.define("deskgpt::activation_backward", "(Tensor g, Tensor x, str name) -> Tensor")
    library.impl("deskgpt::activation_backward", "CPU", activation_backward)
    library.register_fake("deskgpt::activation_backward", lambda g, x, name: x.new_empty(x.shape))

    def keep_input(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.name = inputs
        ctx.save_for_backward(x)

    library.register_autograd(
        "deskgpt::activation",
        lambda ctx, g: (torch.ops.deskgpt.activation_backward(g, *ctx.saved_tensors, ctx.name), None),
        setup_context=keep_input,
    )
