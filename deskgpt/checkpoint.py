"""Checkpoints: written so that a crash at any moment leaves a whole one, read without running code from them.

A checkpoint is nanoGPT's dictionary (`model`, `optimizer`, `model_args`, `iter_num`, `best_val_loss`,
`config`) and what else an exact resume needs. nanoGPT's own checkpoints and GPT-2 weights in Hugging Face's
format are read too.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskgpt.files import link_or_copy, sync_folder

NAME, BEST = "ckpt.pt", "ckpt_best.pt"
KEYS: dict[str, Any] = {"model": dict, "optimizer": dict, "model_args": dict, "iter_num": int, "config": dict}
KEYS |= {"best_val_loss": (float, Tensor)}
GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

# ---- checkpoints ---------------------------------------------------------------------------------------------


def save(checkpoint: dict[str, Any], out_dir: Path, best: bool) -> None:
    """Writes out_dir/ckpt.pt; with `best`, keeps the same file as out_dir/ckpt_best.pt as well.

    The earlier checkpoint stays until the new one is on the disk, so its size must be free once more. Raises
    OSError, with the earlier one unharmed, where it cannot be written.
    """
    path, best_path = out_dir / NAME, out_dir / BEST
    tmp = out_dir / (NAME + ".tmp")
    try:
        with open(tmp, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        if path.exists() and not best and not best_path.exists():  # nanoGPT's, which has no other file
            link_or_copy(path, best_path)
        os.replace(tmp, path)
        if best:
            link_or_copy(path, best_path)
        sync_folder(out_dir)
    except (OSError, RuntimeError) as e:  # torch wraps a failed write in a RuntimeError
        tmp.unlink(missing_ok=True)
        cause = e if isinstance(e, OSError) else e.__context__
        reason = getattr(cause, "strerror", None) or str(e).splitlines()[0]
        kept = f"; the checkpoint before it is intact: {path}" if path.exists() else ""
        raise OSError(
            f"cannot write {path}: {reason}; free some disk space or choose another --out_dir{kept}"
        ) from None


def folder_of(out_dir: str | Path) -> Path:
    """The folder that a run writes to; out_dir may also name the checkpoint in it that the run starts from."""
    path = Path(out_dir)
    return path.parent if path.suffix == ".pt" else path


def load(out_dir: str | Path) -> dict[str, Any]:
    """The checkpoint of out_dir (or at the path of a .pt file itself), tensors memory-mapped on the CPU.

    Gone are the prefixes that torch.compile and DDP leave on parameter names and, from nanoGPT's, the mask
    buffers of its attention without SDPA and the machine the run was set to; its model_args name its GELU.
    Raises ValueError where the file
    is missing, damaged or no checkpoint.
    """
    path = Path(out_dir) if folder_of(out_dir) != Path(out_dir) else Path(out_dir) / NAME
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint; is --out_dir right?")
    try:
        if damaged := damaged_part(path, path.stat().st_mtime_ns):
            raise ValueError(f"the checksum of {damaged} does not match")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # zip, pickle and storage errors all differ
        best = path.with_name(BEST)
        other = f"--out_dir={best} is another" if best.exists() and best != path else "restore it from a copy"
        reason = str(e).strip().splitlines()[0][:120]
        if isinstance(e, pickle.UnpicklingError):
            reason = "it holds more than tensors and plain values, which only its maker's code can read"
        raise ValueError(f"{path} is not a readable checkpoint ({reason}); {other}") from None
    found = checkpoint if isinstance(checkpoint, dict) else {}
    lacking = [name for name, kind in KEYS.items() if not isinstance(found.get(name), kind)]
    if lacking:
        raise ValueError(f"{path} is not a training checkpoint: no {', '.join(lacking)} as one has them")
    checkpoint["model"] = {
        k.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod."): v
        for k, v in checkpoint["model"].items()
        if not k.endswith(".attn.bias")
    }
    checkpoint["best_val_loss"] = float(checkpoint["best_val_loss"])  # nanoGPT's is a tensor
    if "tokenizer" not in checkpoint:  # nanoGPT's, which names a GPU and float16 even after a run on a CPU
        drop = ("device", "dtype", "compile", "backend")
        checkpoint["config"] = {k: v for k, v in checkpoint["config"].items() if k not in drop}
        checkpoint["model_args"] = {"activation": "gelu"} | checkpoint["model_args"]  # the exact one, which it has
    return checkpoint


@lru_cache(1)  # a resumed run reads its checkpoint twice: for the settings, then for the weights
def damaged_part(path: Path, mtime_ns: int) -> str | None:
    """The first part of a checkpoint whose checksum does not match; torch.load does not look."""
    with zipfile.ZipFile(path) as file:
        return file.testzip()


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], source: str) -> None:
    """Loads AdamW's moments; hyperparameters stay those of the settings, not the checkpoint's.

    Raises ValueError, naming `source`, where the moments do not belong to the model.
    """
    ours = optimizer.state_dict()["param_groups"]
    if ["momentum" in g for g in ours[2:]] != ["momentum" in g for g in state.get("param_groups", [])[2:]]:  # Muon's
        raise ValueError(f"{source} was trained with another optimizer: leave --optimizer out")
    try:
        groups = [mine | {"params": saved["params"]} for mine, saved in zip(ours, state["param_groups"], strict=True)]
        optimizer.load_state_dict(state | {"param_groups": groups})
    except (ValueError, KeyError) as e:
        raise ValueError(f"{source}: the optimizer state does not fit the model ({e})") from None
    for moments in optimizer.state.values():
        # On a CPU they are still the file's, which this run is going to replace and others may.
        moments.update({k: v.clone() for k, v in moments.items() if isinstance(v, Tensor)})


def set_aside(out_dir: Path, names: tuple[str, ...]) -> Path | None:
    """Makes out_dir for a new run; moves files of an earlier one into a new folder out_dir/previous-N.

    Returns that folder, or None where there was no earlier run. Raises OSError where out_dir cannot be written.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        found = [out_dir / name for name in names if (out_dir / name).exists()]
        if not found:
            return None
        n = 1
        while (out_dir / f"previous-{n}").exists():
            n += 1
        folder = out_dir / f"previous-{n}"
        folder.mkdir()
        for path in found:
            os.replace(path, folder / path.name)
    except OSError as e:
        raise OSError(f"out_dir={out_dir} cannot be written: {e.strerror}; choose another --out_dir") from None
    return folder


# ---- GPT-2 weights -------------------------------------------------------------------------------------------


def load_gpt2(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(model_args, state dict in our names) of GPT-2 weights: one of GPT2_NAMES, or a folder in their format.

    The folder holds config.json and model.safetensors as Hugging Face writes them. Raises ValueError where the
    weights cannot be had or are not a GPT-2.
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
            f"{', '.join(GPT2_NAMES)}, or a folder with config.json and model.safetensors"
        )
    try:
        config = dict(json.loads((folder / "config.json").read_text()))
        weights = load_file(folder / "model.safetensors")
    except (ValueError, TypeError, SafetensorError) as e:
        raise ValueError(f"init_from={name}: a damaged file in {folder} ({e}); fetch it again") from None
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
    if odd or config.get("n_inner") not in (None, 4 * config.get("n_embd", 0)):
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
            state["transformer." + key] = w.t().contiguous() if conv1d else w
        state["lm_head.weight"] = state["transformer.wte.weight"]
    except KeyError as e:
        raise ValueError(f"init_from={name}: {folder} lacks {e}; it is not a GPT-2 folder") from None
    return args, state


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
