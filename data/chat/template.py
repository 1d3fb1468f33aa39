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

import reprlib
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data.tokenizer import Ids, Tokenizer, valid_unicode

ROLES = ("system", "user", "assistant")
# Roles as other programs call them.
OTHER_NAMES = {"human": "user", "prompter": "user", "developer": "system"}
OTHER_NAMES |= dict.fromkeys(("gpt", "chatgpt", "model", "bot"), "assistant")
# Keys of a row or of a message that change nothing. `name` and tool calls are not among them.
HARMLESS = """
    id idx index uuid prompt_id question_id conversation_id conversation_hash hash source sources
    origin dataset dataset_name split category categories topic subject domain task task_type type
    language lang title url license model model_name generator timestamp date created_at updated
    score quality difficulty num_turns turn turns turn_identifier n_tokens num_tokens token_count
    tags metadata meta toxic redacted country state hashed_ip header openai_moderation
    detoxify_moderation
"""
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

# The same for Ollama, which reads it beside a GGUF file.
MODELFILE = """FROM ./{name}
TEMPLATE \"\"\"<|endoftext|>{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}User:
{{{{ else if eq .Role "assistant" }}}}Assistant:
{{{{ else }}}}System:
{{{{ end }}}}{{{{ .Content }}}}<|endoftext|>{{{{ end }}}}Assistant:
\"\"\"
PARAMETER stop <|endoftext|>
"""


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

    Raises ValueError, whose message names the mistake in a few words.
    """
    message = dict(value) if isinstance(value, dict) else {}
    role = message.pop("from" if "from" in message else "role", None)
    content = message.pop("value" if "value" in message else "content", None)
    weight = message.pop("weight", None)
    if isinstance(content, list):
        with suppress(KeyError, TypeError):  # OpenAI's parts, of which images have no text
            content = "".join(part["text"] for part in content)
    refuse_lost(f"message {n}", message)
    name = str(role).strip().lower()
    name = OTHER_NAMES.get(name, name)
    if name not in ROLES or not isinstance(content, str) or weight not in (None, 0, 1):
        raise ValueError(
            f"message {n} is {reprlib.repr(value)}, not an object with a role ({', '.join(ROLES)}) "
            "and content, which is text; weight may be 0 or 1"
        )
    return Message(name, valid_unicode(content), weight != 0)


def refuse_lost(what: str, unread: dict[Any, Any]) -> None:
    """Raise ValueError if a row's or message's keys that nothing reads might change what is
    learned.
    """
    for key, value in unread.items():
        if key not in HARMLESS.split() and value not in EMPTY:
            raise ValueError(
                f"{what} has the key {key!r}: {reprlib.repr(value)} would be lost; put what is to "
                "be learned into the messages, and leave the key out"
            )
