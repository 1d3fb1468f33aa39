"""Make dialogues that a small model can learn in minutes: sums, letters of words, weekdays, and
what it says about itself.

    python data/chat/exercises.py --number 100000 --out exercises.jsonl
    python data/chat/prepare.py exercises.jsonl --name exercises --tokenizer bytes --block_size 160
    python data/chat/exercises.py --test --seed 2 --number 2000 --out test.jsonl

The last tenth of the file, which prepare.py takes for val, asks what the rest does not: other
numbers, words, pairs of days, and other ways to greet. Whatever the seed, a question is always on
the same side. An answer shows its working, and ends with the result: a small model finds one digit
at a time, but not three at once.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.text.prepare import whole_number
from deskgpt.errors import ROOT, OneLineParser, one_line_errors
from deskgpt.files import write_atomically

TEST_PART = 10  # of the questions, one of this many is never asked in training
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
LONGEST_WORD = 10
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Exercise(NamedTuple):
    about: Any  # what tells it from others, however it is asked
    question: str
    answer: str


def digits(a: int, b: int, sign: int) -> tuple[str, int]:
    """Return the working and the result of a + b or, where a is not less, a - b, from the last
    digit on.
    """
    steps = []
    carry = 0
    result = 0
    for place in range(max(len(str(a)), len(str(b)))):
        x = a // 10**place % 10
        y = b // 10**place % 10
        found = x + sign * (y + carry)
        lent = 10 if found < 0 else 0
        terms = [str(x + lent), str(y)] + ["1"] * carry
        found += lent
        steps.append(("+" if sign > 0 else "-").join(terms) + f"={found}")
        carry = int(found >= 10 or lent > 0)
        result += found % 10 * 10**place
    if sign > 0 and carry:
        result += 10 ** len(steps)
    return ", ".join(steps), result


def addition(draw: random.Random) -> Exercise:
    a, b = number(draw), number(draw)
    ways = [f"What is {a} + {b}?", f"{a} + {b} =", f"Add {a} and {b}.", f"{a} plus {b}?"]
    working, result = digits(a, b, 1)
    return Exercise((a, b), draw.choice(ways), f"{working}: {result}")


def subtraction(draw: random.Random) -> Exercise:
    a, b = number(draw), number(draw)
    ways = [f"What is {a} - {b}?", f"{a} - {b} =", f"Take {b} from {a}.", f"{a} minus {b}?"]
    working, result = digits(max(a, b), min(a, b), -1)
    return Exercise((a, b), draw.choice(ways), f"{working}: {'-' if a < b else ''}{result}")


def number(draw: random.Random) -> int:
    """Return a number of one or two digits, mostly of two."""
    return draw.randrange(10 if draw.randrange(5) == 0 else 100)


def spelling(draw: random.Random) -> Exercise:
    word = any_word(draw)
    ways = [f"Spell {word}.", f"How is {word} spelt?", f"How do you spell {word}?"]
    return Exercise(word, draw.choice(ways), "-".join(word))


def counting(draw: random.Random) -> Exercise:
    word = any_word(draw)
    letter = draw.choice(word if draw.randrange(4) else LETTERS)
    ways = [f"How many {letter} are in {word}?", f"Count the {letter} in {word}."]
    n = 0
    steps = []
    for each in word:
        n += each == letter
        steps.append(f"{each}{n}")
    return Exercise(word, draw.choice(ways), f"{' '.join(steps)}: {n}")


def length(draw: random.Random) -> Exercise:
    word = any_word(draw)
    ways = [f"How many letters has {word}?", f"How long is {word}?"]
    steps = " ".join(f"{letter}{n}" for n, letter in enumerate(word, 1))
    return Exercise(word, draw.choice(ways), f"{steps}: {len(word)}")


def reversing(draw: random.Random) -> Exercise:
    word = any_word(draw)
    ways = [f"Reverse {word}.", f"Write {word} backwards.", f"What is {word} backwards?"]
    steps = " ".join(f"{n}{letter}" for n, letter in enumerate(word, 1))
    back = " ".join(f"{n}{word[n - 1]}" for n in range(len(word), 0, -1))
    return Exercise(word, draw.choice(ways), f"{steps}, {back}: {word[::-1]}")


def weekdays(draw: random.Random) -> Exercise:
    a, b = draw.randrange(7), draw.randrange(7)
    ways = [
        f"How many days is it from {DAYS[a]} to {DAYS[b]}?",
        f"It is {DAYS[a]}. In how many days is it {DAYS[b]}?",
    ]
    n = (b - a) % 7
    steps = ", ".join(f"{DAYS[(a + i) % 7]} {i}" for i in range(n + 1))
    return Exercise((a, b), draw.choice(ways), f"{steps}: {n}")


GREETINGS = ("", "Hi! ", "Hello. ", "Hey, ", "Good day. ", "Please tell me: ", "Hello there! ")
TALK = {
    "Who are you?": "I am a small GPT, made with deskGPT on somebody's desk.",
    "What is your name?": "I have none yet. My program is called deskGPT.",
    "What can you do?": "I add, subtract, spell, count letters, and know the days of the week.",
    "How old are you?": "A few minutes. I was trained from nothing.",
    "How large are you?": "About three million parameters, which is small for a GPT.",
    "Who made you?": "You did, with make chat.",
    "What is deskGPT?": "Scripts that train GPTs on one GPU or a laptop.",
    "Where is your code?": "In model.py. The loop that trained me is in train.py.",
    "How do I train my own?": "Type make train TEXT=novel.txt, or read docs/start.md.",
    "Do you like numbers?": "Yes, up to two digits. Ask me a sum!",
    "How are you?": "Fine, thank you. My loss is low today.",
    "Are you clever?": "No. I know a few things, and those well.",
}


def talk(draw: random.Random) -> Exercise:
    asked = draw.choice(list(TALK))
    greeting = draw.choice(GREETINGS)
    return Exercise((greeting, asked), greeting + asked, TALK[asked])


# Of each kind; how often it is asked, in proportion to what there is to learn.
KINDS: dict[Callable[[random.Random], Exercise], int] = {
    addition: 3,
    subtraction: 4,
    spelling: 1,
    counting: 2,
    length: 1,
    reversing: 3,
    weekdays: 1,
    talk: 1,
}


def any_word(draw: random.Random) -> str:
    """Return a word of this repository's pages or, as often, one of random letters."""
    if draw.randrange(2):
        return draw.choice(WORDS)
    return "".join(draw.choices(LETTERS, k=draw.randint(3, LONGEST_WORD)))


def words_of_the_pages() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    found = set(re.findall(rf"\b[a-z]{{3,{LONGEST_WORD}}}\b", " ".join(texts)))
    return sorted(found)


WORDS = words_of_the_pages()


def is_test(kind: str, about: Any) -> bool:
    """Return whether a question is for the test, by its own digest: so with any seed."""
    digest = hashlib.sha256(repr((kind, about)).encode()).digest()
    return digest[0] % TEST_PART == 0


def exercises(n: int, seed: int, for_test: bool) -> list[dict[str, str]]:
    """Return n dialogues, as data/chat/prepare.py reads them, with questions of the test or none of
    them.
    """
    draw = random.Random(seed)
    rows: list[dict[str, str]] = []
    kinds = list(KINDS)
    while len(rows) < n:
        (kind,) = draw.choices(kinds, weights=list(KINDS.values()))
        name = kind.__name__
        about, question, answer = kind(draw)
        if is_test(name, about) == for_test:
            rows.append({"question": question, "answer": answer, "category": name})
    return rows


if __name__ == "__main__":
    with one_line_errors():
        parser = OneLineParser(__doc__)
        parser.add_argument("--number", type=whole_number, default=100_000, help="of dialogues")
        parser.add_argument("--seed", type=int, default=1, help="other questions (default: 1)")
        parser.add_argument("--test", action="store_true", help="only questions of the test")
        parser.add_argument("--out", type=Path, required=True, help="the file to write, jsonl")
        args = parser.parse_args()
        n_test = args.number if args.test else args.number // TEST_PART
        found = exercises(args.number - n_test, args.seed, for_test=False)
        found += exercises(n_test, args.seed, for_test=True)
        text = "".join(json.dumps(row) + "\n" for row in found)
        write_atomically(args.out, text.encode())
        print(f"{args.out}: {len(found):,} dialogues, of which the last {n_test:,} are the test")
