"""Bits per byte: the bytes of the very tokens evaluated, in every place where an evaluation
shows.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, events, flags, needs_bpe

from bench.compare import compare
from bench.logs import read_run
from data.batches import Split
from data.dataset import bytes_per_token
from data.text.prepare import prepare
from data.tokenizer import GPT2_FILES, BytesTokenizer, from_meta_offline

MULTI_BYTE = "Ünïcödé, 🧀 and plain text.\n日本語の文章。\n"  # of one to four bytes a character


def split_of(folder: Path, ids: np.ndarray, vocab_size: int, block: int) -> Split:
    """Return a val split with these tokens."""
    ids.astype(np.uint16).tofile(folder / "val.bin")
    return Split(folder, "val", block, vocab_size)


@needs_bpe
def test_of_gpt2_it_counts_the_bytes_that_its_own_vocabulary_file_names(tmp_path, text):
    tokenizer = from_meta_offline({"name": "gpt2"})
    ids = tokenizer.encode(text[:20_000] + MULTI_BYTE * 40)
    file = (
        Path(os.environ["TIKTOKEN_CACHE_DIR"])
        / hashlib.sha1(f"{GPT2_FILES}encoder.json".encode()).hexdigest()
    )
    # A piece is written in printable characters, one for each of its bytes.
    n_bytes = {number: len(piece) for piece, number in json.loads(file.read_text()).items()}
    windows = (len(ids) - 1) // 64
    firsts = [row * windows // 30 * 64 for row in range(30)]  # of 30 windows, evenly spaced
    targets = np.concatenate([ids[first + 1 : first + 65] for first in firsts]).tolist()
    found = bytes_per_token(split_of(tmp_path, ids, 50304, block=64), 30, tokenizer)
    assert found == sum(n_bytes[i] for i in targets) / len(targets)


def test_end_of_text_has_no_bytes_but_its_nats_count(tmp_path):
    documents = [MULTI_BYTE * i for i in (3, 5, 8)]
    tokenizer = BytesTokenizer()
    ids = np.concatenate([[255, *tokenizer.encode(text)] for text in documents])
    split = split_of(tmp_path, ids, 256, block=len(ids) - 1)
    n_bytes = len("".join(documents).encode())
    # All but the first token are predicted.
    assert bytes_per_token(split, 1, tokenizer) == n_bytes / (len(ids) - 1)


@needs_bpe
def test_nothing_is_downloaded_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tiktoken.load.read_file", lambda *_: pytest.fail("a download"))
    cache = Path(os.environ["TIKTOKEN_CACHE_DIR"])
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for file in cache.iterdir():  # damaged, which tiktoken would delete and download
        (tmp_path / file.name).write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="TIKTOKEN_CACHE_DIR"):
        from_meta_offline({"name": "gpt2"})
    assert len(list(tmp_path.iterdir())) == len(list(cache.iterdir()))


@pytest.mark.slow
def test_it_shows_in_line_log_and_comparison_and_is_the_same_resumed_and_at_any_micro_batch(
    tmp_path, text, script
):
    mixed = "".join(text[i : i + 2000] + MULTI_BYTE for i in range(0, 100_000, 2000))
    prepare(mixed, tmp_path / "data", "char", "test text")
    settings = TINY | {
        "dataset": tmp_path / "data",
        "out_dir": tmp_path / "out",
        "eval_tokens": 2048,
    }
    printed = []
    again = {"init_from": "resume", "eval_only": True, "batch_size": 8}
    for changed in ({"max_iters": 3}, {"init_from": "resume"}, again):
        done = script("train.py", *flags(**settings | changed))
        assert done.code == 0, done.err
        printed += re.findall(
            r"^step \d+: train loss .*, val loss (\S+), bits per byte (\S+)$", done.out, re.M
        )
    assert printed.pop() == printed[-1]  # at another micro-batch
    logged = events(tmp_path / "out", "eval")
    assert printed == [(f"{e['val_loss']:.4f}", f"{e['val_bpb']:.4f}") for e in logged]
    [found] = {start["bytes_per_token"] for start in events(tmp_path / "out", "start")}
    for e in logged:
        assert e["val_bpb"] == pytest.approx(e["val_loss"] / math.log(2) / found, rel=1e-12)
    rows = compare([read_run(str(tmp_path / "out"))]).tables["Learning"]
    assert ["bits per byte there", f"{min(e['val_bpb'] for e in logged):.4f}"] in rows
