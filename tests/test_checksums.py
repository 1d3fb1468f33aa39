"""Token files that are not what meta.json says, from one flipped bit on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line

import data.dataset
from data.dataset import Checksums
from data.prepared import write_dataset
from data.splits import Split
from data.token_files import assumptions, write_tokens
from data.tokenizer import BytesTokenizer


def dataset(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    splits = {split: draw.integers(0, 256, 600, np.uint16) for split in ("train", "val")}
    write_dataset(folder, splits, BytesTokenizer(), "test")
    return folder


def splits_of(folder: Path) -> list[Split]:
    return [Split(folder, split, 8, 256) for split in ("train", "val")]


def verified(folder: Path) -> str:
    """The state after all was verified. Raises what training would end with."""
    verification = Checksums(folder, splits_of(folder))
    verification._thread.join()
    verification.check()
    return verification.state


@pytest.mark.parametrize("at_once", [True, False], ids=["before the run", "while it trains"])
def test_damaged_file_is_named(tmp_path, monkeypatch, at_once):
    dataset(tmp_path)
    monkeypatch.setattr(data.dataset, "AT_ONCE", 1 << 30 if at_once else 0)
    assert verified(tmp_path) == ("checksums verified" if at_once else "checksums are verified while it trains")
    ids = np.fromfile(tmp_path / "val.bin", "<u2")
    ids[3] ^= 1
    ids.tofile(tmp_path / "val.bin")
    with pytest.raises(ValueError, match="prepare the data again") as e:
        verified(tmp_path)
    assert_one_line(str(e.value), tmp_path / "val.bin")


def test_folders_without_a_list_and_files_outside_of_it_are_said(tmp_path):
    dataset(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    write_tokens(tmp_path / "train_2.bin", np.arange(20, dtype=np.uint16))
    assert verified(tmp_path) == "checksums verified"
    assert "not read: train_2.bin" in " ".join(assumptions(tmp_path))
    (tmp_path / "meta.json").write_text(json.dumps({key: value for key, value in meta.items() if key != "sha256"}))
    assert "meta.json is of an older version" in verified(tmp_path)
    (tmp_path / "meta.json").unlink()
    assert verified(tmp_path) == "no checksums (no meta.json that lists files)"
