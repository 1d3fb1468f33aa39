"""The text of a dialogue for the model: which tokens a dialogue is made of, and which of them are
targets.

A dialogue begins with the tokenizer's end_of_text, as documents do. Each message is a header line,
its content and end_of_text again:

    <|endoftext|>User:
    Hello!<|endoftext|>Assistant:
    Hi, how are you?<|endoftext|>

Targets are the assistant's contents and the end_of_text after each, with which an answer ends.
Headers and contents are encoded one by one, as plain text: a content that looks like a header, or
holds the characters "<|endoftext|>", is not preceded by the token end_of_text, so nobody can make a
turn of another role out of it. After end_of_text, GPT-2 expects a new document; that the dialogue
continues is learned soon; DialoGPT's turns end like this too (arXiv:1911.00536).
"""

from __future__ import annotations

import reprlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data.tokenizer import Ids, Tokenizer, valid_unicode

ROLES = ("system", "user", "assistant")
# Of roles
OTHER_NAMES = {"human": "user", "prompter": "user", "developer": "system"}
OTHER_NAMES |= dict.fromkeys(("gpt", "chatgpt", "model", "bot"), "assistant")
# Keys of a message that change nothing. `name` and tool calls are not among them.
HARMLESS = "id type language timestamp turn_identifier redacted toxic country state header"
EMPTY: tuple[Any, ...] = (None, "", [], {})
# As meta.json and checkpoints record it: another number for another template.
NAME = "deskgpt-chat-1"
HEADERS = {role: f"{role.capitalize()}:\n" for role in ROLES}
# A model that has learned too little may write the next turn by itself, without an end_of_text
# before it.
FORGED_TURN = f"\n{HEADERS['user']}"

# The same text for Jinja, as `chat_template` in Hugging Face's tokenizers. There the special token
# is found in the text, so that contents can forge it.
JINJA = (
    "{{ eos_token }}{% for message in messages %}{{ message['role'] | capitalize + ':\\n' "
    "+ message['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'Assistant:\\n' }}{% endif %}"
)


class Message(NamedTuple):
    role: str  # one of ROLES
    content: str
    is_learned: bool = True  # if it is the assistant's


class Encoded(NamedTuple):
    """A dialogue as tokens."""

    ids: Ids  # (n,)
    mask: npt.NDArray[np.uint8]  # (n,) 1 if a token is a target


class Template:
    """The template with a tokenizer. Raises ValueError if the tokenizer has no end_of_text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.end_of_text is None:
            raise ValueError(
                f"the tokenizer {tokenizer.meta().get('name')} has no token that ends an "
                "answer; use bytes, gpt2, or a checkpoint's own bpe"
            )
        self.tokenizer = tokenizer
        self.end_of_text = tokenizer.end_of_text
        self._end = np.array([self.end_of_text], np.uint16)
        self._headers = {role: tokenizer.encode(header) for role, header in HEADERS.items()}

    def encode(self, messages: list[Message]) -> Encoded:
        """Return the tokens of a dialogue."""
        ids = [self._end]
        mask = [np.zeros(1, np.uint8)]
        for message in messages:
            header = self._headers[message.role]
            content = self.tokenizer.encode(message.content)
            ids += [header, content, self._end]
            mask.append(np.zeros(len(header), np.uint8))
            is_target = message.role == "assistant" and message.is_learned
            mask.append(np.full(len(content) + 1, is_target, np.uint8))
        return Encoded(np.concatenate(ids), np.concatenate(mask))

    def prompt(self, messages: list[Message]) -> Ids:
        """Return the tokens after which the model writes the assistant's answer to these
        messages.
        """
        return np.concatenate([self.encode(messages).ids, self._headers["assistant"]])


def messages_in(value: Any) -> list[Message]:
    """Return the messages of a list in JSON. Raises ValueError as as_message."""
    if not isinstance(value, list):
        raise ValueError(f"the messages are {reprlib.repr(value)}, not a list")
    return [as_message(entry, n) for n, entry in enumerate(value, 1)]


def as_message(value: Any, n: int) -> Message:
    """Return message number n of a dialogue, {"role": ..., "content": ...} or ShareGPT's {"from":
    ..., "value": ...}; with "weight": 0 it is not learned.

    Raises ValueError, whose message says in a few words what is wrong.
    """
    message = dict(value) if isinstance(value, dict) else {}
    role = message.pop("from" if "from" in message else "role", None)
    content = message.pop("value" if "value" in message else "content", None)
    weight = message.pop("weight", None)
    if isinstance(content, list):  # OpenAI's parts, of which images have no text
        texts: list[Any] = [
            part.get("text") if isinstance(part, dict) else None for part in content
        ]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    lost = [key for key in message if key not in HARMLESS.split() and message[key] not in EMPTY]
    if lost:
        raise ValueError(
            f"message {n} has the key {lost[0]!r}: {reprlib.repr(message[lost[0]])} would be lost; "
            "put what is to be learned into content, and leave the key out"
        )
    if not isinstance(content, str) or not isinstance(role, str):
        raise ValueError(
            f"message {n} is {reprlib.repr(value)}, not an object with role and content, "
            "which are text"
        )
    name = role.strip().lower()
    name = OTHER_NAMES.get(name, name)
    if name not in ROLES:
        raise ValueError(
            f"message {n} has the role {reprlib.repr(role)}, which is not one of {', '.join(ROLES)}"
        )
    if weight not in (None, 0, 1):
        raise ValueError(f"message {n} has the weight {reprlib.repr(weight)}, not 0 or 1")
    return Message(name, valid_unicode(content), weight != 0)
