"""Real runs on cards that are not there (bench/pretend_card.py)."""

import os
import re
import sys
from typing import Any

import pytest
from conftest import assert_same_run, copy_of_repository, events, flags, nightly, shell, slow
from logs import nanogpt_checkout

from bench import check_cards, pretend_card, qualify
from deskgpt.checkpoint import load_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is for Linux")

# As a user types it, but for the size of the model and of a step.
RUN: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 32, "dropout": 0.1}
RUN |= {"batch_size": 2, "gradient_accumulation_steps": 4, "eval_tokens": 512, "device": "cuda"}
RUN |= {"max_iters": 6, "lr_decay_iters": 6, "eval_interval": 3, "log_interval": 1}
DTYPES = dict.fromkeys(["RTX 3060", "RTX 4070", "RTX 5090", "H100"], "bfloat16")
DTYPES["T4"] = "float16"
# One card in CI: the one with a loss scale.
CARDS = [pytest.param(card, marks=slow if card == "T4" else nightly) for card in DTYPES]


@pytest.fixture(scope="module")
def on_card(tmp_path_factory):
    """Return a function that runs a command on a pretended card, with a cache of its own, and
    returns its stdout.
    """
    folder = tmp_path_factory.mktemp("card")

    def run(card, *command, **options):
        env = os.environ | pretend_card.environment(card, folder)
        env["XDG_CACHE_HOME"] = str(folder / "cache")
        done = shell("python", *command, env=env, timeout=1800, **options)
        # torch's warnings, which look like a fault
        assert not re.search(r"^W\d{4} ", done.stderr, re.M), done.stderr
        return done.stdout

    return run


@nightly
@pytest.mark.parametrize("card", DTYPES)
def test_make_train_on_a_card_ends_with_a_report_and_a_model_for_other_programs(
    card, text, tmp_path, on_card
):
    folder = copy_of_repository(tmp_path)
    (folder / "data" / "shakespeare_char" / "input.txt").write_text(text)
    settings = flags(**RUN | {"gradient_accumulation_steps": 1, "device": "auto"})
    train = f"tasks.train(Path(sys.executable), '', 'out', 'first.gguf', {settings})"
    out = on_card(card, "-c", f"import sys, tasks; from pathlib import Path; {train}", cwd=folder)
    assert "TFLOP/s on cuda" in out
    assert "config/train_shakespeare_char.py" in out
    assert events(folder / "out", "start")[0]["dtype"] == DTYPES[card]
    assert (folder / "out" / "report.html").exists()
    assert (folder / "first.gguf").exists()
    on_card(card, "export.py", "--out_dir=out", "--to=first", cwd=folder)


@pytest.mark.parametrize("card", CARDS)
def test_run_on_a_card_resumes_bit_for_bit(card, chars, tmp_path, on_card):
    command = ("train.py", "config/train_fineweb_125m.py")
    settings = RUN | {"dataset": chars, "compile": True}
    for changed in ({}, {"max_iters": 3}, {"init_from": "resume"}):
        out_dir = tmp_path / ("halves" if changed else "full")
        on_card(card, *command, *flags(**settings | changed, out_dir=out_dir))
    full = tmp_path / "full"
    assert_same_run(full, tmp_path / "halves")
    [start] = events(full, "start")
    assert (start["device"], start["dtype"]) == (pretend_card.CARDS[card].name, DTYPES[card])
    in_bfloat16 = DTYPES[card] == "bfloat16"
    assert (start["compiled"], start["residual_dtype"] == "bfloat16") == (True, in_bfloat16)
    assert bool(load_checkpoint(full).scaler) != in_bfloat16
    assert start["peak_flops"] > 2e13  # from the table of cards
    assert events(full, "iter")[-1]["peak_memory_bytes"] > 0


IN_CI = "waits or out_of_memory or halves or False-float16 or compiled_run and none-gpt2"


CHOSEN = [pytest.param("T4", IN_CI, marks=slow), pytest.param("H100", "cuda_graph", marks=slow)]


@pytest.mark.parametrize(
    ("card", "chosen"), CHOSEN + [pytest.param(card, "test", marks=nightly) for card in DTYPES]
)
def test_the_cards_own_tests_pass_on_it(card, chosen, on_card):
    files = ("tests/test_gpu.py", "tests/test_cuda_graph.py")
    out = on_card(card, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-k", chosen, *files)
    assert " passed" in out


@nightly
def test_qualify_passes_its_stages_at_toy_sizes(on_card, tmp_path):
    stages = {name for name, *_ in pretend_card.rows_of("stages.txt")}
    stages -= {"right", "tests"}  # which have a test of their own
    sizes = flags(n_layer=2, n_head=2, n_embd=64, block_size=64, dataset="x_char")
    peer = nanogpt_checkout(tmp_path / "nanogpt")
    folder = copy_of_repository(tmp_path)
    on_card("H100", "bench/qualify.py", peer, *sizes, "--only", *stages, cwd=folder)
    [page] = folder.glob("out-qualify/*/page.md")
    rows = [
        [cell.strip() for cell in row]
        for row in re.findall(r"^" + r"\|([^|\n]*)" * 6 + r"\|$", page.read_text(), re.M)[2:]
    ]
    assert {row[2] for row in rows if row[3] == "n/a"} == {"busy", "gaps"}
    for path in page.parent.glob("*x*.txt"):  # a graph changes no loss
        with_graph, without = (
            qualify.number(path.read_text(), name, "loss") for name in ("ours + graph", "ours")
        )
        assert with_graph == without != "n/a"


@nightly
def test_kernels_compile_for_all_cards_and_memory_is_as_predicted(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")  # where triton is
    done = shell("python", "bench/check_cards.py", timeout=4 * 3600)
    gib = re.findall(r"(\d+\.\d+) \| +(\d+\.\d+) \|$", done.stdout, re.M)
    assert len(gib) == len(pretend_card.CARDS) * len(check_cards.CONFIGS)
    for counted, predicted in gib:
        # As memory.py expects
        assert 0.97 * float(counted) <= float(predicted) <= 1.25 * float(counted)
