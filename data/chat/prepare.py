"""Make token files with a loss mask from dialogues, to finetune a model that answers.

    python data/chat/prepare.py dialogues.jsonl --name chat
    python data/chat/prepare.py --hub HuggingFaceH4/ultrachat_200k --split train_sft --name ultra
    python data/chat/prepare.py                     # the small dialogues of data/chat/example.jsonl
    python train.py config/finetune_chat.py

A row of a file is a dialogue, {"messages": [{"role": "user", "content": "Hello!"}, {"role":
"assistant", "content": "Hi, how are you?"}]}, or another shape of data/chat/dialogues.py.
data/chat/template.py says how a dialogue becomes text. Only what the assistant says is a target of
the loss.

Writes data/NAME/train.bin, val.bin (the last tenth of the dialogues) and meta.json, and beside each
token file a mask, train.mask and val.mask: a byte for each token, 1 if the loss counts it as a
target. Dialogues are packed into windows of --block_size tokens, and cut only if one is longer than
a window. If it is stopped, the same command continues there.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.chat.dialogues import as_messages
from data.chat.template import NAME, Encoded, Message, Template
from data.prepared import Tokens, forget, named_tokenizer, resumed, write_dataset
from data.sources import RowError, Source, add_hub, hub_source, local_source
from data.text.prepare import DATA, add_folder, whole_number
from data.text_files import names_of
from data.tokenizer import Tokenizer
from deskgpt.errors import ConfigError, OneLineParser, one_line_errors
from deskgpt.files import locked_folder

EXAMPLE = Path(__file__).with_name("example.jsonl")
VAL_PART = 10  # the last dialogues, one of this many, are val
BATCH_MESSAGES = 1000  # that a thread encodes at once
ALL_BYTES = 1 << 62
MASK_BIT = 16  # of a token that is kept with its mask


def prepare(source: Source, folder: Path, tokenizer: Tokenizer, block_size: int) -> None:
    """Write the packed token files and masks of a source's dialogues.

    Raises ValueError if a row is not a dialogue or there are fewer than two, OSError.
    """
    template = Template(tokenizer)
    saved = folder / ".dialogues.tokens"
    whole = source._replace(shards=[list(itertools.chain(*source.shards))])
    encode = functools.partial(encoded_with_mask, template)
    how = (dialogue, BATCH_MESSAGES, encode, "<u4")
    with locked_folder(folder, ".dialogues"):
        pieces = resumed(saved, [source.name, tokenizer.meta()], whole, 0, *how)
        dialogues = split_dialogues(list(tqdm(pieces, "dialogues", disable=None)), template)
        if len(dialogues) < 2:
            raise ValueError(
                f"{source.name} holds {len(dialogues)} dialogues; two are needed, one of them for "
                "val"
            )

        cut = len(dialogues) - max(1, len(dialogues) // VAL_PART)
        ids = {}
        masks = {}
        for split, part in (("train", dialogues[:cut]), ("val", dialogues[cut:])):
            ids[split], masks[split] = packed_tokens(part, block_size, template.end_of_text)
            windows = f"{len(ids[split]) // block_size:,} windows of {block_size:,} tokens"
            print(
                f"{split}.bin has {len(part):,} dialogues in {windows}, "
                f"{masks[split].mean():.1%} of which are targets"
            )
        n_long = sum(len(dialogue.ids) > block_size for dialogue in dialogues)
        if n_long:
            print(
                f"{n_long:,} of {len(dialogues):,} dialogues are longer than a window and were cut"
            )
        about = {"end_of_text": template.end_of_text, "packed": block_size, "chat": NAME}
        write_dataset(folder, ids, tokenizer, source.name, masks, **about)
        forget(saved)


def dialogue(row: Any) -> list[Message]:
    """Return the messages of a row. Raises RowError if it is not a dialogue."""
    try:
        return as_messages(row)
    except (ValueError, RecursionError) as e:
        raise RowError(f"is not a dialogue: {e}") from None


def encoded_with_mask(template: Template, messages: list[Message]) -> Tokens:
    """Return the tokens of a dialogue as uint32 (n,), those that are targets with MASK_BIT."""
    ids, mask = template.encode(messages)
    return ids | mask.astype("<u4") << MASK_BIT


def split_dialogues(pieces: list[Tokens], template: Template) -> list[Encoded]:
    """Return the dialogues in these pieces: where one ends, end_of_text stands twice."""
    ids = np.concatenate([np.zeros(0, "<u2"), *(piece.astype("<u2") for piece in pieces)])
    mask = np.concatenate(
        [np.zeros(0, "u1"), *((piece >> MASK_BIT).astype("u1") for piece in pieces)]
    )
    is_end = ids == template.end_of_text
    begins = np.flatnonzero(is_end[1:] & is_end[:-1]) + 1
    found = zip(np.split(ids, begins), np.split(mask, begins), strict=True)
    return [Encoded(*both) for both in found if len(both[0])]


# ---- packing -------------------------------------------------------------------------------------


def pack(lengths: list[int], block_size: int) -> tuple[list[int], int]:
    """Return the index of each dialogue's first token, given their numbers of tokens, and the
    number of windows.

    Best fit, the longest first: each goes where it leaves the least room, or into a new window. One
    that is longer than a window takes several in a row; the last of them is filled as others are.
    """
    starts = [0] * len(lengths)
    windows = 0
    # (tokens left in a window, index of the first), in ascending order
    rooms: list[tuple[int, int]] = []
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
    """Return the tokens of all windows, padded with end_of_text, and a last one that is only a
    target.
    """
    starts, windows = pack([len(dialogue.ids) for dialogue in dialogues], block_size)
    n = windows * block_size + 1
    ids = np.full(n, end_of_text, np.uint16)
    mask = np.zeros(n, np.uint8)
    for dialogue, start in zip(dialogues, starts, strict=True):
        end = start + len(dialogue.ids)
        ids[start:end] = dialogue.ids
        mask[start:end] = dialogue.mask
    return Encoded(ids, mask)


if __name__ == "__main__":
    with one_line_errors():
        parser = OneLineParser(__doc__)
        about = f"dialogues, or folders of them (default: {EXAMPLE.name})"
        parser.add_argument("files", metavar="FILE", nargs="*", type=Path, help=about)
        add_hub(parser, None)
        add_folder(parser, DATA / "chat")
        parser.add_argument(
            "--tokenizer", default="gpt2", help="gpt2 (default), bytes, or a prepared folder's path"
        )
        about = "tokens of a window; also that of training (default: 1024)"
        parser.add_argument("--block_size", type=whole_number, default=1024, help=about)
        args = parser.parse_args()
        if bool(args.hub) == bool(args.files) and args.hub:
            raise ConfigError(f"--hub={args.hub} reads the hub, and files are given too: give one")
        if args.hub:
            source = hub_source(args.hub, args.subset, args.split, None)
        else:
            paths = args.files or [EXAMPLE]
            source = local_source(paths, ALL_BYTES)
            source = source._replace(name=names_of([Path(str(part)) for part in source.shards[0]]))
        prepare(source, args.out, named_tokenizer(args.tokenizer), args.block_size)
