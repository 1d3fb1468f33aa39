"""compare.py: every column worked out by hand, and what its verdict may say."""

from __future__ import annotations

import json
import math
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import assert_one_line, flags
from logs import TIMES, log, nanogpt, rewrite

from bench import compare
from bench.analysis.arms import Arm, over_runs
from bench.analysis.learning import at, spent_until, standard_error
from bench.analysis.logs import read_run
from bench.analysis.runs import Run, complete, give
from bench.ask import read_arguments
from deskgpt.system.formatting import clock

NO_CAUSE = "No cause can be named"
CAUSE = "the cause of the difference in"


def compared(*paths: str) -> tuple[dict[str, list[str]], str, dict[str, Any]]:
    """({row: cells}, the verdict, the figures) of all tables."""
    runs = [read_run(p) for p in paths]
    for run in runs:
        complete(run)
    tables, lines, data = compare.compare(runs, [])
    assert len(lines) <= 10
    return {r[0]: r[1:] for t in tables for r in t.rows}, "\n".join(lines), data


# ---- figures -------------------------------------------------------------------------------------------------


def test_every_column_is_what_it_is_by_hand(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, ms=100)
    b = log(
        tmp_path / "b",
        {0: 4.0, 100: 2.8, 400: 1.0},
        ms=200,
        batch_size=8,
        gradient_accumulation_steps=1,
        flops_per_token=3000,
    )
    rows, _, data = compared(a, b)
    assert rows["batch_size"][:2] == ["4", "8"]
    assert rows["gradient_accumulation_steps"][:2] == ["2", "1"]
    assert rows["tokens per step"] == ["64", "64", "equal"]
    assert rows["ms per step, median"][:2] == ["100", "200"]
    assert rows["10% to 90% of the steps"][:2] == ["90 to 110", "180 to 220"]
    assert rows["tokens/s"] == ["640", "320", "A, 2.00 x B (noise a factor of 1.05)"]
    assert rows["MFLOPs per token"][:2] == ["0.001", "0.003"]
    speed = {r["label"]: r["values"] for r in data["rows"]["Speed"]}
    assert speed["FLOP/s"] == pytest.approx([640e3, 960e3])
    assert rows["MFU"][:2] == ["16.00%", "24.00%"]
    assert rows["peak memory"][:2] == ["2.00 GiB", "2.00 GiB"]
    assert rows["evaluation: time, and share of all"][:2] == ["6.0s, 23.1%", "6.0s, 7.0%"]  # of 20 + 6 s, 80 + 6 s
    assert "parameters, from MFU, time and tokens" not in rows  # the log states its FLOPs
    assert rows["lowest val loss"][:2] == ["2.0000", "1.0000"]
    assert rows["perplexity there"][:2] == [f"{math.e**2:.2f}", f"{math.e:.2f}"]
    assert rows["val - train loss at the end"][:2] == ["0.1000", "0.1000"]
    # B between 100 and 400 steps is linear in the logarithm: halfway at 200
    assert rows["val loss at equal steps (200)"][:2] == ["2.0000", "1.9000"]
    assert rows["val loss at equal tokens (12,800)"][:2] == ["2.0000", "1.9000"]
    assert rows["val loss at equal time (20.0s)"][:2] == ["2.0000", "2.8000"]  # B's 100th step
    # 1.28e7 FLOPs are 200 steps of A and 66.7 of B, before its first evaluation
    assert rows["val loss at equal FLOPs (1.28e+07)"] == ["2.0000", "n/a", ""]
    # down from 3 to 2 between 100 and 200 steps: 2.1 is at 100 x 2^0.9; B's 1.8 fall in 2 octaves: 2.1 after 7/18
    tokens = {r["label"]: r["values"] for r in data["rows"]["Learning"]}["tokens to val loss 2.1"]
    assert tokens == pytest.approx([6400 * 2**0.9, 6400 * 4 ** (0.7 / 1.8)])


def test_headline_says_who_leads_only_beyond_the_noise(tmp_path):
    def headline_with_a(name: str, *val: float, **changed: Any) -> str:
        other = log(tmp_path / name, dict(zip((0, 100, 200), val, strict=True)), **changed)
        return compared(a, other)[2]["headline"]

    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, ms=100)
    learns = "A has the lower val loss at equal tokens"
    assert headline_with_a("b", 4.0, 3.2, 2.5, ms=200) == f"{learns}, and is faster"
    assert headline_with_a("fast", 4.0, 3.2, 2.5, ms=50) == f"{learns}; B is faster"
    assert headline_with_a("slow", 4.0, 3.0, 2.001, ms=200).startswith("A is faster; the losses do not")
    assert headline_with_a("other", 4.0, 3.2, 2.5, ms=200, val_sha256="bad").startswith(
        "A is faster; the losses do not"
    )
    assert headline_with_a("same", 4.0, 3.0, 2.001).startswith("Neither")
    assert compared(a)[2]["headline"] == ""


TEXT: dict[str, Any] = {"val_text": "abc", "val_text_bytes": 5000, "val_bytes": 4900}


def other_tokens(tmp_path: Path, changed: dict[str, Any]) -> list[str]:
    """Logs of A, on characters of a byte, and of B, on tokens of two: 4 and 3.5 nats, 3 and 3.2, 2 and 3 of these."""
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, bytes_per_token=1.0, **TEXT)
    of_b: dict[str, Any] = {
        "tokenizer": "bpe",
        "val_tokens": 500,
        "train_tokens": 4500,
        "val_sha256": "bad",
        "bytes_per_token": 2.0,
    }
    return [a, log(tmp_path / "b", {0: 3.5, 100: 3.2, 200: 3.0}, **(of_b | TEXT | changed))]


def test_other_tokens_of_the_same_text_are_ranked_in_bits_per_byte(tmp_path):
    rows, text, data = compared(*other_tokens(tmp_path, {"block_size": 4, "gradient_accumulation_steps": 4}))
    assert (data["not_ranked"], data["ranked_in"]) == ([], "bits per byte")
    assert "contexts differ" not in text  # 8 bytes are 8 tokens, or 4 of two bytes
    a, b = 2 / math.log(2), 1.5 / math.log(2)
    noise = 1.96 * math.hypot(0.01, 0.005) / math.log(2)
    lead = f"B by {a - b:.4f} (noise ±{noise:.4f})"
    assert rows["bits per byte there"] == [f"{a:.4f}", f"{b:.4f}", lead]
    assert rows["lowest val loss"] == ["2.0000", "3.0000", ""]
    assert rows["bits per byte at equal steps (200)"] == [f"{a:.4f}", f"{b:.4f}", lead]
    # 64 tokens a step: A's 200 steps are 12,800 bytes, which B has read after 100 of its own
    assert rows["bits per byte at equal text (12,800 bytes)"][:2] == [f"{a:.4f}", f"{1.6 / math.log(2):.4f}"]
    assert not any(label.startswith(("val loss at equal", "time to val loss", "tokens to")) for label in rows)
    # B's first evaluation after the start is below that already
    assert rows["time to 2.89 bits per byte"][1] == "n/a"
    assert data["headline"] == "B has the lower bits per byte at equal text"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"val_text": "abd"}, ["abc", "abd", "5,000 bytes"]),
        ({"val_text_bytes": None}, ["5,000 bytes", "n/a bytes"]),
        ({"bytes_per_token": None}, ["bits per byte of B"]),
        ({"val_text": None}, ["validation text of B"]),
        ({"val_text_bytes": 5040}, None),  # within 1%
    ],
)
def test_bits_per_byte_are_ranked_only_of_the_same_text(tmp_path, changed, named):
    rows, text, data = compared(*other_tokens(tmp_path, changed))
    if named is None:
        assert data["ranked_in"] == "bits per byte"
        assert "Only tokenizer char -> bpe differs" in text
        assert CAUSE in text
        return
    for reason in named:
        assert reason in data["not_ranked"][-1]
        assert reason in text
    assert rows["val loss at equal steps (200)"][2] == "not ranked"


@pytest.mark.parametrize("logged", [{}, {"bytes_per_token": 1.0}])
def test_bits_per_byte_follow_from_the_bytes_of_a_token_given_by_hand(tmp_path, logged):
    run = read_run(log(tmp_path / "a", {0: 4.0, 100: 3.0}, **logged))
    give(run, "bytes_per_token", "4")
    complete(run)
    rows = {r[0]: r[1:] for t in compare.compare([run], [])[0] for r in t.rows}
    assert rows["bits per byte there"][0] == f"{3 / math.log(2) / 4:.4f}"


def test_a_loss_is_interpolated_only_between_evaluations(tmp_path):
    run = read_run(log(tmp_path / "a", {0: 4.0, 100: 3.0, 400: 2.0}))
    assert at(run, "steps", 200) == pytest.approx((2.5, 1.96 * 0.01))
    assert at(run, "steps", 99) is None  # the start is no evaluation to go by
    assert at(run, "steps", 401) is None
    assert spent_until(run, "steps", 2.5) == pytest.approx(200)
    assert spent_until(run, "steps", 3.5) is None
    assert spent_until(run, "steps", 1.9) is None
    warm = read_run(log(tmp_path / "warm", {0: 4.0, 100: 3.0, 200: 2.0}, warm_up_s=5.0))  # which cost time, too
    complete(warm)
    assert at(warm, "time", 6.0) is None
    assert spent_until(warm, "time", 3.5) is None


def test_scatter_of_evaluations_is_their_noise():
    draw = random.Random(3)
    losses = [3 + 1 / i + draw.gauss(0, 0.02) for i in range(1, 401)]
    run = Run("x", evals=[{"iter": i, "val_loss": v, "val_se": None} for i, v in enumerate(losses)])
    assert standard_error(run) is None  # the same tokens each time, for all that is known
    run.start["random_evaluation"] = True
    assert standard_error(run) == pytest.approx(0.02, rel=0.15)


# ---- what it may say ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "ms", "changed", "said"),
    [
        # what B's loss and time of a step are beside A's 2.5 and 100 ms, what else differs, what is said of it
        (2.49, 101, {"learning_rate": 3e-4}, ["no effect on speed", "no effect on loss"]),
        (2.3, 100, {"learning_rate": 3e-3}, [f"{CAUSE} loss", "B by 0.2000", "unless the seed"]),
        (2.5, 150, {"learning_rate": 3e-3}, ["cannot change the speed", "the machines differed"]),
        (2.3, 200, {"n_layer": 3}, [f"{CAUSE} speed", f"{CAUSE} loss", "unless the machines differed"]),
        (2.3, 100, {"device": "another", "git_commit": "def"}, [f"{NO_CAUSE}: 2 things", "git_commit abc -> def"]),
        (
            2.3,
            200,
            {"batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 3e-3},
            [f"{NO_CAUSE}: 2 things", "batch_size 4 -> 8 with gradient_accumulation_steps 2 -> 1", "learning_rate"],
        ),
        (2.3, 100, {"n_embd": 32, "n_head": 4}, ["Only n_embd 16 -> 32 with n_head 2 -> 4 differs", CAUSE]),
        (2.3, 100, {"attention": "explicit"}, ["Only attention flash -> explicit differs", CAUSE]),
        (2.3, 100, {}, ["Nothing that is known changed"]),
    ],
)
def test_cause_is_named_only_of_one_change_with_an_effect_beyond_the_noise(tmp_path, loss, ms, changed, said):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5})
    b = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: loss}, ms, **changed)
    text = compared(a, b)[1]
    for words in said:
        assert words in text
    assert (CAUSE in text) == any(CAUSE in words for words in said)


def test_cause_of_repeated_runs_is_named_without_a_doubt(tmp_path):
    seeds_a = [log(tmp_path / f"a{i}", {0: 4.0, 100: 3.0, 200: 2.5 + i / 100}, seed=i) for i in range(3)]
    seeds_b = [
        log(tmp_path / f"b{i}", {0: 4.0, 100: 3.0, 200: 2.3 + i / 100}, 130, seed=i, n_layer=3) for i in range(3)
    ]
    rows, text, _ = compared(*seeds_a, *seeds_b)
    lead = "D+E+F by 0.2000 (noise ±0.0227)"  # 2.776 x sqrt(2/3) x 0.01
    assert rows["val loss at equal steps (200)"][2] == lead
    assert rows["val loss there"][0] == f"2.5100 ± {4.303 * 0.01 / math.sqrt(3):.4f}"
    assert CAUSE in text
    assert lead in text
    assert "unless" not in text


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"val_sha256": "bad"}, ["data", "A f00", "B bad"]),
        ({"tokenizer": "gpt2"}, ["tokenizers", "A char", "B gpt2"]),
        ({"start": 10.8}, ["step 0", "A 4.00", "B 10.80"]),
    ],
)
def test_losses_of_different_evaluations_are_not_ranked(tmp_path, changed, named):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5})
    b = log(tmp_path / "b", {0: changed.pop("start", 4.0), 100: 3.0, 200: 1.5}, **changed)
    rows, text, data = compared(a, b)
    assert all(cells[2] == "not ranked" for label, cells in rows.items() if label.startswith("val loss at equal"))
    [reason] = data["not_ranked"]
    assert reason in text
    for part in named:
        assert part in reason


def test_other_contexts_are_ranked_with_a_caveat_in_tokens_as_in_bytes(tmp_path):
    a = log(tmp_path / "short", {0: 4.0, 100: 3.0, 200: 2.5})
    b = log(tmp_path / "long", {0: 4.0, 100: 3.0, 200: 2.0}, block_size=16, batch_size=2)
    in_bytes = other_tokens(tmp_path, {})  # 8 tokens of a byte, and 8 of two
    for paths, shown, remedy in (((a, b), "A 8, B 16 tokens", 8), (in_bytes, "A 8, B 16 bytes", 4)):
        rows, text, data = compared(*paths)
        assert data["not_ranked"] == []
        assert rows["bits per byte there" if paths is in_bytes else "lowest val loss"][2].startswith("B by ")
        assert shown in text.splitlines()[0]
        assert f"--block_size={remedy} " in text.splitlines()[0]
        assert data["headline"].startswith("B has the lower")
        assert "other contexts" in data["headline"]


def test_repeats_are_called_so_and_shown_one_by_one_and_together(tmp_path):
    repeats = [log(tmp_path / f"a{i}", {0: 4.0, 100: 3.0, 200: 2.5 + i / 100}, 90 + 10 * i, seed=i) for i in range(3)]
    other = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: 2.5}, n_layer=3)
    rows, _, data = compared(*repeats)
    assert data["headline"].startswith("A+B+C are repeats, seeds 0, 1, 2; lowest val loss 2.5100 ± ")
    assert [rows[name][0] for name in ("A: a0", "B: a1", "C: a2")] == ["0", "1", "2"]
    assert [rows[name][3] for name in ("A: a0", "B: a1", "C: a2")] == ["2.5000", "2.5100", "2.5200"]
    assert rows["A+B+C together"][3] == rows["lowest val loss"][0] == f"2.5100 ± {4.303 * 0.01 / math.sqrt(3):.4f}"
    assert rows["peak memory"][0] == "2.00 GiB"  # of all three
    assert {"A: a0", "B: a1", "A+B together"} <= compared(*repeats[:2], other)[0].keys()
    assert not any("together" in label for label in compared(repeats[0], other)[0])


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ([8.0, 15.0], "8.0s to 15.0s"),  # of two values the interval would be 11.5 ± 44.5
        ([1.0, 8.0, 26.0], "1.0s to 26.0s"),  # 11.7 ± 31.9
        ([10.0, 11.0, 12.0], "11.0s ± 2.5s"),
        ([10.0, 10.0], "10.0s"),
        ([10.0], "10.0s"),
        ([10.0, None], "n/a"),
    ],
)
def test_figure_of_repeats_whose_spread_exceeds_it_is_a_range(seconds, shown):
    runs = [Run(str(i), {"seed": i}, end={"train_s": s}) for i, s in enumerate(seconds)]
    row = over_runs("training", [Arm("A", runs)], lambda run: run.end["train_s"], clock)
    assert row.cells() == ["training", shown, ""]


def test_noise_without_any_measure_is_unknown(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 3: 2.5}, se=None)
    b = log(tmp_path / "b", {0: 4.0, 3: 2.0}, 150, se=None, n_layer=3)
    rows, text, _ = compared(a, b)
    assert "noise not known" in rows["val loss at equal steps (3)"][2]
    assert "noise not known" in rows["tokens/s"][2]
    assert CAUSE not in text
    assert "open" in text


def test_noise_of_the_speed_is_5_percent_at_least_and_a_drift_within_the_runs_widens_it(tmp_path):
    a = log(tmp_path / "steady-a", {0: 4.0, 100: 3.0, 200: 2.5}, ms=100)
    b = log(tmp_path / "steady-b", {0: 4.0, 100: 3.0, 200: 2.5}, ms=97, learning_rate=3e-3)
    rows, _, _ = compared(a, b)
    assert rows["tokens/s"][2] == "B and A: not distinguishable (1.03 x, noise a factor of 1.05)"
    assert rows["val loss at equal steps (200)"][2] == "equal"
    paths = [log(tmp_path / name, {0: 4.0, 200: 2.5}, ms=ms, learning_rate=ms) for name, ms in (("a", 100), ("b", 115))]
    for path in paths:  # halfway the machine became slower
        rewrite(path, lambda e: {"time_ms": e["time_ms"] * 1.5} if e["event"] == "iter" and e["iter"] >= 100 else {})
    # of ten tenths five are 1.5 times as slow: a standard deviation of 0.5 ln 1.5 sqrt(10/9), 1.96 sqrt(2) of it
    factor = math.exp(1.96 * math.sqrt(2) * 0.5 * math.log(1.5) * math.sqrt(10 / 9))
    assert f"not distinguishable (1.15 x, noise a factor of {factor:.2f})" in compared(*paths)[0]["tokens/s"][2]


def test_a_cause_needs_every_setting_and_the_device_known(tmp_path):
    echo = "Overriding: batch_size = {}\nOverriding: seed = 1\n"
    for name, batch in (("a", 16), ("b", 8)):
        times = {i: ms * (2 if name == "b" else 1) for i, ms in TIMES.items()}
        (tmp_path / f"{name}.txt").write_text(echo.format(batch) + nanogpt(times, (0, 40, 80), 200.0))
    runs = [read_run(str(tmp_path / f"{name}.txt")) for name in "ab"]
    for run in runs:
        complete(run)
    tables, lines, _ = compare.compare(runs, [])
    assert "Not known of A: device, dtype. Not known of B: device, dtype." in tables[0].note
    assert "do not say whether all were evaluated on the same data" in tables[-1].note
    assert lines[-1].startswith(NO_CAUSE)
    assert "--set A.NAME=VALUE" in lines[-1]
    for run, device in zip(runs, ("RTX 4070", "RTX 3090"), strict=True):
        give(run, "gpu", device)
        give(run, "dtype", "bfloat16")
    text = "\n".join(compare.compare(runs, [])[1])
    assert "batch_size 16 -> 8, device RTX 4070 -> RTX 3090" in text


def test_the_question_that_would_settle_it_changes_one_thing_and_what_follows_from_it(tmp_path):
    ends = {"min_lr": 1e-4, "lr_decay_iters": 400}
    a = log(tmp_path / "a", {0: 4.0, 200: 2.5}, settings=ends)
    b = log(tmp_path / "b", {0: 4.0, 200: 2.5}, learning_rate=3e-4, n_layer=3, settings=ends | {"min_lr": 3e-5})
    (line,) = [line for line in compared(a, b)[1].splitlines() if "bench/ask.py" in line]
    asked, common = read_arguments(shlex.split(line.partition("bench/ask.py")[2]))
    assert {asked.b, asked.c} == {"--n_layer=3", "--learning_rate=0.0003"}
    assert asked.together
    assert "--n_layer=3" not in common
    assert not [word for word in common if word.startswith(("--min_lr", "--lr_decay_iters", "--seed"))]
    one = log(tmp_path / "c", {0: 4.0, 200: 2.5}, learning_rate=3e-4, settings=ends | {"min_lr": 3e-5})
    assert compared(a, one)[1].endswith("--b --learning_rate=0.0003")


def test_of_three_runs_each_is_told_from_the_best_with_its_own_figures(tmp_path):
    noise = (0.001, 0.001, 0.2)
    paths = [
        log(tmp_path / str(i), {0: 4.0, 200: 2.0 + i / 20}, se=se, seed=1, n_layer=2 + i) for i, se in enumerate(noise)
    ]
    assert compared(*paths)[0]["val loss at equal steps (200)"][3] == (
        "A; B higher by 0.0500 (noise ±0.0028), C not distinguishable (0.1000 apart, noise ±0.3920)"
    )


def test_mfu_is_that_of_all_gpus_and_of_the_device_given_by_hand(tmp_path):
    (tmp_path / "log.txt").write_text(nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0))
    run = read_run(str(tmp_path / "log.txt"))
    give(run, "tokens_per_step", "1000")
    give(run, "world_size", "8")
    complete(run)
    assert run.flops_per_token == pytest.approx(8 * 0.2 * 312e12 / 1000, rel=1e-3)
    run = read_run(log(tmp_path / "a", {0: 4.0, 100: 3.0}))
    before = [e["mfu"] * 4e6 for e in run.iters]
    give(run, "gpu", "RTX 4070")
    complete(run)
    assert run.start["peak_flops"] > 1e12
    assert [e["mfu"] * run.start["peak_flops"] for e in run.iters] == pytest.approx(before)


def test_measured_peak_and_the_time_to_compile_have_their_own_rows(tmp_path):
    on_card = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, measured_flops=2e6, warm_up_s=60.0)
    on_cpu = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: 2.0}, measured_flops=4e6)
    rows, _, _ = compared(on_card, on_cpu)
    assert rows["MFU"][:2] == ["16.00%", "16.00%"]
    assert rows["MFU on the measured peak"][:2] == ["32.00%", "n/a"]
    assert rows["warm-up and compiling"][0] == "1m00s"  # which counts in the time to a loss
    assert rows["time to val loss 2.1"][0] == clock(70 * (80 / 70) ** 0.9)  # from 60 + 10 s to 60 + 20 s


# ---- the script ----------------------------------------------------------------------------------------------


def test_script_writes_a_page_and_figures(tmp_path, script):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5})
    (tmp_path / "log.txt").write_text(nanogpt(TIMES, (0, 40, 80), 200.0))
    files = {"html": tmp_path / "r.html", "json": tmp_path / "r.json"}
    given = ["--set", "B.batch_size=4", "B.block_size=8", "gradient_accumulation_steps=2", "--loss", "3.5"]
    given += ["--device", "B=RTX 4070"]
    done = script("bench/compare.py", a, tmp_path / "log.txt", *given, *flags(**files))
    assert done.code == 0, done.err
    assert "| training time to val loss 3.5 | 5.0s" not in done.out  # 3.0 at step 100 was the first
    assert "Peaks: A: measured; B: RTX 4070, " in done.out
    data = json.loads(files["json"].read_text())
    peak = {r["label"]: r["values"] for r in data["rows"]["Speed"]}["peak that MFU refers to"]
    assert peak[1] == pytest.approx(58.3e12, rel=0.02)
    assert "B: log" in files["html"].read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["/nowhere/at-all"], ["/nowhere/at-all", "out_dir"]),
        (["pyproject.toml"], ["pyproject.toml", "iter N: loss"]),
        (["A", "--set", "Z.batch_size=3"], ["Z.batch_size=3", "A.NAME=VALUE"]),
        (["A", "--set", "batchsize=3"], ["batchsize=3", "parameters"]),
        (["A", "--set", "batch_size=three"], ["batch_size"]),
        (["A", "--set", "parameters=-1"], ["parameters=-1", "above 0"]),
        (["A", "--device", "RTX 9999"], ["--device RTX 9999", "leave it out"]),
    ],
)
def test_what_is_wrong_is_one_line(script, tmp_path, arguments, named):
    run = log(tmp_path / "a", {0: 4.0, 100: 3.0})
    done = script("bench/compare.py", *(run if a == "A" else a for a in arguments))
    assert done.code in (1, 2), done.out
    assert_one_line(done.err, *named)
