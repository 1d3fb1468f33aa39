"""Work that all prepare.py share: finding the tokenizer that is asked for, and writing a folder of
token files, at once or in shards: tokenized in several threads, continued where an earlier process
was stopped.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from data.sources import Source, State
from data.token_files import MASK_SUFFIX, read_record, to_json
from data.tokenizer import Ids, Tokenizer, from_meta
from deskgpt.files import (
    cannot_write,
    file_sha256,
    locked_folder,
    remove_leftovers,
    replacing,
    sha256,
    write_atomically,
)
from deskgpt.limits import usable_cores

BATCH_CHARS = 1 << 19  # many, so that handing a batch to a thread costs nothing in comparison
SAVED_TOKENS = 1 << 24  # after so many, those made so far are saved: every few seconds
PIECE = 1 << 20  # bytes that are read back at once
NO_TOKENS = np.zeros(0, np.uint16)

Entry = dict[str, Any]  # a shard in meta.json: tokens, sha256, and cut if there were more tokens
Tokens = npt.NDArray[Any]  # (n,) uint16, with more bits if each has a mask


def write_dataset(
    folder: Path,
    splits: dict[str, Ids],
    tokenizer: Tokenizer,
    source: str,
    masks: dict[str, npt.NDArray[np.uint8]] | None = None,
    **about: Any,
) -> None:
    """Write {"train": ids, "val": ids} as bare token files with masks, and meta.json, which also
    gets `about`.

    val.bin is removed first and written last: wherever this stops, the folder holds the old data,
    the new, or no val.bin. Raises ValueError if another prepare.py is at work there, OSError if the
    disk is full.
    """
    meta = {
        "tokenizer": tokenizer.meta(),
        "vocab_size": tokenizer.vocab_size,
        "source": source,
        **about,
    }
    contents = {}
    for key, suffix, dtype, arrays in (
        ("files", ".bin", "<u2", splits),
        ("masks", MASK_SUFFIX, "u1", masks or {}),
    ):
        for split, array in arrays.items():
            content = array.astype(dtype).tobytes()
            contents[f"{split}{suffix}"] = content
            entry = {"tokens": len(array), "sha256": sha256(content)}
            meta[key] = meta.get(key, {}) | {f"{split}{suffix}": entry}
    contents["meta.json"] = to_json(meta)
    with locked_folder(folder):
        remove_leftovers(folder, *contents)
        for name in ("val.bin", "val.mask", "train.mask"):
            (folder / name).unlink(missing_ok=True)
        for name in (*sorted(contents.keys() - {"val.bin"}), "val.bin"):
            write_atomically(folder / name, contents[name])


def named_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of this name, or that of the prepared folder with this path.

    Raises ValueError if there is none.
    """
    if name in ("bytes", "gpt2"):
        return from_meta({"name": name})
    record = read_record(Path(name))
    if record:
        return from_meta(record["tokenizer"])
    raise ValueError(
        f"--tokenizer={name} is not bytes, gpt2 or the path of a prepared folder; "
        "data/text/prepare.py also makes char and bpe of a text (tokenizers of other "
        "programs, such as tokenizer.json, are not read)"
    )


# ---- shards, each made from a part of a source ---------------------------------------------------


def tokens_in(
    batches: Iterable[tuple[list[Any], State]], encode: Callable[[Any], Tokens]
) -> Iterator[tuple[Tokens, State]]:
    """Yield the tokens of each batch, encoded ahead in several threads, and the state after it."""

    def tokens_of(batch: list[Any]) -> Tokens:
        return np.concatenate([encode(value) for value in batch])

    # Threads, not processes: tiktoken releases Python's lock, nothing is copied, and none is left
    # when this is killed.
    cores = usable_cores()
    waiting = deque[tuple[Future[Tokens], State]]()
    pool = ThreadPoolExecutor(cores)
    try:
        for batch, state in batches:
            waiting.append((pool.submit(tokens_of, batch), state))
            if len(waiting) > 2 * cores:
                future, after = waiting.popleft()
                yield future.result(), after
        for future, after in waiting:
            yield future.result(), after
    finally:
        pool.shutdown(cancel_futures=True)


def resumed(
    path: Path,
    settings: Any,
    source: Source,
    shard: int,
    value_of: Callable[[Any], Any],
    size: int,
    encode: Callable[[Any], Tokens],
    dtype: str = "<u2",
) -> Iterator[Tokens]:
    """Yield the tokens that encode makes of value_of each row of a shard, in batches of this size,
    and save them at `path` meanwhile.

    If an earlier process was stopped with the same settings, its tokens come first, and the rows
    that it read are left out. Raises ValueError, OSError.
    """
    key = sha256(json.dumps([settings, source.revision, source.version(shard)]).encode())
    progress = path.with_suffix(".json")
    state = None
    with suppress(OSError, ValueError, KeyError, TypeError):  # there is none, or a damaged one
        saved = json.loads(progress.read_bytes())
        if saved["key"] == key and path.stat().st_size >= saved["bytes"]:
            os.truncate(path, saved["bytes"])  # without what was written after it was saved
            state = saved["state"]
    if state is None:
        forget(path)
    else:
        with open(path, "rb") as file:
            while content := file.read(PIECE):
                yield np.frombuffer(content, dtype)

    unsaved = []
    for ids, after in tokens_in(source.batches(shard, value_of, size, state), encode):
        if len(ids):
            yield ids
        unsaved.append(ids)
        if sum(map(len, unsaved)) >= SAVED_TOKENS:
            with open(path, "ab") as file:
                file.write(np.concatenate(unsaved).astype(dtype).tobytes())
                file.flush()
                os.fsync(file.fileno())
            saved = {"key": key, "bytes": path.stat().st_size, "state": after}
            write_atomically(progress, json.dumps(saved).encode())
            unsaved = []


def forget(path: Path) -> None:
    """Remove the progress that `resumed` has saved at this path."""
    progress = path.with_suffix(".json")
    progress.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    remove_leftovers(path.parent, progress.name)


def write_shards(folder: Path, sizes: dict[str, int], pieces: Iterator[Tokens]) -> dict[str, Entry]:
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
        try:
            bar = tqdm(desc=name, unit="tok", unit_scale=True, disable=None, leave=False)
            with bar, replacing(folder / name) as file:
                while len(ids) and tokens < at_most:
                    taken = ids[: at_most - tokens]
                    file.write(taken.astype("<u2", copy=False).tobytes())
                    tokens += len(taken)
                    bar.update(len(taken))
                    ids = ids[len(taken) :]
                    if not len(ids):
                        ids = next(pieces, NO_TOKENS)
        except OSError as e:
            raise cannot_write(folder / name, e) from None
        print(f"{name}: {tokens:,} tokens", flush=True)
        entries[name] = {"tokens": tokens, "sha256": file_sha256(folder / name)}
        if tokens == at_most:
            entries[name]["cut"] = True
    return entries
