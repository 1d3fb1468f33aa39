"""Dialogues as public data sets have them, one table of shapes: which keys of a row are read.

A key that is not read is dropped only if it is known to change nothing, or empty. Any other is an
error that names it: a system message or a tool call that is left out would train another model
than the data say.
"""

import reprlib
from typing import Any

from data.chat.template import Message, as_message, refuse_lost

# A list of messages: {"role", "content"}, ShareGPT's {"from", "value"}, pairs as below, or texts,
# the user's first.
LISTS = "messages conversations conversation dialogue dialog data".split()  # noqa: SIM905
# A question and its answer: texts, or lists as above. Alpaca, Dolly, and many more.
PAIRS = """
    instruction output, instruction response, prompt completion, prompt response, question answer,
    question response, query response, query answer, human assistant, user assistant, input output
"""
ADDED = ("input", "context")  # to an instruction, in a new line
SYSTEM = ("system", "system_prompt", "system_message")
WANTED = (
    "messages (role, content), conversations (from, value), instruction and output, prompt and "
    "completion, or question and answer"
)


def as_messages(row: Any) -> list[Message]:
    """Return the messages of a dialogue in one of these shapes.

    Raises ValueError, whose message names the mistake in a few words.
    """
    messages = turns(row)
    if not any(message.role == "assistant" and message.is_learned for message in messages):
        raise ValueError("not a dialogue: no assistant's turn is learned in it; leave it out")
    return messages


def turns(value: Any) -> list[Message]:
    """Return the messages of a row, of a list, or of a text, which is the user's."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        messages = []
        for n, entry in enumerate(value, 1):
            if isinstance(entry, str):
                entry = {"role": "user" if n % 2 else "assistant", "content": entry}
            if isinstance(entry, dict | list) and not {"role", "from"} & set(map(str, entry)):
                messages += turns(entry)
            else:
                messages.append(as_message(entry, n))
        return messages
    if not isinstance(value, dict):
        raise ValueError(f"{reprlib.repr(value)} is not an object with {WANTED}")

    unread = {key: content for key, content in value.items() if content is not None}
    messages = []
    for key in SYSTEM:
        if unread.get(key) and not messages:
            messages = [as_message({"role": "system", "content": unread.pop(key)}, 1)]
    lists = [key for key in LISTS if isinstance(unread.get(key), list)]
    pairs = [pair.split() for pair in PAIRS.split(",") if unread.keys() >= set(pair.split())]
    if lists:
        messages += turns(unread.pop(lists[0]))
        if unread.get("prompt") in [message.content for message in messages]:
            del unread["prompt"]  # UltraChat repeats the first message
    elif pairs:
        question, answer = (unread.pop(key) for key in pairs[0])
        for key in ADDED:
            if unread.get(key):
                question = "\n".join([question, unread.pop(key)])
        messages += turns(unread.pop("history", None) or [])
        messages += turns(question)
        messages += turns(
            answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        )
    else:
        raise ValueError(f"it has {', '.join(map(str, value))}; wanted are {WANTED}")
    refuse_lost("it", unread)
    return messages
