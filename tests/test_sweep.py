"""bench/sweep.py: its grid, its arithmetic, cells that fail, and a sweep of real runs; what is faster is not judged."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, flags, shell, tiny

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
    ("grid", "reason"),
    [
        (["batch_size"], "--grid batch_size: write it like --grid batch_size=4,8,16"),
        (["batchsize=4"], "--batchsize is not a setting; did you mean batch_size?"),
        (["batch_size=4,x"], "--batch_size='x' is not int"),
        (["batch_size=4,5"], "batch_size=5 does not divide the 8 sequences of a step, 128 tokens; try 4"),
        (["batch_size=0"], "batch_size=0 does not divide the 8 sequences of a step, 128 tokens; try 1"),
        (["block_size=24"], "--grid block_size=24 does not divide the 128 tokens of a step"),
        (["n_embd=15"], "n_embd=15 is not a multiple of n_head=2"),
        (["max_iters=5"], "--grid max_iters=5: the sweep sets max_iters itself; leave it out"),
        (["batch_size=4", "gradient_accumulation_steps=2"], "give one --grid for gradient_accumulation_steps"),
        (["compile=True", "compile=False"], "give one --grid for compile or what follows from it"),
    ],
)
def test_bad_grids_are_one_line_errors(grid, reason, tmp_path):
    c = tiny(tmp_path, tmp_path, batch_size=4, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError) as e:
        sweep.make_cells(c, [], sweep.read_grid(grid, c), tmp_path, None)
    assert reason in str(e.value)
    assert "\n" not in str(e.value)


def test_memory_cap_and_many_cells_are_refused_on_the_command_line(script):
    for args, code, reason in (
        (["--memory_gb", "12", "--device=cpu"], 1, "--memory_gb 12 caps a CUDA card, the device is cpu; leave it out"),
        (["--grid=n_layer=1,2,3", "--grid=seed=1,2", "--max_cells=5"], 2, "--grid makes 6 cells; give fewer values"),
        (["--steps=2"], 2, "at least one round and 3 steps"),
        (["--save=a/b"], 1, "--save 'a/b': a name of letters"),
    ):
        done = script("bench/sweep.py", *flags(**SMALL), *args)
        assert (done.code, done.err.count("\n")) == (code, 1), done.err
        assert reason in done.err


# ---- arithmetic ----------------------------------------------------------------------------------------------


def test_figures_of_a_cell_are_these():
    plain = cell([[10.0, 12.0, 14.0], [20.0, 22.0, 24.0]], compile=False)
    fast = cell([[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]], compile=True)
    plain.x.first_s, fast.x.first_s = [1.017, 3.017], [9.005, 2.005]
    fast.x.start["peak_flops"] = 2e12  # the better of two measurements is the machine's
    a, b = sweep.figures([plain, fast])
    assert (a["ms"], a["p10"], a["p90"]) == (17.0, 10.0, 24.0)
    assert a["tokens_per_s"] == pytest.approx(1000 / 0.017)
    assert a["by_round"] == pytest.approx([1000 / 0.012, 1000 / 0.022])
    assert a["mfu"] == pytest.approx(1000 / 0.017 * 1e6 / 2e12)
    assert (a["memory_gb"], a["data_wait"]) == (1.0, 0.01)
    assert (b["cold_s"], b["warm_s"]) == (pytest.approx(9.0), pytest.approx(2.0))
    assert b["pays_after"] == 667  # 9 s, 1 s of them not compiling, at 12 ms less per step
    assert "pays_after" not in a
    assert "| 9.0 s | 2.0 s | 667 steps |" in sweep.as_markdown([a, b])


def test_compiling_never_pays_where_steps_are_no_faster():
    assert sweep.pays_after(9.0, plain_ms=17.0, compiled_ms=5.0) == 750
    assert sweep.pays_after(1.0, plain_ms=10.0, compiled_ms=7.0) == 334
    assert sweep.pays_after(9.0, plain_ms=5.0, compiled_ms=5.0) is None
    rows = sweep.figures([cell([[5.0]], compile=False), cell([[6.0]], compile=True)])
    assert sweep.as_markdown(rows).endswith("| never |")


def test_fastest_is_recommended_where_its_lead_is_beyond_the_noise():
    rows = sweep.figures([cell([[20.0], [22.0], [18.0]], batch_size=4), cell([[10.0], [11.0], [9.0]])])
    row, why = sweep.recommend(rows)
    assert row["settings"]["batch_size"] == 8
    assert why == "batch_size=8 is the fastest, 100.0% ahead of batch_size=4, beyond the noise"


def test_less_memory_decides_between_cells_that_cannot_be_told_apart():
    slow = cell([[30.0], [31.0], [29.0]], 10**8, batch_size=1)
    less = cell([[10.4], [9.9], [10.2]], 2 * 10**9)
    more = cell([[10.0], [10.1], [10.0]], 5 * 10**9, batch_size=16)
    row, why = sweep.recommend(sweep.figures([slow, less, more]))
    assert row["settings"]["batch_size"] == 8
    assert why == "batch_size=16 and batch_size=8 cannot be told apart; batch_size=8 takes 3.00 GB less"


def test_a_wide_gap_is_not_a_tie_however_noisy():
    rows = sweep.figures([cell([[10.0], [30.0], [9.0]], 10**9), cell([[9.0], [7.0], [12.0]], 2 * 10**9, batch_size=16)])
    row, why = sweep.recommend(rows)
    assert row["settings"]["batch_size"] == 16
    assert why.endswith("11.1% ahead of batch_size=8; these rounds vary too much to be sure")
    once, why = sweep.recommend(sweep.figures([cell([[10.0]]), cell([[9.9]], batch_size=16)]))
    assert once["settings"]["batch_size"] == 16
    assert why.endswith("one round does not tell that from noise")


def test_different_models_do_not_compete():
    rows = sweep.figures([cell([[10.0]] * 2, n_embd=16), cell([[20.0]] * 2, n_embd=32)])
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
    assert best["why"].endswith("cannot be told apart; batch_size=1 takes 1.00 GB less")
    assert best["command"] in out


def test_no_figures_at_all_is_an_error_that_says_why(sweep_with):
    with pytest.raises(ValueError, match="no cell has figures; batch_size=4: out of memory"):
        sweep_with(fake_run, "--grid=batch_size=4")


@pytest.mark.parametrize(("stop", "rounds"), [(4, [1, 1]), (2, [0, 1])])  # in the second round, and in the first
def test_ctrl_c_keeps_the_rounds_that_are_whole(stop, rounds, sweep_with):
    ran = []

    def run(x, steps, seconds=0.0):
        ran.append(x)
        if len(ran) == stop:
            raise KeyboardInterrupt
        return fake_run(x, steps, seconds)

    _, result = sweep_with(run, "--grid=batch_size=1,2", "--rounds=3")
    assert sorted(len(x["rounds_ms"]) for x in result["cells"]) == rounds
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
    own = ["--grid=batch_size=2,4", "--steps=8", "--rounds=2", "--vocab_size=65", f"--out={tmp_path / 'sweep'}"]
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
    assert [[len(r) for r in x["rounds_ms"]] for x in result["cells"]] == [[7, 7], [7, 7]]
    assert "settings" not in result["cells"][0]["start"]
    assert result["commit"]
    assert (tmp_path / "sweep" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "![](sweep.png)" in (tmp_path / "sweep" / "sweep.md").read_text()
