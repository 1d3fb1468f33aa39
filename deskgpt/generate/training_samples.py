"""--sample_interval: short texts of a model that is being trained, generated the same way each time, for log.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from data.tokenizer import Tokenizer, from_meta
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.variant import Variant
from deskgpt.generate.engine import InferenceEngine
from deskgpt.generate.text import PROMPT, GenerationConfig, Sample
from deskgpt.generate.trained import encode_prompt
from deskgpt.system.errors import message_for_user
from model import GPT


class Sampler:
    """Draws from random streams of its own, and leaves the model in training mode.

    Raises ValueError if the tokenizer does not know the prompt.
    """

    TEXTS = 2
    TOKENS = 200

    def __init__(self, model: GPT, variant: Variant, tokenizer: Tokenizer, every: int) -> None:
        """every: evaluations from one sample to the next."""
        self.model = model
        self.tokenizer = tokenizer
        self.every = every
        device = next(model.parameters()).device
        self.dtype = "float32" if device.type == "cpu" else variant.dtype
        self.is_compiled = variant.compiled
        self.prompts = encode_prompt(PROMPT, tokenizer).to(device).repeat(self.TEXTS, 1)
        # Beyond its context a model has no cache, and each token costs a whole forward pass.
        room = model.config.block_size - self.prompts.size(1)
        self.config = GenerationConfig(max_new_tokens=min(self.TOKENS, max(1, room)))
        self.engine: InferenceEngine | None = None  # from the first sample on

    def texts_at(self, evaluation: int, is_last: bool, break_off: Callable[[], bool]) -> list[str]:
        """Return texts of the model as it is now, if this evaluation has any; [] if break_off becomes true."""
        if not is_last and evaluation % self.every:
            return []
        samples = [Sample(self.tokenizer, PROMPT) for _ in range(self.TEXTS)]
        self.model.eval()
        # Blocks are compiled for batches; set_stance imports torch's compiler, which takes seconds.
        eager = torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext()
        with eager:
            if self.engine is None:
                self.engine = InferenceEngine(self.model, self.prompts, self.dtype, is_trained=True)
            for _ in self.engine.write(self.prompts, samples, self.config):
                if break_off():
                    samples = []
                    break
        self.model.train()
        return [sample.text for sample in samples]


def sampler_for(
    every: int, model: GPT, variant: Variant, dist: DistContext, tokenizer: dict[str, Any]
) -> Sampler | None:
    """Return the Sampler of every `every`-th evaluation; None for 0, and on ranks that only wait meanwhile.

    tokenizer: as in meta.json. If there can be no samples, one line says why: the run does not need them.
    """
    if not every or not dist.is_first:
        return None
    try:
        return Sampler(model, variant, from_meta(tokenizer), every)
    except (ValueError, ModuleNotFoundError) as e:
        dist.print0(f"sample_interval={every}: no samples, since {message_for_user(e, '') or e}")
        return None
