"""How a model computes on this machine: dtype, kernels, seeds, compiled or not.

Chosen by rule, printed, and applied.

The choice follows from the settings and the kind of machine alone: a short trial computes what the
long run does, and two runs with the same settings on the same machine compute the same.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from deskgpt import cpu_kernels
from deskgpt.device import DTYPES
from deskgpt.distributed import DistContext, agree, shards_of
from deskgpt.errors import reason, shortened
from deskgpt.pass_facts import Facts, Pass, generator_states, hooks_of, noticed_waits
from deskgpt.peaks import MIN_SPEEDUP, measured_flops
from model import GPT


@dataclass(frozen=True)
class ComputeMode:
    """How a micro-batch is computed.

    The default, eager float32, is what others are compared with.
    """

    dtype: str = "float32"  # of the matmuls
    compiled: bool = False  # the transformer or its blocks, and the softmax of the loss
    cpu_kernels: bool = False  # ours in C++: attention, activation, softmax
    recompute: str = "none"  # full: the backward pass computes the blocks' activations again
    residual_dtype: str = "float32"  # of the residual stream
    cuda_graph: bool = False  # a micro-batch's kernels are queued by one call (compute.py)
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


def saved_compute(saved: Any, device: torch.device) -> dict[str, Any]:
    """Return how the run that saved a checkpoint computed, by ComputeMode's fields, as far as it is
    known here.

    The variant of another kind of device says nothing about this one.
    """
    if not isinstance(saved, dict) or saved.get("device", device.type) != device.type:
        return {}
    if isinstance(saved.get("attention"), str):  # as written until 2026-11-26
        saved = saved | {"cpu_kernels": saved["attention"] == "kernels"}
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
    bit. Raises ValueError if what a setting names cannot be had, and if some ranks have a GPU and
    others have not.
    """
    from deskgpt.compiling import compiling_switch

    dtype = config.dtype
    kernels = config.cpu_kernels
    compiles = config.compile
    device = dist.device
    types = dist.gather(device.type)
    if len({*types}) > 1:
        found = ", ".join(f"rank {rank} {type}" for rank, type in enumerate(types))
        raise ValueError(f"{found}: all ranks need the same kind of device, such as --device=cpu")
    if dtype == "auto":
        dtype = earlier.get("dtype") or default_dtype(device)
    is_sharded = shards_of(config.dp_shard, dist.world) > 1
    if is_sharded and dtype == "float16":  # no loss scale follows the gradients of shards
        dtype = "float32"
    dtype = agree(dist, dtype, "float32")
    if kernels == "auto":
        # Not on every host, where hosts differ.
        is_candidate = device.type == "cpu" and cpu_kernels.is_supported_platform()
        kernels = agree(dist, is_candidate and earlier.get("cpu_kernels", True)) and load_kernels(
            dist
        )
    elif kernels and not load_kernels(dist):
        raise ValueError("cpu_kernels=True is not possible here, see above; try --cpu_kernels=auto")
    if not kernels:
        cpu_kernels.unload()
    if compiles == "auto":
        compiles = earlier.get("compiled", device.type == "cuda" and has_triton(device))
        compiles = agree(dist, compiles)
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


def apply_compute(model: GPT, variant: ComputeMode, ranks: int = 1) -> None:
    """Set up the model to compute in this variant. The dtype is the loop's: autocast."""
    from deskgpt.compiling import set_up_compiler

    device = next(model.parameters()).device
    if variant.recompute not in ("none", "full"):
        raise ValueError(
            f"activation_checkpoint={variant.recompute} is not computed: write it in "
            "Transformer of model.py"
        )
    in_16_bits = variant.residual_dtype != "float32"
    model.transformer.residual_dtype = DTYPES[variant.residual_dtype] if in_16_bits else None
    model.transformer.recompute = variant.recompute
    model.compile_loss = variant.compiled
    model.loss_chunks = variant.loss_chunks
    if variant.compiled:
        set_up_compiler(device)
        if device.type == "cuda" and ranks == 1 and variant.recompute == "none":
            # One graph: a fast card would wait for the CPU, which launches each.
            model.transformer.compile()
        else:
            # Several ranks exchange the gradients of a block while those of the next are computed.
            for block in model.transformer.h:
                block.compile()


# ---- CUDA graph ----------------------------------------------------------------------------------


MAX_RECORDINGS = 4  # of one pass: what changes more often is faster without a graph
DRAWS = "the model draws random numbers on the CPU, from Python's, NumPy's or torch's generator"
REPLACES = "each pass replaces gradients"


@dataclass(frozen=True)
class Recording:
    """What a graph reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]  # in the order of the arguments
    kinds: list[Any]  # of the arguments
    outputs: dict[str, Tensor]
    gradients: list[
        tuple[nn.Parameter, Tensor]
    ]  # a parameter, and the memory to which the graph adds
    facts: Facts  # what the pass may have read


class CudaGraph:
    """A pass that is recorded once and then replayed: its kernels are queued by one call.

    Call it as the pass itself. On a fast card the CPU needs longer to queue the kernels of a small
    model than the card needs to run them. A graph replays the same kernels on the same memory, so
    it is for a pass whose Python code changes nothing and reads nothing that changes:

    - The first passes run without a graph, and are observed. If one changes an attribute of a
      module or a global of model.py, draws from a generator on the CPU, waits for the card or
      calls hooks, no graph is recorded, and one line says why.
    - The pass that is recorded is one of the run: its Python code runs once, and so do its
      kernels, in a first replay.
    - Before each replay, what the recorded pass may have read is compared: attributes, globals,
      training mode, which parameters are trained, shapes. After a change one pass runs without a
      graph, and the next one is recorded anew.

    Random numbers go on: torch hands the seed of its CUDA generator to each replay. All of it is
    on the run's own stream, since CUDA's default stream cannot be recorded.
    """

    def __init__(
        self,
        run: Pass,
        model: nn.Module,
        *,
        enabled: bool,
        eager_calls: int = 2,
        shares_memory_with: CudaGraph | None = None,
        on_refusal: Callable[[str], object] = print,
    ) -> None:
        """run takes tensors, and numbers, which a replay hands over as tensors; it returns tensors
        by name, without a graph of autograd, which are overwritten by the next call. It may add to
        the gradients of the model.

        eager_calls: before the recording, for what torch sets up at first. shares_memory_with:
        another pass, whose results are no longer needed when this one runs; the memory of both is
        freed together. on_refusal is told why there is no graph any more.
        """
        self.run = run
        self.model = model
        self.enabled = enabled
        self.on_refusal = on_refusal
        # Of memory
        self.memory_group: list[CudaGraph] = (
            shares_memory_with.memory_group if shares_memory_with else []
        )
        self.memory_group.append(self)
        self.recordings = 0
        self.drops = 0  # recordings that this pass has made worthless
        self._eager_calls = eager_calls  # to come before the next recording
        self._recording: Recording | None = None

    def __call__(self, *args: Any) -> dict[str, Tensor]:
        if not self.enabled or exchanges_gradients(self.run):
            return self.run(*args)
        recording = self._recording
        if recording is not None:
            change = "the shape or value of an argument"
            if recording.kinds == [kind_of(value) for value in args]:
                change = recording.facts.first_change()
            if not change:
                return self._replay(recording, args)
            self.drop(f"{change} changes")
        if not self.enabled:
            return self.run(*args)
        return self._observed(args) if self._eager_calls else self._record(args)

    def drop(self, why: str) -> bool:
        """Free the graph and its memory, to be recorded anew a few times; return whether there was
        one.
        """
        if not any(other._recording for other in self.memory_group):
            return False
        for other in self.memory_group:
            other._recording = None
            # What has changed may be compiled anew, and cannot be recorded.
            other._eager_calls = max(other._eager_calls, 1)
        torch.cuda.empty_cache()
        self.drops += 1
        if self.drops == MAX_RECORDINGS:
            self.refuse(f"{why} again and again")
        return True

    def refuse(self, why: str) -> None:
        """Go on without a graph, and say why."""
        if not self.enabled:
            return
        self.enabled = False
        self.drop(why)
        self.on_refusal(why)

    # ---- without a graph -------------------------------------------------------------------------

    def _observed(self, args: tuple[Any, ...]) -> dict[str, Tensor]:
        """Run the pass, and refuse a graph if its Python code changes what a replay would not
        change.
        """
        self._eager_calls -= 1
        facts = Facts(self.run, self.model)
        drawn = generator_states()
        gradients = [(p, p.grad) for p in self.model.parameters() if p.grad is not None]
        waits: list[str] = []
        # Only the last one before a recording is watched: earlier ones compile, which waits.
        with nullcontext() if self._eager_calls else noticed_waits(waits):
            try:
                outputs = self.run(*args)
            except torch.OutOfMemoryError:
                # Graphs keep their memory. A pass that adds no gradients may run again.
                if torch.is_grad_enabled() or not self.drop("memory runs out"):
                    raise
                outputs = self.run(*args)

        changed = facts.first_change()
        if changed:
            self.refuse(f"each pass changes {changed}")
        elif hooks := hooks_of(self.model):
            self.refuse(f"{hooks[0]} has a hook, whose Python code runs in each pass")
        elif waits:
            self.refuse(f"the pass waits for the card, in {waits[0]}")
        elif generator_states() != drawn:
            self.refuse(DRAWS)
        elif any(p.grad is not gradient for p, gradient in gradients):
            self.refuse(REPLACES)
        return outputs

    # ---- with a graph ----------------------------------------------------------------------------

    def _record(self, args: tuple[Any, ...]) -> dict[str, Tensor]:
        """Record the pass, and replay it once: so it has run.

        If it cannot be recorded, run it without a graph.
        """
        device = next(self.model.parameters()).device
        facts = Facts(self.run, self.model)
        inputs = [static_input(value, device) for value in args]
        gradients = []
        without_gradient = [p for p in self.model.parameters() if p.grad is None]
        if torch.is_grad_enabled():
            for p in self.model.parameters():
                if p.requires_grad:
                    gradient = torch.zeros_like(p) if p.grad is None else p.grad
                    p.grad = gradient
                    gradients.append((p, gradient))
        versions = [gradient._version for _, gradient in gradients]
        drawn = generator_states()
        state = torch.cuda.get_rng_state(device)

        graph = torch.cuda.CUDAGraph()
        why = ""
        try:
            # The threads of the loader go on meanwhile: the mode says that their calls are none of
            # the recording's.
            stream = torch.cuda.current_stream(device)
            recordings = [r for r in (other._recording for other in self.memory_group) if r]
            pool = recordings[0].graph.pool() if recordings else None
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                outputs = self.run(*inputs)
            if any(p.grad is not gradient for p, gradient in gradients):
                why = REPLACES
        except torch.OutOfMemoryError:
            why = "it does not fit into memory"
        except RuntimeError as e:  # it waits for the card, or copies from the CPU
            why = f"the pass cannot be recorded ({reason(e)})"
        if why:
            del graph
            for p, gradient in gradients:
                p.grad = gradient
            for p in without_gradient:
                p.grad = None
            torch.cuda.set_rng_state(state, device)
            self.refuse(why)
            return self.run(*args)

        added = []
        for (p, gradient), version in zip(gradients, versions, strict=True):
            if gradient._version != version:
                added.append((p, gradient))
            elif any(p is other for other in without_gradient):  # the loss does not depend on it
                p.grad = None
        kinds = [kind_of(value) for value in args]
        self._recording = Recording(graph, inputs, kinds, outputs, added, facts)
        self.recordings += 1
        graph.replay()
        if changed := facts.first_change() or (generator_states() != drawn and DRAWS):
            # This replay was right: its numbers are those of the pass that has just been recorded.
            outputs = {name: value.clone() for name, value in outputs.items()}
            self.refuse(changed if changed == DRAWS else f"each pass changes {changed}")
        return outputs

    def _replay(self, recording: Recording, args: tuple[Any, ...]) -> dict[str, Tensor]:
        fresh = []
        for p, gradient in recording.gradients:
            if p.grad is gradient:
                continue
            if p.grad is None:  # as after optimizer.zero_grad()
                fresh.append(gradient)
            else:
                gradient.copy_(p.grad)
            p.grad = gradient
        if fresh:
            torch._foreach_zero_(fresh)
        for static, value in zip(recording.inputs, args, strict=True):
            if isinstance(value, Tensor):
                static.copy_(value)
            elif isinstance(static, Tensor):
                static.fill_(value)
        recording.graph.replay()
        return recording.outputs


def kind_of(value: Any) -> Any:
    """Return what must stay the same of an argument: a float is handed to a graph, as tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return float if isinstance(value, float) else value


def static_input(value: Any, device: torch.device) -> Any:
    """Return the memory from which a graph reads an argument: of a tensor, or of a float; anything
    else as it is.
    """
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32, device=device)
    return value.clone() if isinstance(value, Tensor) else value


def exchanges_gradients(run: Pass) -> bool:
    """Return whether DDP would exchange gradients among ranks in this pass, which no graph
    records.
    """
    args = run.args if isinstance(run, functools.partial) else ()
    return any(getattr(arg, "require_backward_grad_sync", False) for arg in args)


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


def forward_result(result: Any) -> Any:
    """Return what GPT.forward returns. Raises ValueError if that is not (logits, loss), with
    further losses by name or without.
    """
    if isinstance(result, tuple) and len(result) in (2, 3):
        loss = result[1]
        further = result[2] if len(result) == 3 else None
        is_loss = isinstance(loss, Tensor) and loss.numel() == 1
        if is_loss and isinstance(further, dict | None):
            return result
    raise ValueError(
        f"GPT.forward returns {shortened(result)}: with targets it must return (None, loss), or "
        "(None, loss, {name: further loss})"
    )


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
