"""model.py for the transformers library: export.py copies both into the folder that it writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, GPT2Config, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from deskgpt.deskgpt_ops import hidden_states
from model import GPT, GPTConfig


class DeskGPTConfig(GPT2Config):
    """GPT-2's names for sizes, and `deskgpt`: model.py's settings, and whether it generates with a
    cache.
    """

    model_type = "deskgpt"


class DeskGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = DeskGPTConfig
    _no_split_modules = ["Block"]  # noqa: RUF012 (as the base class has these)
    _supports_sdpa = True
    _tied_weights_keys = {"gpt.lm_head.weight": "gpt.transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: DeskGPTConfig) -> None:
        super().__init__(config)
        dtype = torch.get_default_dtype()
        # Of tables such as RoPE's; 16 bits would round the positions.
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"):  # in transformers' own context such tables have no numbers
            self.gpt = GPT(
                GPTConfig(**config.deskgpt["model_args"] | {"vocab_size": config.vocab_size})
            )
        torch.set_default_dtype(dtype)
        self.tables = {
            name: x.clone()
            for name, x in self.gpt.named_buffers()
            if name not in self.gpt.state_dict()
        }
        for p in self.gpt.parameters():
            p.data = p.data.to(dtype)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        for name, table in self.tables.items():
            self.gpt.get_buffer(name).copy_(table)

    def get_input_embeddings(self) -> nn.Module:
        return self.gpt.transformer.wte

    def set_input_embeddings(self, value: Any) -> None:
        self.gpt.transformer.wte = value

    def get_output_embeddings(self) -> nn.Module:
        return self.gpt.lm_head

    def set_output_embeddings(self, value: Any) -> None:
        self.gpt.lm_head = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,  # (B, S), S with what is cached: 0 for padding
        past_key_values: Any = None,
        labels: Tensor | None = None,  # (B, T), -100 is left out of the loss
        use_cache: bool | None = None,
        logits_to_keep: int = 0,  # 0: all
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if use_cache is None:
            use_cache = self.config.deskgpt["use_cache"] and not self.training
        if use_cache and not self.config.deskgpt["use_cache"]:
            raise ValueError("this model computes something else with a cache: use_cache=False")
        if kwargs.pop("position_ids", None) is not None:
            raise ValueError(
                "this model counts positions by attention_mask: leave position_ids out"
            )
        cache = (
            (past_key_values if past_key_values is not None else DynamicCache())
            if use_cache
            else None
        )
        x = hidden_states(self.gpt, input_ids, attention_mask, cache)
        logits = self.gpt.logits(x[:, -logits_to_keep:])  # (B, T, V)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
