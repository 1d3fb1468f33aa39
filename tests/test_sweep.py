"""bench/sweep.py: its grid, its arithmetic, and cells that fail; test_readme.py sweeps real runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY, assert_one_line, assert_refused, flags, tiny

from bench import sweep, timing
from deskgpt.system.errors import ConfigError
from train import TrainConfig

SMALL = {k: v for k, v in TINY.items() if k not in ("max_iters", "eval_interval", "warmup_iters")}
START = {"flops_per_token": 1e6, "peak_flops": 1e12, "peak_source": "measured float32 matmul", "device": "a CPU"}
START |= {"dtype": "float32", "compiled": False, "tokens_per_step": 1000, "versions": {}, "git_commit": "abc"}


def cell(rounds: list[list[float]], memory: int = 10**9, **settings: Any) -> sweep.Cell:
    """A measured cell: ms of each step, by round."""
    x = timing.Contestant("", [], Path(), rounds, [2.0] * len(rounds), data_waits=[0.01], logged_bytes=[memory])
    x.start = START | {"compiled": settings.get("compile", False)}
    return sweep.Cell({"batch_size": 8, "gradient_accumulation_steps": 1} | settings, x)


def cell_of(code: str, **settings: Any) -> sweep.Cell:
    """A cell whose run is this code, in a process of its own."""
    return sweep.Cell(settings, timing.Contestant(sweep.cell_name(settings), [sys.executable, "-c", code], ROOT))


def settings_of(x: timing.Contestant) -> dict[str, str]:
    return dict(a[2:].split("=", 1) for a in x.command if a.startswith("--"))


# ---- grid ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "sizes"),
    [(12, 40, [1, 3, 6, 12, 24, 48, 96, 480]), (64, 1, [1, 2, 4, 8, 16, 32, 64]), (1, 1, [1]), (5, 7, [1, 5, 35])],
)
def test_micro_batches_around_the_config_divide_the_step(batch_size, accumulation, sizes):
    assert sweep.default_batches(batch_size, accumulation) == sizes


def test_cells_are_the_product_and_keep_the_tokens_of_a_step(tmp_path):
    c = tiny(tmp_path, tmp_path, batch_size=6, gradient_accumulation_steps=2)
    axes = sweep.read_grid(["batch_size=2,4", "n_embd=16,32", "block_size=16,8"], c)
    assert axes == {"batch_size": [2, 4], "n_embd": [16, 32], "block_size": [16, 8]}
    cells = sweep.make_cells(c, ["--n_layer=1"], axes, tmp_path)
    assert [x.settings["gradient_accumulation_steps"] for x in cells] == [6, 12, 6, 12, 3, 6, 3, 6]
    for x in cells:
        assert {k: str(v) for k, v in x.settings.items()}.items() <= settings_of(x.x).items()
    assert len({settings_of(x.x)["out_dir"] for x in cells}) == 8
    assert len({x.x.env["TORCHINDUCTOR_CACHE_DIR"] for x in cells}) == 8
    for x in sweep.make_cells(c, [], sweep.read_grid(["compile=True,False"], c), tmp_path):
        assert (x.settings["batch_size"], x.settings["gradient_accumulation_steps"]) == (6, 2)


@pytest.mark.parametrize(
    ("grid", "named"),
    [
        (["batch_size"], ["batch_size", "batch_size=4,8,16"]),
        (["batchsize=4"], ["batchsize", "batch_size"]),
        (["batch_size=4,x"], ["batch_size", "x", "int"]),
        (["batch_size=4,5"], ["batch_size=5", "128 tokens"]),
        (["batch_size=0"], ["batch_size=0"]),
        (["block_size=24"], ["block_size=24", "128 tokens"]),
        (["n_embd=15"], ["n_embd=15", "n_head=2"]),
        (["max_iters=5"], ["max_iters=5", "leave it out"]),
        (["gradient_accumulation_steps=2"], ["gradient_accumulation_steps=2", "leave it out"]),
        (["compile=True", "compile=False"], ["compile=False", "leave it out"]),
    ],
)
def test_bad_grids_are_one_line_errors(grid, named, tmp_path):
    c = tiny(tmp_path, tmp_path, batch_size=4, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError) as e:
        sweep.make_cells(c, [], sweep.read_grid(grid, c), tmp_path)
    assert_one_line(str(e.value), *named)


def test_bad_options_are_refused_on_the_command_line(script):
    for args, named in ((["--seconds=-2"], ["--seconds -2"]), (["--save=a/b"], ["--save", "a/b", "letters"])):
        assert_refused(script("bench/sweep.py", *flags(**SMALL), *args), *named)


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

LINES = "for i in range(9): print(f'iter {i}: loss 4.2, time 10.00ms', flush=True)\n"


def test_out_of_memory_is_a_cell_and_the_others_go_on(capsys):
    cells = [cell_of(LINES, batch_size=1), cell_of("print('error: out of memory')", batch_size=4)]
    sweep.measure(cells, 3, 0.0)
    assert [(x.status, len(x.x.rounds_ms)) for x in cells] == [("", 3), ("out of memory", 0)]
    assert capsys.readouterr().out.count("batch_size=4: out of memory") == 1  # it is not tried again
    row = sweep.figures(cells[1])
    table = sweep.as_markdown([sweep.figures(cell([[10.0]])), row | {"settings": {"a": 4, "b": 1}}])
    assert re.search(r"^\| 4 \| 1 \| out of memory \|( +\|)+$", table, re.M)


@pytest.mark.slow
def test_no_figures_at_all_is_an_error_that_says_why(script):
    done = script("bench/sweep.py", *flags(**SMALL), "--grid=batch_size=4", "--device=cuda:99", "--rounds=1")
    assert done.code
    assert_one_line(done.err, "no cell has figures", "batch_size=4", "cuda:99")


def test_ctrl_c_keeps_what_is_measured():
    cells = [cell_of(LINES, batch_size=1)]
    sweep.measure(cells, 1, 0.0)
    cells.append(cell_of("import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)", batch_size=2))
    sweep.measure(cells, 9, 0.0)
    assert [x.status for x in cells] == ["", "interrupted"]
    assert 1 <= len(cells[0].x.rounds_ms) <= 2
