"""The checkpoints of a run's folder: ckpt.pt, the last one, and ckpt_best.pt, the best one by its val loss.

A checkpoint is nanoGPT's dictionary plus what an exact resume needs, always one file (ckpt_file.py), so any number of
ranks can resume it. torch.distributed.checkpoint is not used: it pickles, and a folder cannot be replaced in one step.
A crash at any moment leaves an intact checkpoint. nanoGPT's own checkpoints are read too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deskgpt.checkpoint import ckpt_file
from deskgpt.compute.distributed import DistContext
from deskgpt.system.files import Fields, check_record, copy, is_number, remove_leftovers, sync_folder
from model import GPTConfig

NAME = "ckpt.pt"
BEST = "ckpt_best.pt"
MACHINE_SETTINGS = ("device", "dtype", "compile", "backend")
FORMAT = 2  # from 2 on, a file without a checksum is a damaged one
FORMER_NAMES = {"form": "variant", "facts": "metadata", "parts": "extra_state", "health": "progress"}
PREFIX = re.compile(r"^(_orig_mod\.|module\.)+")  # that torch.compile and DDP leave on parameters' names
MOST_STEPS = 2**40  # far above any run: the order of batches counts in 64 bits
LARGEST_WEIGHT = 1e18  # the square of a larger one overflows float32, so that nothing can be computed with it
# Names under Checkpoint.metadata: losses of two runs can be compared only if both entries are equal.
VAL_DATA = "val data"
EVAL_WINDOWS = "windows per evaluation"


@dataclass
class Checkpoint:
    """What ckpt.pt holds. The first six are nanoGPT's; the others are None in a checkpoint without them."""

    model: dict[str, Tensor]  # state_dict
    model_args: dict[str, Any]
    optimizer: Any = None  # state_dict; without it a run cannot be resumed
    iter_num: int = 0  # steps done
    best_val_loss: float = math.inf  # nats per token
    config: dict[str, Any] = field(default_factory=dict)  # the settings of the run
    scaler: dict[str, Any] | None = None  # state_dict of float16's GradScaler
    tokenizer: dict[str, Any] | None = None  # its meta()
    chat: str | None = None  # the name of the template of its data (data/chat/template.py)
    variant: dict[str, Any] | None = None  # how the model ran: dtype, compiled, kind of device
    wandb_run_id: str | None = None
    progress: dict[str, Any] | None = None  # skipped batches, recent losses, evaluations
    metadata: dict[str, Any] | None = None  # what a resumed run compares, beside its settings
    extra_state: dict[str, Any] | None = None  # what else the run keeps: TrainState.register_state


# ---- writing -------------------------------------------------------------------------------------------------


def save(checkpoint: Checkpoint, out_dir: Path, best: bool) -> None:
    """Write out_dir/ckpt.pt; with `best`, first the same as out_dir/ckpt_best.pt, a file of its own.

    Each file is durable before the next one is begun, and its predecessor is kept until then: one checkpoint's size
    must be free. Raises OSError if one cannot be written, ValueError if it should not be. The checkpoints before are
    then unharmed, and ckpt_best.pt may be the new one.
    """
    path = out_dir / NAME
    before = f"; the checkpoint before it is intact: {path}" if path.exists() else ""
    content = vars(checkpoint)
    try:
        ckpt_file.refuse_unreadable(content)
        if not math.isfinite(magnitude(content)):
            raise ValueError("weights or moments hold NaN or infinity")
        if magnitude(checkpoint.model) > LARGEST_WEIGHT:
            raise ValueError(f"there are weights above {LARGEST_WEIGHT:g}, which no step can mend")
    except ValueError as e:
        raise ValueError(f"{path} is not written: {e}{before}") from None
    try:
        ckpt_file.write(content | {"format": FORMAT}, out_dir / BEST if best else path)
        sync_folder(out_dir)
        if best:
            copy(out_dir / BEST, path)
            sync_folder(out_dir)
    except OSError as e:
        raise OSError(
            f"cannot write {path}: {e.strerror or e}; free some disk space or choose another --out_dir{before}"
        ) from None


def magnitude(value: Any) -> float:
    """Return the sum of the largest numbers of each tensor in value; NaN or infinite if one of all numbers is."""
    tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]
    tensors = [x if x.itemsize > 1 else x.float() for x in tensors if x.numel() and not x.is_meta]
    return sum(abs(extreme.item()) for x in tensors for extreme in torch.aminmax(x))


def take_over(out_dir: Path, print0: Callable[[str], None], has_best: bool = True) -> None:
    """Tidy what earlier runs left, before a run's first save. Raises OSError.

    Temporary files are removed, damaged checkpoints are moved aside. A ckpt.pt whose val loss is known is copied to
    ckpt_best.pt if there is none: the next one may be worse. has_best: the run's losses can be compared with theirs;
    otherwise ckpt_best.pt is moved aside, unless it is the only checkpoint.
    """
    remove_leftovers(out_dir, NAME, BEST)
    for path in candidates(out_dir):
        if damage := damage_of(path):
            print0(f"{path} {damage}: it is now in {set_aside(out_dir, (path.name,))}")
    last = out_dir / NAME
    best = out_dir / BEST
    if last.exists() and best.exists() and not has_best:
        print0(f"{best} has a loss that this run's cannot be compared with: it is now in {set_aside(out_dir, (BEST,))}")
    elif last.exists() and not best.exists() and has_best and evaluated_loss(read(last, numbers=False)) < math.inf:
        copy(last, best)
    sync_folder(out_dir)


def set_aside(out_dir: Path, names: tuple[str, ...]) -> Path | None:
    """Make out_dir, and move these files of an earlier run into its new folder previous-N, which it returns.

    None without such files. Raises OSError if out_dir cannot be written.
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


# ---- finding -------------------------------------------------------------------------------------------------


def folder_of(out_dir: str | Path) -> Path:
    """Return the folder that a run writes to; out_dir may also name the checkpoint in it that the run starts from."""
    path = Path(out_dir)
    return path.parent if path.suffix == ".pt" else path


def is_checkpoint(path: str | Path) -> bool:
    """Return whether path names a checkpoint as `load` takes it."""
    path = Path(path)
    return bool(candidates(path)) if folder_of(path) == path else path.exists()


def candidates(out_dir: Path) -> list[Path]:
    """Return the checkpoints of out_dir; a run resumes the first that is not damaged."""
    return [path for path in (out_dir / NAME, out_dir / BEST) if path.exists()]


# ---- reading -------------------------------------------------------------------------------------------------


def load(
    out_dir: str | Path,
    print0: Callable[[str], object] = str,
    dist: DistContext | None = None,
    checksums: bool = True,
) -> Checkpoint:
    """Return the last good checkpoint of the folder out_dir, or the one at the path of a .pt file.

    print0 is told of a damaged one. dist: all ranks call this and find the same; the first one compares checksums.
    checksums: False leaves them out, and tensors have shapes alone, as on the other ranks of a sharded run. Raises
    ValueError if there is no good one.
    """
    path = Path(out_dir)
    found = [path] if folder_of(path) != path else candidates(path) or [path / NAME]
    if not found[0].exists():
        if (path / "manifest.json").exists() or list(path.glob("ckpt-*/manifest.json")):
            raise ValueError(f"{path} is of an older version: make a file of it with that one's export.py --to=ckpt.pt")
        raise ValueError(f"{found[0]}: no such checkpoint; is --out_dir right?")
    damages: list[str] = []
    for p in found:
        saved = None
        damage = "is damaged, as another rank has found"
        try:
            saved = read(p, checksums and (dist is None or dist.is_first), numbers=checksums)
        except ValueError as e:
            damage = str(e)
        if dist is not None and not dist.all(saved is not None):
            saved = None
        if saved is not None:
            if dist is not None:  # only numbers tell whether a head is tied
                saved.model_args = dist.gather(saved.model_args)[0]
            if damages:
                print0(f"{damages[0]}: taking {p.name}, step {saved.iter_num}")
            return saved
        damages.append(f"{p} {damage}")
    raise ValueError(f"{', and '.join(damages)}; restore it from a copy, or name another checkpoint")


def resume(out_dir: str | Path, dist: DistContext | None = None, checksums: bool = True) -> Checkpoint:
    """As load, for a run that is resumed: best_val_loss is what the best checkpoint on the disk was evaluated at.

    It is infinite if no checkpoint there was evaluated on the same data.
    """
    print0 = dist.print0 if dist else print
    saved = load(out_dir, print0, dist, checksums)
    saved.best_val_loss = evaluated_loss(saved)
    path = folder_of(out_dir) / BEST
    if not path.exists():
        return saved
    try:
        best = read(path, checksums=dist is None or dist.is_first, numbers=False)
    except ValueError as e:
        print0(f"{path} {e}: its loss, the best so far, does not count")
        return saved
    if evaluated_on(best) == evaluated_on(saved):
        saved.best_val_loss = min(saved.best_val_loss, evaluated_loss(best))
    return saved


def step_of_best(out_dir: Path) -> int | None:
    """Return the step of the best checkpoint on the disk; None if there is no intact one."""
    with suppress(ValueError):
        return read(out_dir / BEST, numbers=False).iter_num
    return None


def evaluated_loss(saved: Checkpoint) -> float:
    """Return the val loss of a checkpoint's own weights; infinity if no evaluation saw them."""
    if saved.progress is None:  # nanoGPT's, which is saved at evaluations only
        return saved.best_val_loss
    losses = {row[0]: row[2] for row in saved.progress.get("evaluations", [])}
    loss = float(losses.get(saved.iter_num, math.inf))
    return math.inf if math.isnan(loss) else loss


def evaluated_on(saved: Checkpoint) -> list[Any]:
    """Return what two losses must have in common to be compared, as far as older checkpoints know it."""
    metadata = saved.metadata or {}
    return [saved.config.get("dataset"), saved.tokenizer, metadata.get(VAL_DATA), metadata.get(EVAL_WINDOWS)]


# What a file may hold, by key. nanoGPT's best_val_loss is a tensor, which math.isnan takes, unlike text.
CONTENT: Fields = dict.fromkeys(("model", "model_args", "config"), lambda value: isinstance(value, dict))
OPTIONAL = ("optimizer", "scaler", "tokenizer", "variant", "progress", "metadata", "extra_state")
CONTENT |= dict.fromkeys(OPTIONAL, lambda value: isinstance(value, dict | None))
CONTENT |= dict.fromkeys(("chat", "wandb_run_id"), lambda value: isinstance(value, str | None))
CONTENT |= {"best_val_loss": lambda x: not math.isnan(x), "iter_num": lambda x: is_number(x) and x < MOST_STEPS}


def weights_of(saved: Checkpoint) -> dict[str, Tensor]:
    """Return the weights of a loaded checkpoint, on the CPU."""
    return saved.model


def damage_of(path: Path) -> str | None:
    """Return why no good checkpoint is at path, in words that follow its name, numbers that are not finite left out."""
    try:
        read(path, numbers=False)
    except ValueError as e:
        return str(e)
    return None


def read(path: Path, checksums: bool = True, numbers: bool = True) -> Checkpoint:
    """Return a checkpoint, its tensors on the CPU.

    checksums: whether to compare those of files, and to look for numbers that are not finite.
    numbers: False leaves tensors with their shapes alone. Raises ValueError with words that follow the path.
    """
    try:
        found = ckpt_file.load(path, checksums, numbers)
    except (OSError, ValueError) as e:
        raise ValueError(f"is not a readable checkpoint ({getattr(e, 'strerror', None) or e})") from None
    try:
        found = {FORMER_NAMES.get(name, name): value for name, value in found.items()}
        check_record(found, CONTENT, required=("model", "model_args"))
        saved = checkpoint_of(found)
        if checksums and not math.isfinite(magnitude(found)):
            raise ValueError("weights or moments hold NaN or infinity")
    except Exception as e:  # an untrusted content can raise nearly anything
        raise ValueError(f"is not a training checkpoint: {ckpt_file.reason(e)}") from None
    return saved


def checkpoint_of(found: dict[str, Any]) -> Checkpoint:
    """Return a file's content as a Checkpoint.

    nanoGPT's lose the mask buffers of its attention without SDPA and the machine that the run was set to. A head with
    numbers of its own, as in forks that do not tie it, stays apart from the embedding. Raises ValueError, or an error
    of a wrong type, if the weights, the model's settings or the evaluations are not what they should be.
    """
    saved = Checkpoint(**{f.name: found[f.name] for f in fields(Checkpoint) if f.name in found})
    saved.model = {PREFIX.sub("", k): w for k, w in saved.model.items() if not k.endswith(".attn.bias")}
    for name, w in saved.model.items():
        if not isinstance(w, Tensor) or w.is_complex():
            raise ValueError(f"its weight {name[:80]!r} is not a tensor of numbers")
    saved.best_val_loss = float(saved.best_val_loss)  # nanoGPT's is a tensor
    if "tokenizer" not in found:  # nanoGPT's, which names a GPU and float16 even after a run on a CPU
        saved.config = {k: v for k, v in saved.config.items() if k not in MACHINE_SETTINGS}
        saved.model_args = {"activation": "gelu"} | saved.model_args  # the exact GELU
    head = saved.model.get("lm_head.weight", torch.empty(0))
    table = saved.model.get("transformer.wte.weight", head)
    if head.shape == table.shape and not head.is_meta and not torch.equal(head, table.to(head.dtype)):
        saved.model_args = saved.model_args | {"tie_weights": False}
    GPTConfig.from_args(saved.model_args, "its model")
    evaluated_loss(saved)
    return saved
