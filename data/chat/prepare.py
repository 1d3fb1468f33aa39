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

import bisect
import functools
import itertools
import math
import sys
from pathlib import Path

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deskgpt.errors import OneLineParser, one_line_errors, require_torch

require_torch()

import numpy as np
from tqdm import tqdm

from data.chat.dialogues import as_messages
from data.chat.template import NAME, Message, Template
from data.prepared import Tokens, forget, named_tokenizer, resumed, write_dataset
from data.sources import Source, add_hub, hub_source, local_source
from data.text.prepare import DATA, add_folder, whole_number
from data.tokenizer import Tokenizer
from deskgpt.files import locked_folder

EXAMPLE = Path(__file__).with_name("example.jsonl")
VAL_PART = 10  # the last dialogues, one of this many, are val
BATCH_MESSAGES = 1000  # that a thread encodes at once
TARGET = 1 << 16  # added to a token that the loss counts, until the mask is a file of its own


def prepare(source: Source, folder: Path, tokenizer: Tokenizer, block_size: int) -> None:
    """Write the packed token files and masks of a source's dialogues.

    Raises ValueError if a row is not a dialogue or there are fewer than two, OSError.
    """
    template = Template(tokenizer)
    saved = folder / ".dialogues.tokens"
    whole = source._replace(shards=[list(itertools.chain(*source.shards))])
    encode = functools.partial(encoded_with_mask, template)
    with locked_folder(folder, ".dialogues"):
        settings = [source.name, tokenizer.meta()]
        pieces = resumed(saved, settings, whole, 0, as_messages, BATCH_MESSAGES, encode, "<u4")
        bar = tqdm(pieces, "dialogues", disable=None)
        dialogues = split_dialogues(list(bar), template.end_of_text)
        if len(dialogues) < 2:
            raise ValueError(f"{source.name} holds fewer than two dialogues, one of them for val")

        cut = len(dialogues) - max(1, len(dialogues) // VAL_PART)
        ids = {}
        masks = {}
        for split, part in (("train", dialogues[:cut]), ("val", dialogues[cut:])):
            tokens = packed_tokens(part, block_size, template.end_of_text)
            ids[split] = tokens.astype("<u2")
            masks[split] = (tokens >= TARGET).astype("u1")
            print(
                f"{split}.bin has {len(part):,} dialogues in {len(tokens) // block_size:,} windows "
                f"of {block_size:,} tokens, {masks[split].mean():.1%} of which are targets"
            )
        n_long = sum(len(dialogue) > block_size for dialogue in dialogues)
        print(f"{n_long:,} of {len(dialogues):,} dialogues are longer than a window and were cut")
        about = {"end_of_text": template.end_of_text, "packed": block_size, "chat": NAME}
        write_dataset(folder, ids, tokenizer, source.name, masks, **about)
        forget(saved)


def encoded_with_mask(template: Template, messages: list[Message]) -> Tokens:
    """Return the tokens of a dialogue as uint32 (n,), TARGET added to those that are targets."""
    ids, mask = template.encode(messages)
    return ids + mask.astype("<u4") * TARGET


def split_dialogues(pieces: list[Tokens], end_of_text: int) -> list[Tokens]:
    """Return the dialogues in these pieces: where one ends, end_of_text stands twice."""
    tokens = np.concatenate([np.zeros(0, "<u4"), *pieces])
    is_end = tokens % TARGET == end_of_text
    begins = np.flatnonzero(is_end[1:] & is_end[:-1]) + 1
    return np.split(tokens, begins)


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


def packed_tokens(dialogues: list[Tokens], block_size: int, end_of_text: int) -> Tokens:
    """Return the tokens of all windows, padded with end_of_text, and a last one that is only a
    target.
    """
    starts, windows = pack([len(dialogue) for dialogue in dialogues], block_size)
    tokens = np.full(windows * block_size + 1, end_of_text, np.uint32)
    for dialogue, start in zip(dialogues, starts, strict=True):
        tokens[start : start + len(dialogue)] = dialogue
    return tokens


if __name__ == "__main__":
    with one_line_errors():
        parser = OneLineParser(__doc__)
        add = parser.add_argument
        about = f"dialogues, or folders of them (default: {EXAMPLE.name})"
        either = add_hub(parser, None)
        either.add_argument(
            "files", metavar="FILE", nargs="*", type=Path, default=[EXAMPLE], help=about
        )
        either.add_argument("--source", help="here it is --hub NAME, or the files alone")
        add_folder(parser, DATA / "chat")
        add("--tokenizer", default="gpt2", help="gpt2, bytes, or a prepared folder's path")
        about = "tokens of a window; also that of training (default: 1024)"
        add("--block_size", type=whole_number, default=1024, help=about)
        args = parser.parse_args()
        if args.source:
            parser.error(f"--source: write --hub {args.source}, or name files without an option")
        if args.hub:
            source = hub_source(args.hub, args.subset, args.split, None)
        else:
            source = local_source(args.files)
        prepare(source, args.out, named_tokenizer(args.tokenizer), args.block_size)
