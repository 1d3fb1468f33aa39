"""Our tokenizers as Hugging Face's tokenizer.json and tokenizer_config.json, which AutoTokenizer
reads.

tokenizer_config.json has one key of our own, "deskgpt": the description from which `from_meta`
makes our tokenizer.
"""

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
    """Return the content of tokenizer.json."""
    if isinstance(tokenizer, CharTokenizer):
        return of_chars(tokenizer)
    meta = tokenizer.meta()
    if meta["name"] == "gpt2":
        return of_bytes(*gpt2_vocabulary())
    bytes_ = [CHAR_OF_BYTE[byte] for byte in range(256)]
    if isinstance(tokenizer, BytesTokenizer):
        return of_bytes([*bytes_[:255], END_OF_TEXT], [], splits=False)
    merges = meta["merges"].split("\n") if meta["merges"] else []
    return of_bytes([*bytes_, *(merge.replace(" ", "") for merge in merges), END_OF_TEXT], merges)


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
        # Without this transformers 4 adds token_type_ids.
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


def of_bytes(tokens: list[str], merges: list[str], splits: bool = True) -> dict[str, Any]:
    """Return a byte-pair encoding as tokenizer.json. tokens: by id. splits: first by GPT-2's
    pattern, which tokens do not cross.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in map(str.split, merges)]
    made = Tokenizer(models.BPE(vocab, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=splits
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return json.loads(made.to_str())
