"""Token files of FineWeb-Edu that somebody has made with GPT-2's encoding, fetched from the Hugging Face hub."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from data.documents import retried
from data.shards import is_there
from data.token_files import read_tokens, write_meta
from deskgpt.system.files import file_sha256

REPO = "kjj0/finewebedu10B-gpt2"  # finewebedu_val_000000.bin and 99 files of train, the last one shorter
SHARD_TOKENS = 100_000_000
TOKENS = 9_953_989_344


def fetch(folder: Path, meta: dict[str, Any], shards: Iterable[tuple[str, int]], bad: list[str]) -> None:
    """Downloads the shards that folder lacks or that are bad, and updates meta.json after each.

    Raises ValueError where the network keeps failing or a file arrives damaged.
    """
    from huggingface_hub import HfApi, hf_hub_download

    info = retried(lambda: HfApi().dataset_info(REPO, revision=meta["revision"], files_metadata=True))
    meta["revision"] = info.sha
    checksums = {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or []}
    options: dict[str, Any] = {"repo_type": "dataset", "revision": info.sha, "local_dir": folder / ".download"}
    for name, size in shards:
        if is_there(folder / name, size, meta["files"].get(name, {})) and name not in bad:
            continue
        remote = f"finewebedu_{name}"
        if remote not in checksums:
            raise ValueError(f"{REPO} has no {remote}; leave --pretokenized out, or ask for fewer --tokens")
        path = Path(retried(functools.partial(hf_hub_download, REPO, remote, **options)))
        checksum = file_sha256(path)
        if checksums[remote] not in (None, checksum):
            path.unlink()
            raise ValueError(f"{remote} arrived damaged; finished shards are kept: run the same command again")
        ids = read_tokens(path)  # mapped until it is freed: Windows neither renames nor deletes the file before
        documents = int(np.count_nonzero(ids == meta["end_of_text"]))
        entry = {"tokens": len(ids), "documents": documents, "sha256": checksum}
        del ids
        os.replace(path, folder / name)
        meta["files"][name] = entry
        write_meta(folder, meta)
        print(f"{name}: {entry['tokens']:,} tokens, {entry['documents']:,} documents", flush=True)
    shutil.rmtree(folder / ".download", ignore_errors=True)
