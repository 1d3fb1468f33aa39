"""Text that people have in files: UTF-8, packed or not, in one or several documents with
<|endoftext|> between them. What is no text is named, with the command that makes text of it.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import itertools
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data.tokenizer import END_OF_TEXT

PACKED = ("", ".gz", ".zst", ".xz", ".bz2")  # suffixes of packed files


def packed(*suffixes: str) -> tuple[str, ...]:
    """Return these suffixes, each also of packed files."""
    return tuple(suffix + end for suffix in suffixes for end in PACKED)


TEXTS = packed(".txt")
MARKDOWN = packed(".md")
# Files that are no text: the ends of their names, how they begin, and what makes text of them.
NO_TEXTS = (
    ((".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.zst"), (), "an archive: unpack it with tar -xf"),
    (
        (".docx", ".odt", ".epub"),
        (),
        "a document in a zip file: save it as text, or use pandoc -t plain",
    ),
    ((".zip",), ("PK\x03\x04",), "a zip archive: unpack it with unzip"),
    ((".7z", ".rar"), ("7z\udcbc", "Rar!\x1a"), "an archive: unpack it first"),
    ((".pdf",), ("%PDF-",), "a PDF: use pdftotext"),
    ((".doc", ".rtf"), ("\udcd0\udccf\x11\udce0", "{\\rtf"), "a document: save it as text"),
    (
        (),
        ("\x1f\udc8b", "\udcfd7zXZ", "BZh91AY", "(\udcb5/\udcfd"),
        "packed: give it the suffix of its kind, .gz, .xz, .bz2 or .zst",
    ),
    ((), ("\udcff\udcfe", "\udcfe\udcff"), "UTF-16: use iconv -f UTF-16 -t UTF-8"),
    (
        (".parquet", ".arrow"),
        ("PAR1", "ARROW1"),
        "a table: use python data/fineweb_edu/prepare.py --source, or data/chat/prepare.py",
    ),
)
NOT_UTF8 = (
    "not UTF-8 text: save it as UTF-8 in an editor, or use iconv -f LATIN1 -t UTF-8 if it is "
    "Latin-1 (likewise GBK, BIG5, UTF-16)"
)
NAMED_FILES = 10
# Surrogateescape makes the latter of bytes that are not UTF-8.
NOT_TEXT = re.compile("[\0\udc80-\udcff]")
# A line of its own
SEPARATOR = re.compile(rf"^{re.escape(END_OF_TEXT)}[ \t]*(?:\r?\n|\Z)", re.MULTILINE)


def expanded(paths: list[Path], *kinds: tuple[str, ...]) -> list[Path]:
    """Return the files that these paths, patterns and folders mean.

    A folder means its files with suffixes of the first kind that it has, in name order, hidden ones
    left out. Raises ValueError if it has none.
    """
    found = []
    for path in paths:
        # Windows leaves patterns to programs
        matches = [] if path.exists() else sorted(glob.glob(str(path)))
        inside = []
        for file in sorted(path.rglob("*")):
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not is_hidden:
                inside.append(file)
        files: list[Path] = []
        for suffixes in kinds:
            files = files or [file for file in inside if file.name.lower().endswith(suffixes)]
        if path.is_dir() and not files:
            others = ", ".join(file.name for file in inside[:3])
            raise ValueError(
                f"the folder {path} holds no file *{', *'.join(sum(kinds, ()))}; it has "
                f"{others or 'no files'}: name them, or give a pattern such as 'folder/*.py'"
            )
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
                kind = kind_of(path, line) if number == 1 else ""
                if kind or NOT_TEXT.search(line):
                    raise ValueError(f"{path}, line {number}: this is {kind or NOT_UTF8}")
                yield line
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as e:  # unpacking raises all of these
        if reason := getattr(e, "strerror", None):
            raise OSError(f"cannot read {path}: {reason}; is its name right?") from None
        raise OSError(f"{path} is damaged ({e}); fetch or pack it again") from None


def open_unpacked(path: Path) -> Any:
    """Return the file, open for reading bytes, unpacked if its name says that it is packed."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    if path.suffix.lower() == ".zst":
        import pyarrow  # zstandard's own reader does not notice that a file is cut short

        return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return openers.get(path.suffix.lower(), open)(path, "rb")


def kind_of(path: Path, begin: str = "") -> str:
    """Return what a file is that is no text, by its beginning, or by its name if that is no text
    either, and what helps; "" for text.
    """
    for suffixes, begins, kind in NO_TEXTS:
        by_name = path.name.lower().endswith(suffixes) and (not begin or NOT_TEXT.search(begin))
        if by_name or begin.startswith(begins):
            return kind
    return ""


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
