"""Text that people have in files: UTF-8 or UTF-16, packed or not, documents with <|endoftext|> between them."""

from __future__ import annotations

import glob
import gzip
import re
from pathlib import Path

from data.tokenizer import END_OF_TEXT

PACKED = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"%PDF": "PDF"}
SEPARATOR = re.compile(rf"^{re.escape(END_OF_TEXT)}[ \t]*(?:\r?\n|\Z)", re.MULTILINE)  # a line of its own


def expanded(paths: list[Path]) -> list[Path]:
    """The paths, with the files that a pattern matches in its place: the Windows shell leaves that to programs."""
    found = []
    for path in paths:
        matches = [] if path.exists() else sorted(glob.glob(str(path), recursive=True))
        found += [Path(match) for match in matches] or [path]
    return found


def read_text(path: Path) -> str:
    """The text of a file. Raises ValueError if it is not text, OSError."""
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise OSError(f"cannot read {path}: {reason}; is its name right?") from None
    for begin, kind in PACKED.items():
        if content.startswith(begin):
            raise ValueError(f"{path} is a {kind} file, not text; unpack or convert it first")
    try:
        # -sig: drops the mark that Windows editors put first.
        text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as e:
        line = content[: e.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: this is not UTF-8 text; convert it first, e.g. with iconv") from None
    check_text(path, text)
    return text


def check_text(path: Path | str, text: str) -> None:
    """Raises ValueError if a text from this file holds NUL characters, as UTF-16 does that is read as UTF-8."""
    if "\0" in text:
        raise ValueError(f"{path} holds NUL characters: is it UTF-16, or not text at all? Convert it to UTF-8 first")


def documents_in(text: str) -> list[str]:
    """The documents of a text, which lines with nothing but <|endoftext|> separate; empty ones are left out."""
    return [document for document in SEPARATOR.split(text) if document]


def next_document(text: str, at: int) -> int:
    """The first place from `at` on where one of several documents begins; `at` if none does."""
    for separator in SEPARATOR.finditer(text, max(0, at - len(END_OF_TEXT) - 2)):
        if at <= separator.end() < len(text) - 1:
            return separator.end()
    return at
