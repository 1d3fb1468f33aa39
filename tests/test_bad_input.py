"""Mistakes of a user, each through the real script: one line names the value and the remedy, and no file changes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, flags

from data.token_files import write_dataset, write_tokens
from data.tokenizer import BytesTokenizer
from deskgpt.checkpoint import store
from train import TrainConfig, main


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(chars, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("finished")
    main(TrainConfig(**(TINY | {"dataset": str(chars), "out_dir": str(out_dir)})))
    return out_dir


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """The out_dir of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def assert_fails(script, run: Path, message: str, *args: str | Path, code: int = 1, path: str = "train.py") -> None:
    before = snapshot(run)
    done = script(path, *args)
    assert done.code == code, done.err
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line), line
    assert snapshot(run) == before


SETTINGS = [
    ("--batchsize=3", "--batchsize is not a setting; did you mean batch_size"),
    ("--batch_size=three", "--batch_size='three' is not int"),
    ("--batch_size=0", "batch_size=0 must be at least 1"),
    ("--n_head=3", "n_embd=16 is not a multiple of n_head=3; try --n_head=2"),
    ("--dropout=1.5", "dropout=1.5 must be"),
    ("--dtype=float8", "--dtype='float8' is not one of auto, float32, bfloat16, float16"),
    ("--learning_rate=-1", "learning_rate=-1.0 must be at least 0"),
    ("--beta2=1", "beta2=1.0 must be below 1"),
    ("--seed=-1", "seed=-1 must be at least 0"),
    ("--seed=99999999999999999999", "seed=99999999999999999999 must be below"),
    (
        "--batch_size=1e12",
        "batch_size=1000000000000 x gradient_accumulation_steps=1 are 1,000,000,000,000 sequences per",
    ),
    ("--max_iters=99999999999999999999", "--max_iters=99999999999999999999 must be below 2^63 in size"),
    ("--backend=mpi", "--backend='mpi' is not one of auto, nccl, gloo"),
    ("--max_iters=1.5", "--max_iters=1.5 is not int"),
    ("config/train_shakespeare.py", "no such config file; did you mean config/"),
]


@pytest.mark.parametrize(("argument", "message"), SETTINGS, ids=[a for a, _ in SETTINGS])
def test_settings(chars, run, script, argument, message):
    settings = [*flags(**TINY, dataset=chars, out_dir=run), argument]
    assert_fails(script, run, re.escape(message), *settings, code=2)


def test_mistyped_setting_in_a_config_file(run, tmp_path, script):
    (tmp_path / "mine.py").write_text("batch_size = 3\nlearning_rat = 1\n")
    message = r"mine\.py:2: learning_rat is not a setting; did you mean learning_rate\?"
    assert_fails(script, run, message, tmp_path / "mine.py", code=2)


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "gpu", "meta"])
def test_no_such_device(chars, run, script, device):
    settings = TINY | {"dataset": chars, "out_dir": run, "device": device}
    assert_fails(script, run, f"device='?{device}'?.*try --device=", *flags(**settings))


def damaged(folder: Path, kind: str) -> None:
    ids = np.zeros(1000, np.uint16)
    write_dataset(folder, {"train": ids, "val": ids}, BytesTokenizer(), "test")
    train = folder / "train.bin"
    if kind == "empty":
        train.write_bytes(b"")
    elif kind == "odd":
        train.write_bytes(b"abc")
    elif kind in ("cut", "short"):
        os.truncate(train, 20)
        if kind == "short":
            (folder / "meta.json").unlink()  # it lists how many tokens there should be
    elif kind == "no val":
        (folder / "val.bin").unlink()
    elif kind == "id":
        ids[:] = 300
        write_tokens(train, ids)
    elif kind == "bit":
        ids[7] = 1
        write_tokens(train, ids)
    elif kind == "meta":
        (folder / "meta.json").write_text("{")


DATA = [
    ("empty", r"train\.bin is empty; prepare the data again"),
    ("odd", r"train\.bin has 3 bytes, an odd number"),
    ("cut", r"train\.bin has 10, and meta\.json lists it with [\d,]+ tokens; prepare the data again"),
    ("short", r"block_size=16 needs 17 tokens in a row, .*train\*\.bin has 10; try --block_size=9"),
    ("no val", r"has no val\*\.bin"),
    ("id", r"train\.bin: token [\d,]+ is 300, and the vocabulary ends at 255"),
    ("bit", r"train\.bin: its checksum is not the one in meta\.json: .*; prepare the data again"),
    ("meta", r"meta\.json does not describe token files"),
]


@pytest.mark.parametrize(("kind", "message"), DATA, ids=[k for k, _ in DATA])
def test_data(tmp_path, run, script, kind, message):
    damaged(tmp_path / "data", kind)
    settings = TINY | {"dataset": tmp_path / "data", "out_dir": run}
    assert_fails(script, run, message, *flags(**settings))


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows does not cut open files")
@pytest.mark.parametrize("eval_interval", [3, 10**6])
def test_run_whose_train_bin_is_cut_short_saves_and_ends(tmp_path, eval_interval):
    ids = np.random.default_rng(0).integers(0, 256, 100_000, np.uint16)
    write_dataset(tmp_path / "data", {"train": ids, "val": ids}, BytesTokenizer(), "test")
    settings = TINY | {"dataset": tmp_path / "data", "out_dir": tmp_path / "run", "max_iters": 10**6}
    command = [sys.executable, "train.py", *flags(**settings | {"eval_interval": eval_interval})]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, bufsize=1) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("iter 5:"):
                os.truncate(tmp_path / "data" / "train.bin", 1000)
                break
        out, err = process.communicate(timeout=60)
    stopped = re.search(r"^stopped by an error at step (\d+)$", out, re.M)
    assert stopped
    assert store.load(tmp_path / "run").iter_num == int(stopped[1]) > 5
    (line,) = err.splitlines()
    assert re.match(r"error: .*train\.bin became shorter while it was in use: it had 200,000 bytes, now it has", line)
    assert process.returncode == 1


def test_no_data(tmp_path, run, script):
    settings = TINY | {"out_dir": run}
    assert_fails(script, run, "nowhere does not exist", *flags(**settings, dataset=tmp_path / "nowhere"))
    assert_fails(script, run, "run: python data/text/prepare.py", *flags(**settings, dataset="text"))


def test_data_of_another_vocabulary_than_the_checkpoints(tmp_path, run, script):
    damaged(tmp_path / "data", "none")
    message = r"vocabulary of 256 \(tokenizer bytes\), the model one of \d+ \(tokenizer char\).*prepare the data with"
    resume = ["--init_from=resume", f"--out_dir={run}", f"--dataset={tmp_path / 'data'}"]
    assert_fails(script, run, message, *resume)
    resume[2] = f"--dataset={tmp_path / 'gone'}"
    assert_fails(script, run, "dataset folder .*/gone does not exist", *resume)


CHECKPOINTS = ["missing", "empty", "cut", "noise", "one bit"]


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("path", ["train.py", "sample.py"])
def test_checkpoints(run, script, path, kind):
    file = run / "ckpt.pt"
    content = file.read_bytes()
    file.unlink()
    message = rf"ckpt\.pt is not a readable checkpoint .*; --out_dir={run}/ckpt_best\.pt is another"
    if kind == "missing":
        message = r"ckpt\.pt: no such checkpoint; is --out_dir right\?"
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "cut":
        file.write_bytes(content[:5000])
    elif kind == "noise":
        file.write_bytes(os.urandom(5000))
    elif kind == "one bit":
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 4
        file.write_bytes(flipped)
    assert_fails(script, run, message, "--init_from=resume", f"--out_dir={file}", path=path)
    # The folder has another one, which serves until it is as bad.
    if kind != "missing":
        shutil.copy(file, run / "ckpt_best.pt")
        message = r"ckpt\.pt is not .*, and .*ckpt_best\.pt is not .*; restore one of them from a copy"
        assert_fails(script, run, message, "--init_from=resume", f"--out_dir={run}", path=path)


def test_damaged_last_checkpoint_falls_back_to_the_best_one(run, script):
    os.truncate(run / "ckpt.pt", 5000)
    damaged = (run / "ckpt.pt").read_bytes()
    note = rf"{run}/ckpt\.pt is not a readable checkpoint \(.*\): going on from ckpt_best\.pt, step \d+"
    done = script("sample.py", f"--out_dir={run}", "--num_samples=1", "--max_new_tokens=3")
    assert done.code == 0, done.err
    assert re.fullmatch(note, done.err.strip())
    done = script("train.py", "--init_from=resume", f"--out_dir={run}", "--max_iters=8", "--lr_decay_iters=6")
    assert done.code == 0, done.err
    assert len(re.findall(note, done.out)) == 1
    assert "it is kept as ckpt_damaged.pt" in done.out
    assert (run / "ckpt_damaged.pt").read_bytes() == damaged
    assert store.load(run).iter_num == 8


@pytest.mark.parametrize(("name", "value"), [("block_size", 8), ("block_size", 64), ("n_layer", 5), ("n_embd", 64)])
def test_resumed_run_refuses_another_size(run, script, name, value):
    message = f"{name}={value}, but {run} has {name}={TINY[name]}: leave it out"
    assert_fails(script, run, message, "--init_from=resume", f"--out_dir={run}", f"--{name}={value}")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("iter_num", "x", "not a training checkpoint: no iter_num"),
        ("config", [], "not a training checkpoint: no config"),
        ("optimizer", {}, "optimizer state does not fit the model"),
        ("model", {}, "model_args say n_layer=2, the weights are those of 0 blocks"),
        ("model", {f"transformer.h.{i}.x": torch.ones(1) for i in range(2)}, "these weights are not a GPT of"),
        ("model_args", {"n_kv_head": 2}, "model_args=.*n_kv_head.* are not those of a GPT-2"),
        ("model_args", {"n_head": 3, "n_embd": 16}, "n_embd=16 is not a multiple of n_head=3"),
        ("model_args", {"n_head": 2.0}, "n_head=2.0 must be a whole number"),
        ("model_args", {"n_layer": True}, "n_layer=True must be a whole number"),
        ("model_args", {"vocab_size": -1}, "vocab_size=-1 must be a whole number"),
        ("model_args", {"n_embd": 10**400}, "a number in it has more than 64 bits"),
        ("model_args", {"n_layer": 10**6}, "model_args say n_layer=1000000, the weights are those of 2 blocks"),
        ("model_args", {"bias": "yes"}, "bias='yes' is not True or False"),
        ("model_args", {"dropout": "0"}, "model_args=.* are not those of a GPT-2"),
        ("model_args", {1: 2}, "model_args=.* are not those of a GPT-2"),
    ],
)
def test_checkpoint_with_wrong_content(run, script, name, value, message):
    found = torch.load(run / "ckpt.pt") | {name: value}
    del found["format"]  # or its checksum would be missed
    torch.save(found, run / "ckpt.pt")
    message = f"{re.escape(str(run))}.*{message}"
    assert_fails(script, run, message, "--init_from=resume", f"--out_dir={run / 'ckpt.pt'}")


ABSURD = [
    ({"n_layer": 10**9, "n_embd": 768}, "n_layer=1000000000 must be at most 1000"),
    ({"n_layer": 10**6}, "n_layer=1000000 must be at most 1000"),
    (
        {"n_embd": 1 << 40},
        r"n_embd=1099511627776 .* of more than 1e\+14 parameters, which no machine holds; take a small",
    ),
    ({"n_embd": 1 << 40, "n_head": 3}, "which no machine holds"),
    ({"n_embd": 10**400, "n_head": 1}, r"--n_embd=10+\.\.\. must be below 2\^63 in size"),
]


@pytest.mark.parametrize(("sizes", "message"), ABSURD)
@pytest.mark.parametrize("kind", [{}, {"dry_run": True}])
def test_model_of_absurd_size(chars, run, script, sizes, message, kind):
    settings = TINY | {"dataset": chars, "out_dir": run} | sizes | kind
    assert_fails(script, run, message, *flags(**settings), code=2)


def test_model_larger_than_the_memory(chars, run, script):
    settings = TINY | {"dataset": chars, "out_dir": run}
    message = (
        r"make a model of 12\.\d billion .*, 206\.\d GB with gradients and optimizer; .* has .* GiB: take a smaller"
    )
    assert_fails(script, run, message, *flags(**settings | {"n_embd": 1 << 15, "n_layer": 1}))


def test_block_larger_than_the_data(chars, run, script):
    settings = TINY | {"dataset": chars, "out_dir": run, "block_size": 10**12}
    assert_fails(script, run, "block_size=10+ needs 10+1 tokens in a row.*try --block_size=", *flags(**settings))


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a file size limit")
def test_full_disk_while_logging_does_not_end_the_run(chars, tmp_path):
    settings = TINY | {"dataset": chars, "out_dir": tmp_path / "run", "max_iters": 500, "eval_interval": 500}
    # Room for a checkpoint, not for all of log.jsonl.
    limited = f"trap '' XFSZ; ulimit -f 150; exec {sys.executable} train.py {' '.join(flags(**settings))}"
    done = subprocess.run(["bash", "-c", limited], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert re.match(r"cannot write .*log\.jsonl: .*; the run goes on, and tries again", line)
    assert "iter 499: loss" in done.stdout
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert log.endswith("}\n")
    assert 300 < log.count('"event": "iter"') < 500


def test_no_network(chars, tmp_path, run, script, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    message = "init_from=gpt2: .* cannot be downloaded .*connect once"
    assert_fails(script, run, message, "--init_from=gpt2", f"--dataset={chars}")
    assert_fails(script, run, message, "--init_from=gpt2", path="sample.py")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    text = tmp_path / "text.txt"
    text.write_text("some text " * 100)
    prepare = [text, "--name", tmp_path / "own", "--tokenizer", "r50k_base"]
    assert_fails(script, run, "'r50k_base' are not cached.*connect once", *prepare, path="data/text/prepare.py")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a file size limit")
def test_full_disk_while_training(chars, tmp_path, run):
    before = snapshot(run)
    settings: dict[str, Any] = {"init_from": "resume", "out_dir": run, "max_iters": 12, "device": "cpu"}
    settings["resume_changed"] = True  # the schedule
    # Room for log.jsonl, not for a checkpoint.
    limited = f"trap '' XFSZ; ulimit -f 20; exec {sys.executable} train.py {' '.join(flags(**settings))}"
    done = subprocess.run(["bash", "-c", limited], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(r"error: cannot write .*ckpt\.pt: .*; free some disk space .*; the checkpoint before it", line)
    # It went on after the first failure.
    assert len(re.findall("^cannot write .*the run goes on and tries again at the next save$", done.stdout, re.M)) == 2
    assert "iter 11: loss" in done.stdout
    after = snapshot(run)
    assert after.keys() == before.keys()
    assert after["ckpt.pt"] == before["ckpt.pt"]


def test_folder_that_cannot_be_written(chars, tmp_path, run, script):
    (tmp_path / "file").write_text("")
    settings = TINY | {"dataset": chars, "out_dir": tmp_path / "file"}
    message = f"out_dir={tmp_path}/file cannot be written: .*; choose another --out_dir"
    assert_fails(script, run, message, *flags(**settings))
