"""Text that people have in files: UTF-8, UTF-16 or UTF-32, packed or not, documents with <|endoftext|> between them."""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import io
import itertools
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from data.tokenizer import END_OF_TEXT

# Other files that people give for text, by how they begin.
NO_TEXT = {b"PK\x03\x04": "a zip file, as docx and epub are", b"%PDF": "a PDF file", b"PAR1": "a parquet file"}
NO_TEXT |= {b"{\\rtf": "an RTF file"}
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16"}
MARKS |= {codecs.BOM_UTF16_BE: "utf-16"}  # UTF-32's first: one of them begins as UTF-16's
LONGEST_BEGIN = 8  # bytes
NOT_TEXT = re.compile("[\0\udc80-\udcff]")  # surrogateescape makes the latter of bytes that are no UTF-8
SEPARATOR = re.compile(rf"^{re.escape(END_OF_TEXT)}[ \t]*(?:\r?\n|\Z)", re.MULTILINE)  # a line of its own


def expanded(paths: list[Path]) -> list[Path]:
    """The paths, with the files that a pattern matches in its place: the Windows shell leaves that to programs."""
    found = []
    for path in paths:
        matches = [] if path.exists() else sorted(glob.glob(str(path), recursive=True))
        found += [Path(match) for match in matches] or [path]
    return found


def read_text(path: Path) -> str:
    """The text of a file, line ends as they are. Raises ValueError if it is not text, OSError."""
    with opened(path, newline="") as file:
        return checked(path, 1, file.read())


def lines_in(path: Path) -> Iterator[str]:
    """The lines of a text file, each with "\\n" at its end. Raises as read_text, once it comes to what is wrong."""
    with opened(path, newline=None) as file:
        for number, line in enumerate(file, 1):
            yield checked(path, number, line)


@contextmanager
def opened(path: Path, newline: str | None) -> Iterator[io.TextIOWrapper]:
    """A text file, which may be packed, for reading. Raises as read_text, where it is not text also in the block."""
    try:
        with open(path, "rb") as raw, io.BufferedReader(unpacked(path, raw)) as file:
            begin = file.peek(LONGEST_BEGIN)
            encoding = next((name for mark, name in MARKS.items() if begin.startswith(mark)), "utf-8-sig")
            with io.TextIOWrapper(file, encoding, "surrogateescape", newline) as text:
                yield text
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} begins as {e.encoding.upper()} and is not ({e.reason}); is it damaged?") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as e:  # what unpacks raises the others
        reason = getattr(e, "strerror", None)
        named = f"cannot read {path}: {reason}; is its name right?"
        raise OSError(named if reason else f"{path} is damaged ({e}); fetch or pack it again") from None


def unpacked(path: Path, raw: BinaryIO) -> Any:
    """A file that reads what a packed one holds. Raises ValueError where it is no text, ImportError."""
    begin = raw.read(LONGEST_BEGIN)
    raw.seek(0)
    for mark, kind in NO_TEXT.items():
        if begin.startswith(mark):
            raise ValueError(f"{path} is {kind}, not text; unpack or convert it first")
    for mark, unpack in UNPACKERS.items():
        if begin.startswith(mark):
            return unpack(raw)
    return raw


def unpacked_zstd(raw: BinaryIO) -> Any:
    import pyarrow  # zstandard's own reader does not notice that a file is cut short

    return pyarrow.CompressedInputStream(raw, "zstd")


UNPACKERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
    b"\x28\xb5\x2f\xfd": unpacked_zstd,
}


def checked(path: Path, number: int, text: str) -> str:
    """A text that begins in this line of the file. Raises ValueError for what is not UTF-8, and for NUL characters."""
    if bad := NOT_TEXT.search(text):
        line = number + text.count("\n", 0, bad.start())
        reason = "NUL characters (is it UTF-16, or not text at all?)" if bad[0] == "\0" else "this is not UTF-8 text"
        raise ValueError(f"{path}, line {line}: {reason}; convert it to UTF-8 first, e.g. with iconv")
    return text


def documents_of(lines: Iterator[str]) -> Iterator[str]:
    """The documents of a text that comes line by line, as documents_in."""
    for is_separator, document in itertools.groupby(lines, lambda line: line.rstrip() == END_OF_TEXT):
        if not is_separator:
            yield "".join(document)


def documents_in(text: str) -> list[str]:
    """The documents of a text, which lines with nothing but <|endoftext|> separate; empty ones are left out."""
    return [document for document in SEPARATOR.split(text) if document]


def next_document(text: str, at: int) -> int:
    """The first place from `at` on where one of several documents begins; `at` if none does."""
    for separator in SEPARATOR.finditer(text, max(0, at - len(END_OF_TEXT) - 2)):
        if at <= separator.end() < len(text) - 1:
            return separator.end()
    return at
