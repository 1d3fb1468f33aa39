"""Our models in Hugging Face's format: the class that holds the settings, config.json, the names of weights; and back.

config.json has one key of our own, "deskgpt", which transformers keeps and does not read: the model_args, from which
the way back is known.

Shape legend: C channels (n_embd), D = C // H.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from model import GPT, GPTConfig

OUR_KEY = "deskgpt"
MODELING_FILE = "modeling_deskgpt.py"  # beside this file

# ---- classes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Class:
    """A class of transformers, or that of our own modelling file."""

    name: str
    model_type: str
    activations: dict[str, str]  # ours to its own names
    parts: dict[str, str] | None = None  # names in a block, where they are named as Llama's; None: as GPT-2's
    has_biases: bool = False  # always: where our model has none, they are zeros
    is_own: bool = False


ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu2": "relu2"}
UNGATED = {"attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
STARCODER_NAMES = {"attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.c_fc", "mlp.c_proj": "mlp.c_proj"}
LLAMA_NORMS = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
APERTUS_NORMS = {"ln_1": "attention_layernorm", "ln_2": "feedforward_layernorm"}

GPT2 = Class("GPT2LMHeadModel", "gpt2", ACTIVATIONS | {"gelu_tanh": "gelu_new"}, has_biases=True)
ARCEE = Class("ArceeForCausalLM", "arcee", ACTIVATIONS, UNGATED | LLAMA_NORMS)
APERTUS = Class("ApertusForCausalLM", "apertus", ACTIVATIONS, UNGATED | APERTUS_NORMS)
STARCODER2 = Class("Starcoder2ForCausalLM", "starcoder2", ACTIVATIONS, STARCODER_NAMES | LLAMA_NORMS, has_biases=True)
OWN = Class("DeskGPTForCausalLM", "deskgpt", {}, is_own=True)


def class_of(c: GPTConfig) -> Class:
    """The class of transformers that computes exactly what a GPT of c does, OWN where there is none."""
    choices = (c.position, c.norm, c.qk_norm)
    if c.token_shift:
        return OWN
    if choices == ("learned", "layer", False):
        return GPT2
    if choices == ("rope", "layer", False):
        return STARCODER2
    if choices == ("rope", "rms", False):
        return ARCEE
    if choices == ("rope", "rms", True) and not c.bias:  # Apertus' MLP has no biases
        return APERTUS
    return OWN


def why_own(c: GPTConfig) -> str:
    """The settings that no class of transformers has together, as the user would write them."""
    if c.token_shift:
        return "token_shift=True"
    return f"position={c.position}, norm={c.norm}, qk_norm={c.qk_norm}, bias={c.bias}"


# ---- config.json ---------------------------------------------------------------------------------------------


def config_json(c: GPTConfig, end_of_text: int | None) -> dict[str, Any]:
    """What config.json says of a model; end_of_text: the id of that token, if there is one."""
    kind = class_of(c)
    common = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tie_weights,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,  # an id here would get no gradient where somebody trains on
        "dtype": "float32",
        OUR_KEY: {"model_args": c.as_args()},
    }
    if kind.is_own:
        module = MODELING_FILE.removesuffix(".py")
        names = ("n_layer", "n_head", "n_embd", "block_size", "dropout", "bias", "position", "norm", "qk_norm")
        settings = {name: getattr(c, name) for name in (*names, "activation", "token_shift")}
        auto_map = {"AutoConfig": f"{module}.DeskGPTConfig", "AutoModelForCausalLM": f"{module}.{kind.name}"}
        return common | settings | {"auto_map": auto_map}
    act = kind.activations[c.activation]
    if kind is GPT2:
        return common | {
            "n_layer": c.n_layer,
            "n_head": c.n_head,
            "n_embd": c.n_embd,
            "n_positions": c.block_size,
            "n_ctx": c.block_size,  # the same, for llama.cpp
            "activation_function": act,
            "layer_norm_epsilon": 1e-5,
            "embd_pdrop": c.dropout,
            "attn_pdrop": c.dropout,
            "resid_pdrop": c.dropout,
        }
    of_class: dict[str, dict[str, Any]] = {
        "arcee": {"rms_norm_eps": 1e-5, "attention_bias": c.bias, "mlp_bias": c.bias},
        "apertus": {"rms_norm_eps": 1e-5, "attention_bias": False},
        "starcoder2": {
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "residual_dropout": c.dropout,
            "embedding_dropout": c.dropout,
            "sliding_window": None,
        },
    }
    return common | {
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_head,
        "hidden_size": c.n_embd,
        "intermediate_size": 4 * c.n_embd,
        "max_position_embeddings": c.block_size,
        "hidden_act": act,
        "attention_dropout": c.dropout,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,  # these two are what transformers before 5 reads
        "rope_scaling": None,
        **of_class[kind.model_type],
    }


def generation_config_json(c: GPTConfig, vocab_size: int, end_of_text: int | None) -> dict[str, Any]:
    """What generation_config.json says; vocab_size: the tokenizer's. Rows beyond it are padding, never to be drawn."""
    ids = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
    padding = list(range(vocab_size, c.vocab_size))
    return ids | ({"suppress_tokens": padding} if padding else {})


# ---- weights -------------------------------------------------------------------------------------------------


@lru_cache(4)  # it takes a second for the largest GPT-2
def shapes_of(c: GPTConfig) -> dict[str, torch.Size]:
    """Our parameters' names and shapes; a tied head is left out."""
    shapes = {name: p.shape for name, p in GPT.without_storage(c).state_dict().items()}
    if c.tie_weights:
        del shapes["lm_head.weight"]
    return shapes


def their_names(key: str, kind: Class) -> list[str]:
    """The names of the class's parameters which together, one below the other, are ours of this name."""
    if kind.parts is None or key == "lm_head.weight":
        return [key]
    if not key.startswith("transformer.h."):
        names = {"transformer.wte.": "model.embed_tokens.", "transformer.ln_f.": "model.norm."}
        part, _, end = key.rpartition(".")
        return [names[f"{part}."] + end]
    _, _, layer, *middle, end = key.split(".")
    part = ".".join(middle)
    before = f"model.layers.{layer}."
    if part == "attn.c_attn":
        return [f"{before}self_attn.{x}_proj.{end}" for x in "qkv"]
    return [f"{before}{kind.parts[part]}.{end}"]


def is_transposed(key: str, kind: Class) -> bool:
    """Whether the class keeps our matrix of this name as (in, out): GPT-2's Conv1D, where nn.Linear has (out, in)."""
    return kind is GPT2 and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def constants(c: GPTConfig) -> dict[str, Tensor]:
    """What the class has beside our weights, and what it must be to change nothing: biases 0, gains of QK norm 1."""
    kind = class_of(c)
    found: dict[str, Tensor] = {}
    if kind.has_biases and not c.bias:
        ours = shapes_of(c)
        for key, shape in shapes_of(replace(c, bias=True)).items():
            if key not in ours:
                names = their_names(key, kind)
                found |= {name: torch.zeros(shape[0] // len(names)) for name in names}
    if kind is APERTUS:
        for layer in range(c.n_layer):
            for x in "qk":
                found[f"model.layers.{layer}.self_attn.{x}_norm.weight"] = torch.ones(c.n_embd // c.n_head)
    return found


def to_hugging_face(c: GPTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of our state_dict as those of the class, with its names and shapes.

    Raises ValueError for one that no class has, as after a change of model.py.
    """
    kind = class_of(c)
    found: dict[str, Tensor] = {}
    for key in shapes_of(c):
        w = state[key].t() if is_transposed(key, kind) else state[key]
        try:
            names = their_names(key, kind)
        except KeyError:
            raise ValueError(f"{kind.name} has no {key}, which model.py has: this model cannot be exported") from None
        parts = w.chunk(len(names)) if len(names) > 1 else (w,)
        for name, part in zip(names, parts, strict=True):
            # A copy: blocks may share weights, and safetensors refuses a memory of two names.
            found[name] = part.clone(memory_format=torch.contiguous_format)
    return found | constants(c)


def from_hugging_face(
    config: dict[str, Any], weights: dict[str, Tensor], source: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(model_args, state_dict) of a folder that was exported, to the bit as they were.

    Raises ValueError, naming `source`, where it was changed into something that our GPT does not have.
    """
    c = exported_config(config, source)
    kind = class_of(c)
    wanted = config_json(c, None)
    for name in wanted.keys() - {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "architectures", "auto_map"}:
        # transformers leaves out what is its own default, and drops the keys of its other versions
        if name in config and config[name] != wanted[name] and not name.startswith("rope_"):
            raise ValueError(
                f"init_from={source}: config.json has {name}={config[name]!r} now, it was exported with "
                f"{wanted[name]!r}; undo that change"
            )
    state = {}
    left = dict(weights)
    try:
        for key in shapes_of(c):
            parts = [left.pop(name) for name in their_names(key, kind)]
            w = torch.cat(parts) if len(parts) > 1 else parts[0]
            state[key] = w.t().contiguous() if is_transposed(key, kind) else w
    except KeyError as e:
        raise ValueError(f"init_from={source}: model.safetensors lacks {e}; export the model again") from None
    if c.tie_weights:
        state["lm_head.weight"] = state["transformer.wte.weight"]
        left.pop("lm_head.weight", None)
    for name, w in constants(c).items():
        if name in left and not torch.equal(left.pop(name).to(w), w):
            raise ValueError(
                f"init_from={source}: {name} was trained since the export, and the model of these settings has no such "
                "parameter; keep it frozen there, or train with --bias=True before the export"
            )
    if left:
        raise ValueError(f"init_from={source}: model.safetensors has {min(left)}, which our GPT does not have")
    return c.as_args(), state


def exported_config(config: dict[str, Any], source: str) -> GPTConfig:
    """The settings of the model in an exported folder's config.json. Raises ValueError, naming `source`."""
    ours = config[OUR_KEY]
    model_args = ours.get("model_args") if isinstance(ours, dict) else None
    if not isinstance(model_args, dict):
        raise ValueError(f"init_from={source}: config.json has no model_args under {OUR_KEY!r}; export the model again")
    return GPTConfig.from_args(model_args, source)
