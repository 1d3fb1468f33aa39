"""Documents as a stream: rows of parquet and jsonl files, whole txt files, on this machine or on the hub."""

from __future__ import annotations

import glob
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from tqdm import tqdm

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".txt": "text"}
PACKED = (".gz", ".zst")
ATTEMPTS, LONGEST_PAUSE_S = 9, 60  # with pauses of 1, 2, 4 ... 60, 60 seconds, beside those of the hub's own library

Result = TypeVar("Result")


class Row(NamedTuple):
    file: int
    row: int  # of the file
    begins: bool  # whether a document begins with it
    text: str


@dataclass(frozen=True)
class Source:
    """Files of documents, local or hf:// URLs: rows of parquet and lines of jsonl files, whole txt files.

    A txt file's rows are pieces of it; its line ends become "\\n".
    """

    name: str  # what meta.json calls it
    files: list[str]
    text_column: str = "text"
    revision: str | None = None  # of a data set on the hub

    def rows(self, file: int, row: int) -> Iterator[Row]:
        """The rows from there on. Waits and tries again where the network fails.

        Raises ValueError where it stays away or a file is damaged.
        """
        failures = 0
        while file < len(self.files):
            path = self.files[file]
            try:
                for text in self._texts(path, row):
                    yield Row(file, row, format_of(path) != "text" or row == 0, text)
                    row, failures = row + 1, 0
                file, row = file + 1, 0
            except ImportError:
                raise
            except Exception as e:  # the hub's, its HTTP client's, pyarrow's and json's errors share no class
                if not is_network_fault(e):
                    raise self.unreadable(path, e) from None
                failures += 1
                wait_or_give_up(e, failures)

    def _texts(self, path: str, first: int) -> Iterator[str]:
        import datasets
        import pyarrow.types as types
        from pyarrow.dataset import ParquetFragmentScanOptions

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs, over many lines, what it raises
        if path.endswith(".zst"):
            import zstandard  # noqa: F401 (what `datasets` unpacks it with: where it is missing, this says so)
        files = [path if "://" in path else glob.escape(path)]  # `datasets` takes patterns
        if format_of(path) != "parquet":
            options = {"sample_by": "line", "keep_linebreaks": True}
            stream = datasets.load_dataset("text", data_files=files, split="train", streaming=True, **options)
            lines = (row["text"] for row in stream)
            # Lines of jsonl are read one by one: as a table, other columns would have to keep their types.
            texts = pieces_of_lines(lines) if format_of(path) == "text" else map(self._of_json, lines)
            yield from itertools.islice(texts, first, None)
            return
        stream = datasets.load_dataset(
            "parquet",
            data_files=files,
            split="train",
            streaming=True,
            columns=[self.text_column],
            batch_size=256,
            # pre_buffer=True, the default, holds all that was read of a file until its end: 2 GB of the hub's.
            fragment_scan_options=ParquetFragmentScanOptions(pre_buffer=False),
        )
        for table in (stream.skip(first) if first else stream).with_format("arrow").iter(batch_size=64):
            column = table[self.text_column]
            kind = column.type.value_type if types.is_dictionary(column.type) else column.type
            if not (types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)):
                raise ValueError(f"column {self.text_column} holds {column.type}, not text")
            yield from (text or "" for text in column.to_pylist())

    def _of_json(self, line: str) -> str:
        value = json.loads(line.lstrip("\ufeff")) if not line.isspace() else {self.text_column: ""}
        text = value[self.text_column] if isinstance(value, dict) else value
        if not isinstance(text, str | None) or not isinstance(value, dict):
            raise ValueError(f"a line holds {type(text).__name__}, not an object with text in {self.text_column}")
        return (text or "").encode("utf-8", "replace").decode()  # json can spell halves of surrogate pairs

    def unreadable(self, path: str, e: Exception) -> ValueError:
        """What to raise where reading path raised e."""
        reason = (str(e).strip() or type(e).__name__).splitlines()[0][:160]
        if isinstance(e, KeyError) or "No match for FieldRef" in reason:
            return ValueError(f"{path} has no column {self.text_column!r}; name the one with the text: --text_column")
        return ValueError(
            f"{path} cannot be read as {format_of(path)} ({reason}); repair it or leave it out: what is finished stays"
        )


def format_of(path: str) -> str:
    """parquet, json or text, by suffix. Raises ValueError."""
    name = Path(path).name.lower()
    packed = name.endswith(PACKED)
    suffix = Path(Path(name).stem if packed else name).suffix
    if suffix not in FORMATS or (packed and suffix == ".parquet"):
        raise ValueError(f"{path} is none of *{', *'.join(FORMATS)}, the last two also packed as {' or '.join(PACKED)}")
    return FORMATS[suffix]


def pieces_of_lines(lines: Iterator[str], size: int = 1 << 20) -> Iterator[str]:
    """As `pieces`, of a text that comes line by line: at least `size` characters, cut where no encoding notices."""
    held: list[str] = []
    n = 0
    for line in lines:
        if n >= size and not line[0].isspace() and len(held[-1]) > 1 and not held[-1][-2].isspace():
            yield "".join(held)
            held, n = [], 0
        held.append(line)
        n += len(line)
    if held:
        yield "".join(held)


# ---- network -------------------------------------------------------------------------------------------------


def is_network_fault(e: BaseException) -> bool:
    """Whether e, or what led to it, is a connection's fault or a server's (status 408, 429, 500 and more)."""
    cause: BaseException | None = e
    while cause is not None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status in (408, 429) or status >= 500
        # The system's, httpx's, requests's, aiohttp's: no common class, but these names.
        names = {c.__name__ for c in type(cause).__mro__}
        if names & {"ConnectionError", "TimeoutError", "SSLError", "TransportError", "RequestException", "ClientError"}:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def retried(call: Callable[[], Result]) -> Result:
    """What call returns, tried again where the network fails. Raises ValueError where that or the hub's no stays."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it tells of each attempt of its own, over many lines
    for failures in itertools.count(1):
        try:
            return call()
        except Exception as e:
            if not is_network_fault(e):
                if not hasattr(e, "response"):
                    raise
                reason = " ".join(str(e).split())[:160]
                raise ValueError(f"the hub refuses ({reason}...); does it ask for an account? hf auth login") from None
            wait_or_give_up(e, failures)
    raise AssertionError


def wait_or_give_up(e: Exception, failures: int) -> None:
    """Sleeps longer with each failure in a row. Raises ValueError, with what to run next, after the last attempt."""
    reason = (str(e).strip() or type(e).__name__).splitlines()[0][:160]
    if failures >= ATTEMPTS or "offline" in type(e).__name__.lower():
        raise ValueError(
            f"the network failed {failures} times ({reason}); finished shards are kept, and the same command goes "
            "on behind them; --source FILE reads local files"
        ) from None
    pause_s = min(2 ** (failures - 1), LONGEST_PAUSE_S)
    tqdm.write(f"network: {reason}; attempt {failures + 1} of {ATTEMPTS} in {pause_s}s")
    time.sleep(pause_s)
