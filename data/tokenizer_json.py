"""Our tokenizers as Hugging Face's tokenizer.json and tokenizer_config.json, which AutoTokenizer
reads.

tokenizer_config.json has one key of our own, "deskgpt": the description from which `from_meta`
makes our tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

from data.tokenizer import (
    CHAR_OF_BYTE,
    END_OF_TEXT,
    BytesTokenizer,
    CharTokenizer,
    Tokenizer,
    gpt2_vocabulary,
)

OUR_KEY = "deskgpt"  # the one of config.json, too: deskgpt/export_hugging_face.py
# Longer than any character, so that it is in no vocabulary: unknown ones are an error.
NO_SUCH_TOKEN = "<unknown>"


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of tokenizer.json.

    Raises ValueError for a tokenizer that the format cannot hold.
    """
    meta = tokenizer.meta()
    bytes_ = {CHAR_OF_BYTE[byte]: byte for byte in range(256)}
    if isinstance(tokenizer, CharTokenizer):
        return of_chars(tokenizer)
    if isinstance(tokenizer, BytesTokenizer):
        del bytes_[CHAR_OF_BYTE[255]]
        return of_bytes(bytes_ | {END_OF_TEXT: 255}, [], splits=False)
    if meta["name"] == "gpt2":
        return of_bytes(*gpt2_vocabulary())
    if "merges" in meta:
        merges = meta["merges"].split("\n") if meta["merges"] else []
        made = {merge.replace(" ", ""): 256 + i for i, merge in enumerate(merges)}
        return of_bytes(bytes_ | made | {END_OF_TEXT: 256 + len(made)}, merges)
    raise ValueError(f"Hugging Face's tokenizer.json cannot hold the tokenizer {meta['name']!r}")


def tokenizer_config_json(
    tokenizer: Tokenizer, block_size: int, chat_template: str | None
) -> dict[str, Any]:
    """Return the content of tokenizer_config.json. chat_template: Jinja, if the model was trained
    on dialogues.
    """
    special = {}
    if tokenizer.end_of_text is not None:
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        # Else transformers 4 adds token_type_ids
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",  # as generating in batches needs it
        "clean_up_tokenization_spaces": False,
        **special,
        **({"chat_template": chat_template} if chat_template else {}),
        OUR_KEY: tokenizer.meta(),
    }


# ---- tokenizer.json ------------------------------------------------------------------------------


def of_chars(tokenizer: CharTokenizer) -> dict[str, Any]:
    """Return a tokenizer.json with one token per character.

    An unknown character is an error, as it is here.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: i for i, char in enumerate(tokenizer.chars)}
    made = Tokenizer(models.WordLevel(vocab, unk_token=NO_SUCH_TOKEN))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return json.loads(made.to_str())


def of_bytes(vocab: dict[str, int], merges: list[str], splits: bool = True) -> dict[str, Any]:
    """Return a byte-pair encoding as tokenizer.json. splits: first by GPT-2's pattern, which tokens
    do not cross.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, right in map(str.split, merges)]
    made = Tokenizer(models.BPE(vocab, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=splits
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return json.loads(made.to_str())
