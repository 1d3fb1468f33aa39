"""Text to token ids and back: characters, UTF-8 bytes, GPT-2's encoding, or merges of
data/text/prepare.py.

A small dictionary describes a tokenizer (`meta()`, `from_meta()`), in a data folder's meta.json and
in checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deskgpt.errors import shortened
from deskgpt.files import file_sha256, sha256

Ids = npt.NDArray[np.uint16]

# tiktoken reads these files, and checks these digests.
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
MOST_IDS = 1 << 16  # uint16
VOCAB_MULTIPLE = 64  # ids: whole tiles in the matmul of the head

# ---- merges of one's own
END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE = 257  # ids: the bytes and END_OF_TEXT
LONGEST_TOKEN = 128  # bytes; GPT-2's longest has as many
# GPT-2's pattern as tiktoken writes it: the same pieces, without going back over long white space.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# How GPT-2's merges.txt spells bytes: printable ones of Latin-1 as themselves, the others, in
# order, from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
CHAR_OF_BYTE = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(UNPRINTABLE)
}


class Tokenizer(Protocol):
    vocab_size: int
    end_of_text: int | None  # the token that documents begin with; None if the tokenizer has none

    def encode(self, text: str) -> Ids:
        """Return token ids (n,) of plain text.

        Raises ValueError for characters that have no token.
        """

    def encode_prompt(self, text: str) -> Ids:
        """Return token ids (n,) of a prompt, in which END_OF_TEXT stands for the token end_of_text,
        if there is one.
        """
        if self.end_of_text is None:
            return self.encode(text)
        first, *rest = map(self.encode, text.split(END_OF_TEXT))
        end_of_text = np.array([self.end_of_text], np.uint16)
        for ids in rest:
            first = np.concatenate([first, end_of_text, ids])
        return first

    def decode_bytes(self, ids: list[int]) -> bytes:
        """Return the UTF-8 of token ids, with END_OF_TEXT for end_of_text; several tokens can make
        up one character.
        """

    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of text of each token (vocab_size,); 0 for end_of_text, which is not
        text.
        """
        lengths = np.array([len(self.decode_bytes([i])) for i in range(self.vocab_size)], np.int64)
        if self.end_of_text is not None:
            lengths[self.end_of_text] = 0
        return lengths

    def meta(self) -> dict[str, Any]:
        """Return the description from which `from_meta` makes the same tokenizer."""


class CharTokenizer(Tokenizer):
    """One token per character, ids in the order of `chars`, as nanoGPT's shakespeare_char has
    it.
    """

    end_of_text: int | None = None

    def __init__(self, chars: str) -> None:
        self.chars = chars
        self.vocab_size = len(chars)
        self._ids = {char: i for i, char in enumerate(chars)}
        if len(self._ids) < len(chars) or len(chars) > MOST_IDS:
            raise ValueError(
                f"{len(chars):,} characters are more than uint16 holds, or one is there "
                "twice; try bytes"
            )

    @classmethod
    def of(cls, text: str) -> CharTokenizer:
        """Return the tokenizer for the characters that occur in text, in code point order."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> Ids:
        try:
            return np.fromiter(map(self._ids.__getitem__, text), np.uint16, len(text))
        except KeyError as e:
            raise ValueError(
                f"the tokenizer does not know {e}; its characters: {shortened(self.chars)}"
            ) from None

    def decode_bytes(self, ids: list[int]) -> bytes:
        # surrogatepass: text that was read with errors="surrogateescape" can hold lone surrogates
        return "".join(self.chars[i] for i in ids).encode("utf-8", "surrogatepass")

    def meta(self) -> dict[str, Any]:
        return {"name": "char", "chars": self.chars}


class BytesTokenizer(Tokenizer):
    """One token per UTF-8 byte: 256 ids, nothing is unknown."""

    vocab_size = 256
    end_of_text: int | None = 255  # a byte that UTF-8 never has

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return bytes(ids).replace(b"\xff", END_OF_TEXT.encode())

    def meta(self) -> dict[str, Any]:
        return {"name": "bytes"}


class BpeTokenizer(Tokenizer):
    """A byte-pair encoding of tiktoken's, described by meta: `gpt2` and `of_merges` make them."""

    def __init__(self, encoding: Any, meta: dict[str, Any]) -> None:
        self._encoding = encoding
        self._meta = meta
        self.vocab_size = encoding.n_vocab
        self.end_of_text: int | None = encoding.eot_token

    def encode(self, text: str) -> Ids:
        # disallowed_special=(): text may contain "<|endoftext|>"; it is spelt out in ordinary
        # tokens
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return self._encoding.decode_bytes(ids)

    def meta(self) -> dict[str, Any]:
        return self._meta


def gpt2() -> BpeTokenizer:
    """Return GPT-2's encoding.

    Raises ValueError if its files can be neither found nor downloaded.
    """
    import tiktoken

    try:
        return BpeTokenizer(tiktoken.get_encoding("gpt2"), {"name": "gpt2"})
    except Exception as e:  # tiktoken downloads with requests and lets its exceptions through
        remedy = "connect once, or set TIKTOKEN_CACHE_DIR to a folder that holds its files"
        raise ValueError(
            f"tokenizer 'gpt2' cannot be downloaded ({type(e).__name__}); {remedy}"
        ) from None


def of_merges(merges: str) -> BpeTokenizer:
    """Return an encoding of one's own: id 0 to 255 is that byte, 256 + i merge number i, the last
    one END_OF_TEXT.

    merges: the lines of a merges.txt: two tokens, as CHAR_OF_BYTE spells them, with a space
    between. Raises ValueError.
    """
    import tiktoken

    tokens = tokens_of(merges)
    ranks = {token: i for i, token in enumerate(tokens)}
    special = {END_OF_TEXT: len(tokens)}
    encoding = tiktoken.Encoding(
        "bpe", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    return BpeTokenizer(encoding, {"name": "bpe", "merges": merges})


def tokens_of(merges: str) -> list[bytes]:
    """Return the tokens of BpeTokenizer's merges by id, without END_OF_TEXT.

    Raises ValueError if one is wrong.
    """
    tokens = {CHAR_OF_BYTE[byte]: bytes([byte]) for byte in range(256)}
    # Text beyond the largest vocabulary becomes a last line that is wrong.
    for line in merges.split("\n", MOST_IDS) if merges else []:
        left, _, right = line.partition(" ")
        token = left + right
        is_new = left in tokens and right in tokens and token not in tokens
        if not is_new or len(token) > LONGEST_TOKEN or len(tokens) == MOST_IDS - 1:
            raise ValueError(
                f"the tokenizer's merge {len(tokens) - 255:,}, {reprlib.repr(line)}, makes no new "
                "token of two others"
            )
        tokens[token] = tokens[left] + tokens[right]
    return list(tokens.values())


def gpt2_vocabulary() -> tuple[list[str], list[str]]:
    """Return GPT-2's tokens, as they are spelt, by id, and its merges, from the files of tiktoken's
    cache.
    """
    from tiktoken.load import read_file_cached

    encoder = read_file_cached(f"{GPT2_FILES}encoder.json", GPT2_SHA256["encoder.json"])
    merges = read_file_cached(f"{GPT2_FILES}vocab.bpe", GPT2_SHA256["vocab.bpe"])
    # The first line is a version, and the last one is empty.
    return list(json.loads(encoder)), merges.decode().split("\n")[1:-1]


def from_meta(meta: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that `meta()` describes. Raises ValueError."""
    name = meta.get("name")
    if name == "char" and isinstance(meta.get("chars"), str) and meta["chars"]:
        return CharTokenizer(meta["chars"])
    if name == "bytes":
        return BytesTokenizer()
    if name == "bpe" and isinstance(meta.get("merges"), str):
        return of_merges(meta["merges"])
    if meta == {"name": "gpt2"}:
        return gpt2()
    raise ValueError(f"{reprlib.repr(meta)} describes no tokenizer")


def from_meta_offline(meta: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer as from_meta, without a download.

    Raises ValueError if tiktoken's cache lacks a file.
    """
    if meta.get("name") == "gpt2":
        default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
        folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR", default))
        for name, checksum in GPT2_SHA256.items():
            path = folder / hashlib.sha1(f"{GPT2_FILES}{name}".encode()).hexdigest()
            # tiktoken would delete a damaged file and download it again.
            if not path.is_file() or file_sha256(path) != checksum:
                raise ValueError(
                    "the files of tokenizer 'gpt2' are not cached (TIKTOKEN_CACHE_DIR); no "
                    "run downloads"
                )
    return from_meta(meta)


def valid_unicode(text: str) -> str:
    """Return the text with U+FFFD for halves of surrogate pairs, which JSON can spell and UTF-8
    cannot.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def short_name(meta: dict[str, Any]) -> str:
    """Return a tokenizer's name, followed by 12 hex digits that tell vocabularies of this name
    apart.
    """
    name = meta.get("name", "unknown")
    return name if len(meta) < 2 else f"{name} {sha256(json.dumps(meta).encode())[:12]}"


def padded_vocab_size(meta: dict[str, Any], vocab_size: int) -> int:
    """Return the rows of a new model's embedding: a BPE vocabulary is rounded up to matmul tiles
    (50257 to 50304).
    """
    if meta.get("name") in (None, "char", "bytes"):
        return vocab_size
    return math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def encoded_document(tokenizer: Tokenizer, text: str) -> Ids:
    """Return the ids (n,) of a document, which begins with end_of_text; none of an empty one."""
    begin = np.array([tokenizer.end_of_text] if text else [], np.uint16)
    return np.concatenate([begin, tokenizer.encode(text)])
