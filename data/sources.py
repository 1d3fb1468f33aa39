"""The rows of data sets: on the Hugging Face hub, or in files here, one by one, from any row on.

The hub, parquet and arrow are read by the package `datasets`, as streams. Files of text (txt,
jsonl, csv) are read line by line: as tables, all lines would need the same keys, missing ones
would become empty, and no error could name a line.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import os
import reprlib
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from data.text_files import TEXTS, documents_of, expanded, kind_of, lines_in, packed, read_text
from data.tokenizer import valid_unicode
from deskgpt.errors import reason

JSON = packed(".jsonl", ".ndjson", ".json")
CSV = packed(".csv", ".tsv")
FORMATS = (".parquet", ".arrow", *JSON, *CSV, *TEXTS)
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
VAL_TOKENS = 100_000_000
# Of the first shard's files: with four bytes per token, a tenth is val.
BYTES_PER_VAL_TOKEN = 40
ROWS = 64  # of a table that are decoded at once
BUFFER = 1 << 20  # bytes of a column of parquet that are read at once

Part = str | int  # a file's path, or the number of a file of a data set on the hub
State = dict[str, Any]  # how far something was read, as JSON


class Rows:
    """The rows of a file, those left out that an earlier process had read when it took `state`."""

    def __init__(self, name: str, unit: str, rows: Any, state: State | None) -> None:
        self.name = name
        self.unit = unit
        self.n = state["rows"] if state else 0  # that were read; lines count if they are empty
        self._rows = rows
        self._is_stream = hasattr(rows, "load_state_dict")
        if state and self._is_stream:
            rows.load_state_dict(state["datasets"])
        elif state:
            self._rows = itertools.islice(rows, self.n, None)

    def __iter__(self) -> Iterator[Any]:
        for row in self._rows:
            self.n += 1
            if self.unit != "line":
                yield row
            elif row.strip():
                yield json.loads(row)

    def state(self) -> State:
        datasets = self._rows.state_dict() if self._is_stream else None
        return {"rows": self.n, "datasets": datasets}


class Source(NamedTuple):
    """Files of rows."""

    name: str  # as meta.json records it
    shards: list[list[Part]]  # the files of each shard
    val_tokens: int
    open: Callable[[Part, State | None], Rows]
    revision: str | None = None  # of a data set on the hub

    def version(self, shard: int) -> list[Any]:
        """Return what changes when somebody changes the files of a shard."""
        paths = [Path(part) for part in self.shards[shard] if isinstance(part, str)]
        return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]

    def batches(
        self, shard: int, value_of: Callable[[Any], Any], size: int, state: State | None
    ) -> Iterator[tuple[list[Any], State]]:
        """Yield value_of each row of a shard from `state` on, in lists whose lengths sum up to
        about `size`, and the state after each list.

        Raises ValueError, which names the row, if one cannot be read or value_of raises one.
        """
        begun = state["file"] if state else 0
        for number in range(begun, len(self.shards[shard])):
            inner = state["rows"] if state and number == begun else None
            rows = None
            batch: list[Any] = []
            length = 0
            try:
                rows = self.open(self.shards[shard][number], inner)
                for row in rows:
                    batch.append(value_of(row))
                    length += len(batch[-1])
                    if length >= size:
                        yield batch, {"file": number, "rows": rows.state()}
                        batch = []
                        length = 0
                if batch:
                    yield batch, {"file": number, "rows": rows.state()}
            except ImportError:
                raise
            except Exception as e:
                # The errors of datasets, of the hub, of its HTTP client and of json share no class.
                raise named_error(self.shards[shard][number], rows, e) from None


def named_error(part: Part, rows: Rows | None, e: Exception) -> ValueError:
    """Return the error to raise for a row that cannot be read, which names it and the remedy."""
    if isinstance(e, RowError) and rows:
        return ValueError(f"{rows.name}, {rows.unit} {rows.n} {e}")
    if rows and str(e).startswith(rows.name):
        return ValueError(str(e))  # lines_in names the line
    where = f"{rows.name}, {rows.unit} {rows.n}," if rows and rows.n else part
    remedy = "repair it, or wait for the network; the same command continues"
    return ValueError(f"{where} cannot be read ({reason(e)}); {remedy}")


class RowError(ValueError):
    """What is wrong with a row, without its place."""


def text_of(column: str, row: Any) -> str:
    """Return a row's text in this column; "" for none. Raises RowError."""
    if not isinstance(row, dict):
        raise RowError(f"is not an object with a key {column}: {reprlib.repr(row)}")
    if column not in row:
        found = ", ".join(map(str, row))
        raise RowError(
            f"is not an object with a key {column!r}, but with {found[:200]}; name the one with "
            "the text: --text_column"
        )
    value = row[column]
    if not isinstance(value, str | None):
        raise RowError(f"holds {type(value).__name__} in its column {column!r}, not text")
    return valid_unicode(value or "")


# ---- files ---------------------------------------------------------------------------------------


def local_source(paths: list[Path], shard_bytes: int, column: str | None = None) -> Source:
    """Return a source of these files, of folders all readable ones in name order.

    column: the only one that is read of a table. Raises ValueError.
    """
    files = expanded(paths, FORMATS)
    shards: list[list[Part]] = []
    sizes: list[int] = []  # bytes of each shard's files
    for path in files:
        if not path.is_file() or not path.name.lower().endswith(FORMATS):
            kind = kind_of(path)
            remedy = f"; it is {kind}" if kind else ""
            raise ValueError(f"{path} is not a file *{', *'.join(FORMATS)}{remedy}")
        if not shards or sizes[-1] >= shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(os.path.abspath(path))
        sizes[-1] += path.stat().st_size
    names = ", ".join(path.name for path in files[:3])
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    val_tokens = val_tokens_of(sizes[0])
    read = functools.partial(rows_in_file, column=column)
    return Source(f"{names}{more} ({sum(sizes):,} bytes)", shards, val_tokens, read)


def rows_in_file(part: Part, state: State | None, column: str | None) -> Rows:
    """Return the rows of a file: of a table, a JSON array or CSV, the lines of jsonl, or the
    documents of a text.
    """
    path = Path(str(part))
    name = path.name.lower()
    unit = "row"
    rows: Any
    if name.endswith((".parquet", ".arrow")):
        kind = path.suffix.lower()[1:]
        options = parquet_options(column) if kind == "parquet" else {}
        files = escape(str(path))
        rows = checked(stream(kind, data_files=files, split="train", **options), column)
    elif name.endswith(CSV):
        rows = csv_rows(path)
    elif name.endswith(TEXTS):
        unit = "document"
        rows = ({column: document} for document in documents_of(lines_in(path)))
    else:
        rows = json_array(path)
        if rows is None:
            unit = "line"
            rows = lines_in(path)
    return Rows(str(path), unit, rows, state)


def csv_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of CSV, by the columns of its first line. Raises ValueError."""
    csv.field_size_limit(sys.maxsize)
    separator = "\t" if ".tsv" in path.name.lower() else ","
    for row in csv.DictReader(lines_in(path, newline=""), delimiter=separator, strict=True):
        if None in row or None in row.values():
            raise ValueError("it has another number of fields than the first line")
        yield row


def json_array(path: Path) -> list[Any] | None:
    """Return the entries of a file that is one array in JSON, None if it has a value in each
    line.
    """
    lines = (line for line in lines_in(path) if line.strip())
    first = next(lines, "")
    with suppress(ValueError, RecursionError):  # of which the lines' own reader speaks
        if first.lstrip().startswith("[") and (not is_json(first) or not next(lines, "")):
            return json.loads(read_text(path))
    return None


def is_json(line: str) -> bool:
    with suppress(ValueError):
        json.loads(line)
        return True
    return False


# ---- streams of the package datasets -------------------------------------------------------------


def parquet_options(column: str | None) -> dict[str, Any]:
    """Return options with which datasets reads parquet in little memory: a column, few rows at
    once, in small reads. A row group is decoded as a whole all the same.
    """
    from pyarrow.dataset import ParquetFragmentScanOptions

    scan = ParquetFragmentScanOptions(
        use_buffered_stream=True, buffer_size=BUFFER, pre_buffer=False
    )
    columns = [column] if column else None
    return {"columns": columns, "batch_size": ROWS, "fragment_scan_options": scan}


def stream(path: str, name: str | None = None, **options: Any) -> Any:
    """Return the stream of load_dataset."""
    datasets = quiet_datasets()
    return datasets.load_dataset(
        path, name=name, streaming=True, cache_dir=scratch().name, **options
    )


def quiet_datasets() -> Any:
    """Return the package datasets, which imports no torch (0.2 GB) and prints nothing."""
    import datasets

    datasets.config.TORCH_AVAILABLE = False
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


@functools.cache
def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for the lock files of datasets, which goes when the process ends."""
    return tempfile.TemporaryDirectory()


def checked(rows: Any, column: str | None) -> Any:
    """Return the stream. Raises ValueError if it lacks the column."""
    if column and rows.features is not None and column not in rows.features:
        raise ValueError(f"it has no column {column!r}; name the one with the text: --text_column")
    return rows


def hub_source(
    name: str, subset: str | None, split: str, revision: str | None, column: str | None = None
) -> Source:
    """Return a split of a data set on the hub, or of one in a folder here: a shard for each of its
    files.

    revision: None means the newest. column: the only one that is read of parquet. Raises
    ValueError.
    """
    what = ", ".join(filter(None, [name, subset, split if split != "train" else ""]))
    try:
        if not Path(name).is_dir():
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(name, revision=revision).sha
        at = {"revision": revision}
        datasets = quiet_datasets()
        builder = datasets.load_dataset_builder(name, subset, cache_dir=scratch().name, **at)
        files = builder.config.data_files
        if split not in files:
            raise ValueError(f"it has no split {split!r}, but {', '.join(files)}: --split")
        options: dict[str, Any] = {}
        if builder.name == "parquet":
            options = parquet_options(column)
        elif builder.name == "csv":  # pandas would take the text "NA" for none
            options = {"keep_default_na": False, "na_filter": False}
        dataset = checked(stream(name, subset, split=split, **at, **options), column)
        val_tokens = VAL_TOKENS
        if name != FINEWEB_EDU:
            val_tokens = val_tokens_of(size_of(files[split][0]))
    except (
        Exception
    ) as e:  # the errors of the hub, of its HTTP client and of datasets share no class
        advice = "is there a network? Are --hub and --subset right? --source FILE reads local files"
        raise ValueError(f"the hub does not give {what} ({reason(e)}); {advice}") from None

    def rows(part: Part, state: State | None) -> Rows:
        of_file = dataset.shard(num_shards=dataset.num_shards, index=part)
        # By row groups, where a file has some: resuming reads none of those before.
        return Rows(f"{what}, file {part}", "row", of_file.reshard(), state)

    return Source(what, [[i] for i in range(dataset.num_shards)], val_tokens, rows, revision)


def size_of(url: str) -> int:
    """Return the bytes of a file, here or on the hub."""
    import fsspec

    system, path = fsspec.url_to_fs(url)
    return system.size(path)


def val_tokens_of(n_bytes: int) -> int:
    """Return the tokens of val, if the first shard's files have so many bytes."""
    return max(1, min(VAL_TOKENS, n_bytes // BYTES_PER_VAL_TOKEN))


# ---- command line --------------------------------------------------------------------------------


def add_hub(parser: ArgumentParser, default: str | None) -> None:
    """Add the options for a data set on the hub."""
    about = f"data set on the hub, or a folder with one (default: {default or 'none'})"
    parser.add_argument("--hub", metavar="NAME", default=default, help=about)
    parser.add_argument("--subset", help="its configuration, such as sample-10BT")
    parser.add_argument("--split", default="train", help="(default: train)")
