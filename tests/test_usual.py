"""Is my curve normal: bands of val losses, made from runs with other seeds, at the end of a run and on its page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, TINY, assert_one_line, flags

import train
from bench.analysis import expected, page
from bench.analysis.logs import read_run
from bench.analysis.runs import Run, complete
from bench.asking.band import FALSE_ALARMS, deviations, write_band
from configurator import read_settings
from data.text.prepare import prepare
from deskgpt.run import loss_band
from deskgpt.run.loss_band import Band
from train import TrainConfig

BANDS = [path for path in (ROOT / "config/loss_bands").glob("*.json") if path.name != "published.json"]
CONFIG = TINY | {"learning_rate": 1e-3, "max_iters": 40, "lr_decay_iters": 40, "eval_interval": 10, "eval_iters": 8}
LINE = re.compile(r"^(?:as usual|unusual): .*$", re.MULTILINE)


@pytest.fixture(scope="module")
def config(chars, tmp_path_factory) -> Path:
    """The config of a band."""
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in (CONFIG | {"dataset": str(chars)}).items()))
    return path


@pytest.fixture(scope="module")
def logs(config, tmp_path_factory) -> list[Path]:
    """Eight runs of it."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(8):
        go(config, folder / str(seed), seed=seed)
    return [folder / str(seed) for seed in range(8)]


@pytest.fixture
def band(config, logs, tmp_path, monkeypatch) -> Path:
    """Its band, the only one there is."""
    monkeypatch.setattr(loss_band, "FOLDER", tmp_path / "usual")
    return write_band(str(config), logs)


def go(config: Path, out_dir: Path, **settings: Any) -> None:
    train.main(TrainConfig(**read_settings(TrainConfig, [str(config), *flags(out_dir=out_dir, **settings)])))


@pytest.fixture
def said(config, tmp_path, capsys) -> Callable[..., str]:
    """What a run of the config says of its curve: a line, or nothing."""

    def run(out_dir: str = "out", **settings: Any) -> str:
        capsys.readouterr()
        go(config, tmp_path / out_dir, **settings)
        lines = LINE.findall(capsys.readouterr().out)
        assert len(lines) < 2
        return "".join(lines)

    return run


def three_times(monkeypatch) -> None:
    """A defect: the learning rate is not the one that the settings say."""
    rate = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", lambda c, step: 3 * rate(c, step))


def test_end_of_a_normal_run_says_as_usual(band, said):
    runs = json.loads(band.read_text())["val_losses"]["40"]
    line = f"as usual: 8 runs end at {min(runs):.3f} to {max(runs):.3f}"
    assert said(seed=99) == line
    assert said("split", seed=98, batch_size=2, gradient_accumulation_steps=2, eval_iters=16) == line


def test_unusual_run_is_told_with_the_first_step_at_which_it_left_the_band(band, said, monkeypatch):
    three_times(monkeypatch)
    line = said(seed=99)
    assert line.startswith("unusual: ")
    found = re.search(r"first (higher|lower) than usual at step (\d+) \((\S+), usual (\S+) to (\S+)\)$", line)
    assert found
    side, step, loss, low, high = found[1], int(found[2]), *map(float, found.groups()[2:])
    assert (loss > high, loss < low) == (side == "higher", side == "lower")
    known = json.loads(band.read_text())
    record = Band({int(k): v for k, v in known["val_losses"].items()}, known["deviations"])
    val = {e["iter"]: e["val_loss"] for e in read_run(str(band.parents[1] / "out")).val}
    outside = [k for k in record.losses if not record.limits(k)[0] <= val[k] <= record.limits(k)[1]]
    assert step == outside[0]


def test_resumed_run_is_judged_with_its_evaluations_from_before(band, said, monkeypatch):
    with monkeypatch.context() as m:
        three_times(m)
        assert said(seed=99, max_iters=20, always_save_checkpoint=True) == ""  # no run of the band's length
    assert re.search(r"than usual at step (10|20) ", said(init_from="resume", seed=99))


def test_verdict_names_the_side_and_the_last_step_that_is_known():
    band = Band({0: [4.1, 4.1], 10: [3.0, 3.1], 20: [2.0, 2.1]}, 2.0)
    assert band.limits(0) == pytest.approx((4.1 - loss_band.LEAST, 4.1 + loss_band.LEAST))
    assert band.limits(20) == pytest.approx((2.05 - 0.1414, 2.05 + 0.1414), abs=1e-4)
    assert band.verdict({0: 4.1, 10: 3.05, 15: 9.9, 20: 2.09}) == "as usual: 2 runs end at 2.000 to 2.100"
    assert band.verdict({0: 4.1, 10: 3.05}) == "as usual: 2 runs at step 10 have 3.000 to 3.100"
    lower = band.verdict({0: 4.1, 10: 2.5, 20: 1.5})
    assert lower.startswith("unusual: val loss 1.5000 at step 20, 2 runs end at 2.000 to 2.100; ")
    assert lower.endswith("first lower than usual at step 10 (2.5000, usual 2.909 to 3.191)")
    assert "higher than usual at step 20 (nan, " in band.verdict({0: 4.1, 20: float("nan")})
    assert band.verdict({5: 1.0}) == ""


@pytest.mark.parametrize(
    "settings",
    [{"learning_rate": 3e-3}, {"eval_iters": 4}, {"n_head": 1}, {"batch_size": 8}, {"optimizer": "muon"}],
    ids=str,
)
def test_run_with_other_settings_belongs_to_no_band(band, said, settings):
    assert said(**settings) == ""


def test_run_on_other_data_belongs_to_no_band(band, said, text, tmp_path):
    prepare(text[:-1000], tmp_path / "other", "char", "test text")
    assert said(dataset=tmp_path / "other") == ""


def damages() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """By name, what stands in a band's file instead of a record."""

    def losses(record: dict[str, Any], value: Any) -> dict[str, Any]:
        return record | {"val_losses": record["val_losses"] | {"40": value}}

    return {
        "empty": lambda record: b"",
        "half": lambda record: json.dumps(record).encode()[:-50],
        "deep": lambda record: b"[" * 100_000,
        "not text": lambda record: b"\xff\xfe{}",
        "list": lambda record: [record],
        "without losses": lambda record: {k: v for k, v in record.items() if k != "val_losses"},
        "no losses": lambda record: record | {"val_losses": {}},
        "nan": lambda record: losses(record, [float("nan")] * 8),
        "huge": lambda record: losses(record, [1e308] * 8),
        "text": lambda record: losses(record, ["1.0"] * 8),
        "one run": lambda record: losses(record, [1.0]),
        "no step": lambda record: record | {"val_losses": {"-1": [1.0, 2.0]}},
        "no width": lambda record: record | {"deviations": "4"},
        "experiment": lambda record: record | {"experiment": 4},
    }


@pytest.mark.parametrize("name", damages())
def test_damaged_band_is_as_none(band, config, logs, name):
    run = read_run(str(logs[0]))
    assert expected.verdict(run)
    damaged = damages()[name](json.loads(band.read_text()))
    band.write_bytes(damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode())
    assert expected.verdict(run) == []
    band.unlink()
    assert expected.verdict(run) == []
    band.parent.rmdir()
    assert expected.verdict(run) == expected.published() == []


def test_run_whose_settings_are_not_known_belongs_to_no_band(band):
    assert loss_band.band_of({}, None, None) is None
    assert loss_band.band_of({"init_from": "scratch"} | dict.fromkeys(loss_band.NAMES), "x", 1) is None
    absurd = dict.fromkeys([*loss_band.NAMES, "batch_size", "gradient_accumulation_steps", "eval_tokens"], 10**400)
    assert loss_band.band_of(absurd | {"init_from": "scratch", "block_size": 3}, "x", 1) is None


def test_setting_of_the_model_that_came_after_a_band_was_at_its_default(band, logs, monkeypatch):
    run = read_run(str(logs[0]))
    monkeypatch.setattr(loss_band, "NAMES", [*loss_band.NAMES, "embd_scale"])
    monkeypatch.setattr(loss_band, "DEFAULTS", loss_band.DEFAULTS | {"embd_scale": 1.0})
    for value, says in ((1.0, True), (2.0, False)):
        run.settings["embd_scale"] = value
        assert bool(expected.verdict(run)) == says


# ---- the page ------------------------------------------------------------------------------------------------


def beside(runs: list[Run]) -> list[Any]:
    return [trace for trace in page.make_charts(runs)["loss"].figure.data if trace.meta["run"] is None]


def test_page_has_the_band_on_each_axis_once_and_the_verdict(band, logs, tmp_path, script):
    run = read_run(str(logs[0]))
    complete(run)
    (trace,) = beside([run, run])
    record = loss_band.read_record(band)
    assert record
    limits = [Band({40: record["val_losses"]["40"]}, record["deviations"]).limits(40)]
    assert [*trace.meta["x"]["steps"]] == [0, 10, 20, 30, 40, 40, 30, 20, 10, 0]
    assert [*trace.meta["x"]["tokens"]] == [64 * step for step in trace.meta["x"]["steps"]]
    assert [(trace.y[5], trace.y[4])] == [pytest.approx(limit) for limit in limits]
    assert trace.fill == "toself"
    assert not np.isfinite(trace.meta["x"]["time"]).any()  # of two runs
    (alone,) = beside([run])
    assert alone.meta["x"]["time"][4] == pytest.approx(run.val[-1]["train_s"], rel=1e-5)
    notes = page.make_charts([run])["loss"].figure.layout.meta["notes"]
    assert "of one more run is expected, after 8 others" in notes["time"]
    html = tmp_path / "report.html"
    assert script("bench/report.py", logs[0], "--samples", "0", "--html", html).code == 0
    assert "<li>as usual: 8 runs end at " in html.read_text()


def test_run_that_has_not_come_far_has_the_whole_band_ahead(band, logs):
    run = read_run(str(logs[0]))
    run.evals = run.evals[:2]
    complete(run)
    (trace,) = beside([run])
    assert max(trace.meta["x"]["steps"]) == 40
    assert max(trace.meta["x"]["tokens"]) == 640


def a_run(path: Path, val: dict[int, float]) -> Run:
    settings = read_settings(TrainConfig, [str(path)])
    evals = [{"iter": i, "train_loss": y, "val_loss": y, "val_se": None} for i, y in val.items()]
    return Run(path.stem, settings, evals=evals)


@pytest.mark.parametrize(
    ("name", "losses"),
    [
        ("train_shakespeare_char", [1.4697]),
        ("train_shakespeare_char_fast", [1.4697]),
        ("train_shakespeare_char_cpu", [1.88]),
        ("train_gpt2", [2.85]),
        ("train_fineweb_125m", [3.28]),
        ("train_fineweb_40m", [4.4593, 3.6567]),
        ("finetune_shakespeare", []),
    ],
)
def test_published_losses_stand_beside_the_runs_of_their_config_with_their_source(name, losses):
    run = a_run(ROOT / "config" / f"{name}.py", {0: 5.0, 10000: 3.0})
    traces = [trace for trace in beside([run]) if trace.fill is None]
    drawn = {round(float(y), 4) for trace in traces for y in trace.y}
    assert drawn >= {*losses}
    assert len(traces) == bool(losses)
    note = page.make_charts([run])["loss"].figure.layout.meta["notes"]["steps"]
    for trace in traces:
        assert re.search(r"github.com/|its log", trace.hovertemplate)
        assert re.search(r"https://github.com/|its log", note)
    assert beside([Run("elsewhere", run.settings | {"dataset": "novel"}, evals=run.evals)]) == []


def test_axis_reaches_down_to_what_stands_beside():
    fall = {0: 11.0} | {i: 4.0 - i / 1e4 for i in range(1000, 10001, 500)}
    run = a_run(ROOT / "config/train_gpt2.py", fall)
    low, _ = page.make_charts([run])["loss"].figure.layout.meta["limits"]
    assert low <= 2.85


# ---- making bands --------------------------------------------------------------------------------------------


def test_bands_are_refused_from_too_few_other_unfinished_or_repeated_runs(band, config, logs, tmp_path):
    with pytest.raises(ValueError, match="at least 8") as e:
        write_band(str(config), logs[:7])
    assert_one_line(e.value, config)
    with pytest.raises(ValueError, match="seeds") as e:
        write_band(str(config), [*logs, logs[0]])
    assert_one_line(e.value, config)
    for settings in ({"learning_rate": 2e-3}, {"max_iters": 30}):
        go(config, tmp_path / "other", seed=9, **settings)
        with pytest.raises(ValueError, match="settings") as e:
            write_band(str(config), [*logs, tmp_path / "other"])
        assert_one_line(e.value, tmp_path / "other")
    go(config, tmp_path / "sparse", seed=9, eval_interval=20)
    with pytest.raises(ValueError, match="evaluations") as e:
        write_band(str(config), [*logs, tmp_path / "sparse"])
    assert_one_line(e.value, tmp_path / "sparse")


def test_few_normal_runs_leave_a_band_however_their_losses_depend_on_each_other():
    draw = np.random.default_rng(0)
    width = deviations(8, 6)
    for shared in (0.0, 0.7, 1.0):  # of the variance of runs, the part that a run has at all steps
        common = draw.normal(size=(20_000, 9, 1)) * shared**0.5
        runs = common + draw.normal(size=(20_000, 9, 6)) * (1 - shared) ** 0.5
        eight = runs[:, :8]
        left = np.abs(runs[:, 8] - eight.mean(1)) > width * eight.std(1, ddof=1)
        assert left.any(1).mean() < FALSE_ALARMS + 0.005


def outside(band: Band, losses: dict[int, float]) -> bool:
    return band.verdict(losses).startswith("unusual")


@pytest.mark.parametrize("path", BANDS, ids=lambda path: path.stem)
def test_kept_bands_are_those_of_the_shipped_configs_and_hold_their_own_runs(path):
    record = loss_band.read_record(path)
    assert record, f"{path} is damaged"
    settings = read_settings(TrainConfig, [str(ROOT / "config" / f"{path.stem}.py")])
    data = (record["experiment"]["val_sha256"], record["experiment"]["train_tokens"])
    remedy = f"the config has changed: make {path.name} again from eight runs (docs/comparing-runs.md)"
    assert loss_band.DEFAULTS | record["experiment"] == loss_band.experiment(settings, *data), remedy
    losses = {int(step): runs for step, runs in record["val_losses"].items()}
    n = len(record["seeds"])
    assert n >= 8
    assert record["deviations"] == pytest.approx(deviations(n, len(losses)), abs=1e-4)
    left_out = 0
    for i in range(n):
        others = Band({step: runs[:i] + runs[i + 1 :] for step, runs in losses.items()}, deviations(n - 1, len(losses)))
        left_out += outside(others, {step: runs[i] for step, runs in losses.items()})
    assert left_out <= 1
