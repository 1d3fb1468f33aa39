"""Token files: their format, the files of a split, and the description of a data folder.

A data folder holds `train*.bin` and `val*.bin`: little-endian uint16 token ids, either bare (nanoGPT) or after
llm.c's header of 256 int32 (magic 20240520, version 1, number of tokens). Several files of one split are its
shards, in name order. `meta.json` in the same folder describes tokenizer, source and files; where it is missing,
nanoGPT's `meta.pkl` is read.

Beside a token file there may be a loss mask of the same name, `train*.mask` or `val*.mask`: one uint8 per token, 0
where it is not to be learned as a target. Either all shards of a split have one or none has.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data.meta_files import from_json, from_pickle, shared_from_json, with_checksum
from data.tokenizer import Ids, Tokenizer, padded_vocab_size
from deskgpt.machine.files import file_sha256, sha256, write_atomically
from deskgpt.run.lock import if_free

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
TOKEN_BYTES = 2
MASK_SUFFIX = ".mask"
PIECE = 1 << 20  # tokens that are read at once from a file that is read whole
MOST_OPEN = 128  # files at once, of all splits: a process may have 1,024 on most Linux systems, 256 on macOS


class Facts(NamedTuple):
    """About a file, to notice changes by."""

    size: int  # bytes
    written_ns: int  # the instant of the last writing, which programs can set as they like
    changed_ns: int  # the instant of any last change, its name's included, which they cannot (Windows: of its making)


# ---- one file ------------------------------------------------------------------------------------------------


def write_tokens(path: Path, ids: Ids, header: bool = False) -> None:
    """Writes token ids (n,) as a token file, with llm.c's header if asked. Raises OSError."""
    content = ids.astype("<u2").tobytes()
    if header:
        content = llmc_header(len(ids)) + content
    write_atomically(path, content)


def llmc_header(tokens: int) -> bytes:
    """The header of a file in llm.c's format that holds this number of tokens."""
    head = np.zeros(HEADER_BYTES // 4, "<i4")
    head[:3] = MAGIC, VERSION, tokens
    return head.tobytes()


def read_tokens(path: Path) -> Ids:
    """The token ids (n,) of a file, memory-mapped: for files that nobody else changes meanwhile.

    Raises ValueError where the file is not a token file.
    """
    begin, tokens = place_of_tokens(path)
    return np.memmap(path, "<u2", "r", begin, (tokens,))


def place_of_tokens(path: Path) -> tuple[int, int]:
    """(first byte, number) of the tokens in a file. Raises ValueError where it is not a token file, OSError."""
    status = path.stat()
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a file; prepare the data again")
    if size == 0:
        raise ValueError(f"{path} is empty; prepare the data again")
    if size >= HEADER_BYTES:
        magic, version, tokens = np.fromfile(path, "<i4", 3).tolist()
        expected = HEADER_BYTES + TOKEN_BYTES * tokens
        # Bare tokens may happen to begin with the magic, but hardly with another part of a header that fits too.
        right = [magic == MAGIC, version == VERSION, size == expected]
        if all(right) and tokens:
            return HEADER_BYTES, tokens
        if sum(right) >= 2:
            raise ValueError(
                f"{path}: its header says {tokens:,} tokens, which take {expected:,} bytes, and the file has "
                f"{size:,} (magic {magic}, version {version}); prepare the data again"
            )
    if size % TOKEN_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes, an odd number: these are not uint16 tokens; prepare the data again"
        )
    return 0, size // TOKEN_BYTES


class Descriptor:
    """The system's number of an open file, which is closed when nobody holds this any more: a thread may still read."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self.fd).atexit = False  # at exit a thread may still read

    def facts(self) -> Facts:
        status = os.fstat(self.fd)
        return Facts(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


_open: weakref.WeakKeyDictionary[OpenFile, Descriptor] = weakref.WeakKeyDictionary()  # the one read last is last
_changing = threading.Lock()  # of _open


class OpenFile:
    """A file that is open for reading, of which nothing is held in memory.

    It is read, not mapped: where a mapped file is cut short under a run, the system ends the process with SIGBUS. When
    a new file takes its place by a rename, as prepare.py does it, the old content is still read here.

    With more than MOST_OPEN of them, the ones that were not read for the longest time are closed, and opened again when
    they are read. Then a new file in the place of such a one is read, and counts as written into.

    Several threads may read at once. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: Facts | None = None  # when somebody last asked
        self._now: Facts | None = None  # when it was last looked at

    @functools.cached_property
    def facts(self) -> Facts:
        """Those when it was first opened."""
        self._seen = self.current_facts()
        return self._seen

    def sha256(self, cancelled: Callable[[], bool] = lambda: False) -> str | None:
        """The SHA-256 of the whole file, header included, in hex digits; None if cancelled before its end."""
        digest = hashlib.sha256()
        size = self.facts.size
        for at in range(0, size, TOKEN_BYTES * PIECE):
            if cancelled():
                return None
            digest.update(self._read_bytes(at, min(TOKEN_BYTES * PIECE, size - at)))
        return digest.hexdigest()

    def current_facts(self) -> Facts:
        return self._descriptor().facts()

    def was_written(self) -> bool:
        """Whether somebody has written into the file since it was first opened, or since this was last asked.

        A file that is closed at the moment is asked about once it is open again.
        """
        descriptor = _open.get(self)
        if descriptor:
            self._now = descriptor.facts()
        before = self._seen
        self._seen = self._now
        if before is None or self._now is None:
            return False
        return (self._now.size, self._now.written_ns) != (before.size, before.written_ns)

    def _descriptor(self) -> Descriptor:
        """That of this file, which is opened if it is not open."""
        with _changing:
            descriptor = _open.pop(self, None)
            if descriptor:
                _open[self] = descriptor
                return descriptor
        descriptor = Descriptor(self.path)  # meanwhile others read
        self._now = descriptor.facts()
        with _changing:
            _open[self] = descriptor
            if len(_open) > MOST_OPEN:
                del _open[next(iter(_open))]
        return descriptor

    def _read_bytes(self, at: int, n: int) -> bytes:
        """n bytes of the file. Raises ValueError where the file has become shorter, OSError."""
        content = b""
        try:
            descriptor = self._descriptor()
            while len(content) < n:
                more = pread(descriptor.fd, n - len(content), at + len(content))
                if not more:
                    raise ValueError(
                        f"{self.path} became shorter while it was in use: it had {self.facts.size:,} bytes, now it has "
                        f"{self.current_facts().size:,}; prepare the data again, then resume"
                    )
                content = content + more if content else more
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self.path)) from None
        return content


class Shard(OpenFile):
    """A token file that is open for reading: `len(shard)` tokens, any of them at hand.

    listed: its number of tokens in meta.json. Then the file is opened and checked when it is first read.

    Raises ValueError where the file is not a token file, OSError.
    """

    def __init__(self, path: Path, listed: int | None = None) -> None:
        super().__init__(path)
        self._listed = listed
        self._tokens = self._place[1] if listed is None else listed

    def __len__(self) -> int:
        return self._tokens

    @functools.cached_property
    def _place(self) -> tuple[int, int]:
        """As place_of_tokens."""
        begin, tokens = place_of_tokens(self.path)
        if self.facts.size != begin + TOKEN_BYTES * tokens:
            raise ValueError(f"{self.path} changed while it was opened; start again")
        if self._listed is not None and self._listed != tokens:
            raise not_as_listed(self.path, tokens, self._listed)
        return begin, tokens

    def read(self, first: int, n: int) -> Ids:
        """Tokens first .. first + n - 1, all of which the file had when it was opened. Raises as read_bytes."""
        return np.frombuffer(self._read_bytes(self._place[0] + TOKEN_BYTES * first, TOKEN_BYTES * n), "<u2")

    def pieces(self) -> Iterator[tuple[int, Ids]]:
        """All tokens, PIECE at a time, each time with the place of the first one. Raises as read_bytes."""
        for first in range(0, self._tokens, PIECE):
            yield first, self.read(first, min(PIECE, self._tokens - first))


class Mask(OpenFile):
    """The loss mask of a shard, open for reading. Raises ValueError where it is not one, OSError."""

    def __init__(self, shard: Shard) -> None:
        path = mask_of(shard.path)
        if not path.is_file():
            raise ValueError(f"{shard.path} has no loss mask {path.name} beside it; prepare the data again")
        super().__init__(path)
        if self.facts.size != len(shard):
            raise ValueError(
                f"{path} has {self.facts.size:,} bytes, and {shard.path.name} {len(shard):,} tokens, which need one "
                "each; prepare the data again"
            )

    def __len__(self) -> int:
        return self.facts.size

    def read(self, first: int, n: int) -> npt.NDArray[np.bool_]:
        """Whether tokens first .. first + n - 1 are learned as targets. Raises as read_bytes."""
        return np.frombuffer(self._read_bytes(first, n), np.uint8) != 0


def mask_of(path: Path) -> Path:
    """Where the loss mask of a token file is, if it has one."""
    return path.with_suffix(MASK_SUFFIX)


_seeking = threading.Lock()


def pread(fd: int, n: int, at: int) -> bytes:
    """At most n bytes of an open file, from byte `at` on; none at its end."""
    if hasattr(os, "pread"):
        return os.pread(fd, n, at)
    with _seeking:  # Windows: the threads share the file's position
        os.lseek(fd, at, os.SEEK_SET)
        return os.read(fd, n)


# ---- the files of a split ------------------------------------------------------------------------------------


def token_files(folder: Path, split: str) -> list[Path]:
    """The shards of a split, in order. Raises ValueError, which says how to make them, where there are none."""
    return [folder / name for name in shard_names(folder, split)]


def shard_names(folder: Path, split: str) -> list[str]:
    """The names of token_files, much faster where they are very many."""
    found = fnmatch.filter(os.listdir(folder) if folder.is_dir() else [], f"{split}*.bin")
    if not found:
        raise ValueError(how_to_make(folder, split))
    return sorted(found, key=os.path.normcase)


def how_to_make(folder: Path, split: str) -> str:
    """The message where a split has no files: the script that makes them, or the data that there is instead."""
    script = folder / "prepare.py"
    if script.exists():
        return f"{folder} has no {split}*.bin; run: python {os.path.relpath(script)}"
    state = f"has no {split}*.bin" if folder.is_dir() else "does not exist"
    prepared = sorted({path.parent.name for path in folder.parent.glob("*/train*.bin")})
    if prepared:
        return f"dataset folder {folder} {state}; prepared: {', '.join(prepared)}"
    scripts = sorted(path.parent.name for path in Path(__file__).parent.glob("*/prepare.py"))
    return f"dataset folder {folder} {state}; python data/{{{','.join(scripts)}}}/prepare.py makes some"


def check_listed(folder: Path, split: str, found: dict[str, int]) -> None:
    """Raises ValueError where a file that meta.json lists for the split is missing or has another number of tokens.

    found: the number of tokens of each file, by name.
    """
    for name, entry in listed_files(folder).items():
        tokens = entry["tokens"]
        if name.startswith(split) and found.get(name) != tokens:
            raise not_as_listed(folder / name, found.get(name), tokens)


def not_as_listed(path: Path, found: int | None, listed: int) -> ValueError:
    """The error to raise where a file has other than the listed number of tokens, or is not there (None)."""
    state = "is not there" if found is None else f"has {found:,}"
    return ValueError(f"{path} {state}, and meta.json lists it with {listed:,} tokens; prepare the data again")


def open_masks(folder: Path, split: str, shards: list[Shard]) -> list[Mask]:
    """The loss masks of a split's shards; [] where every token is learned. Raises ValueError where one is missing."""
    listed = [name for name in record_of(folder).get("masks", {}) if name.startswith(split)]
    there = {path.name for path in folder.glob(f"{split}*{MASK_SUFFIX}")}
    is_masked = there and any(mask_of(shard.path).name in there for shard in shards)
    return [Mask(shard) for shard in shards] if listed or is_masked else []


def listed_files(folder: Path) -> dict[str, dict[str, Any]]:
    """What meta.json says about each token file: tokens, sha256 ...; {} without a list, as in nanoGPT's folders.

    Raises ValueError where meta.json is damaged.
    """
    return record_of(folder).get("files", {})


def listed_with_masks(meta: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a folder's record says about each token file and each mask."""
    return meta.get("files", {}) | meta.get("masks", {})


def listed_sha256(folder: Path, split: str) -> str | None:
    """One checksum for those that meta.json lists for the split's files; None where one is not listed."""
    files = listed_with_masks(record_of(folder))
    names = shard_names(folder, split)
    if any(name not in files for name in names):
        return None
    if record_of(folder).get("masks"):
        names += [mask_of(Path(name)).name for name in names if mask_of(Path(name)).name in files]
    return sha256("\n".join(files[name]["sha256"] for name in names).encode())[:16]


# ---- a whole data set ----------------------------------------------------------------------------------------


class Masks(NamedTuple):
    """What write_dataset writes beside the tokens of chat data."""

    counts: dict[str, npt.NDArray[np.uint8]]  # the mask of each split
    packed: int  # tokens of a window: documents are cut at these windows' ends only
    chat: str  # the name of the template


def write_dataset(
    folder: Path, splits: dict[str, Ids], tokenizer: Tokenizer, source: str, masks: Masks | None = None
) -> dict[str, Any]:
    """Writes {"train": ids, "val": ids} as bare token files with their meta.json, which it returns.

    val.bin gets its name last: wherever this stops, the folder holds the old data, the new, or no val.bin. Raises
    ValueError if other shards or another prepare.py are in the way, OSError if the disk is full, with the old data
    unharmed.
    """
    files = {}
    of_masks = {}
    for split, ids in splits.items():
        files[f"{split}.bin"] = {"tokens": len(ids), "sha256": sha256(ids.astype("<u2"))}
        if masks is not None:
            counts = masks.counts[split]
            of_masks[f"{split}{MASK_SUFFIX}"] = {"tokens": len(counts), "sha256": sha256(counts)}
    meta = {"tokenizer": tokenizer.meta(), "vocab_size": tokenizer.vocab_size, "source": source, "files": files}
    if masks is not None:
        meta |= {"end_of_text": tokenizer.end_of_text, "masks": of_masks, "packed": masks.packed, "chat": masks.chat}
    with locked(folder):
        others = {path.name for split in splits for path in folder.glob(f"{split}*.bin")} - set(files)
        if others:
            raise ValueError(
                f"{folder} holds other shards ({', '.join(sorted(others))}), which would be read too; choose another "
                "name"
            )
        new = {name: folder / f"{name}.new" for name in (*files, *of_masks)}
        try:
            # First everything that takes space, then the names.
            for split, ids in splits.items():
                write_tokens(new[f"{split}.bin"], ids)
                if masks is not None:
                    write_atomically(new[f"{split}{MASK_SUFFIX}"], masks.counts[split].tobytes())
            (folder / "val.bin").unlink(missing_ok=True)
            for split in splits:
                (folder / f"{split}{MASK_SUFFIX}").unlink(missing_ok=True)
            for name in (*of_masks, "train.bin"):
                os.replace(new[name], folder / name)
            write_meta(folder, meta)
            os.replace(new["val.bin"], folder / "val.bin")
        finally:
            for path in new.values():
                with suppress(OSError):
                    path.unlink(missing_ok=True)
    return meta


def is_prepared(folder: Path, source: str) -> bool:
    """Whether folder holds what was prepared from `source`, unharmed: every file has the checksum of meta.json."""
    try:
        meta = read_record(folder)
        unharmed = [file_sha256(folder / name) == e["sha256"] for name, e in listed_with_masks(meta).items()]
        return meta["source"] == source and all(unharmed)
    except (OSError, ValueError, KeyError):
        return False


def write_meta(folder: Path, meta: dict[str, Any], name: str = "meta.json") -> None:
    """Writes the description of a folder's token files, and its checksum, to its meta.json. Raises OSError."""
    write_atomically(folder / name, json.dumps(with_checksum(meta), indent=1).encode())


@contextmanager
def locked(folder: Path, name: str = "") -> Iterator[None]:
    """Makes folder and keeps other prepare.py out of its part of this name. Raises ValueError where one is, OSError."""
    with if_free(folder, name) as is_free:
        if not is_free:
            raise ValueError(f"another prepare.py is at work in {folder}; wait, or choose another folder")
        yield


# ---- the description -----------------------------------------------------------------------------------------


def read_meta(folder: Path) -> dict[str, Any]:
    """The description of a folder's token files: {"tokenizer": its meta(), "vocab_size": ..., "end_of_text": ...}.

    It comes from meta.json, else from nanoGPT's meta.pkl, else it is GPT-2's, as nanoGPT assumes. end_of_text is the
    token between documents, None if the data has no such token or it is not known; an unknown tokenizer is {}.
    Raises ValueError where the description cannot be read.
    """
    meta = record_of(folder)
    if not meta and os.path.lexists(folder / "meta.pkl"):
        meta = read_description(folder / "meta.pkl", from_pickle)
    if not meta:
        return {"tokenizer": {"name": "gpt2"}, "vocab_size": 50257, "end_of_text": 50256}
    return {name: meta.get(name) for name in ("tokenizer", "vocab_size", "end_of_text")}


def named_tokenizer(name: str) -> dict[str, Any]:
    """The description of the tokenizer of this name, or of that of the prepared folder with this path.

    Raises ValueError where the folder's meta.json is damaged.
    """
    folder = Path(name)
    return read_meta(folder)["tokenizer"] if (folder / "meta.json").is_file() else {"name": name}


def read_record(folder: Path) -> dict[str, Any]:
    """Everything that a folder's meta.json records, {} without one. Raises ValueError where it is damaged, OSError."""
    path = folder / "meta.json"
    return read_description(path, from_json) if os.path.lexists(path) else {}


def record_of(folder: Path) -> dict[str, Any]:
    """As read_record, for those who leave it as it is: it is the same one for all of them."""
    path = folder / "meta.json"
    return read_description(path, shared_from_json) if os.path.lexists(path) else {}


def read_description(path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What `read` makes of a file. Raises ValueError, which says what to do, where that fails, OSError."""
    try:
        return read(path)
    except ValueError as e:
        raise ValueError(f"{path} does not describe token files ({e}); prepare the data again") from None


def check_vocabulary(
    folder: Path, meta: dict[str, Any], model_vocab: int, model_tokenizer: dict[str, Any] | None
) -> None:
    """Raises ValueError where the data was not made with the tokenizer that the model was trained with.

    model_tokenizer is None where it is not known; then the sizes must match, padded or not.
    """
    data_tokenizer = meta["tokenizer"]
    data_vocab = meta["vocab_size"]
    same_size = model_vocab in (data_vocab, padded_vocab_size(data_tokenizer, data_vocab))
    both_known = bool(model_tokenizer and data_tokenizer)
    if same_size and (not both_known or model_tokenizer == data_tokenizer):
        return
    data_name = data_tokenizer.get("name", "unknown")
    model_name = (model_tokenizer or {}).get("name", "unknown")
    difference = ", and their tokens differ" if same_size else ""
    raise ValueError(
        f"{folder} has a vocabulary of {data_vocab} (tokenizer {data_name}), the model one of {model_vocab} "
        f"(tokenizer {model_name}){difference}; prepare the data with the model's tokenizer, or use "
        "--init_from=scratch"
    )
