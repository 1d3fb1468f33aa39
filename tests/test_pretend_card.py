"""Real runs on NVIDIA cards that are not there (bench/pretend_card.py): the code paths of a card, without one."""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import Any

import pytest
from conftest import ROOT, assert_equal, events, flags, shell

from bench import check_cards, pretend_card
from deskgpt.checkpoint import store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is for Linux")

# As a user types it, but for the size of the model and of a step.
RUN: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "dropout": 0.1, "device": "cuda"}
RUN |= {"batch_size": 2, "gradient_accumulation_steps": 4, "eval_tokens": 512}
RUN |= {"max_iters": 6, "lr_decay_iters": 6, "eval_interval": 3}
DTYPES = {"T4": "float16", "RTX 3060": "bfloat16", "RTX 4070": "bfloat16", "RTX 5090": "bfloat16", "H100": "bfloat16"}
# One card in CI: the one with a loss scale.
CARDS = [pytest.param(card, marks=pytest.mark.slow if card == "T4" else pytest.mark.nightly) for card in DTYPES]


@pytest.fixture(scope="module")
def on_card(tmp_path_factory):
    """Return a function that runs a command on a pretended card, with a cache of its own, and returns its stdout."""
    folder = tmp_path_factory.mktemp("card")

    def run(card, *command, **options):
        env = os.environ | pretend_card.environment(card, folder) | {"XDG_CACHE_HOME": str(folder / "cache")}
        done = shell("python", *command, env=env, timeout=1800, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not re.search(r"^W\d{4} ", done.stderr, re.M), done.stderr  # torch's warnings, which look like a fault
        return done.stdout

    return run


@pytest.mark.parametrize("card", CARDS)
def test_make_train_on_a_card_ends_with_a_report_and_a_model_for_other_programs(card, text, tmp_path, on_card):
    folder = tmp_path / "deskgpt"
    ignored = shutil.ignore_patterns(".*", "out*", "tests", "results", "__pycache__", "*.bin", "meta.*", "input.txt")
    shutil.copytree(ROOT, folder, ignore=ignored)
    (folder / "data" / "shakespeare_char" / "input.txt").write_text(text)
    settings = flags(**RUN | {"gradient_accumulation_steps": 1, "device": "auto"})
    train = f"tasks.train(Path(sys.executable), '', 'out', 'first.gguf', {settings})"
    out = on_card(card, "-c", f"import sys, tasks; from pathlib import Path; {train}", cwd=folder)
    assert "on cuda: training" in out
    assert "train.py config/train_shakespeare_char.py" in out
    assert events(folder / "out", "start")[0]["dtype"] == DTYPES[card]
    assert (folder / "out" / "report.html").exists()
    assert (folder / "first.gguf").exists()
    on_card(card, "export.py", "--out_dir=out", "--to=first", cwd=folder)


@pytest.mark.parametrize("card", CARDS)
def test_run_on_a_card_resumes_bit_for_bit_and_its_model_writes(card, chars, tmp_path, on_card):
    command = ("train.py", "config/train_fineweb_125m.py")
    full = RUN | {"dataset": chars, "out_dir": tmp_path / "full", "compile": True}
    on_card(card, *command, *flags(**full))
    halves = full | {"out_dir": tmp_path / "halves"}
    on_card(card, *command, *flags(**(halves | {"max_iters": 3})))
    on_card(card, *command, *flags(**(halves | {"init_from": "resume"})))
    a = store.load(tmp_path / "full")
    b = store.load(tmp_path / "halves")
    assert_equal(a.model, b.model)
    assert a.optimizer
    assert b.optimizer
    assert_equal(a.optimizer["state"], b.optimizer["state"])
    start = events(tmp_path / "full", "start")[0]
    assert (start["device"], start["dtype"]) == (pretend_card.CARDS[card].name, DTYPES[card])
    in_bfloat16 = DTYPES[card] == "bfloat16"
    assert (start["compiled"], start["residual_dtype"] == "bfloat16") == (True, in_bfloat16)
    assert bool(a.scaler) == (DTYPES[card] == "float16")
    assert start["peak_flops"] > 2e13  # from the table of cards
    assert events(tmp_path / "full", "iter")[-1]["peak_memory_bytes"] > 0
    wanted = {"out_dir": tmp_path / "full", "start": "A", "num_samples": 1, "max_new_tokens": 40, "temperature": 0.0}
    texts = []
    for device in ("cuda", "cpu"):
        texts.append(on_card(card, "sample.py", *flags(**wanted, dtype="float32", device=device)).splitlines()[-3:])
    assert texts[0] == texts[1]


# Each card has its own minute in CI, and all of the tests at night.
SOME = "finite or out_of_memory or predicted or halved or False-float16 or compiled_run and none-gpt2"
OWN_TESTS = [pytest.param(card, SOME, marks=pytest.mark.slow) for card in DTYPES]
OWN_TESTS += [pytest.param(card, "test", marks=pytest.mark.nightly) for card in DTYPES]


@pytest.mark.parametrize(("card", "chosen"), OWN_TESTS)
def test_the_cards_own_tests_pass_on_it(card, chosen, on_card):
    out = on_card(card, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-k", chosen, "tests/test_gpu.py")
    assert " passed" in out


@pytest.mark.nightly
def test_qualify_passes_its_stages_at_toy_sizes(on_card, tmp_path):
    chosen = ("facts", "first", "check", "speed", "predicted", "memory", "sampling", "fast", "variants", "char")
    on_card("H100", "bench/qualify.py", f"--out_dir={tmp_path}", "--only", *chosen)


@pytest.mark.nightly
def test_kernels_compile_for_all_cards_and_memory_is_as_predicted(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")  # where triton is
    done = shell("python", "bench/check_cards.py", timeout=4 * 3600)
    assert done.returncode == 0, done.stderr
    gib = re.findall(r"(\d+\.\d+), (\d+\.\d+) \|$", done.stdout, re.M)
    assert len(gib) == len(pretend_card.CARDS) * len(check_cards.CONFIGS)
    for counted, predicted in gib:
        assert 0.98 * float(counted) <= float(predicted) <= 1.25 * float(counted)  # as estimate/fit.py expects
