"""Text from a trained model: loading it, drawing tokens, texts with their stops, samples in
training.

Shape legend: B batch, T time, V vocabulary.
"""

from __future__ import annotations

import codecs
import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook

from data.chat import template
from data.token_files import dataset_folder, read_meta
from data.tokenizer import Tokenizer, from_meta
from deskgpt.check_model import TOLERANCE, distance, in_float32
from deskgpt.checkpoint import Checkpoint, is_checkpoint, load_checkpoint
from deskgpt.compute import ComputeMode, autocast
from deskgpt.device import DTYPES
from deskgpt.distributed import DistContext
from deskgpt.errors import is_out_of_memory, reason, shortened
from deskgpt.files import is_local
from deskgpt.gpt2_weights import load_gpt2
from deskgpt.kv_cache import GraphedKVCache, KVCache
from deskgpt.memory import check_model_fits
from deskgpt.settings import Range, check_fields
from deskgpt.stopping import signal_handler
from model import GPT, GPTConfig

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
COMPARED_TOKENS = 256  # or the context if it is shorter: the prompt, then random ones
RANDOM_TOKENS = 8  # at least so many of them are random
# The last tokens of that text go in one by one: a graph is recorded in the second of these passes,
# and replayed in the third.
SINGLE_TOKENS = 3


class InferenceEngine:
    """A model in evaluation mode, and how it generates text."""

    def __init__(
        self,
        model: GPT,
        prompt: Tensor,
        dtype: str,
        end_of_text: int | None = None,
        *,
        is_trained: bool = False,
    ) -> None:
        """prompt: tokens (B, T). dtype: of the matmuls. end_of_text: the tokenizer's. is_trained:
        training continues, so the weights stay float32.
        """
        self.model = model
        self.device = prompt.device
        self.dtype = dtype
        # The prompt and random tokens, with which a cache is compared. A document ends among the
        # last ones: what a model does then, a prompt alone would not show.
        n = max(RANDOM_TOKENS, COMPARED_TOKENS - prompt.size(1))
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(model.config.vocab_size, (1, n), generator=generator)
        if end_of_text is not None:
            drawn[0, -SINGLE_TOKENS - 2] = end_of_text
        text = torch.cat((prompt[:1], drawn.to(self.device)), 1)[:, -model.config.block_size :]
        replays = self.device.type == "cuda" and not is_trained
        self.cache_type = GraphedKVCache if replays else KVCache
        self.has_cache = self._cache_agrees(text)  # else each token is a pass over the text
        if dtype != "float32" and not is_trained:
            with self.mode():
                hold_weights(model, DTYPES[dtype], text)

    def write(
        self, prompts: Tensor, samples: list[Sample], config: GenerationConfig
    ) -> Iterator[tuple[list[str], Tensor | None]]:
        """Continue prompts (B, T), one for each sample, until all have ended; yield what each can
        show, token by token, and the logits (B, V) that the tokens were drawn from.

        At the end come what was held back, and None.
        """
        cache = self.cache_type(self.model.config.block_size) if self.has_cache else None
        vocab_size = samples[0].tokenizer.vocab_size
        tokens = generate(self.model, prompts, config, vocab_size, cache)
        while not all(sample.done for sample in samples):
            with self.mode():  # in this thread: a server has another one for each token
                drawn = next(tokens, None)
            if drawn is None:
                break
            new, logits = drawn
            shown = [sample.add(token) for sample, token in zip(samples, new.tolist(), strict=True)]
            yield shown, logits
        yield [sample.finish() for sample in samples], None

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Within the block, matmuls are in the dtype, and attention is not cuDNN's.

        On Hopper and Blackwell torch prefers cuDNN, also for a single query. It plans anew for each
        length of the cache (pytorch issue 193893). To say so once a token costs less than in each
        layer. On other devices this changes nothing.
        """
        with sdpa_kernel(WITHOUT_CUDNN), autocast(self.device, self.dtype):
            yield

    @torch.inference_mode()
    def _cache_agrees(self, text: Tensor) -> bool:
        """Return whether logits with the cache are those of the whole forward pass; print a line on
        stderr if not.

        They are computed in float32, whatever the dtype: whether a cache is right is a fact of the
        code, and 16 bits would hide small differences. The text is in parts, the last ones single
        tokens.
        """
        T = text.size(1)
        ends = sorted({T // 2, *range(max(1, T - SINGLE_TOKENS), T + 1)} - {0})
        limit = TOLERANCE["float32"].logits
        with in_float32(self.model):
            expected = self.model.next_logits(text)
            cache = self.cache_type(self.model.config.block_size)
            try:
                for end in ends:
                    found = self.model.next_logits(text[:, :end], cache)
                error = distance(found, expected, dim=-1)
                why = f"logits with a cache have a relative error of {error:.2g}, above {limit:g}"
            except Exception as e:
                if is_out_of_memory(e):
                    raise
                error = math.inf
                why = f"the model fails with a cache ({reason(e)})"
        if error > limit:
            print(f"{why}: sampling without it, which is slower", file=sys.stderr)
        return error <= limit


@torch.inference_mode()
def hold_weights(model: GPT, dtype: torch.dtype, text: Tensor) -> None:
    """Hold the weights of the linear layers that autocast computes in dtype, as a pass over the
    text (1, T) shows; the logits stay the same bit for bit.

    Under inference_mode autocast keeps no casts, and would cast each weight again for each token. A
    layer that a model computes in float32 on purpose stays so. An embedding that is tied to the
    head stays float32, since its rows are read as they are.
    """
    cast = set()

    def note(layer: nn.Module, args: Any) -> None:
        # A class of the user's own may compute in float32.
        if type(layer) is nn.Linear and torch.is_autocast_enabled(text.device.type):
            cast.add(layer)

    hook = register_module_forward_pre_hook(note)
    model.next_logits(text)
    hook.remove()
    for layer in cast:
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(p.to(dtype), requires_grad=False))


# ---- tokens --------------------------------------------------------------------------------------


@torch.inference_mode()
def generate(
    model: GPT,
    idx: Tensor,
    config: GenerationConfig,
    vocab_size: int | None = None,
    cache: KVCache | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the next token ids (B,), and the logits (B, vocab_size) in float32 that they were drawn
    from, max_new_tokens times, continuing the prompts idx (B, T), T >= 1. The logits last until the
    next token.

    Row i draws from a random stream of its own, seeded with seed + i: its text does not depend on
    how many others are generated with it. Ids from vocab_size on are padding and are never drawn.
    Without a cache each token costs a whole forward pass; so it does beyond block_size tokens.
    """
    streams = [torch.Generator().manual_seed(config.seed + i) for i in range(idx.size(0))]
    for _ in range(config.max_new_tokens):
        logits = model.next_logits(idx, cache).float()[:, :vocab_size]
        u = [torch.rand(1, 1, generator=stream, dtype=torch.float64) for stream in streams]
        new = sample_tokens(
            logits, torch.cat(u), config.temperature, config.top_k, config.top_p
        )  # (B, 1)
        idx = torch.cat((idx, new), 1)
        yield new[:, 0], logits


def sample_tokens(
    logits: Tensor, u: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Return token ids (B, 1) drawn from logits (B, V) by inverting the cumulative distribution at
    u (B, 1) in [0, 1).

    temperature 0 takes the likeliest token. top_k keeps the k likeliest, of equal ones those with
    the smallest ids; 0 keeps all. Of these top_p keeps the fewest that reach that
    probability together (nucleus sampling, arXiv:1904.09751).
    """
    if temperature == 0:
        return logits.argmax(1, keepdim=True)
    device = logits.device
    # MPS has no float64, and CUDA no deterministic cumsum.
    if device.type == "mps" or torch.are_deterministic_algorithms_enabled():
        logits = logits.cpu()
    # Ordered in float32: the order is the same, and there are half as many bytes to sort.
    if 0 < top_k < logits.size(1):
        least = logits.topk(top_k).values[:, -1:]  # (B, 1)
        # In 16 bits many logits are equal: take as many of the least as there is room for.
        is_least = logits == least
        room = top_k - (logits > least).sum(1, keepdim=True)
        is_out = (logits < least) | (is_least & (is_least.cumsum(1) > room))
        logits = logits.masked_fill(is_out, -torch.inf)
    if top_p < 1:
        logits, order = logits.sort(dim=1, descending=True, stable=True)
    logits = logits.double()  # cumulative sums over 50,000 tokens round noticeably in float32
    # The largest becomes 0, so that no temperature overflows.
    logits = (logits - logits.amax(1, keepdim=True)) / temperature
    p = logits.softmax(1)  # (B, V)
    if top_p < 1:
        p = p.masked_fill(p.cumsum(1) - p >= top_p, 0.0)  # the token that crosses top_p stays
    cdf = p.cumsum(1)
    total = cdf[:, -1:]
    pick = torch.searchsorted(cdf, u.to(cdf.device) * total, right=True).clamp_(max=p.size(1) - 1)
    if top_p < 1:
        pick = order.gather(1, pick)
    return pick.to(device)


# ---- texts ---------------------------------------------------------------------------------------


PROMPT = "\n"  # the end of a line: what comes next begins a new one


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The settings of a text, which sample.py has among its own. Raises ConfigError."""

    # text
    max_new_tokens: Annotated[int, Range(1, 1_000_000)] = 500  # per sample
    stop: str = ""  # a sample ends before this text, if it occurs after the prompt; empty = none
    temperature: Annotated[float, Range(0, 100)] = 0.8  # below 1 = likelier text; 0 = the likeliest
    top_k: Annotated[int, Range(0, 1_000_000)] = 200  # draw from the k likeliest tokens; 0 = all
    top_p: Annotated[float, Range(1e-6, 1)] = 1.0  # draw from the likeliest with this probability
    seed: Annotated[int, Range(0, 2**53 - 1)] = 1337  # sample i depends on seed + i

    def __post_init__(self) -> None:
        check_fields(self)


class Sample:
    """One text as it grows: decodes tokens that are parts of characters, and ends at a stop
    text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str, *stops: str) -> None:
        """stops: if one of them occurs after the prompt, the text ends before it; empty ones do not
        count.
        """
        self.tokenizer = tokenizer
        self.stops = [stop for stop in stops if stop]
        self.text = prompt
        self.prompt_end = len(prompt)
        self.shown = len(prompt)  # characters that cannot become a stop text any more
        self.done = False
        self.tokens: list[int] = []  # added so far
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Append a token; return the text that can be shown now: all but what may become a stop
        text.
        """
        self.tokens.append(token)
        return self._append(self.tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """End the text; return the part that was held back."""
        return self._append(b"", is_last=True)

    def _append(self, content: bytes, is_last: bool = False) -> str:
        if self.done:
            return ""
        self.text += self._decoder.decode(content, is_last)
        for stop in self.stops:
            end = self.text.find(stop, self.shown)
            if end >= 0:
                self.text = self.text[:end]
                self.done = True
        held = 0
        if not self.done and not is_last:
            held = max((self._begun(stop) for stop in self.stops), default=0)
        before = self.shown
        self.shown = len(self.text) - held
        return self.text[before : self.shown]

    def _begun(self, stop: str) -> int:
        """Return the length of the longest end of the text with which the stop text begins."""
        longest = min(len(stop) - 1, len(self.text) - self.shown)
        return next((n for n in range(longest, 0, -1) if self.text.endswith(stop[:n])), 0)


# ---- a trained model from the disk ---------------------------------------------------------------


@dataclass
class LoadedModel:
    """A trained model and the tokenizer that it was trained with."""

    model: GPT  # on the CPU
    tokenizer: Tokenizer
    source: str  # init_from or out_dir, as the user wrote it
    # None for GPT-2's weights and other folders in Hugging Face's format.
    checkpoint: Checkpoint | None = None

    @property
    def is_chat_model(self) -> bool:
        """Return whether it was trained on dialogues in our template."""
        return self.checkpoint is not None and self.checkpoint.chat == template.NAME

    @property
    def name(self) -> str:
        """Return the name of the folder or file."""
        return Path(self.source).resolve().name


def load_model(init_from: str, out_dir: str, device: torch.device) -> LoadedModel:
    """Return the model that init_from and out_dir of SampleConfig name.

    It is on the CPU, and `device` has room for it.

    Raises ValueError if there is none, if it is damaged, or if it does not fit into the memory of
    the device.
    """
    saved = None
    source = out_dir if init_from == "resume" else init_from
    if init_from == "resume" or is_checkpoint(init_from):
        found = saved = load_checkpoint(source, functools.partial(print, file=sys.stderr))
        meta = saved.tokenizer or tokenizer_of_dataset(saved.config.get("dataset", ""))
    else:
        found = load_gpt2(source)
        meta = found.tokenizer or {}  # {} describes no tokenizer
    config = GPTConfig.from_args(found.model_args, source)
    check_model_fits(config, device)
    model = GPT.from_state(config, found.model, source)
    tokenizer = from_meta(meta)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{source} has {config.vocab_size} tokens, and the tokenizer "
            f"{meta.get('name')} {tokenizer.vocab_size}: it is another model's. nanoGPT "
            "keeps its own in meta.pkl, in the data's folder: copy that folder into data/"
        )
    return LoadedModel(model, tokenizer, source, saved)


def tokenizer_of_dataset(dataset: Any) -> dict[str, Any]:
    """Return the meta of a data folder's tokenizer, for nanoGPT's checkpoints, which name only the
    folder.

    Raises ValueError.
    """
    if not is_local(dataset):
        raise ValueError(
            f"the checkpoint has no tokenizer, and dataset={shortened(dataset)} is not on "
            "this machine"
        )
    folder = dataset_folder(dataset)
    meta = read_meta(folder)["tokenizer"]
    if not meta:
        raise ValueError(
            f"{folder / 'meta.pkl'} has no characters (stoi, itos) to read and write text"
        )
    return meta


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> Tensor:
    """Return token ids (1, T) of a prompt.

    Raises ValueError if the tokenizer lacks one of its characters.
    """
    return torch.from_numpy(tokenizer.encode_prompt(prompt).astype("int64"))[None]


# ---- samples of a model in training --------------------------------------------------------------


TEXTS = 2  # side by side
TOKENS = 200  # of a text, at most


def sampler_for(
    every: int, model: GPT, compute: ComputeMode, dist: DistContext, tokenizer_meta: dict[str, Any]
) -> Callable[[int, bool], list[str]]:
    """Return the function texts_at(evaluation, is_last), which returns texts of the model as it is
    then.

    It does so at every `every`-th evaluation and at the last one, and returns [] at others and
    after a signal. It draws from random streams of its own, and leaves the model in training mode.

    tokenizer_meta: as in meta.json. If there can be no samples, one line says why: the run does not
    need them.
    """
    device = next(model.parameters()).device
    try:
        tokenizer = from_meta(tokenizer_meta)
        prompts = encode_prompt(PROMPT, tokenizer).to(device).repeat(TEXTS, 1)
    except (ValueError, ModuleNotFoundError) as e:
        dist.print0(f"sample_interval={every}: no samples, since {reason(e)}")
        return lambda evaluation, is_last: []

    @functools.cache
    def engine() -> InferenceEngine:
        dtype = "float32" if device.type == "cpu" else compute.dtype
        return InferenceEngine(model, prompts, dtype, tokenizer.end_of_text, is_trained=True)

    def texts_at(evaluation: int, is_last: bool) -> list[str]:
        if evaluation % every and not is_last:
            return []
        samples = [Sample(tokenizer, PROMPT) for _ in range(TEXTS)]
        model.eval()
        # Blocks are compiled for batches; set_stance imports torch's compiler, which takes seconds.
        eager = torch.compiler.set_stance("force_eager") if compute.compiled else nullcontext()
        with eager:
            # Beyond its context a model has no cache, and each token costs a whole forward pass.
            room = max(1, model.config.block_size - prompts.size(1))
            config = GenerationConfig(max_new_tokens=min(TOKENS, room))
            for _ in engine().write(prompts, samples, config):
                if signal_handler.signal is not None:
                    samples = []
                    break
        model.train()
        return [sample.text for sample in samples]

    return texts_at
