"""Count how many questions a model answers exactly, by kind.

    python bench/accuracy.py out-chat test.jsonl
    python bench/accuracy.py out-chat/ckpt_best.pt my-dialogues.jsonl

The file has dialogues as data/chat/prepare.py reads them, one a line; `category` names a kind. An
answer counts if the model, which always takes the likeliest token, writes all of it as it stands
there. Beside it: the share that a program would get which always gives the commonest result of its
kind, which is what stands after the last colon of an answer.
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deskgpt.errors import OneLineParser, one_line_errors, require_torch

require_torch()

import torch

from bench.output import markdown_table
from data.chat.dialogues import as_messages
from data.chat.template import Template
from deskgpt.device import limit_threads, resolve_device
from deskgpt.engine import load_model
from deskgpt.evaluation import exact_answers


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
    for line in args.dialogues.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kind = row.get("category", "any") if isinstance(row, dict) else "any"
        messages = as_messages(row)
        ids, is_target = template.encode(messages)
        x = torch.from_numpy(ids.astype("i8"))[None].to(device)
        y = x.masked_fill(torch.from_numpy(is_target == 0).to(device), -1)
        with torch.no_grad():
            exact, answers = exact_answers(model(x[:, :-1])[0], y[:, 1:])
        right[kind].append(bool(exact == answers))
        results[kind][messages[-1].content.rpartition(": ")[2]] += 1
    counts = {}
    for kind, found in sorted(right.items()):
        counts[kind] = [len(found), sum(found), results[kind].most_common(1)[0][1]]
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    table = [row_of(kind, *numbers) for kind, numbers in counts.items()]
    print(markdown_table(["kind", "questions", "right", "by guessing"], table, 1))


def row_of(kind: str, n: int, n_right: int, n_guessed: int) -> list[str]:
    return [kind, f"{n:,}", f"{n_right / n:.1%}", f"{n_guessed / n:.1%}"]


if __name__ == "__main__":
    with one_line_errors():
        main()
