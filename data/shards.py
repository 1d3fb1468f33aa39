"""Documents to token files: read from files here or on the hub, tokenized in several threads."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.text_files import PACKED, TEXTS, documents_of, lines_in
from data.tokenizer import Ids, Tokenizer, encoded_document, valid_unicode
from deskgpt.errors import reason
from deskgpt.files import replacing
from deskgpt.limits import usable_cores

FORMATS = (".parquet", *(f".jsonl{packed}" for packed in PACKED), *TEXTS)
BATCH_CHARS = 1 << 19  # many, so that handing a batch to a thread costs nothing in comparison
ROWS = 64  # of a parquet file that are decoded at once
# bytes: without a buffer, pyarrow reads the text of a row group, often gigabytes, at once
BUFFER = 8 << 20
NO_TOKENS = np.zeros(0, np.uint16)

Entry = dict[str, Any]  # of a shard in meta.json: tokens, sha256, and cut if there were more tokens


# ---- documents -----------------------------------------------------------------------------------


def documents_in_file(path: str, text_column: str) -> Iterator[str]:
    """Yield the documents of a file: rows of parquet (also hf:// URLs), lines of jsonl, what
    <|endoftext|> separates.

    Raises ValueError, ImportError.
    """
    where = path
    try:
        if path.lower().endswith(".parquet"):
            yield from parquet_texts(path, text_column)
        elif path.lower().endswith(TEXTS):
            yield from documents_of(lines_in(Path(path)))
        else:
            # Read line by line: as a table, the other columns would have to keep their types.
            for number, line in enumerate(lines_in(Path(path)), 1):
                where = f"{path}, line {number},"
                if line.strip():
                    yield valid_unicode(as_text(json.loads(line)[text_column]))
    except ImportError:
        raise
    except KeyError:
        raise ValueError(
            f"{where} has no column {text_column!r}; name the one with the text: --text_column"
        ) from None
    except Exception as e:
        # The errors of the hub, of its HTTP client, of pyarrow and of json share no class.
        remedy = (
            "repair it, or wait for the network; the same command continues, finished "
            "shards are kept"
        )
        raise ValueError(f"{where} cannot be read ({reason(e)}); {remedy}") from None


def parquet_texts(path: str, text_column: str) -> Iterator[str]:
    """Yield the texts of a column of a parquet file. Raises KeyError if it has no such column."""
    from pyarrow.parquet import ParquetFile

    file: Any = path
    if "://" in path:
        from huggingface_hub import HfFileSystem

        file = HfFileSystem().open(path)
    with ParquetFile(file, buffer_size=BUFFER) as parquet:
        if text_column not in parquet.schema_arrow.names:
            raise KeyError(text_column)
        for group in range(parquet.num_row_groups):
            for batch in parquet.iter_batches(ROWS, [group], [text_column]):
                yield from map(as_text, batch[text_column].to_pylist())


def as_text(value: Any) -> str:
    """Return a value of the column with the text; "" for none. Raises ValueError if it is not
    text.
    """
    if not isinstance(value, str | None):
        raise ValueError(f"the column holds {type(value).__name__}, not text")
    return value or ""


# ---- tokens --------------------------------------------------------------------------------------


def batches_of(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield documents in lists of about BATCH_CHARS characters."""
    batch: list[str] = []
    n_chars = 0
    for document in documents:
        batch.append(document)
        n_chars += len(document)
        if n_chars >= BATCH_CHARS:
            yield batch
            batch = []
            n_chars = 0
    if n_chars:
        yield batch


def tokens_in(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[Ids]:
    """Yield the tokens of documents in pieces, none of them empty, encoded ahead in several
    threads.
    """

    def encode(batch: list[str]) -> Ids:
        return np.concatenate([encoded_document(tokenizer, text) for text in batch])

    # Threads, not processes: tiktoken releases Python's lock, nothing is copied, and none is left
    # when this is killed.
    cores = usable_cores()
    waiting = deque[Future[Ids]]()
    pool = ThreadPoolExecutor(cores)
    try:
        for batch in batches_of(documents):
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def write_shards(folder: Path, sizes: dict[str, int], pieces: Iterator[Ids]) -> dict[str, Entry]:
    """Write tokens to files one after another, at most sizes[name] of them to each.

    Return the entries of these files in meta.json. No file is empty: one for which no tokens are
    left has no entry. Raises OSError.
    """
    entries = {}
    ids = next(pieces, NO_TOKENS)  # the tokens left of the current piece
    for name, at_most in sizes.items():
        if not len(ids):
            break
        tokens = 0
        digest = hashlib.sha256()
        try:
            bar = tqdm(
                desc=name, unit="tok", unit_scale=True, disable=None, leave=False, smoothing=0.05
            )
            with bar, replacing(folder / name) as file:
                while len(ids) and tokens < at_most:
                    taken = ids[: at_most - tokens]
                    content = taken.astype("<u2", copy=False).tobytes()
                    file.write(content)
                    digest.update(content)
                    tokens += len(taken)
                    bar.update(len(taken))
                    ids = ids[len(taken) :]
                    if not len(ids):
                        ids = next(pieces, NO_TOKENS)
        except OSError as e:
            remedy = "finished shards are kept: free some disk space and run the same command again"
            raise OSError(f"cannot write {folder / name}: {e.strerror or e}; {remedy}") from None
        print(f"{name}: {tokens:,} tokens", flush=True)
        entries[name] = {"tokens": tokens, "sha256": digest.hexdigest()}
        if tokens == at_most:
            entries[name]["cut"] = True
    return entries
