"""Our models in Hugging Face's format: the class that computes them, config.json, the names of weights.

config.json has one key of our own, "deskgpt", which transformers keeps and does not read: the model_args, from which
gpt2_weights.py knows the way back.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskgpt.compute.check import TOLERANCE, distance
from model import GPT, GPTConfig

OUR_KEY = "deskgpt"
MODELING_FILE = "modeling_deskgpt.py"  # beside this file; it has the parameters of model.py
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2"}  # ours, and GPT-2's in transformers


def is_gpt2(c: GPTConfig) -> bool:
    """Return whether transformers' GPT2LMHeadModel computes what a GPT of c does. If not, our own class does."""
    return (c.position, c.norm, c.qk_norm, c.token_shift) == ("learned", "layer", False, False)


def class_name(c: GPTConfig) -> str:
    return "GPT2LMHeadModel" if is_gpt2(c) else "DeskGPTForCausalLM"


def config_json(c: GPTConfig, end_of_text: int | None) -> dict[str, Any]:
    """Return config.json of a model; end_of_text: the id of that token, if there is one."""
    common = {
        "architectures": [class_name(c)],
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tie_weights,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,  # an id here would get no gradient if somebody trains on
        "dtype": "float32",
        OUR_KEY: {"model_args": c.as_args()},
    }
    if not is_gpt2(c):
        module = MODELING_FILE.removesuffix(".py")
        auto_map = {"AutoConfig": f"{module}.DeskGPTConfig", "AutoModelForCausalLM": f"{module}.DeskGPTForCausalLM"}
        return common | asdict(c) | {"model_type": "deskgpt", "auto_map": auto_map}
    return common | {
        "model_type": "gpt2",
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_embd": c.n_embd,
        "n_positions": c.block_size,
        "n_ctx": c.block_size,  # the same, for llama.cpp
        "activation_function": ACTIVATIONS[c.activation],
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
    }


def generation_config_json(c: GPTConfig, vocab_size: int, end_of_text: int | None) -> dict[str, Any]:
    """Return generation_config.json; vocab_size: the tokenizer's. Ids beyond it are padding, never to be drawn."""
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_text)
    padding = list(range(vocab_size, c.vocab_size))
    found = ids | {"use_cache": not c.token_shift}
    return found | {"suppress_tokens": padding} if padding else found


def is_conv1d(key: str, w: Tensor) -> bool:
    """Return whether GPT-2's class keeps this matrix as (in, out); nn.Linear has (out, in)."""
    return w.dim() == 2 and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def write_weights(path: Path, c: GPTConfig, state: dict[str, Tensor]) -> None:
    """Write our state_dict as the class has it. Raises OSError if the disk fails."""
    from safetensors.torch import save

    found: dict[str, Tensor] = {}
    for key, w in state.items():
        if key == "lm_head.weight" and c.tie_weights:
            continue
        transposed = is_gpt2(c) and is_conv1d(key, w)
        # A copy: blocks may share weights, and safetensors takes no memory of two names.
        found[key] = (w.t() if transposed else w).clone(memory_format=torch.contiguous_format)
        of_block = key.startswith(("transformer.h.", "transformer.ln_f.")) and key.endswith(".weight")
        if is_gpt2(c) and not c.bias and of_block:
            found[key.removesuffix("weight") + "bias"] = torch.zeros(w.size(0))  # which its class always has
    path.write_bytes(save(found, metadata={"format": "pt"}))


# ---- what it computes ----------------------------------------------------------------------------------------


@torch.inference_mode()
def compare(folder: Path, ours: GPT, tokens: Tensor) -> str:
    """Compare transformers' logits after each of the tokens (1, T) with model.py's; return a sentence about it.

    Raises ValueError if they differ.
    """
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: nothing was compared with model.py"
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    cls: Any = GPT2LMHeadModel
    if not is_gpt2(ours.config):
        from deskgpt.export.modeling_deskgpt import DeskGPTForCausalLM as cls  # which the folder has a copy of

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a table of what does not fit would hide our one line
    # What the class lacks, or has in another shape, is left out, and then its logits differ.
    theirs = cls.from_pretrained(folder, dtype=torch.float32, ignore_mismatched_sizes=True)
    check_same(cls.__name__, theirs.eval()(tokens).logits, ours(tokens)[0])
    return f"transformers computes the same logits as model.py after each of {tokens.numel():,} tokens"


def check_same(
    program: str, found: Tensor, expected: Tensor | None, limit: float = TOLERANCE["float32"].logits
) -> None:
    """Raise ValueError if logits (..., V) of another program are further from model.py's than rounding anywhere."""
    assert expected is not None
    error = distance(found, expected, dim=-1)
    if error > limit:
        raise ValueError(
            f"{program} does not compute what model.py does: its logits differ by {error:.2g}, and at most {limit:g} "
            "is rounding; nothing was exported. If you changed model.py beyond what docs/export.md lists, other "
            "programs cannot compute it"
        )
