"""Checkpoints written while the training goes on: a snapshot costs the loop a copy, a thread does the rest."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deskgpt.checkpoint import store
from deskgpt.checkpoint.folders import agreed
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute.sharding import is_dtensor, local
from deskgpt.run.report import Report
from deskgpt.run.train_state import Run
from deskgpt.system import hardware

# Of the snapshot's size, what must be free: torch rounds pinned memory up to powers of two, and the system needs some.
MEMORY_FACTOR = 2.0


@dataclass
class Saved:
    """A save that has ended."""

    step: int
    best: bool
    save_s: float | None = None  # what it cost the training loop, which sets this
    write_s: float = 0.0  # until the files were durable
    error: BaseException | None = None


@dataclass(frozen=True)
class Kept:
    """The latest checkpoint that a run can go back to."""

    path: Path  # of the file or its folder
    step: int


@dataclass(eq=False)
class Saver:
    """Writes the checkpoints of a run into out_dir, one after the other.

    A save that fails is said, and the run goes on: the next one may succeed. What the run then needs to know is
    `best_val_loss`, that of the best checkpoint on the disk.

    With a group, which is for saves alone, its ranks write their shards together: each calls `save` at the same step.
    Their threads wait for each other, the training loops do not. A save succeeds or fails for all.
    """

    out_dir: Path
    print0: Callable[[str], None]
    best_val_loss: float
    keep: int = 1
    in_background: bool = True
    group: dist.ProcessGroup | None = None
    kept: Kept | None = None  # the latest checkpoint; at first the one that the run goes on from

    def __post_init__(self) -> None:
        self.is_stale = False  # whether the run went back before the latest checkpoint, which it must replace
        self.snapshot = Snapshot()
        self.thread: threading.Thread | None = None
        self.last: Saved | None = None
        self.ended: list[Saved] = []
        self.has_taken_over = False
        self.has_said_memory = False

    def save_run(self, run: Run, report: Report, best: bool) -> None:
        """Saves the run as it is now. All ranks call this; without a group the first one writes."""
        if run.ranks.is_first or self.group is not None:
            self.print0(f"saving checkpoint to {self.out_dir}")
            with report.timer.saving():
                saving = self.save(run.checkpoint(), best)
            saving.save_s = report.timer.last_save_s
        self.kept = Kept(self.out_dir / store.NAME if self.group is None else self.out_dir, run.step)
        self.is_stale = False

    def tell(self, run: Run, report: Report) -> None:
        """Reports the saves that have ended since the last call. After one that failed, another loss is the best."""
        for saved in self.finished():
            if saved.error is None:
                report.saved(saved.step, saved.best, saved.save_s, saved.write_s)
            elif saved.best and saved is self.last:
                run.best_val_loss = self.best_val_loss

    def kept_text(self) -> str:
        """What an error says about the checkpoints."""
        if self.kept is None:
            return "no checkpoint was saved yet"
        return f"the last checkpoint is {self.kept.path} of step {self.kept.step}"

    def save(self, state: Checkpoint, best: bool) -> Saved:
        """Begins to write a checkpoint, after the one before has been written. The state may change afterwards."""
        self.wait()
        self.last = saved = Saved(state.iter_num, best)
        has_room = self.in_background and self.snapshot.fits(state)
        if self.in_background and not has_room and not self.has_said_memory:
            self.print0("little memory is free: training waits while a checkpoint is written")
            self.has_said_memory = True
        if not has_room:
            self._write(state, saved)
            return saved
        state = self.snapshot.take(state)
        # Not a daemon: whatever ends the run, but for a kill, the interpreter waits for the checkpoint.
        self.thread = threading.Thread(target=self._write, args=(state, saved), name="saver")
        self.thread.start()
        return saved

    def _write(self, state: Checkpoint, saved: Saved) -> None:
        t0 = time.perf_counter()
        try:
            if not self.has_taken_over:
                agreed(self.group, lambda: self._take_over(state.iter_num))
                self.has_taken_over = True
            store.save(state, self.out_dir, saved.best, self.keep, self.group)
            if saved.best:
                self.best_val_loss = state.best_val_loss
        except BaseException as e:  # for the training loop, in its own thread
            saved.error = e
        saved.write_s = time.perf_counter() - t0
        self.ended.append(saved)

    def _take_over(self, step: int) -> None:
        if self.group is None or dist.get_rank(self.group) == 0:
            store.take_over(self.out_dir, self.print0, step)

    def finished(self) -> Iterator[Saved]:
        """The saves that have ended since the last call. Says which have failed; raises what is no error of a user."""
        while self.ended:
            saved = self.ended.pop(0)
            if saved.error is not None:
                if not isinstance(saved.error, OSError | ValueError):
                    raise saved.error
                self.print0(f"{saved.error}; the run goes on and tries again at the next save")
            yield saved

    def wait(self) -> None:
        """Returns when the last save has ended."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def raise_if_last_failed(self) -> None:
        """Raises what the last save failed with."""
        if self.last is not None and self.last.error is not None:
            raise self.last.error


class Snapshot:
    """A copy of a checkpoint in the machine's memory, which is kept for the next one.

    Tensors that share their numbers, such as tied weights, share them in the copy too.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []  # one for each storage, in the order of the checkpoint

    def fits(self, state: Checkpoint) -> bool:
        """Whether memory is free for it, as far as the system says."""
        if self.buffers:
            return True
        free_bytes = hardware.free_memory_bytes()
        return free_bytes is None or MEMORY_FACTOR * storage_bytes(state) < free_bytes

    def take(self, state: Checkpoint) -> Checkpoint:
        """The copy. Waits until it is made, on a GPU after what is queued there."""
        copies: dict[tuple[torch.device, int], Tensor] = {}  # by storage
        values = {f.name: self._copied(getattr(state, f.name), copies) for f in fields(state)}
        return replace(state, **values)

    def _copied(self, value: Any, copies: dict[tuple[torch.device, int], Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._copied_tensor(value, copies)
        if isinstance(value, dict):
            new = copy.copy(value)  # a state_dict is an OrderedDict with an attribute
            for key, entry in value.items():
                new[key] = self._copied(entry, copies)
            return new
        if isinstance(value, list | tuple):
            return type(value)(self._copied(entry, copies) for entry in value)
        return value

    def _copied_tensor(self, tensor: Tensor, copies: dict[tuple[torch.device, int], Tensor]) -> Tensor:
        if is_dtensor(tensor):  # its rows, copied, in the same frame
            names, frame = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: getattr(tensor, name) for name in names}
            parts["_local_tensor"] = self._copied_tensor(local(tensor), copies)
            return type(tensor).__tensor_unflatten__(parts, frame, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if key not in copies:
            buffer = self._buffer(len(copies), storage.nbytes(), pinned=tensor.is_cuda)
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            buffer.copy_(content)
            copies[key] = buffer
        copied = torch.empty(0, dtype=tensor.dtype)
        return copied.set_(copies[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def _buffer(self, number: int, n_bytes: int, pinned: bool) -> Tensor:
        if number == len(self.buffers):
            self.buffers.append(torch.empty(0, dtype=torch.uint8))
        if self.buffers[number].numel() != n_bytes:
            self.buffers[number] = buffer_of(n_bytes, pinned)
        return self.buffers[number]


def buffer_of(n_bytes: int, pinned: bool) -> Tensor:
    """Memory for a copy. pinned: in pages that a GPU copies into fast, where the system has such; others do, too."""
    if pinned:
        with suppress(RuntimeError):  # it may limit them, as Windows does
            return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(n_bytes, dtype=torch.uint8)


def storage_bytes(state: Checkpoint) -> int:
    """The size of all tensors of a checkpoint."""
    tensors = [local(value) for _, value in store.values_in(vars(state)) if isinstance(value, Tensor)]
    storages = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
