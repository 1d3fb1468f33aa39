"""Text that people have in files: UTF-8, packed or not, in one or several documents with
<|endoftext|> between them.
"""

from __future__ import annotations

import glob
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data.tokenizer import END_OF_TEXT

PACKED = ("", ".gz", ".zst")  # suffixes of packed files
TEXTS = tuple(f".txt{packed}" for packed in PACKED)
NAMED_FILES = 10
# Surrogateescape makes the latter of bytes that are not UTF-8.
NOT_TEXT = re.compile("[\0\udc80-\udcff]")
# A line of its own
SEPARATOR = re.compile(rf"^{re.escape(END_OF_TEXT)}[ \t]*(?:\r?\n|\Z)", re.MULTILINE)


def expanded(paths: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that these paths, patterns and folders mean.

    A folder means its files with these suffixes, in name order, hidden ones left out. Raises
    ValueError if it has none.
    """
    found = []
    for path in paths:
        # Windows leaves patterns to programs
        matches = [] if path.exists() else sorted(glob.glob(str(path)))
        files = []
        for file in sorted(path.rglob("*")):
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and file.name.lower().endswith(suffixes) and not is_hidden:
                files.append(file)
        if path.is_dir() and not files:
            raise ValueError(f"the folder {path} holds no file *{', *'.join(suffixes)}")
        found += files or [Path(match) for match in matches] or [path]
    return found


def names_of(paths: list[Path]) -> str:
    """Return the names of the first files, as meta.json records a source."""
    return ", ".join(path.name for path in paths[:NAMED_FILES])


def read_text(path: Path) -> str:
    """Return the text of a file, line ends as they are. Raises as lines_in."""
    return "".join(lines_in(path, newline=""))


def lines_in(path: Path, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a text file, packed or not. newline: as of open; None makes each line end
    with "\n".

    Raises ValueError at a line that is not text, OSError, ImportError.
    """
    try:
        with (
            open_unpacked(path) as file,
            io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline) as text,
        ):
            for number, line in enumerate(text, 1):
                if NOT_TEXT.search(line):
                    raise ValueError(
                        f"{path}, line {number}: this is not UTF-8 text; convert it first"
                    )
                yield line
    except (OSError, EOFError, zlib.error) as e:  # unpacking raises all of these
        if reason := getattr(e, "strerror", None):
            raise OSError(f"cannot read {path}: {reason}; is its name right?") from None
        raise OSError(f"{path} is damaged ({e}); fetch or pack it again") from None


def open_unpacked(path: Path) -> Any:
    """Return the file, open for reading bytes, unpacked if its name says that it is packed."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path)
    if path.suffix.lower() == ".zst":
        import pyarrow  # zstandard's own reader does not notice that a file is cut short

        return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return open(path, "rb")


def documents_of(lines: Iterable[str]) -> Iterator[str]:
    """Yield the documents of a text, separated by lines with nothing but <|endoftext|>; empty ones
    are left out.
    """
    for is_separator, document in itertools.groupby(
        lines, lambda line: line.rstrip() == END_OF_TEXT
    ):
        if not is_separator:
            yield "".join(document)


def documents_in(text: str) -> list[str]:
    """Return the documents of a text as documents_of, line ends as they are."""
    return list(documents_of(io.StringIO(text, newline="\n")))


def next_document(text: str, at: int) -> int:
    """Return the first index from `at` on at which one of several documents begins; `at` if none
    does.
    """
    for separator in SEPARATOR.finditer(text, max(0, at - len(END_OF_TEXT) - 2)):
        if at <= separator.end() < len(text) - 1:
            return separator.end()
    return at
