"""Our tokenizers as Hugging Face's tokenizer.json and tokenizer_config.json, which AutoTokenizer reads.

The files are written as plain JSON, without the tokenizers package. tokenizer_config.json has one key of our own,
"deskgpt": the description from which `from_meta` makes our tokenizer again.
"""

from __future__ import annotations

from typing import Any

from data.tokenizer import CHAR_OF_BYTE, END_OF_TEXT, BytesTokenizer, CharTokenizer, Tokenizer, gpt2_vocabulary

OUR_KEY = "deskgpt"  # the one of config.json, too: deskgpt/export/hugging_face.py
NO_SUCH_TOKEN = "<unknown>"  # longer than any character, so that it is in no vocabulary: unknown ones are an error


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """What tokenizer.json says. Raises ValueError for a tokenizer that the format cannot hold."""
    if isinstance(tokenizer, CharTokenizer):
        return of_chars(tokenizer)
    if isinstance(tokenizer, BytesTokenizer):
        vocab = {CHAR_OF_BYTE[byte]: byte for byte in range(255)}
        return of_bytes(vocab | {END_OF_TEXT: 255}, [], splits=False)
    meta = tokenizer.meta()
    if meta["name"] == "gpt2":
        ids, lines = gpt2_vocabulary()
        return of_bytes(ids, [line.split(" ") for line in lines])
    if "merges" in meta:
        merges = [line.split(" ") for line in meta["merges"].split("\n") if line]
        vocab = {CHAR_OF_BYTE[byte]: byte for byte in range(256)}
        vocab |= {left + right: 256 + i for i, (left, right) in enumerate(merges)}
        return of_bytes(vocab | {END_OF_TEXT: tokenizer.end_of_text}, merges)
    raise ValueError(f"Hugging Face's tokenizer.json cannot hold the tokenizer {meta['name']!r}")


def tokenizer_config_json(tokenizer: Tokenizer, block_size: int, chat_template: str | None) -> dict[str, Any]:
    """What tokenizer_config.json says. chat_template: for Jinja, of a model that was trained on dialogues."""
    special = {}
    if tokenizer.end_of_text is not None:
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "model_input_names": ["input_ids", "attention_mask"],  # else transformers 4 adds token_type_ids
        "padding_side": "left",  # as generating in batches needs it
        "clean_up_tokenization_spaces": False,
        **special,
        **({"chat_template": chat_template} if chat_template else {}),
        OUR_KEY: tokenizer.meta(),
    }


# ---- tokenizer.json ------------------------------------------------------------------------------------------


def of_chars(tokenizer: CharTokenizer) -> dict[str, Any]:
    """One token per character. An unknown character is an error, as it is here, and nothing takes its place."""
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {char: i for i, char in enumerate(tokenizer.chars)},
            "unk_token": NO_SUCH_TOKEN,
        },
    }


def of_bytes(vocab: dict[str, Any], merges: list[Any], splits: bool = True) -> dict[str, Any]:
    """A byte-pair encoding as tokenizer.json. splits: first by GPT-2's pattern, which tokens do not cross."""
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": splits}
    end = {
        "id": vocab.get(END_OF_TEXT),
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "added_tokens": [end] if END_OF_TEXT in vocab else [],
        "normalizer": None,
        "pre_tokenizer": by_bytes,
        "post_processor": None,
        "decoder": by_bytes,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
