"""Makes token files of FineWeb-Edu, streamed from the Hugging Face hub, or of your own documents.

    python data/fineweb_edu/prepare.py                                  # sample-10BT: 10B tokens, 20 GB
    python data/fineweb_edu/prepare.py --tokens 3e9                     # the first 3B of them
    python data/fineweb_edu/prepare.py --pretokenized --tokens 1e9      # token files that somebody made: minutes
    python data/fineweb_edu/prepare.py --source more/ a.parquet --out data/mine

Writes val_000000.bin, then train_000001.bin and so on (llm.c's format: 1024 bytes of header, uint16 token ids) and
meta.json, which lists them. Every document begins with <|endoftext|>; a document may go on in the next shard.
Stopped at any point and started again, it goes on behind the last finished shard.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, Python looks for modules beside this file only

from data.documents import FORMATS, PACKED, Source, format_of, retried  # noqa: E402
from data.shards import gigabytes, is_there, plan, write_shards  # noqa: E402
from data.token_files import read_tokens  # noqa: E402
from data.tokenizer import from_meta  # noqa: E402
from deskgpt.errors import ConfigError, one_line_errors  # noqa: E402
from deskgpt.files import file_sha256, write_atomically  # noqa: E402

REPO = "HuggingFaceFW/fineweb-edu"
SUBSET_TOKENS = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9, "default": 1.3e12}  # about
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"  # finewebedu_val_000000.bin and 99 files of train, the last one shorter
PRETOKENIZED_SHARD, PRETOKENIZED_TOKENS = 100_000_000, 9_953_989_344
HASHED = 1 << 32  # bytes: a finished folder of at most so many is checked by its checksums too, within seconds
# What options are where they are not given, and which of them mean nothing beside another.
DEFAULTS = {"subset": "sample-10BT", "text_column": "text", "encoding": "gpt2", "shard_tokens": 100_000_000}
EXCLUDED = {"source": ["subset"], "pretokenized": ["source", "val_tokens", *DEFAULTS]}

Entries = dict[str, dict[str, Any]]  # of meta.json: file name to tokens, documents, sha256 ...


def main(args: argparse.Namespace) -> None:
    for option, others in EXCLUDED.items():
        if getattr(args, option) and (given := [o for o in others if getattr(args, o)]):
            raise ConfigError(f"--{given[0]} means nothing beside --{option}; leave one of them out")
    vars(args).update({k: v for k, v in DEFAULTS.items() if not getattr(args, k)})
    from filelock import FileLock, Timeout

    lock = FileLock(args.out / ".lock")  # let go of by the system, however this process ends
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another prepare.py is at work in {args.out}; wait, or choose another --out") from None
    except OSError as e:
        raise OSError(f"--out {args.out} cannot be written: {e.strerror}; choose another folder") from None
    try:
        for left in (*args.out.glob("*.bin.tmp"), *args.out.glob("meta.json.tmp")):  # by a start that was killed
            left.unlink()
        prepare(args)
    finally:
        lock.release()


def prepare(args: argparse.Namespace) -> None:
    """Makes what args ask for and args.out lacks. Raises ValueError, OSError."""
    folder, tokenizer = args.out, from_meta({"name": args.encoding})
    local = local_source(args.source, args.text_column) if args.source else None
    shard_tokens = PRETOKENIZED_SHARD if args.pretokenized else args.shard_tokens
    train_tokens = args.tokens
    if local:  # only the bytes of a text are known before, not its tokens
        available: float = text_bytes(local) // (1 if args.encoding == "bytes" else 4)
        val_tokens = args.val_tokens or max(1, int(min(shard_tokens, available // 10)))
        source_name = local.name
    elif args.pretokenized:
        available, val_tokens, source_name = PRETOKENIZED_TOKENS, shard_tokens, PRETOKENIZED
        train_tokens = min(train_tokens, PRETOKENIZED_TOKENS - shard_tokens)
    else:
        available, val_tokens = SUBSET_TOKENS.get(args.subset, math.inf), args.val_tokens or shard_tokens
        source_name = f"{REPO}, {args.subset}"
    identity = {
        "tokenizer": tokenizer.meta(),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "source": source_name,
        "text_column": args.text_column,
        "shard_tokens": shard_tokens,
        "val_tokens": val_tokens,
    }
    meta = earlier_meta(folder, identity) or identity | {"revision": None, "files": {}}
    entries: Entries = meta["files"]
    planned = functools.partial(plan, val_tokens, train_tokens, shard_tokens)
    refuse_foreign(folder, next((name for name, _ in planned() if name not in entries), None), entries)
    # Shards of an earlier start with more --tokens stay, and are read: they are looked after like the planned ones.
    beyond = [] if train_tokens == math.inf else later_shards(folder, [name for name, _ in planned()], entries)
    there = finished(folder, [*planned(), *beyond] if train_tokens < math.inf else planned(), entries)
    bad = damaged(folder, entries) if there else []
    if there and not bad:
        print(f"{folder}: already prepared")
        summarize(folder, meta)
        return

    total = min(available, val_tokens + train_tokens)
    present = sum(e["tokens"] for name, e in entries.items() if is_there(folder / name, 0, e) and name not in bad)
    check_disk(folder, 2 * (total - present if total < math.inf else shard_tokens), present - val_tokens)
    shards = (shard for part in (planned(), beyond) for shard in part)
    if args.pretokenized:
        fetch(folder, meta, shards, bad)
    else:
        source = local or hub_source(args.subset, args.text_column, meta["revision"])
        meta["revision"] = source.revision
        expected = None if total == math.inf else int(total)
        write_shards(folder, meta, source, tokenizer, shards, bad, args.num_proc, expected)
    if not any(name.startswith("train") for name in entries):
        tokens = sum(entry["tokens"] for entry in entries.values())
        for name in [*entries, "meta.json"]:
            (folder / name).unlink()
        raise ValueError(
            f"{meta['source']} has {tokens:,} tokens, all of which went into val; "
            + (f"try --val_tokens={tokens // 10}" if tokens >= 10 else "is --text_column right?")
        )
    summarize(folder, meta)


def summarize(folder: Path, meta: dict[str, Any]) -> None:
    for split in ("train", "val"):
        entries = [entry for name, entry in meta["files"].items() if name.startswith(split)]
        tokens, documents = (sum(entry[k] for entry in entries) for k in ("tokens", "documents"))
        print(f"{split}: {tokens:,} tokens, {documents:,} documents, shards: {len(entries)}")
    print(f"train on them: python train.py config/train_fineweb_125m.py --dataset={folder.resolve()}")


# ---- the folder ----------------------------------------------------------------------------------------------


def earlier_meta(folder: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What meta.json of an earlier start says, None where there was none.

    Raises ValueError where that start was to make something else.
    """
    path = folder / "meta.json"
    if not path.exists():
        return None
    try:
        meta = json.loads(path.read_text())
        found = {key: meta[key] for key in [*identity, "revision", "files"]}
        whole = [entry["tokens"] + entry["documents"] and entry["sha256"] for entry in found["files"].values()]
        whole += [sum(entry["end"]) for entry in found["files"].values() if identity["source"] != PRETOKENIZED]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not one of this script's; choose another --out, or delete the folder") from None
    for key, value in identity.items():
        if found[key] != value:
            raise ValueError(
                f"{folder} was prepared with {key} {show(found[key])}, not {show(value)}; "
                "choose another --out, or delete the folder"
            )
    return meta


def show(value: Any) -> str:
    return value["name"] if isinstance(value, dict) and "name" in value else str(value)


def refuse_foreign(folder: Path, following: str | None, entries: Entries) -> None:
    """Raises ValueError where folder holds token files that are not ours, which would be read with them.

    `following` is the one that an earlier start may have finished, and been stopped before it was listed.
    """
    found = {p.name for split in ("train", "val") for p in folder.glob(f"{split}*.bin")}
    if foreign := sorted(found - set(entries) - {following}):
        raise ValueError(
            f"{folder} holds token files that no meta.json lists ({', '.join(foreign[:3])}), which would be read too; "
            "delete them, or choose another --out"
        )


def later_shards(folder: Path, planned: list[str], entries: Entries) -> list[tuple[str, int]]:
    """Names and sizes of listed shards behind the planned ones; forgets those of them that have been deleted."""
    for name in [name for name in entries if name not in planned and not (folder / name).exists()]:
        del entries[name]
    return sorted((name, entry["tokens"]) for name, entry in entries.items() if name not in planned)


def finished(folder: Path, shards: Iterable[tuple[str, int]], entries: Entries) -> bool:
    """Whether folder holds every one of the shards, or as many as its source has."""
    for name, size in shards:
        if not is_there(folder / name, size, entries.get(name, {})):
            return False
        if "last" in entries[name]:
            break
    return True


def damaged(folder: Path, entries: Entries) -> list[str]:
    """Names of the shards whose checksum is not that of meta.json."""
    total = sum((folder / name).stat().st_size for name in entries)
    if total > HASHED:
        print(f"sizes are right; for the checksums of {total / 1e9:.0f} GB: python -m data.describe {folder}")
        return []
    names = [name for name, entry in entries.items() if file_sha256(folder / name) != entry["sha256"]]
    for name in names:
        print(f"{name} is damaged (its checksum does not match) and is made again")
    return names


def check_disk(folder: Path, needed: float, there: int) -> None:
    """Raises ValueError where the disk has not the bytes needed; `there` are the tokens of train that are made."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        fitting = (free // 2 + there) // 10_000_000 * 10_000_000
        fewer = f" or make fewer: --tokens={fitting:.3g}" if fitting > 0 else ""
        raise ValueError(
            f"{folder} needs about {gigabytes(needed)} more, and {gigabytes(free)} are free; choose another "
            f"--out{fewer}"
        )


# ---- where documents come from -------------------------------------------------------------------------------


def hub_source(subset: str, text_column: str, revision: str | None) -> Source:
    """A subset of FineWeb-Edu, at its newest revision where none is given. Raises ValueError."""
    from datasets import load_dataset_builder
    from huggingface_hub import HfApi

    sha = revision or retried(lambda: HfApi().dataset_info(REPO).sha)
    try:
        builder = retried(lambda: load_dataset_builder(REPO, name=subset, revision=sha))
    except ValueError as e:
        if "BuilderConfig" not in str(e):
            raise
        named = ", ".join(SUBSET_TOKENS)
        raise ValueError(f"--subset {subset}: {REPO} has no such subset; it has {named} and CC-MAIN-...") from None
    return Source(f"{REPO}, {subset}", list(builder.config.data_files["train"]), text_column, sha)


def local_source(paths: list[Path], text_column: str) -> Source:
    """Files, and all files in folders that can be read, in name order. Raises ValueError where there is none."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"--source {path} does not exist")
        found = [p for p in path.rglob("*") if is_documents(path, p)] if path.is_dir() else [path]
        if not found:
            raise ValueError(f"--source {path} holds no *{', *'.join(FORMATS)} (or these packed: {', '.join(PACKED)})")
        files += sorted(found)
    for file in files:
        format_of(str(file))
    names = ", ".join(p.name for p in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    size = sum(p.stat().st_size for p in files)
    return Source(f"{names} ({size:,} bytes)", [os.path.abspath(p) for p in files], text_column)


def is_documents(folder: Path, path: Path) -> bool:
    """Whether a file found in a folder is one to read: not hidden, no link to another in there, of a known format."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    twice = path.is_symlink() and path.resolve().is_relative_to(folder.resolve())
    try:
        return path.is_file() and not hidden and not twice and bool(format_of(str(path)))
    except ValueError:
        return False


def text_bytes(source: Source) -> int:
    """Bytes of text in local files, about. Raises ValueError where a parquet file is none."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    total = 0
    for path in source.files:
        if format_of(path) != "parquet":
            total += os.path.getsize(path) * (3 if path.endswith(PACKED) else 1)
            continue
        try:
            metadata = read_metadata(path)
        except (ArrowException, OSError) as e:
            raise source.unreadable(path, e) from None
        for i in range(metadata.num_row_groups):
            columns = (metadata.row_group(i).column(j) for j in range(metadata.num_columns))
            total += sum(c.total_uncompressed_size for c in columns if c.path_in_schema == source.text_column)
    return total


# ---- ready-made token files ----------------------------------------------------------------------------------


def fetch(folder: Path, meta: dict[str, Any], shards: Iterable[tuple[str, int]], bad: list[str]) -> None:
    """Downloads those of the shards that folder lacks or that are bad, and writes meta.json anew after each.

    Raises ValueError where the network stays away or a file arrives damaged.
    """
    from huggingface_hub import HfApi, hf_hub_download

    info = retried(lambda: HfApi().dataset_info(PRETOKENIZED, revision=meta["revision"], files_metadata=True))
    meta["revision"] = info.sha
    checksums = {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or []}
    options: dict[str, Any] = {"repo_type": "dataset", "revision": info.sha, "local_dir": folder / ".download"}
    for name, size in shards:
        remote = f"finewebedu_{name}"
        if is_there(folder / name, size, meta["files"].get(name, {})) and name not in bad:
            continue
        if remote not in checksums:
            raise ValueError(f"{PRETOKENIZED} has no {remote}; leave --pretokenized out, or ask for fewer --tokens")
        path = Path(retried(functools.partial(hf_hub_download, PRETOKENIZED, remote, **options)))
        sha256 = file_sha256(path)
        try:
            ids = read_tokens(path)
            tokens, documents = len(ids), int(np.count_nonzero(ids == meta["end_of_text"]))
            fits = tokens >= size and ids.max() < meta["vocab_size"] and sha256 == (checksums[remote] or sha256)
            del ids  # Windows renames and deletes only what is not mapped
        except ValueError:  # a header that does not fit the file
            fits = False
        if not fits:
            path.unlink()
            raise ValueError(f"{remote} arrived damaged; finished shards are kept: run the same command again")
        os.replace(path, folder / name)
        meta["files"][name] = {"tokens": tokens, "documents": documents, "sha256": sha256}
        write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())
        print(
            f"{name}: {tokens:,} tokens, {documents:,} documents, {gigabytes(shutil.disk_usage(folder).free)} free",
            flush=True,
        )
    shutil.rmtree(folder / ".download", ignore_errors=True)


# ---- command line --------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """A whole number of at least 1, also written as 3e9 or 1_000."""
    try:
        number = float(text)
        if 1 <= number <= 1e15 and number == int(number):
            return int(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1e15, such as 100000 or 3e9")


def path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it names nothing")
    return Path(text)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--subset", help="sample-10BT (default), sample-100BT, sample-350BT, default or CC-MAIN-2024-10 ...")
    add("--source", nargs="+", type=path, metavar="PATH", help=".parquet, .jsonl[.gz|.zst], .txt files or folders")
    add("--pretokenized", action="store_true", help=f"fetch token files of {PRETOKENIZED} instead")
    add("--text_column", help="column, or key of a jsonl line, with the text (default: text)")
    add("--encoding", help="gpt2 (default), another tiktoken encoding below 65,537 ids, or bytes")
    add("--tokens", type=count, default=math.inf, help="to make for train, such as 3e9 (default: all there are)")
    add("--val_tokens", type=count, help="made first (default: a shard; of --source a tenth at most)")
    add("--shard_tokens", type=count, help="per file (default: 1e8)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--num_proc", type=count, default=cores, help="threads that tokenize (default: all cores, %(default)s)")
    add("--out", type=path, default=ROOT / "data" / "fineweb_edu", metavar="FOLDER", help="(default: data/fineweb_edu)")
    return parser.parse_args(argv)


def cache_of_this_run() -> tempfile.TemporaryDirectory[str] | None:
    """A cache that `datasets` and the hub take, where the user's cannot be written; it goes with what is returned.

    They make folders there even for files that are here already.
    """
    try:
        user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get("HF_HOME") or Path(user_cache, "huggingface"), "datasets")
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return None
    except (OSError, RuntimeError):  # no home at all
        pass
    cache = tempfile.TemporaryDirectory()
    os.environ["HF_HOME"] = cache.name
    return cache


if __name__ == "__main__":
    os.environ.setdefault("USE_TORCH", "0")  # `datasets` would import it, for nothing
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # threads of fastokens' own bring nothing
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # of its faults, those of the network cannot be told apart
    cache = cache_of_this_run()
    with one_line_errors():
        main(arguments(sys.argv[1:]))
