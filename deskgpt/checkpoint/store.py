"""The checkpoints of a run's folder: written so that a crash at any moment leaves a whole one, and found again.

A checkpoint is nanoGPT's dictionary with what an exact resume needs beyond it, in one file (ckpt_file.py), or in a
folder where the model is sharded (folders.py). nanoGPT's own checkpoints are read too.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from deskgpt.checkpoint import ckpt_file, folders
from deskgpt.checkpoint.folders import agreed, is_folder, new_path, order_of
from deskgpt.checkpoint.optimizer_state import fill
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.sharding import local
from deskgpt.system.files import TEMPORARY, Fields, check_record, copy, is_number, sync_folder
from model import GPT, GPTConfig

NAME = "ckpt.pt"
BEST = "ckpt_best.pt"
MACHINE_SETTINGS = ("device", "dtype", "compile", "backend")
FORMAT = 2  # from 2 on, a file without a checksum is a damaged one
MISSING_FILE = "is missing"
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
    variant: dict[str, Any] | None = None  # how the model ran: dtype, compiled, attention, kind of device
    wandb_run_id: str | None = None
    progress: dict[str, Any] | None = None  # skipped batches, recent losses, evaluations
    metadata: dict[str, Any] | None = None  # what a resumed run compares, beside its settings
    extra_state: dict[str, Any] | None = None  # what else the run keeps: TrainState.register_state
    path: Path | None = None  # that it was loaded from; not saved

    @property
    def folder(self) -> Path | None:
        """Where its tensors still are: those here have shapes and no numbers, until weights_of or fill read them."""
        return self.path if self.path is not None and self.path.is_dir() else None


def content_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is saved of a checkpoint."""
    return {name: value for name, value in vars(checkpoint).items() if name != "path"}


# ---- writing -------------------------------------------------------------------------------------------------


def save(checkpoint: Checkpoint, out_dir: Path, best: bool, keep: int = 1, group: ProcessGroup | None = None) -> None:
    """Writes out_dir/ckpt.pt; with `best`, first the same as out_dir/ckpt_best.pt, a file of its own.

    With a group of ranks, which all call this with their shards, it writes a folder such as out_dir/ckpt-00001000,
    which says whether it is the best. The newest `keep` checkpoints and the best one stay. Each is durable before the
    next one is begun, and its predecessor is kept until then: one checkpoint's size must be free. Raises OSError where
    one cannot be written, ValueError where it should not be. The checkpoints before are then unharmed.
    """
    path = out_dir / NAME if group is None else agreed(group, lambda: new_path(out_dir, checkpoint.iter_num))[0]
    before = f"; the checkpoint before it is intact: {path}" if path.exists() else ""

    def check() -> None:
        try:
            ckpt_file.refuse_unreadable(content_of(checkpoint))
            if not math.isfinite(magnitude(content_of(checkpoint))):
                raise ValueError("weights or moments hold NaN or infinity")
            if magnitude(checkpoint.model) > LARGEST_WEIGHT:
                raise ValueError(f"there are weights above {LARGEST_WEIGHT:g}, which no step can mend")
        except ValueError as e:
            raise ValueError(f"{path} is not written: {e}{before}") from None

    agreed(group, check)
    if group is not None:
        tensors, rest = split_tensors(checkpoint, group)
        folders.write(tensors, rest | {"best": best}, path, group)
        agreed(group, lambda: prune(out_dir, keep) if distributed.get_rank(group) == 0 else None)
        return
    try:
        if keep > 1 and path.exists():
            give_number(path)
        write_file(checkpoint, out_dir / BEST if best else path)
        sync_folder(out_dir)
        if best:
            copy(out_dir / BEST, path)
            sync_folder(out_dir)
        prune(out_dir, keep)
    except OSError as e:
        raise OSError(
            f"cannot write {path}: {e.strerror or e}; free some disk space or choose another --out_dir{before}"
        ) from None


def write_file(checkpoint: Checkpoint, path: Path) -> None:
    """Writes a checkpoint as one file, which nanoGPT reads. Raises ValueError or OSError."""
    ckpt_file.write(content_of(whole(checkpoint)) | {"format": FORMAT}, path)


def magnitude(value: Any) -> float:
    """The sum of the largest numbers of each tensor in value; NaN or infinite where one of all numbers is."""
    tensors = [local(x) for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]
    tensors = [x if x.itemsize > 1 else x.float() for x in tensors if x.numel()]
    return sum(abs(extreme.item()) for x in tensors for extreme in torch.aminmax(x))


def give_number(path: Path) -> None:
    """Gives ckpt.pt, which is about to be replaced, a second name with its step, such as ckpt-00001000.pt."""
    older = path.with_name(f"ckpt-{ckpt_file.load(path)['iter_num']:08}.pt")
    older.unlink(missing_ok=True)
    try:
        os.link(path, older)
    except OSError:  # a file system without hard links
        copy(path, older)


def prune(out_dir: Path, keep: int) -> None:
    """Removes all checkpoints except the newest `keep` and the best one."""
    best = best_of(out_dir)
    old = [path for path in candidates(out_dir) if path.name != BEST][keep:]
    if best is not None and is_folder(best):
        old.append(out_dir / BEST)
    for path in old:
        if path != best and is_folder(path):
            removed = path.with_name(path.name + TEMPORARY)  # not a checkpoint from now on, whole or in parts
            os.replace(path, removed)
            shutil.rmtree(removed)
        elif path != best:
            path.unlink(missing_ok=True)


def take_over(out_dir: Path, print0: Callable[[str], None], step: int | None = None) -> None:
    """Before a run's first save: tidies what earlier runs left. Raises OSError.

    Temporary files are removed. Damaged checkpoints are moved aside, and so are those of steps after `step`, before
    which the run went back. A ckpt.pt without a ckpt_best.pt, such as nanoGPT's, is copied there: what is saved next
    may be worse.
    """
    for leftover in leftovers(out_dir):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    best = best_of(out_dir)  # which the run will name at its end
    for path in (*numbered(out_dir), out_dir / NAME, out_dir / BEST):
        damage = damage_of(path, checksums=path == best or not is_folder(path))
        if damage == MISSING_FILE:
            continue
        if damage or (step is not None and order_of(path)[0] > step):
            why = damage or f"is later than step {step}, to which the run went back"
            print0(f"{path} {why}: it is now in {set_aside(out_dir, (path.name,))}")
    if (out_dir / NAME).exists() and best_of(out_dir) is None:
        copy(out_dir / NAME, out_dir / BEST)
    sync_folder(out_dir)


def leftovers(out_dir: Path) -> list[Path]:
    """Temporary files of checkpoints in out_dir, which a killed run has left unless one is writing them."""
    names = (f"{NAME}*", f"{BEST}*", "ckpt-[0-9]*")
    return [path for name in names for path in out_dir.glob(name + TEMPORARY)]


def set_aside(out_dir: Path, names: tuple[str, ...]) -> Path | None:
    """Makes out_dir, and moves these files of an earlier run into its new folder previous-N, which it returns.

    None without such files. Raises OSError where out_dir cannot be written.
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
    """The folder that a run writes to; out_dir may also name the checkpoint in it that the run starts from."""
    path = Path(out_dir)
    return path.parent if path.suffix == ".pt" or is_folder(path) else path


def is_name(name: str) -> bool:
    """Whether a checkpoint can have this name, a file's or a folder's."""
    return name.endswith(".pt") or folders.NAME.fullmatch(name) is not None


def is_checkpoint(path: str | Path) -> bool:
    """Whether path names a checkpoint as `load` takes it."""
    path = Path(path)
    return bool(candidates(path)) if folder_of(path) == path else path.exists()


def numbered(out_dir: Path) -> list[Path]:
    """The checkpoints of out_dir with their step in the name, folders and files, the latest first."""
    found = [path for path in out_dir.glob("ckpt-*") if folders.NAME.fullmatch(path.name)]
    return sorted(found, key=order_of, reverse=True)


def candidates(out_dir: Path) -> list[Path]:
    """The checkpoints of out_dir, in the order in which a run would go on from them, if those before are damaged.

    The first is that of the latest step; without folders it is ckpt.pt. ckpt_best.pt is the last.
    """
    last = out_dir / NAME
    found = numbered(out_dir)
    sharded = [path for path in found if is_folder(path)]
    found = [*found, last] if sharded and not is_later(last, sharded[0]) else [last, *found]
    return [path for path in (*found, out_dir / BEST) if path.exists()]


def best_of(out_dir: Path) -> Path | None:
    """The checkpoint with the lowest val loss: ckpt_best.pt, or a later folder that was saved as the best."""
    best = out_dir / BEST if (out_dir / BEST).exists() else None
    for path in numbered(out_dir):
        if is_folder(path) and folders.is_best(path):
            return best if best is not None and is_later(best, path) else path
    return best


def is_later(file: Path, folder: Path) -> bool:
    """Whether a file is a good checkpoint of a later step than that of a folder."""
    return damage_of(file) is None and load_checked(file).iter_num > order_of(folder)[0]


# ---- reading -------------------------------------------------------------------------------------------------


def load(
    out_dir: str | Path,
    print0: Callable[[str], object] = str,
    dist: DistContext | None = None,
    checksums: bool = True,
) -> Checkpoint:
    """The last good checkpoint of the folder out_dir, or the one at the path of a .pt file or of a folder of shards.

    In a folder that is the first of `candidates` that is not damaged; print0 is told of damaged ones. dist: all ranks
    call this and find the same; the first one compares checksums. checksums: False leaves out those of tensors. Raises
    ValueError where there is no good one.
    """
    path = Path(out_dir)
    is_named = folder_of(path) != path
    found = [path] if is_named else candidates(path)
    if not is_named and not any(p.name == NAME or is_folder(p) for p in found):
        found = [path / NAME, *found]  # to say that it is missing
    damages: list[str] = []
    for p in found:
        damage = damage_of(p, checksums, dist)
        if damage is None:
            saved = load_checked(p)
            if damages:
                print0(f"{damages[0]}: going on from {p.name}, step {saved.iter_num}")
            return saved
        damages.append(f"{p} {damage}")
    if damages == [f"{found[0]} {MISSING_FILE}"]:
        raise ValueError(f"{found[0]}: no such checkpoint; is --out_dir right?{runs_beside(folder_of(path))}")
    best = path.with_name(BEST)
    remedy = "restore one of them from a copy" if len(found) > 1 else "restore it from a copy"
    if is_named and best.exists() and best != path:
        remedy = f"--out_dir={best} is another"
    raise ValueError(f"{', and '.join(damages)}; {remedy}")


def runs_beside(folder: Path) -> str:
    """A sentence that names folders with checkpoints where `folder` would be; empty without any."""
    try:
        found = sorted(str(path) for path in folder.parent.iterdir() if path.is_dir() and candidates(path))
    except OSError:
        found = []
    return f" Here are {', '.join(found[:5])}" if found else ""


def resume(out_dir: str | Path, print0: Callable[[str], object] = str, dist: DistContext | None = None) -> Checkpoint:
    """As load, for a run that goes on; best_val_loss is that of the best checkpoint in the folder where it is lower,
    as it is after a kill between the two files of a save. Losses on other data are not compared.
    """
    saved = load(out_dir, print0, dist)
    path = best_of(folder_of(out_dir))
    if path is None:
        return saved
    damage = damage_of(path, dist=dist)
    if damage is None:
        best = load_checked(path)
        if evaluated_on(best) == evaluated_on(saved):
            saved.best_val_loss = min(saved.best_val_loss, best.best_val_loss)
    else:
        print0(f"{path} {damage}: its loss, the best so far, does not count")
        if not is_folder(path) or order_of(path)[0] <= saved.iter_num:
            saved.best_val_loss = math.inf  # it belongs to the damaged file
    return saved


def evaluated_on(saved: Checkpoint) -> list[Any]:
    """What two losses must have in common to be compared, as far as older checkpoints know it."""
    metadata = saved.metadata or {}
    return [saved.config.get("dataset"), saved.tokenizer, metadata.get(VAL_DATA), metadata.get(EVAL_WINDOWS)]


def load_checked(path: Path) -> Checkpoint:
    """A checkpoint without damage. A file's tensors are memory-mapped on the CPU, a folder's have only shapes.

    nanoGPT's lose the mask buffers of its attention without SDPA and the machine that the run was set to.
    """
    found = joined(path, folders.tensors_of(path)) if is_folder(path) else ckpt_file.load(path)
    saved = Checkpoint(**{f.name: found[f.name] for f in fields(Checkpoint) if f.name in found})
    saved.path = path
    saved.model = {PREFIX.sub("", k): w for k, w in saved.model.items() if not k.endswith(".attn.bias")}
    saved.best_val_loss = float(saved.best_val_loss)  # nanoGPT's is a tensor
    if "tokenizer" not in found:  # nanoGPT's, which names a GPU and float16 even after a run on a CPU
        saved.config = {k: v for k, v in saved.config.items() if k not in MACHINE_SETTINGS}
        saved.model_args = {"activation": "gelu"} | saved.model_args  # the exact GELU
    return saved


def weights_of(saved: Checkpoint) -> dict[str, Tensor]:
    """The whole weights of a loaded checkpoint, on the CPU. Raises ValueError where they cannot be read."""
    return whole(saved, ("model",)).model


def whole(saved: Checkpoint, names: tuple[str, ...] = ("model", "optimizer")) -> Checkpoint:
    """A loaded checkpoint with the tensors of these fields on the CPU. Raises ValueError where they cannot be read."""
    if saved.folder is None:
        return saved
    shapes = folders.tensors_of(saved.folder)
    if "optimizer" not in names:
        shapes = {name: shape for name, shape in shapes.items() if name in saved.model}
    tensors = {name: torch.empty_like(shape, device="cpu") for name, shape in shapes.items()}
    folders.read(tensors, saved.folder)
    found = joined(saved.folder, tensors)
    return replace(saved, path=None, **{name: found[name] for name in names})


def restore_weights(model: GPT, saved: Checkpoint) -> None:
    """Copies the weights of a loaded checkpoint into a model of its shape, whole or sharded. Raises ValueError."""
    own = {name: w.detach() for name, w in model.state_dict().items()}
    if saved.folder is not None:  # where shared weights have one name
        own = {name: own[name] for name in folders.tensors_of(saved.folder) if name in own}
    fill(own, saved.model, saved.folder)


# ---- folders of shards ---------------------------------------------------------------------------------------


def split_tensors(
    checkpoint: Checkpoint, group: ProcessGroup | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint by name, such as exp_avg.transformer.wte.weight, and everything else, for JSON.

    Of weights that share their numbers the last one is kept, as `shared` says by name.
    """
    rest = content_of(checkpoint)
    tensors = dict(rest.pop("model"))
    shared = agreed(group, lambda: names_of_shared(tensors))[0]  # of rank 0: others may have no rows to compare
    for name in shared:
        del tensors[name]
    optimizer = dict(rest["optimizer"])
    names = optimizer["names"]
    scalars: dict[str, dict[str, Any]] = {}
    for i, of_parameter in optimizer.pop("state").items():
        for kind, value in of_parameter.items():
            if isinstance(value, Tensor) and value.dim():
                tensors[f"{kind}.{names[i]}"] = value
            else:
                scalar = {"tensor": value.item()} if isinstance(value, Tensor) else value
                scalars.setdefault(names[i], {})[kind] = scalar
    return tensors, rest | {"shared": shared, "optimizer": optimizer | {"scalars": scalars}}


def names_of_shared(weights: dict[str, Tensor]) -> dict[str, str]:
    """Of weights that share their numbers, such as a tied head: the name to its first name."""
    first: dict[tuple[int, torch.Size], str] = {}
    shared = {}
    for name, w in weights.items():
        first_name = first.setdefault((local(w).data_ptr(), w.shape), name)
        if first_name != name:
            shared[name] = first_name
    return shared


TIED = {"lm_head.weight": "transformer.wte.weight"}  # in folders that do not say what is shared


def joined(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What a folder with these tensors holds, as the dictionary of a file. Raises ValueError."""
    tensors = dict(tensors)
    try:
        rest = dict(folders.rest_of(folder))
        optimizer = dict(rest["optimizer"])
        numbers = {name: i for i, name in enumerate(optimizer["names"])}
        state: dict[int, dict[str, Any]] = {}
        for name, values in optimizer.pop("scalars").items():
            of_parameter = state.setdefault(numbers[name], {})
            for kind, value in values.items():
                of_parameter[kind] = torch.tensor(value["tensor"]) if isinstance(value, dict) else value
        for key in list(tensors):
            kind, _, name = key.partition(".")
            if name in numbers:
                state.setdefault(numbers[name], {})[kind] = tensors.pop(key)
        rest["optimizer"] = optimizer | {"state": dict(sorted(state.items()))}
        shared = rest.pop("shared", {name: first for name, first in TIED.items() if name not in tensors})
        return rest | {"model": tensors | {name: tensors[first] for name, first in shared.items()}}
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise ValueError(f"its {folders.REST} does not belong to its tensors: {e}"[:200]) from None


# ---- checks --------------------------------------------------------------------------------------------------


def damage_of(path: Path, checksums: bool = True, dist: DistContext | None = None) -> str | None:
    """Why what is at path is not a good checkpoint, in words that follow its name; None for a good one.

    Each content is checked once: a resumed run asks several times. checksums: whether those of tensors are compared,
    which takes minutes for a large checkpoint: the first rank does it, and what one rank finds counts for all.
    """
    try:
        files = sorted(path.iterdir()) if is_folder(path) else [path]
        stats = tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in (file.stat() for file in files))
        damage = _damage_of(path, checksums and (dist is None or dist.is_first), stats)
    except OSError:  # the run that writes there may have just removed it
        damage = MISSING_FILE
    if dist is None or not checksums or dist.all(damage is None):
        return damage
    return damage or "is damaged, as another rank has found"


@lru_cache(32)
def _damage_of(path: Path, checksums: bool, stats: tuple[tuple[int, int, int], ...]) -> str | None:
    has_checksum = False
    try:
        if is_folder(path):
            folders.check(path, checksums)
            found = joined(path, folders.tensors_of(path))
        else:
            has_checksum = ckpt_file.check(path, checksums)
            found = ckpt_file.load(path)
    except (OSError, ValueError) as e:
        return f"is not a readable checkpoint ({getattr(e, 'strerror', None) or e})"
    try:
        check_content(found)
    except ValueError as e:
        return f"is not a training checkpoint: {e}"
    if is_folder(path):
        return None
    if not has_checksum and "format" in found:
        return "is not a readable checkpoint (its checksum is missing)"
    if checksums and not math.isfinite(magnitude(found)):
        return "holds weights or moments that are NaN or infinity"
    return None


def is_optional(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kinds)


def is_loss(value: Any) -> bool:
    """Whether a value is a number, perhaps nanoGPT's in a tensor."""
    is_one = isinstance(value, int | float | np.floating) or (isinstance(value, Tensor) and value.numel() == 1)
    return is_one and not isinstance(value, bool) and not math.isnan(value)


CONTENT: Fields = dict.fromkeys(("model", "model_args", "config"), lambda value: isinstance(value, dict))
CONTENT |= dict.fromkeys(
    ("optimizer", "scaler", "tokenizer", "variant", "progress", "metadata", "extra_state"), is_optional(dict)
)
CONTENT |= dict.fromkeys(("chat", "wandb_run_id"), is_optional(str))
CONTENT |= {"best_val_loss": is_loss, "iter_num": lambda x: is_number(x) and x < MOST_STEPS}


def check_content(found: Any) -> None:
    """Raises ValueError where what a file holds has not the types of a checkpoint."""
    check_record(found, CONTENT, required=("model", "model_args"))
    for name, w in found["model"].items():
        if not (isinstance(name, str) and isinstance(w, Tensor) and not w.is_complex()):
            raise ValueError(f"its weight {str(name)[:80]!r} is not a tensor of numbers")
    GPTConfig.from_args(found["model_args"], "its model")
