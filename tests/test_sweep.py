"""bench/sweep.py: its grid, its arithmetic, cells that fail, and a sweep of real runs; what is faster is not judged."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, assert_one_line, flags, shell, tiny

from bench import sweep, timing
from deskgpt.machine import hardware
from deskgpt.machine.errors import ConfigError
from train import TrainConfig

SMALL = {k: v for k, v in TINY.items() if k not in ("max_iters", "eval_interval", "warmup_iters")}
START = {"flops_per_token": 1e6, "peak_flops": 1e12, "peak_source": "measured float32 matmul", "device": "a CPU"}
START |= {"dtype": "float32", "compiled": False, "tokens_per_step": 1000, "versions": {}, "git_commit": "abc"}


def cell(rounds: list[list[float]], memory: int = 10**9, **settings: Any) -> sweep.Cell:
    """A measured cell: ms of each step, by round."""
    x = timing.Contestant("", [], Path(), rounds, [2.0] * len(rounds), data_waits=[0.01], logged_bytes=[memory])
    x.start = START | {"compiled": settings.get("compile", False)}
    return sweep.Cell({"batch_size": 8, "gradient_accumulation_steps": 1} | settings, TrainConfig(), x)


@pytest.fixture
def sweep_with(tmp_path, monkeypatch, capsys):
    """Runs the script on a step of 64 tokens in this process, with another function for timing.run."""

    def run_with(run, *args):
        monkeypatch.setattr(timing, "run", run)
        command = ["sweep.py", *flags(**SMALL), "--vocab_size=65", f"--out={tmp_path / 'out'}", *args]
        monkeypatch.setattr(sys, "argv", command)
        sweep.main()
        return capsys.readouterr().out, json.loads((tmp_path / "out" / "sweep.json").read_text())

    return run_with


def settings_of(x: timing.Contestant) -> dict[str, str]:
    return dict(a[2:].split("=", 1) for a in x.command if a.startswith("--"))


def fake_run(x: timing.Contestant, steps: int, seconds: float = 0.0) -> int:
    """Every step takes 10 ms; memory grows with the micro-batch; 4 sequences are too many."""
    batch = int(settings_of(x)["batch_size"])
    if batch == 4:
        raise timing.Failed("it ended", "out of memory")
    x.rounds_ms.append([10.0, 10.0])
    x.first_s.append(0.5)
    x.data_waits.append(0.0)
    x.logged_bytes.append(batch * 10**9)
    x.start = START | {"tokens_per_step": batch * int(settings_of(x)["gradient_accumulation_steps"]) * 16}
    return 3


# ---- grid ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "sizes"),
    [
        (12, 40, [1, 3, 6, 12, 24, 48, 96, 480]),
        (12, 1, [1, 3, 6, 12]),
        (64, 1, [1, 2, 4, 8, 16, 32, 64]),
        (32, 16, [2, 4, 8, 16, 32, 64, 128, 256]),
        (1, 1, [1]),
        (5, 7, [1, 5, 35]),
    ],
)
def test_micro_batches_around_the_config_divide_the_step(batch_size, accumulation, sizes):
    assert sweep.default_batches(batch_size, accumulation) == sizes


def test_cells_are_the_product_and_keep_the_tokens_of_a_step(tmp_path):
    c = tiny(tmp_path, tmp_path, batch_size=6, gradient_accumulation_steps=2)
    axes = sweep.read_grid(["batch_size=2,4", "n_embd=16,32", "block_size=16,8"], c)
    assert axes == {"batch_size": [2, 4], "n_embd": [16, 32], "block_size": [16, 8]}
    cells = sweep.make_cells(c, ["--n_layer=1"], axes, tmp_path, None)
    assert len(cells) == 8
    for x in cells:
        assert x.c.batch_size * x.c.gradient_accumulation_steps * x.c.block_size == 6 * 2 * 16
        assert {k: str(v) for k, v in x.settings.items()}.items() <= settings_of(x.x).items()
    assert [x.settings["gradient_accumulation_steps"] for x in cells] == [6, 12, 6, 12, 3, 6, 3, 6]
    assert len({settings_of(x.x)["out_dir"] for x in cells}) == 8
    assert len({x.x.env["TORCHINDUCTOR_CACHE_DIR"] for x in cells}) == 8


def test_other_settings_leave_the_batch_alone_and_accumulation_may_lead(tmp_path):
    c = tiny(tmp_path, tmp_path, batch_size=6, gradient_accumulation_steps=2)
    for grid, batches in (("compile=True,False", [6, 6]), ("gradient_accumulation_steps=1,3", [12, 4])):
        cells = sweep.make_cells(c, [], sweep.read_grid([grid], c), tmp_path, None)
        assert [x.settings["batch_size"] for x in cells] == batches
        assert all(x.c.batch_size * x.c.gradient_accumulation_steps == 12 for x in cells)


@pytest.mark.parametrize(
    ("grid", "named"),
    [
        (["batch_size"], ["batch_size", "batch_size=4,8,16"]),
        (["batchsize=4"], ["batchsize", "batch_size"]),
        (["batch_size=4,x"], ["batch_size", "x", "int"]),
        (["batch_size=4,5"], ["batch_size=5", "8 sequences", "128 tokens", "try 4"]),
        (["batch_size=0"], ["batch_size=0", "try 1"]),
        (["block_size=24"], ["block_size=24", "128 tokens"]),
        (["n_embd=15"], ["n_embd=15", "n_head=2"]),
        (["max_iters=5"], ["max_iters=5", "leave it out"]),
        (["batch_size=4", "gradient_accumulation_steps=2"], ["one --grid", "gradient_accumulation_steps"]),
        (["compile=True", "compile=False"], ["one --grid", "compile"]),
    ],
)
def test_bad_grids_are_one_line_errors(grid, named, tmp_path):
    c = tiny(tmp_path, tmp_path, batch_size=4, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError) as e:
        sweep.make_cells(c, [], sweep.read_grid(grid, c), tmp_path, None)
    assert_one_line(str(e.value), *named)


def test_bad_options_are_refused_on_the_command_line(script):
    for args, code, named in (
        (["--memory_gb", "12", "--device=cpu"], 1, ["--memory_gb 12", "cpu", "leave it out"]),
        (["--steps=2"], 2, ["--steps 2", "3 steps"]),
        (["--save=a/b"], 2, ["--save", "a/b", "letters"]),
    ):
        done = script("bench/sweep.py", *flags(**SMALL), *args)
        assert done.code == code
        assert_one_line(done.err, *named)


# ---- arithmetic ----------------------------------------------------------------------------------------------


def test_figures_of_a_cell_are_these():
    measured = cell([[10.0, 12.0, 14.0], [20.0, 22.0, 24.0]])
    row = sweep.figures(measured)
    assert (row["ms"], row["p10"], row["p90"]) == (17.0, 10.0, 24.0)
    assert row["tokens_per_s"] == pytest.approx(1000 / 0.017)
    assert (row["least"], row["most"]) == pytest.approx((1000 / 0.022, 1000 / 0.012))
    assert row["mfu"] == pytest.approx(1000 / 0.017 * 1e6 / 1e12)
    assert (row["memory_gb"], row["data_wait"]) == (1.0, 0.01)


@pytest.mark.parametrize(
    ("cells", "best"),  # each with its micro-batch, ms per step and GB
    [
        ([(4, 20.0, 1), (8, 10.0, 2)], 8),
        ([(1, 30.0, 1), (8, 10.2, 2), (16, 10.0, 5)], 8),  # 16 is not clearly faster and takes more memory
        ([(8, 10.5, 1), (16, 10.0, 2)], 16),
        ([(8, 10.0, 2), (16, 10.1, 2)], 8),
        ([(8, 10.0, 1)], 8),
    ],
)
def test_least_memory_decides_between_cells_of_which_none_is_clearly_faster(cells, best):
    rows = [sweep.figures(cell([[ms]], gb * 10**9, batch_size=n)) for n, ms, gb in cells]
    row, why = sweep.recommend(rows)
    assert row["settings"]["batch_size"] == best
    assert ("less memory" in why) == (why != "the fastest")


def test_different_models_do_not_compete():
    rows = [sweep.figures(cell([[ms]] * 2, n_embd=n)) for ms, n in ((10.0, 16), (20.0, 32))]
    c = TrainConfig(batch_size=16, eval_iters=10)
    given = ["config/a.py", "--batch_size=16", "--n_layer=3"]
    commands = dict(sweep.recommendations(rows, given, c))
    line = "python train.py config/a.py --n_layer=3 --batch_size=8 --gradient_accumulation_steps=1 --n_embd={} {}"
    assert list(commands) == [line.format(n, "--eval_iters=20") for n in (16, 32)]
    assert next(iter(commands.values())).startswith("n_embd=16: ")


# ---- runs ----------------------------------------------------------------------------------------------------


def test_out_of_memory_is_a_cell_and_the_others_go_on(sweep_with):
    ran = []

    def run(x, steps, seconds=0.0):
        ran.append(x.name)
        return fake_run(x, steps, seconds)

    out, result = sweep_with(run, "--rounds=3")
    assert sorted(ran) == ["batch_size=1"] * 3 + ["batch_size=2"] * 3 + ["batch_size=4"]  # which failed once
    assert "about 0.0s more, if the others take as long as this one" in out
    assert re.search(r"^\| 4 \| 1 \| +\| +\| +\| out of memory \|", out, re.M)
    assert [r["status"] for r in result["rows"]] == ["", "", "out of memory"]
    assert [r.get("tokens_per_s") for r in result["rows"]] == [6400.0, 6400.0, None]
    [best] = result["recommended"]
    assert "--batch_size=1 --gradient_accumulation_steps=4" in best["command"]
    assert best["command"] in out


def test_no_figures_at_all_is_an_error_that_says_why(sweep_with):
    with pytest.raises(ValueError, match="no cell has figures; batch_size=4: out of memory"):
        sweep_with(fake_run, "--grid=batch_size=4")


@pytest.mark.parametrize(("stop", "rounds"), [(4, [1, 2]), (2, [0, 1])])  # in the second round, and in the first
def test_ctrl_c_keeps_what_is_measured(stop, rounds, sweep_with):
    ran = []

    def run(x, steps, seconds=0.0):
        ran.append(x)
        if len(ran) == stop:
            raise KeyboardInterrupt
        return fake_run(x, steps, seconds)

    _, result = sweep_with(run, "--grid=batch_size=1,2", "--rounds=3")
    assert sorted(len(r.get("rounds_ms", [])) for r in result["rows"]) == rounds
    assert [r["status"] for r in result["rows"]].count("interrupted") == rounds.count(0)


def test_a_cell_predicted_beyond_the_memory_of_the_machine_is_not_started(sweep_with, monkeypatch):
    small, large = (sweep.predicted_bytes(tiny(Path(), Path(), n_embd=n, batch_size=2), 65) for n in (16, 64))
    assert small < 0.8 * large
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: round(large))  # 90% of it may be used
    out, result = sweep_with(fake_run, "--rounds=1", "--grid=n_embd=16,64", "--batch_size=2")
    assert [r["status"][:9] for r in result["rows"]] == ["", "predicted"]
    assert "batch_size=2, n_embd=64: predicted 0.0 GiB of 0.0: not run" in out


@pytest.mark.slow
def test_sweep_of_real_runs_writes_table_heat_map_and_json(tmp_path):
    own = ["--grid=batch_size=2,4", "--steps=8", "--rounds=1", "--vocab_size=65", f"--out={tmp_path / 'sweep'}"]
    done = shell("python", "bench/sweep.py", *flags(**SMALL), "--auto_batch=True", *own)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    figures = r"\| float32 \| no \| 64 \| [\d.]+ \([\d.]+, [\d.]+\) \| [\d,]+ \([\d,]+ to [\d,]+\) \| [\d.]+% \| "
    assert re.match(r"\| 2 \| 2 " + figures + r"0\.\d+ GB \| [\d.]+% \|$", rows[1])
    assert re.match(r"\| 4 \| 1 " + figures + r"0\.\d+ GB \| [\d.]+% \|$", rows[2])
    last = done.stdout.splitlines()[-3]
    words = shlex.split(last)
    assert words[:2] == ["python", "train.py"]
    assert {"--n_embd=16", "--auto_batch=True"} <= set(words)
    assert sum(w.startswith("--batch_size=") for w in words) == 1
    result = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert result["recommended"][0]["command"] == last
    assert [[len(times) for times in row["rounds_ms"]] for row in result["rows"]] == [[7], [7]]
    assert result["commit"]
    assert (tmp_path / "sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "![](sweep.png)" in (tmp_path / "sweep" / "sweep.md").read_text()
