"""How a model writes and scores text: with a cache, in low precision, compiled; held to the full forward pass.

The logits of a Reading have been compared with those of GPT.forward on all tokens, uncompiled and in float32: after the
first tokens of a prompt, in the middle of the context and near its end. A form that gives others is left out, and a
line says so. That is remembered for each version of the code on each machine.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from deskgpt.compute import checks, compiling
from deskgpt.compute.checks import nothing_is_zero, weights_are_finite
from deskgpt.kernels import replacements, verify
from deskgpt.kernels.kv_cache import Decoder
from deskgpt.kernels.overridable import replacing
from deskgpt.kernels.verify import SAME_LOGITS, TOLERANCE, Problems, distance, full_float32, machine
from deskgpt.system import hardware
from deskgpt.system.errors import is_out_of_memory
from deskgpt.system.terminal import not_silent
from model import GPT

Forms = dict[str, Callable[..., Any]]


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class InferenceEngine:
    """The fastest right way to get logits of a model: `using` puts it to use.

    with reading.using():
        tokens = list(model.generate(prompts, 100))
    """

    def __init__(
        self,
        model: GPT,
        prompt: Tensor,
        dtype: str,
        *,
        cached: bool = True,
        compiled: bool = False,
        reference_only: Collection[str] = (),
        remembers: bool = True,
        print0: Callable[[str], None] = to_stderr,
    ) -> None:
        """prompt: real tokens (B, T), which come first in what is compared. dtype: of the matmuls.

        cached: whether keys and values may be kept. as_written: functions of model.py whose faster forms are known to
        be wrong. remembers: whether what was found before counts; not for a model that is being trained. Raises
        ValueError where a compiled model was asked for, and compiling fails or computes something else, and where the
        device itself does.
        """
        self.model = model
        self.device = next(model.parameters()).device
        self.remembers = remembers and weights_are_finite(model)
        self.print0 = print0
        self.reference_only = reference_only
        self.cached = cached  # becomes whether they are
        self.dtype = "float32"
        self.forms: Forms = {}
        self.compiler: str | None = None  # by which the model is compiled
        self.texts = texts_to_compare(model, prompt[:1])
        self.expected: list[Tensor] = []
        was_training = model.training
        model.eval()
        with ExitStack() as stack:
            stack.callback(model.train, was_training)
            stack.enter_context(nothing_is_zero(model))
            stack.enter_context(torch.inference_mode())
            with not_silent("still comparing with the full forward pass", print0):
                if self.remembers and self.device.type not in checks.REFERENCES:
                    self._compare_with_cpu()
                self._choose(dtype)
            if compiled:
                with not_silent("still compiling", print0):
                    self._compile(prompt)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Within the block the model computes in this way. A text may go on in a later block."""
        with replacing(self.forms), hardware.autocast(self.device, self.dtype):
            yield

    # ---- choosing ----------------------------------------------------------------------------------------

    def _choose(self, dtype: str) -> None:
        self.forms = self._right_kernels()
        with_cache = self.forms | {"GPT.next_logits": Decoder(self.model)}
        problem = self._problem("with a cache", "float32", with_cache, strict=True) if self.cached else None
        if problem:
            self.print0(f"{problem}: writing without a cache, which is slower")
            self.cached = False
        if self.cached:
            self.forms = with_cache
        elif self._problem("of GPT.next_logits", "float32", self.forms, strict=True):
            self.forms = self.forms | {"GPT.next_logits": last_of_forward}
        if dtype != "float32":
            problem = self._problem(f"in {dtype}", dtype, self.forms)
            if problem:
                self.print0(f"{problem}: going on in float32")
                dtype = "float32"
        self.dtype = dtype

    def _compare_with_cpu(self) -> None:
        """Raises ValueError where float32, as model.py says, is something else on this device, such as MPS."""

        def compare() -> Problems:
            on_cpu = copy.deepcopy(self.model).cpu()
            with replacing({}):
                expected = [last_of_forward(None, on_cpu, tokens.cpu()) for tokens in self._growing()]
            off = max(distance(a.cpu(), b) for a, b in zip(self._expected(), expected, strict=True))
            if off <= TOLERANCE["float32"]:
                return {}
            return {"device": f"logits in float32 differ from those on the CPU by {off:.3g}: this GPU is wrong"}

        for problem in verify.problems_of(self._key("device"), compare).values():
            raise ValueError(f"{problem}; try --device=cpu")

    def _right_kernels(self) -> Forms:
        forms: Forms = replacements.replacements_for(self.device.type)
        forms = {name: form for name, form in forms.items() if name not in self.reference_only}

        def compare() -> Problems:
            tokens = self.texts[-1]
            with torch.inference_mode(False):
                return verify.wrong_replacements(self.model, forms.items(), tokens[:1].clone(), tokens[:1].roll(-1, 1))

        problems = verify.problems_of(self._key("kernels", sorted(forms)), compare)
        for problem in problems.values():
            self.print0(f"{problem}: it is computed as model.py says, which may be slower")
        return {name: form for name, form in forms.items() if name not in problems}

    def _problem(self, how: str, dtype: str, forms: Forms, strict: bool = False) -> str | None:
        """What is wrong with the logits in this dtype and with these forms; None if they are right.

        strict: float32 is full float32, also on CUDA.
        """
        precision = "tf32" if dtype == "float32" and self.device.type == "cuda" else dtype
        limit = SAME_LOGITS if strict else TOLERANCE[precision]

        def compare() -> Problems:
            all_expected = self._expected()
            try:
                all_found = list(self._logits(dtype, forms, strict))
            except Exception as e:
                if is_out_of_memory(e):
                    raise
                return {how: f"logits {how} fail: {' '.join(str(e).split())[:120]}"}
            for found, expected in zip(all_found, all_expected, strict=True):
                off = distance(found, expected)
                if not off <= limit:  # nan is not
                    differ = "differ from those of the full forward pass"
                    return {how: f"logits {how} {differ} by {off:.3g}, at most {limit:g} is rounding"}
            return {}

        return verify.problems_of(self._key(how, dtype, sorted(forms)), compare).get(how)

    def _key(self, *what: Any) -> str | None:
        """Under which an answer is remembered; None: it is not."""
        if not self.remembers:
            return None
        return f"{machine(self.device)}: {verify.digest(self.model.config, self.compiler, *what)}, sampling"

    # ---- logits ------------------------------------------------------------------------------------------

    def _growing(self) -> Iterator[Tensor]:
        """The tokens (1, n) after which logits are compared: of each text all but two, then one more at a time."""
        for text in reversed(self.texts):  # the longest first, so that none continues the one before
            first = max(1, text.size(1) - 2)
            with torch.inference_mode(False):  # as a prompt is; a compiled model tells the two kinds apart
                tokens = text[:, :first].clone(memory_format=torch.contiguous_format)
            yield tokens
            for n in range(first, text.size(1)):
                tokens = torch.cat((tokens, text[:, n : n + 1]), 1)  # as GPT.generate does
                yield tokens

    def _logits(self, dtype: str, forms: Forms, strict: bool) -> Iterator[Tensor]:
        with full_float32() if strict else hardware.autocast(self.device, dtype), replacing(forms):
            for tokens in self._growing():
                yield self.model.next_logits(tokens).float()

    def _expected(self) -> list[Tensor]:
        """The logits of the full forward pass, as model.py writes it, in float32."""
        if not self.expected:
            with full_float32(), replacing({}), torch.compiler.set_stance("force_eager"):
                self.expected = [last_of_forward(None, self.model, tokens).float() for tokens in self._growing()]
        return self.expected

    def _compile(self, prompts: Tensor) -> None:
        """Compiles what generation calls, for these rows of prompts. Raises ValueError where that fails or differs."""
        self.print0("compiling, which takes a while")
        replacements.register_operators()
        self.texts = texts_to_compare(self.model, prompts)[:1]  # another number of rows would be compiled again
        self.expected = []
        self.model.transformer.compile(dynamic=True)
        try:
            if self.device.type == "cpu":
                compiling.set_up_inductor()
            with self.replacing():
                self.model.next_logits(next(self._growing()))
        except Exception as e:
            if is_out_of_memory(e):
                raise
            raise ValueError(f"compile=True: {compiling.why_not_compiled(e)}; or take --compile=False") from None
        self.compiler = compiling.compiler_name(self.device)
        problem = self._problem(f"compiled, in {self.dtype}", self.dtype, self.forms)
        if problem:
            raise ValueError(f"compile=True: {problem}; take --compile=False")


def last_of_forward(plain: Any, model: GPT, idx: Tensor) -> Tensor:
    """Stands in for GPT.next_logits: what GPT.forward gives for the last token."""
    logits = model(idx[:, -model.config.block_size :])[0]
    assert logits is not None
    return logits[:, -1]


def texts_to_compare(model: GPT, prompt: Tensor) -> list[Tensor]:
    """Texts (B, T) that begin with the prompts (B, n) and go on with drawn tokens: a short, a middle and a full one."""
    limit = model.config.block_size
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(model.config.vocab_size, (prompt.size(0), limit), generator=draw).to(prompt.device)
    whole = torch.cat((prompt, drawn), 1)[:, :limit]
    lengths = {min(limit, prompt.size(1) + 2), max(1, limit // 2), limit}
    return [whole[:, :n] for n in sorted(lengths)]
