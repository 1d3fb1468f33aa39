"""How a run computes, chosen by rule and applied to its model; what torch.compile needs for it.

The choice follows from the settings and the kind of machine alone: a short trial computes what the
long run does, and two runs with the same settings on the same machine compute the same.
"""

import functools
import importlib.util
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from deskgpt import cpu_kernels
from deskgpt.compute import ComputeMode, Pass
from deskgpt.device import DTYPES
from deskgpt.distributed import DistContext, agree, shards_of
from deskgpt.errors import reason
from deskgpt.evaluation import evaluation_loss
from deskgpt.train_state import TrainState
from model import GPT

# ---- dtype, kernels, compiled or not -------------------------------------------------------------


def saved_compute(saved: Any, device: torch.device) -> dict[str, Any]:
    """Return the compute mode of a checkpoint's run, by ComputeMode's fields; only the known ones.

    It is empty for another kind of device, which says nothing about this one.
    """
    if not isinstance(saved, dict) or saved.get("device", device.type) != device.type:
        return {}
    found = {
        f.name: saved[f.name]
        for f in fields(ComputeMode)
        if isinstance(saved.get(f.name), type(f.default))
    }
    if found.get("dtype", "float32") not in DTYPES:
        del found["dtype"]
    return found


class ComputeSettings(Protocol):
    """The settings of train.py that `choose_compute` reads."""

    @property
    def dtype(self) -> str: ...
    @property
    def cpu_kernels(self) -> str | bool: ...
    @property
    def compile(self) -> str | bool: ...
    @property
    def cuda_graph(self) -> str | bool: ...
    @property
    def activation_checkpoint(self) -> str: ...
    @property
    def dp_shard(self) -> int: ...


def choose_compute(
    config: ComputeSettings, dist: DistContext, earlier: dict[str, Any]
) -> ComputeMode:
    """Return how this run computes, by rule: "auto" is decided here, from the kind of machine.

    All ranks get the same: each fact of a rank's own device goes through `agree`.

    earlier: of the run that is resumed (saved_compute), which is kept, so that it continues bit for
    bit. Raises ValueError if a setting asks for the impossible.
    """
    dtype = config.dtype
    kernels = config.cpu_kernels
    compiles = config.compile
    device = dist.device
    if dtype == "auto":
        dtype = earlier.get("dtype") or default_dtype(device)
    is_sharded = shards_of(config.dp_shard, dist.world) > 1
    if is_sharded and dtype == "float16":  # no loss scale follows the gradients of shards
        dtype = "float32"
    dtype = agree(dist, dtype, "float32")
    if kernels == "auto":
        # Where hosts differ, all use them or none.
        is_candidate = device.type == "cpu" and cpu_kernels.is_supported_platform()
        kernels = agree(dist, is_candidate and earlier.get("cpu_kernels", True))
        kernels = kernels and load_kernels(dist)
    elif kernels and not load_kernels(dist):
        raise ValueError("cpu_kernels=True is not possible here, see above; try --cpu_kernels=auto")
    if not kernels:
        cpu_kernels.unload()
    if compiles == "auto":
        by_rule = device.type == "cuda" and has_triton(device)
        compiles = agree(dist, earlier.get("compiled", by_rule))
    switch = compiling_switch()
    if compiles and not agree(dist, not switch):
        dist.print0(f"NOT compiling: {switch or 'a variable on another host'} switches it off")
        compiles = False
    # The sums and norms of the residual stream, and their gradients, move up to twice the bytes in
    # float32.
    in_bfloat16 = device.type == "cuda" and compiles and dtype == "bfloat16"
    residual_dtype = "bfloat16" if in_bfloat16 else "float32"
    # Recomputing reads the state of CUDA's generator, which a recording does not allow.
    may_record = device.type == "cuda" and not is_sharded and config.activation_checkpoint == "none"
    if config.cuda_graph is True and not may_record:
        raise ValueError(
            "cuda_graph=True is for CUDA devices, without dp_shard and "
            "activation_checkpoint; try --cuda_graph=auto"
        )
    return ComputeMode(
        dtype=dtype,
        compiled=bool(compiles),
        cpu_kernels=bool(kernels),
        recompute=config.activation_checkpoint,
        residual_dtype=residual_dtype,
        cuda_graph=may_record and bool(config.cuda_graph),
    )


def default_dtype(device: torch.device) -> str:
    """Return the dtype that dtype=auto means: bfloat16 if the device multiplies it faster than
    float32.

    A GPU without bfloat16 takes float16, which needs a loss scale. A CPU is measured, since a
    processor may list bfloat16 and be slower in it (docs/decisions.md).
    """
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16"
        # Below 7.0 no tensor cores multiply float16.
        return "float16" if torch.cuda.get_device_capability(device) >= (7, 0) else "float32"
    if device.type == "cpu":
        from deskgpt.peaks import MIN_SPEEDUP, measured_flops

        flops = measured_flops(device)
        return "bfloat16" if flops["bfloat16"] > MIN_SPEEDUP * flops["float32"] else "float32"
    return "float32"


def load_kernels(dist: DistContext) -> bool:
    """Load the kernels in C++, compiling them if need be.

    Return whether all ranks have them; else print why not.
    """
    problem = ""
    try:
        cpu_kernels.load(dist.print0)
    except cpu_kernels.Unavailable as e:
        problem = str(e)
    if dist.all(not problem):
        return True
    dist.print0(
        f"NOT using C++ kernels, so steps may be slower: {problem or 'another rank has none'}"
    )
    return False


def apply_compute(model: GPT, compute: ComputeMode, ranks: int = 1) -> None:
    """Set up the model to compute in this mode. The dtype is the loop's: autocast."""
    device = next(model.parameters()).device
    if compute.recompute not in ("none", "full"):
        raise ValueError(
            f"activation_checkpoint={compute.recompute} is not computed: write it in "
            "Transformer of model.py"
        )
    residual_dtype = DTYPES[compute.residual_dtype]
    model.transformer.residual_dtype = None if residual_dtype == torch.float32 else residual_dtype
    model.transformer.recompute = compute.recompute
    model.compile_loss = compute.compiled
    model.loss_chunks = compute.loss_chunks
    if compute.compiled:
        set_up_compiler(device)
        if device.type == "cuda" and ranks == 1 and compute.recompute == "none":
            # One graph: a fast card would wait for the CPU, which launches each.
            model.transformer.compile()
        else:
            # Several ranks exchange the gradients of a block while those of the next are computed.
            for block in model.transformer.h:
                block.compile()


def cuda_graphs(
    forward_backward: Pass, ddp_model: nn.Module, state: TrainState, warn: Callable[[str], None]
) -> tuple[Pass, Pass]:
    """Return train.py's forward_backward, to be called with a micro-batch, and evaluation_loss,
    with a batch. On CUDA both passes are recorded, and replayed from then on.

    The first two steps run without a graph, because they compile and allocate the optimizer's
    state. Both graphs use the same memory, one after the other.
    """
    train_pass = functools.partial(forward_backward, ddp_model, state.scaler, state.compute)
    eval_pass = functools.partial(evaluation_loss, state.model, state.compute)
    if not state.compute.cuda_graph:
        return train_pass, eval_pass
    from deskgpt.cuda_graph import CudaGraph

    train = CudaGraph(
        train_pass,
        state.model,
        eager_calls=2 * state.batching.micro_steps_per_rank,
        on_refusal=lambda why: warn(f"no CUDA graph: {why}"),
    )
    evaluation = CudaGraph(
        eval_pass,
        state.model,
        shares_memory_with=train,
        on_refusal=lambda why: warn(f"evaluations without a CUDA graph: {why}"),
    )
    # DDP broadcasts buffers in some passes only. A recording would repeat that always, or miss it.
    if getattr(ddp_model, "modules_buffers", None):
        train.refuse("with several ranks, a model that has buffers needs --cuda_graph=False")
    return train, evaluation


def has_triton(device: torch.device) -> bool:
    """Return whether Triton is installed and has code for this GPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (7, 0)


# ---- inductor's settings -------------------------------------------------------------------------

NO_ALIGNING_COPIES = "-mno-align-stringops"  # avoids GCC's bug 113255: see work_around_gcc

MOST_GRAPHS = 64  # of a function that is compiled, such as a block

NO_COMPILER = "No working C++ compiler"
VECTOR_BITS = {"AVX2": 256, "AVX512": 512}


def compiling_switch() -> str:
    """Return the environment variable that switches torch.compile off; "" if none does."""
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name) == "1":
            return f"{name}=1"
    return ""


def set_up_compiler(device: torch.device) -> None:
    """Set up torch.compile, before anything is compiled.

    Silences its warnings that ask for nothing: that matmuls are not autotuned on a card of fewer
    than 68 SMs, and that FLOPs of Triton are not counted on Windows. Of inductor's settings for a
    CPU, the user's own win.
    """
    for name in ("torch._inductor.utils", "torch.utils.flop_counter"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # A change of model.py may have a graph for each layer; after torch's limit, 8, it would
    # silently go on uncompiled.
    torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    # TORCHDYNAMO_SUPPRESS_ERRORS would leave a block uncompiled that cannot be.
    torch._dynamo.config.suppress_errors = False
    # A model that counts its passes would be compiled again at each of them.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    if device.type != "cpu":
        return
    import torch._inductor.config as inductor

    # At each start inductor checks whether the compiler knows AVX2 and AVX-512. Every compiler that
    # can compile torch's headers does. The check took 8 of 30 s with an empty cache, 2.5 of 8 s
    # with a warm one (docs/decisions.md).
    if "TORCHINDUCTOR_VEC_ISA_OK" not in os.environ:
        inductor.cpp.vec_isa_ok = True
    # Inductor's cache does not tell graphs for AVX2 from those for AVX-512, unless a setting does:
    # a disk that moves to another processor would bring it graphs that write beyond their tensors
    # (torch 2.13).
    if inductor.cpp.simdlen is None:
        inductor.cpp.simdlen = VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability())
    work_around_gcc()


def work_around_gcc() -> None:
    """Make inductor call its compiler with -mno-align-stringops on x86, unless it is clang, which
    does not know it.

    GCC bug 113255, fixed in 14: if an inline copy first aligns its destination, the optimizer loses
    track of its source, and deletes stores that the copy reads. Inductor's bfloat16 transposes then
    return whatever the stack held before (bench/results/2026-11-22-gcc-dse.md).
    """
    from torch._inductor import config, cpp_builder

    if platform.machine() not in ("x86_64", "AMD64") or sys.platform == "win32":
        return
    # In torch 2.11 to 2.13 this is the only setting that reaches the compiler's command line
    # unchanged. Names of libraries in inductor's cache and keys of its graphs depend on it, so
    # nothing compiled without the flag is reused.
    flags = getattr(config.cpp, "enable_floating_point_contract_flag", None)
    if flags is None or NO_ALIGNING_COPIES in flags:
        return
    with suppress(RuntimeError):  # there is no compiler, which compiling will say
        if "clang" not in Path(cpp_builder.get_cpp_compiler()).name:
            config.cpp.enable_floating_point_contract_flag = f"{flags} {NO_ALIGNING_COPIES}"


def compile_s() -> float:
    """Return the seconds that torch.compile has taken in this process so far."""
    return torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0)


# ---- why it failed -------------------------------------------------------------------------------


@contextmanager
def explain_compile_errors() -> Iterator[None]:
    """Raise ValueError, one line with the remedy, for errors of torch.compile in the block."""
    try:
        yield
    except RuntimeError as e:
        if NO_COMPILER not in str(e) and not type(e).__module__.startswith(
            ("torch._dynamo", "torch._inductor")
        ):
            raise
        raise ValueError(
            f"compiling fails: {reason(e)}; it needs a C++ compiler and Python's headers (Debian, "
            "Ubuntu: apt install g++ python3-dev; macOS: xcode-select --install; Windows: Build "
            "Tools for Visual Studio, and a start from its command prompt) and on a card Triton "
            "(pip install triton); or add --compile=False"
        ) from None
