"""Makes token files with a loss mask from dialogues, to finetune a model that answers.

    python data/chat/prepare.py dialogues.jsonl --name chat
    python data/chat/prepare.py dialogues.jsonl --name chat --like out-mine
    python data/chat/prepare.py                                  # the small dialogues of data/chat/example.jsonl
    python train.py config/finetune_chat.py

Each line of a file is one dialogue, {"messages": [{"role": "user", "content": "Hello!"}, {"role": "assistant",
"content": "Hi, how are you?"}]}, or the bare list; a file can also be one JSON array of dialogues. Roles are system,
user and assistant. data/chat/template.py says how a dialogue becomes text. Only what the assistant says is learned, and
of that no message with "weight": 0.

Writes data/NAME/train.bin, val.bin (the last tenth of the dialogues) and meta.json, and beside each token file a mask,
train.mask and val.mask: a byte for each token, 1 if the loss counts it as a target. Dialogues are packed into
windows of --block_size tokens, and cut only if one is longer than a window.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data.chat.template import NAME, Encoded, Message, Template, as_messages
from data.prepared import document_tokenizer, is_prepared, write_dataset
from data.text.prepare import DATA, add_folder
from data.text_files import expanded, read_text
from data.tokenizer import Tokenizer, from_meta
from deskgpt.system.errors import OneLineParser, one_line_errors
from deskgpt.system.files import file_sha256, sha256

EXAMPLE = Path(__file__).with_name("example.jsonl")
VAL_PART = 10  # the last dialogues, one of this many, are val
NAMED_FILES = 10  # in the source that meta.json names
TOKENIZER = "gpt2"
BLOCK_SIZE = 1024


def main(args: argparse.Namespace) -> None:
    tokenizer, block_size = tokenizer_and_window(args)
    if block_size < 1:
        raise ValueError(f"--block_size={block_size} must be at least 1")
    prepare(expanded(args.files or [EXAMPLE]), args.out, tokenizer, block_size)


def tokenizer_and_window(args: argparse.Namespace) -> tuple[Tokenizer, int]:
    """What the command line asks for: with --like, both are those of a checkpoint. Raises ValueError."""
    block_size = BLOCK_SIZE if args.block_size is None else args.block_size
    if not args.like:
        return document_tokenizer(args.tokenizer or TOKENIZER), block_size
    from deskgpt.checkpoint import store  # imports torch, which takes seconds

    saved = store.load(args.like)
    if not saved.tokenizer:
        raise ValueError(f"--like={args.like}: the checkpoint does not say its tokenizer; take --tokenizer instead")
    if args.block_size is None:
        block_size = saved.model_args.get("block_size", BLOCK_SIZE)
    return from_meta(saved.tokenizer), block_size


def prepare(paths: list[Path], folder: Path, tokenizer: Tokenizer, block_size: int) -> None:
    """Writes the packed token files and masks of the dialogues in `paths`, and prints what is in them.

    Does nothing if folder already holds them unharmed. Raises ValueError if a line is no dialogue or there are fewer
    than two, OSError.
    """
    source = source_of(paths, tokenizer, block_size)
    if is_prepared(folder, source):
        print(f"{folder.name}: already prepared")
        return
    template = Template(tokenizer)
    dialogues = []
    for path in paths:
        read = read_dialogues(path)
        dialogues += [template.encode(messages) for messages in tqdm(read, path.name, unit="dialogues", disable=None)]
    if len(dialogues) < 2:
        raise ValueError(f"{paths[0]} holds only one dialogue; at least two are needed, one of them for val")

    cut = len(dialogues) - max(1, len(dialogues) // VAL_PART)
    ids = {}
    counts = {}
    print(f"{folder.name}: tokenizer {tokenizer.meta()['name']}, windows of {block_size:,} tokens")
    for split, part in (("train", dialogues[:cut]), ("val", dialogues[cut:])):
        ids[split], counts[split] = packed_tokens(part, block_size, template.end_of_text)
        n = len(ids[split])
        filled = sum(len(dialogue.ids) for dialogue in part) / n
        learned = counts[split].mean()
        shares = f"{learned:.1%} of the tokens are learned, {1 - filled:.1%} are padding"
        print(f"{split}.bin has {len(part):,} dialogues in {n // block_size:,} windows: {shares}")
    n_long = sum(len(dialogue.ids) > block_size for dialogue in dialogues)
    if n_long:
        print(f"{n_long:,} of {len(dialogues):,} dialogues are longer than a window and were cut")
    about = {"end_of_text": template.end_of_text, "packed": block_size, "chat": NAME}
    write_dataset(folder, ids, tokenizer, source, counts, **about)


def source_of(paths: list[Path], tokenizer: Tokenizer, block_size: int) -> str:
    """The description in meta.json by which the same data is recognised. Raises OSError."""
    made_by = [*map(file_sha256, paths), tokenizer.meta(), tokenizer.end_of_text]
    names = ", ".join(path.name for path in paths[:NAMED_FILES])
    return f"{names} (sha256 {sha256(json.dumps(made_by).encode())}), {NAME}, windows of {block_size}"


# ---- reading -------------------------------------------------------------------------------------------------


def read_dialogues(path: Path) -> Iterator[list[Message]]:
    """The dialogues of a file: one in each line, or one JSON array of them; empty lines are passed over.

    Raises ValueError, which names the line, if one is no dialogue, or the file has none.
    """
    text = read_text(path)
    found = False
    for place, content in dialogues_of_array(path, text) or enumerate(text.split("\n"), 1):
        try:
            if isinstance(content, str):
                if not content.strip():
                    continue
                content = json.loads(content)
            messages = as_messages(content)
        except (ValueError, RecursionError) as e:
            reason = f"it is not JSON ({e.msg})" if isinstance(e, json.JSONDecodeError) else e
            raise ValueError(f"{path}, {'line ' * isinstance(place, int)}{place}: {reason}") from None
        found = True
        yield messages
    if not found:
        raise ValueError(f"{path} holds no dialogues; it needs one JSON object a line, or an array of them")


def dialogues_of_array(path: Path, text: str) -> list[tuple[str, Any]]:
    """(which one, value) of each dialogue in a text that is one JSON array; [] if it is something else."""
    try:
        array = json.loads(text) if text.lstrip().startswith("[") else []
    except RecursionError:
        return []
    except json.JSONDecodeError as e:
        if e.lineno == 1 or e.msg == "Extra data":  # bare lists, one a line
            return []
        raise ValueError(f"{path}, line {e.lineno}: {e.msg}") from None
    is_one = all(isinstance(entry, dict) and {"role", "from"} & entry.keys() for entry in array)  # of messages
    return [] if is_one else [(f"dialogue {n}", entry) for n, entry in enumerate(array, 1)]


# ---- packing -------------------------------------------------------------------------------------------------


def pack(lengths: list[int], block_size: int) -> tuple[list[int], int]:
    """(the place of each first token, windows) for dialogues of these numbers of tokens.

    Best fit, the longest first: each goes where it leaves the least room, and into a new window where it fits nowhere.
    One that is longer than a window takes several in a row; the last of them is filled as others are.
    """
    starts = [0] * len(lengths)
    windows = 0
    rooms: list[tuple[int, int]] = []  # (tokens left in a window, the place where they begin), in ascending order
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        n = lengths[i]
        at = bisect.bisect_left(rooms, (n, 0))
        if at < len(rooms):
            room, starts[i] = rooms.pop(at)
        else:
            starts[i] = windows * block_size
            room = math.ceil(n / block_size) * block_size
            windows += room // block_size
        if room > n:
            bisect.insort(rooms, (room - n, starts[i] + n))
    return starts, windows


def packed_tokens(dialogues: list[Encoded], block_size: int, end_of_text: int) -> Encoded:
    """The tokens of all windows, (windows * block_size + 1,); what no dialogue fills is end_of_text.

    The last token is a target only: that of the last window's last input.
    """
    starts, windows = pack([len(dialogue.ids) for dialogue in dialogues], block_size)
    n = windows * block_size + 1
    ids = np.full(n, end_of_text, np.uint16)
    counts = np.zeros(n, np.uint8)
    for dialogue, start in zip(dialogues, starts, strict=True):
        end = start + len(dialogue.ids)
        ids[start:end] = dialogue.ids
        counts[start:end] = dialogue.counts
    return Encoded(ids, counts)


def arguments() -> argparse.Namespace:
    parser = OneLineParser(str(__doc__))
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path, help=f"dialogues (default: {EXAMPLE.name})")
    add_folder(parser, DATA / "chat")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--like", metavar="CHECKPOINT", help="tokenizer and window of a checkpoint, to finetune that one")
    about = f"bytes, gpt2 or another tiktoken encoding, or the path of a prepared folder ({TOKENIZER})"
    one.add_argument("--tokenizer", "--encoding", help=about)
    parser.add_argument("--block_size", type=int, help=f"tokens of a window; also that of training ({BLOCK_SIZE})")
    return parser.parse_args()


if __name__ == "__main__":
    with one_line_errors():
        main(arguments())
