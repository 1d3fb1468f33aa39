"""What fits, predicted before a run starts: memory part by part, the micro-batch, the steps in a number of minutes.

Memory comes from a rehearsal, not from formulas: the GPT of model.py goes forward and backward on fake tensors
(shapes without storage) while the bytes alive are counted. It takes about a second and follows model.py wherever it
goes. `device_type="cuda"` gives CUDA's figures on any machine: what keeps other tensors there (attention, dropout, RMS
norm, what autocast runs in float32) is replaced by CUDA's. What a compiled step keeps comes from the partitioner that
torch.compile uses.

Proven by real runs on a CPU: the counting, and what the partitioner keeps. Proven by torch's own dispatch for fake CUDA
tensors: the dtypes of the forward pass. Not proven until a card has measured it: the sums for CUDA. The aim is 5% of
what is allocated, compiled 10%.

Of what `torch.cuda.max_memory_allocated` counts, workspaces of cuBLAS and of attention's backward pass and DDP's
buckets (4 bytes per parameter) are not counted here. The CUDA context and the allocator's gaps come on top: leave a
tenth free.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deskgpt.compute.ranks import Ranks
from deskgpt.compute.runner import Runner
from deskgpt.compute.sharding import local
from deskgpt.faster import kernels
from deskgpt.machine import hardware
from deskgpt.run.log import clock
from model import BYTES, GPT, GPTConfig, with_unit

if TYPE_CHECKING:
    from data.splits import Split
    from train import TrainConfig

LAYERS_REHEARSED = 3  # of a sharded model: the first gathers ahead, the last has nothing behind it
USABLE = 0.9  # of a GPU's usable memory: the rest is the allocator's gaps and what is not counted
REHEARSED = 1 << 16  # tokens of a rehearsal; larger batches are extrapolated
TRACED_SEQUENCES = 2  # of a compiled form; torch takes a dimension of 1 for a special case

# A run that is given minutes, not steps:
EVAL_SHARE = 0.2  # spends at most this share of its time on evaluation,
LEAST_EVAL_BATCHES = 8  # reads at least this many batches of each split (fewer say nothing about their own noise),
WARMUP_SHARE = 0.1  # and warms the learning rate up for at most this share of its steps.
TIMED = 7  # steps that are timed for that, at most ...
TIMED_S = 3.0  # ... and about the seconds that this may take

# ---- memory --------------------------------------------------------------------------------------------------


def memory(
    config: GPTConfig,
    batch_size: int,
    dtype: str,
    device_type: str,
    compiled: bool,
    accumulates: bool = True,
    explicit: bool = False,
    loss_logits: int = kernels.LEAST_LOGITS_ON_GPU,
    activation_checkpoint: str = "none",
    shard: Callable[[GPT], object] | None = None,
) -> dict[str, int]:
    """Bytes alive at the peak of a training step of one rank, by part; their sum is the peak.

    dtype is that of the matmuls, not auto. accumulates: whether a step has several micro-batches, so that earlier
    gradients are alive in a forward pass. explicit: kernels.explicit_attention. loss_logits: of a chunk of the loss on
    CUDA, as kernels.logits_for_memory has them for the card. activation_checkpoint: as in
    TrainConfig. The parts: activations are what the
    forward pass keeps until the loss begins, token ids included. logits are all that the loss adds to it, or what the
    backward pass adds, if that is more. optimizer are AdamW's moments; Muon keeps less, and takes about as much while
    it steps, when the activations are gone.

    shard: what shards the model's parameters among the ranks, of which this is the first (traffic.fake_ranks). Its
    shards of the gradients then always count, and there is a further part: gathered are whole weights and gradients,
    those of the blocks alive at once and of embedding and head, and the buffers that they are sent in.
    """
    n = REHEARSED // config.block_size or 1
    options = (dtype, device_type, compiled, accumulates, explicit, loss_logits, activation_checkpoint, shard)
    if batch_size > 2 * n:  # what is alive grows by the same for each sequence more
        small = memory(config, n, *options)
        large = memory(config, 2 * n, *options)
        return {k: small[k] + (large[k] - small[k]) * (batch_size - n) // n for k in small}
    if not shard:
        return rehearsal(config, batch_size, *options)
    if config.n_layer > LAYERS_REHEARSED + 1:  # ... and each of the peaks for each layer more
        small = rehearsal(replace(config, n_layer=LAYERS_REHEARSED), batch_size, *options)
        large = rehearsal(replace(config, n_layer=LAYERS_REHEARSED + 1), batch_size, *options)
        parts = {k: small[k] + (large[k] - small[k]) * (config.n_layer - LAYERS_REHEARSED) for k in small}
    else:
        parts = rehearsal(config, batch_size, *options)
    peak = max(parts.pop(name) for name in PEAKS)
    return parts | {"gathered": peak + parts["optimizer"] - sum(parts.values())}


PEAKS = ("before the loss", "in the loss", "after it", "after the last block's gradients")


def rehearsal(
    config: GPTConfig,
    batch_size: int,
    dtype: str,
    device_type: str,
    compiled: bool,
    accumulates: bool,
    explicit: bool,
    loss_logits: int,
    activation_checkpoint: str,
    shard: Callable[[GPT], object] | None,
) -> dict[str, int]:
    """As memory, of a model that is not too large; sharded, PEAKS without the optimizer's part instead of gathered."""
    cpu = torch.device("cpu")  # of the fake tensors: without CUDA, torch runs no pass on fake ones of CUDA
    with ExitStack() as stack:
        stack.enter_context(fake_tensors(device_type))
        stack.enter_context(SoftmaxInPlace() if compiled else nullcontext())
        stack.enter_context(kernels.explicit_attention(explicit))
        stack.enter_context(kernels.loss_chunk(loss_logits if device_type == "cuda" else None))
        live = stack.enter_context(Live(device_type))
        model = GPT(config)
        model.checkpoint_activations(activation_checkpoint)
        if shard:
            shard(model)
        weights = sum(local(p).nbytes for p in model.parameters())
        for p in model.parameters():
            p.grad = torch.empty_like(p) if accumulates or shard else None
        before = live.bytes
        kept = 0
        at_loss = 0
        before_loss = 0
        in_blocks = 0
        result_bytes = 0
        idx = torch.zeros(batch_size, config.block_size, dtype=torch.int64)
        targets = torch.zeros(batch_size, config.block_size, dtype=torch.int64)

        def loss_begins(module: Any, args: Any, h: Tensor) -> None:
            nonlocal kept, at_loss, before_loss, result_bytes
            at_loss = live.bytes
            kept = at_loss - before - live.gathered()
            before_loss = live.peak
            live.peak = at_loss
            result_bytes = h.nbytes

        def blocks_end(grad: Tensor) -> None:
            nonlocal in_blocks
            in_blocks = live.peak
            live.peak = live.bytes

        def blocks_begin(module: Any, args: tuple[Tensor, ...]) -> None:
            args[0].register_hook(blocks_end)

        model.transformer.h[0].register_forward_pre_hook(blocks_begin)
        model.transformer.register_forward_hook(loss_begins)
        live.peak = 0
        with hardware.autocast(cpu, dtype, cached=activation_checkpoint == "none"):
            loss = model(idx, targets)[1]
        in_loss = live.peak
        forward = max(before_loss, in_loss) - weights
        live.peak = 0
        # loss.backward() would turn AsOnCuda off, which the forward computations that are done again need.
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        backward = max(in_blocks, live.peak) - weights
    # On a CPU the whole step is one graph, which nothing partitions. Of what is checkpointed the partitioner keeps what
    # the checkpoints say.
    if compiled and device_type != "cpu" and activation_checkpoint == "none":
        kept_before = kept
        kept = idx.nbytes + targets.nbytes + result_bytes + kept_compiled(config, batch_size, dtype, device_type)
        forward += kept - kept_before
        backward += kept - kept_before
        at_loss, before_loss, in_loss, in_blocks = (
            x + kept - kept_before for x in (at_loss, before_loss, in_loss, in_blocks)
        )
    if shard:
        parts = {"weights": weights, "gradients": weights, "optimizer": 2 * weights}
        parts |= {"activations": kept, "logits": in_loss - at_loss}
        return parts | dict(zip(PEAKS, (before_loss, in_loss, in_blocks, live.peak), strict=True))
    if compiled:  # all gradients come at the end of its backward pass; only then are they added to those there
        backward = max(backward, 2 * weights if accumulates else weights)
    # clip_grad_norm_ and the fused AdamW work in place.
    rest = max(forward, backward)
    gradients = weights if accumulates or backward > forward else 0
    activations = min(kept, rest - gradients)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": 2 * weights,
        "activations": activations,
        "logits": rest - gradients - activations,
    }


def kept_compiled(config: GPTConfig, batch_size: int, dtype: str, device_type: str) -> int:
    """Bytes that a compiled transformer keeps for its backward pass, without token ids, parameters and its result."""
    fixed, by_sequence = kept_by_partitioner(replace(config, n_layer=1), dtype, device_type)
    if config.n_layer > 1:  # further layers keep what the second one does: small models tell it, and are soon traced
        fixed_2, by_sequence_2 = kept_by_partitioner(replace(config, n_layer=2), dtype, device_type)
        fixed += (config.n_layer - 1) * (fixed_2 - fixed)
        by_sequence += (config.n_layer - 1) * (by_sequence_2 - by_sequence)
    return fixed + batch_size * by_sequence


@functools.cache
def kept_by_partitioner(config: GPTConfig, dtype: str, device_type: str) -> tuple[int, int]:
    """Of kept_compiled: (bytes with any batch, which are weights in another dtype; bytes for each sequence more).

    Both passes are traced and partitioned as torch.compile does it. What is cheap to compute is computed again in the
    backward pass, and not kept.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[Any] = []

    def take_graph(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm.graph)
        return nop(gm, example_inputs)

    with fake_tensors(device_type, fused=False):
        transformer = GPT(config).transformer
        state = dict(transformer.named_parameters()) | dict(transformer.named_buffers())

        def forward(idx: Tensor, state: dict[str, Tensor]) -> Tensor:
            with hardware.autocast(torch.device("cpu"), dtype):
                return torch.func.functional_call(transformer, state, (idx,))

        traced = aot_function(
            forward,
            fw_compiler=take_graph,
            bw_compiler=nop,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        traced(torch.zeros(TRACED_SEQUENCES, config.block_size, dtype=torch.int64), state)

    nodes = graphs[0].nodes
    inputs = [node for node in nodes if node.op == "placeholder"]  # the token ids first
    of_batch = {inputs[0]}
    for node in nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())  # dropout's masks
        if is_random or of_batch.intersection(node.all_input_nodes):
            of_batch.add(node)
    (output,) = graphs[0].find_nodes(op="output")
    result, *saved = output.args[0]
    storages = {node: node.meta["val"].untyped_storage() for node in (*inputs, result, *saved)}
    counted = {storages[node]._cdata for node in (*inputs, result)}
    sizes = {True: 0, False: 0}  # by whether it depends on the batch
    for node in saved:
        if storages[node]._cdata not in counted:
            counted.add(storages[node]._cdata)
            sizes[node in of_batch] += storages[node].nbytes()
    return sizes[False], sizes[True] // TRACED_SEQUENCES


def largest_batch(
    config: GPTConfig,
    batch_size: int,
    dtype: str,
    device_type: str,
    limit_bytes: float,
    loss_logits: int = kernels.LEAST_LOGITS_ON_GPU,
    activation_checkpoint: str = "none",
) -> int:
    """The largest micro-batch of batch_size, batch_size/2, batch_size/4 ... predicted to fit; 0 where none does."""
    options: dict[str, Any] = {"loss_logits": loss_logits, "activation_checkpoint": activation_checkpoint}
    while True:
        parts = memory(config, batch_size, dtype, device_type, compiled=True, **options)
        if sum(parts.values()) <= limit_bytes:
            return batch_size
        if batch_size % 2:
            return 0
        batch_size //= 2


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations have made and that are still alive."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.device_type = device_type
        self._sizes: dict[int, int] = {}  # of the storages alive, by their address
        self._gathered: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # it comes here again, as operations on this rank's part
        kwargs = kwargs or {}
        if func.namespace == "fsdp":  # gathers weights into storages, which it empties and fills again
            for tensor in tree_leaves(kwargs.get("out", args[1])):
                self._gathered.add(tensor.untyped_storage())
        self._count_gathered()
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.bytes + self._workspace(func, args, out))
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._free, key)

    def gathered(self) -> int:
        """Bytes of whole weights of several ranks."""
        return sum(storage.nbytes() for storage in self._gathered)

    def _count_gathered(self) -> None:
        for storage in self._gathered:
            self.bytes += storage.nbytes() - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = storage.nbytes()

    def _free(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)

    def _workspace(self, func: Any, args: Any, out: Any) -> int:
        """Bytes that a kernel takes for copies of its arguments in the result's dtype, and frees again."""
        if func is torch.ops.aten.log_softmax.int_out:
            # CUDA reads only float16 as it is: aten/src/ATen/native/SoftMax.cpp.
            needed = self.device_type != "cuda" or args[0].dtype != torch.float16
        else:  # TensorIterator casts as it reads on CUDA, before it on a CPU
            needed = self.device_type == "cpu" and func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        tensors = [t for t in args if isinstance(t, Tensor) and t.dim()]
        return sum(t.numel() * out.element_size() for t in tensors if t.dtype != out.dtype) if needed else 0


# Of what the model calls, the functions that CUDA's autocast runs in float32, and a CPU's in what it is given:
# AT_FORALL_FP32 in ATen/autocast_mode.h.
FLOAT32_ON_CUDA = (F.layer_norm, F.rms_norm)


class AsOnCuda(TorchFunctionMode):
    """What differs on CUDA keeps for the backward pass what it keeps there.

    fused: RMS norm is one kernel, as it is unless compiled.
    """

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FLOAT32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        if func is F.rms_norm and self.fused:
            return self._rms_norm(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        # The flash kernel keeps q, k, v, its result and logsumexp (B, H, T). float32 takes another one, which does too.
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]

    def _rms_norm(
        self, x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        return FusedRmsNorm.apply(x, weight)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return x
        return torch.native_dropout(x, p, True)[0]  # keeps a mask of one byte per element


class SoftmaxInPlace(TorchFunctionMode):
    """The softmax between the loss's matmuls takes no memory, as when kernels.softmax_ is compiled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.log_softmax:
            (logits, *_) = args
            return torch.empty((), dtype=torch.float32).expand(logits.shape)
        if func is Tensor.exp_:
            return args[0]
        return func(*args, **(kwargs or {}))


class FusedRmsNorm(torch.autograd.Function):
    """What CUDA's kernel of RMS norm takes and keeps: its input, and a number for each row. Computes nothing."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


@contextmanager
def fake_tensors(device_type: str, fused: bool = True) -> Iterator[None]:
    """New tensors are fake ones on the CPU; for "cuda", functions keep what they keep there. See AsOnCuda."""
    with FakeTensorMode(), AsOnCuda(fused) if device_type == "cuda" else nullcontext():
        yield


# ---- what fits -----------------------------------------------------------------------------------------------


def refuse_beyond_memory(config: GPTConfig, copies: float, device: torch.device, builds: bool = True) -> None:
    """Raises ValueError where the memory cannot hold the model, before any of it is taken.

    copies: of the weights' size, all at once on the device: 1 to compute only, 4 to train with AdamW (weights,
    gradients and two moments), less where ranks share them. builds: whether this rank builds the model, which it does
    in the machine's own memory.
    """
    places = {torch.device("cpu"): float(builds)}
    places[device] = max(copies, places.get(device, 0.0))
    for place, n in places.items():
        limit = hardware.usable_memory_bytes(place)
        needed = int(n * config.weights_bytes())
        if limit is not None and needed > limit:
            to_train = f", {with_unit(needed, BYTES)} with gradients and optimizer" if n != 1 else ""
            where = f"{hardware.device_name(place)} has {hardware.memory_in_words(limit, hardware.memory_bytes(place))}"
            size = config.size_in_words(config.vocab_size)
            raise ValueError(f"{size}{to_train}; {where}: take a smaller model")


def smaller_batch(c: TrainConfig, config: GPTConfig, dtype: str, device: torch.device) -> dict[str, Any]:
    """Settings of the same training with a smaller micro-batch, after that of c did not fit: half, with auto_batch.

    Raises ValueError without auto_batch, naming the settings of the largest micro-batch predicted to fit, and where
    there is no smaller one.
    """
    limit = hardware.usable_memory_bytes(device)
    where = f"{hardware.device_name(device)}, {hardware.memory_in_words(limit, hardware.memory_bytes(device))}"
    if c.batch_size == 1:
        half = max(1, config.block_size // 2)
        raise ValueError(
            f"out of memory: not even batch_size=1 fits into {where}; try --block_size={half} or a smaller model"
        )
    smaller = 1 if c.batch_size % 2 else c.batch_size // 2
    if not c.auto_batch and device.type == "cuda" and limit:
        logits = kernels.logits_for_memory(hardware.memory_bytes(device) or 0)
        usable = USABLE * limit
        smaller = largest_batch(config, smaller, dtype, device.type, usable, logits, c.activation_checkpoint) or 1
    same = same_training(c, smaller)
    if not c.auto_batch:
        flags = " ".join(f"--{k}={v}" for k, v in same.items())
        raise ValueError(
            f"out of memory: batch_size={c.batch_size} does not fit into {where}; try {flags}, which is the same "
            "training, or --auto_batch=True"
        )
    return same


def same_training(c: TrainConfig, batch_size: int) -> dict[str, Any]:
    """Settings of the training of c in micro-batches of batch_size sequences, which must divide those of a step.

    A step and an evaluation keep their tokens: where c counts an evaluation's micro-batches, these count its tokens.
    """
    sequences = c.batch_size * c.gradient_accumulation_steps
    assert sequences % batch_size == 0
    same = {"batch_size": batch_size, "gradient_accumulation_steps": sequences // batch_size}
    if not c.eval_tokens:
        same["eval_tokens"] = eval_windows(c) * c.block_size
    return same


# ---- time ----------------------------------------------------------------------------------------------------


def eval_windows(c: TrainConfig) -> int:
    """Windows of each split that an evaluation reads, at most."""
    if c.eval_tokens:
        return math.ceil(c.eval_tokens / c.block_size)
    return c.eval_iters * c.batch_size


@dataclass(frozen=True)
class Schedule:
    """The time of a run in steps and evaluations."""

    steps: int
    step_s: float
    eval_interval: int  # steps
    eval_batches: int  # per evaluation, of both splits and each rank
    batch_s: float

    def evaluations(self) -> int:
        """At the beginning, after each eval_interval steps and at the end."""
        return 2 + (self.steps - 1) // self.eval_interval

    def eval_s(self) -> float:
        return self.eval_batches * self.batch_s

    def total_s(self) -> float:
        return self.steps * self.step_s + self.evaluations() * self.eval_s()


# What steps_within settles, as the checkpoint of its run has it; a run that goes on plans no second time.
PLANNED = ("max_minutes", "max_iters", "warmup_iters", "lr_decay_iters", "cooldown_iters", "eval_iters", "eval_tokens")


def steps_within(
    seconds: float,
    c: TrainConfig,
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    splits: tuple[Split, ...],
    start_iter: int,
    ranks: Ranks,
) -> dict[str, Any]:
    """Settings with which a run of c that would take longer ends in about `seconds`; {} if it takes no longer.

    Steps and evaluation are timed. max_iters becomes the steps that fit. What is longer than these in the schedule is
    shortened; in a resumed run, only with resume_changed. Where evaluations would take more than EVAL_SHARE of the
    time, they read less. All ranks get the same settings. Leaves the weights unchanged.
    """
    seconds = ranks.max(max(seconds, 0.0))
    step_s = ranks.max(time_step(runner, optimizer, batch, c.gradient_accumulation_steps // ranks.world, ranks))
    batch_s = ranks.max(time_evaluation(runner, batch))
    windows = eval_windows(c)
    batches = sum(math.ceil(split.n_eval_windows(windows) / (c.batch_size * ranks.world)) for split in splits)
    plan = Schedule(c.max_iters - start_iter, step_s, c.eval_interval, batches, batch_s)
    settings: dict[str, Any] = {}
    if plan.total_s() > seconds:
        unbroken = replace(plan, steps=int(seconds / step_s))  # if evaluation took no time
        most = int(EVAL_SHARE * seconds / (unbroken.evaluations() * batch_s))
        per_split = max(LEAST_EVAL_BATCHES, most // len(splits))
        if batches > per_split * len(splits):
            plan = replace(plan, eval_batches=per_split * len(splits))
            if c.eval_tokens:
                settings["eval_tokens"] = per_split * c.batch_size * ranks.world * c.block_size
            else:
                settings["eval_iters"] = per_split * ranks.world
        eval_s = plan.eval_s()
        fit = int((seconds - 2 * eval_s) / (step_s + eval_s / c.eval_interval))
        plan = replace(plan, steps=max(1, min(plan.steps, fit)))
        settings["max_iters"] = start_iter + plan.steps
        if start_iter == 0 or c.resume_changed:  # otherwise the steps done so far would have had other learning rates
            settings["warmup_iters"] = min(c.warmup_iters, math.ceil(plan.steps * WARMUP_SHARE))
            settings["lr_decay_iters"] = min(c.lr_decay_iters, settings["max_iters"])
            settings["cooldown_iters"] = min(c.cooldown_iters, plan.steps)
    tokens = plan.steps * c.batch_size * c.gradient_accumulation_steps * c.block_size
    ranks.say(
        f"max_minutes={c.max_minutes:g}: {plan.steps:,} steps of about {step_s * 1e3:.3g} ms ({tokens:,} tokens) and "
        f"{plan.evaluations()} evaluations of about {clock(plan.eval_s())}: done in about {clock(plan.total_s())}"
    )
    return settings


def time_step(
    runner: Runner, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], micro_steps: int, ranks: Ranks
) -> float:
    """Median seconds of an optimizer step of `micro_steps` micro-batches. Leaves weights and optimizer unchanged."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    passes = []
    updates = []
    for _ in range(TIMED):
        t0 = time.perf_counter()
        runner.backward(*batch, micro_steps)
        hardware.synchronize(runner.device)
        t1 = time.perf_counter()
        norm = torch.linalg.vector_norm(runner.gradient_norms())
        torch.nn.utils.clip_grads_with_norm_(runner.parameters, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        hardware.synchronize(runner.device)
        passes.append(t1 - t0)
        updates.append(time.perf_counter() - t1)
        if ranks.max(sum(passes)) > TIMED_S:  # all ranks go through the same steps
            break
    optimizer.state.clear()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    usual_updates = updates[1:] or updates  # the first one makes the optimizer's state
    return micro_steps * statistics.median(passes) + statistics.median(usual_updates)


def time_evaluation(runner: Runner, batch: tuple[Tensor, Tensor]) -> float:
    """Median seconds of a micro-batch of evaluation."""
    times = []
    with runner.evaluating():
        for _ in range(3):
            t0 = time.perf_counter()
            runner.loss(*batch)
            hardware.synchronize(runner.device)
            times.append(time.perf_counter() - t0)
    return statistics.median(times)
