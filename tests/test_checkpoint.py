import errno
import itertools
import math
import os
import random
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import (
    POSIX,
    Code,
    assert_equal,
    assert_one_line,
    contents,
    corrupted,
    raises_one_line,
)
from tiny_models import state_of

from deskgpt.checkpoint import (
    CKPT_BEST,
    clean_out_dir,
    load_checkpoint,
    load_to_resume,
    save_checkpoint,
)
from deskgpt.evaluation import EvalRecord, Evaluation
from deskgpt.files import note_once, sync_folder
from deskgpt.train_state import MOST_EVALUATIONS, TrainState
from model import GPT, GPTConfig


def test_checkpoint_is_read_as_it_was_saved(tmp_path):
    dtypes = (torch.float64, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.cfloat)
    extra = {"mine": {str(dtype): torch.ones(2).to(dtype) for dtype in dtypes}}
    saved = replace(
        state_of(7), progress={"losses": [1.0]}, metadata={"code": "x"}, extra_state=extra
    )
    saved.model["transformer.factor.weight"] = torch.ones(2, 8)  # of a changed model.py
    expected = vars(saved) | {"model": dict(saved.model)}
    save_checkpoint(saved, tmp_path, best=True)
    for path in (tmp_path, tmp_path / "ckpt.pt", tmp_path / "ckpt_best.pt"):
        assert_equal(vars(load_checkpoint(path)), expected)
        assert_equal(vars(load_checkpoint(path, checksums=False)), expected)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt.pt", "ckpt_best.pt"]


def test_head_with_weights_of_its_own_is_not_tied(tmp_path):
    """Forks of nanoGPT that untie it have nanoGPT's model_args, which do not tell."""
    saved = state_of()
    saved.model["lm_head.weight"] = saved.model["lm_head.weight"] + 1
    save_checkpoint(saved, tmp_path, best=False)
    loaded = load_checkpoint(tmp_path)
    model = GPT.from_state(GPTConfig.from_args(loaded.model_args, "x"), loaded.model, "x")
    assert_equal(dict(model.state_dict()), dict(saved.model))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's names of open files")
def test_files_are_durable_before_they_get_their_name_and_names_before_the_save_ends(
    tmp_path, monkeypatch
):
    calls = []  # files that are flushed, and renames

    def fsync(fd):
        calls.append(os.readlink(f"/proc/self/fd/{fd}"))

    def replace_file(source, target):
        assert str(source) in calls
        calls.append("rename")
        source.rename(target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace_file)
    save_checkpoint(state_of(), tmp_path, best=True)
    assert [b for a, b in itertools.pairwise(calls) if a == "rename"] == [str(tmp_path)] * 2


@POSIX
def test_file_system_that_syncs_no_folders_is_named_once(tmp_path, monkeypatch, capsys):
    error = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
    note_once.cache_clear()
    for _ in range(2):
        sync_folder(tmp_path)
    assert_one_line(capsys.readouterr().err, tmp_path, "cannot flush folders")


def test_damage_is_found_and_the_best_checkpoint_is_used(tmp_path, capsys):
    """A damage that is not found has changed nothing, such as the room between two tensors."""
    draw = random.Random(3)
    for step in (1, 2):
        save_checkpoint(state_of(step), tmp_path, best=step == 1)
    last = tmp_path / "ckpt.pt"
    content = last.read_bytes()
    expected = {1: vars(load_checkpoint(tmp_path / CKPT_BEST)), 2: vars(load_checkpoint(last))}
    found = 0
    for _ in range(80):
        last.write_bytes(corrupted(content, draw))
        saved = load_checkpoint(tmp_path, print)
        assert_equal(vars(saved), expected[saved.iter_num])
        if saved.iter_num == 1:
            found += 1
            assert_one_line(capsys.readouterr().out, last, "step 1")
            with raises_one_line("checkpoint", last.name):
                load_checkpoint(last)  # named, it is not exchanged for another
    assert found > 40


def test_damaged_checkpoints_are_set_aside_and_files_of_killed_runs_are_removed(tmp_path, capsys):
    save_checkpoint(state_of(5), tmp_path, best=False)
    intact = (tmp_path / "ckpt.pt").read_bytes()
    files = {"ckpt_best.pt": b"damaged", "ckpt.pt.123-abc.tmp": b"torn", "notes.tmp": b"mine"}
    for name in files:
        (tmp_path / name).write_bytes(files[name])
    clean_out_dir(tmp_path, print)
    assert_one_line(capsys.readouterr().out, tmp_path / CKPT_BEST, "previous-1")
    expected = {"ckpt.pt": intact, "ckpt_best.pt": intact, "notes.tmp": b"mine"}
    assert contents(tmp_path) == expected | {"previous-1/ckpt_best.pt": b"damaged"}


def test_best_model_of_other_data_is_moved_aside_and_nothing_is_lost(tmp_path):
    save_checkpoint(state_of(5), tmp_path, best=True)
    (tmp_path / "ckpt.pt").unlink()
    clean_out_dir(tmp_path, print, has_best=False)
    assert not (tmp_path / CKPT_BEST).exists()
    for folder in (tmp_path, tmp_path / "previous-1"):
        assert load_checkpoint(folder).iter_num == 5


def test_intact_best_checkpoint_stays_and_the_lower_loss_of_both_counts(tmp_path):
    save_checkpoint(state_of(5), tmp_path, best=True)
    for loss in (9.0, 1.0):
        save_checkpoint(state_of(7, loss), tmp_path, best=False)
        clean_out_dir(tmp_path, print)
        assert load_checkpoint(tmp_path / CKPT_BEST).iter_num == 5
        assert load_to_resume(tmp_path).best_val_loss == min(2.5, loss)


def test_only_evaluated_weights_become_the_best(tmp_path):
    """Without ckpt_best.pt: it was deleted, or the run was stopped before its first evaluation
    after step 0.
    """
    evaluations = [[0, 4.0, 4.0, 0.1], [5, 3.0, 3.5, 0.1]]
    for step, loss in ((7, math.inf), (5, 3.5)):
        saved = replace(state_of(step, 3.0), progress={"evaluations": evaluations})
        save_checkpoint(saved, tmp_path, best=False)
        assert load_to_resume(tmp_path).best_val_loss == loss
        clean_out_dir(tmp_path, print)
        assert (tmp_path / CKPT_BEST).exists() == (loss < math.inf)
        assert load_to_resume(tmp_path).best_val_loss == loss


def test_entry_that_could_not_be_read_back_is_not_written(tmp_path):
    save_checkpoint(state_of(1), tmp_path, best=False)
    before = (tmp_path / "ckpt.pt").read_bytes()
    for entry in (Path("x"), np.ones(2), torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        with raises_one_line(
            tmp_path / "ckpt.pt", "extra_state.mine.entry holds", "before is intact"
        ):
            save_checkpoint(
                replace(state_of(2), extra_state={"mine": {"entry": entry}}), tmp_path, best=False
            )
    assert (tmp_path / "ckpt.pt").read_bytes() == before


def test_evaluations_of_a_long_run_fit_into_a_checkpoint():
    found = [EvalRecord(step, 1.0, 2.0, 0.1) for step in range(MOST_EVALUATIONS)]
    state = Mock(step=10**6, evaluations=found)
    TrainState.add_evaluation(state, Evaluation(1.0, 0.1), Evaluation(2.0, 0.1))
    assert state.evaluations == [*found[1:], (10**6, 1.0, 2.0, 0.1)]


# ---- damaged and untrusted files -----------------------------------------------------------------


def archive(path: Path, compression: int, pickled: bytes) -> None:
    """Write an archive as torch.save does, but for its compression or its size."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)


HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)
ENDLESS: list[Any] = []  # 20^20 leaves
for _ in range(20):
    ENDLESS = [ENDLESS] * 20
ODD = [
    torch.ones(1).to_sparse(),
    torch.ones(1, device="meta"),
    torch.ones(1, dtype=torch.float8_e4m3fn).expand(1 << 40),
]
WRONG = {
    "iter_num": (-1, 2**40, 1.0, True),
    "best_val_loss": (math.nan, "1", 10**400),
    "model": ([], {"w": 3}, {3: torch.ones(1)}, *({"w": odd} for odd in ODD)),
    "optimizer": (3,),
    "progress": (3, {"evaluations": 3}, {"evaluations": [[1, 1.0, 10**400, 0]]}),
    "model_args": (None, {"n_layer": 10**9}, {"n_embd": 10**400}),
    "config": (3, {"x": HOLDS_ITSELF}, {"x": ENDLESS}),
    **dict.fromkeys(("scaler", "wandb_run_id"), (3,)),
}
# ckpt.pt as bytes, as other entries of a checkpoint, or as a function that makes it; and the words
# of the error.
REFUSED = [
    (b"", ("empty", "fetch it again")),
    (b"<!DOCTYPE html><title>Virus scan warning</title>", ("error page", "git-LFS", "torch.save")),
    ({"config": {"x": Code()}}, ("only its maker's code can read",)),
    (partial(archive, compression=zipfile.ZIP_DEFLATED, pickled=b"N."), ("compressed",)),
    (partial(archive, compression=zipfile.ZIP_STORED, pickled=b"N0" * 2**22), ("absurd size",)),
    *[({name: value}, ()) for name, values in WRONG.items() for value in values],
]
if os.name != "nt":  # which has no such files
    REFUSED += [(os.mkfifo, ("pipe",)), (partial(os.symlink, "/dev/zero"), ("not a plain file",))]


@pytest.mark.parametrize(("content", "named"), REFUSED)
def test_untrusted_file_is_refused_before_it_runs_code_or_takes_memory(
    content, named, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deskgpt.checkpoint.MOST_VALUES", 1000)
    path = tmp_path / "ckpt.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        torch.save(vars(state_of()) | content, path)
    else:
        content(path)
    for is_checked in (True, False):
        with raises_one_line("is not a readable checkpoint", path, *named):
            load_checkpoint(tmp_path, checksums=is_checked)
    assert not (tmp_path / "ran").exists()
