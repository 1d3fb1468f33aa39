"""data/fineweb_edu/prepare.py makes the same bytes however it is stopped, in one sequence or in parts."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, contents
from fineweb import PREPARE, SMALL, UNTIL_RENAME, Script, as_bytes, fails, made, tokens, write_documents

from data.dataset import Checksums
from data.meta_files import read_record
from data.splits import Split
from deskgpt.system import files


def test_small_files_share_a_shard(tmp_path):
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 100)
    made("--source", tmp_path, "--tokenizer=bytes", "--shard_bytes=250", "--val_tokens=10", "--out", tmp_path / "out")
    assert [entry["tokens"] for entry in read_record(tmp_path / "out")["files"].values()] == [293, 303, 101, 10]
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes([f"{i}" * 100 for i in range(7)])


# ---- stopped, harmed and started again -----------------------------------------------------------------------


def test_source_that_has_changed_is_noticed(tmp_path, script: Script, documents):
    source = write_documents(tmp_path / "a.jsonl", documents)
    prepare = (PREPARE, "--source", source, *SMALL, "--out", tmp_path / "out")
    assert script(*prepare).code == 0
    write_documents(source, documents[::-1])  # which has the same size
    (tmp_path / "out" / "train_000000.bin").unlink()
    for _ in range(2):
        fails(script(*prepare), "train_000000.bin", "another --out")


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
    assert int(peak_kb) * 1024 < 550e6  # Python and pyarrow take 150 MB of it


# ---- in parts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def texts(documents) -> list[list[str]]:
    """The documents of each of seven files; the third has none."""
    short = documents[1:]  # without the one that would be nearly all of val
    groups = [short[i::6] for i in range(6)]
    return [*groups[:2], [], ["".join(groups[2])], *groups[3:]]


@pytest.fixture(scope="session")
def source(texts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for name, of_file in zip("abcdefg", texts, strict=True):
        write_documents(folder / (f"{name}.parquet" if name in "acf" else f"{name}.jsonl.zst"), of_file)
    return folder


@pytest.fixture(scope="session")
def undisturbed(source, tmp_path_factory) -> Path:
    """Three parts of source, made undisturbed."""
    out = tmp_path_factory.mktemp("undisturbed")
    for number in range(3):
        made("--source", source, *SMALL, f"--part={number}/3", "--out", out)
    return out


def test_parts_are_every_third_file_and_list_all_of_them(undisturbed, texts, source, tmp_path):
    assert tokens(undisturbed).astype(np.uint8).tobytes() == as_bytes([*itertools.chain(*texts)])
    files = read_record(undisturbed)["files"]
    assert list(files) == [*(f"train_{n:06}.bin" for n in (0, 1, 3, 4, 5, 6)), "val_000000.bin"]
    assert sorted(path.name for path in undisturbed.glob("[!.]*")) == ["meta.json", *files]
    splits = [Split(undisturbed, split, 64, 256) for split in ("train", "val")]
    assert Checksums(undisturbed, splits).state.startswith("checksums verified")
    assert splits[1].tokens == 50_000
    made("--source", source, *SMALL, "--out", tmp_path)
    assert contents(tmp_path) == contents(undisturbed)


@pytest.mark.parametrize("parts", ["", "201"])
def test_tokens_are_shared_out_and_can_be_raised_later(tmp_path, source, undisturbed, parts):
    for tokens_, expected in (("--tokens=120_001", 120_001 + 2 * bool(parts)), ("--tokens=1e9", None)):
        for part in [f"--part={number}/3" for number in parts] or [""]:
            made("--source", source, *SMALL, tokens_, *filter(None, [part]), "--out", tmp_path)
        n_made = sum(entry["tokens"] for entry in read_record(tmp_path)["files"].values())
        assert expected is None or n_made == 50_000 + expected
    assert contents(tmp_path) == contents(undisturbed)


def test_parts_that_are_missing_are_printed_and_harmed_shards_made_again(tmp_path, script: Script, source, undisturbed):
    prepare = (PREPARE, "--source", source, *SMALL, "--out", tmp_path)
    assert "2 of 3 parts are still to be made, --part=1/3" in script(*prepare, "--part=0/3").out
    with files.if_free(tmp_path, ".part_1_3") as is_free:  # as another process holds it
        assert is_free
        fails(script(*prepare, "--part=1/3"), tmp_path, "wait")
    assert "--part=2/3" in script(*prepare, "--part=1/3").out
    assert "train and" in script(*prepare, "--part=2/3").out
    (tmp_path / "train_000000.bin").unlink()
    os.truncate(tmp_path / "train_000003.bin", 1000)
    (tmp_path / "train_000004.bin").write_bytes(b"harmed")
    (tmp_path / "train_000004.bin.1-a.tmp").touch()  # left by a kill
    others = [path for path in tmp_path.glob("train*.bin") if path.name[-5] in "156"]
    before = [path.stat().st_mtime_ns for path in others]
    assert script(*prepare).code == 0
    assert contents(tmp_path) == contents(undisturbed)
    assert [path.stat().st_mtime_ns for path in others] == before


def test_other_settings_are_errors_and_change_nothing(tmp_path, script: Script, texts):
    for i in range(2):
        write_documents(tmp_path / "in" / f"{i}.jsonl", texts[i][:50])
    prepare = (PREPARE, "--tokenizer=bytes", "--source", tmp_path / "in", "--val_tokens=1e4", "--out", tmp_path / "out")
    assert script(*prepare, "--shard_bytes=1", "--part=0/2").code == 0
    before = contents(tmp_path / "out")
    for options in (["--text_column=id"], ["--shard_bytes=1e9"], ["--val_tokens=2e4"]):
        fails(script(*prepare, "--shard_bytes=1", *options), "was made with", "--out")
    fails(script(*prepare, "--shard_bytes=1", "--part=2/3"), "--part=2/3", "2 shards")
    assert contents(tmp_path / "out") == before


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the quick Python of the tests is for POSIX")
@pytest.mark.parametrize("parts", [[""], ["--part=0/2", "--part=1/2"]], ids=["one sequence", "two parts"])
def test_killed_before_or_after_any_rename_and_run_again_the_files_are_the_same(tmp_path, python, source, parts):
    options = (*SMALL, "--source", source)
    commands = [(*options, *filter(None, [part])) for part in parts]
    for command in commands:
        made(*command, "--out", tmp_path / "undisturbed")
    out = tmp_path / "killed"
    renames = itertools.cycle(itertools.product("1234", ("before", "after")))
    n_killed = 0
    for command in commands:
        ended = False
        while not ended:
            finished = read_record(out).get("files", {})
            before = {name: (out / name).stat().st_mtime_ns for name in finished}
            code = f"{UNTIL_RENAME}from data.fineweb_edu.prepare import *; main(arguments(options))"
            words = [python, "-c", code, *next(renames), *command, "--out", out]
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
            assert done.stderr == ""
            assert {name: (out / name).stat().st_mtime_ns for name in before} == before
            ended = done.returncode == 0
            n_killed += not ended
    assert n_killed > 8
    assert contents(out) == contents(tmp_path / "undisturbed")
