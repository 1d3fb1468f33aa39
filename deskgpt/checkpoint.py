"""The checkpoints of a run's folder: ckpt.pt, the last one, and ckpt_best.pt, the best one by its
val loss.

A checkpoint is nanoGPT's dictionary plus what an exact resume needs, always one file, so any number
of ranks can resume it. torch.distributed.checkpoint is not used: it pickles, and a folder cannot be
replaced in one step. A crash at any moment leaves an intact checkpoint. nanoGPT's own checkpoints
are read too.
"""

import math
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deskgpt.distributed import ALONE, DistContext, is_dtensor
from deskgpt.errors import reason
from deskgpt.files import (
    Fields,
    cannot_write,
    check_record,
    copy_file,
    is_number,
    remove_leftovers,
    replacing,
    sync_folder,
)
from model import GPTConfig

CKPT = "ckpt.pt"
CKPT_BEST = "ckpt_best.pt"
MACHINE_SETTINGS = ("device", "dtype", "compile", "backend")
MOST_STEPS = 2**40  # far above any run: the order of batches counts in 64 bits
EXTRA_STATE = "_extra_state"  # torch's name for what a module's get_extra_state returns
# The square of a larger one overflows float32, so that nothing can be computed with it.
LARGEST_WEIGHT = 1e18


@dataclass
class Checkpoint:
    """The content of ckpt.pt.

    The first six are nanoGPT's; the others are None in a checkpoint without them.
    """

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
    progress: dict[str, Any] | None = None  # recent losses, evaluations
    metadata: dict[str, Any] | None = None  # compared by a resumed run, beside its settings
    extra_state: dict[str, Any] | None = None  # of objects given to TrainState.register_state


# ---- writing -------------------------------------------------------------------------------------


def save_checkpoint(checkpoint: Checkpoint, out_dir: Path, best: bool) -> None:
    """Write out_dir/ckpt.pt; with `best`, first the same as out_dir/ckpt_best.pt, a file of its
    own.

    Each file is durable before the next one is begun, and its predecessor is kept until then: one
    checkpoint's size must be free. Raises OSError if one cannot be written, ValueError if it should
    not be. The checkpoints before are then unharmed, and ckpt_best.pt may be the new one.
    """
    path = out_dir / CKPT
    try:
        content = savable(vars(checkpoint))
        check_numbers(checkpoint)
    except ValueError as e:
        raise ValueError(
            f"{path} is not written: {e}; a checkpoint that was there before is intact"
        ) from None
    try:
        write_ckpt_file(content, out_dir / CKPT_BEST if best else path)
        sync_folder(out_dir)
        if best:
            copy_file(out_dir / CKPT_BEST, path)
            sync_folder(out_dir)
    except OSError as e:
        raise cannot_write(path, e) from None


def savable(value: Any, name: str = "") -> Any:
    """Return the value as a checkpoint keeps it: NumPy's numbers become Python's.

    Raises ValueError, with the value's name, if load_checkpoint would not read it back.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in PLAIN_TYPES:
        return value
    if is_dtensor(value) or is_dense(value):  # sharded ones are gathered before they are written
        return value
    if isinstance(value, dict):
        return {key: savable(item, f"{name}.{key}".lstrip(".")) for key, item in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(savable(item, name) for item in value)
    raise ValueError(
        f"{name} holds a {type(value).__name__}; checkpoints keep numbers, texts, and tensors that "
        "are not sparse, nested, expanded or on meta"
    )


def check_numbers(saved: Checkpoint) -> None:
    """Raise ValueError if weights hold NaN or infinity, or are too large.

    Buffers may: a mask of -inf is one. The optimizer's state tells which weights are trained.
    """
    trained = (saved.optimizer or {}).get("names", saved.model)
    for name, w in saved.model.items():
        if name in trained and isinstance(w, Tensor) and w.is_floating_point() and w.numel():
            low, high = torch.aminmax(w.float())
            if not torch.maximum(-low, high) <= LARGEST_WEIGHT:
                raise ValueError(
                    f"the weights {name} hold NaN, infinity or numbers above "
                    f"{LARGEST_WEIGHT:g}, which no step can mend"
                )


def clean_out_dir(
    out_dir: Path,
    print0: Callable[[str], None],
    has_best: bool = True,
    first_step: int = MOST_STEPS,
) -> None:
    """Tidy what earlier runs left, before a run's first save. Raises OSError.

    Temporary files are removed, damaged checkpoints are moved aside, and so is a ckpt.pt later than
    first_step, to which this run goes back: it would be overwritten. A ckpt.pt whose val loss is
    known is copied to ckpt_best.pt if there is none: the next one may be worse. has_best: the run's
    losses can be compared with theirs; otherwise ckpt_best.pt is moved aside, and copied to ckpt.pt
    if there is none.
    """
    remove_leftovers(out_dir, CKPT, CKPT_BEST)
    losses = {}  # by the name of an intact file
    for path in list_checkpoints(out_dir):
        try:
            saved = read_checkpoint(path, is_mapped=True)
            step = saved.iter_num
            loss = val_loss_of_weights(saved)
            del saved  # Windows moves no file that is mapped
            if path.name == CKPT and step > first_step:
                raise ValueError(f"is of step {step}, and this run goes back to step {first_step}")
            losses[path.name] = loss
        except ValueError as e:
            print0(f"{path} {e}: it is now in {archive_previous_run(out_dir, (path.name,))}")
    last = out_dir / CKPT
    best = out_dir / CKPT_BEST
    if CKPT_BEST in losses and not has_best:
        if CKPT not in losses:
            copy_file(best, last)
        print0(
            f"{best} has a loss that this run's cannot be compared with: it is now in "
            f"{archive_previous_run(out_dir, (CKPT_BEST,))}"
        )
    elif has_best and CKPT_BEST not in losses and losses.get(CKPT, math.inf) < math.inf:
        copy_file(last, best)
    sync_folder(out_dir)


def archive_previous_run(out_dir: Path, names: tuple[str, ...]) -> Path | None:
    """Make out_dir, and move these files of an earlier run into its new folder previous-N, which it
    returns.

    None without such files. Raises OSError if out_dir cannot be written.
    """
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
    return folder


# ---- finding -------------------------------------------------------------------------------------


def run_folder(out_dir: str | Path) -> Path:
    """Return the folder that a run writes to; out_dir may also name the checkpoint in it that the
    run starts from.
    """
    path = Path(out_dir)
    return path.parent if path.suffix == ".pt" else path


def is_checkpoint(path: str | Path) -> bool:
    """Return whether path names a checkpoint as load_checkpoint takes it."""
    return bool(list_checkpoints(Path(path)))


def list_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a folder, or the .pt file itself; a run resumes the first that is
    not damaged.
    """
    is_file = run_folder(path) != path
    found = [path] if is_file else [path / CKPT, path / CKPT_BEST]
    return [file for file in found if file.exists()]


# ---- reading -------------------------------------------------------------------------------------


def load_checkpoint(
    out_dir: str | Path,
    print0: Callable[[str], object] = str,
    dist: DistContext = ALONE,
    checksums: bool = True,
) -> Checkpoint:
    """Return the last good checkpoint of the folder out_dir, or the one at the path of a .pt file.

    print0 is told of a damaged one. dist: all ranks call this and find the same; the first one
    compares checksums. checksums: False leaves them out, and the numbers of tensors in the file, as
    on the other ranks of a sharded run. Raises ValueError if there is no good one.
    """
    found = list_checkpoints(Path(out_dir))
    if not found:
        raise ValueError(f"{out_dir}: no checkpoint is there; is --out_dir right?")
    damages: list[str] = []
    for p in found:
        saved = None
        damage = ""
        try:
            saved = read_checkpoint(p, checksums and dist.is_first, is_mapped=not checksums)
        except ValueError as e:
            damage = f"{p} {e}"
        damage = max(dist.gather(damage))  # any rank's
        if saved and not damage:
            if damages:
                print0(f"{damages[0]}: taking {p.name}, step {saved.iter_num}")
            return saved
        damages.append(damage)
    raise ValueError(
        f"{', and '.join(damages)}; restore it from a copy, or name another checkpoint"
    )


def load_to_resume(
    out_dir: str | Path, dist: DistContext = ALONE, checksums: bool = True
) -> Checkpoint:
    """As load_checkpoint, for a run that is resumed: best_val_loss is the val loss of the best
    checkpoint on the disk; infinite if none was evaluated.

    Both were evaluated on the same data: clean_out_dir moves ckpt_best.pt aside before a run with
    other data saves.
    """
    saved = load_checkpoint(out_dir, dist.print0, dist, checksums)
    saved.best_val_loss = val_loss_of_weights(saved)
    path = run_folder(out_dir) / CKPT_BEST
    if path.exists():
        try:
            best = read_checkpoint(path, dist.is_first, is_mapped=True)
            saved.best_val_loss = min(saved.best_val_loss, val_loss_of_weights(best))
        except ValueError as e:
            dist.print0(f"{path} {e}: its loss, the best so far, does not count")
    return saved


def best_on_disk(out_dir: Path, print0: Callable[[str], object] = str) -> tuple[Path, int] | None:
    """Return the best intact checkpoint and its step. print0 is told of damaged ones."""
    for path in reversed(list_checkpoints(out_dir)):
        try:
            return path, read_checkpoint(path, is_mapped=True).iter_num
        except ValueError as e:
            print0(f"{path} {e}")
    return None


def val_loss_of_weights(saved: Checkpoint) -> float:
    """Return the val loss of a checkpoint's own weights; infinity if no evaluation saw them."""
    if saved.progress is None:  # nanoGPT's, which is saved at evaluations only
        return saved.best_val_loss
    losses = {row[0]: row[2] for row in saved.progress.get("evaluations", [])}
    return float(losses.get(saved.iter_num, math.inf))


# The values that a file may hold, by key: dictionaries, texts and numbers. nanoGPT's best_val_loss
# is a tensor, which math.isnan takes, unlike text.
CKPT_FIELDS: Fields = {f.name: lambda x: isinstance(x, dict | None) for f in fields(Checkpoint)}
CKPT_FIELDS |= dict.fromkeys(("chat", "wandb_run_id"), lambda x: isinstance(x, str | None))
CKPT_FIELDS |= {
    "config": lambda x: isinstance(x, dict),
    "best_val_loss": lambda x: not math.isnan(x),
    "iter_num": lambda x: is_number(x) and x < MOST_STEPS,
}


def read_checkpoint(path: Path, checksums: bool = True, is_mapped: bool = False) -> Checkpoint:
    """Return a checkpoint, its tensors on the CPU.

    checksums: whether to compare those of files, and to look for numbers that are not finite.
    is_mapped: as read_ckpt_file takes it. Raises ValueError with words that follow the path.
    """
    try:
        found = read_ckpt_file(path, checksums, is_mapped)
        check_record(found, CKPT_FIELDS)
        saved = checkpoint_of(found)
        if checksums:
            check_numbers(saved)
    except Exception as e:  # an untrusted content can raise nearly anything
        why = reason(e)
        if "eights only" in why:  # torch's advice is to run the file's code
            why = (
                "it holds more than tensors and plain values, which only its maker's code can read"
            )
        raise ValueError(f"is not a readable checkpoint ({why})") from None
    return saved


def checkpoint_of(found: dict[str, Any]) -> Checkpoint:
    """Return a file's content as a Checkpoint.

    Two things of nanoGPT's are left out: the mask buffers of its attention without SDPA, and the
    settings of the machine. A head with numbers of its own, as in forks that do not tie it, stays
    apart from the embedding. Raises ValueError, or an error of a wrong type, if the weights, the
    model's settings or the evaluations are not what they should be.
    """
    saved = Checkpoint(**{f.name: found[f.name] for f in fields(Checkpoint) if f.name in found})
    saved.model = {
        k.removeprefix("_orig_mod."): w  # of a compiled model
        for k, w in saved.model.items()
        if not k.endswith(".attn.bias")
    }
    for name, w in saved.model.items():
        if not isinstance(w, Tensor) and not name.endswith(EXTRA_STATE):
            raise ValueError(f"its weight {name[:80]!r} is not a tensor")
    saved.best_val_loss = float(saved.best_val_loss)  # nanoGPT's is a tensor
    # Only nanoGPT's has none. It names a GPU and float16 even after a run on a CPU.
    if "tokenizer" not in found:
        saved.config = {k: v for k, v in saved.config.items() if k not in MACHINE_SETTINGS}
        saved.model_args = {"activation": "gelu"} | saved.model_args  # the exact GELU
    head = saved.model.get("lm_head.weight", torch.empty(0))
    table = saved.model.get("transformer.wte.weight", head)
    if head.data_ptr() != table.data_ptr() and not torch.equal(head, table):
        saved.model_args = saved.model_args | {"tie_weights": False}
    GPTConfig.from_args(saved.model_args, "its model")
    val_loss_of_weights(saved)
    return saved


# ---- one file ------------------------------------------------------------------------------------


MOST_PICKLE_BYTES = 4 << 20  # that of GPT-2 XL with AdamW has 0.3 MB
PLAIN_CLASSES = (Tensor, nn.Parameter)  # not those of sharded models
PLAIN_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# A file of the usual kind has some thousand values, and the evaluations of a long run.
MOST_VALUES = 1 << 20


def write_ckpt_file(content: Any, path: Path) -> None:
    """Write torch.save(content), whose archive has a checksum of each of its parts, in one step.

    Raises OSError.
    """
    with replacing(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as e:  # torch wraps a failed write
            why = e.__context__
            raise (why if isinstance(why, OSError) else OSError(None, reason(e))) from None


def leaves(content: Any) -> Iterator[Any]:
    """Yield the values in nested containers.

    Raises ValueError if they are nested without an end: lists that hold each other many times fit
    into a small file, and to walk through them would take for ever.
    """
    todo = [content]
    n = 0
    while todo:
        value = todo.pop()
        items = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list | tuple | set):
            n += len(items)
            if n > MOST_VALUES:
                raise ValueError("its containers hold themselves, or each other too often")
            todo += items
        else:
            yield value


def is_dense(x: Any) -> bool:
    """Return whether a value is a tensor of dense numbers, none of them expanded to many."""
    is_plain = type(x) in PLAIN_CLASSES and x.layout == torch.strided and not x.is_meta
    return is_plain and x.nbytes <= x.untyped_storage().nbytes()


def read_ckpt_file(path: Path, checksums: bool = True, is_mapped: bool = False) -> Any:
    """Return the content of a file, its tensors on the CPU.

    Raises ValueError with the reason if it is refused; if it is damaged, nearly any error.

    checksums: whether to compare the file's checksums. Its structure is always checked. is_mapped:
    leave the numbers in the file, which takes no time and no memory: the system reads its pages
    when they are used.
    """
    if not path.is_file():  # opening a pipe would wait, and a device might never end
        raise ValueError("it is not a plain file but a pipe, a device or a folder")
    if not zipfile.is_zipfile(path):
        raise ValueError(
            "it is not of torch.save, but cut short, empty, an error page or a git-LFS pointer: "
            "fetch it again"
        )
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            if entry.compress_type != zipfile.ZIP_STORED:  # to unpack it may take hours
                raise ValueError("it is compressed, which torch.save does not do")
            if is_pickle and entry.file_size > MOST_PICKLE_BYTES:
                raise ValueError("its data.pkl has an absurd size")
        if checksums and archive.testzip():
            raise ValueError("its checksum does not match")
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    for x in leaves(found):
        if isinstance(x, Tensor) and not is_dense(x):
            raise ValueError("it holds a tensor that is sparse, nested, expanded or sharded")
    return found
