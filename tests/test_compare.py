"""compare.py: reading logs as they are found, every column worked out by hand, and what it dares to say."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, flags, shell, tiny

from bench import compare
from bench.arms import arms_of, factors
from bench.learning import at, overfit, spent_until, standard_error
from bench.runs import Run, complete, give, implied_parameters, read_run
from bench.verdict import following
from runlog import clock
from train import main

REAL = ROOT.parent / "shared" / "data" / "nanogpt_logs" / "fineweb_33m_rtx4070.txt"
SETTINGS: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "batch_size": 4}
SETTINGS |= {"gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_iters": 400, "seed": 1, "dataset": "chars"}


def log(path: Path, val: dict[int, float], ms: float = 100.0, se: float | None = 0.01, **changed: Any) -> str:
    """A log.jsonl of a run that evaluates so, with 64 tokens per step and 1000 FLOPs per token, a step taking ms."""
    s = SETTINGS | {k: v for k, v in changed.items() if k in SETTINGS} | changed.pop("settings", {})
    per_step = s["batch_size"] * s["gradient_accumulation_steps"] * s["block_size"]
    start = {
        "parameters": 120.0,
        "flops_per_token": 1000,
        "tokens_per_step": per_step,
        "device": "a chip",
        "dtype": "float32",
    }
    start |= {"compiled": False, "world_size": 1, "peak_flops": 4e6, "peak_source": "measured", "git_commit": "abc"}
    start |= {"tokenizer": "char", "val_tokens": 1000, "train_tokens": 9000, "val_sha256": "f00"}
    start |= {k: v for k, v in changed.items() if k not in SETTINGS}
    lines = [{"event": "start", "iter": 0, "settings": s} | start]
    for i in range(max(val) + 1):
        done = {"tokens": i * per_step, "train_s": i * ms / 1e3}
        if i in val:
            loss = {"train_loss": val[i] - 0.1, "val_loss": val[i], "val_se": se, "lr": 1e-3, "eval_s": 2.0}
            lines.append({"event": "eval", "iter": i} | loss | done)
        if i < max(val):
            step = {
                "loss": 3.0,
                "time_ms": ms * (1 + 0.1 * (i % 3 - 1)),
                "mfu": 0.1,
                "tokens_per_s": 1.0,
                "data_wait": 0.0,
            }
            step |= {"lr": 1e-3, "grad_norm": 1.0, "tokens": (i + 1) * per_step, "train_s": (i + 1) * ms / 1e3}
            lines.append({"event": "iter", "iter": i} | step)
    lines.append({"event": "end", "iter": max(val), "peak_memory_bytes": 2**31})
    path.mkdir(parents=True, exist_ok=True)
    (path / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    return str(path)


def compared(*paths: str) -> tuple[dict[str, list[str]], str, dict[str, Any]]:
    """({row: cells}, the verdict, the figures) of all tables."""
    runs = [read_run(p) for p in paths]
    for run in runs:
        complete(run)
    tables, lines, data = compare.compare(runs, [])
    assert len(lines) <= 10
    return {r[0]: r[1:] for t in tables for r in t.rows}, "\n".join(lines), data


# ---- reading logs --------------------------------------------------------------------------------------------


def nanogpt(times: dict[int, float], evaluated: tuple[int, ...], peak_share_ms: float) -> str:
    """What nanoGPT prints, MFU included, for steps that take so many ms in all."""
    out, running = [], None
    for i, ms in times.items():
        if i in evaluated:
            out += [f"step {i}: train loss {4 - i / 100:.4f}, val loss {4.1 - i / 100:.4f}", "saving checkpoint to out"]
        mfu = peak_share_ms / ms
        running = None if i == 0 else mfu if running is None else 0.9 * running + 0.1 * mfu
        shown = -1.0 if running is None else running
        out.append(f"iter {i}: loss {4 - i / 100:.4f}, time {ms:.2f}ms, mfu {shown * 100:.2f}%")
    return "\n".join(out) + "\n"


TIMES = {
    0: 9000.0,
    10: 1000.0,
    20: 1010.0,
    30: 990.0,
    40: 6000.0,
    50: 1000.0,
    60: 1000.0,
    70: 1000.0,
    80: 6000.0,
    90: 1000.0,
}


def test_evaluation_is_taken_out_of_nanogpts_times_and_mfu(tmp_path):
    (tmp_path / "log.txt").write_text(nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0))
    run = read_run(str(tmp_path / "log.txt"))
    give(run, "tokens_per_step", "1000")
    complete(run)
    assert run.step_ms == [1000, 1010, 990, 1000, 1000, 1000, 1000]
    assert [e["eval_s"] for e in run.evals] == [None, 5.0, 5.0]  # 6 s less the median step
    mfu = {e["iter"]: e["mfu"] for e in run.iters}
    assert mfu[40] is None
    assert mfu[20] == pytest.approx(0.2 / 1.01, rel=1e-3)
    assert mfu[90] == pytest.approx(0.2, rel=1e-3)  # printed: 15.9%
    assert run.start["printed_mfu"] < 0.19
    # 0.2 of 312 TFLOP/s for a second, and 1000 tokens
    assert run.flops_per_token == pytest.approx(0.2 * 312e12 / 1000, rel=1e-3)
    assert run.evals[1]["train_s"] == pytest.approx(11 * 1.0 + 10 * 1.01 + 10 * 0.99 + 9 * 1.0, rel=0.01)


def test_parameters_follow_from_mfu_time_and_tokens(tmp_path):
    (tmp_path / "log.txt").write_text(nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0))
    run = read_run(str(tmp_path / "log.txt"))
    sizes = {"n_layer": 2, "n_embd": 100, "block_size": 50, "batch_size": 10, "gradient_accumulation_steps": 2}
    for name, value in sizes.items():
        give(run, name, str(value))
    assert implied_parameters(run) is None
    complete(run)
    assert run.tokens_per_step == 1000
    # 6 N + 12 x 2 x 100 x 50 = 0.2 x 312e12 / 1000
    assert implied_parameters(run) == pytest.approx((6.24e10 - 120_000) / 6, rel=1e-3)
    give(run, "parameters", "7e9")
    lines = compare.compare([run], [])[1]
    assert lines == [
        "A: 7,000.00M parameters are stated, but its MFU, time and tokens mean 10,399.88M (without position "
        "embeddings): one of them is wrong."
    ]


@pytest.mark.skipif(not REAL.exists(), reason="the log of a real nanoGPT run is not at hand")
def test_a_real_log_tells_its_model():
    run = read_run(str(REAL))
    sizes = {"n_layer": 12, "n_embd": 384, "block_size": 1024, "batch_size": 16, "gradient_accumulation_steps": 32}
    for name, value in sizes.items():
        give(run, name, str(value))
    complete(run)
    by_hand = 50304 * 384 + 12 * 12 * 384**2 + 25 * 384  # embedding, blocks, norms
    assert implied_parameters(run) == pytest.approx(by_hand, rel=1e-3)
    assert run.notes == []
    assert 3900 < sorted(run.step_ms)[len(run.step_ms) // 2] < 3915
    assert run.evals[2]["eval_s"] == pytest.approx(15.2, abs=0.1)
    assert overfit(run) is None  # its last evaluations differ by noise


def test_damaged_logs_are_read_as_far_as_they_go(tmp_path):
    text = nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0)
    clean = tmp_path / "clean.txt"
    clean.write_text(text)
    lines = [f"\x1b[0m| 12:00 {line}" for line in text.splitlines()]
    lines.insert(5, "UserWarning: iter is deprecated\n  warnings.warn(")
    lines.insert(9, "\ufffd\x00%%% step 7")
    lines[0] = "\ufeffx" + lines[0]
    lines.append("iter 95: loss 3.1, ti")  # cut off
    (tmp_path / "damaged.txt").write_bytes("\r\n".join(lines).encode() + b"\xff\xfe")
    a, b = read_run(str(clean)), read_run(str(tmp_path / "damaged.txt"))
    assert (a.iters, a.evals) == (b.iters, b.evals)
    assert b.notes == ["1 damaged lines of its log are left out"]


def test_colours_of_a_terminal_and_powershells_encoding_are_taken_off(tmp_path):
    text = nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("".join(f"\x1b[32m{line}\x1b[0m\n" for line in text.splitlines()))
    (tmp_path / "c.txt").write_text(text, encoding="utf-16")
    a, b, c = (read_run(str(tmp_path / f"{name}.txt")) for name in "abc")
    assert a.iters == b.iters == c.iters
    assert a.evals == b.evals == c.evals


def test_losses_that_are_no_numbers_are_said(tmp_path):
    lines = nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0).replace(
        "loss 3.2000, time 6000.00ms", "loss nan, time nanms"
    )
    (tmp_path / "a.txt").write_text(lines)
    run = read_run(str(tmp_path / "a.txt"))
    complete(run)
    assert "its loss is no number at step 80" in run.notes
    compare.compare([run], [])


def test_damaged_events_are_left_out(tmp_path):
    path = Path(log(tmp_path / "a", {0: 4.0, 10: 3.0}))
    odd = ["null", "[]", '"x"', '{"event": "iter", "iter": null}', '{"event": "iter", "iter": 1e999}', '{"event": 3}']
    odd += ['{"event": "iter", "iter": 5, "loss": "x", "time_ms": {}, "mfu": []}']
    (path / "log.jsonl").write_text((path / "log.jsonl").read_text() + "\n".join(odd))
    run = read_run(str(path))
    complete(run)
    assert len(run.iters) == 10
    assert run.iters[5]["time_ms"] is None
    compare.compare([run], [])


def test_a_log_that_goes_on_behind_a_resume_counts_each_step_once(tmp_path):
    first, second = dict(list(TIMES.items())[:7]), dict(list(TIMES.items())[4:])
    path = tmp_path / "log.txt"
    path.write_text(nanogpt(first, (0, 40), 200.0) + nanogpt(second, (40, 80), 200.0))
    run = read_run(str(path))
    assert [e["iter"] for e in run.iters] == list(TIMES)
    assert [e["iter"] for e in run.evals] == [0, 40, 80]
    assert run.notes == ["its log begins 2 times; what was computed twice counts as it was the last time"]


def test_settings_that_nanogpt_echoes_are_known_with_its_defaults(tmp_path):
    echo = "Overriding config with config/x.py:\n# a comment\nbatch_size = 16 # micro\nlearning_rate = 3e-4\n"
    echo += "Overriding: n_layer = 3\nOverriding: dataset = fineweb\neval_iters = 5 * 2\nfree = words here\n"
    echo += "n_head=6\nn_embd: int = 384\nbeta2 = 1 - 0.05\n"
    (tmp_path / "log.txt").write_text(echo + "number of parameters: 1.50M\n" + nanogpt(TIMES, (0, 40, 80), 200.0))
    run = read_run(str(tmp_path / "log.txt"))
    s = run.settings
    assert (s["batch_size"], s["learning_rate"], s["n_layer"], s["dataset"]) == (16, 3e-4, 3, "fineweb")
    assert (s["n_head"], s["n_embd"], s["eval_iters"]) == (6, 384, 10)
    assert (s["block_size"], s["lr_decay_iters"], s["activation"]) == (1024, 600000, "gelu")
    assert "beta2" not in s
    assert "it has beta2 = 1 - 0.05, which is not read" in run.notes
    assert "device" not in s
    assert run.start["parameters"] == 1.5e6


def test_our_own_run_reads_the_same_from_its_log_and_from_what_it_printed(chars, tmp_path, capsys):
    main(tiny(chars, tmp_path / "out", max_iters=6, eval_iters=8))
    (tmp_path / "printed.txt").write_text(capsys.readouterr().out)
    a, b = read_run(str(tmp_path / "out")), read_run(str(tmp_path / "printed.txt"))
    for run in (a, b):
        complete(run)
    assert [e["iter"] for e in a.iters] == [e["iter"] for e in b.iters] == list(range(6))
    for x, y in zip(a.iters, b.iters, strict=True):
        for name in ("loss", "time_ms", "mfu", "tokens_per_s", "tokens", "lr"):
            assert x[name] == pytest.approx(y[name], rel=2e-2, abs=1e-4), name
    for name in ("val_loss", "val_se"):
        assert [e[name] for e in a.evals] == pytest.approx([e[name] for e in b.evals], abs=1e-4)
    assert b.start["val_tokens"] == a.start["val_tokens"]
    assert b.start["tokens_per_step"] == a.start["tokens_per_step"]
    assert all(e["val_se"] > 0 for e in a.evals)


def test_a_resumed_run_counts_on(tmp_path):
    path = Path(log(tmp_path / "a", {0: 4.0, 10: 3.0, 20: 2.5}))
    text = (path / "log.jsonl").read_text().splitlines()
    start = json.dumps(json.loads(text[0]) | {"iter": 10})
    later = [json.loads(line) for line in text[1:] if json.loads(line)["iter"] >= 10]
    moved = [json.dumps(e | ({"train_s": e["train_s"] - 1.0} if "train_s" in e else {})) for e in later]
    (path / "log.jsonl").write_text("\n".join([*text[:16], '{"event": "iter", "it', start, *moved]))
    run = read_run(str(path))
    assert [e["iter"] for e in run.iters] == list(range(20))
    assert [e["iter"] for e in run.evals] == [0, 10, 20]
    assert run.iters[-1]["train_s"] == pytest.approx(2.0)
    assert run.evals[-1]["train_s"] == pytest.approx(2.0)
    assert run.notes == ["1 unreadable lines of its log are left out"]


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
    assert rows["ms per micro-batch"][:2] == ["50", "200"]
    assert rows["tokens/s"] == ["640", "320", "A, 2.00 x B (noise a factor of 1.05)"]
    assert rows["MFLOPs per token"][:2] == ["0.001", "0.003"]
    speed = {r["label"]: r["values"] for r in data["rows"]["Speed"]}
    assert speed["TFLOP/s"] == pytest.approx([640e3, 960e3])
    assert rows["MFU on the log's peak"][:2] == ["16.00%", "24.00%"]
    assert rows["peak memory, GiB"][:2] == ["2.00", "2.00"]
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


def test_bits_per_byte_need_the_bytes_of_a_token(tmp_path):
    run = read_run(log(tmp_path / "a", {0: 4.0, 100: 3.0}))
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


def test_scatter_of_evaluations_is_their_noise():
    draw = random.Random(3)
    losses = [3 + 1 / i + draw.gauss(0, 0.02) for i in range(1, 401)]
    run = Run("x", evals=[{"iter": i, "val_loss": v, "val_se": None} for i, v in enumerate(losses)])
    assert standard_error(run) is None  # the same tokens each time, for all that is known
    run.start["random_evaluation"] = True
    assert standard_error(run) == pytest.approx(0.02, rel=0.15)


# ---- what it dares to say ------------------------------------------------------------------------------------


def test_a_difference_within_the_noise_is_not_distinguishable(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.500}, ms=100)
    b = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: 2.490}, ms=101, learning_rate=3e-4)
    rows, said, _ = compared(a, b)
    assert rows["tokens/s"][2] == "A and B: not distinguishable (1.01 x, noise a factor of 1.05)"
    assert rows["val loss at equal steps (200)"][2] == "not distinguishable (0.0100 apart, noise ±0.0277)"
    assert "Only learning_rate 0.001 -> 0.0003 differs: no effect on speed shows beyond the noise." in said
    assert "no effect on loss at equal steps or tokens shows beyond the noise." in said
    assert "cause of" not in said


def test_one_changed_setting_may_be_named_as_the_cause(tmp_path):
    seeds_a = [log(tmp_path / f"a{i}", {0: 4.0, 100: 3.0, 200: 2.5 + i / 100}, seed=i) for i in range(3)]
    seeds_b = [
        log(tmp_path / f"b{i}", {0: 4.0, 100: 3.0, 200: 2.3 + i / 100}, 130, seed=i, n_layer=3) for i in range(3)
    ]
    rows, said, _ = compared(*seeds_a, *seeds_b)
    assert [a.label for a in arms_of([read_run(p) for p in (*seeds_a, *seeds_b)])] == ["A+B+C", "D+E+F"]
    assert rows["val loss at equal steps (200)"][2] == "D+E+F by 0.2000 (noise ±0.0227)"  # 2.776 x sqrt(2/3) x 0.01
    only = "Only n_layer 2 -> 3 differs: it is the cause of the difference in"
    assert f"{only} speed (A+B+C, 1.30 x D+E+F (noise a factor of 1.00))." in said
    assert f"{only} loss at equal steps or tokens (D+E+F by 0.2000 (noise ±0.0227))." in said


def test_what_cannot_touch_the_speed_is_no_cause_of_it(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5}, ms=100)
    b = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: 2.5}, ms=150, learning_rate=3e-3)
    said = compared(a, b)[1]
    assert "which does not touch the speed (A, 1.50 x B (noise a factor of 1.05)): the machine was another." in said


def test_one_run_each_leaves_the_seed_as_a_cause(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5})
    b = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: 2.3}, learning_rate=3e-3)
    said = compared(a, b)[1]
    assert "it is the cause of the difference in loss at equal steps or tokens (B by 0.2000" in said
    assert "unless the seed is: one run each, so repeat both." in said


def test_several_changes_have_no_cause_but_a_run_that_would_settle_it(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5})
    b = log(
        tmp_path / "b",
        {0: 4.0, 100: 3.0, 200: 2.3},
        200,
        batch_size=8,
        gradient_accumulation_steps=1,
        learning_rate=3e-3,
    )
    said = compared(a, b)[1]
    assert "2 things changed: batch_size 4 -> 8 with gradient_accumulation_steps 2 -> 1, learning_rate" in said
    assert "No cause can be named: 2 things changed at once." in said
    assert "--batch_size=8 --block_size=8 --gradient_accumulation_steps=1 --learning_rate=0.001" in said
    assert "cause of" not in said


def test_other_code_is_a_change_too(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 200: 2.5})
    b = log(tmp_path / "b", {0: 4.0, 200: 2.3}, learning_rate=3e-3, git_commit="def")
    assert "No cause can be named: 2 things changed at once." in compared(a, b)[1]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"block_size": 16}, "different context lengths (A 8, B 16)"),
        ({"val_sha256": "bad"}, "different validation data (A f00, B bad)"),
        ({"tokenizer": "gpt2"}, "different tokenizers (A char, B gpt2)"),
        ({"start": 10.8}, "different losses at step 0, and so vocabularies or data (A 4.00, B 10.80)"),
    ],
)
def test_losses_of_different_evaluations_are_not_ranked(tmp_path, changed, reason):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5})
    b = log(tmp_path / "b", {0: changed.pop("start", 4.0), 100: 3.0, 200: 1.5}, **changed)
    rows, said, data = compared(a, b)
    assert all(cells[2] == "not ranked" for label, cells in rows.items() if label.startswith("val loss at equal"))
    assert f"The losses are not ranked: {reason}" in said
    assert data["not_ranked"] == [reason]


def test_noise_that_nothing_tells_is_said_to_be_unknown(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5}, se=None)
    b = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: 2.0}, se=None, learning_rate=3e-3)
    rows, said, _ = compared(a, b)
    assert rows["val loss at equal steps (200)"][2] == "B by 0.5000 (noise not known)"
    assert "cause of the difference in loss" not in said


def test_overfitting_is_said_with_its_step(tmp_path):
    path = log(tmp_path / "a", {0: 4.0, 100: 2.0, 200: 1.5, 300: 1.6, 400: 1.8})
    rewritten = Path(path) / "log.jsonl"
    events = [json.loads(line) for line in rewritten.read_text().splitlines()]
    for e in events:
        if e["event"] == "eval":
            e["train_loss"] = 4.0 - e["iter"] / 101
    rewritten.write_text("\n".join(map(json.dumps, events)))
    _, said, _ = compared(path)
    assert "A overfits: its val loss was lowest at step 200 and has risen by 0.3000 since." in said


def test_settings_that_a_log_does_not_say_bar_any_cause(tmp_path):
    (tmp_path / "log.txt").write_text(nanogpt(TIMES, (0, 40, 80), 200.0))
    b = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: 2.3})
    said = compared(str(tmp_path / "log.txt"), b)[1]
    assert "Not known of A: activation, align_documents, batch_size and" in said
    assert "No cause can be named: not all settings are known." in said


def test_width_with_heads_of_one_size_is_one_change(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 200: 2.5})
    b = log(tmp_path / "b", {0: 4.0, 200: 2.3}, n_embd=32, n_head=4)
    assert factors(arms_of([read_run(a), read_run(b)])) == [["n_embd", "n_head"]]


def test_noise_within_a_machine_is_no_effect_on_speed(tmp_path):
    """Of single runs 5% at least is noise; a step or two tell nothing."""
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5}, ms=100)
    b = log(tmp_path / "b", {0: 4.0, 100: 3.0, 200: 2.5}, ms=97, learning_rate=3e-3)
    assert compared(a, b)[0]["tokens/s"][2] == "B and A: not distinguishable (1.03 x, noise a factor of 1.05)"
    a = log(tmp_path / "c", {0: 4.0, 3: 3.0}, ms=100)
    b = log(tmp_path / "d", {0: 4.0, 3: 3.0}, ms=150, n_layer=3)
    rows, said, _ = compared(a, b)
    assert rows["tokens/s"][2] == "A, 1.50 x B (noise not known)"
    assert "an effect on speed is open, as the noise is not known; repeat both." in said


def test_drift_within_the_runs_widens_the_noise(tmp_path):
    paths = [log(tmp_path / name, {0: 4.0, 200: 2.5}, ms=ms, learning_rate=ms) for name, ms in (("a", 100), ("b", 115))]
    for path in paths:
        file = Path(path) / "log.jsonl"
        events = [json.loads(line) for line in file.read_text().splitlines()]
        for e in events:
            if e["event"] == "iter" and e["iter"] >= 100:
                e["time_ms"] *= 1.5  # halfway the machine became slower
        file.write_text("\n".join(map(json.dumps, events)))
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
    said = "\n".join(compare.compare(runs, [])[1])
    assert "Not known of A and B: device, dtype;" in said
    assert "No cause can be named: not all settings are known." in said
    for run, device in zip(runs, ("RTX 4070", "RTX 3090"), strict=True):
        give(run, "gpu", device)
        give(run, "dtype", "bfloat16")
    said = "\n".join(compare.compare(runs, [])[1])
    assert "2 things changed: batch_size 16 -> 8, device RTX 4070 -> RTX 3090." in said
    assert "No cause can be named: 2 things changed at once." in said
    assert "--device" not in said


def test_the_run_that_would_settle_it_changes_what_follows_too(tmp_path):
    ends = {"min_lr": 1e-4, "lr_decay_iters": 400}
    a = log(tmp_path / "a", {0: 4.0, 200: 2.5}, settings=ends)
    b = log(tmp_path / "b", {0: 4.0, 200: 2.5}, learning_rate=3e-4, n_layer=3, settings=ends | {"min_lr": 3e-5})
    said = compared(a, b)[1]
    assert "2 things changed: n_layer 2 -> 3, learning_rate 0.001 -> 0.0003." in said
    assert "--n_layer=3" in said
    runs = [read_run(p) for p in (a, b)]
    assert following(runs[0].settings, {"learning_rate": 3e-4})["min_lr"] == pytest.approx(3e-5)
    assert following(runs[0].settings, {"max_iters": 800})["lr_decay_iters"] == 800


def test_of_three_runs_each_is_told_from_the_best_with_its_own_figures(tmp_path):
    noise = (0.001, 0.001, 0.2)
    paths = [
        log(tmp_path / str(i), {0: 4.0, 200: 2.0 + i / 20}, se=se, seed=1, n_layer=2 + i) for i, se in enumerate(noise)
    ]
    assert compared(*paths)[0]["val loss at equal steps (200)"][3] == (
        "A; behind it B by 0.0500 (noise ±0.0028), C not distinguishable (0.1000 apart, noise ±0.3920)"
    )


def test_seeds_show_as_mean_and_interval(tmp_path):
    paths = [log(tmp_path / str(i), {0: 4.0, 100: 3.0, 200: 2.5 + i / 100}, seed=i) for i in range(3)]
    assert compared(*paths)[0]["val loss there"][0] == f"2.5100 ± {4.303 * 0.01 / math.sqrt(3):.4f}"


def test_equal_losses_lead_nowhere(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5})
    assert compared(a, a)[0]["val loss at equal steps (200)"][2] == "both equal"


def test_gpus_of_a_nanogpt_run_share_its_mfu(tmp_path):
    (tmp_path / "log.txt").write_text(nanogpt(TIMES, (0, 40, 80), peak_share_ms=200.0))
    run = read_run(str(tmp_path / "log.txt"))
    give(run, "tokens_per_step", "1000")
    give(run, "world_size", "8")
    complete(run)
    assert run.flops_per_token == pytest.approx(8 * 0.2 * 312e12 / 1000, rel=1e-3)


def test_compiling_counts_in_the_time_to_a_loss(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.0}, warm_up_s=60.0)
    rows, _, _ = compared(a)
    assert rows["warm-up and compiling"][0] == "1m00s"
    assert rows["time to val loss 2.1"][0] == clock(70 * (80 / 70) ** 0.9)  # from 60 + 10 s to 60 + 20 s


# ---- the script ----------------------------------------------------------------------------------------------


def test_script_writes_a_page_a_picture_and_figures(tmp_path):
    a = log(tmp_path / "a", {0: 4.0, 100: 3.0, 200: 2.5})
    (tmp_path / "log.txt").write_text(nanogpt(TIMES, (0, 40, 80), 200.0))
    files = {"html": tmp_path / "r.html", "png": tmp_path / "r.png", "json": tmp_path / "r.json"}
    given = ["--set", "B.batch_size=4", "B.block_size=8", "gradient_accumulation_steps=2", "--loss", "3.5"]
    given += ["--device", "B=RTX 4070"]
    done = shell("python", "bench/compare.py", a, tmp_path / "log.txt", *given, *flags(**files))
    assert done.returncode == 0, done.stderr
    assert "| training time to val loss 3.5 | 5.0s" not in done.stdout  # 3.0 at step 100 was the first
    assert "| MFU on the device's own peak | 16.00% |" in done.stdout
    data = json.loads(files["json"].read_text())
    peak = {r["label"]: r["values"] for r in data["rows"]["Speed"]}["its own peak, TFLOP/s"]
    assert peak[1] == pytest.approx(58.3, rel=0.02)
    assert "B: log" in files["html"].read_text()
    assert files["png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["/nowhere/at-all"], "/nowhere/at-all: No such file or directory; name an out_dir with a log.jsonl"),
        (["pyproject.toml"], "pyproject.toml holds no line of a training run"),
        (["A", "--set", "Z.batch_size=3"], "--set Z.batch_size=3: write A.NAME=VALUE"),
        (["A", "--set", "batchsize=3"], "--set batchsize=3: neither a setting of train.py"),
        (["A", "--set", "batch_size=three"], "batch_size"),
        (["A", "--set", "parameters=-1"], "--set parameters=-1: must be above 0"),
        (["A", "--device", "RTX 9999"], "--device RTX 9999: no published peak is known of it for tf32 or float32"),
    ],
)
def test_what_is_wrong_is_one_line(script, tmp_path, arguments, reason):
    run = log(tmp_path / "a", {0: 4.0, 100: 3.0})
    done = script("bench/compare.py", *(run if a == "A" else a for a in arguments))
    assert done.code in (1, 2), done.out
    assert done.err.count("\n") == 1
    assert reason in done.err
