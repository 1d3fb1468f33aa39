"""How a model writes and scores text: with a cache, in low precision, compiled; checked against the whole forward pass.

    with InferenceEngine(model, prompt, "bfloat16").replacing():
        tokens = list(model.generate(prompt, 100))

Kernels and dtype are checked on the user's own prompt, continued up to the whole context. The cache is checked on each
text that is written: at its first tokens, and then each time when it has become four times as long.
"""

from __future__ import annotations

import copy
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deskgpt.compute import compiling
from deskgpt.compute.runner import REFERENCES
from deskgpt.kernels import replacements, verify
from deskgpt.kernels.kv_cache import Decoder
from deskgpt.kernels.overridable import replacing
from deskgpt.kernels.verify import TOLERANCE, distance, full_float32
from deskgpt.system import hardware
from deskgpt.system.errors import is_out_of_memory
from deskgpt.system.terminal import not_silent
from model import GPT

# Between logits with and without a cache, in one dtype.
SAME_DTYPE = {"float32": verify.SAME_LOGITS, "tf32": 0.02, "bfloat16": 0.05, "float16": 0.02}


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class InferenceEngine:
    """The fastest way to get a model's logits that agrees with model.py: `replacing` puts it to use."""

    def __init__(
        self,
        model: GPT,
        prompt: Tensor,
        dtype: str,
        *,
        cached: bool = True,
        compiled: bool = False,
        refused: Collection[str] = (),
        print0: Callable[[str], None] = to_stderr,
    ) -> None:
        """prompt: real tokens (B, T). dtype: of the matmuls. refused: replacements that are known to be wrong.

        Raises ValueError where the device, or a compiled model that was asked for, computes something else.
        """
        self.model = model
        self.device = next(model.parameters()).device
        self.print0 = print0
        self.dtype = dtype
        self.cached = cached  # becomes False once the cache was wrong
        self.replacements: dict[str, Callable[..., Any]] = {}
        self.distrusts_next_logits = False  # it disagrees with GPT.forward, which is used then
        self.decoder = Decoder(model)
        with verify.undisturbed(model), torch.no_grad(), not_silent("still checking against model.py", print0):
            model.eval()
            if verify.weights_are_finite(model):
                self._check(self._text(prompt), refused)
            self.replacements["GPT.next_logits"] = self._next_logits
            self._try_cache(self._text(prompt), prompt.size(1))
            self.decoder.begin()
            if compiled:
                self._compile(prompt.clone())

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Within the block the model computes in this way. A text may go on in a later block."""
        with replacing(self.replacements), hardware.autocast(self.device, self.dtype):
            yield

    def _text(self, prompt: Tensor) -> Tensor:
        """(1, block_size): the first prompt, continued with drawn tokens."""
        limit = self.model.config.block_size
        draw = torch.Generator().manual_seed(0)
        drawn = torch.randint(self.model.config.vocab_size, (1, limit), generator=draw).to(self.device)
        return torch.cat((prompt[:1], drawn), 1)[:, :limit]

    def _check(self, text: Tensor, refused: Collection[str]) -> None:
        """Leaves out kernels, and a dtype, that give other logits than model.py."""
        model = self.model
        candidates = replacements.candidates_for(self.device.type, "flash")
        candidates = {name: [c for c in some if c.__name__ not in refused] for name, some in candidates.items()}
        wrong = verify.wrong_replacements(model, candidates, text, text.roll(-1, 1))
        for name in sorted(wrong):
            self.print0(f"{wrong[name]}: using model.py itself")
        self.replacements = replacements.replacements_for(self.device.type, refused={*refused, *wrong})

        with full_float32(), replacing({}):
            expected = logits_of(model, text)
            if self.device.type not in REFERENCES:
                on_cpu = logits_of(copy.deepcopy(model).cpu(), text.cpu())
                error = distance(expected.cpu(), on_cpu, dim=-1)
                if not error <= TOLERANCE["float32"].gradient:
                    what = f"float32 on {hardware.device_name(self.device)}"
                    raise ValueError(f"{verify.mismatch(what, error, 1e-3)}; try --device=cpu")
            self.distrusts_next_logits = distance(model.next_logits(text), expected[:, -1], dim=-1) > verify.SAME_LOGITS
        if self.dtype == "float32":
            return
        with self.replacing():
            error = distance(logits_of(model, text), expected, dim=-1)
        limit = TOLERANCE[self.dtype].logits
        if not error <= limit:
            self.print0(verify.mismatch(self.dtype, error, limit, "float32"))
            self.dtype = "float32"

    # ---- the cache ---------------------------------------------------------------------------------------

    def _try_cache(self, text: Tensor, prompt: int) -> None:
        """Compares the cache after the prompt, in the middle and at the end, before any text is shown."""
        T = text.size(1)
        with self.replacing():
            for length in sorted({min(T, prompt + 1), max(1, T // 2), T}):
                self.decoder.begin()
                for n in range(max(1, length - 1), length + 1):
                    self.model.next_logits(text[:, :n])

    def _next_logits(self, reference: Callable[..., Tensor], model: GPT, idx: Tensor) -> Tensor:
        """Replaces GPT.next_logits: the decoder's logits, compared now and then with the whole forward pass."""
        if model is not self.model or not self.cached:
            return last_of_forward(model, idx) if self.distrusts_next_logits else reference(model, idx)
        try:
            logits = self.decoder(reference, model, idx)
        except Exception as e:
            if is_out_of_memory(e):
                raise
            self._drop_cache(f"cached sampling fails ({textwrap.shorten(str(e), 120, placeholder=' ...')})")
            return last_of_forward(model, idx)
        if self.decoder.is_due():
            with torch.compiler.set_stance("force_eager"):
                expected = last_of_forward(model, idx)
            error = distance(logits, expected, dim=-1)
            limit = SAME_DTYPE[verify.precision_of(self.dtype, self.device)]
            if not error <= limit and expected.isfinite().all():
                first = self.decoder.steps // 4 + 1
                since = f"; the text from token {first} on may be wrong" if self.decoder.steps > 1 else ""
                self._drop_cache(f"{verify.mismatch('cached sampling', error, limit)}{since}")
                return expected
        return logits

    def _drop_cache(self, problem: str) -> None:
        self.cached = False
        self.print0(f"{problem}: writing without a cache, which is slower")

    # ---- compiling ---------------------------------------------------------------------------------------

    def _compile(self, prompts: Tensor) -> None:
        """Compiles what generation calls, for these rows of prompts. Raises ValueError where that fails or differs."""
        self.print0("compiling, which takes a while")
        self.model.transformer.compile(dynamic=True)
        text = torch.cat((prompts, prompts[:, :1]), 1)[:, : self.model.config.block_size]
        try:
            compiling.prepare(self.device)
            with self.replacing(), torch.inference_mode():
                found = self.model.next_logits(text)
        except Exception as e:
            if is_out_of_memory(e):
                raise
            raise ValueError(f"compile=True: {compiling.why_not_compiled(e)}; or take --compile=False") from None
        with full_float32(), replacing({}), torch.compiler.set_stance("force_eager"):
            error = distance(found, last_of_forward(self.model, text), dim=-1)
        limit = TOLERANCE[verify.precision_of(self.dtype, self.device)].logits
        if not error <= limit:
            raise ValueError(
                f"compile=True: {verify.mismatch('the compiled model', error, limit)}; take --compile=False"
            )


def logits_of(model: GPT, idx: Tensor) -> Tensor:
    """(B, T, V) of all positions."""
    logits = model(idx)[0]
    assert logits is not None
    return logits


def last_of_forward(model: GPT, idx: Tensor) -> Tensor:
    """The logits (B, V) of the token after idx, from the whole forward pass."""
    return logits_of(model, idx[:, -model.config.block_size :])[:, -1]
