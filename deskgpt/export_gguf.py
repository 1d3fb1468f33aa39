"""Our models as GGUF files, for llama.cpp and the programs that are built on it, such as Ollama.

Which of llama.cpp's architectures computes what our settings say is read in its source
(src/models/*.cpp).

Shape legend: C channels (n_embd), H heads, D = C // H, V vocabulary.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskgpt.check_model import TOLERANCE
from deskgpt.errors import reason
from deskgpt.export_hugging_face import check_same, of_two_lengths
from model import GPT, GPTConfig

# The settings that each architecture computes: GPT-2's, and those of the
# fast recipes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "position": "learned",
        "norm": "layer",
        "qk_norm": False,
        "activation": "gelu_tanh",
        "token_shift": False,
    },
    "apertus": {
        "position": "rope",
        "norm": "rms",
        "qk_norm": True,
        "activation": "relu2",
        "token_shift": False,
        "bias": False,
    },
}

# How far logits may be from ours at any position, as distance() has it, if the model has GELU. That
# table made 6e-4 in models of up to 24 layers, and 1.6e-3 with weights five times as large. Without
# GELU the largest was 4e-6, and TOLERANCE["float32"].logits holds.
SAME_WITH_GELU = 2e-3
COMPARED = 1000  # likeliest tokens: llama.cpp takes 13 s to write down all of GPT-2's


def architecture_of(c: GPTConfig) -> str:
    """Return llama.cpp's architecture that computes a GPT of c.

    Raises ValueError, which names all that it lacks.
    """
    ours = asdict(c)
    if ours["activation"] == "gelu":
        # llama.cpp has one GELU, from a table, which rounds more than these two differ.
        ours["activation"] = "gelu_tanh"
    lacking = {
        name: [f"{k}={ours[k]} (--{k}={v})" for k, v in wanted.items() if ours[k] != v]
        for name, wanted in ARCHITECTURES.items()
    }
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    if lacking[nearest]:
        raise ValueError(
            f"llama.cpp has no model with {', '.join(lacking[nearest])}: train so, or "
            "export a folder (--to=my-model)"
        )
    return nearest


# ---- the file ------------------------------------------------------------------------------------


def write(
    path: Path,
    c: GPTConfig,
    weights: dict[str, Tensor],
    tokenizer: dict[str, Any],
    chat: str | None,
) -> None:
    """Write the file. tokenizer: as tokenizer.json; chat: the template of dialogues for Jinja.

    Raises ValueError for a model or a vocabulary that llama.cpp does not have; OSError.
    """
    import gguf

    architecture = architecture_of(c)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(c.block_size)
    writer.add_embedding_length(c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_feed_forward_length(4 * c.n_embd)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_head)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(c.n_embd // c.n_head)
        writer.add_rope_freq_base(10000.0)
        # xIELU is relu2 if softplus(alpha_p) = 1 and softplus(alpha_n) = beta = 0.
        writer.add_xielu_alpha_p([math.log(math.e - 1)] * c.n_layer)
        writer.add_xielu_alpha_n([-100.0] * c.n_layer)
        writer.add_xielu_beta([0.0] * c.n_layer)
        writer.add_xielu_eps([-1e-6] * c.n_layer)

    add_tokenizer(writer, tokenizer)
    if chat is not None:
        writer.add_chat_template(chat)

    for name, w in tensors_of(c, weights, len(tokenizer["model"]["vocab"])).items():
        writer.add_tensor(name, w.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    """Add a tokenizer of byte pairs or characters, as tokenizer.json has it."""
    import gguf

    model = tokenizer["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds: list[int] = [gguf.TokenType.NORMAL] * len(tokens)
    if model["type"] == "BPE":
        (end_of_text,) = [token["id"] for token in tokenizer["added_tokens"]]
        kinds[end_of_text] = gguf.TokenType.CONTROL
        merges = [" ".join(pair) for pair in model["merges"]]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        # llama.cpp wants at least one merge. This one never applies: UTF-8 has no byte 255, ÿ here.
        writer.add_token_merges(merges or ["ÿ ÿ"])
        writer.add_bos_token_id(end_of_text)
        writer.add_eos_token_id(end_of_text)
    else:  # RWKV's takes the longest token that fits, and alone needs no end of text
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list([repr(char.encode())[2:-1] for char in tokens])  # in Python's escapes
    writer.add_token_types(kinds)
    writer.add_add_bos_token(False)


def tensors_of(c: GPTConfig, weights: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Return our state_dict in llama.cpp's names and shapes, without the padding of the vocabulary.

    Raises ValueError for weights that it does not have, as after a change of model.py.
    """
    import gguf

    architecture = gguf.MODEL_ARCH[architecture_of(c).upper()]
    names = gguf.get_tensor_name_map(architecture, c.n_layer)
    found = {}
    for key, w in weights.items():
        # Apertus wants a head of its own.
        if key == "lm_head.weight" and c.tie_weights and c.position == "learned":
            continue
        if key in ("transformer.wte.weight", "lm_head.weight"):
            w = w[:vocab_size]
        parts = {key: w}
        if ".c_attn." in key and c.position == "rope":
            keys = [key.replace("c_attn", f"{letter}_proj") for letter in "qkv"]
            parts = dict(zip(keys, w.chunk(3), strict=True))
        for part, tensor in parts.items():
            name = names.get_name(part, (".weight", ".bias"))
            if name is None:
                raise ValueError(
                    f"llama.cpp has no {key}, which model.py has; nothing was exported"
                )
            found[name] = tensor
    if c.qk_norm:
        for i in range(c.n_layer):
            for name in ("attn_q_norm", "attn_k_norm"):
                found[f"blk.{i}.{name}.weight"] = torch.ones(c.n_embd // c.n_head)
    return found


# ---- what llama.cpp computes ---------------------------------------------------------------------


def loaded(path: Path, block_size: int) -> Any:
    """Return llama.cpp's server with a model, silent. Raises ValueError if it cannot load it."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path.resolve())
    params.n_ctx = params.n_batch = params.n_ubatch = block_size
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.fit_params = False
    params.verbosity = -1
    try:
        return xllamacpp.Server(params)
    except RuntimeError as e:
        raise ValueError(
            f"llama.cpp cannot load the file: {reason(e)}; nothing was exported"
        ) from None


@torch.inference_mode()
def compare(path: Path, ours: GPT, tokens: Tensor) -> None:
    """Compare llama.cpp's logits of the likeliest tokens after a text (1, T) and after half of it
    with model.py's.

    Raises ValueError if they differ.
    """
    server = loaded(path, ours.config.block_size)
    limit = TOLERANCE["float32"].logits if ours.config.activation == "relu2" else SAME_WITH_GELU
    # Token 33 is drawn, a letter or a sign: llama.cpp answers with whole characters only.
    request = {"max_tokens": 1, "logprobs": COMPARED, "logit_bias": [[33, 1e9]]}
    for text in of_two_lengths(tokens):
        reply = server.handle_completions(request | {"prompt": text[0].tolist()})
        entries = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        logits = ours.next_logits(text)[0]  # (V,)
        expected = logits[[entry["id"] for entry in entries]]
        found = torch.tensor([entry["logprob"] for entry in entries])  # logits but for a constant
        check_same("llama.cpp", found - found.mean(), expected - expected.mean(), limit)
