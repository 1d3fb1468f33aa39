"""Is my curve normal: a run is compared with the losses of runs that differ only in their seed."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from typing import Any

import pytest
from conftest import ROOT, assert_one_line, events, tiny
from logs import rewrite

import train
from configurator import read_settings
from deskgpt.run import loss_band
from deskgpt.run.loss_band import Band
from train import TrainConfig

CONFIG: dict[str, Any] = {"learning_rate": 1e-3, "max_iters": 20, "lr_decay_iters": 20, "eval_interval": 10}


@pytest.mark.slow
def test_run_belongs_to_the_band_of_its_settings_and_its_end_prints_the_interval_that_decides(
    chars, tmp_path, capfd, monkeypatch, script
):
    monkeypatch.setattr(loss_band, "FOLDER", tmp_path)
    train.main(tiny(chars, tmp_path / "0", **CONFIG))
    out_dirs = [tmp_path / f"{i}" for i in range(8)]
    for i in range(1, 8):  # the other seeds' losses are made up
        shutil.copytree(out_dirs[0], out_dirs[i])
        rewrite(str(out_dirs[i]), partial(of_other_seed, i))
    assert_one_line(script("bench/band.py", "config/tiny.py", *out_dirs[:7], out_dirs[0]).err, "alone")
    assert script("bench/band.py", "config/tiny.py", *out_dirs).out.strip() == str(tmp_path / "tiny.json")
    start = events(tmp_path / "0", "start")[0]
    for other in ({"learning_rate": 3e-3}, {"eval_iters": 4}, {"n_head": 1, "batch_size": 8}):
        assert loss_band.band_of(start["settings"] | other, start["val_sha256"], start["train_tokens"]) is None

    def verdict(name: str, **settings: Any) -> str:
        capfd.readouterr()
        train.main(tiny(chars, tmp_path / name, **CONFIG | settings))
        (line,) = re.findall(r"^(?:as usual|unusual): .*$", capfd.readouterr().out, re.M)
        return line

    assert verdict("split", batch_size=2, gradient_accumulation_steps=2, eval_iters=4).startswith("as usual: ")
    rate = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", lambda c, step: 10 * rate(c, step))  # a defect
    assert verdict("defect").startswith("unusual: ")


def of_other_seed(seed: int, e: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an event that another seed changes."""
    if e["event"] == "start":
        return {"settings": e["settings"] | {"seed": seed}}
    return {"val_loss": e["val_loss"] + 0.003 * (-1) ** seed} if e["event"] == "eval" else {}


def test_verdict_names_the_first_step_outside_of_the_band():
    band = Band({0: [4.1, 4.1], 10: [3.0, 3.1], 20: [2.0, 2.1]})
    half = loss_band.DEVIATIONS * 0.0707107
    assert band.limits(0) == pytest.approx((4.1 - loss_band.LEAST, 4.1 + loss_band.LEAST))
    assert band.limits(20) == pytest.approx((2.05 - half, 2.05 + half), abs=1e-4)
    assert band.verdict({0: 4.1, 10: 3.05, 15: 9.9, 20: 2.09}).startswith("as usual: val loss 2.0900")
    assert "at step 10" in band.verdict({0: 4.1, 10: 2.5, 20: 1.5})
    assert band.verdict({0: 4.1, 20: float("nan")}).startswith("unusual")
    assert band.verdict({5: 1.0}) == ""


@pytest.mark.parametrize("path", [*(ROOT / "config/loss_bands").glob("*.json")], ids=lambda path: path.stem)
def test_kept_bands_are_those_of_the_shipped_configs(path):
    record = json.loads(path.read_text())
    settings = read_settings(TrainConfig, [str(ROOT / "config" / f"{path.stem}.py")])
    data = (record["experiment"]["val_sha256"], record["experiment"]["train_tokens"])
    remedy = f"the config has changed: make {path.name} again from eight runs (docs/comparing-runs.md)"
    assert loss_band.DEFAULTS | record["experiment"] == loss_band.experiment(settings, *data), remedy
    assert len(record["seeds"]) >= 8
