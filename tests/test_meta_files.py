"""meta.json and meta.pkl that anybody may have made."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_one_line

from data import meta_files
from data.meta_files import read_nanogpt, read_record, write_meta
from data.token_files import read_meta
from data.tokenizer import MOST_MERGES_BYTES

ENTRY = {"tokens": 5, "sha256": "0" * 64}
META: dict[str, Any] = {
    "tokenizer": {"name": "char", "chars": "\nab"},
    "vocab_size": 3,
    "source": "a text",
    "files": {"train.bin": ENTRY, "val.bin": ENTRY},
}


def nanogpt(chars: str) -> dict[str, Any]:
    return {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}


def assert_error(folder: Path, *named: object) -> None:
    """Assert that reading the description raises an error of one short line, which names these."""
    with pytest.raises(ValueError, match="does not describe token files") as e:
        read_meta(folder)
    assert_one_line(e.value, *named)
    assert len(str(e.value)) < 400


# ---- meta.json -----------------------------------------------------------------------------------------------


def test_written_record_is_read_and_keeps_its_checksum_and_older_versions_are_read(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps(META))
    assert read_record(tmp_path) == META
    write_meta(tmp_path, META)
    first = (tmp_path / "meta.json").read_bytes()
    write_meta(tmp_path, read_record(tmp_path))
    assert (tmp_path / "meta.json").read_bytes() == first
    assert {key: value for key, value in read_record(tmp_path).items() if key != "sha256"} == META


# A key with a wrong value, and what the error names.
WRONG: list[tuple[str, Any, str]] = [
    ("vocab_size", True, "vocab_size=True"),
    ("tokenizer", {"name": "char", "chars": "aba"}, "twice"),
    ("tokenizer", {"name": "bpe", "merges": "h e\nhe y"}, "vocab_size=3"),  # which makes 259
    ("tokenizer", {"name": "bpe", "merges": "h e\nthe y"}, "merge 2"),
    ("tokenizer", {"name": "bpe", "merges": "\n".join(f"{'a' * 2**i} {'a' * 2**i}" for i in range(8))}, "merge 8"),
    ("tokenizer", {"name": "bpe", "merges": "h" * (MOST_MERGES_BYTES + 1)}, "merges"),
    ("end_of_text", 3, "end_of_text=3"),
    ("files", {"train.bin": ENTRY | {"tokens": 1e300}}, "tokens=1e+300"),
    ("files", {"train.bin": ENTRY | {"sha256": "0" * 63}}, "sha256='000"),
    ("files", {"../../VICTIM.txt": ENTRY}, "'../../VICTIM.txt'"),
    ("packed", 0, "packed=0"),
]


@pytest.mark.parametrize(("key", "value", "named"), WRONG)
def test_values_that_cannot_be_right_are_named_though_the_checksum_is_right(tmp_path, key, value, named):
    write_meta(tmp_path, META | {key: value})
    assert_error(tmp_path, named)


def test_odd_json_is_one_line_and_what_is_far_too_large_is_not_read(tmp_path):
    for content in (b"[" * 100_000, b"1" * 5000, b"\xff", b"NaN"):
        (tmp_path / "meta.json").write_bytes(content)
        assert_error(tmp_path)
    os.truncate(tmp_path / "meta.json", meta_files.JSON_BYTES + 1)
    assert_error(tmp_path, "meta.json has more than")


# ---- meta.pkl ------------------------------------------------------------------------------------------------


def test_nanogpts_meta_pkl_is_read_in_each_protocol(tmp_path):
    chars = "\n !Aaéſ日🧀"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpt(chars), protocol))
        expected = {"tokenizer": {"name": "char", "chars": chars}, "vocab_size": len(chars), "end_of_text": None}
        assert read_nanogpt(tmp_path) == expected


def test_words_and_sizes_alone_are_enough_to_train_on(tmp_path):
    words = {0: "to", 1: "be", 2: "a"}
    for meta in ({"vocab_size": 3}, {"vocab_size": 3, "itos": words, "stoi": {w: i for i, w in words.items()}}):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
        assert read_nanogpt(tmp_path) == {"tokenizer": {}, "vocab_size": 3, "end_of_text": None}


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_meta_pkl_that_contradicts_itself_is_an_error_and_a_malicious_one_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong: list[dict[str, Any]] = [{"vocab_size": size} for size in (3, 1 << 40, None)]
    wrong += [{"itos": itos} for itos in ({0: "a", 1: "a"}, {0: "a", 1: 3}, {0: "a", 1: [["b"]]}, Evil())]
    wrong += [{"stoi": {"a": 1, "b": 0}}]
    for change in wrong:
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpt("ab") | change))
        assert_error(tmp_path, "meta.pkl")
    assert not (tmp_path / "ran").exists()
