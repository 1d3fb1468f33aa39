"""Generation of text: in a dtype, with a cache of keys and values.

    engine = InferenceEngine(model, prompt, "bfloat16")
    for shown in engine.write(prompt, [Sample(tokenizer, "Hello")], GenerationConfig()):
        print(shown[0], end="")

Once, at the start, logits with the cache are compared with those of the whole forward pass, on the user's own prompt
and random tokens after it. If they differ, one line says so, and nothing is cached. No text is compared or changed
while it is generated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deskgpt.compute.check import TOLERANCE, distance, precision_of
from deskgpt.generate.text import GenerationConfig, Sample
from deskgpt.kernels.kv_cache import GraphedKVCache, KVCache
from deskgpt.system import hardware
from deskgpt.system.errors import is_out_of_memory
from deskgpt.system.terminal import reason
from model import GPT

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
COMPARED = 256  # tokens, or the context if it is shorter: the prompt, then random ones
DRAWN = 8  # of them are random, at least
SINGLE = 3  # of these are passes of their own: a graph is recorded in the second one, and replayed in the third


class InferenceEngine:
    """A model in evaluation mode, and how it generates text."""

    def __init__(self, model: GPT, prompt: Tensor, dtype: str, *, is_trained: bool = False) -> None:
        """prompt: tokens (B, T). dtype: of the matmuls. is_trained: training continues, so the weights stay float32."""
        self.model = model
        self.device = prompt.device
        self.dtype = dtype
        if dtype != "float32" and not is_trained:
            hold_weights(model, hardware.DTYPES[dtype])
        kinds: list[type[KVCache]] = [KVCache]
        if self.device.type == "cuda" and not is_trained:
            kinds.insert(0, GraphedKVCache)
        self.cache_type = self._first_that_agrees(kinds, prompt)  # None: nothing is cached

    def write(
        self,
        prompts: Tensor,
        samples: list[Sample],
        config: GenerationConfig,
        watch: Callable[[Tensor], None] | None = None,
    ) -> Iterator[list[str]]:
        """Continue prompts (B, T), one for each sample, until all have ended; yield what each can show, token by token.

        watch: as GPT.generate takes it.
        """
        tokens = self.model.generate(
            prompts,
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k or None,
            top_p=config.top_p,
            seed=config.seed,
            vocab_size=samples[0].tokenizer.vocab_size,
            cache=self.cache_type(self.model.config.block_size) if self.cache_type else None,
            watch=watch,
        )
        while not all(sample.done for sample in samples):
            with self.mode():  # of this thread; a server has another for each token
                new = next(tokens, None)  # (B,)
            if new is None:
                break
            yield [sample.add(token) for sample, token in zip(samples, new.tolist(), strict=True)]
        yield [sample.finish() for sample in samples]

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Within the block, matmuls are in the dtype, and attention is not cuDNN's.

        On Hopper and Blackwell torch prefers cuDNN, also for a single query. It plans anew for each length of the cache
        (pytorch issue 193893). To say so once a token costs less than in each layer.
        """
        without_cudnn = sdpa_kernel(WITHOUT_CUDNN) if self.device.type == "cuda" else nullcontext()
        with without_cudnn, hardware.autocast(self.device, self.dtype):
            yield

    @torch.inference_mode()
    def _first_that_agrees(self, kinds: list[type[KVCache]], prompt: Tensor) -> type[KVCache] | None:
        """Return the first kind of cache with which logits are those of the whole forward pass; None if none is.

        The text is in parts, the last ones single tokens. Print a line on stderr for each kind that differs. With
        weights that give NaN nothing can be compared.
        """
        c = self.model.config
        n = max(DRAWN, COMPARED - prompt.size(1))
        drawn = torch.randint(c.vocab_size, (1, n), generator=torch.Generator().manual_seed(0))
        text = torch.cat((prompt[:1], drawn.to(self.device)), 1)[:, : c.block_size]
        T = text.size(1)
        limit = TOLERANCE[precision_of(self.dtype, self.device)].logits
        with self.mode():
            expected = self.model.next_logits(text)
            for kind in kinds:
                cache = kind(c.block_size)
                why = ""
                try:
                    for end in sorted({T // 2, *range(max(1, T - SINGLE), T + 1)} - {0}):
                        found = self.model.next_logits(text[:, :end], cache)
                    error = distance(found, expected, dim=-1)
                    if error > limit and expected.isfinite().all():
                        why = f"logits with a cache have a relative error of {error:.2g}, at most {limit:g} is rounding"
                except Exception as e:
                    if is_out_of_memory(e):
                        raise
                    why = f"the model fails with a cache ({reason(e)})"
                if not why:
                    return kind
                what = "a cache" if kind is KVCache else "CUDA graphs"
                print(f"{why}: sampling without {what}, which is slower", file=sys.stderr)
        return None


def hold_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold the weights of linear layers in dtype; the logits stay the same bit for bit.

    Under inference_mode autocast keeps no casts, and would cast each weight again for each token. An embedding that is
    tied to the head stays float32, which is what is read of it.
    """
    for module in model.modules():
        if type(module) is nn.Linear:  # a class of the user's own may compute in float32
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(p.detach().to(dtype), requires_grad=False))
