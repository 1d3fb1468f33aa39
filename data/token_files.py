"""Token files: their format, the files of a split, and the description of a data folder.

A data folder holds `train*.bin` and `val*.bin`: little-endian uint16 token ids, either bare (nanoGPT) or after
llm.c's header of 256 int32 (magic 20240520, version 1, number of tokens). Several files of one split are its
shards, in name order. `meta.json` in the same folder describes tokenizer, source and files; where it is missing,
nanoGPT's `meta.pkl` is read.

Beside a token file there may be a loss mask of the same name, `train*.mask` or `val*.mask`: one uint8 per token, 0
where it is not to be learned as a target. Either all shards of a split have one or none has.
"""

from __future__ import annotations

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
from tqdm import tqdm

from data.meta_files import from_json, from_pickle, with_checksum
from data.tokenizer import Ids, Tokenizer, padded_vocab_size
from deskgpt.run.lock import if_free
from deskgpt.system.files import file_sha256, sha256, write_atomically

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
TOKEN_BYTES = 2
MASK_SUFFIX = ".mask"
PIECE = 1 << 20  # tokens that are read at once from a file that is read whole
MANY_FILES = 100  # a process may open 1,024 on most Linux systems, 256 on macOS, unless it asks for more


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


class OpenFile:
    """A file that is open for reading, of which nothing is held in memory.

    It is read, not mapped: where a mapped file is cut short under a run, the system ends the process with SIGBUS. When
    a new file takes its place by a rename, as prepare.py does it, the old content is still read here.

    Several threads may read at once. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._fd).atexit = False  # at exit a thread may still read
        self.facts = self.current_facts()  # when it was opened
        self._seen = self.facts  # when somebody last asked

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
        status = os.fstat(self._fd)
        return Facts(status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def was_written(self) -> bool:
        """Whether somebody has written into the file since it was opened, or since this was last asked."""
        before = self._seen
        self._seen = self.current_facts()
        return (self._seen.size, self._seen.written_ns) != (before.size, before.written_ns)

    def _read_bytes(self, at: int, n: int) -> bytes:
        """n bytes of the file. Raises ValueError where the file has become shorter, OSError."""
        content = b""
        try:
            while len(content) < n:
                more = pread(self._fd, n - len(content), at + len(content))
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

    Raises ValueError where the file is not a token file, OSError.
    """

    def __init__(self, path: Path) -> None:
        self._begin, self._tokens = place_of_tokens(path)
        super().__init__(path)
        if self.facts.size != self._begin + TOKEN_BYTES * self._tokens:
            raise ValueError(f"{path} changed while it was opened; start again")

    def __len__(self) -> int:
        return self._tokens

    def read(self, first: int, n: int) -> Ids:
        """Tokens first .. first + n - 1, all of which the file had when it was opened. Raises as read_bytes."""
        return np.frombuffer(self._read_bytes(self._begin + TOKEN_BYTES * first, TOKEN_BYTES * n), "<u2")

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
    found = sorted(folder.glob(f"{split}*.bin"))
    if not found:
        raise ValueError(how_to_make(folder, split))
    return found


def open_shards(folder: Path, split: str) -> list[Shard]:
    """All shards of a split, open. Raises ValueError where one is damaged or not as meta.json lists it, OSError."""
    paths = token_files(folder, split)
    if len(paths) > MANY_FILES:
        allow_more_files(2 * len(paths))  # with masks
    shards = [Shard(path) for path in paths]
    found = {shard.path.name: len(shard) for shard in shards}
    for name, entry in read_record(folder).get("files", {}).items():
        if name.startswith(split) and found.get(name) != entry["tokens"]:
            state = f"has {found[name]:,}" if name in found else "is not there"
            listed = f"meta.json lists it with {entry['tokens']:,} tokens"
            raise ValueError(f"{folder / name} {state}, and {listed}; prepare the data again")
    return shards


def allow_more_files(n: int) -> None:
    """Lets this process have n more files open than the system allows at first, or as many as it may allow."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            most = soft + n if hard == resource.RLIM_INFINITY else min(soft + n, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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


def open_masks(folder: Path, split: str, shards: list[Shard]) -> list[Mask]:
    """The loss masks of a split's shards; [] where every token is learned. Raises ValueError where one is missing."""
    listed = [name for name in read_record(folder).get("masks", {}) if name.startswith(split)]
    there = {path.name for path in folder.glob(f"{split}*{MASK_SUFFIX}")}
    is_masked = there and any(mask_of(shard.path).name in there for shard in shards)
    return [Mask(shard) for shard in shards] if listed or is_masked else []


def listed_with_masks(meta: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a folder's record says about each token file and each mask."""
    return meta.get("files", {}) | meta.get("masks", {})


def listed_sha256(folder: Path, split: str) -> str | None:
    """One checksum for those that meta.json lists for the split's files; None if one is not listed."""
    files = listed_with_masks(read_record(folder))
    paths = token_files(folder, split)
    if any(path.name not in files for path in paths):
        return None
    names = [path.name for path in (*paths, *map(mask_of, paths)) if path.name in files]
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
    contents = {f"{split}.bin": ids.astype("<u2").tobytes() for split, ids in splits.items()}
    files = {name: {"tokens": len(c) // TOKEN_BYTES, "sha256": sha256(c)} for name, c in contents.items()}
    meta = {"tokenizer": tokenizer.meta(), "vocab_size": tokenizer.vocab_size, "source": source, "files": files}
    if masks is not None:
        of_masks = {f"{split}{MASK_SUFFIX}": counts.tobytes() for split, counts in masks.counts.items()}
        contents |= of_masks
        meta |= {"end_of_text": tokenizer.end_of_text, "packed": masks.packed, "chat": masks.chat}
        meta["masks"] = {name: {"tokens": len(c), "sha256": sha256(c)} for name, c in of_masks.items()}
    with locked(folder):
        refuse_foreign(folder, files.__contains__)
        new = {name: folder / f"{name}.new" for name in contents}
        try:
            # First everything that takes space, then the names.
            for name, content in contents.items():
                write_atomically(new[name], content)
            (folder / "val.bin").unlink(missing_ok=True)
            for split in splits:
                (folder / f"{split}{MASK_SUFFIX}").unlink(missing_ok=True)
            for name in contents:
                if name != "val.bin":
                    os.replace(new[name], folder / name)
            write_meta(folder, meta)
            os.replace(new["val.bin"], folder / "val.bin")
        finally:
            for path in new.values():
                with suppress(OSError):
                    path.unlink(missing_ok=True)
    return meta


def refuse_foreign(folder: Path, is_ours: Callable[[str], Any]) -> None:
    """Raises ValueError where folder holds token files that are not ours, which training would read with them."""
    found = {path.name for split in ("train", "val") for path in folder.glob(f"{split}*.bin")}
    foreign = sorted(name for name in found if not is_ours(name))
    if foreign:
        raise ValueError(
            f"{folder} holds other token files ({', '.join(foreign[:3])}), which would be read too; delete them, or "
            "choose another folder"
        )


def is_prepared(folder: Path, source: str) -> bool:
    """Whether folder holds what was prepared from `source`, unharmed: every file has the checksum of meta.json."""
    try:
        meta = read_record(folder)
    except (OSError, ValueError):
        return False
    return meta.get("source") == source and not damaged(folder, listed_with_masks(meta))


def damaged(folder: Path, entries: dict[str, Any]) -> list[str]:
    """Names of the files that are missing or whose checksum differs from their entry in meta.json."""
    names = []
    for name, entry in tqdm(entries.items(), "checksums", leave=False, disable=None):
        try:
            unharmed = file_sha256(folder / name) == entry["sha256"]
        except OSError:
            unharmed = False
        if not unharmed:
            names.append(name)
    return names


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
    meta = read_record(folder)
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
    """Everything that a folder's meta.json records, {} without one. It is the same object for all: leave it as it is.

    Raises ValueError where it is damaged, OSError.
    """
    path = folder / "meta.json"
    return read_description(path, from_json) if os.path.lexists(path) else {}


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

    model_tokenizer is None if it is not known; then the sizes must match, padded or not.
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
