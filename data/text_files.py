"""Text that people have in files: UTF-8, packed or not, in one or several documents with
<|endoftext|> between them.
"""

import glob
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data.tokenizer import END_OF_TEXT
from deskgpt.errors import reason

PACKED = (".gz", ".zst", ".bz2")  # suffixes of packed files


def packed(*suffixes: str) -> tuple[str, ...]:
    """Return these suffixes, each also of packed files."""
    return tuple(suffix + end for suffix in suffixes for end in ("", *PACKED))


TEXTS = packed(".txt")
NOT_UTF8 = (
    "is not UTF-8 text: unpack an archive (zip, xz, tar), save a document (docx, epub) as text, "
    "use pdftotext for a PDF, iconv -f LATIN1 -t UTF-8 for Latin-1 (likewise UTF-16, GBK), or "
    "data/fineweb_edu/prepare.py --source for a table (parquet)"
)
NAMED_FILES = 3
# Surrogateescape turns bytes that are not UTF-8 into the second kind.
NOT_TEXT = re.compile("[\0\udc80-\udcff]")
# The separator of documents stands on a line of its own.
SEPARATOR = re.compile(rf"^{re.escape(END_OF_TEXT)}[ \t]*(?:\r?\n|\Z)", re.MULTILINE)


def expanded(paths: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that these paths, patterns and folders mean.

    A folder means its files with these suffixes, in name order, hidden ones left out. Raises
    ValueError if it has none.
    """
    files = []
    for path in paths:
        if not path.is_dir():
            # Windows leaves patterns to programs.
            matches = [] if path.exists() else sorted(glob.glob(str(path)))
            files += [Path(match) for match in matches] or [path]
            continue
        inside = []
        for file in sorted(path.rglob("*")):
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and file.name.lower().endswith(suffixes) and not is_hidden:
                inside.append(file)
        if not inside:
            raise ValueError(
                f"the folder {path} holds no file *{', *'.join(suffixes)}; name its files, or give "
                "a pattern such as 'folder/*.py'"
            )
        files += inside
    return files


def names_of(paths: list[Path]) -> str:
    """Return the names of the first files, as meta.json records a source."""
    names = ", ".join(path.name for path in paths[:NAMED_FILES])
    n_more = len(paths) - NAMED_FILES
    return f"{names} and {n_more} more" if n_more > 0 else names


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
                    raise ValueError(f"{path}, line {number}: this {NOT_UTF8}")
                yield line
    except OSError as e:
        remedy = "is its name right, and is it complete?"
        raise OSError(f"cannot read {path} ({reason(e)}): {remedy}") from None


def open_unpacked(path: Path) -> Any:
    """Return the file, open for reading bytes, unpacked if its name says that it is packed."""
    if path.suffix not in PACKED:
        return open(path, "rb")
    import pyarrow  # zstandard's own reader does not notice that a file is cut short

    return pyarrow.input_stream(path)


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
    return [document for document in SEPARATOR.split(text) if document]


def next_document(text: str, at: int) -> int:
    """Return the first index from `at` on at which one of several documents begins; `at` if none
    does.
    """
    for separator in SEPARATOR.finditer(text, at):
        if separator.end() < len(text) - 1:
            return separator.end()
    return at
