from __future__ import annotations

import os

import pytest

from deskgpt.machine.files import copy, replacing, write_atomically


def test_path_keeps_its_old_content_until_the_block_ends(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        (new,) = tmp_path.glob("a.bin.*.tmp")
        assert new.read_bytes() == b"new"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_of_two_writers_at_once_the_last_one_to_end_wins_with_its_whole_content(tmp_path):
    path = tmp_path / "a.bin"
    with replacing(path) as last:
        last.write(b"la")
        with replacing(path) as first:
            first.write(b"first")
        assert path.read_bytes() == b"first"
        last.write(b"st")
    assert path.read_bytes() == b"last"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
def test_block_that_fails_leaves_the_old_content_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(error, match="in the block"), replacing(path) as file:  # noqa: PT012 (the block is what fails)
        file.write(b"new")
        raise error("in the block")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_disk_that_fails_at_the_end_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*a\.bin: No space left on device; free some disk space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_copy_is_a_file_of_its_own(tmp_path):
    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "b").write_bytes(b"old")
    for _ in range(2):
        copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"new"
    assert not (tmp_path / "a").samefile(tmp_path / "b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
