"""--sample_interval: texts in log.jsonl as the model learns, which leave the training alone."""

from __future__ import annotations

import os
from typing import Any

import pytest
from conftest import assert_equal, assert_one_line, events, tiny, trajectory, weights
from gloo import run
from test_generation import over_time

import train
from data.text.prepare import prepare
from deskgpt.generate.training_samples import Sampler

MODERN: dict[str, Any] = {"position": "rope", "norm": "rms", "qk_norm": True, "token_shift": True}


@pytest.mark.slow
def test_samples_leave_training_bit_for_bit_as_it_is(chars, tmp_path):
    for out, n in (("without", 0), ("with", 1)):
        train.main(tiny(chars, tmp_path / out, dropout=0.1, sample_interval=n, **MODERN))
    assert_equal(weights(tmp_path / "without"), weights(tmp_path / "with"))
    assert trajectory(tmp_path / "without") == trajectory(tmp_path / "with")
    assert events(tmp_path / "without", "sample") == []
    found = events(tmp_path / "with", "sample")
    assert [e["iter"] for e in found] == [0, 3, 6]  # at its evaluations
    for e in found:
        assert [len(text) for text in e["texts"]] == [16] * Sampler.TEXTS  # no more than the context
        assert all(text.startswith("\n") for text in e["texts"])


def test_cache_is_compared_once_in_a_run(chars, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("model.MLP.forward", over_time)
    train.main(tiny(chars, tmp_path, sample_interval=1))
    printed = [line for line in capfd.readouterr().err.splitlines() if "with a cache" in line]
    assert len(printed) == 1
    assert [e["iter"] for e in events(tmp_path, "sample")] == [0, 3, 6]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_same_weights_write_the_same_texts_and_only_the_first_rank_samples(chars, tmp_path, capfd):
    still: dict[str, Any] = {"learning_rate": 0.0, "dropout": 0.5, "gradient_accumulation_steps": 2}
    run(2, tiny(chars, tmp_path, eval_interval=1, sample_interval=4, **still))
    found = events(tmp_path, "sample")
    assert [e["iter"] for e in found] == [0, 4, 6]  # and at the last step
    assert found[0]["texts"] == found[1]["texts"] == found[2]["texts"]
    assert found[0]["texts"][0] != found[0]["texts"][1]
    assert found[0]["texts"][0][:8] not in capfd.readouterr().out


@pytest.mark.slow
def test_run_continues_without_samples_if_the_tokenizer_does_not_know_the_prompt(tmp_path, capfd):
    data = tmp_path / "data"
    prepare("abc " * 1000, data, "char", "a text in one line")
    train.main(tiny(data, tmp_path / "out", sample_interval=1))
    [printed] = [line for line in capfd.readouterr().out.splitlines() if "sample_interval" in line]
    assert_one_line(printed, "no samples", "tokenizer")
    assert events(tmp_path / "out", "sample") == []
    assert len(events(tmp_path / "out", "end")) == 1
