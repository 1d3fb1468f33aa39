"""How a model computes on this machine: dtype, kernels, compiled or not. Chosen by rule, printed, and applied.

The choice follows from the settings and the kind of machine alone: a short trial computes what the long run does, and
two runs with the same settings on the same machine compute the same.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from deskgpt.compute import compiling
from deskgpt.compute.distributed import DistContext, agree
from deskgpt.compute.sharding import shards_of
from deskgpt.kernels import cpu_kernels
from deskgpt.system import hardware, peaks
from model import GPT


@dataclass(frozen=True)
class Variant:
    """How a micro-batch is computed. The default, eager float32, is what others are compared with."""

    dtype: str = "float32"  # of the matmuls
    compiled: bool = False  # the transformer or its blocks, and the softmax of the loss
    cpu_kernels: bool = False  # ours in C++: attention, activation, softmax
    recompute: str = "none"  # full: the backward pass computes the blocks' activations again
    residual_dtype: str = "float32"  # of the residual stream
    cuda_graph: bool = False  # a micro-batch's kernels are queued by one call (cuda_graph.py)
    loss_chunks: int = 1  # in which a card computes the loss of a micro-batch: the fewest that fit

    def __str__(self) -> str:
        words = [self.dtype]
        if self.residual_dtype != "float32":
            words.append(f"residual stream in {self.residual_dtype}")
        if self.cpu_kernels:
            words.append("C++ kernels")
        words.append("compiled" if self.compiled else "not compiled")
        if self.cuda_graph:
            words.append("CUDA graph")
        if self.loss_chunks > 1:
            words.append(f"loss in {self.loss_chunks} chunks")
        return ", ".join(words)


def saved_variant(saved: Any, device: torch.device) -> dict[str, Any]:
    """Return how the run that saved a checkpoint computed, by Variant's fields, as far as it is known here.

    The variant of another kind of device says nothing about this one.
    """
    if not isinstance(saved, dict) or saved.get("device", device.type) != device.type:
        return {}
    if isinstance(saved.get("attention"), str):  # as written until 2026-11-26
        saved = saved | {"cpu_kernels": saved["attention"] == "kernels"}
    found = {f.name: saved[f.name] for f in fields(Variant) if isinstance(saved.get(f.name), type(f.default))}
    if found.get("dtype", "float32") not in hardware.DTYPES:
        del found["dtype"]
    return found


def choose_variant(config: Any, dist: DistContext, earlier: dict[str, Any]) -> Variant:
    """Return what the settings of train.py and this machine ask for; "auto" is decided here.

    All ranks get the same: what a rank derives from its own device goes through `agree`.

    earlier: of the run that is resumed
    (saved_variant), which is kept, so that it continues bit for bit. Raises ValueError if what a setting names cannot
    be had, and if some ranks have a GPU and others have not.
    """
    dtype = config.dtype
    kernels = config.cpu_kernels
    compile = config.compile
    device = dist.device
    types = dist.gather(device.type)
    if len({*types}) > 1:
        found = ", ".join(f"rank {rank} {type}" for rank, type in enumerate(types))
        raise ValueError(f"device={config.device}: {found}; all ranks need the same kind, such as --device=cpu")
    if dtype == "auto":
        dtype = earlier.get("dtype") or peaks.fast_dtype(device)
    is_sharded = shards_of(config.dp_shard, dist.world) > 1
    if is_sharded and dtype == "float16":  # no loss scale follows the gradients of shards
        dtype = "float32"
    dtype = agree(dist, dtype, "float32")
    if kernels == "auto":
        may_exist = device.type == "cpu" and cpu_kernels.may_exist()  # not on every host, where hosts differ
        kernels = agree(dist, may_exist and earlier.get("cpu_kernels", True)) and load_kernels(dist)
    elif kernels and not load_kernels(dist):
        raise ValueError("cpu_kernels=True is not possible here, see above; try --cpu_kernels=auto")
    if not kernels:
        cpu_kernels.unload()
    if compile == "auto":
        compile = earlier.get("compiled")
        if compile is None:
            compile = device.type == "cuda" and hardware.has_triton(device)
        compile = agree(dist, compile)
    # The sums and norms of the residual stream, and their gradients, move up to twice the bytes in float32.
    in_bfloat16 = device.type == "cuda" and compile and dtype == "bfloat16"
    residual_dtype = "bfloat16" if in_bfloat16 else "float32"
    # What is computed again reads the state of CUDA's generator, which a recording does not allow.
    may_record = device.type == "cuda" and not is_sharded and config.activation_checkpoint == "none"
    if config.cuda_graph is True and not may_record:
        raise ValueError(
            "cuda_graph=True is for CUDA devices, without dp_shard and activation_checkpoint; try --cuda_graph=auto"
        )
    return Variant(
        dtype=dtype,
        compiled=bool(compile),
        cpu_kernels=bool(kernels),
        recompute=config.activation_checkpoint,
        residual_dtype=residual_dtype,
        cuda_graph=may_record and bool(config.cuda_graph),
    )


def load_kernels(dist: DistContext) -> bool:
    """Load the kernels in C++, compiling them if need be. Return whether all ranks have them; else print why not."""
    problem = ""
    try:
        cpu_kernels.load(dist.print0)
    except cpu_kernels.Unavailable as e:
        problem = str(e)
    if dist.all(not problem):
        return True
    dist.print0(f"NOT using C++ kernels, so steps may be slower: {problem or 'another rank has none'}")
    return False


def apply_variant(model: GPT, variant: Variant, ranks: int = 1) -> None:
    """Set up the model to compute in this variant. The dtype is the loop's: hardware.autocast."""
    device = next(model.parameters()).device
    if variant.recompute not in ("none", "full"):
        raise ValueError(
            f"activation_checkpoint={variant.recompute} is not computed: write it in Transformer of model.py"
        )
    in_16_bits = variant.residual_dtype != "float32"
    model.transformer.residual_dtype = hardware.DTYPES[variant.residual_dtype] if in_16_bits else None
    model.transformer.recompute = variant.recompute
    model.compile_loss = variant.compiled
    model.loss_chunks = variant.loss_chunks
    if variant.compiled:
        compiling.prepare(device)
        if device.type == "cuda" and ranks == 1 and variant.recompute == "none":
            model.transformer.compile()  # one graph: a fast card would wait for the CPU, which launches each
        else:  # several ranks exchange the gradients of a block while those of the next are computed
            for block in model.transformer.h:
                block.compile()
