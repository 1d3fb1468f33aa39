"""data/fineweb_edu/prepare.py: the same bytes from any source however it is stopped, in one
sequence or in parts.
"""

from __future__ import annotations

import bz2
import csv
import functools
import gzip
import io
import itertools
import json
import lzma
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, Finished, assert_one_line, assert_refused, contents, shell

import data.fineweb_edu.prepare as prepare_fineweb
from data.batches import Split
from data.dataset import Checksums
from data.fineweb_edu.prepare import arguments, main
from data.token_files import listed_checksums, read_record
from deskgpt.files import locked_folder

PREPARE = "data/fineweb_edu/prepare.py"
SMALL = ("--tokenizer=bytes", "--shard_bytes=1", "--val_tokens=50_000")  # a shard for each file
END_OF_TEXT = b"\xff"  # of --tokenizer=bytes
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


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


def fails(done: Finished, *named: object) -> None:
    """Assert that a script ended with status 1 and one line of error, which names these."""
    assert done.code == 1, done
    assert_one_line(done.err, *named)


def made(*options: str | Path) -> None:
    """Run prepare.py; raise what goes wrong."""
    main(arguments([*map(str, options)]))


# Put before code, this ends the process at once before or after one of its renames.
UNTIL_RENAME = """
import itertools, os, sys
at, after, *options = sys.argv[1:]
rename, calls = os.replace, itertools.count(1)
def rename_or_end(old, new):
    is_last = next(calls) == int(at)
    if is_last and after == "before":
        os._exit(9)
    rename(old, new)
    if is_last:
        os._exit(9)
os.replace = rename_or_end
"""


# ---- sources -------------------------------------------------------------------------------------


def test_files_are_taken_by_their_very_names_and_formats(tmp_path, script):
    """Names that look like patterns, other files in the same folder, and columns that change their
    type.
    """
    folder = tmp_path / "a [1] * x"
    write_documents(folder / "b[ab]?.parquet", ["one"])
    table = pa.table({"text": pa.array(["two", "two"]).dictionary_encode(), "meta": [None, None]})
    pq.write_table(table, folder / "c #.parquet")
    lines = [
        '{"text": "three"}',
        "",
        '{"meta": {"x": [1]}, "text": "four \\ud800"}',
        '{"text": null}',
    ]
    (folder / "d.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    (folder / "d2.jsonl.gz").write_bytes(PACK[".gz"](b'{"text": "four and a half"}\r\n'))
    (folder / "e.txt").write_bytes(b"five\r\nsix\r\n<|endoftext|>\r\nsix and a half")
    views = pa.table({"text": pa.array(["eight"], pa.string_view())})  # as polars writes it
    pq.write_table(views, folder / "z.parquet")
    (folder / ".git").mkdir()
    for other in ("d.jsonl.bak", ".hidden.txt", "g.parquet.gz", ".git/h.txt"):
        (folder / other).write_text("no")
    (tmp_path / "blob").write_bytes(b"seven")
    (folder / "f.TXT").symlink_to(tmp_path / "blob")  # as in the hub's cache
    done = script(
        PREPARE,
        "--source",
        folder,
        "--tokenizer=bytes",
        "--val_tokens=4",
        "--out",
        tmp_path / "out",
    )
    assert (done.code, done.err) == (0, "")
    expected = ["one", "two", "two", "three", "four \ufffd", "four and a half"]
    expected += ["five\nsix\n", "six and a half", "seven", "eight"]
    assert_holds(tmp_path / "out", expected)
    assert len([*(tmp_path / "out").glob("train_*.bin")]) == 1  # small files share a shard


def test_faults_of_the_source_are_one_line(tmp_path, script):
    def assert_error(source: Path, *named: object, options: tuple[str, ...] = ()) -> None:
        fails(
            script(
                PREPARE,
                "--source",
                source,
                *SMALL,
                *options,
                "--out",
                tempfile.mkdtemp(dir=tmp_path),
            ),
            *named,
        )

    for name in ("good.parquet", "good.jsonl"):
        good = write_documents(tmp_path / name, ["a text"] * 3)
        assert_error(good, name, "'body'", "--text_column", options=("--text_column=body",))
        assert_error(good, name, "int", options=("--text_column=id",))
    wrong = {"none.parquet": b"hello" * 100, "a.pdf": b"%PDF-1.7", "zip.jsonl": b"PK\x03\x04"}
    wrong |= {"cut.jsonl.gz": PACK[".gz"](b'{"text": "good line"}\n')[:-9]}
    wrong |= {"fields.csv": b"id,text\n1,a\n2\n", "quote.csv": b'text\n"a'}
    for name, content in wrong.items():
        (tmp_path / name).write_bytes(content)
        assert_error(tmp_path / name, name)
    (tmp_path / "folder").mkdir()
    assert_error(tmp_path / "folder", "folder", "*.parquet")
    assert_error(
        write_documents(tmp_path / "empty.parquet", ["", None, ""]),
        "empty.parquet",
        "--text_column",
    )
    for bad in (b'{"text": "good', b'{"txt": "x"}', b'{"text": "K\xe4se"}', b"[1]", b"7", b"null"):
        (tmp_path / "a.jsonl").write_bytes(
            b'{"text": "good line"}\n' * 321 + bad + b'\n{"text": "good line"}'
        )
        is_value = bad[0] in b"[7n"
        what = "line 322 is not an object with a key text" if is_value else "line 322"
        assert_error(tmp_path / "a.js*", f"a.jsonl, {what}")
    assert_error(good, "char", options=("--tokenizer=char",))
    assert_refused(
        script(PREPARE, "--source", good, "--subset=sample-100BT"), "--subset", "--source"
    )


def test_source_that_has_changed_is_noticed(tmp_path, script, documents):
    source = write_documents(tmp_path / "a.jsonl", documents)
    prepare = (PREPARE, "--source", source, *SMALL, "--out", tmp_path / "out")
    assert script(*prepare).code == 0
    write_documents(source, documents[::-1])  # which has the same size
    (tmp_path / "out" / "train_000000.bin").unlink()
    for _ in range(2):
        fails(script(*prepare), "train_000000.bin", "another --out")


@pytest.mark.nightly
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's record of peak memory"
)
def test_memory_stays_far_below_what_is_read_and_written(tmp_path, documents):
    source = write_documents(
        tmp_path / "big.parquet", [f"{i} {text}" for i in range(60) for text in documents]
    )
    code = (
        f"import runpy; runpy.run_path('{PREPARE}', run_name='__main__'); "
        "print(open('/proc/self/status').read())"
    )
    done = shell(
        "python", "-c", code, "--source", source, "--tokenizer=bytes", "--out", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.bin")) > 200e6
    peak_kb = int(re.findall(r"^VmHWM:\s+(\d+)", done.stdout, re.M)[0])
    assert peak_kb * 1024 < 550e6  # Python and pyarrow take 150 MB of it


# ---- in parts ------------------------------------------------------------------------------------


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
        write_documents(
            folder / (f"{name}.parquet" if name in "acf" else f"{name}.jsonl.zst"), of_file
        )
    return folder


@pytest.fixture(scope="session")
def undisturbed(source, tmp_path_factory) -> Path:
    """Three parts of source, made undisturbed."""
    out = tmp_path_factory.mktemp("undisturbed")
    for number in range(3):
        made("--source", source, *SMALL, f"--part={number}/3", "--out", out)
    return out


def test_parts_are_every_third_file_and_list_all_of_them(undisturbed, texts):
    assert_holds(undisturbed, [*itertools.chain(*texts)])
    files = read_record(undisturbed)["files"]
    assert list(files) == [*(f"train_{n:06}.bin" for n in (0, 1, 3, 4, 5, 6)), "val_000000.bin"]
    assert sorted(path.name for path in undisturbed.glob("[!.]*")) == ["meta.json", *files]
    splits = [Split(undisturbed, split, 64, 256) for split in ("train", "val")]
    listed = listed_checksums(read_record(undisturbed))
    assert Checksums(listed, splits).state == "checksums verified"
    assert splits[1].tokens == 50_000


@pytest.mark.parametrize("parts", ["", "201"])
def test_tokens_are_shared_out_and_can_be_raised_later(tmp_path, source, undisturbed, parts):
    for tokens_, expected in (
        ("--tokens=120_001", 120_001 + 2 * bool(parts)),
        ("--tokens=1e9", None),
    ):
        for part in [f"--part={number}/3" for number in parts] or [""]:
            made("--source", source, *SMALL, tokens_, *filter(None, [part]), "--out", tmp_path)
        n_made = sum(entry["tokens"] for entry in read_record(tmp_path)["files"].values())
        assert expected is None or n_made == 50_000 + expected
    assert contents(tmp_path) == contents(undisturbed)


def test_parts_that_are_missing_are_printed_and_harmed_shards_made_again(
    tmp_path, script, source, undisturbed
):
    prepare = (PREPARE, "--source", source, *SMALL, "--out", tmp_path)
    assert "2 of 3 parts are still to be made, --part=1/3" in script(*prepare, "--part=0/3").out
    with locked_folder(tmp_path, ".part_1_3"):  # as another process holds it
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


def test_other_settings_are_errors_and_change_nothing(script, source, undisturbed):
    prepare = (PREPARE, "--source", source, *SMALL, "--out", undisturbed)
    before = contents(undisturbed)
    for option in ("--text_column=id", "--shard_bytes=1e9", "--val_tokens=2e4"):
        fails(script(*prepare, option), "was made with", "--out")
    fails(script(*prepare, "--part=8/9"), "--part=8/9", "7 shards")
    assert contents(undisturbed) == before


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the quick Python of the tests is for POSIX")
@pytest.mark.parametrize(
    "parts", [[""], ["--part=0/2", "--part=1/2"]], ids=["one sequence", "two parts"]
)
def test_killed_before_or_after_any_rename_and_run_again_the_files_are_the_same(
    tmp_path, python, source, parts
):
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


# ---- the hub, and files as it has them -----------------------------------------------------------


@pytest.fixture
def hub(tmp_path) -> Path:
    """A folder as a data set on the hub, which datasets.load_dataset reads in the same way."""
    configs = "- config_name: {0}\n  data_files:\n  - split: {1}\n    path: {0}/*\n"
    names = [("ten", "train"), ("rest", "train_sft")]
    readme = "---\nconfigs:\n" + "".join(configs.format(*name) for name in names) + "---\n"
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "README.md").write_text(readme)
    return tmp_path / "hub"


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl", ".jsonl.gz", ".csv"])
def test_set_of_the_hub_is_streamed_by_its_name_in_parts_and_what_it_lacks_is_named(
    tmp_path, script, documents, hub, suffix
):
    texts = [text for text in documents if text != "NA"] + ["NA"]
    for i in range(3):
        write_documents(hub / "ten" / f"{i}{suffix}", texts[i::3], "body")
        write_documents(hub / "rest" / f"{i}{suffix}", texts[i::3], "body")
    column = "--text_column=body"
    prepare = (PREPARE, *SMALL, "--hub", hub, "--subset=ten", column, "--out", tmp_path / "out")
    for part in ("--part=1/2", "--part=0/2"):
        assert script(*prepare, part).code == 0
    assert "already prepared" in script(*prepare).out
    assert read_record(tmp_path / "out")["source"] == f"{hub}, ten"
    assert_holds(tmp_path / "out", [*texts[::3], *texts[1::3], *texts[2::3]])
    other = ("--hub", hub, "--tokenizer=bytes", "--out", tmp_path / "other")
    fails(script(PREPARE, *other, "--subset=nope"), "nope", "ten", "rest")
    fails(script(PREPARE, *other, "--subset=rest", column), "train", "train_sft", "--split")
    fails(script(PREPARE, *other, "--subset=ten"), "text", "--text_column")
    assert script(PREPARE, *other, "--subset=rest", "--split=train_sft", column).code == 0
    fails(script(PREPARE, *SMALL, "--out", tmp_path / "own"), "network", "--source FILE")
    assert_refused(script(PREPARE, "--hub", hub, "--tokenizer=bytes"), "--out")


FILES = ["a.parquet", "b.arrow", "c.jsonl", "c.json.gz", "d.ndjson.xz", "e.csv", "e.csv.zst"]


@pytest.mark.parametrize("name", [*FILES, "hub"])
def test_killed_in_the_middle_of_a_file_it_reads_no_row_before_again_and_the_bytes_are_the_same(
    tmp_path, monkeypatch, documents, hub, name
):
    """The same for each format: what an earlier process had saved is not read again."""
    texts = documents[1:]
    if name == "hub":
        write_documents(hub / "ten" / "a.parquet", texts)
        options = ["--hub", str(hub), "--subset=ten"]
    else:
        options = ["--source", str(write_documents(tmp_path / name, texts))]
    options += ["--tokenizer=bytes", "--val_tokens=1000"]
    read: list[str] = []
    text_of = prepare_fineweb.text_of

    def read_until(n: int, column: str, row: Any) -> str:
        read.append(text_of(column, row))
        if len(read) == n:
            raise KeyboardInterrupt
        return read[-1]

    monkeypatch.setattr("data.fineweb_edu.prepare.BATCH_CHARS", 1000)
    made(*options, "--out", tmp_path / "undisturbed")
    monkeypatch.setattr("data.prepared.SAVED_TOKENS", 20_000)
    monkeypatch.setattr("data.prepared.usable_cores", lambda: 1)
    monkeypatch.setattr(prepare_fineweb, "text_of", functools.partial(read_until, 250))
    with pytest.raises(KeyboardInterrupt):
        made(*options, "--out", tmp_path / "killed")
    assert not read_record(tmp_path / "killed")["files"]
    with open(tmp_path / "killed" / ".part_0_1.tokens", "ab") as file:
        file.write(b"cut off when it was killed")
    read.clear()
    monkeypatch.setattr(prepare_fineweb, "text_of", functools.partial(read_until, 0))
    made(*options, "--out", tmp_path / "killed")
    assert 30 < len(read) < len(texts) - 150
    assert read == texts[-len(read) :]
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")
