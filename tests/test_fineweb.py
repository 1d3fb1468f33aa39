"""data/fineweb_edu/prepare.py: real files through the real `datasets`; processes that are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, needs_bpe, shell
from fineweb import (
    PREPARE,
    SMALL,
    Script,
    as_bytes,
    contents,
    copied,
    fails,
    harm,
    made,
    no_file_larger_than,
    started,
    tokens,
    write_documents,
)

from data.describe import describe

pytestmark = pytest.mark.slow

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


def test_text_file_is_one_document_or_several_with_lines_of_end_of_text_between(tmp_path, script: Script, documents):
    (tmp_path / "in").mkdir()
    texts = ["  \n\n".join(documents), "\n\n\n" + documents[0], "no line end"]
    for i, text in enumerate(texts):
        (tmp_path / "in" / f"{i}.txt").write_text(text, encoding="utf-8", newline="")
    done = script(PREPARE, "--source", tmp_path / "in", *SMALL, "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    parts = [part for text in texts for part in re.split(r"(?m)^<\|endoftext\|>\n?", text)]
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(parts)


@needs_bpe
@pytest.mark.parametrize("name", ["a.parquet", pytest.param("a.txt")])
def test_gpt2_tokens_are_tiktokens_and_special_strings_are_text(tmp_path, script: Script, documents, name):
    import tiktoken

    if name == "a.txt":
        documents = ["".join(documents) + "a\n \n  b\n" * 150_000]
        (tmp_path / name).write_text(documents[0], encoding="utf-8", newline="")
    else:
        write_documents(tmp_path / name, documents)
    done = script(PREPARE, "--source", tmp_path / name, "--shard_tokens=1e5", "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    encoding = tiktoken.get_encoding("gpt2")
    expected = [[encoding.eot_token, *encoding.encode_ordinary(text)] for text in documents]
    assert tokens(tmp_path / "out").tolist() == [token for ids in expected for token in ids]


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


@pytest.mark.parametrize("harm", ["byte", "cut", "header", "gone"])
def test_harmed_shard_is_made_again_and_no_other(tmp_path, script: Script, prepared, harm):
    prepare = copied(prepared, tmp_path)
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
    done = script(*prepare)
    assert done.code == 0, done.err
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before
    assert contents(tmp_path) == contents(prepared[1])


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
        fails(script(*prepare), "train_000003.bin", "another --out")
        assert contents(tmp_path / "out") == before
        (tmp_path / "out" / "train_000003.bin").touch()


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_at_any_point_and_run_again_the_files_are_the_same(tmp_path, documents):
    write_documents(tmp_path / "in" / "a.parquet", documents)
    write_documents(tmp_path / "in" / "b.jsonl", documents)
    options = ("--source", tmp_path / "in", "--tokenizer=bytes", "--val_tokens=4e4", "--shard_tokens=4e4", "--out")
    made(*options, tmp_path / "whole")
    n_shards = len(contents(tmp_path / "whole"))
    draw = random.Random(os.getpid())
    out = tmp_path / "killed"
    meta = out / "meta.json"
    killed = 0
    for kill in (True, True, True, True, False):
        finished = json.loads(meta.read_text())["files"] if meta.exists() else {}
        before = {name: (out / name).stat().st_mtime_ns for name in finished}
        until = len(before) + draw.randint(0, n_shards // 4)
        process = started(*options, out)
        while kill and process.is_alive() and len(list(out.glob("*.bin"))) < until:
            time.sleep(0.001)
        if kill:
            time.sleep(draw.random() * 0.002)
            process.kill()
        process.join()
        assert process.exitcode == 0 or (kill and process.exitcode == -signal.SIGKILL)
        killed += process.exitcode != 0
        assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert killed > 0  # on a fast machine some end before they are killed
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.skipif(os.name == "nt", reason="needs a file size limit")
def test_full_disk_keeps_finished_shards_and_the_run_goes_on_later(tmp_path, script: Script, prepared):
    prepare = (PREPARE, "--source", prepared[0], *SMALL, "--out", tmp_path)
    with no_file_larger_than(300_000):
        done = script(*prepare)
    fails(done, "train_000001.bin", "run the same command again")
    assert {p.name for p in tmp_path.glob("[!.]*")} == {"val_000000.bin", "meta.json"}
    assert script(*prepare).code == 0
    assert contents(tmp_path) == contents(prepared[1])


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's record of peak memory")
def test_memory_stays_far_below_what_is_read_and_written(tmp_path, documents):
    texts = [f"{i} {text}" for i in range(60) for text in documents]
    source = write_documents(tmp_path / "big.parquet", texts)
    code = (
        "import sys; from data.fineweb_edu.prepare import main, arguments; main(arguments(sys.argv[1:]));"
        "print(open('/proc/self/status').read())"
    )
    command = [sys.executable, "-c", code, "--source", source, "--tokenizer=bytes", "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    peak_kb = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("VmHWM"))
    assert min(sum(map(len, texts)), len(tokens(tmp_path / "out"))) > 100e6
    assert int(peak_kb) * 1024 < 550e6  # Python, pyarrow and `datasets` take 200 MB of it


# ---- used ----------------------------------------------------------------------------------------------------


def test_description_of_a_folder(tmp_path, prepared, capsys):
    source, out = prepared
    assert describe(out)
    said = capsys.readouterr().out
    files = list(out.glob("*.bin"))
    assert f"a.parquet ({source.stat().st_size:,} bytes)" in said
    assert "tokenizer: bytes, vocabulary of 256" in said
    assert f"{len(files)} files listed in meta.json; faults: 0" in said
    assert "it begins: " in said
    copied(prepared, tmp_path)
    harm(tmp_path / "train_000003.bin")
    (tmp_path / "train_000002.bin").unlink()
    done = shell("python", "-m", "data.describe", tmp_path)
    assert done.returncode == 1
    faults = [line for line in done.stdout.splitlines() if "prepare the data again" in line]
    assert len(faults) == 2
    for name in ("train_000002.bin", "train_000003.bin"):
        assert sum(name in line for line in faults) == 1
