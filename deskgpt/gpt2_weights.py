"""Weights in Hugging Face's format: GPT-2's from a local folder, the hub or its cache; those that
export.py wrote.
"""

import json
from pathlib import Path
from typing import Any

import torch

from data.tokenizer_json import OUR_KEY
from deskgpt.checkpoint import Checkpoint
from deskgpt.device import DTYPES
from deskgpt.errors import reason, shortened
from deskgpt.export_hugging_face import is_conv1d, is_gpt2
from deskgpt.files import read_small
from model import GPTConfig

JSON_BYTES = 64 << 20  # at most; a vocabulary of 65,536 tokens has 2 MB
WEIGHTS = "model.safetensors"
GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

# Values that a GPT-2 of others must have. An absent key has this value.
PLAIN_GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def load_gpt2(name: str) -> Checkpoint:
    """Return GPT-2 weights, in our names, with model_args and tokenizer: one of GPT2_NAMES, or a
    folder in their format.

    The folder holds config.json and model.safetensors, as Hugging Face or export.py writes them.
    Raises ValueError if the weights cannot be had, or are neither a GPT-2 nor a model that was
    exported.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    folder = Path(name)
    if name in GPT2_NAMES and not folder.is_dir():
        folder = download_gpt2(name)
    for file in ("config.json", WEIGHTS):
        if not (folder / file).is_file():  # a pipe would make it wait
            raise ValueError(
                f"init_from={name}: {folder} has no {file}; name one of {', '.join(GPT2_NAMES)}, a "
                f"checkpoint (ckpt.pt or its folder), or a folder with config.json and {WEIGHTS}"
            )
    args = exported_model_args(name) or gpt2_model_args(folder, name)
    config = GPTConfig.from_args(args, name)
    try:
        # Do not map the file into memory: if it is cut later, as by a download that begins again,
        # the process would end.
        weights = load((folder / WEIGHTS).read_bytes())
    except SafetensorError as e:
        raise ValueError(
            f"init_from={name}: {folder / WEIGHTS} is damaged ({reason(e)}); fetch it again"
        ) from None
    state = {}
    for key, w in weights.items():
        if key.startswith("gpt."):
            state[key.removeprefix("gpt.")] = w
            continue
        if key.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # masks
        if w.dtype not in DTYPES.values():  # 8 bits need scales, which we do not read
            raise ValueError(
                f"init_from={name}: {shortened(key)} is {w.dtype} in {WEIGHTS}, and only "
                f"{', '.join(DTYPES)} are read; fetch the weights that were not quantized"
            )
        if key.endswith(".bias") and not config.bias and not w.any():
            continue  # it was exported as zeros
        if is_gpt2(config) and is_conv1d(key, w):
            w = w.t().contiguous()
        ours = key if key == "lm_head.weight" else "transformer." + key.removeprefix("transformer.")
        state[ours] = w
    embedding = state.get("transformer.wte.weight")
    if config.tie_weights and embedding is not None:
        head = state.setdefault("lm_head.weight", embedding)
        if not torch.equal(head, embedding):
            raise ValueError(
                f"init_from={name}: config.json ties the head to the embedding, but {WEIGHTS} has "
                "two; such a model cannot be read"
            )
    return Checkpoint(state, args, tokenizer=tokenizer_of(name))


def gpt2_model_args(folder: Path, name: str) -> dict[str, Any]:
    """Return the model_args of a GPT-2 in Hugging Face's format.

    Raises ValueError for what our GPT does not have; another width within an MLP (n_inner) is
    refused by GPT.from_state.
    """
    config = read_json(folder / "config.json", name)
    try:
        args = {key: config[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
        args |= {"block_size": config["n_positions"], "bias": True, "dropout": 0.0}
    except KeyError as e:
        raise ValueError(f"init_from={name}: config.json has no {e}; it is not a GPT-2's") from None
    odd = {key: config[key] for key, value in PLAIN_GPT2.items() if config.get(key, value) != value}
    if odd:
        raise ValueError(
            f"init_from={name}: config.json has {shortened(odd)}, and a plain GPT-2 has "
            f"{PLAIN_GPT2}"
        )
    return args


def exported_model_args(name: str) -> dict[str, Any] | None:
    """Return the model_args of a folder that export.py wrote; None if `name` is something else.
    Raises ValueError.
    """
    ours = read_json(Path(name) / "config.json", name).get(OUR_KEY)
    if ours is None:
        return None
    model_args: Any = ours.get("model_args") if isinstance(ours, dict) else ours
    return GPTConfig.from_args(model_args, name).as_args()


def tokenizer_of(name: str) -> dict[str, Any]:
    """Return the description of the tokenizer of load_gpt2's weights: GPT-2's unless export.py
    wrote them.
    """
    if exported_model_args(name) is None:
        return {"name": "gpt2"}
    meta = read_json(Path(name) / "tokenizer_config.json", name).get(OUR_KEY)
    return meta if isinstance(meta, dict) else {}  # {} describes no tokenizer


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Return the record in a JSON file, {} without one.

    Raises ValueError, which names init_from, if it is damaged.
    """
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(read_small(path, JSON_BYTES)))
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(
            f"init_from={name}: {path} is damaged ({reason(e)}); fetch or export it again"
        ) from None


def download_gpt2(name: str) -> Path:
    """Return the local folder of one of OpenAI's GPT-2 models, fetched from the Hugging Face hub or
    its cache.
    """
    from huggingface_hub import snapshot_download

    files = ["config.json", WEIGHTS]
    try:
        return Path(snapshot_download(f"openai-community/{name}", allow_patterns=files))
    except Exception as e:
        # Errors of the hub, of its HTTP client and of the network share no class.
        raise ValueError(
            f"init_from={name}: {reason(e)}; connect once, or give a local folder with config.json "
            f"and {WEIGHTS}"
        ) from None
