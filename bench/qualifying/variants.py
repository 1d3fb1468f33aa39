"""Stage 5: other ways to compute the best micro-batch, each in turns with the form that train.py uses."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.eight_bit import EightBits, use_eight_bits
from bench.qualifying.session import Session
from deskgpt.compute import compiling
from deskgpt.compute.runner import Form, Runner
from deskgpt.faster import kernels
from deskgpt.machine import hardware
from model import GPT

MARGIN = 1.3  # of the longest variant so far: with less time left, no usual one begins
AUTOTUNE = "max-autotune-no-cudagraphs"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

Row = dict[str, Any]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Variant:
    name: str
    form: Form
    within: Context = nullcontext  # what it is compiled and runs under
    eight_bits: EightBits | None = None
    loss_logits: int | None = None  # of a chunk of the loss; 0: all at once, None: as usual
    cost: float = 1.0  # how much longer than usual it may take to compile


def measure(s: Session) -> dict[str, Any]:
    batch_size = work.best_batch(s)
    usual = work.found_form(s)
    model = work.new_model(s)
    batch = work.random_batch(s, batch_size)
    left_out: list[str] = []
    with compiled_apart():
        base = Contestant(s, model, batch, Variant(str(usual), usual))
        base.warm_up()
        optimizer = work.adamw(base.runner)
        work.update(base.runner, optimizer)  # from now on AdamW's state takes its memory, as in training
        rows = []
        longest_s = 0.0
        for variant in variants(usual, batch_size * s.sizes.model.block_size * s.sizes.model.vocab_size):
            if s.seconds_left() < MARGIN * variant.cost * longest_s:
                left_out.append(variant.name)
                continue
            t0 = time.perf_counter()
            row = against(s, base, Contestant(s, model, batch, variant))
            if row["problem"] is None:
                longest_s = max(longest_s, (time.perf_counter() - t0) / variant.cost)
            rows.append(row)
            said = row["problem"] or f"{row['ms']:.2f} ms, {row['ratio']:.3f} of the usual form's"
            s.say(f"{variant.name}: {said}")
        rows.insert(0, base.row(base.all_ms or base.times(), [1.0]))
    for p in model.parameters():
        p.grad = None
    hardware.release_memory(s.device)
    measured = [r for r in rows if r["ratio"] is not None]
    best = min(measured, key=lambda r: r["ratio"])
    return {"batch_size": batch_size, "rows": rows, "best": best["name"], "left_out": left_out}


# ---- which variants ------------------------------------------------------------------------------------------


def variants(usual: Form, logits: int) -> list[Variant]:
    """What is compared with the usual form, the more telling first. logits: of a whole micro-batch."""
    other = replace(usual, compiled=not usual.compiled)
    compiled = replace(usual, compiled=True)
    autotuned = Variant(AUTOTUNE, compiled, autotune, cost=3.0)
    chunks = [Variant(f"loss in chunks of 2^{n} logits", usual, loss_logits=1 << n) for n in chunk_exponents(logits)]
    attentions = [Variant(f"{name} attention", usual, attention_of(backend)) for name, backend in BACKENDS.items()]
    return [
        Variant(str(other), other),
        Variant("loss whole", usual, loss_logits=0),
        *chunks,
        *attentions[:2],
        Variant("FP8 in the blocks", usual, eight_bits="fp8"),
        autotuned,
        Variant("inductor's auto-chunker", compiled, auto_chunked, loss_logits=0),
        Variant("INT8 in the blocks", usual, eight_bits="int8"),
        *attentions[2:],
    ]


def chunk_exponents(logits: int) -> list[int]:
    """25, 27, 29 ... below the exponent of all logits: the largest first, since those are likelier on a card."""
    return sorted(range(25, max(26, (logits - 1).bit_length()), 2), reverse=True)


def attention_of(backend: SDPBackend) -> Context:
    return lambda: sdpa_kernel(backend)


def autotune() -> AbstractContextManager[Any]:
    import torch._inductor.config as inductor

    return inductor.patch(torch._inductor.list_mode_options(AUTOTUNE))


def auto_chunked() -> AbstractContextManager[Any]:
    """Inductor cuts the loss by itself. Raises ValueError where this torch cannot."""
    import torch._inductor.config as inductor

    if not hasattr(inductor, "auto_chunker"):
        raise ValueError(f"torch {torch.__version__} has no auto-chunker")
    return inductor.patch({"auto_chunker.enable": True})


def compiled_apart() -> AbstractContextManager[Any]:
    """Lets variants of one model be compiled side by side: many of them, each with its own fixed shapes.

    AOTAutograd's cache goes by the graph before the kernel of attention is chosen: it would confuse those variants.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    stack = ExitStack()
    stack.enter_context(dynamo.patch(recompile_limit=64, automatic_dynamic_shapes=False))
    stack.enter_context(functorch.patch(enable_autograd_cache=False))
    return stack


# ---- timing --------------------------------------------------------------------------------------------------


class Contestant:
    """A variant of a model, and its passes over a micro-batch."""

    def __init__(self, s: Session, model: GPT, batch: tuple[torch.Tensor, torch.Tensor], variant: Variant) -> None:
        self.device = s.device
        self.tokens = batch[0].numel()
        self.variant = variant
        self.batch = batch
        self.model = work.separate(model)
        if variant.eight_bits:
            use_eight_bits(self.model, variant.eight_bits)
        self.loss: float | None = None
        self.peak: int | None = None
        self.all_ms: list[float] = []

    def warm_up(self) -> None:
        """Compiles, and takes two passes. Raises what torch raises where that fails."""
        if self.variant.form.compiled and self.device.type == "cpu":
            compiling.set_up_inductor()
        with self.variant.within():
            self.runner = Runner(self.model, self.variant.form)
            logits = self.variant.loss_logits
            if logits == 0:
                del self.runner.forms["GPT.loss"]
            elif logits is not None:
                self.runner.forms["GPT.loss"] = functools.partial(kernels.chunked_loss, loss_logits=logits)
            self.runner.drop_gradients()
            self.loss = self.once().item() * work.MICRO_STEPS
            self.once()

    def once(self) -> torch.Tensor:
        return self.runner.forward_backward(*self.batch, work.MICRO_STEPS)

    def time(self) -> float:
        """ms of a pass, from now on among all_ms."""
        work.forget_peak(self.device)
        with self.variant.within():
            ms = work.time_passes(self.device, self.once).ms
        self.peak = work.peak_bytes(self.device)[0]
        self.all_ms.append(ms)
        return ms

    def times(self) -> list[float]:
        return [self.time() for _ in range(work.LEAST_ROUNDS)]

    def row(self, times_ms: list[float], ratios: list[float]) -> Row:
        """ratios: of the time to the usual form's, by round."""
        ms = statistics.median(times_ms)
        return {
            "name": self.variant.name,
            "ms": ms,
            "ratio": statistics.median(ratios),
            "ratio_least": min(ratios),
            "ratio_most": max(ratios),
            "tokens_per_s": self.tokens / ms * 1e3,
            "peak_bytes": self.peak,
            "loss": self.loss,
            "problem": None,
        }


def against(s: Session, base: Contestant, other: Contestant) -> Row:
    """A variant's row, timed in turns with the usual form. Where it fails, the row says why."""
    names = ("ms", "ratio", "ratio_least", "ratio_most", "tokens_per_s", "peak_bytes", "loss")
    failed: Row = {"name": other.variant.name} | dict.fromkeys(names)
    try:
        other.warm_up()
        times: list[float] = []
        ratios: list[float] = []
        rounds = work.ROUNDS
        while len(times) < rounds:
            base_ms = base.time()
            times.append(other.time())
            ratios.append(times[-1] / base_ms)
            rounds = work.rounds_for(times[0])
        return other.row(times, ratios)
    except Exception as e:
        return failed | {"problem": work.problem_of(e)}
    finally:
        gc.collect()
        if s.device.type == "cuda":
            torch.cuda.empty_cache()  # release_memory would drop the usual form's graphs too


# ---- in words ------------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    head = ["", "ms", "time / usual (least, most)", "tokens/s", "peak GiB", "loss"]
    body = []
    for r in result["rows"]:
        if r["problem"]:
            body.append([r["name"], r["problem"], "", "", "", ""])
            continue
        ratio = f"{r['ratio']:.3f} ({r['ratio_least']:.3f}, {r['ratio_most']:.3f})"
        cells = [r["name"], f"{r['ms']:.2f}", ratio, f"{r['tokens_per_s']:,.0f}"]
        body.append([*cells, work.gib(r["peak_bytes"]), f"{r['loss']:.4f}"])
    lines = [
        f"Forward and backward pass of {result['batch_size']} sequences, each way in turns with the usual form, the "
        "first row; the peak is with gradients and AdamW's state.",
        "",
        markdown_table(head, body, left_columns=1),
        "",
        f"The fastest: {result['best']}.",
    ]
    if result["left_out"]:
        lines += ["", f"Not tried, for want of time: {', '.join(result['left_out'])}."]
    return "\n".join(lines)
