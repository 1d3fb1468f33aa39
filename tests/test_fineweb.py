"""data/fineweb_edu/prepare.py: the same bytes from any source however it is stopped."""

import bz2
import csv
import functools
import gzip
import io
import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import POSIX, assert_refused, contents, fails, nightly, shell, slow
from gloo import in_forks

import data.fineweb_edu.prepare as prepare_fineweb
from data.batches import Split
from data.dataset import Checksums
from data.fineweb_edu.prepare import arguments, main
from data.token_files import listed_checksums, read_record
from deskgpt.files import locked_folder

PREPARE = "data/fineweb_edu/prepare.py"
SMALL = ("--tokenizer=bytes", "--val_tokens=50_000")
END_OF_TEXT = b"\xff"  # of --tokenizer=bytes
PACK = {
    ".gz": gzip.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
    ".bz2": bz2.compress,
}


@pytest.fixture(scope="module", autouse=True)
def _shard_for_each_file_and_small_batches():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.sources.SHARD_BYTES", 1)
        patch.setattr(prepare_fineweb, "BATCH_CHARS", 1000)
        yield


def write_table(path: Path, columns: dict[str, Any]) -> Path:
    """Write columns in the format of a file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    rows = table.to_pylist()
    content = io.StringIO()
    if path.suffix == ".parquet":
        pq.write_table(table, path, 100)
        return path
    if path.suffix == ".arrow":
        with pa.ipc.new_stream(path, table.schema) as file:
            file.write_table(table, 50)
        return path
    if ".csv" in path.name:
        csv.writer(content).writerows([columns, *(row.values() for row in rows)])
    elif path.suffix == ".json":
        json.dump(rows, content, indent=1)
    else:
        content.writelines(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(PACK.get(path.suffix, bytes)(content.getvalue().encode()))
    return path


def write_documents(path: Path, texts: Sequence[str | None], column: str = "text") -> Path:
    """Write a file of documents, with one more column, in the format of its name."""
    return write_table(path, {"id": range(len(texts)), column: pa.array(texts, pa.string())})


def assert_holds(folder: Path, texts: list[str]) -> None:
    """Assert that val and the shards of train together are these documents, one byte per token."""
    paths = [folder / "val_000000.bin", *sorted(folder.glob("train_*.bin"))]
    found = np.concatenate([np.fromfile(path, "<u2") for path in paths])
    assert found.astype(np.uint8).tobytes() == b"".join(
        END_OF_TEXT + text.encode() for text in texts if text
    )


def made(*options: str | Path) -> None:
    """Run prepare.py; raise what goes wrong."""
    main(arguments([*map(str, options)]))


def stopped_at(n, value_of, seen):
    """Return the same function, which notes its values and stops its process at number n."""

    def value_or_stop(*row):
        seen.append(value_of(*row))
        if len(seen) == n:
            raise KeyboardInterrupt
        return seen[-1]

    return value_or_stop


def killed_at_rename(at, work):
    """Call work in a fork that ends at once before (1, 3 ...) or after (2, 4 ...) one of its
    renames. Return whether it has that many.
    """
    rename = os.replace
    moments = itertools.count(1)

    def pass_or_end():
        if next(moments) == at:
            os._exit(9)

    def rename_or_end(*paths):
        pass_or_end()
        rename(*paths)
        pass_or_end()

    def work_until_then():
        setattr(os, "replace", rename_or_end)  # noqa: B010
        work()

    (status,) = in_forks(work_until_then)
    assert status in (0, 9)
    return status == 9


# ---- sources -------------------------------------------------------------------------------------


FORMATS = ["a.json", "b.arrow", "b.csv.zst", "b.jsonl.gz", "b[ab]?.parquet"]  # in name order


def test_files_are_taken_by_their_very_names_and_formats(tmp_path, script, monkeypatch):
    """Names that look like patterns, other files in the same folder, and columns that change their
    type.
    """
    monkeypatch.setattr("data.sources.SHARD_BYTES", 1 << 30)
    folder = tmp_path / "a [1] * x"
    for name in FORMATS:
        write_documents(folder / name, [f"{name} ünïcödé", "NA"])
    lines = ['{"text": "three"}', "", '{"meta": {}, "text": "four \\ud800"}', '{"text": null}']
    (folder / "d.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    (folder / "e.txt").write_bytes(b"five\r\nsix\r\n<|endoftext|>\r\nsix and a half")
    (folder / ".git").mkdir()
    for other in ("d.jsonl.bak", ".hidden.txt", "g.parquet.gz", ".git/h.txt"):
        (folder / other).write_text("no")
    (tmp_path / "blob").write_bytes(b"seven")
    (folder / "f.TXT").symlink_to(tmp_path / "blob")  # as in the hub's cache
    to = tmp_path / "out"
    done = script(PREPARE, "--source", folder, "--tokenizer=bytes", "--val_tokens=4", "--out", to)
    assert (done.code, done.err) == (0, "")
    expected = [text for name in FORMATS for text in (f"{name} ünïcödé", "NA")]
    expected += ["three", "four \ufffd", "five\nsix\n", "six and a half", "seven"]
    assert_holds(to, expected)
    assert len([*to.glob("train_*.bin")]) == 1  # small files share a shard


GOOD = b'{"text": "good line"}\n'
LINES = [b'{"text": "good', b'{"txt": "x"}', b'{"text": 7}', b"[1]", b"null"]
WRONG = {f"{n}.jsonl": GOOD * 321 + line + b"\n" + GOOD for n, line in enumerate(LINES)}
WRONG |= {"none.parquet": b"hello" * 100, "a.pdf": b"%PDF-1.7", "only.txt": b"<|endoftext|>"}
WRONG |= {"cut.jsonl.gz": PACK[".gz"](GOOD)[:-9], "fields.csv": b"id,text\n1,a\n2\n"}


@pytest.mark.parametrize("name", WRONG)
def test_file_that_cannot_be_read_is_named_with_its_row(tmp_path, script, name):
    (tmp_path / name).write_bytes(WRONG[name])
    done = script(PREPARE, "--source", tmp_path / f"{name[:-1]}*", *SMALL, "--out", tmp_path / "o")
    fails(done, f"{name}, row 322 " if name[0].isdigit() else name)


def test_options_that_do_not_fit_the_source_are_one_line(tmp_path, script):
    for name in ("good.parquet", "good.jsonl"):
        source = write_documents(tmp_path / name, ["a text"] * 3)
        prepare = (PREPARE, "--source", source, *SMALL, "--out", tmp_path / name[5:])
        fails(script(*prepare, "--text_column=body"), name, "'body'", "--text_column")
    fails(script(*prepare, "--tokenizer=char"), "char")
    (tmp_path / "folder").mkdir()
    fails(script(PREPARE, "--source", tmp_path / "folder", *prepare[3:]), "folder", "*.parquet")
    assert_refused(script(*prepare, "--hub=other"), "--hub", "--source")


@nightly
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's record of peak memory"
)
def test_memory_stays_far_below_what_is_read_and_written(tmp_path, documents):
    texts = [f"{i} {text}" for i in range(60) for text in documents]
    source = write_documents(tmp_path / "big.parquet", texts)
    code = "from data.fineweb_edu.prepare import *; import data.sources, sys; "
    code += "data.sources.SHARD_BYTES = 1; main(arguments(sys.argv[1:])); "
    code += "print(open('/proc/self/status').read())"
    options = ("--source", source, "--tokenizer=bytes", "--out", tmp_path / "out")
    done = shell("python", "-c", code, *options)
    (peak_kb,) = re.findall(r"^VmHWM:\s+(\d+)", done.stdout, re.M)
    # Above 200 MB are written. Python and pyarrow take 150 MB of the memory.
    assert int(peak_kb) * 1024 < 550e6


# ---- shards --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def texts(documents):
    """The documents of each of seven files; the third has none."""
    short = documents[1:]  # without the one that would be nearly all of val
    groups = [short[i::6] for i in range(6)]
    return [*groups[:2], [], ["".join(groups[2])], *groups[3:]]


@pytest.fixture(scope="session")
def source(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    for n, of_file in enumerate(texts):
        write_documents(folder / f"{n}{'.jsonl.zst' if n % 2 else '.parquet'}", of_file)
    return folder


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory):
    """What is made of source, undisturbed."""
    out = tmp_path_factory.mktemp("undisturbed")
    made("--source", source, *SMALL, "--out", out)
    return Path(out)


def test_shards_hold_the_documents_of_their_files_and_are_listed(undisturbed, texts):
    assert_holds(undisturbed, [*itertools.chain(*texts)])
    files = read_record(undisturbed)["files"]
    assert list(files) == [*(f"train_{n:06}.bin" for n in (0, 1, 3, 4, 5, 6)), "val_000000.bin"]
    splits = [Split(undisturbed, split, 64, 256) for split in ("train", "val")]
    listed = listed_checksums(read_record(undisturbed))
    assert Checksums(listed, splits).state == "checksums verified"
    assert splits[1].tokens == 50_000


def test_tokens_can_be_raised_later_harmed_shards_are_made_again_and_other_settings_are_errors(
    tmp_path, script, source, undisturbed
):
    prepare = (PREPARE, "--source", source, *SMALL, "--out", tmp_path)
    assert "120,001 train and 50,000 val" in script(*prepare, "--tokens=120_001").out
    with locked_folder(tmp_path):  # as another process holds it
        fails(script(*prepare), tmp_path, "wait")
    assert "train and" in script(*prepare).out
    assert contents(tmp_path) == contents(undisturbed)
    (tmp_path / "val_000000.bin").unlink()
    os.truncate(tmp_path / "train_000003.bin", 1000)
    (tmp_path / "train_000004.bin").write_bytes(b"harmed")
    (tmp_path / "train_000004.bin.1-a.tmp").touch()  # left by a kill
    assert script(*prepare).code == 0
    for name in ("text_column", "val_tokens"):
        fails(script(*prepare, f"--{name}=9"), "was not made with", name, "--out")
    assert contents(tmp_path) == contents(undisturbed)


@slow
@POSIX
def test_killed_before_or_after_any_rename_and_run_again_the_files_are_the_same(
    tmp_path, source, undisturbed, capfd
):
    out = tmp_path / "killed"
    make = functools.partial(made, *SMALL, "--source", source, "--out", out)
    kills = itertools.takewhile(lambda at: killed_at_rename(at, make), itertools.cycle(range(1, 9)))
    assert len([*kills]) > 8
    assert capfd.readouterr().err == ""
    assert contents(out) == contents(undisturbed)


# ---- the hub, and files as it has them -----------------------------------------------------------


README = """---
configs:
- config_name: ten
  data_files: ten/*
- config_name: rest
  data_files:
  - split: train_sft
    path: rest/*
---
"""


@pytest.fixture
def hub(tmp_path):
    """A folder as a data set on the hub, which datasets.load_dataset reads in the same way."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "README.md").write_text(README)
    return tmp_path / "hub"


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_set_of_the_hub_is_streamed_by_its_name_and_what_it_lacks_is_named(
    tmp_path, script, documents, hub, suffix
):
    texts = [*documents[1:], "NA"]
    for i in range(3):
        write_documents(hub / "ten" / f"{i}{suffix}", texts[i::3], "body")
    write_documents(hub / "rest" / f"a{suffix}", texts, "body")
    ten = ("--hub", hub, "--subset=ten", "--out", tmp_path / "out")
    assert script(PREPARE, *SMALL, *ten, "--text_column=body").code == 0
    assert read_record(tmp_path / "out")["source"] == f"{hub}, ten"
    assert_holds(tmp_path / "out", [*texts[::3], *texts[1::3], *texts[2::3]])
    rest = ("--hub", hub, "--subset=rest", "--tokenizer=bytes", "--out", tmp_path / "rest")
    fails(script(PREPARE, *rest, "--text_column=body"), "train", "train_sft", "--split")
    assert script(PREPARE, *rest, "--split=train_sft", "--text_column=body").code == 0
    fails(script(PREPARE, *rest[:2], "--subset=nope", *rest[3:]), "nope", "ten", "rest")
    fails(script(PREPARE, *SMALL, "--out", tmp_path / "own"), "fineweb-edu", "network")
    assert_refused(script(PREPARE, "--hub", hub, "--tokenizer=bytes"), "--out")


@pytest.mark.parametrize("name", ["a.parquet", "d.ndjson.gz", "hub"])
def test_killed_in_the_middle_of_a_file_it_reads_no_row_before_again_and_the_bytes_are_the_same(
    tmp_path, monkeypatch, documents, hub, name
):
    """The same for each kind of rows: what an earlier process had saved is not read again."""
    texts = documents[1:]
    options = ["--source", str(tmp_path / name)]
    if name == "hub":
        options = ["--hub", str(hub), "--subset=ten"]
        name = "hub/ten/a.parquet"
    write_documents(tmp_path / name, texts)
    options += ["--tokenizer=bytes", "--val_tokens=1000"]
    text_of = prepare_fineweb.text_of
    made(*options, "--out", tmp_path / "undisturbed")
    monkeypatch.setattr("data.prepared.SAVED_TOKENS", 20_000)
    monkeypatch.setattr("data.prepared.usable_cores", lambda: 1)
    monkeypatch.setattr(prepare_fineweb, "text_of", stopped_at(250, text_of, []))
    with pytest.raises(KeyboardInterrupt):
        made(*options, "--out", tmp_path / "killed")
    with open(tmp_path / "killed" / ".shard.tokens", "ab") as file:
        file.write(b"cut off when it was killed")
    read: list[str] = []
    monkeypatch.setattr(prepare_fineweb, "text_of", stopped_at(0, text_of, read))
    made(*options, "--out", tmp_path / "killed")
    assert 30 < len(read) < len(texts) - 150
    assert read == texts[-len(read) :]
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")
