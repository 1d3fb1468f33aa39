"""Bits per byte: the bytes of the very tokens evaluated, in every place where an evaluation
shows.
"""

import math
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import logged, needs_bpe, raises_one_line, run_tiny

from bench.compare import compare
from bench.logs import read_run
from data.batches import Split
from data.dataset import bytes_per_token
from data.text.prepare import prepare
from data.tokenizer import encoded_document, from_meta_offline

MULTI_BYTE = "Ünïcödé, 🧀 and plain text.\n日本語の文章。\n"  # of one to four bytes a character


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=needs_bpe)])
def test_all_bytes_of_the_targets_count_end_of_text_has_none_but_its_nats_count(tmp_path, name):
    tokenizer = from_meta_offline({"name": name})
    documents = [MULTI_BYTE * i for i in (3, 5, 8)]
    ids = np.concatenate([encoded_document(tokenizer, text) for text in documents])
    ids.tofile(tmp_path / "val.bin")
    split = Split(tmp_path, "val", len(ids) - 1, tokenizer.vocab_size)
    n_bytes = len("".join(documents).encode())
    # All but the first token are predicted.
    assert bytes_per_token(split, 1, tokenizer) == n_bytes / (len(ids) - 1)

    mask = ids % 2
    mask.astype(np.uint8).tofile(tmp_path / "val.mask")
    masked = Split(tmp_path, "val", len(ids) - 1, tokenizer.vocab_size)
    lengths = tokenizer.token_bytes()[ids[1:][mask[1:] == 1]]
    assert bytes_per_token(masked, 1, tokenizer) == lengths.mean()


@needs_bpe
def test_nothing_is_downloaded_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tiktoken.load.read_file", lambda *_: pytest.fail("a download"))
    for file in Path(os.environ["TIKTOKEN_CACHE_DIR"]).iterdir():
        (tmp_path / file.name).write_bytes(b"damaged")  # which tiktoken would download again
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with raises_one_line("TIKTOKEN_CACHE_DIR"):
        from_meta_offline({"name": "gpt2"})


def test_it_shows_in_log_and_comparison_and_follows_from_the_loss(tmp_path):
    prepare(MULTI_BYTE * 100, tmp_path / "data", "char", "test text")
    out_dir = tmp_path / "out"
    run_tiny(tmp_path / "data", out_dir)
    [per_token] = logged(out_dir, "start", "bytes_per_token")
    assert per_token > 1
    found = logged(out_dir, "eval", "val_bpb")
    expected = np.array(logged(out_dir, "eval", "val_loss")) / math.log(2) / per_token
    assert found == pytest.approx(expected)
    rows = compare([read_run(str(out_dir))]).tables["Learning"]
    assert ["bits per byte there", f"{min(found):.4f}"] in rows
