from __future__ import annotations

import json
import math
import os
import random
import shutil
import zipfile
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_equal, assert_one_line, corrupted
from tiny_models import save_folder, state_of

from deskgpt.checkpoint import ckpt_file, store
from deskgpt.export.gpt2_weights import load_gpt2


def test_checkpoints_come_back_as_they_were_saved(tmp_path):
    saved = state_of(7)
    saved.model["transformer.wte.weight"] = torch.ones(20, 2)  # of a changed model.py: model_args do not tell weights
    saved.model["transformer.factor.weight"] = torch.ones(2, 8)
    saved.model_args["n_layer"] = 12
    store.save(saved, tmp_path, best=True)
    for path in (tmp_path, tmp_path / "ckpt.pt", tmp_path / "ckpt_best.pt"):
        loaded = store.load(path)
        assert_equal(vars(loaded), vars(saved) | {"model": dict(saved.model), "path": loaded.path})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt.pt", "ckpt_best.pt"]
    torch.save(vars(saved) | {"best_val_loss": np.float32(1.5)}, tmp_path / "ckpt.pt")
    assert store.load(tmp_path).best_val_loss == 1.5


# ---- accidents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file", "folder"])
def test_no_damage_is_silent_and_the_checkpoint_before_is_used(form, tmp_path):
    draw = random.Random(3)
    whole = tmp_path / "whole"
    whole.mkdir()
    for step in (1, 2):
        if form == "file":
            store.save(state_of(step), whole, best=step == 1)
        else:
            save_folder(whole, step, best=step == 1)
    expected = store.load(whole)
    assert expected.path
    n_checksum = ckpt_file.COMMENT_BYTES + 4 if form == "file" else 0  # each of these bytes counts
    for n in range(80 + n_checksum):
        out = Path(shutil.copytree(whole, tmp_path / str(n)))
        last = out / expected.path.name
        path = draw.choice(sorted(last.iterdir())) if form == "folder" else last
        content = bytearray(path.read_bytes())
        if n >= 80:
            content[80 - n - 1] ^= 1
            path.write_bytes(content)
        elif n % 6:
            path.write_bytes(corrupted(bytes(content), draw))
        else:
            path.unlink()
        said: list[str] = []
        loaded = store.load(out, said.append)
        if form == "folder" and loaded.iter_num == 2:  # other names and spaces in a JSON file that mean the same
            assert_equal(store.content_of(loaded), store.content_of(expected))
            continue
        assert loaded.iter_num == 1
        assert_one_line(*said, last, "step 1")
        if last.exists():  # named, it is not exchanged for another
            with pytest.raises(ValueError, match="is not a (readable|training) checkpoint") as e:
                store.load(last)
            assert_one_line(e.value, last.name, *([f"--out_dir={out / 'ckpt_best.pt'}"] if form == "file" else []))


def test_damage_to_a_file_without_a_checksum_is_found_by_the_archives_own(tmp_path):
    draw = random.Random(1)
    path = tmp_path / "ckpt.pt"
    torch.save(vars(state_of()), path)
    content = path.read_bytes()
    expected = store.load(tmp_path).model
    for _ in range(100):
        path.write_bytes(corrupted(content, draw))
        with suppress(ValueError):
            assert_equal(store.load(tmp_path).model, expected)


def test_weights_that_are_not_finite_are_not_loaded_and_two_damaged_files_are_named(tmp_path):
    store.save(state_of(1), tmp_path, best=True)
    spoiled = vars(state_of())
    spoiled["model"]["transformer.wte.weight"][3, 3] = torch.nan
    torch.save(spoiled, tmp_path / "ckpt.pt")
    said: list[str] = []
    assert store.load(tmp_path, said.append).iter_num == 1
    assert_one_line(*said, "NaN", "ckpt_best.pt, step 1")
    (tmp_path / "ckpt_best.pt").write_bytes(b"as bad")
    with pytest.raises(ValueError, match="checkpoint") as e:
        store.load(tmp_path)
    assert_one_line(e.value, tmp_path / "ckpt.pt", tmp_path / "ckpt_best.pt", "copy")


def test_folders_with_checkpoints_are_named_where_one_is_missing(tmp_path):
    for name in ("out-first", "out-mine"):
        (tmp_path / name).mkdir()
        store.save(state_of(), tmp_path / name, best=False)
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match="no such checkpoint") as e:
        store.load(tmp_path / "out")
    assert_one_line(e.value, tmp_path / "out" / "ckpt.pt", f"{tmp_path / 'out-first'}, {tmp_path / 'out-mine'}")
    assert "data" not in str(e.value)


def test_what_is_damaged_or_abandoned_is_kept_aside_and_what_killed_runs_left_is_removed(tmp_path):
    store.save(state_of(1), tmp_path, best=True)
    for step in (5, 7, 9):
        save_folder(tmp_path, step, best=False)
    (tmp_path / "ckpt-00000007" / "manifest.json").unlink()
    (tmp_path / "ckpt_best.pt").write_text("damaged")
    (tmp_path / "ckpt.pt.123-abc.tmp").write_text("torn")
    (tmp_path / "ckpt-00000008.12-ab.tmp").mkdir()
    (tmp_path / "ckpt-00000008.12-ab.tmp" / "shard").write_text("torn")
    (tmp_path / "notes.tmp").write_text("the user's")
    said: list[str] = []
    store.take_over(tmp_path, said.append, step=8)
    left = {"ckpt-00000005", "ckpt.pt", "ckpt_best.pt", "notes.tmp", "previous-1", "previous-2", "previous-3"}
    assert {p.name for p in tmp_path.iterdir()} == left
    for line, named in zip(said, ("ckpt-00000009", "ckpt-00000007", "ckpt_best.pt"), strict=True):
        assert_one_line(line, tmp_path / named, "previous-")
    assert store.load(tmp_path / "previous-1" / "ckpt-00000009").iter_num == 9
    assert (tmp_path / "previous-3" / "ckpt_best.pt").read_text() == "damaged"
    assert store.load(tmp_path / "ckpt_best.pt").iter_num == 1  # a copy of ckpt.pt


def test_what_could_not_be_read_back_is_not_written(tmp_path):
    store.save(state_of(1), tmp_path, best=False)
    before = (tmp_path / "ckpt.pt").read_bytes()
    for entry in (Path("x"), np.ones(2), object):
        with pytest.raises(ValueError, match="is not written") as e:
            store.save(replace(state_of(2), parts={"mine": {"entry": entry}}), tmp_path, best=False)
        assert_one_line(e.value, tmp_path / "ckpt.pt", "the checkpoint before it is intact")
    assert (tmp_path / "ckpt.pt").read_bytes() == before
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.cfloat):
        store.save(replace(state_of(2), parts={"mine": {"entry": torch.ones(2).to(dtype)}}), tmp_path, best=False)
        parts = store.load(tmp_path).parts
        assert parts is not None
        assert parts["mine"]["entry"].dtype == dtype


# ---- damaged and untrusted files -----------------------------------------------------------------------------


class Code:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def repacked(path: Path, compression: int, pickled: bytes = b"") -> None:
    """A checkpoint in an archive of this compression, perhaps with another pickle."""
    torch.save(vars(state_of()), path.with_name("plain.pt"))
    with zipfile.ZipFile(path.with_name("plain.pt")) as old, zipfile.ZipFile(path, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, pickled if pickled and name.endswith("data.pkl") else old.read(name))


WRONG: dict[str, tuple[Any, ...]] = {
    "iter_num": (-1, 2**62, 2**63, True, 1.0, None),
    "best_val_loss": (math.nan, "1", None, torch.ones(2)),
    "model": ([], {"w": 3}, {3: torch.ones(1)}, {"w": torch.ones(1, dtype=torch.complex64)}),
    "model_args": (None, {"n_layer": 10**9}, {"n_embd": 10**400}, {"n_embd": torch.ones(1)}),
    **dict.fromkeys(("config", "scaler", "wandb_run_id", "tokenizer"), (3,)),
}
# What ckpt.pt is: bytes, a checkpoint with other entries, or what a function makes; and what the error names.
REFUSED: list[tuple[Any, tuple[str, ...]]] = [
    (b"", ("empty", "fetch it again")),
    (b"<!DOCTYPE html><title>Virus scan warning</title>", ("HTML", "fetch")),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", ("git-LFS", "git lfs pull")),
    (b"safetensors, perhaps", ("torch.save",)),
    ({"config": {"x": Code()}}, ("mkdir", "only its maker's code can read")),
    (partial(repacked, compression=zipfile.ZIP_DEFLATED), ("compressed",)),
    (partial(repacked, compression=zipfile.ZIP_STORED, pickled=b"\x80\x02" + b"N0" * 2**22), ("absurd size",)),
    *[({name: value}, ()) for name, values in WRONG.items() for value in values],
]
if os.name != "nt":  # which has no such files
    REFUSED += [(os.mkfifo, ("pipe",)), (partial(os.symlink, "/dev/zero"), ("not a plain file",))]


@pytest.mark.parametrize(("content", "named"), REFUSED)
def test_what_is_no_checkpoint_is_refused_before_it_runs_code_or_takes_memory(content, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ckpt.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        torch.save(vars(state_of()) | content, path)
    else:
        content(path)
    for asked in (tmp_path, path):
        with pytest.raises(ValueError, match="is not a (readable|training) checkpoint") as e:
            store.load(asked)
        assert_one_line(e.value, path, *named)
    assert not (tmp_path / "ran").exists()


PLAIN = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 20}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (None, ("no config.json",)),
        (PLAIN | {"model_type": "llama"}, ("model_type",)),
        (PLAIN | {"layer_norm_epsilon": 1e-6}, ("layer_norm_epsilon",)),
        (PLAIN | {"n_inner": 12}, ("n_inner",)),
        (PLAIN | {"activation_function": "silu"}, ("activation_function",)),
        ([3], ("damaged",)),
        ({"n_layer": 1}, ("n_head",)),
        (PLAIN, ("model.safetensors", "damaged")),
    ],
)
def test_damaged_gpt2_folders_and_relatives_that_compute_otherwise_are_refused(config, named, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="init_from") as e:
        load_gpt2(str(tmp_path))
    assert_one_line(e.value, tmp_path, *named)
