"""A model as it computes in training: in which dtype, with which kernels, compiled or not, on one device or several.

What is compiled are the blocks and the loss, one by one: all blocks share one graph, so compiling takes as long for one
layer as for twelve, and the hooks that exchange gradients (DDP) or gather weights (FSDP) run between them.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from deskgpt.compute import sharding
from deskgpt.compute.distributed import DistContext
from deskgpt.kernels import replacements, verify
from deskgpt.kernels.overridable import Replacements, replacing
from deskgpt.kernels.verify import Mismatch, full_float32
from deskgpt.system import hardware
from deskgpt.system.errors import is_out_of_memory
from model import GPT

Batch = tuple[Tensor, Tensor]  # inputs and targets (B, T) int64

REFERENCES = ("cpu", "cuda")  # devices whose float32 is the reference; for others, such as MPS, a CPU's is

# A whole pass is compared on about this number of tokens, in at least two sequences, which a kernel could mix up.
COMPARED_TOKENS = 1024
COMPARED_SEQUENCES = 2
WALKED_TOKENS = 2048  # on which the functions of model.py are compared one by one, in whole sequences

SHARE_OF_TIME = 0.01  # of a run goes to comparing again, at most


@dataclass(frozen=True)
class Variant:
    """How a micro-batch is computed. The default, eager float32, is what the others are compared with."""

    dtype: str = "float32"  # of the matmuls
    compiled: bool = False
    attention: str = "flash"  # one of replacements.KINDS
    checkpoint: str = "none"  # activations that are computed again: none, full or selective
    refused: tuple[str, ...] = ()  # names of replacements that are wrong here

    def replacements(self, device_type: str = "cpu") -> dict[str, Callable[..., Any]]:
        """What replaces functions of model.py."""
        return replacements.replacements_for(device_type, self.attention, self.compiled, self.refused)

    def attention_in_use(self, device_type: str) -> str:
        """What computes attention: flash, explicit, kernels, or reference for model.py itself."""
        in_use = self.replacements(device_type).get("attention")
        names = {"flash_attention": "flash", "explicit_attention": "explicit", "kernel_attention": "kernels"}
        return names[in_use.__name__] if in_use else "reference"

    def __str__(self) -> str:
        words = [self.dtype]
        if self.attention == "kernels":
            kinds = {kind for kind in ("attention", "activation", "loss") if f"kernel_{kind}" not in self.refused}
            words.append("C++ kernels" if len(kinds) == 3 else f"C++ {' and '.join(sorted(kinds)) or 'nothing'}")
        elif self.attention != "flash":
            words.append(f"{self.attention} attention")
        left_out = [name.replace("_", " ") for name in self.refused if not name.startswith("kernel_")]
        words += [f"without {name}" for name in left_out]
        return ", ".join([*words, "compiled" if self.compiled else "not compiled"])


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean, in nats per token
    standard_error: float | None  # what other text of this length would change; None if too few batches tell
    windows: int = 0  # that were read, over all ranks
    batch_losses: tuple[float, ...] = ()  # the mean loss of each of this rank's batches, to compare runs in pairs


class Runner:
    """A model in one variant: `forward` and `backward` take a micro-batch, `evaluate` the loss over many.

    On a CPU, evaluation runs uncompiled, which saves compiling it too.
    """

    def __init__(self, model: GPT, variant: Variant, sync_each_batch: bool = True) -> None:
        self.model = model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names = list(trained)
        self.parameters = list(trained.values())
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=variant.dtype == "float16")
        self.ddp: DDP | None = None
        self.last: Batch | None = None  # of the latest forward pass
        self._tokens = 0  # trained on since take_tokens was called
        self.sharded = sharding.is_sharded(model)
        self.sync_each_batch = sync_each_batch  # of sharded ones; DDP always sends gradients once per step
        self.flops_per_token = model.estimate_flops()  # Tuner.choose counts them
        self.compared_s = 0.0  # what comparing again took the last time
        self.compared_at = time.perf_counter()
        self.right_until = 0  # the step of the last comparison that found no difference
        self.doubts: list[str] = []  # what later comparisons have found
        self.use(variant)

    def use(self, variant: Variant) -> None:
        """Computes in this variant from now on."""
        self.variant = variant
        # With checkpoints, no weights in 16 bits need to stay: the backward pass casts them again.
        self.amp = hardware.autocast(self.device, variant.dtype, cached=variant.checkpoint == "none")
        config = self.model.config
        self.replacements = with_recompute(variant.replacements(self.device.type), variant.checkpoint, config.dropout)
        self.evaluation: Replacements = self.replacements
        if variant.compiled:
            from deskgpt.compute import compiling

            compiling.prepare(self.device)
            for name in ("Block.forward", "GPT.loss"):
                self.replacements[name] = compile_one(self.replacements.get(name))
            self.replacements = with_residual(self.replacements, variant, self.device.type)
            on_cpu = self.device.type == "cpu"
            eager = replace(variant, compiled=False)
            self.evaluation = eager.replacements("cpu") if on_cpu else self.replacements

    def distribute(self, x: Tensor, y: Tensor) -> None:
        """From now on gradients are averaged over the ranks, once per step. A sharded model does so by itself.

        (x, y): any micro-batch.
        """
        if self.sharded:
            return
        # DDP broadcasts buffers before each forward pass. The rotary table never changes.
        DDP._set_params_and_buffers_to_ignore_for_model(self.model, ["transformer.rotary"])
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        # Which parameters get a gradient may depend on the text, as with experts. Without find_unused_parameters, a run
        # would end at the first step in which one of them has none.
        self.ddp = DDP(self.model, device_ids=device_ids, find_unused_parameters=True)
        # A first pass may arrange what DDP sends in another order: resumed runs have it behind them, too.
        with without_cpp_warnings():
            self.forward_backward(x, y)
        self.model.zero_grad()
        self.last = None

    def leave_ranks(self) -> None:
        """Ends the averaging, before DistContext.close ends the process group.

        DDP must not be the last to hold the group: freed under Python's lock, it waits for a thread of gloo that may
        want that lock, and the process hangs (pytorch issue 56297).
        """
        self.ddp = None

    # ---- a micro-batch -----------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, last: bool = True) -> Iterator[None]:
        """Within the block, a micro-batch goes forward and backward; ranks exchange gradients after the last of a step.

        With sync_each_batch, ranks that share weights do so after each.
        """
        if self.sharded:
            self.model.set_requires_gradient_sync(last or self.sync_each_batch)  # type: ignore[operator]
        exchange = self.ddp.no_sync() if self.ddp and not last else nullcontext()
        with replacing(self.replacements), exchange:
            yield

    def forward(
        self, x: Tensor, y: Tensor, micro_steps: int = 1, weight: float | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the loss of a step, for `backward`; and its losses by name, detached.

        Each is divided by micro_steps or, for data with a loss mask, multiplied by weight (data/loader.py).
        """
        self.last = (x, y)
        with self.amp:
            parts = parts_of((self.ddp or self.model)(x, y))
            for name, part in parts.items():
                parts[name] = part / micro_steps if weight is None else part * weight
        return total_of(parts), {name: part.detach() for name, part in parts.items()}

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a loss of `forward` to those there."""
        self.scaler.scale(loss).backward()
        if self.last is not None:
            self._tokens += self.last[0].numel()

    def take_tokens(self) -> int:
        """How many tokens this rank has trained on since the last call: a changed loop may leave some out."""
        tokens, self._tokens = self._tokens, 0
        return tokens

    def forward_backward(self, x: Tensor, y: Tensor, micro_steps: int = 1) -> Tensor:
        """Both passes of a micro-batch, to try them: buffers stay. Returns its loss, divided by micro_steps."""
        with verify.undisturbed(self.model), self.micro_batch():
            loss, parts = self.forward(x, y, micro_steps)
            self.backward(loss)
        self.take_tokens()  # which are not of the run
        return parts["loss"]

    # ---- gradients ---------------------------------------------------------------------------------------

    def gradients(self) -> list[Tensor]:
        """The gradients that exist; of a sharded one this rank's rows."""
        return [sharding.local(p.grad) for p in self.parameters if p.grad is not None]

    def gradient_norms(self) -> Tensor:
        """The norms (parameters,) of all gradients, 0 where there is none; sharded ones count as a whole."""
        with_gradient = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        norm_of = dict(zip(with_gradient, torch._foreach_norm(self.gradients()), strict=True))
        nothing = torch.zeros((), device=self.device)
        norms = torch.stack([norm_of.get(i, nothing) for i in range(len(self.parameters))])
        if self.sharded:
            squares = norms.double().square()
            sharded: Any = self.parameters[0]
            torch.distributed.all_reduce(squares, group=sharded.device_mesh.get_group("dp_shard"))
            norms = squares.sqrt().float()
        return norms

    # ---- evaluation --------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block, `loss` may be called: there is no dropout, and gathered weights are kept."""
        self.model.eval()
        try:
            with replacing(self.evaluation):
                yield
        finally:
            self.model.train()
        if self.sharded:
            for module in (self.model, *self.model.transformer.h):
                module.reshard()  # frees the weights that the evaluation has gathered

    @torch.no_grad()
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a micro-batch, without gradients and without what training adds to it; see evaluating."""
        with self.amp:
            return self.model(x, y)[1]

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor, float]], dist: DistContext) -> Evaluation:
        """The mean loss over the batches of all ranks: inputs, targets and the number of rows that count.

        With a loss mask that is a fraction: learned targets / block_size. The standard error comes from the spread of
        the batches' means, of which there must be eight.
        """
        losses = []
        counts = []
        with self.evaluating():
            for x, y, rows in batches:
                loss = self.loss(x, y)  # of padding too: other ranks may need the weights of this one
                if rows:
                    losses.append(loss * rows)
                    counts.append(rows)

        sums = torch.stack(losses).cpu().double() if losses else torch.zeros(0, dtype=torch.float64)
        rows_of = torch.tensor(counts, dtype=torch.float64)
        own_batches = torch.tensor(len(counts), dtype=torch.float64)
        totals = dist.sum(torch.stack((sums.sum(), rows_of.sum(), own_batches)))
        loss_sum, n_rows, n_batches = totals.tolist()
        mean = loss_sum / n_rows if n_rows else math.nan
        squares = dist.sum((sums - mean * rows_of).square().sum()).item()
        error = math.sqrt(squares * n_batches / (n_batches - 1)) / n_rows if n_batches >= 8 else None
        batch_losses = tuple(round(loss, 6) for loss in (sums / rows_of).tolist())
        return Evaluation(mean, error, round(n_rows), batch_losses)

    # ---- comparing with model.py -------------------------------------------------------------------------

    def check_pass(self, x: Tensor, y: Tensor, micro_steps: int = 1) -> None:
        """Compares loss and gradients on the first sequences of a micro-batch with those of eager float32.

        The variant gets them repeated, in the shape that it runs in. Leaves no gradients. Raises Mismatch where they
        differ, and ValueError where those of float32 are not finite.
        """
        n = compared_rows(*x.shape)
        few = (x[:n], y[:n])
        repeated = (x[:n].repeat(len(x) // n, 1), y[:n].repeat(len(y) // n, 1))
        with verify.nothing_is_zero(self.model):
            loss, found, _ = self.measured(repeated, micro_steps)
            model = self.model
            if self.device.type not in REFERENCES:
                model = copy.deepcopy(model).cpu()
            reference = Runner(model, Variant(checkpoint=self.variant.checkpoint, refused=self.variant.refused))
            if model.lm_head.weight.device != self.device:
                reference.replacements = {}  # model.py itself: the replacements were verified on the other device only
            with full_float32():
                expected_loss, expected, is_random = reference.measured(few, 1, self.variant.compiled)
        if self.sharded:
            losses = torch.tensor([loss, expected_loss], dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(losses)
            loss, expected_loss = (losses / torch.distributed.get_world_size()).tolist()
        if not math.isfinite(expected_loss) or not all(verify.whole(g).isfinite().all() for g in expected):
            raise ValueError(
                f"eager float32 gives a loss of {expected_loss} or gradients that are not finite: the weights or the "
                "data are at fault; take another checkpoint"
            )
        found = [a.to(b.device) for a, b in zip(found, expected, strict=True)]
        precision = verify.precision_of(self.variant.dtype, self.device)
        passes = (str(self.variant), precision, self.names, (loss, found), (expected_loss, expected))
        try:
            verify.compare_passes(*passes, is_random)
        except Mismatch:
            if is_random or self.sharded or self.variant.dtype == "float32":
                raise
            # Where tokens choose experts, rounding alone sends some elsewhere: as much may differ here.
            with (
                verify.nothing_is_zero(self.model),
                verify.disturbed_weights(reference.model, self.variant.dtype),
                full_float32(),
            ):
                _, disturbed, _ = reference.measured(few, 1)
            errors = verify.gradient_errors(self.names, disturbed, expected, precision)
            verify.compare_passes(*passes, rounding=max(errors.values()))

    def check_recompute(self, x: Tensor, y: Tensor) -> None:
        """Raises ValueError where activations that are computed again give other gradients, as a global may do."""
        if self.variant.checkpoint == "none":
            return
        few = (x[:1, :128], y[:1, :128])
        eager = replace(self.variant, compiled=False)
        found = Runner(self.model, eager).measured(few, 1, real_dropout=True)[:2]
        expected = Runner(self.model, replace(eager, checkpoint="none")).measured(few, 1, real_dropout=True)[:2]
        what = f"activation_checkpoint={self.variant.checkpoint}"
        try:
            verify.compare_passes(what, "float32", self.names, found, expected)
        except Mismatch as e:
            raise ValueError(f"{e}: blocks compute something else the second time; leave it out") from None

    def measured(self, batch: Batch, micro_steps: int, real_dropout: bool = False) -> tuple[float, list[Tensor], bool]:
        """Loss and gradients of a pass, which leaves none, and whether it has drawn random numbers.

        Dropout becomes a factor, unless real_dropout, or the pass is compiled and would have to be compiled anew. Each
        rank computes alone.
        """
        ddp, self.ddp = self.ddp, None
        as_factor = not self.variant.compiled and not real_dropout
        in_use = self.replacements
        if as_factor and self.model.config.dropout:  # the second pass of a checkpointed block would not see the factor
            self.replacements = {name: r for name, r in in_use.items() if name != "Block.forward"}
        # float16's usual scale may overflow at first, and without one gradients of a part of the step are lost.
        scale = 1024.0 * micro_steps if self.scaler.is_enabled() else 1.0
        try:
            with (
                verify.undisturbed(self.model),
                self.micro_batch(),
                verify.DropoutAsFactor() if as_factor else nullcontext(),
            ):
                before = verify.random_state(self.device)
                total, parts = self.forward(*batch, micro_steps)
                is_random = verify.random_state(self.device) != before
                (total * scale).backward()
            gradients = []
            for p in self.parameters:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = None
                gradients.append(gradient.mul_(micro_steps / scale))  # in place: a copy of all would not fit everywhere
            return parts["loss"].item() * micro_steps, gradients, is_random
        finally:
            self.replacements = in_use
            self.ddp = ddp
            self.model.zero_grad()

    def verify_again(self, step: int, dist: DistContext, must: bool = False) -> list[str]:
        """Compares with model.py once more, on the micro-batch that was trained last; returns lines to warn with.

        Where something differs now, the run computes it as model.py does from here on. All ranks must call this. It
        skips its turn where it would cost more than SHARE_OF_TIME of the time since the last one, unless it must.
        """
        if self.last is None:  # it was compared just now
            return []
        t0 = time.perf_counter()
        is_due = self.compared_s <= SHARE_OF_TIME * (t0 - self.compared_at)
        is_due = is_due or (must and self.compared_s < math.inf)
        if not dist.all(is_due and verify.weights_are_finite(self.model)):
            return []
        x, y = self.last
        n = step % len(x)  # other sequences come first than before
        try:
            lines = self._compare_again(x.roll(n, 0), y.roll(n, 0), dist)
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e) or dist.world > 1:
                raise
            dist.print0(f"memory is too short to check {self.variant} against model.py again: not done from here on")
            self.compared_s = math.inf
            return []
        self.compared_at = time.perf_counter()
        self.compared_s = self.compared_at - t0
        if not lines:
            self.right_until = step
            return []
        line = f"{'; '.join(lines)}: going on in {self.variant}. Steps after {self.right_until} may be wrong"
        self.doubts.append(line)
        return [line]

    def _compare_again(self, x: Tensor, y: Tensor, dist: DistContext) -> list[str]:
        """Compares on this micro-batch; returns what differs, which model.py computes from here on."""
        hardware.free_unused(self.device)  # the reference takes other sizes than training
        in_use = {name: [r] for name, r in self.variant.replacements(self.device.type).items()}
        problems = find_wrong_replacements(self.model, in_use, x, y, "float32", dist)
        lines = [problems[name] for name in sorted(problems)]
        if problems:
            self.use(replace(self.variant, refused=tuple(sorted({*self.variant.refused, *problems}))))
        while not is_reference(self.variant, self.device):
            problem = ""
            try:
                self.check_pass(x, y)
            except Mismatch as e:
                problem = str(e)
            if dist.all(not problem):
                break
            lines.append(problem or f"{self.variant} disagrees with model.py on another rank")
            if self.sharded or (self.variant.dtype == "float32" and not self.variant.compiled):
                raise ValueError(f"{lines[-1]}; resume from the last checkpoint with --dtype=float32 --compile=False")
            dtype = self.variant.dtype if self.variant.compiled else "float32"
            self.use(replace(self.variant, compiled=False, dtype=dtype))
        return lines


def find_wrong_replacements(
    model: GPT, candidates: verify.Candidates, idx: Tensor, targets: Tensor, dtype: str, dist: DistContext
) -> dict[str, str]:
    """Which candidates differ from model.py, on any rank, and how.

    Where memory runs out it compares fewer sequences, then shorter ones, which it prints.
    """
    B, T = idx.shape
    B = max(1, min(B, WALKED_TOKENS // T))
    while True:
        try:
            with verify.nothing_is_zero(model):
                found = verify.wrong_replacements(model, candidates, idx[:B, :T], targets[:B, :T], dtype)
            if sharding.is_sharded(model):
                model.reshard()  # type: ignore[operator]
            break
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e) or B * T < 2 or sharding.is_sharded(model):
                raise
            if B > 1:
                B //= 2
            else:
                T //= 2
    if idx.size(1) > T:
        dist.print0(f"memory is too short: kernels were compared with model.py on {T} tokens of a sequence only")
    problems: dict[str, str] = {}
    for of_rank in dist.gather(found):
        problems |= of_rank
    return problems


@contextmanager
def without_cpp_warnings() -> Iterator[None]:
    """Within the block, what is written to stderr is lost: DDP warns there that all parameters have gradients."""
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def is_reference(variant: Variant, device: torch.device) -> bool:
    """Whether a whole pass has nothing to be compared with. On CUDA float32 is TF32, which has."""
    return variant.dtype == "float32" and not variant.compiled and device.type == "cpu"


def compared_rows(B: int, T: int) -> int:
    """How many of B sequences of T tokens are compared; a divisor of B, so that all count alike where they repeat."""
    wanted = max(COMPARED_SEQUENCES, math.ceil(COMPARED_TOKENS / T))
    divisors = [n for n in range(1, B + 1) if B % n == 0]
    return min(divisors, key=lambda n: (abs(n - wanted), -n))


def with_recompute(
    in_use: dict[str, Callable[..., Any]], checkpoint: str, dropout: float
) -> dict[str, Callable[..., Any]]:
    """What replaces functions of model.py, with blocks that compute activations again."""
    if checkpoint == "none":
        return in_use
    from deskgpt.kernels.recompute import recomputed_block

    return in_use | {"Block.forward": recomputed_block(checkpoint, dropout)}


def compile_one(replacement: Callable[..., Any] | None) -> Callable[..., Any]:
    """The replacement, or else the function of model.py, compiled to one graph, which all blocks share."""
    graphs: dict[Any, Callable[..., Any]] = {}

    def forward(reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if reference not in graphs:
            inside = reference if replacement is None else functools.partial(replacement, reference)
            graphs[reference] = torch.compile(inside)
        return graphs[reference](*args, **kwargs)

    return forward


def with_residual(
    in_use: dict[str, Callable[..., Any]], variant: Variant, device_type: str
) -> dict[str, Callable[..., Any]]:
    """What replaces functions of model.py, with a residual stream in bfloat16 in the graphs of a card.

    In float32 its sums and norms, and their gradients, move up to twice the bytes (docs/figures.md).
    """
    if device_type != "cuda" or not variant.compiled or variant.dtype != "bfloat16":
        return in_use
    return in_use | {"Block.forward": bfloat16_residual(in_use.get("Block.forward"))}


def bfloat16_residual(block: Callable[..., Any] | None) -> Callable[..., Any]:
    """A replacement of blocks, or of what replaces them, that gets the residual stream in bfloat16.

    The cast is outside of a compiled block, so that all blocks share one graph.
    """

    def forward(reference: Callable[..., Any], module: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        x = x.to(torch.bfloat16) if isinstance(x, Tensor) else x
        inside = reference if block is None else functools.partial(block, reference)
        return inside(module, x, *args, **kwargs)

    return forward


def parts_of(returned: tuple[Any, ...]) -> dict[str, Tensor]:
    """The losses by name that GPT.forward has returned. Raises ValueError where a further one cannot be added."""
    _, loss, *more = returned
    further = more[0] if more else {}
    for name, part in further.items():
        if name == "loss" or not isinstance(part, Tensor) or part.numel() != 1:
            raise ValueError(
                f"GPT.forward returns a further loss {name!r}: it must be a tensor of one number, under another name "
                "than loss"
            )
    return {"loss": loss} | further


def total_of(parts: dict[str, Tensor]) -> Tensor:
    loss, *further = parts.values()
    return sum(further, loss)


def count_flops(model: GPT, x: Tensor, y: Tensor) -> int:
    """FLOPs per token of a training pass over (x, y) as model.py has it, by torch's counter.

    Within 1% it is GPT.estimate_flops, nanoGPT's number, which is also returned where ranks share the weights.
    """
    estimate = model.estimate_flops()
    if sharding.is_sharded(model):
        return estimate
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # of Triton, which Windows lacks
    from torch.utils.flop_counter import FlopCounterMode

    with verify.undisturbed(model), replacing({}), FlopCounterMode(display=False) as counter:
        total_of(parts_of(model(x[:1], y[:1]))).backward()
    model.zero_grad()
    counted = round(counter.get_total_flops() / x.size(1))
    return estimate if abs(counted - estimate) <= 0.01 * estimate else counted
