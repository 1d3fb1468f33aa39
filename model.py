"""GPT-2 as one module, with modern choices as settings: network, loss, FLOPs count.

What you read here is what runs, in training, evaluation, sampling and export. Where something is
faster than plain torch, this file calls it (deskgpt/kernels.py). Write something else in its place,
and that is what runs (docs/hacking.md).

With GPT-2's choices, the names, order and shapes of the parameters are those of nanoGPT's `GPT`, so
its checkpoints (weights and AdamW state) load here unchanged. This file reads and writes no files,
prints nothing and picks no device.

Shape legend: B batch, T time, C channels (n_embd), H heads, D = C // H, S time of keys, V
vocabulary.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from deskgpt.kernels import (
    LayerNorm,
    RMSNorm,
    add_norm,
    causal_attention,
    checkpoint_block,
    chunked_cross_entropy,
    gelu_tanh,
    masked_attention,
    relu2,
    split_heads,
    token_shift,
)
from deskgpt.settings import AtLeast1, Fraction, Range, check_fields

if TYPE_CHECKING:
    from deskgpt.kv_cache import KVCache

# ---- settings ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Hold the settings of the model, which train.py has among its own.

    Add a setting of your own here, read it in the module that needs it, and --help, config files
    and checkpoints have it. Raises ValueError for a model that cannot be.
    """

    # model
    n_layer: Annotated[int, Range(1, 1000)] = 12  # * transformer blocks
    n_head: AtLeast1 = 12  # attention heads per block
    n_embd: Annotated[int, Range(1, 2**20)] = 768  # * width of the residual stream
    block_size: Annotated[int, Range(1, 2**30)] = 1024  # * context length in tokens
    dropout: Fraction = 0.0  # 0 for pretraining; 0.1 and more for small data
    bias: bool = False  # have biases in Linear and LayerNorm layers
    # modern choices; the defaults are GPT-2's
    position: Literal["learned", "rope"] = "learned"  # learned embeddings, or rotary (RoPE)
    norm: Literal["layer", "rms"] = "layer"  # LayerNorm, or RMSNorm, which subtracts no mean
    qk_norm: bool = False  # normalise the queries and keys of each head (RMS)
    embedding_norm: bool = False  # normalise token embeddings (RMS), for large vocabularies
    activation: Literal["gelu_tanh", "gelu", "relu2"] = "gelu_tanh"  # of the MLP; gelu is nanoGPT's
    tie_weights: bool = True  # share one matrix between token embedding and head
    zero_init: bool = False  # start residual projections and an untied head at 0
    token_shift: bool = False  # take a quarter of a block's channels from the token before

    def __post_init__(self) -> None:
        check_fields(self)
        if self.n_embd % self.n_head:
            # Each head has n_embd / n_head channels. Propose the count that is nearest.
            divisors = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            best = min(divisors, key=lambda h: abs(h - self.n_head))
            raise ValueError(
                f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}; try "
                f"--n_head={best}"
            )
        if self.position == "rope" and self.n_embd // self.n_head % 2:  # channels turn in pairs
            raise ValueError(
                f"position=rope needs heads of an even width, not {self.n_embd // self.n_head}"
            )


# nanoGPT's model arguments, which its checkpoints have. All other settings are modern choices.
NANOGPT_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
# GPT-2's values of the modern choices. Checkpoints leave these out, so this table never changes. A
# default above may: but if it changed here too, every earlier checkpoint would compute something
# else, without a word.
GPT2_CHOICES: dict[str, Any] = {
    "position": "learned",
    "norm": "layer",
    "qk_norm": False,
    "embedding_norm": False,
    "activation": "gelu_tanh",
    "tie_weights": True,
    "zero_init": False,
    "token_shift": False,
}
MODERN_CHOICES = tuple(f.name for f in fields(ModelSettings) if f.name not in NANOGPT_ARGS)


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelSettings):
    # GPT-2's 50257, rounded up to a multiple of 128: matmuls work in whole tiles. No text has the
    # ids that this adds, and sampling never draws them.
    vocab_size: Annotated[int, Range(1, 2**31)] = 50304

    @classmethod
    def from_settings(cls, settings: ModelSettings, vocab_size: int) -> GPTConfig:
        return cls(
            vocab_size=vocab_size,
            **{f.name: getattr(settings, f.name) for f in fields(ModelSettings)},
        )

    @classmethod
    def from_args(cls, model_args: dict[str, Any], source: str) -> GPTConfig:
        """Return the configuration in a checkpoint.

        Raises ValueError, naming `source`, if it is not one of ours.
        """
        try:
            return cls(**{**GPT2_CHOICES, **model_args})
        except (TypeError, ValueError) as e:
            # An unknown name, or a value of a wrong type or out of range.
            found = textwrap.shorten(str(model_args), 300, placeholder=" ...")
            why = textwrap.shorten(str(e), 300, placeholder=" ...")
            raise ValueError(
                f"{source}: model_args={found} do not describe a GPT-2 ({why})"
            ) from None

    def as_args(self) -> dict[str, Any]:
        """Return the arguments of `from_args`. Choices that are GPT-2's are left out, because
        nanoGPT passes all that it finds to its own GPTConfig.
        """
        return {k: v for k, v in asdict(self).items() if (k, v) not in GPT2_CHOICES.items()}


# ---- attention -----------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, dropout: float) -> Tensor:
    """Return causal attention (B, H, T, D) of q (B, H, T, D) over k, v (B, H, S, D).

    Training, evaluation and sampling all come here. To let a query see other keys, as with a
    window, change both calls: the first computes whole texts, the second new tokens with a cache,
    where a query's position is not its row. A single new token is the last one, so it sees all keys
    and needs no mask, unless the cache returns slots that nothing was written to yet.
    """
    T = q.size(2)
    if k.size(2) == T:  # a whole text
        return causal_attention(q, k, v, dropout)
    # New tokens after those in the cache; a single one may look at all of them.
    sees_all = T == 1 and context.cache is not None and not context.cache.returns_all_slots
    mask = None if sees_all else context.key_positions <= context.positions[:, None]  # (T, S)
    return masked_attention(q, k, v, mask, dropout)


def rotary_table(T: int, D: int) -> Tensor:
    """Return cosines and sines (2, T, D / 2) of the angles of T positions in heads of width D
    (RoFormer, arXiv:2104.09864).

    Pairs of channels turn at different rates, one radian per token at most: fast ones tell
    neighbours apart, slow ones the beginning of a text from its end.
    """
    frequencies = 10000.0 ** -(torch.arange(0, D, 2) / D)  # (D / 2,)
    angles = torch.outer(torch.arange(T), frequencies)  # (T, D / 2)
    return torch.stack((angles.cos(), angles.sin()))


# ---- network -------------------------------------------------------------------------------------


@dataclass
class ForwardContext:
    """Hold the values that all blocks share in a forward pass. Add those that yours need, too."""

    tokens: Tensor  # ids (B, T)
    positions: Tensor  # of the tokens (T,)
    key_positions: Tensor  # of all keys, with those in the cache (S,)
    rotary: Tensor | None  # (2, T, D / 2) cosines and sines of rotary positions
    cache: KVCache | None = None


def make_norm(config: GPTConfig) -> nn.Module:
    """Return a norm of the residual stream (.., C), with gains of its own."""
    if config.norm == "layer":
        return LayerNorm(config.n_embd, bias=config.bias)
    if config.norm == "rms":
        return RMSNorm(config.n_embd, eps=1e-5)
    raise ValueError(f"norm={config.norm} is not computed: write it in make_norm of model.py")


def activation(x: Tensor, name: str) -> Tensor:
    """Return gelu_tanh (GPT-2's), gelu (nanoGPT's) or relu2 of x, elementwise.

    For another one, add its name to ModelSettings.activation and its line here.
    """
    if name == "gelu_tanh":
        return gelu_tanh(x)
    if name == "gelu":
        return F.gelu(x)
    if name == "relu2":
        return relu2(x)
    raise ValueError(f"activation={name} is not computed: write it in activation of model.py")


class TokenShift(nn.Module):
    """Take the first quarter of the channels from the token before, zeros for the first token.

    A block then sees pairs of letters before any head has learned to look back (after RWKV,
    arXiv:2305.13048).
    """

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        n = x.size(-1) // 4
        # With a cache, the token before may be one of an earlier call. Training has none.
        before = None
        if context.cache is not None:
            before = context.cache.swap_last_input(self, x[:, -1:, :n])
        return token_shift(x, n, before)


class CausalSelfAttention(nn.Module):
    """Let each token gather from the tokens up to it, with n_head sets of weights.

    Queries, keys and values are one matmul: three small ones would each wait to be launched. With
    qk_norm the scores stay below sqrt(D), however large the weights grow.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # One matmul computes queries, keys and values.
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.dropout = config.dropout  # of attention weights, within the kernel
        self.qk_norm = config.qk_norm
        self.shift = TokenShift() if config.token_shift else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        B, T, C = x.shape
        if self.shift is not None:
            x = self.shift(x, context)

        # Each (B, H, T, D); queries and keys are normalised and rotated, too.
        q, k, v = split_heads(self.c_attn(x), self.n_head, self.qk_norm, context.rotary)
        if context.cache is not None:
            k, v = context.cache.append(self, k, v)  # (B, H, S, D)

        dropout = self.dropout if self.training else 0.0
        y = attention(q, k, v, context, dropout)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Transform each token alone, through four times as many channels."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = config.activation
        self.shift = TokenShift() if config.token_shift else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        if self.shift is not None:
            x = self.shift(x, context)
        x = activation(self.c_fc(x), self.activation)  # (B, T, 4C), the widest tensor of a block
        return self.dropout(self.c_proj(x))  # (B, T, C)


class Block(nn.Module):
    """Add attention and MLP to the residual stream, each on a normalised copy of it.

    The stream itself is never normalised in between (pre-norm), so gradients reach the first block
    undiminished.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        # Tokens exchange what they know: x + attention, and a normalised copy of that.
        x, h = add_norm(x, self.attn(self.ln_1(x), context), self.ln_2)
        return x + self.mlp(h, context)  # and each thinks about it alone


class Transformer(nn.Module):
    """Compute everything from token ids up to the final norm."""

    rotary: Tensor | None  # cosines and sines of rotary positions (2, block_size, D / 2)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding_norm = config.embedding_norm
        self.block_size = config.block_size
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        rotary = None
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        elif config.position == "rope":
            rotary = rotary_table(config.block_size, config.n_embd // config.n_head)
        else:
            raise ValueError(
                f"position={config.position} is not computed: write it in Transformer of model.py"
            )
        # Not in checkpoints: it follows from the settings. nanoGPT would not know it.
        self.register_buffer("rotary", rotary, persistent=False)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = make_norm(config)
        # How it is computed; train.py sets these (deskgpt/compiling.py) and logs them.
        # The dtype of the residual stream; None leaves that of the embedding, float32.
        self.residual_dtype: torch.dtype | None = None
        self.recompute = "none"  # full: the backward pass computes the blocks' activations again

    def forward(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the final hidden states (B, T, C) of token ids idx (B, T), which follow those in
        the cache.
        """
        T = idx.size(1)
        length = T if cache is None else cache.length + T
        if length > self.block_size:
            raise ValueError(f"{length} tokens do not fit into block_size={self.block_size}")

        if cache is None:
            positions = key_positions = torch.arange(T, device=idx.device)  # (T,)
        else:
            positions, key_positions = cache.positions(T, idx.device)  # (T,), (S,)
        x = self.wte(idx)  # (B, T, C)
        if self.embedding_norm:  # all tokens enter at one length, rare ones too
            x = F.rms_norm(x, x.shape[-1:], eps=1e-5)
        if self.rotary is None:
            x = x + self.wpe(positions)
        rotary = None if self.rotary is None else self.rotary[:, positions]
        context = ForwardContext(idx, positions, key_positions, rotary, cache)
        x = self.drop(x).to(self.residual_dtype or x.dtype)
        for block in self.h:
            if self.recompute != "none" and torch.is_grad_enabled():
                x = checkpoint_block(block, x, context)
            else:
                x = block(x, context)
        x = self.ln_f(x)
        # autocast computes the norm in float32. Cast it here, or a float32 copy stays for the loss.
        return x if self.residual_dtype is None else x.to(self.residual_dtype)


class GPT(nn.Module):
    """Predict the next token: a transformer, and a head that turns its states into logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        # How the loss is computed; train.py sets these (deskgpt/compiling.py) and logs them.
        self.compile_loss = False  # its softmax as one graph of torch.compile
        self.loss_chunks = 1  # of a micro-batch on a card
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer.wte.weight = self.lm_head.weight  # GPT-2, after Press & Wolf 2017
        for name, module in self.named_modules():
            # A tied head was already drawn as transformer.wte: twice would spend random numbers.
            is_tied_head = module is self.lm_head and config.tie_weights
            if isinstance(module, nn.Linear | nn.Embedding) and not is_tied_head:
                self._init(name, module)

    def _init(self, name: str, module: nn.Linear | nn.Embedding) -> None:
        """Set GPT-2's initial values (section 2.3 of its paper), or zeros if zero_init says so."""
        # By name: a layer of yours that writes into the residual stream should end in c_proj, too.
        adds_to_residual = name.endswith("c_proj")
        # Each block adds to the stream twice: without this scale its variance grows with depth.
        std = 0.02 / math.sqrt(2 * self.config.n_layer) if adds_to_residual else 0.02
        nn.init.normal_(module.weight, std=std)
        if self.config.zero_init and (adds_to_residual or module is self.lm_head):
            nn.init.zeros_(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return (logits, None) without targets, and (None, loss) with them: the logits of a
        training batch are never kept.

        idx, targets: (B, T) int64, targets of -1 are ignored; logits (B, T, V). A third result may
        be a dict of further losses by name, each a scalar tensor. Training adds them to the loss,
        evaluation does not, and the log has each under its name.
        """
        x = self.transformer(idx)  # (B, T, C)
        if targets is None:
            return self.logits(x), None
        return None, self.loss(x, targets)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states x (..., C), each token alone.

        The loss and generation both call this, so a softcap or a temperature belongs here.
        """
        return self.lm_head(x)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return F.cross_entropy(self.logits(x), targets, ignore_index=-1) in float32, without
        keeping logits; 0 if there are no targets.

        With GPT-2's vocabulary the logits are the largest tensor of a step: 50,304 numbers a token,
        where a hidden state has 768. A card computes all of them at once if the step is then
        predicted to fit its memory, or as few chunks as fit (memory.py: with_fewest_chunks). A CPU
        computes chunks of a fixed size. Write F.cross_entropy here if you want torch's own.
        """
        V = self.config.vocab_size
        return chunked_cross_entropy(
            self.logits, x, targets, V, self.loss_chunks, self.compile_loss
        )

    # ---- making and counting ---------------------------------------------------------------------

    @classmethod
    def without_storage(cls, config: GPTConfig) -> GPT:
        """Return a model whose parameters have shapes but no memory: of any size, at once.

        A model that reads numbers of its tensors as it is made, as by .item(), takes its memory for
        a moment. The random numbers that it draws then are put back.
        """
        try:
            with torch.device("meta"):
                return cls(config)
        except (RuntimeError, TypeError):  # there are no numbers on the device meta
            with torch.random.fork_rng(devices=()):
                model = cls(config)
        torch.__future__.set_swap_module_params_on_conversion(True)  # tied weights stay tied
        try:
            return model.to("meta")
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    @classmethod
    def from_state(cls, config: GPTConfig, state: dict[str, Tensor], source: str) -> GPT:
        """Return a model with the weights `state`.

        Raises ValueError, naming `source`, if they do not fit.
        """
        try:
            # Compare the shapes first, on a model without memory.
            cls.without_storage(config).load_state_dict(state, assign=True)
            model = cls(config)
            if not model.lm_head.weight.is_meta:  # a rank that gets its weights from another
                model.load_state_dict(state)
        except RuntimeError as e:  # missing or misshapen tensors
            why = textwrap.shorten(str(e), 200, placeholder=" ...")
            raise ValueError(
                f"{source}: these weights are not a GPT of {asdict(config)}: {why}"
            ) from None
        return model

    def crop_block_size(self, block_size: int) -> None:
        """Shorten the context to block_size tokens by cropping the position embeddings."""
        if block_size > self.config.block_size:
            longest = self.config.block_size
            raise ValueError(
                f"block_size={block_size} exceeds the model's {longest}; try --block_size={longest}"
            )
        if block_size == self.config.block_size:
            return  # leave the embeddings alone: they may have a hook
        self.config = replace(self.config, block_size=block_size)
        self.transformer.block_size = block_size
        if hasattr(self.transformer, "wpe"):
            wpe = self.transformer.wpe.weight
            kept = wpe[:block_size].clone()
            self.transformer.wpe = nn.Embedding.from_pretrained(kept, freeze=not wpe.requires_grad)

    def num_params(self) -> int:
        """Return the number of parameters without position embeddings, as nanoGPT counts them: a
        tied token embedding counts once, as the head's matrix.
        """
        wpe = getattr(self.transformer, "wpe", None)  # None for RoPE, or if you took it out
        positions = 0 if wpe is None else wpe.weight.numel()
        return sum(p.numel() for p in self.parameters()) - positions

    def estimate_flops(self) -> int:
        """Return the FLOPs per trained token, forward and backward: 6N + 12·L·H·Q·T (PaLM,
        arXiv:2204.02311, appendix B).

        MFU rests on it: if you change the matmuls, change this, or your MFU is another model's. N
        counts the parameters of matmuls: an embedding only if it is also the head.
        """
        tables = {m.weight for m in self.modules() if isinstance(m, nn.Embedding)} - {
            self.lm_head.weight
        }
        n = sum(p.numel() for p in self.parameters()) - sum(table.numel() for table in tables)
        c = self.config
        return 6 * n + 12 * c.n_layer * c.n_head * (c.n_embd // c.n_head) * c.block_size

    # ---- generation ------------------------------------------------------------------------------

    def next_logits(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the logits (B, V) of the token that follows idx (B, T), of its last block_size
        tokens. deskgpt/engine.py draws from them.

        cache: of the call before. Where idx continues that call's, only the new tokens are
        computed.
        """
        idx = idx[:, -self.config.block_size :]
        if cache is None:
            return self.logits(self.transformer(idx)[:, -1])
        return cache.run(lambda new: self.logits(self.transformer(new, cache)[:, -1]), idx)
