"""GPT-2 as one module, with modern choices as settings: network, loss, FLOPs count, generation with a KV cache.

With GPT-2's choices, parameter names, order and shapes are those of nanoGPT's `GPT`, so its checkpoints (weights and
AdamW state) load here as they are. Nothing in this file reads or writes files, prints, or picks a device.

Shape legend: B batch, T time, C channels (n_embd), H heads, D = C // H, V vocabulary, N = B * T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# Logits of at most this many elements are made in one piece; more are made, used and dropped in chunks.
# 2^25 are 667 tokens of GPT-2's vocabulary, 134 MB in float32; smaller chunks cost speed, larger ones only memory
# (bench/results/2026-11-22-loss.md).
LOGITS_CHUNK = 1 << 25

# Explicit attention keeps B·H·T·T weights: from here on too many to try it.
LONGEST_EXPLICIT = 1024

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # what GPT-2 was trained with
    "gelu": F.gelu,  # nanoGPT's
    "relu2": lambda x: F.relu(x).square(),  # Primer, arXiv:2109.08668
}

# The settings of GPTConfig that nanoGPT's does not have.
CHOICES = ("position", "norm", "qk_norm", "activation", "tie_weights", "zero_init", "token_shift")


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 1024  # longest context, in tokens
    vocab_size: int = 50304  # GPT-2's 50257 rounded up to a multiple of 64: matmul tiles are whole
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # biases in Linear and LayerNorm, as GPT-2 has them
    position: Literal["learned", "rope"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    qk_norm: bool = False  # RMS norm of each head's queries and keys
    activation: Literal["gelu_tanh", "gelu", "relu2"] = "gelu_tanh"
    tie_weights: bool = True  # one matrix for token embedding and head
    zero_init: bool = False  # what adds to the residual stream, and an untied head, begins as zero
    token_shift: bool = False  # blocks see a quarter of the channels of the token before in place of their own

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value} must be a whole number of at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.n_embd % self.n_head:
            divisors = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            best = min(divisors, key=lambda h: abs(h - self.n_head))
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}; try --n_head={best}")
        if self.position == "rope" and self.n_embd // self.n_head % 2:
            raise ValueError(f"position=rope needs heads of an even width, not {self.n_embd // self.n_head}")
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(get_args(kind))}")

    @classmethod
    def of(cls, model_args: dict[str, Any], source: str) -> GPTConfig:
        """The configuration that a checkpoint holds. Raises ValueError, naming `source`, where it is none of ours."""
        try:
            return cls(**model_args)
        except (TypeError, ValueError) as e:  # a name that is not ours, a value of another type or out of range
            raise ValueError(f"{source}: model_args={model_args} are not those of a GPT-2 ({e})") from None

    def as_args(self) -> dict[str, Any]:
        """What `of` takes back: without the choices that are GPT-2's, so that nanoGPT reads what a GPT-2 has."""
        plain = {f.name: f.default for f in fields(self) if f.name in CHOICES}
        return {k: v for k, v in asdict(self).items() if k not in plain or v != plain[k]}


class KVCache:
    """Keys and values of the tokens seen so far, one (B, H, block_size, D) pair per layer; what TokenShift needs."""

    def __init__(self, config: GPTConfig) -> None:
        self.block_size = config.block_size
        self.length = 0  # tokens held; the Transformer advances it once all layers have appended
        self._kv: list[tuple[Tensor, Tensor] | None] = [None] * config.n_layer
        self._before: dict[nn.Module, Tensor] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v (B, H, T, D) behind what the layer holds; returns all of it (B, H, length + T, D)."""
        kv = self._kv[layer]
        if kv is None:  # allocated on first use: only then are batch, device and autocast's dtype known
            B, H, _, D = k.shape
            kv = self._kv[layer] = (k.new_empty(B, H, self.block_size, D), v.new_empty(B, H, self.block_size, D))
        end = self.length + k.size(2)
        kv[0][:, :, self.length : end] = k
        kv[1][:, :, self.length : end] = v
        return kv[0][:, :, :end], kv[1][:, :, :end]

    def before(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """What `module` gave here last time; stores x for the next."""
        last, self._before[module] = self._before.get(module), x
        return last


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.n_embd, eps=1e-5)
    return nn.LayerNorm(config.n_embd, bias=config.bias)


class TokenShift(nn.Module):
    """Takes the first quarter of the channels from the token before, zeros for the first (RWKV, arXiv:2305.13048)."""

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        n = x.size(-1) // 4
        own, kept = x[:, :, :n], x[:, :, n:]
        first = cache.before(self, own[:, -1:]) if cache is not None else None
        first = torch.zeros_like(own[:, :1]) if first is None else first
        return torch.cat((torch.cat((first, own[:, :-1]), 1), kept), -1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) of x (B, H, T, D); rotary (2, T, D / 2): cos and sin."""
    cos, sin = rotary
    a, b = x.float().chunk(2, -1)  # the pairs that turn together are (i, i + D / 2)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)


def causal_mask(T: int) -> Tensor:
    """What explicit_attention adds to its scores (T, T): 0, and -infinity above the diagonal."""
    return torch.full((T, T), -torch.inf).triu(1)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Causal attention of q, k, v (B, H, T, D) as plain matmuls; mask (T, T) is 0, above the diagonal -infinity."""
    T, D = q.shape[-2:]
    q, parts = q * D**-0.5, []
    rows = max(128, T // 4) if T >= 256 else T  # blocks of queries, which never see the keys behind them
    for first in range(0, T, rows):
        end = min(first + rows, T)
        scores = (q[:, :, first:end] @ k[:, :, :end].transpose(-2, -1)).float()
        parts.append((scores + mask[first:end, :end]).softmax(-1).type_as(v) @ v[:, :, :end])
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k, v in one matmul
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.dropout, self.layer, self.qk_norm = config.n_head, config.dropout, layer, config.qk_norm
        self.shift = TokenShift() if config.token_shift else None

    def forward(self, x: Tensor, cache: KVCache | None, rotary: Tensor | None, mask: Tensor | None) -> Tensor:
        B, T, C = x.shape
        if self.shift is not None:
            x = self.shift(x, cache)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, 2))  # (B, H, T, D)
        if self.qk_norm:
            q, k = (F.rms_norm(t, t.shape[-1:], eps=1e-5).type_as(v) for t in (q, k))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        dropout = self.dropout if self.training else 0.0
        if mask is not None and not dropout and torch.is_grad_enabled():
            y = explicit_attention(q, k, v, mask)
        elif T > 1:  # starts at position 0 (an `if`, since torch.compile takes no symbolic is_causal)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:  # a single token may look at everything in the cache
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]
        self.shift = TokenShift() if config.token_shift else None

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        if self.shift is not None:
            x = self.shift(x, cache)
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None, rotary: Tensor | None, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, rotary, mask)
        return x + self.mlp(self.ln_2(x), cache)


def chunk_cross_entropy(h: Tensor, w: Tensor, targets: Tensor, grad_h: Tensor, grad_w: Tensor) -> Tensor:
    """Sum of the cross-entropy of `h @ w.T`; its gradient by h goes into grad_h, that by w is added to grad_w.

    h, grad_h (chunk, C), w, grad_w (V, C), targets (chunk,) with -1 ignored; empty grad_w: no gradients wanted.
    """
    kept, at = targets >= 0, (torch.arange(len(h), device=h.device), targets.clamp(min=0))  # at: each row's target
    log_p = torch.log_softmax(h @ w.t(), 1, dtype=torch.float32)  # (chunk, V)
    log_p_target = log_p[at]
    if grad_w.numel():
        # d loss / d logits = softmax - onehot(target); ignored rows drop out of the narrow factors
        g = log_p.exp_().to(h.dtype)
        g[at] = log_p_target.expm1().to(h.dtype)
        grad_h.copy_((g @ w) * kept[:, None])
        grad_w += g.t() @ (h * kept[:, None])
    return -(log_p_target * kept).sum()


def chunked_cross_entropy(
    h: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, chunk: int, needs_grad: bool, chunk_loss: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the cross-entropy of `h @ weight.T` against `targets`, and its gradients, holding one chunk of logits.

    The gradients of a chunk are taken while its logits exist, so nothing of size (N, V) is kept for a backward pass
    and no matmul runs twice. h (N, C) and weight (V, C) in any float dtype, targets (N,) with -1 ignored; matmuls run
    in `dtype`, softmax and sums in float32. Gradients as h and weight, empty unless needs_grad. Own code because
    torch 2.13's `linear_cross_entropy`, no faster, rounds a bfloat16 loss to 3 digits (torch 2.11 has none), and
    recomputing with `torch.utils.checkpoint` pays for a fourth matmul: bench/results/2026-11-22-loss.md. chunk_loss
    is chunk_cross_entropy, or that compiled.
    """
    with torch.autocast(h.device.type, enabled=False):
        w, loss = weight.to(dtype), torch.zeros((), dtype=torch.float32, device=h.device)
        grad_h, grad_w = (torch.zeros_like(t) if needs_grad else t.new_empty(0) for t in (h, weight))
        for i in range(0, h.size(0), chunk):
            part = slice(i, i + chunk)
            loss += chunk_loss(h[part].to(dtype), w, targets[part], grad_h[part], grad_w)
    return loss, grad_h, grad_w


class LinearCrossEntropy(torch.autograd.Function):
    """chunked_cross_entropy as autograd knows it; needs_grad, since in here gradients are always off."""

    @staticmethod
    def forward(ctx, h, weight, targets, dtype, chunk, needs_grad):
        loss, *grads = chunked_cross_entropy(h, weight, targets, dtype, chunk, needs_grad, chunk_cross_entropy)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_h, grad_w = ctx.saved_tensors
        return grad_h.mul_(grad_loss), grad_w.mul_(grad_loss), None, None, None, None


class Transformer(nn.Module):
    """Everything up to the final norm."""

    rotary: Tensor | None  # cosines and sines of rotary positions (2, block_size, D / 2)
    mask: Tensor | None  # of explicit attention (block_size, block_size), where training takes that

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        rotary = None
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        else:
            D = config.n_embd // config.n_head
            angles = torch.outer(torch.arange(config.block_size), 10000.0 ** -(torch.arange(0, D, 2) / D))  # (T, D / 2)
            rotary = torch.stack((angles.cos(), angles.sin()))
        self.register_buffer("rotary", rotary, persistent=False)
        self.register_buffer("mask", None, persistent=False)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)

    def forward(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Final hidden states (B, T, C) of token ids (B, T); a cache that holds something takes one token more."""
        start = cache.length if cache is not None else 0
        T, limit = idx.size(1), self.block_size
        assert start == 0 or T == 1
        if start + T > limit:
            raise ValueError(f"{start + T} tokens do not fit into block_size={limit}")
        x = self.wte(idx)
        rotary = mask = None
        if self.rotary is not None:
            rotary = self.rotary[:, start : start + T]
        else:
            x = x + self.wpe(torch.arange(start, start + T, device=idx.device))
        if self.mask is not None and T > 1 and idx.device.type == "cpu":
            mask = self.mask[:T, :T]
        x = self.drop(x)
        for block in self.h:
            x = block(x, cache, rotary, mask)
        if cache is not None:
            cache.length += T
        return self.ln_f(x)


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.chunked_loss: Callable[..., Tensor] = LinearCrossEntropy.apply
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer.wte.weight = self.lm_head.weight  # GPT-2, after Press & Wolf 2017
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Each block adds to the residual stream twice: scaled so that its variance does not grow with
                # depth (GPT-2 paper, section 2.3).
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02)
                if config.zero_init and (residual or (name == "lm_head.weight" and not config.tie_weights)):
                    nn.init.zeros_(p)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    @classmethod
    def from_state(cls, config: GPTConfig, state: dict[str, Tensor], source: str) -> GPT:
        """A model with the weights `state`. Raises ValueError, naming `source`, where they do not fit the config."""
        model = cls(config)
        try:
            model.load_state_dict(state)
        except RuntimeError as e:  # missing or misshapen tensors
            reason = " ".join(str(e).split())
            raise ValueError(f"{source}: these weights are not a GPT of {asdict(config)}: {reason[:200]}") from None
        return model

    # ---- training ----------------------------------------------------------------------------------------

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """(logits, None) without targets, (None, loss) with them: the logits of a training batch are never kept.

        idx, targets: (B, T) int64, targets of -1 are ignored; logits (B, T, V); loss: the mean, in float32.
        """
        h = self.transformer(idx)
        if targets is None:
            return self.lm_head(h), None
        h, targets = h.flatten(0, 1), targets.flatten()  # (N, C), (N,)
        if h.size(0) * self.config.vocab_size <= LOGITS_CHUNK:
            return None, F.cross_entropy(self.lm_head(h).float(), targets, ignore_index=-1)
        kind = h.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
        chunk = -(-h.size(0) // -(-h.size(0) * self.config.vocab_size // LOGITS_CHUNK))  # all of about the same size
        total = self.chunked_loss(h, self.lm_head.weight, targets, dtype, chunk, torch.is_grad_enabled())
        return None, total / (targets >= 0).sum()

    def crop_block_size(self, block_size: int) -> None:
        """Shortens the context to block_size tokens by dropping what belongs to later positions."""
        if block_size > self.config.block_size:
            longest = self.config.block_size
            raise ValueError(f"block_size={block_size} exceeds the model's {longest}; try --block_size={longest}")
        self.config = replace(self.config, block_size=block_size)
        self.transformer.block_size, self.transformer.mask = block_size, None
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
    ) -> Iterator[Tensor]:
        """Yields the next token ids (B,), max_new_tokens times, continuing the prompts idx (B, T), T >= 1.

        Row i draws from a random stream of its own, seeded with seed + i: its text does not depend on how many
        others are generated beside it. temperature 0 takes the likeliest token. vocab_size: ids from there on
        are padding and are never drawn. The context is the last block_size tokens; once they are all taken,
        learned positions shift with every token, nothing cached holds any longer, and each token costs a full
        forward pass.
        """
        limit = self.config.block_size
        streams = [torch.Generator().manual_seed(seed + i) for i in range(idx.size(0))]
        cache = KVCache(self.config) if use_cache else None
        new = idx[:, -limit:]
        for _ in range(max_new_tokens):
            if cache is not None and cache.length + new.size(1) > limit:
                cache = None
            h = self.transformer(new if cache is not None else idx[:, -limit:], cache)
            logits = self.lm_head(h[:, -1]).float()[:, :vocab_size]  # (B, V)
            u = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in streams])  # (B, 1)
            new = sample_tokens(logits, u, temperature, top_k, top_p)
            idx = torch.cat((idx, new), 1)
            yield new[:, 0]


def sample_tokens(logits: Tensor, u: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Token ids (B, 1) drawn from logits (B, V) by inverting the cumulative distribution at u (B, 1) in [0, 1).

    top_k keeps the k likeliest tokens; of these top_p keeps the fewest that reach that probability together
    (nucleus sampling, arXiv:1904.09751).
    """
    if temperature == 0:
        return logits.argmax(1, keepdim=True)
    # In float64: cumulative sums over 50,000 tokens round noticeably in float32. MPS has none: there on the CPU.
    device = logits.device
    logits = (logits.cpu() if device.type == "mps" else logits).double()
    logits = (logits - logits.amax(1, keepdim=True)) / temperature  # at most 0: no temperature overflows
    if top_k is not None and top_k < logits.size(1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    p = logits.softmax(1)
    if top_p < 1:
        p, order = p.sort(dim=1, descending=True, stable=True)
        p = p.masked_fill(p.cumsum(1) - p >= top_p, 0.0)  # the token that crosses top_p stays
    cdf = p.cumsum(1)
    pick = torch.searchsorted(cdf, u.to(cdf.device) * cdf[:, -1:], right=True).clamp_(max=p.size(1) - 1)
    return (order.gather(1, pick) if top_p < 1 else pick).to(device)
