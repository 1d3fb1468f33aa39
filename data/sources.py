"""The rows of data sets: on the Hugging Face hub, or in files here, one by one, from any row on.

The hub, parquet and arrow are read by the package `datasets`, as streams. Files of text (txt,
jsonl, csv) are read line by line: as tables, all lines would need the same keys, missing ones
would become empty, and no error could name a line.
"""

import csv
import itertools
import json
import os
import reprlib
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from data.text_files import TEXTS, documents_of, expanded, lines_in, names_of, packed, read_text
from data.tokenizer import valid_unicode
from deskgpt.errors import reason

FORMATS = (".parquet", ".arrow", *packed(".jsonl", ".ndjson", ".json", ".csv", ".tsv"), *TEXTS)
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
SHARD_BYTES = 400_000_000  # files here share a shard up to this size
VAL_TOKENS = 100_000_000
# Val has a token for so many bytes of the first shard: a tenth, at four bytes per token.
BYTES_PER_VAL_TOKEN = 40
ROWS = 64  # decoded at once of a table
BUFFER = 1 << 20  # bytes of a column of parquet that are read at once

Part = str | int  # a file's path, or the number of a file of a data set on the hub
State = dict[str, Any]  # how far the files of a shard were read, as JSON


class Source(NamedTuple):
    """Files of rows."""

    name: str  # as meta.json records it
    shards: list[list[Part]]  # the files of each shard
    val_tokens: int
    open: Callable[[Any], Iterable[Any]]  # a file's rows; one that is text is a line of jsonl
    revision: str | None = None  # of a data set on the hub

    def version(self, shard: int) -> list[Any]:
        """Return facts that change when somebody changes the files of a shard."""
        stats = [os.stat(part) for part in self.shards[shard] if isinstance(part, str)]
        return [*self.shards[shard], *((found.st_size, found.st_mtime_ns) for found in stats)]

    def batches(
        self, shard: int, value_of: Callable[[Any], Any], size: int, state: State | None
    ) -> Iterator[tuple[list[Any], State]]:
        """Yield value_of each row of a shard from `state` on, in lists whose lengths sum up to
        about `size`, and the state after each list.

        Raises ValueError, which names the row, if one cannot be read or value_of raises an error.
        """
        begin = state or {"file": 0, "row": 0}
        for number in range(begin["file"], len(self.shards[shard])):
            part = self.shards[shard][number]
            n = begin["row"]  # rows that were read; empty lines count
            batch = []
            length = 0
            try:
                for row in itertools.islice(self.open(part), n, None):
                    n += 1
                    if isinstance(row, str):
                        if not row.strip():
                            continue
                        row = json.loads(row)
                    batch.append(value_of(row))
                    length += len(batch[-1])
                    if length >= size:
                        yield batch, {"file": number, "row": n}
                        batch = []
                        length = 0
            except ImportError:
                raise
            except Exception as e:
                # The errors of datasets, of the hub, of its HTTP client and of json share no class.
                where = part if isinstance(part, str) else f"{self.name}, file {part}"
                remedy = "once this is mended, the same command continues"
                raise ValueError(
                    f"{where}, row {n} cannot be read ({reason(e)}); {remedy}"
                ) from None
            if batch:
                yield batch, {"file": number + 1, "row": 0}
            begin = {"row": 0}


def text_of(column: str, row: Any) -> str:
    """Return a row's text in this column; "" for none. Raises ValueError if it is not text."""
    if not isinstance(row, dict) or not isinstance(row.get(column, 0), str | None):
        raise ValueError(f"no text in {column!r} of {reprlib.repr(row)}; --text_column names it")
    return valid_unicode(row[column] or "")


# ---- files ---------------------------------------------------------------------------------------


def local_source(paths: list[Path], column: str | None = None) -> Source:
    """Return a source of these files, of folders all readable ones in name order.

    column: the only one that is read of a table. Raises ValueError.
    """
    files = expanded(paths, FORMATS)
    shards: list[list[Part]] = []
    sizes: list[int] = []  # bytes of each shard's files
    for path in files:
        if not path.is_file() or not path.name.lower().endswith(FORMATS):
            raise ValueError(f"{path} is not a file *{', *'.join(FORMATS)}; is its name right?")
        if not shards or sizes[-1] >= SHARD_BYTES:
            shards.append([])
            sizes.append(0)
        shards[-1].append(os.path.abspath(path))
        sizes[-1] += path.stat().st_size
    name = f"{names_of(files)} ({sum(sizes):,} bytes)"
    return Source(name, shards, val_tokens_of(sizes[0]), lambda path: rows_in(Path(path), column))


def rows_in(path: Path, column: str | None) -> Any:
    """Return the rows of a table, CSV or a JSON array, the documents of a text, or the lines of
    jsonl.
    """
    name = path.name.lower()
    if name.endswith((".parquet", ".arrow")):
        kind = path.suffix.lower().removeprefix(".")
        return stream(kind, column, data_files=escape(str(path)), split="train")
    if name.endswith(packed(".csv", ".tsv")):
        return csv_rows(path)
    if name.endswith(TEXTS):
        return ({column: document} for document in documents_of(lines_in(path)))
    if name.endswith(packed(".json")) and next(lines_in(path), "").startswith("["):
        return json.loads(read_text(path))
    return lines_in(path)


def csv_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of CSV, by the columns of its first line. Raises ValueError."""
    csv.field_size_limit(sys.maxsize)
    separator = "\t" if ".tsv" in path.name.lower() else ","
    for row in csv.DictReader(lines_in(path, newline=""), delimiter=separator, strict=True):
        if None in row or None in row.values():
            raise ValueError("the next one has another number of fields than the first line")
        yield row


# ---- streams of the package datasets -------------------------------------------------------------


def stream(kind: str, column: str | None, path: str | None = None, **options: Any) -> Any:
    """Return the stream of datasets.load_dataset for this kind of file, with little memory: one
    column of parquet (None means all), few rows at once, in small reads. A row group is decoded as
    a whole all the same.

    path: of the data set, else of files of this kind. Raises ValueError if it lacks the column.
    """
    from pyarrow.dataset import ParquetFragmentScanOptions

    if kind == "parquet":
        options["columns"] = [column] if column else None
        options["batch_size"] = ROWS
        options["fragment_scan_options"] = ParquetFragmentScanOptions(
            use_buffered_stream=True, buffer_size=BUFFER, pre_buffer=False
        )
    elif kind == "csv":  # pandas would take the text "NA" for none
        options |= {"keep_default_na": False, "na_filter": False}
    found = quiet_datasets().load_dataset(path or kind, streaming=True, **options)
    if column and found.features is not None and column not in found.features:
        raise ValueError(f"it has no column {column!r}; --text_column names the one with the text")
    return found


def quiet_datasets() -> Any:
    """Return the package datasets, which imports no torch (0.2 GB) and prints nothing."""
    import datasets

    datasets.config.TORCH_AVAILABLE = False
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def hub_source(
    name: str, subset: str | None, split: str, revision: str | None, column: str | None = None
) -> Source:
    """Return a split of a data set on the hub, or of one in a folder here: a shard for each of its
    files.

    revision: None means the newest. column: the only one that is read of parquet. Raises
    ValueError.
    """
    import fsspec

    what = ", ".join(filter(None, [name, subset, split if split != "train" else ""]))
    try:
        if not Path(name).is_dir():
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(name, revision=revision).sha
        at = {"name": subset, "revision": revision}
        builder = quiet_datasets().load_dataset_builder(name, **at)
        dataset = stream(builder.name, column, name, split=split, **at)
        system, first_file = fsspec.url_to_fs(builder.config.data_files[split][0])
        n_bytes = system.size(first_file)
        val_tokens = VAL_TOKENS if name == FINEWEB_EDU else val_tokens_of(n_bytes)
    except Exception as e:  # the errors of the hub and of datasets share no class
        advice = "is there a network, and are --hub, --subset and --split right?"
        raise ValueError(f"the hub does not give {what} ({reason(e)}); {advice}") from None

    def rows(part: int) -> Any:
        return dataset.shard(num_shards=dataset.num_shards, index=part)

    return Source(what, [[i] for i in range(dataset.num_shards)], val_tokens, rows, revision)


def val_tokens_of(n_bytes: int) -> int:
    """Return the tokens of val, if the first shard's files have so many bytes."""
    return max(1, min(VAL_TOKENS, n_bytes // BYTES_PER_VAL_TOKEN))


# ---- command line --------------------------------------------------------------------------------


def add_hub(parser: ArgumentParser, default: str | None) -> Any:
    """Add the options for a data set on the hub; return the group for options that exclude it."""
    about = f"data set on the hub, or a folder with one (default: {default})"
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--hub", metavar="NAME", default=default, help=about)
    parser.add_argument("--subset", help="its configuration, such as sample-10BT")
    parser.add_argument("--split", default="train", help="(default: train)")
    return either
