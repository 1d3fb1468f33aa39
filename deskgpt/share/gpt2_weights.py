"""Weights in Hugging Face's format: GPT-2's from a local folder, the hub or its cache; those that export.py wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from deskgpt.machine.files import read_small
from deskgpt.share import hugging_face
from deskgpt.share.hugging_face import OUR_KEY

JSON_BYTES = 64 << 20  # at most; a vocabulary of 65,536 tokens has 2 MB
GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def load_gpt2(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(model_args, state dict in our names) of GPT-2 weights: one of GPT2_NAMES, or a folder in their format.

    The folder holds config.json and model.safetensors as Hugging Face or export.py writes them. Raises ValueError where
    the weights cannot be had, or are neither a GPT-2 nor a model that was exported.
    """
    folder = Path(name)
    if name in GPT2_NAMES and not folder.is_dir():
        folder = download_gpt2(name)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    lacking = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if lacking:
        raise ValueError(
            f"init_from={name}: {folder} has no {' and no '.join(lacking)}; name one of "
            f"{', '.join(GPT2_NAMES)}, a checkpoint (ckpt.pt or its folder), or a folder with config.json and "
            "model.safetensors"
        )
    try:
        config = dict(json.loads((folder / "config.json").read_text()))
        weights = load_file(folder / "model.safetensors")
    except (ValueError, TypeError, RecursionError, SafetensorError) as e:
        raise ValueError(f"init_from={name}: a damaged file in {folder} ({e}); fetch it again") from None
    if OUR_KEY in config:
        return hugging_face.from_hugging_face(config, weights, name)
    # What our GPT does not have. An absent key has the value that makes the model plain GPT-2.
    plain = {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
        "add_cross_attention": False,
    }
    odd = {k: config[k] for k, v in plain.items() if config.get(k, v) != v}
    n_embd = config.get("n_embd")
    four_times = 4 * n_embd if isinstance(n_embd, int) else None
    if odd or config.get("n_inner") not in (None, four_times):
        raise ValueError(
            f"init_from={name}: not a plain GPT-2: {odd or {'n_inner': config['n_inner']}} in {folder / 'config.json'}"
        )
    try:
        args = {k: config[k] for k in ("n_layer", "n_head", "n_embd", "vocab_size")}
        args |= {"block_size": config["n_positions"], "bias": True, "dropout": 0.0}
        state = {}
        for key, w in weights.items():
            key = key.removeprefix("transformer.")
            if key.endswith((".attn.bias", ".attn.masked_bias")) or key == "lm_head.weight":
                continue  # masks, and the head that is tied to wte
            # Hugging Face's Conv1D keeps its matrices as (in, out), nn.Linear as (out, in).
            conv1d = key.startswith("h.") and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            state["transformer." + key] = w.t().contiguous() if conv1d and w.dim() == 2 else w
        state["lm_head.weight"] = state["transformer.wte.weight"]
    except KeyError as e:
        raise ValueError(f"init_from={name}: {folder} lacks {e}; it is not a GPT-2 folder") from None
    return args, state


def exported_model_args(name: str) -> dict[str, Any] | None:
    """The model_args of a folder that export.py wrote; None if `name` is something else. Raises ValueError."""
    config = read_json(Path(name) / "config.json", name)
    if OUR_KEY not in config:
        return None
    return hugging_face.exported_config(config, name).as_args()


def tokenizer_of(name: str) -> dict[str, Any]:
    """The description of the tokenizer that belongs to the weights of load_gpt2: GPT-2's unless export.py wrote them.

    Raises ValueError where that one is missing.
    """
    if exported_model_args(name) is None:
        return {"name": "gpt2"}
    meta = read_json(Path(name) / "tokenizer_config.json", name).get(OUR_KEY)
    if not isinstance(meta, dict):
        raise ValueError(f"init_from={name}: tokenizer_config.json is missing or has no {OUR_KEY!r}; export it again")
    return meta


def read_json(path: Path, name: str) -> dict[str, Any]:
    """The record in a JSON file, {} without one. Raises ValueError, which names init_from, where it is damaged."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(read_small(path, JSON_BYTES)))
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(f"init_from={name}: {path} is damaged ({e}); fetch or export it again") from None


def download_gpt2(name: str) -> Path:
    """The local folder of one of OpenAI's GPT-2 models, fetched from the Hugging Face hub or its cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(f"openai-community/{name}", allow_patterns=["config.json", "model.safetensors"]))
    except Exception as e:  # the hub's, the HTTP client's and the network's errors share no class
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(
            f"init_from={name}: the weights are not cached and cannot be downloaded ({reason[:160]}); connect once, "
            "or give a local folder with config.json and model.safetensors"
        ) from None
