"""How a model computes on this machine: dtype, kernels, seeds, compiled or not.

Chosen by rule, printed, and applied.

The choice follows from the settings and the kind of machine alone: a short trial computes what the
long run does, and two runs with the same settings on the same machine compute the same.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from deskgpt import cpu_kernels
from deskgpt.device import DTYPES
from deskgpt.distributed import DistContext, agree, shards_of
from deskgpt.errors import shortened
from deskgpt.peaks import MIN_SPEEDUP, measured_flops
from model import GPT


@dataclass(frozen=True)
class ComputeMode:
    """How a micro-batch is computed.

    The default, eager float32, is what others are compared with.
    """

    dtype: str = "float32"  # of the matmuls
    compiled: bool = False  # the transformer or its blocks, and the softmax of the loss
    cpu_kernels: bool = False  # ours in C++ (cpu_kernels.cpp)
    recompute: str = "none"  # full: the backward pass computes the blocks' activations again
    residual_dtype: str = "float32"  # of the residual stream
    cuda_graph: bool = False  # a micro-batch's kernels are queued by one call (cuda_graph.py)
    loss_chunks: int = 1  # in which a card computes the loss of a micro-batch: the fewest that fit

    def __str__(self) -> str:
        words = {
            self.dtype: True,
            f"residual stream in {self.residual_dtype}": self.residual_dtype != "float32",
            "C++ kernels": self.cpu_kernels,
            "compiled": self.compiled,
            "not compiled": not self.compiled,
            "CUDA graph": self.cuda_graph,
            f"loss in {self.loss_chunks} chunks": self.loss_chunks > 1,
        }
        return ", ".join(word for word, is_so in words.items() if is_so)


def saved_compute(saved: Any, device: torch.device) -> dict[str, Any]:
    """Return how the run that saved a checkpoint computed, by ComputeMode's fields, as far as it is
    known here.

    How another kind of device computed says nothing about this one.
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
    """What `choose_compute` reads of train.py's settings."""

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

    All ranks get the same: what a rank derives from its own device goes through `agree`.

    earlier: of the run that is resumed (saved_compute), which is kept, so that it continues bit for
    bit. Raises ValueError if what a setting names cannot be had.
    """
    from deskgpt.compiling import compiling_switch

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
        # Not on every host, where hosts differ.
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
    # What is computed again reads the state of CUDA's generator, which a recording does not allow.
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
    from deskgpt.compiling import set_up_compiler

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


# ---- dtype and seeds -----------------------------------------------------------------------------


def has_triton(device: torch.device) -> bool:
    """Return whether Triton is installed and has code for this GPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (7, 0)


def autocast(device: torch.device, dtype: str, cached: bool = True) -> AbstractContextManager:
    """Return a context in which matmuls run in `dtype`; for float32, one that does nothing.

    cached: it keeps the casts of weights until its end, for weights that are used again.
    """
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype], cache_enabled=cached)


def named_losses(result: Any, taken: Set[str] = frozenset({"loss"})) -> dict[str, Tensor]:
    """Return the losses that GPT.forward returns, by name. Training adds all of them; the val loss
    is `loss`.

    taken: names that a further loss may not have. Raises ValueError for another result.
    """
    match result:
        case (_, loss):
            further: dict[str, Any] = {}
        case (_, loss, dict(further)):
            pass
        case _:
            loss = None
            further = {}
    losses = {"loss": loss, **further}
    is_number = all(isinstance(part, Tensor) and part.numel() == 1 for part in losses.values())
    if not is_number or taken & further.keys():
        raise ValueError(
            f"GPT.forward returns {shortened(result)}: with targets it must return (None, loss), "
            "or (None, loss, {name: further loss}); each is a tensor of one number, under a name "
            "that the log has not"
        )
    return losses


def set_seed(seed: int, deterministic: bool, device: torch.device) -> None:
    """Seed torch's and Python's generators; deterministic: and make CUDA compute the same bits each
    time.

    Attention is then flash, whose backward pass can add in a fixed order, and not cuDNN's, which
    cannot.
    """
    if deterministic:
        # Which cuBLAS reads at its first matmul.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
    seed_all(seed, device)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed what a model on this device may draw random numbers from: torch's generators and
    Python's own.

    torch.manual_seed would take half a millisecond without a GPU: it notes the stack for a GPU that
    may come yet.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


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
        flops = measured_flops(device)
        return "bfloat16" if flops["bfloat16"] > MIN_SPEEDUP * flops["float32"] else "float32"
    return "float32"
