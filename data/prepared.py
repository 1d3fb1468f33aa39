"""What all prepare.py share: writing a folder of token files, and finding the tokenizer that is
asked for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.meta_files import read_record, to_json
from data.token_files import MASK_SUFFIX, read_meta
from data.tokenizer import Ids, Tokenizer, from_meta, short_name
from deskgpt.files import locked_folder, remove_leftovers, replacing, sha256


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

    All files are written before the first one gets its name, and val.bin gets its name last:
    wherever this stops, the folder holds the old data, the new, or no val.bin. Raises ValueError if
    another prepare.py is at work there, OSError if the disk is full.
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
    with locked(folder):
        with suppress(ValueError, OSError, KeyError):  # there are no data, or damaged ones
            if (before := read_record(folder)["tokenizer"]) != tokenizer.meta():
                print(
                    f"note: {folder} had another tokenizer, {short_name(before)}: its runs "
                    "cannot be resumed here"
                )
        remove_leftovers(folder, *(f"{name}." for name in contents))
        try:
            # Which renames in the reverse order, once all of them are on the disk.
            with ExitStack() as stack:
                for name, content in sorted(contents.items(), reverse=True):
                    file = stack.enter_context(replacing(folder / name))
                    file.write(content)
                    file.flush()
                for name in ("val.bin", *(f"{split}{MASK_SUFFIX}" for split in splits)):
                    (folder / name).unlink(missing_ok=True)
        except OSError as e:
            raise OSError(
                f"cannot write {folder}: {e.strerror or e}; free some disk space"
            ) from None


def locked(folder: Path, name: str = "", wait_s: float = 0.0) -> AbstractContextManager[None]:
    """Make folder and keep other prepare.py out of its part of this name.

    Raises ValueError if one stays there.
    """
    in_use = f"another prepare.py is at work in {folder}; wait, or choose another folder"
    return locked_folder(folder, in_use, name, wait_s)


def named_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of this name, or that of the prepared folder with this path.

    Raises ValueError if there is none.
    """
    if name in ("bytes", "gpt2"):
        return from_meta({"name": name})
    if (Path(name) / "meta.json").is_file():
        return from_meta(read_meta(Path(name))["tokenizer"])
    raise ValueError(
        f"--tokenizer={name} is not bytes, gpt2 or the path of a prepared folder; "
        "data/text/prepare.py also makes char and bpe of a text (tokenizers of other "
        "programs, such as tokenizer.json, are not read)"
    )
