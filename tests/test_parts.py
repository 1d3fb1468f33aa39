"""data/fineweb_edu/prepare.py --part, --workers and --merge, and cluster.py: each source file by itself."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_refused, shell
from fake_hub import SHA, serve
from fineweb import PREPARE, Script, as_bytes, contents, fails, harm, made, started, write_documents

from data.describe import describe
from data.shards import Entry
from data.splits import Split
from data.token_files import read_record, read_tokens
from data.verify import Verification
from deskgpt.run import lock

CLUSTER = "data/fineweb_edu/cluster.py"
SMALL = ("--encoding=bytes", "--shard_tokens=40_000", "--val_tokens=50_000")
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
    """What one worker makes of source, undisturbed."""
    out = tmp_path_factory.mktemp("whole")
    made("--source", source, *SMALL, "--part=0/1", "--out", out)
    made("--source", source, *SMALL, "--merge", "--out", out)
    return out


def everything(folder: Path) -> dict[str, bytes]:
    """Shards, parts/*.json and meta.json."""
    files = {path.name: path.read_bytes() for path in folder.glob("[!.]*") if path.is_file()}
    return files | {f"parts/{name}": content for name, content in contents(folder / "parts").items()}


def split_tokens(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([read_tokens(path) for path in sorted(folder.glob(f"{split}_*.bin"))])


# ---- what is written -----------------------------------------------------------------------------------------


def test_names_sort_in_file_order_and_no_document_is_in_both_splits(whole, texts):
    val = split_tokens(whole, "val").astype(np.uint8).tobytes()
    train = split_tokens(whole, "train").astype(np.uint8).tobytes()
    assert len(val) == 50_000
    assert as_bytes(texts[0]).startswith(val)
    of_val = next(n for n in itertools.count() if len(as_bytes(texts[0][:n])) >= len(val))
    assert len(as_bytes(texts[0][:of_val])) > len(val)  # it ends amid a document, whose rest is nowhere
    assert train == as_bytes([*texts[0][of_val:], *itertools.chain(*texts[1:])])
    meta = read_record(whole)
    assert list(meta["files"]) == [*sorted(meta["files"])[-2:], *sorted(meta["files"])[:-2]]
    assert {int(name.split("_")[1]) for name in meta["files"]} == {0, 1, 3, 4, 5, 6}
    listed: dict[str, Entry] = {}
    for path in sorted((whole / "parts").glob("0*.json")):
        record = json.loads(path.read_text())
        assert record["file"].startswith(FILES[int(path.stem)])
        listed |= record["files"]
    assert {name: entry["sha256"] for name, entry in listed.items()} == {
        name: entry["sha256"] for name, entry in meta["files"].items()
    }
    assert sum(entry["documents"] for entry in listed.values()) == sum(bool(t) for of_file in texts for t in of_file)


def test_merged_folder_is_described_verified_and_read(whole):
    assert describe(whole)
    splits = [Split(whole, split, 64, 256) for split in ("train", "val")]
    assert Verification(whole, splits).state.startswith("checksums verified")
    assert splits[0].tokens == len(split_tokens(whole, "train"))


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
def test_any_number_of_parts_in_any_order_is_the_same_bytes(tmp_path, source, whole, n):
    options = ("--source", source, *SMALL, "--out", tmp_path)
    for i in random.Random(n).sample(range(n), n):
        made(*options, f"--part={i}/{n}")
        assert not (tmp_path / "meta.json").exists()
    made(*options, "--merge")
    assert everything(tmp_path) == everything(whole)


def test_val_that_takes_all_of_the_first_file_leaves_train_the_others(tmp_path, source, texts):
    options = ("--encoding=bytes", "--shard_tokens=1e6", "--val_tokens=1e6", "--files=2", "--out", tmp_path)
    for option in ("--part=0/1", "--merge"):
        made("--source", source, *options, option)
    assert split_tokens(tmp_path, "val").astype(np.uint8).tobytes() == as_bytes(texts[0])
    assert split_tokens(tmp_path, "train").astype(np.uint8).tobytes() == as_bytes(texts[1])


# ---- several at once, and what is in the way -----------------------------------------------------------------


def test_what_is_missing_or_harmed_is_named_with_the_command_that_makes_it(tmp_path, script: Script, source, whole):
    prepare = (PREPARE, "--source", source, *SMALL, "--out", tmp_path)
    assert script(*prepare, "--part=0/2").code == 0
    fails(script(*prepare, "--merge"), "3 of 7", "b.jsonl", "--part=1/7", "--part=0/1")
    for number in (1, 3, 5):
        with_lock = lock.locked(tmp_path / "parts", name=f".{number:06}")  # as another worker holds it
        done = script(*prepare, "--part=1/2")
        with_lock.release()
        assert "part 1/2: 2 of 3 source files are made; others are making 1" in done.out
        assert not (tmp_path / f"parts/{number:06}.json").exists() or number != 1
    leftover = tmp_path / "train_000001_000000.bin.1-a.tmp"
    for number, name, worse in ((4, "train_000004_000001.bin", harm), (1, "train_000001_000000.bin", Path.unlink)):
        worse(tmp_path / name)
        leftover.touch()
        if worse is Path.unlink:
            fails(script(*prepare, "--merge"), "1 of 7", f"--part={number}/7")
        assert script(*prepare, f"--part={number}/7").code == 0
    assert script(*prepare, "--merge").code == 0
    assert everything(tmp_path) == everything(whole)  # the leftover is gone too


def test_file_system_without_locks_gets_the_same_bytes(tmp_path, source, whole, monkeypatch):
    acquire = lock.FileLock._acquire

    def refuse(self):
        if str(tmp_path) in self.lock_file:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        acquire(self)

    monkeypatch.setattr(lock.FileLock, "_acquire", refuse)
    for option in ("--part=1/2", "--part=0/2", "--merge"):
        made("--source", source, *SMALL, option, "--out", tmp_path)
    assert everything(tmp_path) == everything(whole)
    assert not [*tmp_path.rglob(".*")]  # each lease was given back


def test_others_settings_and_other_layouts_are_refused_and_nothing_changes(tmp_path, script: Script, texts):
    folder = tmp_path / "in"
    for i in range(2):
        write_documents(folder / f"{i}.jsonl", texts[i][:50])
    parts = (PREPARE, "--encoding=bytes", "--source", folder, "--val_tokens=1e4", "--out", tmp_path / "out")
    assert script(*parts, "--shard_tokens=1e4", "--part=0/2").code == 0
    before = everything(tmp_path / "out")
    for option in ("--part=1/2", "--merge"):
        fails(script(*parts, "--shard_tokens=2e4", option), "shard_tokens", 10000, 20000, "--out")
        fails(script(*parts, "--shard_tokens=1e4", "--text_column=id", option), "text_column", "id", "--out")
    fails(script(*parts, "--shard_tokens=1e4"), "in parts", "--out")
    (folder / "0.jsonl").rename(folder / "x.jsonl")  # as many bytes, in another order
    fails(script(*parts, "--shard_tokens=1e4", "--part=1/2"), "0.jsonl, 1.jsonl", "1.jsonl, x.jsonl")
    assert everything(tmp_path / "out") == before
    assert script(*parts[:-1], tmp_path / "sequence").code == 0
    fails(script(*parts[:-1], tmp_path / "sequence", "--part=0/1"), tmp_path / "sequence", "--out")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--part=0/2 --tokens=1e6", ["--tokens", "--files"]),
        ("--workers=2 --encoding=bpe", ["--encoding bpe", "--encoding SMALL"]),
        ("--merge --pretokenized", ["--merge", "--pretokenized"]),
        ("--files=3", ["--files", "--tokens"]),
    ],
)
def test_options_that_parts_cannot_have_are_usage_errors(tmp_path, script: Script, options, named):
    assert_refused(script(PREPARE, *options.split(), "--out", tmp_path / "out"), *named)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", ["--part=2/2", "--part=0/2 --merge"])
def test_parts_that_there_are_not_are_usage_errors(tmp_path, script: Script, options):
    done = script(PREPARE, *options.split(), "--out", tmp_path / "out")
    assert done.code == 2
    assert "--part" in done.err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_workers_two_to_a_part_leave_the_same_bytes(tmp_path, source):
    options = ("--encoding=bytes", "--shard_tokens=20_000", "--val_tokens=50_000", "--source", source)
    for option in ("--part=0/1", "--merge"):
        made(*options, option, "--out", tmp_path / "whole")
    n_shards = len(list((tmp_path / "whole").glob("*.bin")))
    out = tmp_path / "killed"
    draw = random.Random(os.getpid())
    killed = 0
    for kills in (4, 3, 0):
        workers = [started(*options, "--out", out, f"--part={i}/2") for i in (0, 0, 1, 1)]
        until = len(list(out.glob("*.bin"))) + draw.randint(0, n_shards // 3)  # shards, when the first one is killed
        while kills and len(list(out.glob("*.bin"))) < until and any(worker.is_alive() for worker in workers):
            time.sleep(0.002)
        for worker in draw.sample(workers, kills):
            time.sleep(draw.random() * 0.01)
            worker.kill()
        for worker in workers:
            worker.join()
            assert worker.exitcode in (0, -signal.SIGKILL)
            killed += worker.exitcode != 0
    assert killed > 2
    made(*options, "--merge", "--out", out)
    assert everything(out) == everything(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's record of children")
def test_ended_parent_leaves_no_worker_and_the_same_command_goes_on(tmp_path, source, whole):
    command = [sys.executable, PREPARE, "--source", str(source), *SMALL, "--workers=2", "--out", str(tmp_path)]
    held = lock.locked(tmp_path / "parts")  # so that workers wait, and never end by themselves
    for number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        children: list[str] = []
        while len(children) < 3:  # two workers, and a helper of Python's
            time.sleep(0.02)
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        time.sleep(0.5)
        parent.send_signal(number)
        assert parent.wait() == status
        end = time.monotonic() + 20
        while any(is_running(child) for child in children):
            assert time.monotonic() < end
            time.sleep(0.02)
    held.release()
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    assert everything(tmp_path) == everything(whole)


def is_running(pid: str) -> bool:
    """Whether a process is there, and is not one that has ended and that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- from the hub, and on a cluster --------------------------------------------------------------------------


@pytest.mark.slow
def test_hub_is_listed_once_and_its_revision_is_everybodys(tmp_path, texts):
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
            hub.requests.clear()
            done = shell("python", PREPARE, *SMALL, option, "--out", tmp_path / "out", env=env)
            assert done.returncode == 0, done.stderr
            listed = any("README" in request for request in hub.requests)
            assert listed == (option == "--part=1/2")
    meta = read_record(tmp_path / "out")
    assert (meta["revision"], meta["parts"]) == (SHA, 3)
    expected = as_bytes([*texts[-2], *texts[-3]])
    assert split_tokens(tmp_path / "out", "train").astype(np.uint8).tobytes().endswith(expected)


def test_slurm_needs_a_partition_and_a_time(tmp_path, script: Script, source):
    options = ("--executor=slurm", "--tasks=2", "--workers=2", "--source", source, "--out", tmp_path / "out")
    assert_refused(script(CLUSTER, *options), "--sbatch", "partition=", "time=")


FAKE_SLURM = {
    "sbatch": 'for last; do true; done; [ "$1" = "$last" ] || { echo "$@" >> "$TASKS"; cat "$last" >> "$TASKS"\n'
    "n=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' \"$last\")\n"
    'for i in $(seq 0 $n); do SLURM_ARRAY_TASK_ID=$i SLURM_NODELIST=n bash "$last" 1>&2 || exit 1; done; }\n'
    'echo "Submitted batch job 7"',
    "srun": 'exec launch_pickled_pipeline "${@: -1}"',
    "scontrol": "echo n",
}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs bash")
@pytest.mark.parametrize("executor", ["local", "slurm"])
def test_datatroves_executors_make_the_same_bytes(tmp_path, source, whole, executor):
    """Slurm is stood for by a `sbatch` that runs the tasks of each array at once."""
    pytest.importorskip("datatrove")
    for name, code in FAKE_SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TASKS": str(tmp_path / "tasks")}
    options = ("--sbatch", "partition=cpu", "time=1:00:00", "account=me") if executor == "slurm" else ()
    command = ("python", CLUSTER, f"--executor={executor}", *options, "--tasks=3", "--workers=2", "--source", source)
    for _ in range(2 if executor == "local" else 1):  # the second time everything is there
        done = shell(*command, *SMALL, "--out", tmp_path / "out", env=env)
        assert done.returncode == 0, done.stderr
        assert everything(tmp_path / "out") == everything(whole)
    if executor == "slurm":
        tasks = (tmp_path / "tasks").read_text()
        assert all(
            line in tasks for line in ("#SBATCH --array=0-2%2", "#SBATCH --account=me", "--dependency=afterok:7")
        )
