"""data/fineweb_edu/prepare.py: real files through the real `datasets`; processes that are killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, events, flags, needs_bpe
from fineweb import (
    PREPARE,
    REAL_DOCUMENTS,
    SMALL,
    Script,
    as_bytes,
    contents,
    copied,
    fails,
    harm,
    tokens,
    write_documents,
)

from data.describe import describe
from data.splits import Split
from data.tokenizer import BytesTokenizer

# ---- what is written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_tokens_are_the_documents_each_after_an_end_of_text(tmp_path, script: Script, documents, name):
    half = len(documents) // 2
    write_documents(tmp_path / "in" / "0" / name, documents[:half])
    write_documents(tmp_path / "in" / "1" / name, [*documents[half:], "", None])
    done = script(PREPARE, "--source", tmp_path / "in", *SMALL, "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(documents)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    sizes = [entry["tokens"] for entry in meta["files"].values()]
    assert sizes[:-1] == [50_000] + [250_000] * (len(sizes) - 2)
    assert sum(entry["documents"] for entry in meta["files"].values()) == len(documents)
    names = [f"train_{n:06}.bin" for n in range(1, len(sizes))]
    assert sorted(p.name for p in (tmp_path / "out").glob("[!.]*")) == ["meta.json", *names, "val_000000.bin"]


def test_text_file_is_one_document(tmp_path, script: Script, documents):
    (tmp_path / "in").mkdir()
    texts = ["  \n\n".join(documents), "\n\n\n" + documents[0], "no line end"]
    for i, text in enumerate(texts):
        (tmp_path / "in" / f"{i}.txt").write_text(text, encoding="utf-8", newline="")
    done = script(PREPARE, "--source", tmp_path / "in", *SMALL, "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(texts)


@needs_bpe
@pytest.mark.parametrize("name", ["a.parquet", pytest.param("a.txt", marks=pytest.mark.slow)])
def test_gpt2_tokens_are_tiktokens_and_special_strings_are_text(tmp_path, script: Script, documents, name):
    import tiktoken

    if name == "a.txt":
        documents = ["".join(documents) + "a\n \n  b\n" * 400_000]
        (tmp_path / name).write_text(documents[0], encoding="utf-8", newline="")
    else:
        write_documents(tmp_path / name, documents)
    done = script(PREPARE, "--source", tmp_path / name, "--shard_tokens=1e5", "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    encoding = tiktoken.get_encoding("gpt2")
    expected = [[encoding.eot_token, *encoding.encode_ordinary(text)] for text in documents]
    assert tokens(tmp_path / "out").tolist() == [token for ids in expected for token in ids]


@needs_bpe
@pytest.mark.skipif(not REAL_DOCUMENTS.is_dir(), reason="FineWeb-Edu's sample documents are not at hand")
def test_real_documents(tmp_path, script: Script):
    done = script(PREPARE, "--source", REAL_DOCUMENTS, "--shard_tokens=1e6", "--out", tmp_path)
    assert done.code == 0, done.err
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert sum(entry["documents"] for entry in meta["files"].values()) == 746
    assert sum(entry["tokens"] for entry in meta["files"].values()) == len(tokens(tmp_path))
    assert np.count_nonzero(tokens(tmp_path) == 50256) == 746


def test_number_of_threads_changes_nothing(tmp_path, script: Script, documents):
    write_documents(tmp_path / "a.parquet", documents)
    for n in (1, 5):
        done = script(
            PREPARE, "--source", tmp_path / "a.parquet", *SMALL, f"--num_proc={n}", "--out", tmp_path / str(n)
        )
        assert done.code == 0, done.err
    assert contents(tmp_path / "1") == contents(tmp_path / "5")


def test_tokens_stop_early_and_can_be_raised_later(tmp_path, script: Script, documents):
    write_documents(tmp_path / "a.parquet", documents)
    prepare = (PREPARE, "--source", tmp_path / "a.parquet", *SMALL, "--out")
    assert script(*prepare, tmp_path / "all").code == 0
    assert script(*prepare, tmp_path / "few", "--tokens=3e5").code == 0
    assert len(tokens(tmp_path / "few")) == 350_000
    assert "already prepared" in script(*prepare, tmp_path / "few", "--tokens=3e5").out
    assert "already prepared" in script(*prepare, tmp_path / "few", "--tokens=1e5").out
    assert script(*prepare, tmp_path / "few").code == 0
    assert contents(tmp_path / "few") == contents(tmp_path / "all")


# ---- stopped and started again -------------------------------------------------------------------------------


def test_second_run_verifies_and_changes_nothing(tmp_path, script: Script, prepared):
    source, out = prepared
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.suffix}
    done = script(PREPARE, "--source", source, *SMALL, "--out", out)
    assert done.code == 0
    assert "already prepared" in done.out
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.suffix} == before


@pytest.mark.parametrize("harm", ["byte", "cut", "header", "gone"])
def test_harmed_shard_is_made_again_and_no_other(tmp_path, script: Script, prepared, harm):
    source, out = prepared
    for name, original in contents(out).items():
        (tmp_path / name).write_bytes(original)
    path = tmp_path / "train_000002.bin"
    content = bytearray(path.read_bytes())
    if harm == "byte":
        content[5000] ^= 1
    elif harm == "header":
        content[8] ^= 1
    path.write_bytes(content[:7000] if harm == "cut" else bytes(content))
    if harm == "gone":
        path.unlink()
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.bin") if p != path}
    done = script(PREPARE, "--source", source, *SMALL, "--out", tmp_path)
    assert done.code == 0, done.err
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    assert contents(tmp_path) == contents(out)


def test_source_that_has_changed_is_noticed_and_nothing_overwritten(tmp_path, script: Script, documents):
    source = write_documents(tmp_path / "a.jsonl", documents)
    prepare = (PREPARE, "--source", source, *SMALL, "--out", tmp_path / "out")
    assert script(*prepare).code == 0
    size = source.stat().st_size
    write_documents(source, documents[::-1])
    assert source.stat().st_size == size
    for worse in (Path.unlink, harm):
        worse(tmp_path / "out" / "train_000003.bin")
        before = contents(tmp_path / "out")
        for _ in range(2):
            assert "train_000003.bin would come out unlike before" in fails(script(*prepare))
            assert contents(tmp_path / "out") == before
        (tmp_path / "out" / "train_000003.bin").touch()


def test_fewer_tokens_than_before_leave_the_shards_that_are_there_alone(tmp_path, script: Script, prepared):
    prepare = copied(prepared, tmp_path)
    assert "already prepared" in script(*prepare, "--tokens=250_000").out
    for n in (2, 3):  # one that is planned and one after it: training reads both
        harm(tmp_path / f"train_00000{n}.bin")
    done = script(*prepare, "--tokens=300_000")
    assert done.code == 0, done.err
    assert contents(tmp_path) == contents(prepared[1])
    (tmp_path / "train_000003.bin").unlink()  # no longer wanted
    (tmp_path / "train_000002.bin").unlink()
    assert script(*prepare, "--tokens=300_000").code == 0
    assert (tmp_path / "train_000002.bin").read_bytes() == contents(prepared[1])["train_000002.bin"]
    assert not (tmp_path / "train_000003.bin").exists()


def test_encoder_that_fails_leaves_no_hole(tmp_path, script: Script, prepared, monkeypatch):
    encode_batch = BytesTokenizer.encode_batch
    calls = itertools.count()

    def failing(self, texts):
        if next(calls) == 3:
            raise ValueError("out of luck")
        return encode_batch(self, texts)

    prepare = (PREPARE, "--source", prepared[0], *SMALL, "--out", tmp_path)
    monkeypatch.setattr(BytesTokenizer, "encode_batch", failing)
    assert "out of luck" in fails(script(*prepare))
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    assert script(*prepare).code == 0
    assert contents(tmp_path) == contents(prepared[1])


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_at_any_point_and_run_again_the_files_are_the_same(tmp_path, documents):
    encoding = "gpt2" if "TIKTOKEN_CACHE_DIR" in os.environ else "bytes"
    for i in range(4):
        write_documents(tmp_path / "in" / f"{i}.parquet", documents * 2)
    options = ("--source", tmp_path / "in", f"--encoding={encoding}", "--val_tokens=5e4", "--shard_tokens=5e4", "--out")
    command = [sys.executable, PREPARE, *map(str, options)]
    subprocess.run([*command, tmp_path / "whole"], cwd=ROOT, check=True, capture_output=True)
    n_shards = len(list((tmp_path / "whole").glob("*.bin")))
    draw = random.Random(os.getpid())
    kills = 0
    meta = tmp_path / "killed" / "meta.json"
    while True:
        finished = json.loads(meta.read_text())["files"] if meta.exists() else {}
        before = {name: (meta.parent / name).stat().st_mtime_ns for name in finished}
        process = subprocess.Popen([*command, meta.parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        for _ in range(draw.randint(0, n_shards // 10)):
            process.stdout.readline()
        time.sleep(draw.random() * 0.02)
        if kills < 6:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.stdout.read()
        assert {name: (meta.parent / name).stat().st_mtime_ns for name in before} == before
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert kills == 6
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a file size limit")
def test_full_disk_keeps_finished_shards_and_the_run_goes_on_later(tmp_path, prepared):
    source, out = prepared
    command = f"{sys.executable} {PREPARE} --source {source} {' '.join(SMALL)} --out {tmp_path}"
    done = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; ulimit -f 300; {command}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "cannot write" in line
    assert "run the same command again" in line
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"val_000000.bin", "meta.json"}
    subprocess.run(command, shell=True, cwd=ROOT, check=True, capture_output=True)
    assert contents(tmp_path) == contents(out)


def test_disk_is_looked_at_before_anything_is_written(tmp_path, script: Script, prepared, monkeypatch):
    usage = type("Usage", (), {"free": 500_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    line = fails(script(PREPARE, "--source", prepared[0], "--encoding=bytes", "--out", tmp_path / "out"))
    assert "more, and 0.5 MB are free" in line
    assert not list((tmp_path / "out").glob("[!.]*"))
    monkeypatch.setattr(usage, "free", 10_000_000_000)
    line = fails(script(PREPARE, "--encoding=bytes", "--out", tmp_path / "out"))
    assert "needs about 20.0 GB more, and 10.0 GB are free" in line
    assert "--tokens=4.9e+09" in line


def test_two_at_once_do_not_mix(tmp_path, script: Script, prepared):
    from filelock import FileLock

    with FileLock(tmp_path / ".lock"):
        assert "another prepare.py is at work" in fails(
            script(PREPARE, "--source", prepared[0], *SMALL, "--out", tmp_path)
        )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's record of peak memory")
def test_memory_stays_far_below_what_is_read_and_written(tmp_path, documents):
    texts = [f"{i} {text}" for i in range(160) for text in documents]
    source = write_documents(tmp_path / "big.parquet", texts)
    code = (
        "import sys; from data.fineweb_edu.prepare import main, arguments; main(arguments(sys.argv[1:]));"
        "print(open('/proc/self/status').read())"
    )
    command = [sys.executable, "-c", code, "--source", source, "--encoding=bytes", "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    peak_kb = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("VmHWM"))
    read = sum(map(len, texts))
    written = 2 * len(tokens(tmp_path / "out"))
    assert min(read, written / 2) > 250e6
    assert int(peak_kb) * 1024 < 650e6  # Python, pyarrow and `datasets` take 200 MB of it


# ---- used ----------------------------------------------------------------------------------------------------


def test_description_of_a_folder(tmp_path, prepared, capsys):
    source, out = prepared
    assert describe(out)
    said = capsys.readouterr().out
    files = list(out.glob("*.bin"))
    assert f"a.parquet ({source.stat().st_size:,} bytes)" in said
    assert "tokenizer: bytes, vocabulary of 256" in said
    assert f"checksums: {len(files)} files compared with meta.json; faults: 0" in said
    assert f"{len(files) - 1} files of" in said
    assert "val begins: '" in said
    for name, content in contents(out).items():
        (tmp_path / name).write_bytes(content.replace(b"e\0", b"f\0") if name == "train_000003.bin" else content)
    (tmp_path / "train_000002.bin").unlink()
    assert not describe(tmp_path)
    said = capsys.readouterr().out
    assert "train_000002.bin is missing" in said
    assert "train_000003.bin is not what was written" in said
    done = subprocess.run([sys.executable, "-m", "data.describe", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1


def test_what_was_prepared_trains(tmp_path, script: Script, prepared):
    out = prepared[1]
    small: dict[str, Any] = {
        "dataset": out,
        "out_dir": tmp_path,
        "device": "cpu",
        "dtype": "float32",
        "compile": False,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "block_size": 64,
        "batch_size": 2,
        "gradient_accumulation_steps": 4,
        "align_documents": True,
        "max_iters": 4,
        "warmup_iters": 1,
        "learning_rate": 1e-2,
        "eval_interval": 2,
        "eval_tokens": 512,
    }
    done = script("train.py", "config/train_fineweb_125m.py", *flags(**small))
    assert done.code == 0, done.err
    losses = [e["val_loss"] for e in events(tmp_path, "eval")]
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="block_size"):
        Split(out, "train", 300_000, 256)
