"""meta.json and meta.pkl as strangers may have made them."""

from __future__ import annotations

import json
import pickle
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import meta_files
from data.meta_files import from_json, from_pickle, with_checksum
from data.token_files import listed_files, read_meta, write_meta

ENTRY = {"tokens": 5, "sha256": "0" * 64}
META: dict[str, Any] = {
    "tokenizer": {"name": "char", "chars": "\nab"},
    "vocab_size": 3,
    "source": "a text",
    "files": {"train.bin": ENTRY, "val.bin": ENTRY},
}


def nanogpts(chars: str) -> dict[str, Any]:
    return {
        "vocab_size": len(chars),
        "itos": dict(enumerate(chars)),
        "stoi": {c: i for i, c in enumerate(chars)},
    }


def one_line_or(read: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any] | None:
    """What is read, None for an error of one line."""
    try:
        return read(path)
    except ValueError as e:
        if len(str(e).splitlines()) != 1:
            raise
        return None


# ---- meta.json -----------------------------------------------------------------------------------------------


def test_what_was_written_is_read_and_keeps_its_checksum_when_written_again(tmp_path):
    write_meta(tmp_path, META)
    first = (tmp_path / "meta.json").read_bytes()
    assert from_json(tmp_path / "meta.json") == with_checksum(META)
    write_meta(tmp_path, from_json(tmp_path / "meta.json"))
    assert (tmp_path / "meta.json").read_bytes() == first


def test_meta_json_of_older_versions_is_read_but_with_keys_that_they_had(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps(META))
    assert from_json(tmp_path / "meta.json") == META
    (tmp_path / "meta.json").write_text(json.dumps(META | {"sha257": "0" * 64}))
    with pytest.raises(ValueError, match="it has an unknown key, 'sha257'"):
        from_json(tmp_path / "meta.json")


WRONG = [
    ({"vocab_size": None}, "vocab_size=None cannot be right"),
    ({"vocab_size": True}, "vocab_size=True cannot be right"),
    ({"vocab_size": 10**30}, "vocab_size=10+ cannot be right"),
    ({"vocab_size": 4}, "vocab_size=4 does not fit the tokenizer"),
    ({"vocab_size": "3"}, "vocab_size='3' cannot be right"),
    ({"tokenizer": None}, "tokenizer=None cannot be right"),
    ({"tokenizer": {"name": "char", "chars": ["a", "b", "c"]}}, "characters are not text"),
    ({"tokenizer": {"name": "char", "chars": "aba"}}, "a character twice"),
    ({"tokenizer": {"name": ["char"]}}, "describes no tokenizer"),
    ({"tokenizer": {"name": "gpt\n2"}}, "describes no tokenizer"),
    ({"end_of_text": 3}, "end_of_text=3 is not below vocab_size=3"),
    ({"end_of_text": -1}, "end_of_text=-1 cannot be right"),
    ({"source": 3}, "source=3 cannot be right"),
    ({"files": {"train.bin": ENTRY | {"tokens": None}}}, "tokens=None cannot be right"),
    ({"files": {"train.bin": ENTRY | {"tokens": 1e300}}}, "tokens=1e\\+300 cannot be right"),
    ({"files": {"train.bin": ENTRY | {"sha256": "0" * 63}}}, "sha256='0+...0+' cannot be right"),
    ({"files": {"../../VICTIM.txt": ENTRY}}, "'../../VICTIM.txt' is not the name of a token file"),
    ({"masks": {"../train.mask": ENTRY}}, "'../train.mask' is not the name of a loss mask"),
    ({"masks": {"train.mask": ENTRY | {"tokens": -1}}}, "tokens=-1 cannot be right"),
    ({"packed": 0}, "packed=0 cannot be right"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[m for _, m in WRONG])
@pytest.mark.parametrize("checksum", [True, False])
def test_values_that_cannot_be_right_are_named_though_the_checksum_is_right(tmp_path, wrong, message, checksum):
    if checksum:
        write_meta(tmp_path, META | wrong)
    else:
        (tmp_path / "meta.json").write_text(json.dumps(META | wrong))
    for read in (read_meta, listed_files):
        with pytest.raises(ValueError, match=f"meta.json does not describe token files \\(.*{message}") as e:
            read(tmp_path)
        assert len(str(e.value).splitlines()) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["char", "bytes", "gpt2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from([*META, *ENTRY]), inner),
)


@given(
    st.lists(st.sampled_from([*META, *meta_files.META, "name", "chars", "train.bin", *meta_files.ENTRY])), json_values
)
def test_any_value_anywhere_is_read_or_one_line(tmp_path_factory, keys, value):
    folder = tmp_path_factory.mktemp("m")
    record = meta = json.loads(json.dumps(META))
    for key in keys[:-1]:
        if isinstance(record.get(key), dict):
            record = record[key]
    if keys:
        record[keys[-1]] = value
    write_meta(folder, meta)
    for read in (read_meta, listed_files):
        one_line_or(read, folder)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"\xff", b"NaN", b'"\\ud800"'])
def test_odd_json_is_one_line(tmp_path, content):
    (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(ValueError, match="meta.json does not describe token files") as e:
        read_meta(tmp_path)
    assert len(str(e.value).splitlines()) == 1
    assert len(str(e.value)) < 400


def test_what_is_no_file_or_far_too_large_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "meta.json").mkdir()
    with pytest.raises(ValueError, match="meta.json is not a file"):
        read_meta(tmp_path)
    (tmp_path / "meta.json").rmdir()
    monkeypatch.setattr(meta_files, "JSON_BYTES", 100)
    write_meta(tmp_path, META)
    with pytest.raises(ValueError, match="meta.json has more than 100 bytes"):
        read_meta(tmp_path)


def corrupted(content: bytes, draw: random.Random) -> bytes:
    """Other bytes: with one flipped bit, or cut short, or with two bytes that have changed places."""
    out = bytearray(content)
    while out == content:
        at = draw.randrange(len(out))
        other = draw.randrange(len(out))
        kind = draw.choice(("bit", "bit", "cut", "swap"))
        if kind == "bit":
            out[at] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del out[at:]
        else:
            out[at], out[other] = out[other], out[at]
    return bytes(out)


@pytest.mark.parametrize("older", [False, True])
def test_no_corruption_of_meta_json_is_silent(tmp_path, older):
    """Harmless is what reads as before. In older files, without a checksum, damage is one line or silent."""
    path = tmp_path / "meta.json"
    chars = "".join(map(chr, range(32, 97)))
    meta = META | {"tokenizer": {"name": "char", "chars": chars}, "vocab_size": len(chars)}
    write_meta(tmp_path, meta)
    if older:
        path.write_text(json.dumps(meta, indent=1))
    content = path.read_bytes()
    draw = random.Random(1)
    outcomes = []
    for _ in range(300):
        path.write_bytes(corrupted(content, draw))
        read = one_line_or(from_json, path)
        outcomes.append("named" if read is None else "harmless" if read == meta else "silent")
    assert outcomes.count("named") > 150
    assert older or "silent" not in outcomes


# ---- meta.pkl ------------------------------------------------------------------------------------------------


@given(st.text(min_size=1, max_size=50), st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_nanogpts_meta_pkl_is_read_in_each_protocol(tmp_path_factory, text, protocol):
    path = tmp_path_factory.mktemp("m") / "meta.pkl"
    chars = "".join(sorted(set(text)))
    path.write_bytes(pickle.dumps(nanogpts(chars), protocol))
    expected = {"tokenizer": {"name": "char", "chars": chars}, "vocab_size": len(chars), "end_of_text": None}
    assert from_pickle(path) == expected


def test_meta_pkl_of_all_characters_that_fit_is_read(tmp_path):
    chars = "".join(map(chr, range(1, 0xD800)))
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpts(chars)))
    assert from_pickle(tmp_path / "meta.pkl")["tokenizer"]["chars"] == chars


def test_words_and_sizes_alone_are_enough_to_train_on(tmp_path):
    path = tmp_path / "meta.pkl"
    words = {0: "to", 1: "be", 2: "a"}
    for meta in ({"vocab_size": 3}, {"vocab_size": 3, "itos": words, "stoi": {w: i for i, w in words.items()}}):
        path.write_bytes(pickle.dumps(meta))
        assert from_pickle(path) == {"tokenizer": {}, "vocab_size": 3, "end_of_text": None}


WRONG_PICKLES = [
    (nanogpts("ab") | {"vocab_size": 3}, "vocab_size=3, and its itos has 2 entries"),
    (nanogpts("ab") | {"vocab_size": 1 << 40}, "it holds 1099511627776, an absurd number"),
    (nanogpts("ab") | {"vocab_size": 65_537}, "vocab_size=65537 is not from 1 to 65,536"),
    (nanogpts("ab") | {"vocab_size": None}, "it holds no vocab_size"),
    (nanogpts("ab") | {"itos": {0: "a", 2: "b"}}, "its itos has no token 1"),
    (nanogpts("ab") | {"itos": {0: "a", 1: "a"}}, "its itos has a text twice"),
    (nanogpts("ab") | {"itos": {0: "a", 1: 3}}, "something else than text"),
    (nanogpts("ab") | {"itos": {0: "a", 1: [["b"]]}}, "something else than text"),
    (nanogpts("ab") | {"stoi": {"a": 1, "b": 0}}, "its stoi and itos contradict each other"),
    ({"vocab_size": 2, "itoss": {0: "a", 1: "b"}, "stoi": {"a": 0, "b": 1}}, "its itos is not a table"),
    (nanogpts("ab") | {"itos": "ab"}, "its itos is not a table"),
    ([], "it holds no vocab_size"),
    ({"vocab_size": (2,)}, "only plain values"),
]


@pytest.mark.parametrize(("meta", "message"), WRONG_PICKLES, ids=[m for _, m in WRONG_PICKLES])
def test_meta_pkl_that_contradicts_itself_is_named(tmp_path, meta, message):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    with pytest.raises(ValueError, match=f"meta.pkl does not describe token files .*{message}"):
        read_meta(tmp_path)


HUGE = (0xFFFF_FFF0).to_bytes(4, "little")
BOMBS = {
    "memo": b"\x80\x04Nr" + (0x0FFF_FFFF).to_bytes(4, "little") + b".",  # 4.2 GB for the unpickler's memo
    "memo in text": b"N" + b"p268435455\n.",
    "string": b"X" + HUGE + b"abc.",
    "bytes": b"\x96" + HUGE + bytes(4) + b"abc.",
    "number": b"\x8b" + HUGE + b"abc.",
    "frame": b"\x80\x04\x95" + HUGE + bytes(4) + b"N.",
    "lists in lists": b"]" * 100_000 + b"a" * 99_999 + b".",
    "tuples in tuples as a key": b"}" + b")" + b"\x85" * 100_000 + b"Ns.",
    "digits": b"I" + b"1" * 100_000 + b"\n.",
    "nothing": b"",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickle_bombs_take_neither_memory_nor_time(tmp_path, bomb):
    (tmp_path / "meta.pkl").write_bytes(BOMBS[bomb])
    t0 = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(ValueError, match="meta.pkl does not describe token files") as e:
        read_meta(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6
    assert time.perf_counter() - t0 < 20
    assert len(str(e.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of pickletools
def test_no_corruption_of_meta_pkl_is_a_traceback_or_a_contradiction(tmp_path):
    path = tmp_path / "meta.pkl"
    chars = "".join(map(chr, range(32, 97)))
    content = pickle.dumps(nanogpts(chars))
    draw = random.Random(1)
    for _ in range(300):
        path.write_bytes(corrupted(content, draw))
        meta = one_line_or(from_pickle, path)
        if meta and meta["tokenizer"]:
            assert len(set(meta["tokenizer"]["chars"])) == meta["vocab_size"]


@given(st.binary(max_size=200))
def test_noise_is_never_more_than_one_line(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("n")
    for name in ("meta.json", "meta.pkl"):
        path = Path(folder, name)
        path.write_bytes(content)
        with pytest.raises(ValueError) as e:  # noqa: PT011 (any message of one line)
            read_meta(folder)
        assert len(str(e.value).splitlines()) == 1
        path.unlink()
