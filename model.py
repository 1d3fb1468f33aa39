"""GPT-2 as one module, with modern choices as settings: network, loss, FLOPs count, generation with a KV cache.

With GPT-2's choices, the names, order and shapes of the parameters are those of nanoGPT's `GPT`, so its checkpoints
(weights and AdamW state) load here unchanged. This file reads and writes no files, prints nothing and picks no device.

Shape legend: B batch, T time, C channels (n_embd), H heads, D = C // H, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from deskgpt.faster import graphs
from deskgpt.faster.kernels import activation, attention, linear_cross_entropy, linear_to_fewer

# ---- settings ------------------------------------------------------------------------------------------------

# More is refused at once: it takes minutes to build or more memory than any machine has.
MOST_LAYERS = 1000
MOST_PARAMETERS = 10**14
LARGEST_INT64 = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What a user chooses about the model. train.py has these among its settings. Raises ValueError."""

    # model
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768  # width
    block_size: int = 1024  # context length in tokens
    dropout: float = 0.0  # 0 for pretraining; 0.1 and more for small data
    bias: bool = False  # in Linear and LayerNorm layers
    # modern choices; the defaults are GPT-2's
    position: Literal["learned", "rope"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    qk_norm: bool = False  # RMS norm of each head's queries and keys
    activation: Literal["gelu_tanh", "gelu", "relu2"] = "gelu_tanh"  # gelu is nanoGPT's; relu2 the fastest
    tie_weights: bool = True  # one matrix for token embedding and head
    zero_init: bool = False  # layers that add to the residual stream, and an untied head, start at zero
    token_shift: bool = False  # blocks see a quarter of their channels from the token before

    def __post_init__(self) -> None:
        for name in ("block_size", "n_layer", "n_head", "n_embd"):
            check_at_least_1(name, getattr(self, name))
        self.refuse_absurd_size(vocab_size=0)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.n_embd % self.n_head:
            divisors = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            best = min(divisors, key=lambda h: abs(h - self.n_head))
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}; try --n_head={best}")
        if self.position == "rope" and self.n_embd // self.n_head % 2:
            raise ValueError(f"position=rope needs heads of an even width, not {self.n_embd // self.n_head}")
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                options = ", ".join(map(str, get_args(kind)))
                raise ValueError(f"{name}={value!r} is not one of {options}")
            if kind is bool and not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} is not True or False")

    def refuse_absurd_size(self, vocab_size: int) -> None:
        """Raises ValueError for a model that no machine can hold or build, before anything has its size."""
        if self.count_parameters(vocab_size) > MOST_PARAMETERS:
            raise ValueError(f"{self.size_in_words(vocab_size)}, which no machine has; take a smaller model")
        if self.n_layer > MOST_LAYERS:
            raise ValueError(f"n_layer={self.n_layer} must be at most {MOST_LAYERS}")

    def count_parameters(self, vocab_size: int) -> int:
        """All parameters of the GPT with these settings, its position embeddings included."""
        C = self.n_embd
        norm = 2 * C if self.norm == "layer" and self.bias else C
        biases = 9 * C if self.bias else 0  # c_attn 3C, c_proj C, c_fc 4C, c_proj C
        block = 12 * C * C + biases + 2 * norm
        tokens = C * vocab_size * (1 if self.tie_weights else 2)
        positions = C * self.block_size if self.position == "learned" else 0
        return self.n_layer * block + norm + tokens + positions

    def size_in_words(self, vocab_size: int) -> str:
        """Such as "n_layer=12, n_embd=768, block_size=1024 make a model of 124.4 million parameters, ..."."""
        n = self.count_parameters(vocab_size)
        return (
            f"n_layer={self.n_layer}, n_embd={self.n_embd}, block_size={self.block_size} make a model of "
            f"{with_unit(n, COUNTS)} parameters, {with_unit(4 * n, BYTES)} in float32"
        )


COUNTS = {"trillion": 1e12, "billion": 1e9, "million": 1e6}
BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6}


def with_unit(n: float, units: dict[str, float]) -> str:
    """n in the first of these units that it reaches, else in the last: 124.4 million."""
    for name, unit in units.items():  # noqa: B007 (the last one stays where none is reached)
        if n >= unit:
            break
    return f"{n / unit:,.1f} {name}"


def check_at_least_1(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:  # True is an int too
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    if value > LARGEST_INT64:  # and may be too long to be printed
        raise ValueError(f"{name} must be at most {LARGEST_INT64}, not a number of {value.bit_length()} bits")


# The model arguments that nanoGPT knows. The other settings are modern choices.
NANOGPT_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
MODERN_CHOICES = tuple(f.name for f in fields(ModelSettings) if f.name not in NANOGPT_ARGS)


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelSettings):
    vocab_size: int = 50304  # GPT-2's 50257 rounded up to a multiple of 64: matmul tiles are whole

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_1("vocab_size", self.vocab_size)
        self.refuse_absurd_size(self.vocab_size)

    def weights_bytes(self) -> int:
        """Bytes of the parameters and of the table of rotary positions."""
        rotary = self.block_size * self.n_embd // self.n_head if self.position == "rope" else 0
        return 4 * (self.count_parameters(self.vocab_size) + rotary)

    @classmethod
    def from_settings(cls, settings: ModelSettings, vocab_size: int) -> GPTConfig:
        return cls(vocab_size=vocab_size, **{f.name: getattr(settings, f.name) for f in fields(ModelSettings)})

    @classmethod
    def from_args(cls, model_args: dict[str, Any], source: str) -> GPTConfig:
        """The configuration in a checkpoint. Raises ValueError, naming `source`, where it is not one of ours."""
        try:
            return cls(**model_args)
        except (TypeError, ValueError) as e:  # a name that is not ours, a value of another type or out of range
            found = str(model_args)[:300]
            raise ValueError(f"{source}: model_args={found} are not those of a GPT-2 ({str(e)[:300]})") from None

    def as_args(self) -> dict[str, Any]:
        """What `from_args` reads. Modern choices are left out where they are GPT-2's: so nanoGPT reads a GPT-2."""
        plain = GPTConfig()
        return {k: v for k, v in asdict(self).items() if k in NANOGPT_ARGS or v != getattr(plain, k)}


# ---- network -------------------------------------------------------------------------------------------------


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.n_embd, eps=1e-5)
    return nn.LayerNorm(config.n_embd, bias=config.bias)


class TokenShift(nn.Module):
    """Takes the first quarter of the channels from the token before, zeros for the first token.

    After RWKV, arXiv:2305.13048.
    """

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        n = x.size(-1) // 4
        shifted = x[:, :, :n]  # (B, T, C // 4)
        kept = x[:, :, n:]
        before = cache.swap_last(self, shifted[:, -1:]) if cache is not None else None
        if before is None:
            before = torch.zeros_like(shifted[:, :1])
        shifted = torch.cat((before, shifted[:, :-1]), 1)
        return torch.cat((shifted, kept), -1)


def rotary_table(T: int, D: int) -> Tensor:
    """Cosines and sines (2, T, D / 2) of the angles of T positions in heads of width D (RoFormer, arXiv:2104.09864)."""
    frequencies = 10000.0 ** -(torch.arange(0, D, 2) / D)  # (D / 2,)
    angles = torch.outer(torch.arange(T), frequencies)  # (T, D / 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turns x (B, H, T, D) by its positions; rotary (2, T, D / 2) is the part of rotary_table for them."""
    cos, sin = rotary
    a, b = x.float().chunk(2, -1)  # the pairs that turn together are (i, i + D / 2)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k, v in one matmul
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qk_norm = config.qk_norm
        self.layer = layer
        self.shift = TokenShift() if config.token_shift else None

    def forward(self, x: Tensor, cache: KVCache | None, rotary: Tensor | None) -> Tensor:
        B, T, C = x.shape
        if self.shift is not None:
            x = self.shift(x, cache)

        q, k, v = self.c_attn(x).split(C, 2)  # each (B, T, C)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)
        if self.qk_norm:
            q = F.rms_norm(q, q.shape[-1:], eps=1e-5).type_as(v)
            k = F.rms_norm(k, k.shape[-1:], eps=1e-5).type_as(v)
        if rotary is not None:
            q = rotate(q, rotary)
            k = rotate(k, rotary)
        seen = None
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
            seen = cache.seen

        y = attention(q, k, v, dropout=self.dropout if self.training else 0.0, seen=seen)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = config.activation
        self.shift = TokenShift() if config.token_shift else None

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        if self.shift is not None:
            x = self.shift(x, cache)
        x = activation(self.c_fc(x), self.activation)  # (B, T, 4C)
        x = linear_to_fewer(x, self.c_proj.weight, self.c_proj.bias)  # (B, T, C)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        self.checkpoint_options: dict[str, Any] | None = None  # set by GPT.checkpoint_activations

    def forward(self, x: Tensor, cache: KVCache | None, rotary: Tensor | None) -> Tensor:
        if self.checkpoint_options is None or cache is not None or not torch.is_grad_enabled():
            return self.compute(x, cache, rotary)
        return checkpoint(self.compute, x, None, rotary, use_reentrant=False, **self.checkpoint_options)

    def compute(self, x: Tensor, cache: KVCache | None, rotary: Tensor | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, rotary)
        return x + self.mlp(self.ln_2(x), cache)


MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def is_kept(dropout: float, context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether selective checkpointing keeps what op returns: attention and its matmuls, not those of the MLP.

    The MLP's first result is its largest, and no gradient needs the last one. Attention with dropout is computed again:
    it draws random numbers, and without it the dropouts after it would draw others than in the forward pass.
    """
    if op in MATMULS:
        n_in, n_out = args[-1].shape  # to 3C and C in attention, to 4C and C in the MLP
        return n_in <= n_out < 4 * n_in
    return op in ATTENTION and not dropout


class Transformer(nn.Module):
    """Everything up to the final norm."""

    rotary: Tensor | None  # cosines and sines of rotary positions (2, block_size, D / 2)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        rotary = None
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            rotary = rotary_table(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("rotary", rotary, persistent=False)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)

    def forward(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Final hidden states (B, T, C) of token ids idx (B, T). Once a cache holds something, T must be 1."""
        start = cache.length if cache is not None else 0
        T = idx.size(1)
        assert start == 0 or T == 1
        if start + T > self.block_size:
            raise ValueError(f"{start + T} tokens do not fit into block_size={self.block_size}")

        positions = torch.arange(start, start + T, device=idx.device)  # (T,)
        if cache is not None:
            positions = cache.begin(positions)
        x = self.wte(idx)  # (B, T, C)
        rotary = None
        if self.rotary is not None:
            rotary = self.rotary[:, :T] if cache is None else self.rotary[:, positions]
        else:
            x = x + self.wpe(positions)
        x = self.drop(x)
        for block in self.h:
            x = block(x, cache, rotary)

        if cache is not None:
            cache.end(T)
        return self.ln_f(x)


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpoint = "none"
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer.wte.weight = self.lm_head.weight  # GPT-2, after Press & Wolf 2017
        for name, p in self.named_parameters():
            self._init(name, p)

    def _init(self, name: str, p: Tensor) -> None:
        """GPT-2's initial values, section 2.3 of its paper; zeros instead where zero_init says so."""
        adds_to_residual = name.endswith("c_proj.weight")
        is_own_head = name == "lm_head.weight" and not self.config.tie_weights
        if p.dim() == 2:
            # Each block adds to the residual stream twice: scaled so that its variance does not grow with depth.
            std = 0.02 / math.sqrt(2 * self.config.n_layer) if adds_to_residual else 0.02
            nn.init.normal_(p, std=std)
            if self.config.zero_init and (adds_to_residual or is_own_head):
                nn.init.zeros_(p)
        elif name.endswith("bias"):
            nn.init.zeros_(p)

    @classmethod
    def from_state(cls, config: GPTConfig, state: dict[str, Tensor], source: str) -> GPT:
        """A model with the weights `state`. Raises ValueError, naming `source`, where they do not fit the config."""
        try:
            with torch.device("meta"):  # compares names and shapes before memory is taken
                cls(config).load_state_dict(state, assign=True)
            model = cls(config)
            if not model.lm_head.weight.is_meta:  # a rank that gets its weights from another
                model.load_state_dict(state)
        except RuntimeError as e:  # missing or misshapen tensors
            reason = " ".join(str(e).split())
            raise ValueError(f"{source}: these weights are not a GPT of {asdict(config)}: {reason[:200]}") from None
        return model

    # ---- training ----------------------------------------------------------------------------------------

    def checkpoint_activations(self, which: str) -> None:
        """What the backward pass computes again, block by block, instead of keeping it: less memory, more time.

        which: none; full, all but each block's input; selective, what is cheap to compute, see is_kept. Gradients stay
        bit-equal in a form that is not compiled. Passes without gradients, and with a cache, are left alone.
        """
        self.activation_checkpoint = which
        options: dict[str, Any] = {"preserve_rng_state": self.config.dropout > 0}
        if which == "selective":
            policy = functools.partial(is_kept, self.config.dropout)
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
        for block in self.transformer.h:
            assert isinstance(block, Block)
            block.checkpoint_options = None if which == "none" else options

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """(logits, None) without targets, (None, loss) with them: the logits of a training batch are never kept.

        idx, targets: (B, T) int64, targets of -1 are ignored; logits (B, T, V); loss: the mean, in float32.
        """
        h = self.transformer(idx)  # (B, T, C)
        if targets is None:
            return self.lm_head(h), None
        return None, linear_cross_entropy(h.flatten(0, 1), self.lm_head.weight, targets.flatten())

    def crop_block_size(self, block_size: int) -> None:
        """Shortens the context to block_size tokens by dropping what belongs to later positions."""
        if block_size > self.config.block_size:
            longest = self.config.block_size
            raise ValueError(f"block_size={block_size} exceeds the model's {longest}; try --block_size={longest}")
        self.config = replace(self.config, block_size=block_size)
        self.transformer.block_size = block_size
        if self.config.position == "learned":
            kept = self.transformer.wpe.weight[:block_size].clone()
            self.transformer.wpe = nn.Embedding.from_pretrained(kept, freeze=False)

    # ---- counting ----------------------------------------------------------------------------------------

    def num_params(self) -> int:
        """Parameters without position embeddings; a tied token embedding counts once, as the head's matrix."""
        positions = self.transformer.wpe.weight.numel() if self.config.position == "learned" else 0
        return sum(p.numel() for p in self.parameters()) - positions

    def estimate_flops(self) -> int:
        """FLOPs per trained token, forward and backward: 6N + 12·L·H·Q·T (PaLM, arXiv:2204.02311, appendix B).

        N leaves out what is looked up and not multiplied: position embeddings, a token embedding of its own.
        """
        c = self.config
        n = self.num_params() - (0 if c.tie_weights else self.transformer.wte.weight.numel())
        return 6 * n + 12 * c.n_layer * c.n_head * (c.n_embd // c.n_head) * c.block_size

    # ---- generation --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        vocab_size: int | None = None,
        use_cache: bool = True,
        watch: Callable[[Tensor], None] | None = None,
    ) -> Iterator[Tensor]:
        """Yields the next token ids (B,), max_new_tokens times, continuing the prompts idx (B, T), T >= 1.

        Row i draws from a random stream of its own, seeded with seed + i: its text does not depend on how many others
        are generated with it. temperature 0 takes the likeliest token. Ids from vocab_size on are padding and are never
        drawn. The context is the last block_size tokens; once they are all taken, learned positions shift with every
        token. Nothing cached is valid then, and each token costs a full forward pass.

        watch is called before each draw with the logits (B, vocab_size) in float32, which it must leave as they are.
        """
        limit = self.config.block_size
        streams = [torch.Generator().manual_seed(seed + i) for i in range(idx.size(0))]
        decoder = Decoder(self) if use_cache else None
        new = idx[:, -limit:]
        for _ in range(max_new_tokens):
            if decoder is not None and decoder.cache.length + new.size(1) > limit:
                decoder = None
            if decoder is not None:
                logits = decoder(new)  # (B, V)
            else:
                logits = self.lm_head(self.transformer(idx[:, -limit:])[:, -1])
            logits = logits.float()[:, :vocab_size]
            if watch is not None:
                watch(logits)
            u = torch.stack([torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams])  # (B, 1)
            new = sample_tokens(logits, u, temperature, top_k, top_p)  # (B, 1)
            idx = torch.cat((idx, new), 1)
            yield new[:, 0]


# ---- generation ----------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values of the tokens seen so far, one (B, H, block_size, D) pair per layer, and TokenShift's memory.

    static: after the prompt, each step of one token runs the same operations on the same memory, as a CUDA graph must.
    Attention then goes over all of the cache and leaves out what is not filled yet.
    """

    def __init__(self, config: GPTConfig, static: bool = False) -> None:
        self.block_size = config.block_size
        self.static = static
        self.length = 0  # tokens held; the Transformer advances it once all layers have appended
        self.seen: Tensor | None = None  # positions (block_size,) up to a static step's own
        self._position: Tensor | None = None  # of a static step's token (1,)
        self._kv: list[Any] = [None] * config.n_layer
        self._last: dict[nn.Module, Tensor] = {}

    def begin(self, positions: Tensor) -> Tensor:
        """Takes the positions (T,) of the tokens that follow, before the layers; returns those that they should use."""
        if self._position is None:
            return positions
        self.seen = torch.arange(self.block_size, device=positions.device) <= self._position
        return self._position

    def end(self, T: int) -> None:
        """Called when all layers have appended T tokens."""
        self.length += T
        if self._position is not None:
            self._position += 1
        elif self.static:
            keys, _ = self._kv[0]
            self._position = torch.full((1,), self.length, device=keys.device)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k and v (B, H, T, D) to the layer's; returns what attention goes over, each (B, H, S, D).

        S = length + T, or all of block_size in a static step.
        """
        if self._kv[layer] is None:  # allocated on first use: only then are batch, device and autocast's dtype known
            B, H, _, D = k.shape
            self._kv[layer] = (k.new_zeros(B, H, self.block_size, D), v.new_zeros(B, H, self.block_size, D))
        keys, values = self._kv[layer]
        if self._position is not None:
            keys.index_copy_(2, self._position, k)
            values.index_copy_(2, self._position, v)
            return keys, values
        end = self.length + k.size(2)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def swap_last(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Stores x for the next call; returns what `module` stored in the last one, None in its first."""
        if module not in self._last:
            self._last[module] = x.clone()
            return None
        last = self._last[module].clone()
        self._last[module].copy_(x)
        return last


class Decoder:
    """The logits that follow a prompt, and then those that follow one token more in each call, with a KV cache.

    Where steps can be replayed as a CUDA graph, the cache is static: a token has hundreds of small kernels, which a
    graph launches at once. There, linear layers are cast to autocast's dtype once: a graph would cast them again for
    each token, and must not use autocast's own copies, which come and go.
    """

    def __init__(self, model: GPT, static: bool | None = None) -> None:
        """static: None for what suits the model's device."""
        self.head = model.lm_head.weight  # (V, C)
        device = self.head.device
        self.transformer = model.transformer
        self.cache = KVCache(model.config, graphs.can_replay(device) if static is None else static)
        self._step = graphs.replayed(self._one_token, device)
        self._token: Tensor | None = None  # (B, 1), read by each static step
        self._linear: dict[str, Tensor] = {}  # weights and biases of the linear layers, in autocast's dtype

    def __call__(self, idx: Tensor) -> Tensor:
        """Logits (B, V) of what follows idx: the prompts (B, T) in the first call, then one token (B, 1) in each."""
        if self.cache.length == 0 or not self.cache.static:
            return F.linear(self.transformer(idx, self.cache)[:, -1], self.head)
        length = self.cache.length + 1
        if self._token is None:
            self._token = idx.clone()
            self._cast_linear_layers(idx.device.type)
        self._token.copy_(idx)
        logits = self._step()
        self.cache.length = length  # a replayed step runs no Python
        return logits

    def _one_token(self) -> Tensor:
        h = torch.func.functional_call(self.transformer, self._linear, (self._token, self.cache))  # (B, 1, C)
        return F.linear(h[:, -1], self.head)

    def _cast_linear_layers(self, device_type: str) -> None:
        if not torch.is_autocast_enabled(device_type):
            return
        dtype = torch.get_autocast_dtype(device_type)
        self.head = self.head.to(dtype)
        for name, module in self.transformer.named_modules():
            if isinstance(module, nn.Linear):
                for key, p in module.named_parameters():
                    self._linear[f"{name}.{key}"] = p.to(dtype)


def sample_tokens(logits: Tensor, u: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Token ids (B, 1) drawn from logits (B, V) by inverting the cumulative distribution at u (B, 1) in [0, 1).

    top_k keeps the k likeliest tokens; of these top_p keeps the fewest that reach that probability together
    (nucleus sampling, arXiv:1904.09751).
    """
    if temperature == 0:
        return logits.argmax(1, keepdim=True)
    device = logits.device
    if device.type == "mps":  # which has no float64
        logits = logits.cpu()
    # Ordered in float32: the order is the same, and there are half as many bytes to sort.
    if top_k is not None and top_k < logits.size(1):
        least = logits.topk(top_k).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < least, -torch.inf)
    order = None
    if top_p < 1:
        logits, order = logits.sort(dim=1, descending=True, stable=True)
    logits = logits.double()  # cumulative sums over 50,000 tokens round noticeably in float32
    logits = (logits - logits.amax(1, keepdim=True)) / temperature  # at most 0: no temperature overflows
    p = logits.softmax(1)  # (B, V)
    if top_p < 1:
        p = p.masked_fill(p.cumsum(1) - p >= top_p, 0.0)  # the token that crosses top_p stays
    cdf = p.cumsum(1)
    total = cdf[:, -1:]
    pick = torch.searchsorted(cdf, u.to(cdf.device) * total, right=True).clamp_(max=p.size(1) - 1)
    if order is not None:
        pick = order.gather(1, pick)
    return pick.to(device)
