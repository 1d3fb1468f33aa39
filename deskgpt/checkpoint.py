"""Checkpoints: written so that a crash at any moment leaves a whole one, read without running code from them.

On disk a checkpoint is nanoGPT's dictionary with what an exact resume needs beyond it. nanoGPT's own checkpoints are
read too.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import torch
from torch import Tensor

from deskgpt.files import link_or_copy, replacing, sync_folder

NAME = "ckpt.pt"
BEST = "ckpt_best.pt"
MACHINE_SETTINGS = ("device", "dtype", "compile", "backend")


@dataclass
class Checkpoint:
    """What ckpt.pt holds. The first six are nanoGPT's; the others are None in a checkpoint without them."""

    model: dict[str, Tensor]  # state_dict
    optimizer: dict[str, Any]  # state_dict
    model_args: dict[str, Any]
    iter_num: int  # steps done
    best_val_loss: float  # nats per token
    config: dict[str, Any]  # the settings of the run
    scaler: dict[str, Any] | None = None  # state_dict of float16's GradScaler
    tokenizer: dict[str, Any] | None = None  # its meta()
    train_tokens: int | None = None  # of the training split: the order of batches depends on it
    form: dict[str, Any] | None = None  # how the model ran: dtype, compiled, explicit, and the kind of device
    wandb_run_id: str | None = None
    facts: dict[str, Any] | None = None  # what a resumed run compares, beside its settings: resuming.py


# ---- writing -------------------------------------------------------------------------------------------------


def save(checkpoint: Checkpoint, out_dir: Path, best: bool) -> None:
    """Writes out_dir/ckpt.pt; with `best`, keeps the same file as out_dir/ckpt_best.pt as well.

    The earlier checkpoint is kept until the new one is on the disk, so its size must be free once more. Raises OSError
    where it cannot be written; the earlier one is then unharmed.
    """
    path = out_dir / NAME
    best_path = out_dir / BEST
    try:
        with replacing(path) as file:
            torch.save(vars(checkpoint), file)
            if path.exists() and not best and not best_path.exists():  # nanoGPT's run, which has one file only
                link_or_copy(path, best_path)
        if best:
            link_or_copy(path, best_path)
        sync_folder(out_dir)
    except (OSError, RuntimeError) as e:  # torch wraps a failed write in a RuntimeError
        cause = e if isinstance(e, OSError) else e.__context__
        reason = getattr(cause, "strerror", None) or str(e).splitlines()[0]
        kept = f"; the checkpoint before it is intact: {path}" if path.exists() else ""
        raise OSError(
            f"cannot write {path}: {reason}; free some disk space or choose another --out_dir{kept}"
        ) from None


def set_aside(out_dir: Path, names: tuple[str, ...]) -> Path | None:
    """Makes out_dir for a new run. Files of an earlier run move into a new folder out_dir/previous-N.

    Returns that folder, None without an earlier run. Raises OSError where out_dir cannot be written.
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


# ---- reading -------------------------------------------------------------------------------------------------


def folder_of(out_dir: str | Path) -> Path:
    """The folder that a run writes to; out_dir may also name the checkpoint in it that the run starts from."""
    path = Path(out_dir)
    return path.parent if path.suffix == ".pt" else path


def is_one(path: str | Path) -> bool:
    """Whether path names a checkpoint as `load` takes it."""
    is_file = folder_of(path) != Path(path)
    return (Path(path) if is_file else Path(path) / NAME).is_file()


def load(out_dir: str | Path) -> Checkpoint:
    """The checkpoint of out_dir, or at the path of a .pt file itself; its tensors are memory-mapped on the CPU.

    Prefixes that torch.compile and DDP leave on parameter names are removed. nanoGPT's lose the mask buffers of its
    attention without SDPA and the machine that the run was set to, and their model_args name its GELU. Raises
    ValueError where the file is missing, damaged or not a checkpoint.
    """
    path = Path(out_dir)
    if folder_of(path) == path:
        path = path / NAME
    if not path.is_file():
        raise ValueError(f"{path}: no such checkpoint; is --out_dir right?")
    found = read(path)
    lacking = [name for name, kind in required_types().items() if not isinstance(found.get(name), kind)]
    if lacking:
        raise ValueError(f"{path} is not a training checkpoint: no {', '.join(lacking)} of the usual type")

    saved = Checkpoint(**{f.name: found[f.name] for f in fields(Checkpoint) if f.name in found})
    saved.model = {plain_name(k): w for k, w in saved.model.items() if not k.endswith(".attn.bias")}
    saved.best_val_loss = float(saved.best_val_loss)  # nanoGPT's is a tensor
    if "form" not in found and "compiled" in found:  # a checkpoint from before 2026-11-22
        saved.form = {"compiled": found["compiled"]}
    if "tokenizer" not in found:  # nanoGPT's, which names a GPU and float16 even after a run on a CPU
        saved.config = {k: v for k, v in saved.config.items() if k not in MACHINE_SETTINGS}
        saved.model_args = {"activation": "gelu"} | saved.model_args  # the exact GELU
    return saved


def read(path: Path) -> dict[str, Any]:
    """What a checkpoint file holds, {} if that is not a dictionary. Raises ValueError where it cannot be read."""
    try:
        damaged = damaged_part(path, path.stat().st_mtime_ns)
        if damaged:
            raise ValueError(f"the checksum of {damaged} does not match")
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # zip, pickle and storage errors all differ
        best = path.with_name(BEST)
        other = f"--out_dir={best} is another" if best.exists() and best != path else "restore it from a copy"
        reason = str(e).strip().splitlines()[0][:120]
        if isinstance(e, pickle.UnpicklingError):
            reason = "it holds more than tensors and plain values, which only its maker's code can read"
        raise ValueError(f"{path} is not a readable checkpoint ({reason}); {other}") from None
    return found if isinstance(found, dict) else {}


@lru_cache(1)  # a resumed run reads its checkpoint twice: for the settings, then for the weights
def damaged_part(path: Path, mtime_ns: int) -> str | None:
    """The first part of a checkpoint whose checksum does not match; torch.load does not check them."""
    with zipfile.ZipFile(path) as file:
        return file.testzip()


def required_types() -> dict[str, Any]:
    """The type of each entry that every checkpoint has, nanoGPT's too."""
    hints = get_type_hints(Checkpoint)
    types = {f.name: get_origin(hints[f.name]) or hints[f.name] for f in fields(Checkpoint) if f.default is MISSING}
    return types | {"best_val_loss": (float, Tensor)}


def plain_name(key: str) -> str:
    """A parameter's name without the prefixes of torch.compile and DDP."""
    return key.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], source: str) -> None:
    """Loads the optimizer's state; hyperparameters remain those of the settings, not the checkpoint's.

    Raises ValueError, naming `source`, where the state does not belong to the model or the optimizer.
    """
    ours = optimizer.state_dict()["param_groups"]
    theirs = state.get("param_groups", [])
    if ["momentum" in g for g in ours[2:]] != ["momentum" in g for g in theirs[2:]]:  # Muon's groups
        raise ValueError(f"{source} was trained with another optimizer: leave --optimizer out")
    try:
        groups = [mine | {"params": saved["params"]} for mine, saved in zip(ours, theirs, strict=True)]
        optimizer.load_state_dict(state | {"param_groups": groups})
    except (ValueError, KeyError) as e:
        raise ValueError(f"{source}: the optimizer state does not fit the model ({e})") from None
    for moments in optimizer.state.values():
        # On a CPU they are still those of the memory-mapped file, which this run will replace.
        moments.update({k: v.clone() for k, v in moments.items() if isinstance(v, Tensor)})
