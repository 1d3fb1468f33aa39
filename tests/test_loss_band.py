"""A run is compared with the losses of runs that differ only in their seed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, events, tiny

import train
from configurator import read_settings
from deskgpt.run import loss_band
from deskgpt.run.loss_band import Band
from train import TrainConfig

CONFIG: dict[str, Any] = {"learning_rate": 1e-3, "max_iters": 20, "lr_decay_iters": 20, "eval_interval": 10}


@pytest.mark.slow
def test_run_is_compared_with_the_band_of_its_settings(chars, tmp_path, capsys, monkeypatch):
    train.main(tiny(chars, tmp_path / "first", **CONFIG))
    start = events(tmp_path / "first", "start")[0]
    data = (start["val_sha256"], start["train_tokens"])
    losses = {e["iter"]: [e["val_loss"] + 0.01 * i for i in (-1, 0, 1)] for e in events(tmp_path / "first", "eval")}
    record = {"experiment": loss_band.experiment(start["settings"], *data), "val_losses": losses, "deviations": 3.0}
    (tmp_path / "tiny.json").write_text(json.dumps(record))
    monkeypatch.setattr(loss_band, "FOLDER", tmp_path)
    for other, reason in (
        ({"learning_rate": 3e-3}, "learning_rate is 0.003, and 0.001 in theirs"),
        ({"eval_iters": 4}, "windows per evaluation is 16, and 8 in theirs"),
        ({"n_head": 1, "batch_size": 8}, ""),
    ):
        config = tiny(chars, Path("out"), **CONFIG | other)
        assert loss_band.band_of(config, *data) is None
        assert loss_band.missing_band(config, *data).endswith(reason)

    def verdict(name: str, **settings: Any) -> str:
        capsys.readouterr()
        train.main(tiny(chars, tmp_path / name, **CONFIG | settings))
        (line,) = re.findall(r"^(?:as usual|unusual): .*$", capsys.readouterr().out, re.M)
        return line

    assert verdict("split", batch_size=2, gradient_accumulation_steps=2, eval_iters=4).startswith("as usual: ")
    rate = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", lambda c, step: 10 * rate(c, step))  # a defect
    assert verdict("defect").startswith("unusual: ")


def test_verdict_names_the_first_step_outside_of_the_band():
    band = Band({0: [4.1, 4.1], 10: [3.0, 3.1], 20: [2.0, 2.1]}, 2.0)
    assert band.limits(0) == pytest.approx((4.1 - loss_band.LEAST, 4.1 + loss_band.LEAST))
    assert band.limits(20) == pytest.approx((2.05 - 0.1414, 2.05 + 0.1414), abs=1e-4)
    assert band.verdict({0: 4.1, 10: 3.05, 15: 9.9, 20: 2.09}).startswith("as usual: val loss 2.0900")
    assert "at step 10" in band.verdict({0: 4.1, 10: 2.5, 20: 1.5})
    assert band.verdict({0: 4.1, 20: float("nan")}).startswith("unusual")
    assert band.verdict({5: 1.0}) == ""


@pytest.mark.parametrize("path", [*(ROOT / "config/loss_bands").glob("*.json")], ids=lambda path: path.stem)
def test_shipped_bands_are_of_the_shipped_configs(path):
    record = json.loads(path.read_text())
    settings = read_settings(TrainConfig, [str(ROOT / "config" / f"{path.stem}.py")])
    data = (record["experiment"]["val_sha256"], record["experiment"]["train_tokens"])
    remedy = f"the config has changed: make {path.name} again from eight runs (docs/comparing-runs.md)"
    assert loss_band.DEFAULTS | record["experiment"] == loss_band.experiment(settings, *data), remedy
    assert len(record["seeds"]) >= 8
