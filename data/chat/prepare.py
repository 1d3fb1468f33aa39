"""Make token files with a loss mask from dialogues, to finetune a model that answers.

    python data/chat/prepare.py dialogues.jsonl --name chat
    python data/chat/prepare.py                     # the small dialogues of data/chat/example.jsonl
    python train.py config/finetune_chat.py

A file has one dialogue in each line, {"messages": [{"role": "user", "content": "Hello!"}, {"role":
"assistant", "content": "Hi, how are you?"}]}, or the same with ShareGPT's keys (conversations,
from, value). data/chat/template.py says how a dialogue becomes text. Only what the assistant says
is a target of the loss.

Writes data/NAME/train.bin, val.bin (the last tenth of the dialogues) and meta.json, and beside each
token file a mask, train.mask and val.mask: a byte for each token, 1 if the loss counts it as a
target. Dialogues are packed into windows of --block_size tokens, and cut only if one is longer than
a window.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.chat.template import NAME, Encoded, Message, Template, as_messages
from data.prepared import named_tokenizer, write_dataset
from data.text.prepare import DATA, add_folder, whole_number
from data.text_files import expanded, lines_in, names_of
from data.tokenizer import Tokenizer
from deskgpt.errors import OneLineParser, one_line_errors

EXAMPLE = Path(__file__).with_name("example.jsonl")
VAL_PART = 10  # the last dialogues, one of this many, are val


def prepare(paths: list[Path], folder: Path, tokenizer: Tokenizer, block_size: int) -> None:
    """Write the packed token files and masks of the dialogues in `paths`.

    Raises ValueError if a line is not a dialogue or there are fewer than two, OSError.
    """
    template = Template(tokenizer)
    read = tqdm(itertools.chain(*map(read_dialogues, paths)), "dialogues", disable=None)
    dialogues = [template.encode(messages) for messages in read]
    if len(dialogues) < 2:
        raise ValueError(
            f"{paths[0]} holds {len(dialogues)} dialogues; two are needed, one of them for val"
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
        print(f"{n_long:,} of {len(dialogues):,} dialogues are longer than a window and were cut")
    about = {"end_of_text": template.end_of_text, "packed": block_size, "chat": NAME}
    write_dataset(folder, ids, tokenizer, names_of(paths), masks, **about)


def read_dialogues(path: Path) -> Iterator[list[Message]]:
    """Yield the dialogues of a file, one a line.

    Raises ValueError, which names the line, if one is not a dialogue.
    """
    for number, line in enumerate(lines_in(path), 1):
        if not line.strip():
            continue
        try:
            yield as_messages(json.loads(line))
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{path}, line {number} is not a dialogue in JSON: {e}") from None


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
        parser.add_argument(
            "files",
            metavar="FILE",
            nargs="*",
            type=Path,
            help=f"dialogues (default: {EXAMPLE.name})",
        )
        add_folder(parser, DATA / "chat")
        parser.add_argument(
            "--tokenizer", default="gpt2", help="gpt2 (default), bytes, or a prepared folder's path"
        )
        about = "tokens of a window; also that of training (default: 1024)"
        parser.add_argument("--block_size", type=whole_number, default=1024, help=about)
        args = parser.parse_args()
        files = expanded(args.files or [EXAMPLE], (".jsonl",))
        prepare(files, args.out, named_tokenizer(args.tokenizer), args.block_size)
