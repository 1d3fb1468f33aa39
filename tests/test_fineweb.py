"""data/fineweb_edu/prepare.py: real files through the real `datasets`, a hub of our own, processes that are killed."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import BPE_CACHE, ROOT, Finished, events, flags, needs_bpe
from fake_hub import SHA, Hub, serve

import data.documents
from data.describe import describe
from data.documents import Source, retried
from data.tokenizer import BytesTokenizer
from data.tokens import Split, read_tokens, write_tokens

PREPARE = "data/fineweb_edu/prepare.py"
REAL_DOCUMENTS = ROOT.parent / "shared" / "data" / "fineweb_edu_schema"
END_OF_TEXT = 255  # of --encoding=bytes


@pytest.fixture(scope="module")
def documents(text: str) -> list[str]:
    """About 300 texts of very different lengths, one of them longer than a task of the tokenizing threads."""
    draw, at, out = random.Random(1), 0, [text[:600_000] * 2]
    while at < 600_000:
        n = int(draw.paretovariate(1.1) * 400)
        out.append(text[at : at + n])
        at += n
    return [*out, "ünïcödé 🧀\u2028" * 50, "<|endoftext|>\n<|endoftext|>"]


def write_documents(path: Path, texts: Sequence[str | None], column: str = "text") -> Path:
    """A file of documents with another column beside, in the format of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": list(range(len(texts))), column: pa.array(texts, pa.string())}), path, 100)
        return path
    lines = "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)).encode()
    pack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}
    path.write_bytes(pack[path.suffix](lines) if path.suffix in pack else lines)
    return path


def as_bytes(texts: list[str]) -> bytes:
    """What --encoding=bytes makes of documents, one byte per token."""
    return b"".join(bytes([END_OF_TEXT]) + text.encode() for text in texts if text)


def tokens(folder: Path) -> np.ndarray:
    """All tokens of a folder in the order they were made."""
    paths = sorted(folder.glob("*.bin"), key=lambda p: p.stem.split("_")[1])
    return np.concatenate([read_tokens(p) for p in paths])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("[!.]*"))}


Script = Callable[..., Finished]
SMALL = ("--encoding=bytes", "--shard_tokens=250_000", "--val_tokens=50_000")


def fails(done: Finished) -> str:
    assert done.code == 1
    (line,) = done.err.splitlines()
    return line


# ---- what is written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_tokens_are_the_documents_each_behind_an_end_of_text(tmp_path, script: Script, documents, name):
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
@pytest.mark.parametrize("name", ["a.parquet", "a.txt"])
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


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, documents) -> tuple[Path, Path]:
    """(source, what one undisturbed run made of it)"""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_documents(folder / "a.parquet", documents)
    subprocess.run([sys.executable, PREPARE, "--source", source, *SMALL, "--out", folder / "out"], cwd=ROOT, check=True)
    return source, folder / "out"


def test_second_run_verifies_and_leaves_everything_as_it_is(tmp_path, script: Script, prepared):
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


def copied(prepared: tuple[Path, Path], to: Path) -> list[str]:
    """A copy of the prepared folder in `to`; the command that prepares it."""
    for name, content in contents(prepared[1]).items():
        (to / name).write_bytes(content)
    return [PREPARE, "--source", str(prepared[0]), *SMALL, "--out", str(to)]


def harm(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2] + b"xx")


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
    for n in (2, 3):  # one that is planned and one behind: both are read by a training
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
    encode_batch, calls = BytesTokenizer.encode_batch, itertools.count()

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


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_at_any_point_and_run_again_the_files_are_the_same(tmp_path, documents):
    encoding = "gpt2" if "TIKTOKEN_CACHE_DIR" in os.environ else "bytes"
    for i in range(4):
        write_documents(tmp_path / "in" / f"{i}.parquet", documents * 2)
    options = ("--source", tmp_path / "in", f"--encoding={encoding}", "--val_tokens=5e4", "--shard_tokens=5e4", "--out")
    command = [sys.executable, PREPARE, *map(str, options)]
    subprocess.run([*command, tmp_path / "whole"], cwd=ROOT, check=True, capture_output=True)
    n_shards = len(list((tmp_path / "whole").glob("*.bin")))
    draw, kills = random.Random(os.getpid()), 0
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
    read, written = sum(map(len, texts)), 2 * len(tokens(tmp_path / "out"))
    assert min(read, written / 2) > 250e6
    assert int(peak_kb) * 1024 < 650e6  # Python, pyarrow and `datasets` take 200 MB of it


# ---- bad input -----------------------------------------------------------------------------------------------


def test_faults_of_the_source_are_one_line(tmp_path, script: Script, documents):
    def prepare(*source: str | Path, **options: Any) -> str:
        return fails(script(PREPARE, "--source", *source, *SMALL, *flags(**options), "--out", tmp_path / "out"))

    out = tmp_path / "out"
    good = write_documents(tmp_path / "good.parquet", documents)
    for name in ("good.parquet", "good.jsonl"):
        write_documents(tmp_path / name, documents)
        line = prepare(tmp_path / name, text_column="body")
        assert f"{name} has no column 'body'" in line
        assert "--text_column" in line
        assert re.search("holds int(64)?, not", prepare(tmp_path / name, text_column="id"))
    (tmp_path / "none.parquet").write_bytes(b"hello" * 100)
    assert "none.parquet cannot be read as parquet" in prepare(tmp_path / "none.parquet")
    (tmp_path / "none.jsonl").write_text('{"text": "a"}\n{"text"')
    assert "none.jsonl cannot be read as json" in prepare(tmp_path / "none.jsonl")
    (tmp_path / "latin.txt").write_bytes("Käse".encode("latin-1"))
    assert "latin.txt cannot be read as text" in prepare(tmp_path / "latin.txt")
    assert "nowhere does not exist" in prepare(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    assert "folder holds no *.parquet" in prepare(tmp_path / "folder")
    (tmp_path / "a.csv").write_text("text\nhello")
    assert "a.csv is none of *.parquet" in prepare(tmp_path / "a.csv")
    write_documents(tmp_path / "empty.parquet", ["", None, ""])
    assert "has 0 tokens" in prepare(tmp_path / "empty.parquet")
    assert "'nope'" in fails(script(PREPARE, "--source", good, "--encoding=nope", "--out", tmp_path / "out"))
    assert "describes no tokenizer" in fails(script(PREPARE, "--source", good, "--encoding=char", "--out", out))
    pq.write_table(pa.table({"tags": [["a"], ["b"]]}), tmp_path / "lists.parquet")
    assert "tags holds list" in prepare(tmp_path / "lists.parquet", text_column="tags")
    (tmp_path / "array.jsonl").write_text('["a", "b"]\n')
    assert "array.jsonl cannot be read as json (a line holds list" in prepare(tmp_path / "array.jsonl")
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_files_are_taken_by_their_very_names_and_formats(tmp_path, script: Script):
    """Names that would be patterns, files that are none of ours beside, and columns that change their type."""
    folder = tmp_path / "a [1] * x"
    write_documents(folder / "b[ab]?.parquet", ["one"])
    table = pa.table({"text": pa.array(["two", "two"]).dictionary_encode(), "meta": [None, None]})
    pq.write_table(table, folder / "c #.parquet")
    lines = [
        '\ufeff{"text": "three", "meta": null}',
        "",
        '{"meta": {"x": [1]}, "text": "four \\ud800"}',
        '{"text": null}',
    ]
    (folder / "d.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "e.txt").write_bytes(b"five\r\nsix")
    (folder / ".git").mkdir()
    for other in ("d.jsonl.bak", ".hidden.txt", "f.csv", "g.parquet.gz", ".git/h.txt"):
        (folder / other).write_text("no")
    (tmp_path / "blob").write_bytes(b"seven")
    (folder / "f.TXT").symlink_to(tmp_path / "blob")  # as in the hub's cache
    (folder / "twice.txt").symlink_to(folder / "e.txt")
    done = script(PREPARE, "--source", folder, "--encoding=bytes", "--val_tokens=4", "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(
        ["one", "two", "two", "three", "four ?", "five\nsix", "seven"]
    )


def test_source_that_all_goes_into_val_names_a_smaller_val(tmp_path, script: Script):
    write_documents(tmp_path / "a.jsonl", ["hello"] * 100)
    prepare = (PREPARE, "--source", tmp_path / "a.jsonl", "--encoding=bytes", "--out", tmp_path / "out")
    line = fails(script(*prepare, "--val_tokens=1e5"))
    assert "has 600 tokens, all of which went into val; try --val_tokens=60" in line
    assert script(*prepare, "--val_tokens=60").code == 0


@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl.gz"])
def test_truncated_file_keeps_the_shards_before_it(tmp_path, script: Script, documents, name):
    write_documents(tmp_path / "in" / "a.parquet", documents)
    path = write_documents(tmp_path / "in" / name, documents)
    whole = path.read_bytes()
    prepare = (PREPARE, "--source", tmp_path / "in", *SMALL, "--out", tmp_path / "out")
    path.write_bytes(whole[:-9])
    done = script(*prepare)
    line = fails(done)
    assert f"{name} cannot be read" in line
    if name == "b.parquet":  # seen at the start: its length is in its last bytes
        assert not list((tmp_path / "out").glob("*.bin"))
    else:
        assert "what is finished stays" in line
        assert len(list((tmp_path / "out").glob("*.bin"))) > 3


def test_folder_prepared_otherwise_is_not_touched(tmp_path, script: Script, prepared):
    source, out = prepared
    before = contents(out)
    line = fails(script(PREPARE, "--source", source, *SMALL, "--shard_tokens=1e5", "--out", out))
    assert "was prepared with shard_tokens 250000, not 100000" in line
    if BPE_CACHE.is_dir():
        line = fails(script(PREPARE, "--source", source, *SMALL, "--encoding=gpt2", "--out", out))
        assert "was prepared with tokenizer bytes, not gpt2" in line
    assert contents(out) == before
    write_tokens(tmp_path / "train.bin", np.arange(9, dtype=np.uint16))
    prepare = (PREPARE, "--source", source, *SMALL, "--out", tmp_path)
    assert "holds token files that no meta.json lists (train.bin)" in fails(script(*prepare))
    (tmp_path / "train.bin").rename(tmp_path / "train_000002.bin")
    assert "holds token files that no meta.json lists (train_000002.bin)" in fails(script(*prepare))
    (tmp_path / "train_000002.bin").unlink()
    (tmp_path / "meta.json").write_text("{}")
    assert "meta.json is not one of this script's" in fails(
        script(PREPARE, "--source", source, *SMALL, "--out", tmp_path)
    )


def test_damaged_meta_json_is_named(tmp_path, script: Script, prepared):
    prepare = copied(prepared, tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    for files in ([1], {"train_000001.bin": 5}, {"train_000001.bin": {"tokens": 3, "documents": 1}}):
        (tmp_path / "meta.json").write_text(json.dumps(meta | {"files": files}))
        assert "meta.json is not one of this script's" in fails(script(*prepare))
        if not isinstance(files, dict) or 5 in files.values():
            with pytest.raises(ValueError, match="its list of files is damaged"):
                describe(tmp_path)


def test_training_misses_shards_that_meta_json_lists(tmp_path, prepared):
    copied(prepared, tmp_path)
    (tmp_path / "train_000002.bin").unlink()
    with pytest.raises(
        ValueError, match=r"train_000002\.bin is not there, and meta\.json lists it with 250,000 tokens"
    ):
        Split(tmp_path, "train", 64, 256)
    write_tokens(tmp_path / "train_000002.bin", np.arange(99, dtype=np.uint16), header=True)
    with pytest.raises(ValueError, match=r"train_000002\.bin has 99, and meta\.json lists it"):
        Split(tmp_path, "train", 64, 256)


@pytest.mark.parametrize("option", ["--tokens=0", "--tokens=many", "--tokens=1.5", "--tokens=inf", "--num_proc=-1"])
def test_numbers_that_are_none_are_usage_errors(tmp_path, script: Script, option):
    done = script(PREPARE, "--source", tmp_path, option)
    assert done.code == 2
    assert option.partition("=")[0] in done.err


@pytest.mark.parametrize(
    "options",
    [
        ("--pretokenized", "--encoding=bytes"),
        ("--pretokenized", "--subset=sample-100BT"),
        ("--pretokenized", "--source", "a.txt"),
        ("--source", "a.txt", "--subset=sample-100BT"),
    ],
)
def test_options_that_mean_nothing_beside_each_other_are_refused(tmp_path, script: Script, options):
    done = script(PREPARE, *options, "--out", tmp_path / "out")
    assert done.code == 2
    assert "means nothing beside" in done.err


def test_rows_come_once_each_through_faults_of_the_network(monkeypatch):
    faults = [0, 1, 1, 7, 9]  # rows before which the connection breaks

    def texts(self, path, first):
        for row in range(first, 10):
            if faults and faults[0] == row:
                faults.pop(0)
                raise ConnectionResetError("gone")
            yield f"{path} {row}"

    monkeypatch.setattr(Source, "_texts", texts)
    monkeypatch.setattr(data.documents.time, "sleep", lambda seconds: None)
    rows = list(Source("x", ["a.parquet", "b.parquet"]).rows(0, 0))
    assert [row.text for row in rows] == [f"{name}.parquet {i}" for name in "ab" for i in range(10)]
    faults = [4] * 9
    with pytest.raises(ValueError, match="failed 9 times"):
        list(Source("x", ["a.parquet"]).rows(0, 2))


# ---- the hub -------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, documents):
    root = tmp_path / "hub"
    repo = root / "HuggingFaceFW" / "fineweb-edu"
    third = len(documents) // 3
    for i in range(3):
        part = documents[i * third : (i + 1) * third if i < 2 else None]
        write_documents(repo / "sample" / "10BT" / f"{i:03}_00000.parquet", part)
    write_documents(repo / "data" / "CC-MAIN-2013-20" / "train-00000.parquet", documents[:3])
    configs = {"default": "data/*/*", "sample-10BT": "sample/10BT/*", "CC-MAIN-2013-20": "data/CC-MAIN-2013-20/*"}
    lines = [f"- config_name: {k}\n  data_files:\n  - split: train\n    path: {v}\n" for k, v in configs.items()]
    (repo / "README.md").write_text(f"---\nconfigs:\n{''.join(lines)}---\n")
    ready = root / "kjj0" / "finewebedu10B-gpt2"
    ready.mkdir(parents=True)
    for name, n in (("val_000000", 5000), ("train_000001", 5000), ("train_000002", 1234)):
        ids = np.arange(n, dtype=np.uint16)
        ids[::500] = 50256
        write_tokens(ready / f"finewebedu_{name}.bin", ids, header=True)
    with serve(root) as server:
        yield server


def online(hub: Hub, tmp_path: Path, *args: str | Path, setup: str = "") -> subprocess.CompletedProcess[str]:
    """Runs prepare.py against our hub, in a process of its own: the hub's address is read on import."""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "no_proxy": "127.0.0.1"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    run = "import sys\nwith p.one_line_errors():\n    p.main(p.arguments(sys.argv[1:]))"
    code = f"import data.fineweb_edu.prepare as p\n{setup}\n{run}"
    command = [sys.executable, "-c", code, *map(str, args), "--out", str(tmp_path / "out")]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_subset_streams_from_the_hub_through_faults_of_the_network(tmp_path, hub, documents):
    hub.faults = ["503", "cut"]
    done = online(hub, tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(documents)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert (meta["source"], meta["revision"]) == ("HuggingFaceFW/fineweb-edu, sample-10BT", SHA)
    hub.requests.clear()
    done = online(hub, tmp_path, *SMALL)
    assert "already prepared" in done.stdout
    assert hub.requests == []
    (tmp_path / "out" / "train_000002.bin").unlink()
    done = online(hub, tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(documents)


def test_hub_that_refuses_is_one_line(tmp_path, hub):
    (hub.root / "HuggingFaceFW").rename(hub.root / "gone")
    done = online(hub, tmp_path, *SMALL)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "the hub refuses (404" in line


def test_other_subsets_and_one_that_is_none(tmp_path, hub, documents):
    done = online(hub, tmp_path, *SMALL, "--subset=nope")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "--subset nope: HuggingFaceFW/fineweb-edu has no such subset; it has sample-10BT" in line
    done = online(hub, tmp_path, *SMALL, "--subset=CC-MAIN-2013-20")
    assert done.returncode == 0, done.stderr
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(documents[:3])


def test_network_that_stays_away_says_what_to_run_next(tmp_path, hub):
    hub.down = True
    quick = "import data.documents; data.documents.LONGEST_PAUSE_S = 0.01"
    done = online(hub, tmp_path, *SMALL, setup=quick)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "the network failed 9 times" in line
    assert "the same command goes on behind them" in line
    assert done.stdout.count("attempt ") == 8
    assert len([r for r in hub.requests if "fineweb-edu" in r]) >= 9


def test_pauses_between_attempts_grow(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(data.documents.time, "sleep", pauses.append)

    def call() -> None:
        raise ConnectionResetError("gone")

    with pytest.raises(ValueError, match="failed 9 times \\(gone\\)"):
        retried(call)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    with pytest.raises(KeyError):  # what is no fault of the network is not tried again
        retried(lambda: dict[str, int]()["x"])


@needs_bpe
def test_pretokenized_shards_are_fetched_as_many_as_needed(tmp_path, hub):
    small = "p.PRETOKENIZED_SHARD, p.PRETOKENIZED_TOKENS = 5000, 11234"
    done = online(hub, tmp_path, "--pretokenized", "--tokens=4000", setup=small)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "out").glob("[!.]*")) == [
        "meta.json",
        "train_000001.bin",
        "val_000000.bin",
    ]
    assert not (tmp_path / "out" / ".download").exists()
    ready = hub.root / "kjj0" / "finewebedu10B-gpt2"
    for name in ("val_000000.bin", "train_000001.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (ready / f"finewebedu_{name}").read_bytes()
    done = online(hub, tmp_path, "--pretokenized", setup=small)  # all there are
    assert done.returncode == 0, done.stderr
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert [e["tokens"] for e in meta["files"].values()] == [5000, 5000, 1234]
    assert [e["documents"] for e in meta["files"].values()] == [10, 10, 3]
    assert (meta["source"], meta["revision"]) == ("kjj0/finewebedu10B-gpt2", SHA)
    hub.requests.clear()
    assert "already prepared" in online(hub, tmp_path, "--pretokenized", setup=small).stdout
    assert hub.requests == []
    assert "already prepared" in online(hub, tmp_path, "--pretokenized", "--tokens=6200", setup=small).stdout
    path = tmp_path / "out" / "train_000001.bin"
    harm(path)
    done = online(hub, tmp_path, "--pretokenized", setup=small)
    assert "train_000001.bin is damaged" in done.stdout
    assert path.read_bytes() == (ready / f"finewebedu_{path.name}").read_bytes()


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
    small: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 64, "batch_size": 2, "max_iters": 4}
    small |= {"gradient_accumulation_steps": 4, "eval_interval": 2, "eval_tokens": 512, "compile": False}
    small |= {"device": "cpu", "dataset": out, "out_dir": tmp_path, "warmup_iters": 1, "learning_rate": 1e-2}
    done = script("train.py", "config/train_fineweb_125m.py", *flags(**small, align_documents=True))
    assert done.code == 0, done.err
    losses = [e["val_loss"] for e in events(tmp_path, "eval")]
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="block_size"):
        Split(out, "train", 300_000, 256)
