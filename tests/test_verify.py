"""Token files that are not what meta.json says, from one flipped bit on."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_one_line
from test_meta_files import corrupted

import data.verify
from data.splits import Split
from data.token_files import Shard, write_dataset, write_meta, write_tokens
from data.tokenizer import BytesTokenizer
from data.verify import REMEMBERED, Verification
from deskgpt.machine import remembered
from deskgpt.machine.files import file_sha256


def dataset(folder: Path, header: bool = False, n: int = 600) -> Path:
    """Bare files as write_dataset makes them, or with headers as data/shards.py does."""
    draw = np.random.default_rng(0)
    splits = {split: draw.integers(0, 256, n, np.uint16) for split in ("train", "val")}
    if not header:
        write_dataset(folder, splits, BytesTokenizer(), "test")
        return folder
    files = {}
    for split, ids in splits.items():
        path = folder / f"{split}_000000.bin"
        write_tokens(path, ids, header=True)
        files[path.name] = {"tokens": n, "sha256": file_sha256(path)}
    write_meta(folder, {"tokenizer": {"name": "bytes"}, "vocab_size": 256, "source": "test", "files": files})
    return folder


def splits_of(folder: Path) -> list[Split]:
    return [Split(folder, split, 8, 256) for split in ("train", "val")]


def verified(folder: Path) -> str:
    """The state after all was verified. Raises what training would end with."""
    verification = Verification(folder, splits_of(folder))
    if verification._thread is not None:
        verification._thread.join()
    verification.check()
    assert verification.close()
    return verification.state


@pytest.mark.parametrize("header", [False, True], ids=["bare", "headed"])
def test_no_corruption_of_a_token_file_is_silent(tmp_path, header):
    dataset(tmp_path, header)
    train = next(tmp_path.glob("train*.bin"))
    content = train.read_bytes()
    draw = random.Random(1)
    for _ in range(150):
        train.write_bytes(corrupted(content, draw))
        with pytest.raises(ValueError, match=train.name) as e:
            verified(tmp_path)
        assert_one_line(str(e.value))


@pytest.mark.parametrize("at_once", [True, False], ids=["before the run", "while it trains"])
def test_damaged_file_is_named(tmp_path, monkeypatch, at_once):
    dataset(tmp_path)
    monkeypatch.setattr(data.verify, "AT_ONCE", 1 << 30 if at_once else 0)
    assert verified(tmp_path) == ("checksums verified" if at_once else "checksums are verified while it trains")
    ids = np.fromfile(tmp_path / "val.bin", "<u2")
    ids[3] ^= 1
    ids.tofile(tmp_path / "val.bin")
    with pytest.raises(ValueError, match="prepare the data again") as e:
        verified(tmp_path)
    assert_one_line(str(e.value), tmp_path / "val.bin")
    if not at_once:  # found too late for another step
        verification = Verification(tmp_path, splits_of(tmp_path))
        assert verification._thread is not None
        verification._thread.join()
        with pytest.raises(ValueError, match=r"val\.bin"):
            verification.close()


def test_meta_json_without_a_checksum_of_its_own_is_said(tmp_path):
    dataset(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    del meta["sha256"]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert verified(tmp_path) == "checksums verified; meta.json is of an older version and has none of its own"


def test_what_was_verified_is_not_read_again_until_it_changes(tmp_path, monkeypatch):
    dataset(tmp_path)
    assert verified(tmp_path) == "checksums verified"
    assert not (tmp_path / REMEMBERED).exists()  # it was written a moment ago, and may be again at the same instant
    monkeypatch.setattr(data.verify, "RECENT_S", -1.0)
    assert verified(tmp_path) == "checksums verified"
    assert remembered.read_file(tmp_path / REMEMBERED).keys() == {"train.bin", "val.bin"}
    with monkeypatch.context() as patch:
        patch.setattr(Shard, "sha256", None)
        assert verified(tmp_path) == "checksums verified before"

    # Other bytes with the size and the time of before: the system knows better.
    status = (tmp_path / "train.bin").stat()
    ids = np.fromfile(tmp_path / "train.bin", "<u2")
    time.sleep(0.05)
    ids[::-1].tofile(tmp_path / "train.bin")
    os.utime(tmp_path / "train.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ValueError, match=r"train\.bin"):
        verified(tmp_path)
    ids.tofile(tmp_path / "train.bin")
    assert verified(tmp_path) == "checksums verified"


@pytest.mark.parametrize("content", ["", "[]", '{"train.bin": 3}', "[" * 100_000])
def test_damaged_memory_of_what_was_verified_is_no_error(tmp_path, content):
    dataset(tmp_path)
    (tmp_path / REMEMBERED).write_text(content)
    assert verified(tmp_path) == "checksums verified"


def test_folder_that_cannot_be_written_is_verified_each_time(tmp_path, monkeypatch):
    dataset(tmp_path)
    monkeypatch.setattr(data.verify, "RECENT_S", -1.0)
    (tmp_path / REMEMBERED).mkdir()  # even root cannot write it
    for _ in range(2):
        assert verified(tmp_path) == "checksums verified"


def test_folders_without_a_list_and_files_outside_of_it_are_said(tmp_path):
    dataset(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    write_tokens(tmp_path / "train_2.bin", np.arange(20, dtype=np.uint16))
    assert verified(tmp_path) == "checksums verified; meta.json does not list train_2.bin"
    write_meta(tmp_path, {"tokenizer": meta["tokenizer"], "vocab_size": 256})
    assert verified(tmp_path) == "no checksums (meta.json lists no files)"
    (tmp_path / "meta.json").unlink()
    assert verified(tmp_path) == "no checksums (no meta.json)"


def test_closing_stops_a_verification_that_has_not_ended(tmp_path, monkeypatch):
    dataset(tmp_path)
    monkeypatch.setattr(data.verify, "AT_ONCE", 0)

    def slow(shard, cancelled):
        while not cancelled():
            time.sleep(0.01)

    monkeypatch.setattr(Shard, "sha256", slow)
    verification = Verification(tmp_path, splits_of(tmp_path))
    verification.check()
    assert not verification.close()
    assert not (tmp_path / REMEMBERED).exists()


def test_file_cut_short_while_it_is_verified_is_named(tmp_path):
    dataset(tmp_path)
    splits = splits_of(tmp_path)
    os.truncate(tmp_path / "train.bin", 100)
    with pytest.raises(ValueError, match=r"train\.bin became shorter"):
        Verification(tmp_path, splits)
