"""deskGPT's network for the transformers library, for settings other than GPT-2's.

export.py copies this file into the folder that it writes; trust_remote_code=True makes transformers load it from there.
It needs nothing else of deskGPT. The parameters have the names, order and shapes of model.py's.

Shape legend: B batch, T time, S time with what is cached, C channels (n_embd), H heads, D = C // H, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

EPS = 1e-5  # of all norms
ROPE_THETA = 10000.0
ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu2": "relu2"}  # ours, and transformers'


class DeskGPTConfig(PretrainedConfig):
    """Its attributes are deskGPT's settings of the model, by their names in config.json."""

    model_type = "deskgpt"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map = {  # noqa: RUF012 (the base class has it so)
        "hidden_size": "n_embd",
        "max_position_embeddings": "block_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }


def make_norm(config: DeskGPTConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.n_embd, eps=EPS)
    return nn.LayerNorm(config.n_embd, eps=EPS, bias=config.bias)


def rotary(position_ids: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each (B, 1, T, D / 2), of the angles of positions (B, T)."""
    frequencies = ROPE_THETA ** -(torch.arange(0, D, 2, device=position_ids.device) / D)
    angles = position_ids[:, None, :, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)  # the pairs that turn together are (i, i + D / 2)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)


class Step:
    """The state of one forward pass that all layers share: positions, mask and cache."""

    def __init__(
        self, config: DeskGPTConfig, position_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None, past: int
    ) -> None:
        """position_ids (B or 1, T); attention_mask (B, S), 0 for padding; past: the tokens in the cache."""
        T = position_ids.size(1)
        self.cache = cache
        self.rotary = rotary(position_ids, config.n_embd // config.n_head) if config.position == "rope" else None
        self.real: Tensor | None = None  # (B, T, 1): 0 for padding
        at = torch.arange(past, past + T, device=position_ids.device)[:, None]  # (T, 1)
        to = torch.arange(past + T, device=position_ids.device)  # (S,)
        self.mask = (to <= at)[None, None]  # (B or 1, 1, T, S): what a query sees
        if attention_mask is not None:
            self.real = attention_mask[:, -T:, None]
            # Padding sees itself: attention over nothing would be NaN.
            self.mask = self.mask & attention_mask[:, None, None].bool() | (to == at)


def token_shift(x: Tensor, step: Step) -> Tensor:
    """Return x (B, T, C) with the first quarter of its channels from the token before, zeros if there is none."""
    n = x.size(-1) // 4
    shifted = x[:, :, :n]
    if step.real is not None:
        shifted = shifted * step.real.type_as(x)
    return torch.cat((F.pad(shifted, (0, 0, 1, 0))[:, :-1], x[:, :, n:]), -1)


class Attention(nn.Module):
    def __init__(self, config: DeskGPTConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        B, T, C = x.shape
        if self.config.token_shift:
            x = token_shift(x, step)
        q, k, v = self.c_attn(x).split(C, 2)  # each (B, T, C)
        q = q.view(B, T, self.config.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.config.n_head, -1).transpose(1, 2)
        v = v.view(B, T, self.config.n_head, -1).transpose(1, 2)
        if self.config.qk_norm:
            q = F.rms_norm(q, q.shape[-1:], eps=EPS).type_as(v)
            k = F.rms_norm(k, k.shape[-1:], eps=EPS).type_as(v)
        if step.rotary is not None:
            q = rotate(q, *step.rotary)
            k = rotate(k, *step.rotary)
        if step.cache is not None:
            k, v = step.cache.update(k, v, self.layer)
        # On MPS, torch's attention is wrong for few queries that are transposed (pytorch issue 181133), and without a
        # mask lets tokens see later ones in 16 bits (195910).
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        y = F.scaled_dot_product_attention(q, k, v, step.mask, self.config.dropout if self.training else 0.0)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: DeskGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.act = ACT2FN[ACTIVATIONS[config.activation]]
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        if self.config.token_shift:
            x = token_shift(x, step)
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: DeskGPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.attn(self.ln_1(x), step)
        return x + self.mlp(self.ln_2(x), step)


class Transformer(nn.Module):
    def __init__(self, config: DeskGPTConfig) -> None:
        super().__init__()
        self.wte: nn.Module = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)


class DeskGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config: DeskGPTConfig
    config_class = DeskGPTConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["Block"]  # noqa: RUF012 (as the base class has these)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: DeskGPTConfig) -> None:
        super().__init__(config)
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.transformer.wte = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, T, V) of what follows input_ids (B, T), and the mean loss of labels (B, T), -100 left out.

        attention_mask (B, S): 0 for padding, on the left or on the right; also of the tokens in the cache.
        """
        x = self.transformer.wte(input_ids)  # (B, T, C)
        if use_cache is None:
            use_cache = not self.training and not self.config.token_shift
        cache = past_key_values if use_cache else None
        if use_cache and cache is None:
            cache = DynamicCache()
        if cache is not None and self.config.token_shift:
            raise ValueError("a model with token_shift has no cache: use_cache=False")
        if cache is not None and cache.is_compileable:
            raise ValueError("this model has dynamic caches only: leave cache_implementation out")
        past = cache.get_seq_length() if cache is not None else 0
        T = x.size(1)
        if past + T > self.config.block_size:
            raise ValueError(f"{past + T} tokens do not fit into block_size={self.config.block_size}")
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -T:]
        elif position_ids is None:
            position_ids = torch.arange(past, past + T, device=x.device)[None]

        step = Step(self.config, position_ids, attention_mask, cache, past)
        if self.transformer.wpe is not None:
            x = x + self.transformer.wpe(position_ids)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x, step)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x[:, -logits_to_keep:])  # 0: all
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
