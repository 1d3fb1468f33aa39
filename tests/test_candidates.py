"""The candidates of docs/hacks: each applies to the checkout, trains, and changes what is trained."""

from __future__ import annotations

import math

import pytest
from conftest import events
from test_hacks import EXAMPLES, PATCHES, Checkout

FAST = [
    *("config/train_shakespeare_char_fast.py", "--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16"),
    *("--batch_size=2", "--gradient_accumulation_steps=2", "--max_iters=10", "--eval_interval=10", "--eval_tokens=64"),
    *("--warmup_iters=2", "--log_interval=1", "--device=cpu", "--dtype=float32", "--compile=False"),
]


def trained(here: Checkout) -> tuple[list[float], float]:
    """The training losses of the run, and the val loss at its end."""
    done = here.run("train.py", *FAST, *here.settings, "--out_dir=out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "disagrees with model.py" not in done.stdout  # no kernel is left out
    return here.losses("out"), events(here.folder / "out", "eval")[-1]["val_loss"]


@pytest.fixture(scope="module")
def unchanged(python, chars, tmp_path_factory) -> tuple[list[float], float]:
    return trained(Checkout(tmp_path_factory.mktemp("unchanged"), "", python, [f"--dataset={chars}"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PATCHES if name not in EXAMPLES])
def test_candidate_trains_and_changes_what_is_trained(name, unchanged, python, chars, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    losses, val_loss = trained(Checkout(tmp_path, PATCHES[name], python, [f"--dataset={chars}"]))
    assert all(map(math.isfinite, [*losses, val_loss]))
    assert (losses, val_loss) != unchanged


@pytest.mark.slow
def test_cap_that_only_the_definition_has_is_found_although_a_new_head_is_zero(python, chars, tmp_path):
    of_model = PATCHES["logit_softcap"].partition("--- a/model.py")
    done = Checkout(tmp_path, of_model[1] + of_model[2], python, [f"--dataset={chars}"]).run(
        "train.py", *FAST, f"--dataset={chars}", "--out_dir=out"
    )
    before_training = done.stdout.partition("step 0:")[0]
    assert "chunked loss in float32 disagrees with model.py" in before_training
