"""--sample_interval: short texts of a model that is being trained, written the same way each time, for log.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from data.tokenizer import Tokenizer, from_meta
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.generation import GenerationConfig, Sample, write
from deskgpt.compute.inference import InferenceEngine
from deskgpt.compute.runner import Runner
from deskgpt.sampling.trained import encode_prompt
from deskgpt.system.errors import message_for_user


class Sampler:
    """Draws from random streams of its own, and leaves the model in training mode.

    Raises ValueError if the tokenizer does not know the prompt.
    """

    TEXTS = 2
    TOKENS = 200

    def __init__(self, runner: Runner, tokenizer: Tokenizer, every: int, print0: Callable[[str], None]) -> None:
        """every: evaluations from one sample to the next."""
        self.runner = runner
        self.tokenizer = tokenizer
        self.every = every
        self.print0 = print0
        self.cached = True  # until the cache is found to be wrong
        self.prompt = encode_prompt(GenerationConfig().prompt, tokenizer).to(runner.device)  # (1, T)
        # Beyond its context a model has no cache to write with, and each token costs a whole forward pass.
        room = runner.model.config.block_size - self.prompt.size(1)
        self.config = GenerationConfig(max_new_tokens=min(self.TOKENS, max(1, room)))

    def texts_at(self, evaluation: int, is_last: bool, break_off: Callable[[], bool]) -> list[str]:
        """Texts of the model as it is now, if this evaluation has any; [] if break_off becomes true meanwhile."""
        if not is_last and evaluation % self.every:
            return []
        model, variant = self.runner.model, self.runner.variant
        samples = [Sample(self.tokenizer, self.config.prompt) for _ in range(self.TEXTS)]
        prompts = self.prompt.repeat(self.TEXTS, 1)
        dtype = "float32" if self.runner.device.type == "cpu" else variant.dtype
        model.eval()
        engine = InferenceEngine(model, prompts, dtype, cached=self.cached, refused=variant.refused, print0=self.print0)
        for _ in write(model, prompts, samples, self.config, engine.replacing):
            if break_off():
                break
        self.cached = engine.cached
        model.train()
        return [] if break_off() else [sample.text for sample in samples]


def sampler_for(every: int, runner: Runner, dist: DistContext, tokenizer: dict[str, Any]) -> Sampler | None:
    """The Sampler of every `every`-th evaluation; None on ranks that only wait meanwhile.

    tokenizer: as in meta.json. If there can be no samples, one line says why: the run does not need them.
    """
    if not dist.is_first:
        return None
    try:
        return Sampler(runner, from_meta(tokenizer), every, dist.print0)
    except (ValueError, ModuleNotFoundError) as e:
        dist.print0(f"sample_interval={every}: no samples, since {message_for_user(e, '') or e}")
        return None
