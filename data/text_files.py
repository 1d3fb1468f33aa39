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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from data.tokenizer import END_OF_TEXT

PACKED = ("", ".gz", ".bz2", ".xz", ".zst")  # suffixes of packed files
TEXTS = tuple(f".txt{packed}" for packed in PACKED)
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16"}
MARKS |= {codecs.BOM_UTF16_BE: "utf-16"}  # after UTF-32's, one of which begins like one of UTF-16's
DOCUMENTS = (b"%PDF", b"{\\rtf", b"PK\3\4")  # what files of other programs begin with
LONGEST_BEGIN = 8  # bytes
NOT_TEXT = re.compile("[\0\udc80-\udcff]")  # surrogateescape makes the latter of bytes that are not UTF-8
SEPARATOR = re.compile(rf"^{re.escape(END_OF_TEXT)}[ \t]*(?:\r?\n|\Z)", re.MULTILINE)  # a line of its own


def expanded(paths: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that these paths, patterns and folders mean.

    A folder means its files with these suffixes, in name order, hidden ones left out. Raises ValueError if it has none.
    """
    found = []
    for path in paths:
        # The Windows shell leaves patterns to programs.
        matches = [] if path.exists() else sorted(glob.glob(str(path), recursive=True))
        for match in map(Path, matches or [str(path)]):
            files = sorted(file for file in match.rglob("*") if is_shown(match, file, suffixes))
            if match.is_dir() and not files:
                raise ValueError(f"the folder {match} holds no file *{', *'.join(suffixes)}")
            found += files or [match]
    return found


def is_shown(folder: Path, path: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether path is a file with one of these suffixes, and not hidden in folder."""
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.is_file() and path.name.lower().endswith(suffixes) and not hidden


def read_text(path: Path) -> str:
    """Return the text of a file, line ends as they are. Raises as lines_in."""
    return "".join(lines_in(path, whole=True))


def lines_in(path: Path, whole: bool = False) -> Iterator[str]:
    """Yield the lines of a text file, packed or not, each with "\\n" at its end; if whole, the text as it is.

    Raises ValueError at a line that is not text, OSError.
    """
    try:
        with open(path, "rb") as raw, io.BufferedReader(unpacked(raw)) as file:
            begin = file.peek(LONGEST_BEGIN)
            if begin.startswith(DOCUMENTS):
                raise ValueError(
                    f"{path}, line 1: this is a PDF, RTF or zip (docx, epub) file, not text; convert it first"
                )
            encoding = next((name for mark, name in MARKS.items() if begin.startswith(mark)), "utf-8-sig")
            with io.TextIOWrapper(file, encoding, "surrogateescape", newline="" if whole else None) as text:
                for number, piece in enumerate([text.read()] if whole else text, 1):
                    if bad := NOT_TEXT.search(piece):
                        line = number + piece.count("\n", 0, bad.start())
                        what = "NUL characters (UTF-16?)" if bad[0] == "\0" else "this is not UTF-8 text"
                        raise ValueError(f"{path}, line {line}: {what}; convert it first, e.g. with iconv")
                    yield piece
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} begins as {e.encoding.upper()} and is not ({e.reason}); is it damaged?") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as e:  # unpacking raises all of these
        if reason := getattr(e, "strerror", None):
            raise OSError(f"cannot read {path}: {reason}; is its name right?") from None
        raise OSError(f"{path} is damaged ({e}); fetch or pack it again") from None


def unpacked(raw: BinaryIO) -> Any:
    """Return the file, unpacked if it is packed. Raises ImportError."""
    begin = raw.read(LONGEST_BEGIN)
    raw.seek(0)
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


def documents_of(lines: Iterable[str]) -> Iterator[str]:
    """Yield the documents of a text, separated by lines with nothing but <|endoftext|>; empty ones are left out."""
    for is_separator, document in itertools.groupby(lines, lambda line: line.rstrip() == END_OF_TEXT):
        if not is_separator:
            yield "".join(document)


def documents_in(text: str) -> list[str]:
    """Return the documents of a text as documents_of, line ends as they are."""
    return list(documents_of(io.StringIO(text, newline="\n")))


def next_document(text: str, at: int) -> int:
    """Return the first index from `at` on at which one of several documents begins; `at` if none does."""
    for separator in SEPARATOR.finditer(text, max(0, at - len(END_OF_TEXT) - 2)):
        if at <= separator.end() < len(text) - 1:
            return separator.end()
    return at
