"""model.py for the transformers library: export.py copies both into the folder that it writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, GPT2Config, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from model import GPT, GPTConfig


class DeskGPTConfig(GPT2Config):
    """GPT-2's names for sizes, and `deskgpt`: model.py's settings."""

    model_type = "deskgpt"


class DeskGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = DeskGPTConfig
    _no_split_modules = ["Block"]  # noqa: RUF012 (as the base class has these)
    _tied_weights_keys = {"gpt.lm_head.weight": "gpt.transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: DeskGPTConfig) -> None:
        super().__init__(config)
        dtype = torch.get_default_dtype()
        # Tables such as RoPE's are made in float32: 16 bits would round the positions.
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"):  # in transformers' own context such tables have no numbers
            self.gpt = GPT(GPTConfig(**config.deskgpt["model_args"]))
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

    def get_output_embeddings(self) -> nn.Module:
        return self.gpt.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,  # (B, T): 0 for padding
        labels: Tensor | None = None,  # (B, T), -100 is left out of the loss
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Return logits (B, T, V), and the loss if there are labels.

        The tokens of a row are put together first: the model sees none of the padding, whatever it
        computes. Raises ValueError for what would be ignored.
        """
        for name in ("past_key_values", "position_ids"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(
                    "this model keeps no cache, and counts positions by attention_mask: leave "
                    f"{name} out (use_cache=False)"
                )
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        # Padding last: no token looks at later ones.
        order = (attention_mask == 0).int().argsort(dim=1, stable=True)
        x = self.gpt.transformer(input_ids.gather(1, order))  # (B, T, C)
        x = torch.zeros_like(x).scatter(1, order[:, :, None].expand_as(x), x)
        logits = self.gpt.logits(x)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutput(loss=loss, logits=logits)
