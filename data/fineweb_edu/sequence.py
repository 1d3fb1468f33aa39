"""One sequence of tokens, cut into shards: val_000000.bin, then train_000001.bin and so on; or a part of the source."""

from __future__ import annotations

import argparse
import copy
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from data import bpe
from data.documents import Source
from data.fineweb_edu import common, pretokenized
from data.fineweb_edu.common import Entries, Job, Part
from data.shards import is_there, write_shards
from data.token_files import damaged, read_record, write_meta
from data.tokenizer import Tokenizer, from_meta
from deskgpt.system.formatting import BYTES, with_unit

# The vocabulary is trained on what comes after this many bytes of text for each token of val. Tokens of ordinary text
# have four to five bytes, so none of it is val's.
BYTES_OF_VAL_TOKEN = 8


def prepare(args: argparse.Namespace, part: Part) -> None:
    """Makes what args ask for and args.out lacks, of this part. Raises ValueError, OSError."""
    folder = args.out
    common.remove_leftovers(folder, f"*_{part.prefix}*.bin*.tmp*", f"{part.record}*.tmp*")
    tokenizer = None if args.encoding == "bpe" else common.tokenizer_of(args)  # None: to be trained
    job = common.job_of(args)

    # ---- what earlier starts have made ----
    meta = earlier_meta(folder, common.identity_of(job, tokenizer, args, part), part)
    entries: Entries = meta["files"]

    tokens = min(args.tokens, job.available - job.val_tokens) if args.pretokenized else args.tokens
    expected = min(job.available, job.val_tokens + tokens)

    def shards() -> Iterator[tuple[str, int]]:
        return common.shards_of(job, part, tokens, entries)

    complete = is_complete(folder, shards(), entries)
    bad = damaged(folder, entries) if complete else []
    if complete and not bad:
        print(f"{folder}: already prepared")
        if part.of == 1:
            common.finish(folder, meta)
        return

    # ---- what is missing ----
    for name in bad:
        print(f"{name} is damaged (its checksum does not match) and is made again")
    common.check_disk(folder, expected)
    if args.pretokenized:
        pretokenized.fetch(folder, meta, shards(), bad)
    else:
        source = job.local or common.hub_source(args, meta["revision"])
        meta["revision"] = source.revision
        if tokenizer is None:
            tokenizer = own_tokenizer(folder, meta, source, job, args.num_proc)
        mine = replace(source, files=source.files[part.number :: part.of])
        write_shards(folder, meta, mine, tokenizer, shards(), bad, args.num_proc, expected / part.of, part.record)
    if part.of == 1:
        common.finish(folder, meta)


def earlier_meta(folder: Path, identity: dict[str, Any], part: Part) -> dict[str, Any]:
    """What an earlier start recorded, or a record without files if there was none.

    Raises ValueError where that start, or another part, was to make something else, or a record is damaged.
    """
    try:
        whole = read_record(folder)
        parts = common.records_of_parts(folder)
    except ValueError as e:
        raise ValueError(f"{e}: choose another --out, or delete the folder") from None
    for record in (whole, *parts.values()):
        if record:
            common.check_identity(folder, record, identity)
    mine = whole if part.of == 1 else parts.get(part.number)
    revision = next((record["revision"] for record in parts.values()), None)
    return copy.deepcopy(mine) if mine else identity | {"revision": revision, "files": {}}


def is_complete(folder: Path, shards: Iterable[tuple[str, int]], entries: Entries) -> bool:
    """Whether folder holds every one of the shards, or all that its source has."""
    for name, size in shards:
        if not is_there(folder / name, size, entries.get(name, {})):
            return False
        if "last" in entries[name]:
            break
    return True


# ---- a vocabulary of its own ---------------------------------------------------------------------------------


def own_tokenizer(folder: Path, meta: dict[str, Any], source: Source, job: Job, threads: int) -> Tokenizer:
    """The tokenizer that an earlier start has trained, else a new one, which meta.json gets at once.

    Raises ValueError where no text is left after what can be val's, or too little.
    """
    if "merges" in meta["tokenizer"]:
        return from_meta(meta["tokenizer"])
    import tokenizers  # noqa: F401 (if it is missing, say so before much is read)

    os.environ["RAYON_NUM_THREADS"] = str(threads)  # which it reads when it begins to train
    begin = BYTES_OF_VAL_TOKEN * job.val_tokens
    wanted = f"at most {with_unit(bpe.SAMPLE_BYTES, BYTES)} of text after the first {with_unit(begin, BYTES)}"
    print(
        f"training a vocabulary of {meta['vocab_size']:,} on {wanted}",
        flush=True,
    )
    texts = bpe.sample(texts_from(source, begin), bpe.SAMPLE_BYTES)
    first = next(texts, None)
    if first is None:
        raise ValueError(
            f"{source.name} has no more than {begin:,} bytes of text, which val may take: nothing is left to train "
            f"the vocabulary on; give fewer --val_tokens than {job.val_tokens:,}"
        )
    tokenizer = bpe.train(itertools.chain([first], texts), meta["vocab_size"])
    meta["tokenizer"] = tokenizer.meta()
    write_meta(folder, meta)
    return tokenizer


def texts_from(source: Source, begin: int) -> Iterator[str]:
    """The texts of a source without their first `begin` bytes."""
    to_skip = begin
    for row in source.rows(0, 0):
        content = row.text.encode()
        if len(content) > to_skip:
            yield content[to_skip:].decode(errors="ignore")  # the cut may be within a character
        to_skip = max(0, to_skip - len(content))
