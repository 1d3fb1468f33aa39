"""Is my curve normal: a run is compared with the losses of runs that differ only in their seed."""

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
from train import TrainConfig, main

BANDS = [*(ROOT / "config/loss_bands").glob("*.json")]
CONFIG: dict[str, Any] = {"learning_rate": 1e-3, "max_iters": 20, "lr_decay_iters": 20, "eval_interval": 10}


@pytest.fixture(scope="module")
def first(chars, tmp_path_factory) -> Path:
    """The folder of a run."""
    out_dir = tmp_path_factory.mktemp("first")
    main(tiny(chars, out_dir, **CONFIG))
    return out_dir


@pytest.fixture
def band(first, tmp_path, monkeypatch) -> Path:
    """A band around the losses of one run, the only band there is."""
    out_dir = first
    start = events(out_dir, "start")[0]
    losses = {str(e["iter"]): [e["val_loss"] + 0.01 * i for i in (-1, 0, 1)] for e in events(out_dir, "eval")}
    experiment = loss_band.experiment(start["settings"], start["val_sha256"], start["train_tokens"])
    monkeypatch.setattr(loss_band, "FOLDER", tmp_path)
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({"experiment": experiment, "val_losses": losses, "deviations": 3.0}))
    return path


def verdict(chars: Path, out_dir: Path, capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    """What a run prints of its curve: a line, or nothing."""
    capsys.readouterr()
    main(tiny(chars, out_dir, **CONFIG | settings))
    lines = re.findall(r"^(?:as usual|unusual): .*$", capsys.readouterr().out, re.M)
    assert len(lines) < 2
    return "".join(lines)


@pytest.mark.slow
def test_end_of_a_run_prints_the_interval_that_decides(band, chars, tmp_path, capsys, monkeypatch):
    split = {"batch_size": 2, "gradient_accumulation_steps": 2, "eval_iters": 4}
    line = verdict(chars, tmp_path / "out", capsys, **split)
    low, high = re.findall(r"\d\.\d{4}", line)[1:]
    losses = json.loads(band.read_text())["val_losses"]["20"]
    assert line.startswith("as usual: ")
    assert float(low) < min(losses) < max(losses) < float(high)
    rate = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", lambda c, step: 10 * rate(c, step))  # a defect
    assert verdict(chars, tmp_path / "defect", capsys).startswith("unusual: ")


def test_run_with_other_settings_belongs_to_no_band(band, chars):
    first = json.loads(band.read_text())["experiment"]
    data = (first["val_sha256"], first["train_tokens"])
    assert loss_band.band_of(tiny(chars, Path("out"), **CONFIG), *data)
    for other in ({"learning_rate": 3e-3}, {"eval_iters": 4}, {"n_head": 1}, {"batch_size": 8}):
        assert loss_band.band_of(tiny(chars, Path("out"), **CONFIG | other), *data) is None


def test_verdict_names_the_first_step_outside_of_the_band():
    band = Band({0: [4.1, 4.1], 10: [3.0, 3.1], 20: [2.0, 2.1]}, 2.0)
    assert band.limits(0) == pytest.approx((4.1 - loss_band.LEAST, 4.1 + loss_band.LEAST))
    assert band.limits(20) == pytest.approx((2.05 - 0.1414, 2.05 + 0.1414), abs=1e-4)
    assert band.verdict({0: 4.1, 10: 3.05, 15: 9.9, 20: 2.09}).startswith("as usual: val loss 2.0900")
    assert "at step 10" in band.verdict({0: 4.1, 10: 2.5, 20: 1.5})
    assert band.verdict({0: 4.1, 20: float("nan")}).startswith("unusual")
    assert band.verdict({5: 1.0}) == ""


@pytest.mark.parametrize("path", BANDS, ids=lambda path: path.stem)
def test_kept_bands_are_those_of_the_shipped_configs(path):
    record = json.loads(path.read_text())
    settings = read_settings(TrainConfig, [str(ROOT / "config" / f"{path.stem}.py")])
    data = (record["experiment"]["val_sha256"], record["experiment"]["train_tokens"])
    remedy = f"the config has changed: make {path.name} again from eight runs (docs/comparing-runs.md)"
    assert loss_band.DEFAULTS | record["experiment"] == loss_band.experiment(settings, *data), remedy
    assert len(record["seeds"]) >= 8
