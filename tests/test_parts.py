"""data/fineweb_edu/prepare.py --part and --merge: a part of the source files by itself."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import assert_refused, shell
from fake_hub import SHA, serve
from fineweb import PREPARE, Script, as_bytes, contents, fails, harm, made, started, write_documents

from data.splits import Split
from data.token_files import read_record, read_tokens
from data.verify import Verification
from deskgpt.run import lock

pytestmark = pytest.mark.slow

SMALL = ("--tokenizer=bytes", "--shard_tokens=40_000", "--val_tokens=50_000")
FILES = ["a.parquet", "b.jsonl", "c.parquet", "d.txt", "e.jsonl.gz", "f.parquet", "g.jsonl"]


@pytest.fixture(scope="session")
def texts(documents) -> list[list[str]]:
    """The documents of each of FILES; the third has none."""
    short = documents[1:]  # without the one that would be nearly all of val
    share = len(short) // 6
    groups = [short[i * share : (i + 1) * share] for i in range(6)]
    return [*groups[:2], [], ["".join(groups[2])], *groups[3:]]


@pytest.fixture(scope="session")
def source(texts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for name, documents in zip(FILES, texts, strict=True):
        if name.endswith(".txt"):
            (folder / name).write_text(documents[0], encoding="utf-8", newline="")
        else:
            write_documents(folder / name, documents)
    return folder


@pytest.fixture(scope="session")
def whole(source, tmp_path_factory) -> Path:
    """Three parts of source, made undisturbed."""
    out = tmp_path_factory.mktemp("whole")
    for option in ("--part=0/3", "--part=1/3", "--part=2/3", "--merge"):
        made("--source", source, *SMALL, option, "--out", out)
    return out


def everything(folder: Path) -> dict[str, bytes]:
    """Shards, parts/*.json and meta.json."""
    files = {path.name: path.read_bytes() for path in folder.glob("[!.]*") if path.is_file()}
    return files | {f"parts/{name}": content for name, content in contents(folder / "parts").items()}


def split_tokens(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([read_tokens(path) for path in sorted(folder.glob(f"{split}_*.bin"))])


# ---- what is written -----------------------------------------------------------------------------------------


def test_parts_are_every_third_file_and_the_first_begins_with_val(whole, texts):
    for number in range(3):
        of_part = [read_tokens(path) for path in sorted(whole.glob(f"*_{number:06}_*.bin"), key=lambda p: p.stem[-6:])]
        expected = as_bytes([*itertools.chain(*texts[number::3])])
        assert np.concatenate(of_part).astype(np.uint8).tobytes() == expected
    assert len(split_tokens(whole, "val")) == 50_000
    meta = read_record(whole)
    assert set(meta["files"]) == {path.name for path in whole.glob("*.bin")}
    assert sum(entry["documents"] for entry in meta["files"].values()) == sum(
        bool(t) for of_file in texts for t in of_file
    )
    splits = [Split(whole, split, 64, 256) for split in ("train", "val")]
    assert Verification(whole, splits).state.startswith("checksums verified")
    assert splits[0].tokens == len(split_tokens(whole, "train"))


def test_parts_share_the_tokens_which_can_be_raised_later_and_any_order_makes_the_same_bytes(tmp_path, source, whole):
    options = ("--source", source, *SMALL, "--out", tmp_path)
    for more, parts in (("--tokens=120_001", "201"), ("--tokens=1e9", "120")):
        for number in parts:
            made(*options, more, f"--part={number}/3")
        made(*options, more, "--merge")
        if parts == "201":
            assert len(split_tokens(tmp_path, "train")) == 3 * 40_001
    assert everything(tmp_path) == everything(whole)


def test_what_is_missing_or_harmed_is_named_with_the_command_that_makes_it(tmp_path, script: Script, source, whole):
    prepare = (PREPARE, "--source", source, *SMALL, "--out", tmp_path)
    fails(script(*prepare, "--merge"), tmp_path, "--part=0/N")
    assert script(*prepare, "--part=0/3").code == 0
    fails(script(*prepare, "--merge"), "2 of 3", "--part=1/3")
    with lock.if_free(tmp_path / "parts", ".000001") as is_free:  # as another process holds it
        assert is_free
        fails(script(*prepare, "--part=1/3"), tmp_path, "wait")
    assert script(*prepare, "--part=2/3").code == 0
    for worse in (harm, Path.unlink):
        assert script(*prepare, "--part=1/3").code == 0
        worse(tmp_path / "train_000001_000000.bin")
        (tmp_path / "train_000001_000000.bin.1-a.tmp").touch()
        if worse is Path.unlink:
            fails(script(*prepare, "--merge"), "1 of 3", "--part=1/3")
        assert script(*prepare, "--part=1/3").code == 0
    assert script(*prepare, "--merge").code == 0
    assert everything(tmp_path) == everything(whole)  # the leftover is gone too


def test_others_settings_and_other_layouts_are_refused_and_nothing_changes(tmp_path, script: Script, texts):
    folder = tmp_path / "in"
    for i in range(2):
        write_documents(folder / f"{i}.jsonl", texts[i][:50])
    parts = (PREPARE, "--tokenizer=bytes", "--source", folder, "--val_tokens=1e4", "--out", tmp_path / "out")
    assert script(*parts, "--shard_tokens=1e4", "--part=0/2").code == 0
    before = everything(tmp_path / "out")
    for option in ("--part=1/2", "--merge"):
        fails(script(*parts, "--shard_tokens=2e4", option), "shard_tokens", 10000, 20000, "--out")
        fails(script(*parts, "--shard_tokens=1e4", "--text_column=id", option), "text_column", "id", "--out")
    for other in ((), ("--part=1/3",)):
        fails(script(*parts, "--shard_tokens=1e4", *other), "parts 2", "--out")
    assert everything(tmp_path / "out") == before
    assert script(*parts[:-1], tmp_path / "sequence").code == 0
    fails(script(*parts[:-1], tmp_path / "sequence", "--part=0/2"), tmp_path / "sequence", "parts 1", "--out")
    (tmp_path / "out" / "parts" / "000000.json").write_text('{"file": "0.jsonl", "job": "", "files": {}}')
    fails(script(*parts, "--shard_tokens=1e4", "--part=1/2"), "000000.json", "--out")  # of an older version


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--part=0/2 --tokenizer=bpe", ["--tokenizer bpe", "--tokenizer SMALL"]),
        ("--merge --pretokenized", ["--merge", "--pretokenized"]),
    ],
)
def test_options_that_parts_cannot_have_are_usage_errors(tmp_path, script: Script, options, named):
    assert_refused(script(PREPARE, *options.split(), "--out", tmp_path / "out"), *named)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_workers_leave_the_same_bytes(tmp_path, source):
    options = ("--tokenizer=bytes", "--shard_tokens=20_000", "--val_tokens=50_000", "--source", source)
    for option in ("--part=0/3", "--part=1/3", "--part=2/3", "--merge"):
        made(*options, option, "--out", tmp_path / "whole")
    n_shards = len(list((tmp_path / "whole").glob("*.bin")))
    out = tmp_path / "killed"
    draw = random.Random(os.getpid())
    killed = 0
    for kills in (3, 2, 0):
        workers = [started(*options, "--out", out, f"--part={i}/3") for i in range(3)]
        until = len(list(out.glob("*.bin"))) + draw.randint(0, n_shards // 3)  # shards, when the first one is killed
        while kills and len(list(out.glob("*.bin"))) < until and any(worker.is_alive() for worker in workers):
            time.sleep(0.002)
        for worker in draw.sample(workers, kills):
            time.sleep(draw.random() * 0.002)
            worker.kill()
        for worker in workers:
            worker.join()
            assert worker.exitcode in (0, -signal.SIGKILL)
            killed += worker.exitcode != 0
    assert killed > 0  # on a fast machine some end before they are killed
    made(*options, "--merge", "--out", out)
    assert everything(out) == everything(tmp_path / "whole")


# ---- from the hub -------------------------------------------------------------------------------------------


def test_parts_of_the_hubs_files_have_one_revision(tmp_path, texts):
    repo = tmp_path / "hub" / "HuggingFaceFW" / "fineweb-edu"
    for i in range(3):
        write_documents(repo / "sample" / "10BT" / f"{i:03}_00000.parquet", texts[-1 - i])
    config = "configs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n"
    (repo / "README.md").write_text(f"---\n{config}---\n")
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    env |= {"HF_HOME": str(tmp_path / "home"), "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with serve(tmp_path / "hub") as hub:
        env |= {"HF_ENDPOINT": hub.url}
        for option in ("--part=1/2", "--part=0/2", "--merge"):
            done = shell("python", PREPARE, *SMALL, option, "--out", tmp_path / "out", env=env)
            assert done.returncode == 0, done.stderr
    meta = read_record(tmp_path / "out")
    assert (meta["revision"], meta["parts"]) == (SHA, 2)
    expected = as_bytes(texts[-2])
    assert split_tokens(tmp_path / "out", "train").astype(np.uint8).tobytes().endswith(expected)
