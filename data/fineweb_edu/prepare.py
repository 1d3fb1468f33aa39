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
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a script, Python looks for modules beside this file only
os.environ.setdefault("USE_TORCH", "0")  # `datasets` would import it, for nothing
os.environ.setdefault("RAYON_NUM_THREADS", "1")  # fastokens need not start threads: --num_proc does

from configurator import one_line_errors  # noqa: E402
from data.shards import FORMATS, PACKED, Source, format_of, free_gb, is_whole, plan, retried, write_shards  # noqa: E402
from data.tokenizer import from_meta  # noqa: E402
from data.tokens import file_sha256, read_tokens, write_atomically  # noqa: E402

REPO = "HuggingFaceFW/fineweb-edu"
SUBSET_TOKENS = {"sample-10BT": 10e9, "sample-100BT": 100e9, "sample-350BT": 350e9, "default": 1.3e12}  # about
PRETOKENIZED = "kjj0/finewebedu10B-gpt2"  # finewebedu_val_000000.bin and 99 files of train, the last one shorter
PRETOKENIZED_SHARD, PRETOKENIZED_TOKENS = 100_000_000, 9_953_989_344
HASHED = 1 << 32  # bytes: a finished folder of at most so many is checked by its checksums too, within seconds
Shards = list[tuple[str, int]] | Iterator[tuple[str, int]]


def main(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(args.out / ".lock", timeout=0):  # let go of by the system, however this process ends
            prepare(args)
    except Timeout:
        raise ValueError(f"another prepare.py is at work in {args.out}; wait, or choose another --out") from None


def prepare(args: argparse.Namespace) -> None:
    """Makes what args ask for and args.out lacks. Raises ValueError, OSError."""
    folder, tokenizer = args.out, from_meta({"name": args.encoding})
    if tokenizer.end_of_text is None:
        raise ValueError(f"--encoding={args.encoding} has no token to begin documents with; try gpt2 or bytes")
    if args.pretokenized:
        given = {"--source": args.source, "--val_tokens": args.val_tokens, "--encoding": args.encoding != "gpt2"}
        for flag in (flag for flag, is_given in given.items() if is_given):
            raise ValueError(f"{flag} does not go with --pretokenized, which fetches GPT-2 tokens as they are")
        args.shard_tokens = PRETOKENIZED_SHARD
    local = local_source(args.source, args.text_column) if args.source else None
    if local:  # a text's tokens are not known before, only its bytes
        available: float = text_bytes(local) // (1 if args.encoding == "bytes" else 4)
        val_tokens = args.val_tokens or max(1, int(min(args.shard_tokens, available // 10)))
    else:
        available = PRETOKENIZED_TOKENS if args.pretokenized else SUBSET_TOKENS.get(args.subset, math.inf)
        val_tokens = args.val_tokens or args.shard_tokens
    identity = {
        "tokenizer": tokenizer.meta(),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "source": local.name if local else PRETOKENIZED if args.pretokenized else f"{REPO}, {args.subset}",
        "text_column": args.text_column,
        "shard_tokens": args.shard_tokens,
        "val_tokens": val_tokens,
    }
    meta = earlier_meta(folder, identity) or identity | {"revision": None, "files": {}}
    if finished(folder, meta, plan(val_tokens, args.tokens, args.shard_tokens)) and not damaged(folder, meta):
        print(f"{folder}: already prepared")
        describe(folder, meta)
        return

    total = min(available, val_tokens + args.tokens)
    there = sum(entry["tokens"] for name, entry in meta["files"].items() if is_whole(folder / name, entry))
    check_disk(folder, 2 * (total - there) if total < math.inf else 2 * args.shard_tokens, there - val_tokens)
    shards = plan(val_tokens, args.tokens, args.shard_tokens)
    if args.pretokenized:
        fetch(folder, meta, shards)
    else:
        source = local or hub_source(args.subset, args.text_column, meta["revision"])
        meta["revision"] = source.revision
        write_shards(folder, meta, source, tokenizer, shards, args.num_proc, None if total == math.inf else int(total))
    if not any(name.startswith("train") for name in meta["files"]):
        tokens = sum(entry["tokens"] for entry in meta["files"].values())
        for name in [*meta["files"], "meta.json"]:
            (folder / name).unlink()
        raise ValueError(
            f"{meta['source']} has {tokens:,} tokens, all of which went into val; "
            + (f"try --val_tokens={tokens // 10}" if tokens >= 10 else "is --text_column right?")
        )
    describe(folder, meta)


def describe(folder: Path, meta: dict[str, Any]) -> None:
    for split in ("train", "val"):
        entries = [entry for name, entry in meta["files"].items() if name.startswith(split)]
        tokens, documents = (sum(entry[k] for entry in entries) for k in ("tokens", "documents"))
        print(f"{split}: {tokens:,} tokens, {documents:,} documents, {len(entries)} shards")
    print(f"train on them: python train.py config/train_fineweb_125m.py --dataset={folder.resolve()}")


# ---- the folder ----------------------------------------------------------------------------------------------


def earlier_meta(folder: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What meta.json of an earlier start says, None where there was none.

    Raises ValueError where the folder holds something else than what is to be made.
    """
    path, meta = folder / "meta.json", None
    if path.exists():
        try:
            meta = json.loads(path.read_text())
            found = {key: meta[key] for key in [*identity, "revision", "files"]}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is not one of this script's; choose another --out, or delete it") from None
        for key, value in identity.items():
            if found[key] != value:
                raise ValueError(
                    f"{folder} was prepared with {key} {show(found[key])}, not {show(value)}; "
                    "choose another --out, or delete the folder"
                )
    foreign = {p.name for split in ("train", "val") for p in folder.glob(f"{split}*.bin")}
    foreign -= {p.name for p in folder.glob("*_[0-9][0-9][0-9][0-9][0-9][0-9].bin")}
    if foreign:
        raise ValueError(
            f"{folder} holds other token files ({', '.join(sorted(foreign)[:3])}), which would be read too; "
            "choose another --out"
        )
    return meta


def show(value: Any) -> str:
    return value["name"] if isinstance(value, dict) and "name" in value else str(value)


def finished(folder: Path, meta: dict[str, Any], shards: Shards) -> bool:
    """Whether folder holds every one of the shards, or as many as its source has."""
    for name, size in shards:
        entry = meta["files"].get(name, {})
        if not is_whole(folder / name, entry) or not (entry["tokens"] >= size or "last" in entry):
            return False
        if "last" in entry:
            break
    return True


def damaged(folder: Path, meta: dict[str, Any]) -> list[str]:
    """Names of the shards whose checksum is not that of meta.json, which it then forgets."""
    total = sum((folder / name).stat().st_size for name in meta["files"])
    if total > HASHED:
        print(f"sizes are right; checksums of {total / 1e9:.0f} GB: python -m data.describe {folder}")
        return []
    names = [name for name, entry in meta["files"].items() if file_sha256(folder / name) != entry["sha256"]]
    for name in names:
        print(f"{name} is damaged (its checksum does not match) and is made again")
        del meta["files"][name]
    return names


def check_disk(folder: Path, needed: float, there: int) -> None:
    """Raises ValueError where the disk has not the bytes needed."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        fitting = (free // 2 + there) // 10_000_000 * 10_000_000
        fewer = f" or make fewer: --tokens={fitting:.3g}" if fitting > 0 else ""
        raise ValueError(
            f"{folder} needs about {needed / 1e9:.1f} GB more, and {free_gb(folder)} are free; choose another "
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
        found = (
            [p for p in path.rglob("*") if p.is_file() and set(p.suffixes) & set(FORMATS)] if path.is_dir() else [path]
        )
        if not found:
            raise ValueError(f"--source {path} holds no *{', *'.join(FORMATS)} (or these packed: {', '.join(PACKED)})")
        files += sorted(found)
    for file in files:
        format_of(str(file))
    names = ", ".join(p.name for p in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return Source(
        f"{names} ({sum(p.stat().st_size for p in files):,} bytes)", [str(p.resolve()) for p in files], text_column
    )


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


def fetch(folder: Path, meta: dict[str, Any], shards: Shards) -> None:
    """Downloads those of the shards that folder lacks, and writes meta.json anew after each.

    Raises ValueError where the network stays away or a file arrives damaged.
    """
    from huggingface_hub import HfApi, hf_hub_download

    info = retried(lambda: HfApi().dataset_info(PRETOKENIZED, revision=meta["revision"], files_metadata=True))
    meta["revision"] = info.sha
    checksums = {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or []}
    for name, _ in shards:
        remote, there = f"finewebedu_{name}", list(meta["files"])
        if is_whole(folder / name, meta["files"].get(name, {})):
            continue
        if remote not in checksums:
            if not there:
                raise ValueError(f"{PRETOKENIZED} has no {remote} any more; leave --pretokenized out")
            meta["files"][max(there, key=lambda name: name.split("_")[1])]["last"] = True
        else:
            options: dict[str, Any] = {"repo_type": "dataset", "revision": info.sha, "local_dir": folder / ".download"}
            path = Path(retried(lambda: hf_hub_download(PRETOKENIZED, remote, **options)))  # noqa: B023
            ids, sha256 = read_tokens(path), file_sha256(path)
            if sha256 != (checksums[remote] or sha256) or ids.max() >= meta["vocab_size"]:
                path.unlink()
                raise ValueError(f"{remote} arrived damaged; finished shards are kept: run the same command again")
            documents = int(np.count_nonzero(ids == meta["end_of_text"]))
            meta["files"][name] = {"tokens": len(ids), "documents": documents, "sha256": sha256}
            os.replace(path, folder / name)
            print(f"{name}: {len(ids):,} tokens, {documents:,} documents, {free_gb(folder)} free", flush=True)
        write_atomically(folder / "meta.json", json.dumps(meta, indent=1).encode())
        if remote not in checksums:
            break
    shutil.rmtree(folder / ".download", ignore_errors=True)


# ---- command line --------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """A whole number of at least 1, also written as 3e9 or 1_000."""
    number = float(text)
    if not 1 <= number < math.inf or number != int(number):
        raise ValueError
    return int(number)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--subset", default="sample-10BT", help="or sample-100BT, sample-350BT, default (all), CC-MAIN-2024-10 ...")
    add("--source", nargs="+", type=Path, metavar="PATH", help=".parquet, .jsonl[.gz|.zst], .txt files or folders")
    add("--pretokenized", action="store_true", help=f"fetch token files of {PRETOKENIZED} instead")
    add("--text_column", default="text", help="column, or key of a jsonl line, with a document's text: text")
    add("--encoding", default="gpt2", help="gpt2, another tiktoken encoding below 65,537 ids, or bytes")
    add("--tokens", type=count, default=math.inf, help="of train to make, such as 3e9: all there are")
    add("--val_tokens", type=count, default=0, help="of val, made first: one shard; of --source a tenth at most")
    add("--shard_tokens", type=count, default=100_000_000, help="per file: 1e8")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--num_proc", type=count, default=cores, help=f"threads that tokenize: {cores}, all cores")
    add("--out", type=Path, default=ROOT / "data" / "fineweb_edu", metavar="FOLDER", help="data/fineweb_edu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with one_line_errors():
        main(arguments(sys.argv[1:]))
