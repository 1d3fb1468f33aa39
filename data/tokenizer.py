"""Text to token ids and back: characters, UTF-8 bytes, or any tiktoken encoding whose ids fit into uint16.

A tokenizer is described by a small dictionary (`meta()`, `from_meta()`), which travels in a data folder's
meta.json and in checkpoints, so that a checkpoint can be sampled from where its data is not.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint16]

GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # as tiktoken names and checks them
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
CHECK_EVERY = 16  # batches: one text in each, or its beginning


class Tokenizer(Protocol):
    vocab_size: int
    end_of_text: int | None  # the token that documents begin with; None where the tokenizer has none

    def encode(self, text: str) -> Ids:
        """Token ids of plain text. Raises ValueError for text that has none."""

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """As encode, of many texts at once, which can be much faster."""

    def encode_prompt(self, text: str) -> Ids:
        """As encode, but the names of special tokens stand for these tokens."""

    def decode_bytes(self, ids: list[int]) -> bytes:
        """UTF-8 of token ids; several tokens can make up one character."""

    def meta(self) -> dict[str, Any]: ...


class CharTokenizer:
    """One token per character, ids in the order of `chars`, as nanoGPT's shakespeare_char has it."""

    end_of_text: int | None = None

    def __init__(self, chars: str) -> None:
        if len(chars) > 1 << 16:
            raise ValueError(
                f"{len(chars):,} different characters do not fit into uint16 ids; use --tokenizer bytes or gpt2"
            )
        self.chars, self.vocab_size = chars, len(chars)
        points = code_points(chars)
        self._order = np.argsort(points)
        self._sorted = points[self._order]

    @classmethod
    def of(cls, text: str) -> CharTokenizer:
        """The tokenizer for the characters that occur in text, in code point order."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> Ids:
        points = code_points(text)
        at = np.searchsorted(self._sorted, points).clip(max=self.vocab_size - 1)
        unknown = np.unique(points[self._sorted[at] != points])
        if unknown.size:
            named = ", ".join(repr(chr(p)) for p in unknown[:10]) + (", ..." if unknown.size > 10 else "")
            raise ValueError(f"the tokenizer does not know {named}; its {self.vocab_size} characters: {self.chars!r}")
        return self._order[at].astype(np.uint16)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    encode_prompt = encode

    def decode_bytes(self, ids: list[int]) -> bytes:
        # surrogatepass: lone surrogates can stand in text read with errors="surrogateescape"
        return "".join(self.chars[i] for i in ids).encode("utf-8", "surrogatepass")

    def meta(self) -> dict[str, Any]:
        return {"name": "char", "chars": self.chars}


class BytesTokenizer:
    """One token per UTF-8 byte: 256 ids, nothing is unknown."""

    vocab_size = 256
    end_of_text: int | None = 255  # a byte that UTF-8 never has

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    encode_prompt = encode

    def decode_bytes(self, ids: list[int]) -> bytes:
        return bytes(ids)

    def meta(self) -> dict[str, Any]:
        return {"name": "bytes"}


class TiktokenTokenizer:
    """A byte-pair encoding by its tiktoken name, "gpt2" above all."""

    def __init__(self, name: str = "gpt2") -> None:
        import tiktoken

        try:
            self._encoding = tiktoken.get_encoding(name)
        except ValueError as e:
            raise ValueError(f"tokenizer {name!r}: {str(e).splitlines()[0]}") from None
        except Exception as e:  # tiktoken downloads with requests and lets its exceptions through
            raise ValueError(
                f"the files of tokenizer {name!r} are not cached and cannot be downloaded ({type(e).__name__}); "
                "connect once, or set TIKTOKEN_CACHE_DIR to a folder that holds them"
            ) from None
        self.name, self.vocab_size = name, self._encoding.n_vocab
        self.end_of_text: int | None = self._encoding.eot_token
        if self.vocab_size > 1 << 16:
            raise ValueError(f"tokenizer {name!r} has {self.vocab_size:,} ids; token files hold uint16, at most 65,536")
        self._batches = itertools.count()

    def encode(self, text: str) -> Ids:
        # disallowed_special=(): the text may contain "<|endoftext|>", which is then spelt out in ordinary tokens
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        if not texts or self.name != "gpt2" or (fast := fast_gpt2()) is None:
            return [self.encode(text) for text in texts]
        buffer, bounds = fast.encode_batch_flat(texts)  # uint32 of all texts, uint64 where each begins and ends
        ends = np.frombuffer(bounds, "<u8")[1:-1].astype(np.int64)
        ids = np.split(np.frombuffer(buffer, "<u4").astype(np.uint16), ends)
        # tiktoken, many times slower, stays the reference: a mistake may not go unnoticed in billions of tokens.
        turn, now = divmod(next(self._batches), CHECK_EVERY)
        sample = texts[turn % len(texts)][:20_000]
        if now == 0 and fast.encode_batch_flat([sample])[0] != self.encode(sample).astype("<u4").tobytes():
            raise ValueError(
                f"fastokens and tiktoken encode a text differently ({sample[:40]!r}...); pip uninstall fastokens, and "
                "prepare the data anew"
            )
        return ids

    def encode_prompt(self, text: str) -> Ids:
        return self._encoding.encode_to_numpy(text, allowed_special="all").astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return self._encoding.decode_bytes(ids)

    def meta(self) -> dict[str, Any]:
        return {"name": self.name}


@functools.cache
def fast_gpt2() -> Any:
    """fastokens' encoder of GPT-2's vocabulary, made from the files of tiktoken's cache; None where not installed.

    15 times as fast as tiktoken's and more (bench/results/2026-11-21-tokenizing.md), but in one thread at a time.
    """
    try:
        from fastokens import Tokenizer as FastTokenizer
    except ImportError:
        return None
    from tiktoken.load import read_file_cached

    vocabulary, merges = (read_file_cached(GPT2_FILES + name, sha256) for name, sha256 in GPT2_SHA256.items())
    ids = json.loads(vocabulary)
    ids.pop("<|endoftext|>")  # in a text it is ordinary characters
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": ids, "merges": merges.decode().split("\n")[1:-1]}
    parts = {"normalizer": None, "pre_tokenizer": by_bytes, "model": model, "post_processor": None, "decoder": by_bytes}
    return FastTokenizer.from_json_str(json.dumps({"version": "1.0", "added_tokens": [], **parts}))


def code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def from_meta(meta: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `meta()` described. Raises ValueError."""
    name = meta.get("name")
    if name == "char" and isinstance(meta.get("chars"), str) and meta["chars"]:
        return CharTokenizer(meta["chars"])
    if name == "bytes":
        return BytesTokenizer()
    if isinstance(name, str) and name != "char":
        return TiktokenTokenizer(name)
    raise ValueError(
        f"{meta!r} describes no tokenizer; expected a name of char (with chars), bytes or a tiktoken encoding"
    )


def padded_vocab_size(meta: dict[str, Any], vocab_size: int) -> int:
    """Rows of a new model's embedding: a BPE vocabulary is rounded up to whole matmul tiles (50257 to 50304)."""
    return -(-vocab_size // 64) * 64 if meta.get("name") not in (None, "char", "bytes") else vocab_size


def pieces(text: str, size: int = 1 << 20) -> list[str]:
    """text cut into pieces of at least `size` characters whose GPT-2 encodings join to that of the whole.

    The cuts fall behind a newline with no white space on either side. There GPT-2's pattern makes the newline a
    match of its own (its `\\s+(?!\\S)` needs a second white-space character), cut or not.
    """
    out, start = [], 0
    cut = re.compile(r"(?<=\S)\n(?=\S)")
    while start < len(text):
        at = cut.search(text, start + size)
        end = at.end() if at else len(text)
        out.append(text[start:end])
        start = end
    return out
