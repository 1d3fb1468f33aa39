"""Count how many questions a model answers exactly, by kind.

    python bench/answers.py out-chat test.jsonl
    python bench/answers.py out-chat/ckpt_best.pt my-dialogues.jsonl

The file has dialogues as data/chat/prepare.py reads them, one a line; `category` names a kind. An
answer counts if the model, which always takes the likeliest token, writes all of it as it stands
there. Beside it: the share that a program would get which always gives the commonest result of its
kind, which is what stands after the last colon of an answer.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.output import markdown_table
from data.chat.dialogues import as_messages
from data.chat.template import Template
from deskgpt.device import limit_threads, resolve_device
from deskgpt.engine import load_model
from deskgpt.errors import OneLineParser, one_line_errors
from deskgpt.evaluation import exact_answers

BATCH = 64  # dialogues


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("run", help="an out_dir, or a checkpoint")
    parser.add_argument("dialogues", type=Path, help="jsonl")
    args = parser.parse_args()
    device = resolve_device("auto")
    limit_threads()
    loaded = load_model("resume", args.run, device)
    model = loaded.model.eval().to(device)
    template = Template(loaded.tokenizer)
    right: dict[str, list[bool]] = defaultdict(list)
    results: dict[str, Counter[str]] = defaultdict(Counter)
    lines = args.dialogues.read_text(encoding="utf-8").splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: len(str(row)))
    for first in range(0, len(rows), BATCH):
        part = rows[first : first + BATCH]
        encoded = [template.encode(as_messages(row)) for row in part]
        longest = max(len(each.ids) for each in encoded)
        ids = torch.full((len(part), longest), template.end_of_text)
        is_target = torch.zeros(len(part), longest, dtype=torch.bool)
        for row, each in enumerate(encoded):
            ids[row, : len(each.ids)] = torch.from_numpy(each.ids.astype("i8"))
            is_target[row, : len(each.ids)] = torch.from_numpy(each.mask.astype(bool))
        y = ids.masked_fill(~is_target, -1)[:, 1:].to(device)
        with torch.no_grad():
            logits = model(ids[:, :-1].to(device))[0]
        n_right, n_answers = exact_answers(logits, y)
        for row, all_right in zip(part, (n_right == n_answers).tolist(), strict=True):
            kind = str(row.get("category", "all"))
            right[kind].append(all_right)
            results[kind][str(row).rpartition(": ")[2]] += 1
    table = []
    for kind, found in sorted(right.items()):
        guessed = results[kind].most_common(1)[0][1] / len(found)
        table.append([kind, f"{len(found):,}", f"{sum(found) / len(found):.1%}", f"{guessed:.1%}"])
    everything = [each for found in right.values() for each in found]
    table.append(["all", f"{len(everything):,}", f"{sum(everything) / len(everything):.1%}", ""])
    print(markdown_table(["kind", "questions", "right", "by guessing"], table, 1))


if __name__ == "__main__":
    with one_line_errors():
        main()
