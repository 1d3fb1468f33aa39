from __future__ import annotations

import json
import math
import os
import random
import shutil
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_equal, assert_one_line, corrupted
from safetensors.torch import save_file
from tiny_models import TINIEST, save_folder, state_of

from deskgpt.checkpoint import ckpt_file, store
from deskgpt.export.gpt2_weights import load_gpt2
from model import GPT


def test_checkpoints_come_back_as_they_were_saved(tmp_path):
    saved = state_of(7)
    store.save(saved, tmp_path, best=True)
    for path in (tmp_path, tmp_path / "ckpt.pt", tmp_path / "ckpt_best.pt"):
        loaded = store.load(path)
        assert_equal(vars(loaded), vars(saved) | {"model": dict(saved.model), "path": loaded.path})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt.pt", "ckpt_best.pt"]


# ---- accidents -----------------------------------------------------------------------------------------------

FORMS = pytest.mark.parametrize("form", ["file", "folder"])


def save(form: str, out_dir: Path, step: int, best: bool) -> None:
    if form == "file":
        store.save(state_of(step), out_dir, best)
    else:
        save_folder(out_dir, step, best)


@FORMS
def test_no_damage_is_silent_and_the_checkpoint_before_is_used(form, tmp_path):
    draw = random.Random(3)
    whole = tmp_path / "whole"
    whole.mkdir()
    save(form, whole, 1, best=True)
    save(form, whole, 2, best=False)
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
    aside = ["previous-1", "previous-2", "previous-3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "ckpt-00000005",
        "ckpt.pt",
        "ckpt_best.pt",
        "notes.tmp",
        *aside,
    ]
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


def assert_refuses(out_dir: Path, *named: str) -> None:
    """A folder's ckpt.pt is refused in one line."""
    with pytest.raises(ValueError, match="is not a (readable|training) checkpoint") as e:
        store.load(out_dir)
    assert_one_line(e.value, "ckpt.pt", *named)


NO_CHECKPOINTS = {
    b"": ("empty", "fetch it again"),
    b"<!DOCTYPE html><title>Virus scan warning</title>": ("HTML", "fetch"),
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n": ("git-LFS", "git lfs pull"),
    b"safetensors, perhaps": ("torch.save",),
}


@pytest.mark.parametrize("content", NO_CHECKPOINTS, ids=["empty", "html", "lfs", "other"])
def test_downloads_that_are_no_checkpoints_are_named(tmp_path, content):
    (tmp_path / "ckpt.pt").write_bytes(content)
    assert_refuses(tmp_path, *NO_CHECKPOINTS[content])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_what_is_no_plain_file_is_refused_before_it_is_opened(tmp_path):
    path = tmp_path / "ckpt.pt"
    os.mkfifo(path)
    assert_refuses(tmp_path, "pipe")
    assert_refuses(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert_refuses(tmp_path, "not a plain file")


def test_code_in_a_checkpoint_is_refused_and_does_not_run(tmp_path):
    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save(vars(state_of()) | {"config": {"x": Code()}}, tmp_path / "ckpt.pt")
    assert_refuses(tmp_path, "mkdir", "only its maker's code can read")
    assert not (tmp_path / "ran").exists()


def test_compressed_archives_and_absurd_pickles_are_refused_before_they_take_memory(tmp_path):
    torch.save(vars(state_of()), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as old:
        for compression, pickled in ((zipfile.ZIP_DEFLATED, b""), (zipfile.ZIP_STORED, b"\x80\x02" + b"N0" * 2**22)):
            with zipfile.ZipFile(tmp_path / "ckpt.pt", "w", compression) as new:
                for name in old.namelist():
                    new.writestr(name, pickled if pickled and name.endswith("data.pkl") else old.read(name))
            assert_refuses(tmp_path, "absurd size" if pickled else "compressed")


def test_numbers_of_numpy_are_read(tmp_path):
    torch.save(vars(state_of()) | {"best_val_loss": np.float32(1.5)}, tmp_path / "ckpt.pt")
    assert store.load(tmp_path).best_val_loss == 1.5


def test_blocks_that_are_applied_twice_and_factored_embeddings_are_read_back(tmp_path):
    """model_args do not tell the weights of a changed model.py."""
    saved = state_of()
    saved.model["transformer.wte.weight"] = torch.ones(20, 2)
    saved.model["transformer.factor.weight"] = torch.ones(2, 8)
    saved.model_args["n_layer"] = 12
    store.save(saved, tmp_path, best=True)
    assert_equal(store.load(tmp_path).model, dict(saved.model))


WRONG: dict[str, tuple[Any, ...]] = {
    "iter_num": (-1, 2**62, 2**63, True, 1.0, None),
    "best_val_loss": (math.nan, "1", None, torch.ones(2)),
    "model": ([], {"w": 3}, {3: torch.ones(1)}, {"w": torch.ones(1, dtype=torch.complex64)}),
    "model_args": (None, {"n_layer": 10**9}, {"n_embd": 10**400}, {"n_embd": torch.ones(1)}),
    "config": (None, []),
    "scaler": (3,),
    "wandb_run_id": (3, 2.5),
    "tokenizer": ("bytes",),
}


@pytest.mark.parametrize("name", WRONG)
def test_entries_of_other_types_and_ranges_are_refused(tmp_path, name):
    for value in WRONG[name]:
        torch.save(vars(state_of()) | {name: value}, tmp_path / "ckpt.pt")
        assert_refuses(tmp_path)


# ---- GPT-2 folders -------------------------------------------------------------------------------------------

PLAIN = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 20}


def gpt2_folder(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps(PLAIN | changes))
    weights = {k.removeprefix("transformer."): v.contiguous() for k, v in GPT(TINIEST).state_dict().items()}
    del weights["lm_head.weight"]  # as in OpenAI's files on the hub, which also lack the prefix
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    save_file(
        {k: v.t().contiguous() if k.endswith(conv1d) else v for k, v in weights.items()}, folder / "model.safetensors"
    )
    return str(folder)


def test_incomplete_gpt2_folders_and_relatives_that_compute_otherwise_are_refused(tmp_path):
    def assert_refuses_it(*named: str) -> None:
        with pytest.raises(ValueError, match="init_from") as e:
            load_gpt2(str(tmp_path))
        assert_one_line(e.value, tmp_path, *named)

    assert_refuses_it("config.json", "model.safetensors")
    for name, value in (
        ("model_type", "llama"),
        ("layer_norm_epsilon", 1e-6),
        ("n_inner", 12),
        ("activation_function", "silu"),
    ):
        gpt2_folder(tmp_path, **{name: value})
        assert_refuses_it(name)
    for content, reason in (("{", "damaged"), ("[3]", "damaged"), ("7", "damaged"), ('{"n_layer": 1}', "n_head")):
        (tmp_path / "config.json").write_text(content)
        assert_refuses_it(reason)
    gpt2_folder(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 300)
    assert_refuses_it("damaged")
