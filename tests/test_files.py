from __future__ import annotations

import pytest
from conftest import assert_one_line, files_of_at_most

from deskgpt.system.files import replacing, write_atomically


def test_of_two_writers_at_once_the_last_one_to_end_wins_with_its_whole_content(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with replacing(path) as last:
        last.write(b"la")
        with replacing(path) as first:
            first.write(b"first")
            assert path.read_bytes() == b"old"
        assert path.read_bytes() == b"first"
        last.write(b"st")
    assert path.read_bytes() == b"last"
    assert list(tmp_path.iterdir()) == [path]


def test_block_or_disk_that_fails_leaves_the_old_content_and_nothing_else(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:  # noqa: PT012 (the block is what fails)
        file.write(b"new")
        raise KeyboardInterrupt
    with files_of_at_most(kib=1), pytest.raises(OSError, match=r"a\.bin") as e:
        write_atomically(path, bytes(2000))
    assert_one_line(e.value, path, "free some disk space")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
