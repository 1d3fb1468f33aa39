"""Stage 5: other ways to compute the best micro-batch, compared with the form that train.py uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.output import markdown_table
from bench.qualifying import work
from bench.qualifying.session import Session
from deskgpt.compute.runner import Runner, Variant
from deskgpt.kernels import replacements
from deskgpt.system import hardware
from deskgpt.system.formatting import in_gib
from model import GPT

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    name: str
    form: Variant
    loss_logits: int | None = None  # of a chunk of the loss; None: as usual
    within: Callable[[], AbstractContextManager[Any]] = nullcontext  # what it is compiled and runs under


def measure(s: Session) -> dict[str, Any]:
    batch_size = work.best_batch(s)
    usual = work.found_form(s)
    model = work.new_model(s)
    batch = work.random_batch(s, batch_size)
    runner = Runner(model, Variant(usual.dtype))
    optimizer = work.adamw(runner)
    runner.forward_backward(*batch)
    work.update(runner, optimizer)  # from now on AdamW's state takes its memory, as in training

    rows: list[Row] = []
    all_variants = variants(usual, batch[0].numel() * s.sizes.model.vocab_size)
    for variant in s.while_there_is_time(all_variants):
        row = row_of(s, model, batch, variant)
        s.print0(f"{variant.name}: {row['problem'] or format(row['ms'], '.2f') + ' ms'}")
        rows.append(row)
    hardware.release_memory(s.device)
    unfinished = [variant.name for variant in all_variants[len(rows) :]]
    return {"batch_size": batch_size, "rows": rows, "unfinished": unfinished}


def variants(usual: Variant, logits: int) -> list[Variant]:
    """The usual form, and what is compared with it, the more telling first. logits: of a whole micro-batch."""
    other = replace(usual, compiled=not usual.compiled)
    whole = replace(usual, reference_only=("GPT.loss",))
    chunks = [Arm(f"loss in chunks of 2^{n} logits", usual, 1 << n) for n in chunk_exponents(logits)]
    attentions = [
        Arm(f"{name} attention", usual, within=functools.partial(sdpa_kernel, backend))
        for name, backend in BACKENDS.items()
    ]
    return [Arm(str(usual), usual), Arm(str(other), other), Arm("loss whole", whole), *chunks, *attentions]


def chunk_exponents(logits: int) -> list[int]:
    """25, 27, 29 ... below the exponent of all logits: the largest first, since those are likelier on a card."""
    return sorted(range(25, max(26, (logits - 1).bit_length()), 2), reverse=True)


def row_of(s: Session, model: GPT, batch: tuple[torch.Tensor, torch.Tensor], variant: Variant) -> Row:
    """Time, memory and loss of a variant. Where it fails, the row says why."""
    row: Row = {"name": variant.name, "ms": None, "tokens_per_s": None, "peak_bytes": None, "loss": None}
    # torch.compile and its cache of graphs do not look at the kernel chosen for attention: nothing compiled is kept.
    import torch._functorch.config as functorch

    hardware.release_memory(s.device)
    try:
        with variant.within(), functorch.patch(enable_autograd_cache=False):
            runner = Runner(model, variant.form)
            if variant.loss_logits:
                chunked = functools.partial(replacements.chunked_loss, loss_logits=variant.loss_logits)
                runner.forms["GPT.loss"] = chunked

            def micro_batch() -> torch.Tensor:
                return runner.forward_backward(*batch, work.MICRO_STEPS)

            row["loss"] = micro_batch().item() * work.MICRO_STEPS
            micro_batch()
            work.forget_peak(s.device)
            row["ms"] = 1e3 * work.seconds_of(micro_batch, s.device)
        row["tokens_per_s"] = batch[0].numel() / row["ms"] * 1e3
        row["peak_bytes"] = work.peak_bytes(s.device)[0]
        return row | {"problem": None}
    except Exception as e:
        return row | {"problem": work.problem_of(e)}
    finally:
        for p in model.parameters():
            p.grad = None


def describe(result: dict[str, Any]) -> str:
    head = ["", "ms", "time / usual", "tokens/s", "peak GiB", "loss"]
    usual_ms = result["rows"][0]["ms"]
    body = []
    for r in result["rows"]:
        if r["problem"]:
            body.append([r["name"], r["problem"], "", "", "", ""])
            continue
        ratio = f"{r['ms'] / usual_ms:.3f}" if usual_ms else "n/a"
        cells = [r["name"], f"{r['ms']:.2f}", ratio, f"{r['tokens_per_s']:,.0f}"]
        body.append([*cells, in_gib(r["peak_bytes"]), f"{r['loss']:.4f}"])
    return (
        f"Forward and backward pass of {result['batch_size']} sequences; the first row is the usual form, and the peak "
        f"is with gradients and AdamW's state.\n\n{markdown_table(head, body, left_columns=1)}"
    )
