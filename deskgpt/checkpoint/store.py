"""Checkpoints: written so that a crash at any moment leaves a whole one, read without running code from them.

On disk a checkpoint is nanoGPT's dictionary with what an exact resume needs beyond it. nanoGPT's own checkpoints are
read too. Each file carries a checksum (deskgpt/checkpoint/archive.py). Sharded runs write a folder instead
(deskgpt/checkpoint/folders.py).
"""

from __future__ import annotations

import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from deskgpt.checkpoint import archive, folders
from deskgpt.checkpoint.folders import agreed, is_folder, new_path, order_of
from deskgpt.checkpoint.optimizer_state import fill
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.sharding import local
from deskgpt.system.files import TEMPORARY, copy, replacing, sync_folder
from deskgpt.system.untrusted import Fields, check_record, is_number
from model import GPT

NAME = "ckpt.pt"
BEST = "ckpt_best.pt"
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
    form: dict[str, Any] | None = None  # how the model ran: dtype, compiled, explicit, and the kind of device
    wandb_run_id: str | None = None
    health: dict[str, Any] | None = None  # Health.state: batches that were skipped, recent losses, evaluations
    facts: dict[str, Any] | None = None  # what a resumed run compares, beside its settings: resuming.py
    parts: dict[str, Any] | None = None  # what else the run keeps: Run.keep
    path: Path | None = None  # that it was loaded from; not saved

    @property
    def folder(self) -> Path | None:
        """Where its tensors still are: those here have shapes and no numbers, until weights_of or fill read them."""
        return self.path if self.path is not None and self.path.is_dir() else None


def content_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is saved of a checkpoint."""
    left_out = ("path",) if checkpoint.parts else ("path", "parts")
    return {name: value for name, value in vars(checkpoint).items() if name not in left_out}


# ---- writing -------------------------------------------------------------------------------------------------


def save(
    checkpoint: Checkpoint, out_dir: Path, best: bool, keep: int = 1, group: dist.ProcessGroup | None = None
) -> None:
    """Writes out_dir/ckpt.pt; with `best`, first the same as out_dir/ckpt_best.pt, a file of its own.

    With a group of ranks, which all call this with their shards, it writes a folder such as out_dir/ckpt-00001000,
    which says whether it is the best. The newest `keep` checkpoints and the best one stay. Each is durable before the
    next one is begun, and its predecessor is kept until then: one checkpoint's size must be free. Raises OSError where
    one cannot be written, ValueError where the weights are not finite; the checkpoints before are then unharmed.
    """
    path = out_dir / NAME

    def check() -> None:
        try:
            for where, value in values_in(content_of(checkpoint)):
                check_value(where, value)
                if not is_finite(value):
                    raise ValueError("weights or moments hold NaN or infinity")
        except ValueError as e:
            raise ValueError(f"{path} is not written: {e}{kept(path)}") from None

    if group is not None:
        path = agreed(group, lambda: new_path(out_dir, checkpoint.iter_num))[0]
        agreed(group, check)
        tensors, rest = parted(checkpoint)
        folders.write(tensors, rest | {"best": best}, path, group)
        agreed(group, lambda: prune(out_dir, keep) if dist.get_rank(group) == 0 else None)
        return
    check()
    try:
        if keep > 1 and path.exists():
            number(path)
        with replacing(out_dir / BEST if best else path) as file:
            archive.write(content_of(checkpoint) | {"format": FORMAT}, file)
        sync_folder(out_dir)
        if best:
            copy(out_dir / BEST, path)
            sync_folder(out_dir)
        prune(out_dir, keep)
    except (OSError, RuntimeError) as e:  # torch wraps a failed write in a RuntimeError
        cause = e if isinstance(e, OSError) else e.__context__
        reason = getattr(cause, "strerror", None) or str(e).splitlines()[0]
        raise OSError(
            f"cannot write {path}: {reason}; free some disk space or choose another --out_dir{kept(path)}"
        ) from None


def number(path: Path) -> None:
    """Gives ckpt.pt, which is about to be replaced, a second name with its step, such as ckpt-00001000.pt."""
    older = path.with_name(f"ckpt-{archive.load(path)['iter_num']:08}.pt")
    older.unlink(missing_ok=True)
    try:
        os.link(path, older)
    except OSError:  # a file system without hard links
        copy(path, older)


def prune(out_dir: Path, keep: int) -> None:
    """Removes all checkpoints but for the newest `keep` and the best one."""
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


def kept(path: Path) -> str:
    return f"; the checkpoint before it is intact: {path}" if path.exists() else ""


def take_over(out_dir: Path, print0: Callable[[str], None], step: int | None = None) -> None:
    """Before a run's first save: tidies what earlier runs left in a folder that no other run uses. Raises OSError.

    Temporary files of killed runs are removed. Damaged checkpoints are moved aside, so that they are not overwritten,
    and so are those of steps after `step`, the one that is about to be saved: the run went back before them. A ckpt.pt
    without a ckpt_best.pt, such as nanoGPT's, is copied there: whatever is saved next may be worse.
    """
    for leftover in leftovers(out_dir):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    best = best_of(out_dir)  # which the run will name at its end
    for path in (*numbered(out_dir), out_dir / NAME, out_dir / BEST):
        damage = damage_of(path) if path == best else damage_of(path, NO_CHECKSUMS)
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
    return path.parent if path.suffix == ".pt" or is_folder(path) else path


def is_name(name: str) -> bool:
    """Whether a checkpoint can have this name, a file's or a folder's."""
    return name.endswith(".pt") or folders.NAME.fullmatch(name) is not None


def is_one(path: str | Path) -> bool:
    """Whether path names a checkpoint as `load` takes it."""
    path = Path(path)
    return bool(candidates(path)) if folder_of(path) == path else path.is_file() or is_folder(path)


def numbered(out_dir: Path) -> list[Path]:
    """The checkpoints of out_dir with their step in the name, folders and files, the latest first."""
    found = [path for path in out_dir.glob("ckpt-*") if folders.NAME.fullmatch(path.name)]
    return sorted(found, key=order_of, reverse=True)


def candidates(out_dir: Path) -> list[Path]:
    """The checkpoints of out_dir, in the order in which a run would go on from them, were those before damaged.

    The first is that of the latest step, since a run that goes back moves later ones aside (take_over). Without
    folders it is ckpt.pt, the last one that was saved. ckpt_best.pt is the last.
    """
    last = out_dir / NAME
    found = numbered(out_dir)
    sharded = [path for path in found if is_folder(path)]
    found = [*found, last] if sharded and not is_later(last, sharded[0]) else [last, *found]
    return [path for path in (*found, out_dir / BEST) if path.exists()]


def best_of(out_dir: Path) -> Path | None:
    """The checkpoint with the lowest validation loss: ckpt_best.pt, or the latest folder that was saved as the best.

    The later one, where a run has changed from one form to the other. None if there is none.
    """
    best = out_dir / BEST if (out_dir / BEST).exists() else None
    for path in numbered(out_dir):
        if is_folder(path) and folders.is_best(path):
            return best if best is not None and is_later(best, path) else path
    return best


def is_later(file: Path, folder: Path) -> bool:
    """Whether a file is a good checkpoint of a later step than that of a folder."""
    return damage_of(file) is None and load_checked(file).iter_num > order_of(folder)[0]


def silent(line: str) -> None:
    pass


def load(
    out_dir: str | Path,
    print0: Callable[[str], None] = silent,
    ranks: DistContext | None = None,
    checksums: bool = True,
) -> Checkpoint:
    """The last good checkpoint of the folder out_dir, or the one at the path of a .pt file or of a folder of shards.

    In a folder that is the first of `candidates` that is not damaged; say() is told of damaged ones. Raises ValueError
    where there is no good one. ranks: all call this, share the checking of a folder, and find the same. checksums:
    False compares only sizes of a folder's tensors.
    """
    path = Path(out_dir)
    is_named = folder_of(path) != path
    found = [path] if is_named else candidates(path)
    last = path / NAME
    if not is_named and last not in found and not any(is_folder(p) for p in found):
        found = [last, *found]  # to say that it is missing
    damages: list[str] = []
    for p in found:
        damage = damage_for(p, ranks, checksums)
        if damage is None:
            saved = load_checked(p)
            if damages:
                print0(f"{damages[0]}: going on from {p.name}, step {saved.iter_num}")
            return saved
        damages.append(f"{p} {damage}")
    if damages == [f"{found[0]} {MISSING_FILE}"]:
        raise ValueError(f"{found[0]}: no such checkpoint; is --out_dir right?")
    best = path.with_name(BEST)
    remedy = "restore one of them from a copy" if len(found) > 1 else "restore it from a copy"
    if is_named and best.exists() and best != path:
        remedy = f"--out_dir={best} is another"
    raise ValueError(f"{', and '.join(damages)}; {remedy}")


def damage_for(path: Path, ranks: DistContext | None, checksums: bool) -> str | None:
    """As damage_of, for ranks that share the checksums of a folder; what one finds is true for all."""
    if ranks is None or not checksums:
        return damage_of(path) if checksums else damage_of(path, NO_CHECKSUMS)
    damage = damage_of(path, (ranks.rank, ranks.world))
    return damage if ranks.all(damage is None) else damage or "is damaged, as another rank has found"


def resume(out_dir: str | Path, print0: Callable[[str], None] = silent, ranks: DistContext | None = None) -> Checkpoint:
    """As load, for a run that goes on; best_val_loss is that of the best checkpoint in the folder where it is lower.

    It is after a kill between the two files of a save, and where a run goes back to an older checkpoint. Losses on
    other data are not compared.
    """
    saved = load(out_dir, print0, ranks)
    path = best_of(folder_of(out_dir))
    if path is None:
        return saved
    damage = damage_for(path, ranks, checksums=True)
    if damage is None:
        best = load_checked(path)
        if evaluated_on(best) == evaluated_on(saved):
            saved.best_val_loss = min(saved.best_val_loss, best.best_val_loss)
    else:
        print0(f"{path} {damage}: its loss, the best so far, does not count")
        if not is_folder(path) or order_of(path)[0] <= saved.iter_num:
            saved.best_val_loss = math.inf  # what a later checkpoint names as the best is the loss of the damaged one
    return saved


def evaluated_on(saved: Checkpoint) -> list[Any]:
    """What a checkpoint knows of its validation data; that of older ones is less."""
    facts = saved.facts or {}
    return [saved.config.get("dataset"), saved.tokenizer, facts.get(VAL_DATA), facts.get(EVAL_WINDOWS)]


def load_checked(path: Path) -> Checkpoint:
    """A checkpoint without damage. A file's tensors are memory-mapped on the CPU, a folder's have only shapes.

    Prefixes that torch.compile and DDP leave on parameter names are removed. nanoGPT's lose the mask buffers of its
    attention without SDPA and the machine that the run was set to, and their model_args name its GELU.
    """
    found = joined(path, folders.tensors_of(path)) if is_folder(path) else archive.load(path)
    saved = Checkpoint(**{f.name: found[f.name] for f in fields(Checkpoint) if f.name in found})
    saved.path = path
    saved.model = {plain_name(k): w for k, w in saved.model.items() if not k.endswith(".attn.bias")}
    saved.best_val_loss = float(saved.best_val_loss)  # nanoGPT's is a tensor
    if "tokenizer" not in found:  # nanoGPT's, which names a GPU and float16 even after a run on a CPU
        saved.config = {k: v for k, v in saved.config.items() if k not in MACHINE_SETTINGS}
        saved.model_args = {"activation": "gelu"} | saved.model_args  # the exact GELU
    return saved


def plain_name(key: str) -> str:
    """A parameter's name without the prefixes of torch.compile and DDP."""
    return key.removeprefix("_orig_mod.").removeprefix("module.").removeprefix("_orig_mod.")


# ---- folders of shards ---------------------------------------------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"  # one tensor where tied; then only the embedding is saved


def parted(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint by name, such as exp_avg.transformer.wte.weight, and everything else, for JSON."""
    rest = content_of(checkpoint)
    tensors = dict(rest.pop("model"))
    if checkpoint.model_args.get("tie_weights", True):
        del tensors[HEAD]
    optimizer = dict(checkpoint.optimizer)
    names = optimizer["names"]
    scalars: dict[str, dict[str, Any]] = {}
    for i, of_parameter in optimizer.pop("state").items():
        for kind, value in of_parameter.items():
            if isinstance(value, Tensor) and value.dim():
                tensors[f"{kind}.{names[i]}"] = value
            else:
                scalar = {"tensor": value.item()} if isinstance(value, Tensor) else value
                scalars.setdefault(names[i], {})[kind] = scalar
    return tensors, rest | {"optimizer": optimizer | {"scalars": scalars}}


def joined(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What a folder with these tensors holds, as the dictionary of a file. Raises ValueError."""
    tensors = dict(tensors)
    try:
        rest = dict(folders.rest_of(folder))
        optimizer = dict(rest["optimizer"])
        numbers = {name: i for i, name in enumerate(optimizer["names"])}
        state: dict[int, dict[str, Any]] = {}
        for name, step in optimizer.pop("steps", {}).items():  # as folders had them until 2026-11-23
            state[numbers[name]] = {"step": torch.tensor(float(step))}
        for name, values in optimizer.pop("scalars", {}).items():
            of_parameter = state.setdefault(numbers[name], {})
            for kind, value in values.items():
                of_parameter[kind] = torch.tensor(value["tensor"]) if isinstance(value, dict) else value
        for key in list(tensors):
            kind, _, name = key.partition(".")
            if name in numbers:
                state.setdefault(numbers[name], {})[kind] = tensors.pop(key)
        rest["optimizer"] = optimizer | {"state": dict(sorted(state.items()))}
        return rest | {"model": tensors if HEAD in tensors else tensors | {HEAD: tensors[EMBEDDING]}}
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise ValueError(f"its {folders.REST} does not belong to its tensors: {e}"[:200]) from None


def weights_of(saved: Checkpoint) -> dict[str, Tensor]:
    """The whole weights of a loaded checkpoint, on the CPU. Raises ValueError where they cannot be read."""
    if saved.folder is None:
        return saved.model
    tied = saved.model[HEAD] is saved.model[EMBEDDING]
    weights = {name: w for name, w in saved.model.items() if not (tied and name == HEAD)}
    weights = read_whole(weights, saved.folder)
    return weights | {HEAD: weights[EMBEDDING]} if tied else weights


def whole(saved: Checkpoint) -> Checkpoint:
    """A loaded checkpoint with all its tensors on the CPU. Raises ValueError where they cannot be read."""
    if saved.folder is None:
        return saved
    found = joined(saved.folder, read_whole(folders.tensors_of(saved.folder), saved.folder))
    return replace(saved, model=found["model"], optimizer=found["optimizer"], path=None)


def read_whole(shapes: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors of these names and shapes, from the folder."""
    tensors = {name: torch.empty_like(shape, device="cpu") for name, shape in shapes.items()}
    folders.read(tensors, folder)
    return tensors


def restore_weights(model: GPT, saved: Checkpoint) -> None:
    """Copies the weights of a loaded checkpoint into a model of its shape, whole or sharded. Raises ValueError."""
    own = model.state_dict()
    tied = model.lm_head.weight is model.transformer.wte.weight
    fill({name: w.detach() for name, w in own.items() if not (tied and name == HEAD)}, saved.model, saved.folder)


# ---- checks --------------------------------------------------------------------------------------------------

# Far above what any checkpoint has: bounds for files that were made to be endless.
MOST_VALUES = 1_000_000
DEEPEST = 20
PLAIN = {dict, OrderedDict, list, tuple, str, float, bool, type(None)}
# The state of float16's GradScaler, which computes with these.
SCALER: Fields = {
    "scale": lambda value: type(value) is float and 0 < value < math.inf,
    "growth_factor": lambda value: isinstance(value, int | float) and 1 <= value < math.inf,
    "backoff_factor": lambda value: type(value) is float and 0 < value < math.inf,
    "growth_interval": lambda value: is_number(value) and value >= 1,
    "_growth_tracker": is_number,
}


NO_CHECKSUMS = (0, 0)  # which take minutes for a large folder


def damage_of(path: Path, part: tuple[int, int] = (0, 1)) -> str | None:
    """Why what is at path is not a good checkpoint, in words that follow its name; None for a good one.

    Each content is checked once: a resumed run asks several times. part: of a folder, as folders.check.
    """
    files = [path]
    try:
        if is_folder(path):
            files = sorted(path.iterdir())
        else:
            part = (0, 1)  # a file is checked as a whole, and only once
        stats = [file.stat() for file in files]
    except OSError:  # the run that writes there may have just removed it
        return MISSING_FILE
    return _damage_of(path, part, tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in stats))


@lru_cache(32)
def _damage_of(path: Path, part: tuple[int, int], stats: tuple[tuple[int, int, int], ...]) -> str | None:
    is_in_folder = is_folder(path)
    try:
        if is_in_folder:
            folders.check(path, part)
            found = joined(path, folders.tensors_of(path))
        else:
            has_checksum = archive.check(path)
            found = archive.load(path)
    except ValueError as e:
        return f"is not a readable checkpoint ({e})"
    except OSError as e:
        return f"is not a readable checkpoint ({e.strerror})"
    try:
        if is_in_folder and not isinstance(found.pop("best", None), bool):
            raise ValueError("it does not say whether it is the best")
        check_content(found)
    except ValueError as e:
        return f"is not a training checkpoint: {e}"
    if is_in_folder:
        return None
    if not has_checksum and "format" in found:
        return "is not a readable checkpoint (its checksum is missing)"
    if not all(is_finite(value) for _, value in values_in(found)):
        return "holds weights or moments that are NaN or infinity"
    return None


def check_content(found: Any) -> None:
    """Raises ValueError where what a file holds has not the types and sizes of a checkpoint."""
    if not isinstance(found, dict):
        raise ValueError("it holds no dictionary")
    for n, (where, value) in enumerate(values_in(found)):
        if n > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        check_value(where, value)
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
        check_record(found["scaler"], SCALER, required=SCALER)


def values_in(value: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """value and all that it contains, dictionaries' keys too, each with its place, such as model.lm_head.weight.

    Raises ValueError where it is nested too deep.
    """
    yield where, value
    if depth == DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        for key, entry in value.items():
            yield where, key
            yield from values_in(entry, f"{where}.{key}"[-100:].lstrip("."), depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from values_in(entry, where, depth + 1)


def check_value(where: str, value: Any) -> None:
    """Raises ValueError where a value is neither plain nor a tensor with all its numbers in the file.

    Of classes that inherit from plain ones, as numpy's float64 does, archive.py reads none but torch's.
    """
    if isinstance(value, Tensor):
        value = local(value)
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"{where!r}, a tensor of {tuple(value.shape)}, has more numbers than the file")
        if value.dtype not in archive.DTYPES:
            raise ValueError(f"{where!r} has a tensor of {value.dtype}")
    elif type(value) is int:
        if abs(value) >= 2**63:
            raise ValueError(f"a number in it has more than 64 bits: {where!r}")
    elif type(value) not in PLAIN:
        raise ValueError(f"{where!r} has a {type(value).__name__}, which is no plain value")


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
        if not (isinstance(name, str) and isinstance(w, Tensor) and not w.is_complex()):
            raise ValueError(f"its weight {str(name)[:80]!r} is not a tensor of numbers")
    blocks = {name.split(".h.")[1].split(".")[0] for name in weights if ".h." in name}
    n_layer = model_args.get("n_layer")
    if isinstance(n_layer, int) and n_layer > max(len(blocks), 1):
        raise ValueError(f"model_args say n_layer={n_layer}, the weights are those of {len(blocks)} blocks")
    wanted = (model_args.get("vocab_size"), model_args.get("n_embd"))
    for name, w in weights.items():
        if name.endswith("transformer.wte.weight") and None not in wanted and tuple(w.shape) != wanted:
            raise ValueError(f"model_args say vocab_size={wanted[0]}, n_embd={wanted[1]}, {name} is {tuple(w.shape)}")


def is_finite(value: Any) -> bool:
    """False for a tensor that holds NaN or infinity."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and local(value).numel()):
        return True
    value = local(value)
    return all(math.isfinite(x) for x in torch.stack(torch.aminmax(value)).tolist())  # NaN is smallest and largest
