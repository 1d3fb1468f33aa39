"""Real runs on NVIDIA cards that are not there (bench/pretend_card.py): the ways of a card end to end, without one."""

from __future__ import annotations

import os
import sys

import pytest
from conftest import TINY, assert_equal, events, flags, shell

from bench import pretend_card
from deskgpt.checkpoint import store

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="the library is for Linux"),
]
RUN = TINY | {"device": "cuda", "dtype": "auto", "dropout": 0.1, "n_embd": 64, "block_size": 32, "lr_decay_iters": 6}
DTYPES = {"T4": "float16", "RTX 3060": "bfloat16", "RTX 4070": "bfloat16", "RTX 5090": "bfloat16", "H100": "bfloat16"}


@pytest.fixture(scope="module")
def on_card(tmp_path_factory):
    """Runs a command on a pretended card; returns what it printed. Nothing that others remember is used."""
    folder = tmp_path_factory.mktemp("card")

    def run(card, *command, code=0):
        env = os.environ | pretend_card.environment(card, folder) | {"XDG_CACHE_HOME": str(folder / "cache")}
        done = shell("python", *command, env=env)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("card", pretend_card.CARDS)
def test_run_on_a_card_resumes_bit_for_bit_and_its_model_writes(card, chars, tmp_path, on_card):
    whole = RUN | {"dataset": chars, "out_dir": tmp_path / "whole"}
    on_card(card, "train.py", *flags(**whole))
    halves = whole | {"out_dir": tmp_path / "halves"}
    on_card(card, "train.py", *flags(**(halves | {"max_iters": 3})))
    on_card(card, "train.py", *flags(**(halves | {"init_from": "resume"})))
    a = store.load(tmp_path / "whole")
    b = store.load(tmp_path / "halves")
    assert_equal(a.model, b.model)
    assert a.optimizer
    assert b.optimizer
    assert_equal(a.optimizer["state"], b.optimizer["state"])
    start = events(tmp_path / "whole", "start")[0]
    assert start["device"] == pretend_card.CARDS[card].name
    assert start["dtype"] == DTYPES[card]
    assert bool(a.scaler) == (DTYPES[card] == "float16")
    assert start["peak_flops"] > 2e13  # from the table of cards
    assert events(tmp_path / "whole", "iter")[-1]["peak_memory_bytes"] > 0
    wanted = {"out_dir": tmp_path / "whole", "start": "A", "num_samples": 1, "max_new_tokens": 40, "temperature": 0.0}
    texts = [
        on_card(card, "sample.py", *flags(**wanted, dtype="float32", device=device)).splitlines()[-3:]
        for device in ("cuda", "cpu")
    ]
    assert texts[0] == texts[1]


def test_memory_that_runs_out_in_the_middle_of_a_run_halves_the_micro_batch_or_names_the_remedy(
    chars, tmp_path, on_card
):
    large = {"batch_size": 2048, "block_size": 256, "n_embd": 256, "max_iters": 2, "eval_interval": 100}
    settings = RUN | large | {"dataset": chars, "out_dir": tmp_path / "a", "eval_iters": 1, "dropout": 0.0}
    out = on_card("RTX 3060", "train.py", *flags(**settings, auto_batch=False), code=1)
    assert "--batch_size=" in out
    assert "Traceback" not in out


def test_the_cards_own_tests_pass_on_it(on_card):
    left_out = "not torchrun and not gpus and not sweep_of_matmuls and not predicted_total and not True"
    out = on_card("RTX 4070", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py", "-k", left_out)
    assert " passed" in out or "[100%]" in out
