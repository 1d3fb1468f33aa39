"""Dialogues as public data sets have them, one table of shapes: which keys of a row are read.

What is not read is dropped only if it is known to change nothing, or empty. Anything else is an
error that names it: a system message or a tool call that is left out would train another model
than the data say.
"""

from __future__ import annotations

import reprlib
from typing import Any

from data.chat.template import EMPTY, Message, as_message

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
HARMLESS = """
    id idx index uuid prompt_id question_id conversation_id conversation_hash hash source sources
    origin dataset dataset_name split category categories topic subject domain task task_type
    language lang title url license model model_name generator timestamp date created_at updated
    score quality difficulty num_turns turn turns n_tokens num_tokens token_count tags metadata meta
    toxic redacted country state hashed_ip header openai_moderation detoxify_moderation
"""
WANTED = (
    "messages (role, content), conversations (from, value), instruction and output, prompt and "
    "completion, or question and answer"
)


def as_messages(row: Any) -> list[Message]:
    """Return the messages of a dialogue in one of these shapes.

    Raises ValueError, whose message says in a few words what is wrong.
    """
    messages = turns(row)
    if not any(message.role == "assistant" and message.is_learned for message in messages):
        raise ValueError(
            "it has no assistant turn to learn, so nothing is learned from it; leave it out"
        )
    return messages


def turns(value: Any) -> list[Message]:
    """Return the messages of a row, of a list, or of a text, which is the user's."""
    if isinstance(value, str):
        return [as_message({"role": "user", "content": value}, 1)]
    if isinstance(value, list):
        messages: list[Message] = []
        for n, entry in enumerate(value, 1):
            if isinstance(entry, str):
                role = "user" if n % 2 else "assistant"
                messages.append(as_message({"role": role, "content": entry}, n))
            elif isinstance(entry, dict | list) and not {"role", "from"} & set(map(str, entry)):
                messages += turns(entry)
            else:
                messages.append(as_message(entry, n))
        return messages
    if not isinstance(value, dict):
        raise ValueError(f"it is {reprlib.repr(value)}, not an object with {WANTED}")

    row = {key: content for key, content in value.items() if content is not None}
    read: set[str] = set()
    messages = []
    for key in SYSTEM:
        if row.get(key) and not messages:
            messages = [as_message({"role": "system", "content": row[key]}, 1)]
            read.add(key)
    lists = [key for key in LISTS if isinstance(row.get(key), list)]
    pairs = [pair.split() for pair in PAIRS.split(",") if row.keys() >= set(pair.split())]
    if lists:
        found = turns(row[lists[0]])
        messages += found
        read.add(lists[0])
        if row.get("prompt") in [message.content for message in found]:
            read.add("prompt")  # UltraChat repeats the first message
    elif pairs:
        messages += turns(row.get("history") or [])
        question, answer = (row[key] for key in pairs[0])
        read |= {"history", *pairs[0]}
        for key in ADDED:
            if isinstance(row.get(key), str) and key not in read:
                question = f"{question}\n{row[key]}" if row[key] else question
                read.add(key)
        messages += turns(question)
        messages += turns(
            answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        )
    else:
        raise ValueError(f"it has {', '.join(map(str, row)) or 'no keys'}; wanted are {WANTED}")
    for key, content in row.items():
        if key not in read and key not in HARMLESS.split() and content not in EMPTY:
            raise ValueError(
                f"it has the key {key!r} beside {', '.join(sorted(read))}: {reprlib.repr(content)} "
                "would be lost; put what is to be learned into the messages, and leave the key out"
            )
    return messages
