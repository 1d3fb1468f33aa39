"""Checkpoints: written so that a crash at any moment leaves a whole one, read without running code from them.

On disk a checkpoint is nanoGPT's dictionary with what an exact resume needs beyond it. nanoGPT's own checkpoints are
read too. Each file carries a checksum (deskgpt/archive.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from deskgpt import archive
from deskgpt.files import TEMPORARY, copy, replacing, sync_folder

NAME = "ckpt.pt"
BEST = "ckpt_best.pt"
DAMAGED = {NAME: "ckpt_damaged.pt", BEST: "ckpt_best_damaged.pt"}  # what a damaged one is renamed to
MACHINE_SETTINGS = ("device", "dtype", "compile", "backend")
FORMAT = 2  # from 2 on, a file without a checksum is a damaged one
MISSING_FILE = "is missing"
# Facts that tell which losses can be compared.
VAL_DATA = "val data"
EVAL_WINDOWS = "windows per evaluation"


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
    chat: str | None = None  # the name of the template of its data (data/chat/template.py)
    train_tokens: int | None = None  # of the training split: the order of batches depends on it
    form: dict[str, Any] | None = None  # how the model ran: dtype, compiled, explicit, and the kind of device
    wandb_run_id: str | None = None
    health: dict[str, Any] | None = None  # Health.state: batches that were skipped, recent losses, evaluations
    facts: dict[str, Any] | None = None  # what a resumed run compares, beside its settings: resuming.py


# ---- writing -------------------------------------------------------------------------------------------------


def save(checkpoint: Checkpoint, out_dir: Path, best: bool) -> None:
    """Writes out_dir/ckpt.pt; with `best`, first the same as out_dir/ckpt_best.pt, a file of its own.

    Each file is durable before the next one is begun, and its predecessor is kept until then: one checkpoint's size
    must be free. Raises OSError where one cannot be written, ValueError where the weights are not finite; the
    checkpoints before are then unharmed.
    """
    path = out_dir / NAME
    content = vars(checkpoint) | {"format": FORMAT}
    if not all(is_finite(value) for value in values_in(content)):
        raise ValueError(f"{path} is not written: weights or moments hold NaN or infinity{kept(path)}")
    try:
        with replacing(out_dir / BEST if best else path) as file:
            archive.write(content, file)
        sync_folder(out_dir)
        if best:
            copy(out_dir / BEST, path)
            sync_folder(out_dir)
    except (OSError, RuntimeError) as e:  # torch wraps a failed write in a RuntimeError
        cause = e if isinstance(e, OSError) else e.__context__
        reason = getattr(cause, "strerror", None) or str(e).splitlines()[0]
        raise OSError(
            f"cannot write {path}: {reason}; free some disk space or choose another --out_dir{kept(path)}"
        ) from None


def kept(path: Path) -> str:
    return f"; the checkpoint before it is intact: {path}" if path.exists() else ""


def take_over(out_dir: Path, say: Callable[[str], None]) -> None:
    """Before a run's first save: tidies what earlier runs left in a folder that no other run uses. Raises OSError.

    Temporary files of killed runs are removed. A damaged checkpoint gets another name, so that it is not overwritten.
    A ckpt.pt without a ckpt_best.pt, such as nanoGPT's, is copied there: whatever is saved next may be worse.
    """
    for leftover in leftovers(out_dir):
        leftover.unlink()
    for name, damaged_name in DAMAGED.items():
        damage = damage_of(out_dir / name)
        if damage and (out_dir / name).exists():
            os.replace(out_dir / name, out_dir / damaged_name)
            say(f"{out_dir / name} {damage}: it is kept as {damaged_name}")
    if (out_dir / NAME).exists() and not (out_dir / BEST).exists():
        copy(out_dir / NAME, out_dir / BEST)
    sync_folder(out_dir)


def leftovers(out_dir: Path) -> list[Path]:
    """Temporary files of checkpoints in out_dir, which a killed run has left unless one is writing them."""
    return [path for name in (NAME, BEST) for path in out_dir.glob(f"{name}*{TEMPORARY}")]


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
    path = Path(path)
    files = [path / NAME, path / BEST] if folder_of(path) == path else [path]
    return any(file.is_file() for file in files)


def silent(line: str) -> None:
    pass


def load(out_dir: str | Path, say: Callable[[str], None] = silent) -> Checkpoint:
    """The last good checkpoint of the folder out_dir, or the one at the path of a .pt file itself.

    In a folder that is ckpt.pt, or ckpt_best.pt where ckpt.pt is damaged or missing, which say() is told. Raises
    ValueError where there is no good one.
    """
    path = Path(out_dir)
    if folder_of(path) != path:
        return load_file(path)
    last = path / NAME
    best = path / BEST
    damage = damage_of(last)
    if damage is None or not best.exists():
        return load_file(last)
    damage_of_best = damage_of(best)
    if damage_of_best:
        raise ValueError(f"{last} {damage}, and {best} {damage_of_best}; restore one of them from a copy")
    saved = load_file(best)
    say(f"{last} {damage}: going on from {best.name}, step {saved.iter_num}")
    return saved


def resume(out_dir: str | Path, say: Callable[[str], None] = silent) -> Checkpoint:
    """As load, for a run that goes on; best_val_loss is that of the folder's ckpt_best.pt where it is lower.

    It is after a kill between the two files of a save, and where a run goes back to an older checkpoint. Losses on
    other data are not compared.
    """
    saved = load(out_dir, say)
    path = folder_of(out_dir) / BEST
    if damage_of(path) is None:
        best = load_file(path)
        if evaluated_on(best) == evaluated_on(saved):
            saved.best_val_loss = min(saved.best_val_loss, best.best_val_loss)
    return saved


def evaluated_on(saved: Checkpoint) -> list[Any]:
    """What a checkpoint knows of its validation data; that of older ones is less."""
    facts = saved.facts or {}
    return [saved.config.get("dataset"), saved.tokenizer, facts.get(VAL_DATA), facts.get(EVAL_WINDOWS)]


def load_file(path: Path) -> Checkpoint:
    """The checkpoint at path; its tensors are memory-mapped on the CPU. Raises ValueError where it is not a good one.

    Prefixes that torch.compile and DDP leave on parameter names are removed. nanoGPT's lose the mask buffers of its
    attention without SDPA and the machine that the run was set to, and their model_args name its GELU.
    """
    damage = damage_of(path)
    if damage == MISSING_FILE:
        raise ValueError(f"{path}: no such checkpoint; is --out_dir right?")
    if damage:
        best = path.with_name(BEST)
        other = f"--out_dir={best} is another" if best.exists() and best != path else "restore it from a copy"
        raise ValueError(f"{path} {damage}; {other}")
    found = archive.load(path)
    saved = Checkpoint(**{f.name: found[f.name] for f in fields(Checkpoint) if f.name in found})
    saved.model = {plain_name(k): w for k, w in saved.model.items() if not k.endswith(".attn.bias")}
    saved.best_val_loss = float(saved.best_val_loss)  # nanoGPT's is a tensor
    if "form" not in found and "compiled" in found:  # a checkpoint from before 2026-11-22
        saved.form = {"compiled": found["compiled"]}
    if "tokenizer" not in found:  # nanoGPT's, which names a GPU and float16 even after a run on a CPU
        saved.config = {k: v for k, v in saved.config.items() if k not in MACHINE_SETTINGS}
        saved.model_args = {"activation": "gelu"} | saved.model_args  # the exact GELU
    return saved


def plain_name(key: str) -> str:
    """A parameter's name without the prefixes of torch.compile and DDP."""
    return key.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")


# ---- checks --------------------------------------------------------------------------------------------------

# Far above what any checkpoint has: bounds for files that were made to be endless.
MOST_VALUES = 1_000_000
DEEPEST = 20


def damage_of(path: Path) -> str | None:
    """Why the file at path is not a good checkpoint, in words that follow its name; None for a good one.

    Each content is checked once: a resumed run asks several times.
    """
    if not path.is_file():
        return MISSING_FILE
    stat = path.stat()
    return _damage_of(path, stat.st_mtime_ns, stat.st_size, stat.st_ino)


@lru_cache(4)
def _damage_of(path: Path, mtime_ns: int, size: int, inode: int) -> str | None:
    try:
        has_checksum = archive.check(path)
        found = archive.load(path)
    except ValueError as e:
        return f"is not a readable checkpoint ({e})"
    try:
        check_content(found)
    except ValueError as e:
        return f"is not a training checkpoint: {e}"
    if not has_checksum and "format" in found:
        return "is not a readable checkpoint (its checksum is missing)"
    if not all(is_finite(value) for value in values_in(found)):
        return "holds weights or moments that are NaN or infinity"
    return None


def check_content(found: Any) -> None:
    """Raises ValueError where what a file holds has not the types and sizes of a checkpoint."""
    if not isinstance(found, dict):
        raise ValueError("it holds no dictionary")
    for n, value in enumerate(values_in(found)):
        if n > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        check_value(value)
    hints = get_type_hints(Checkpoint)
    lacking = [f.name for f in fields(Checkpoint) if f.default is MISSING and f.name not in found]
    lacking += [name for name in hints.keys() & found.keys() if not has_type(found[name], hints[name])]
    if lacking:
        raise ValueError(f"no {', '.join(lacking)} of the usual type")
    if not 0 <= found["iter_num"] < 2**63:
        raise ValueError(f"iter_num={found['iter_num']} is not a number of steps")
    if math.isnan(found["best_val_loss"]):
        raise ValueError("best_val_loss is NaN")
    if any(isinstance(value, Tensor) for value in found["model_args"].values()):
        raise ValueError("a value of its model_args is a tensor")
    check_weights(found["model"], found["model_args"])
    if found.get("scaler"):
        check_scaler(found["scaler"])


def values_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """value and all that it contains, dictionaries' keys too. Raises ValueError where it is nested too deep."""
    yield value
    if depth == DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        for key, entry in value.items():
            yield key
            yield from values_in(entry, depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from values_in(entry, depth + 1)


def check_value(value: Any) -> None:
    """Raises ValueError where a value is neither plain nor a tensor with all its numbers in the file."""
    if isinstance(value, Tensor):
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"a tensor of {tuple(value.shape)} has more numbers than the file")
    elif isinstance(value, int):
        if abs(value) >= 2**63:
            raise ValueError("a number in it has more than 64 bits")
    elif not isinstance(value, dict | list | tuple | str | float | None):
        raise ValueError(f"a value in it is a {type(value).__name__}")


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value has the type that the hint of Checkpoint's field says, or is a number in its place."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    types = tuple(get_origin(kind) or kind for kind in kinds)
    if float in types:
        types += (int,)
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value  # as nanoGPT's loss
    return isinstance(value, types) and not isinstance(value, bool)


def check_weights(weights: dict[str, Tensor], model_args: dict[str, Any]) -> None:
    """Raises ValueError where weights are no numbers, or fewer than the model that model_args would make."""
    for name, w in weights.items():
        if not (isinstance(name, str) and isinstance(w, Tensor) and w.is_floating_point()):
            raise ValueError(f"its weight {str(name)[:80]!r} is not a tensor of floating-point numbers")
    blocks = {name.split(".h.")[1].split(".")[0] for name in weights if ".h." in name}
    n_layer = model_args.get("n_layer")
    if isinstance(n_layer, int) and n_layer > max(len(blocks), 1):
        raise ValueError(f"model_args say n_layer={n_layer}, the weights are those of {len(blocks)} blocks")
    wanted = (model_args.get("vocab_size"), model_args.get("n_embd"))
    for name, w in weights.items():
        if name.endswith("transformer.wte.weight") and None not in wanted and tuple(w.shape) != wanted:
            raise ValueError(f"model_args say vocab_size={wanted[0]}, n_embd={wanted[1]}, {name} is {tuple(w.shape)}")


def check_scaler(scaler: dict[str, Any]) -> None:
    """Raises ValueError where the state of float16's GradScaler has other values than it can get."""
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
        value = scaler.get(name)
        possible = isinstance(value, int | float) and math.isfinite(value) and value >= (name != "_growth_tracker")
        if name in ("scale", "backoff_factor"):  # which may be below 1
            possible = isinstance(value, float) and 0 < value < math.inf
        if not possible:
            raise ValueError(f"its scaler has {name}={value}")


def is_finite(value: Any) -> bool:
    """False for a tensor that holds NaN or infinity."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.numel()):
        return True
    return all(math.isfinite(x) for x in torch.stack(torch.aminmax(value)).tolist())  # NaN is smallest and largest


# ---- the optimizer -------------------------------------------------------------------------------------------


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], source: str) -> None:
    """Loads the optimizer's state; hyperparameters remain those of the settings, not the checkpoint's.

    Raises ValueError, naming `source`, where the state does not belong to the model or the optimizer.
    """
    ours = optimizer.state_dict()["param_groups"]
    theirs = state.get("param_groups")
    if not isinstance(theirs, list) or not all(is_group(group) for group in theirs):
        raise ValueError(f"{source}: the optimizer state does not fit the model (it has no groups of parameters)")
    if ["momentum" in g for g in ours[2:]] != ["momentum" in g for g in theirs[2:]]:  # Muon's groups
        raise ValueError(f"{source} was trained with another optimizer: leave --optimizer out")
    try:
        check_moments(optimizer, state.get("state"), theirs)
        groups = [mine | {"params": saved["params"]} for mine, saved in zip(ours, theirs, strict=True)]
        optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
    except (ValueError, KeyError) as e:
        raise ValueError(f"{source}: the optimizer state does not fit the model ({e})") from None
    for moments in optimizer.state.values():
        # On a CPU they are still those of the memory-mapped file, which this run will replace.
        moments.update({k: v.clone() for k, v in moments.items() if isinstance(v, Tensor)})


def is_group(group: Any) -> bool:
    """Whether this is a group of parameters, by their numbers."""
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and all(isinstance(i, int) for i in params)


def check_moments(optimizer: torch.optim.Optimizer, state: Any, groups: list[dict[str, Any]]) -> None:
    """Raises ValueError where a parameter's moments are missing or of another shape: fused kernels do not look.

    A state without any moments is that of a run which has made no step.
    """
    if not isinstance(state, dict):
        raise ValueError("it has no moments")
    if state.keys() - {i for group in groups for i in group["params"]}:
        raise ValueError("it has moments of parameters that the model lacks")
    for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
        names = ["momentum_buffer"] if "momentum" in ours else ["exp_avg", "exp_avg_sq"]
        for p, i in zip(ours["params"], theirs["params"], strict=True):
            if not state:
                continue
            moments = state[i]
            if not isinstance(moments, dict) or moments.keys() != {"step", *names}:
                raise ValueError(f"parameter {i} has not the moments step, {', '.join(names)}")
            for name in names:
                m = moments[name]
                if not isinstance(m, Tensor) or m.shape != p.shape or not m.is_floating_point():
                    raise ValueError(f"{name} of parameter {i} has not the shape {tuple(p.shape)}")
            step = moments["step"]
            if not isinstance(step, Tensor | int | float) or torch.as_tensor(step).shape != () or not step >= 0:
                raise ValueError(f"step of parameter {i} is not a number of steps")
