"""Make dialogues that a small model can learn in minutes: sums, letters of words, weekdays, and
what it says about itself.

    python data/chat/exercises.py --number 250000 --out exercises.jsonl
    python data/chat/prepare.py exercises.jsonl --name exercises --tokenizer bytes --block_size 160
    python data/chat/exercises.py --test --seed 2 --number 2000 --out test.jsonl

The last tenth of the file, which prepare.py takes for val, asks what the rest does not: other
numbers, words, pairs of days, and other ways to greet. Whatever the seed, a question is always on
the same side. An answer shows its working, and ends with the result: a small model finds one digit
at a time, but not three at once.
"""

import functools
import hashlib
import json
import random
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.text.prepare import whole_number
from deskgpt.errors import ROOT, OneLineParser, one_line_errors
from deskgpt.files import write_atomically

TEST_PART = 10  # of the questions, one of this many is never asked in training
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
LONGEST_WORD = 9  # so that a letter's number is one digit
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Exercise(NamedTuple):
    kind: str
    about: Any  # what tells it from others of its kind, however it is asked
    ways: list[str]  # to ask
    answer: str


def digit_by_digit(a: int, b: int, sign: int) -> tuple[str, int]:
    """Return the working and the result of a + b or, where a is not less, a - b, from the last
    digit on.
    """
    steps = []
    carry = 0
    for place in range(max(len(str(a)), len(str(b)))):
        x = a // 10**place % 10
        y = b // 10**place % 10
        if sign < 0 and x < y + carry:
            x += 10  # borrowed from the next digit
        found = x + sign * (y + carry)
        words = [str(x), str(y)] + ["1"] * carry
        steps.append(("+" if sign > 0 else "-").join(words) + f"={found}")
        carry = int(x > 9 if sign < 0 else found > 9)
    return ", ".join(steps), a + sign * b


def arithmetic(draw: random.Random) -> Exercise:
    # Numbers have one or two digits, mostly two.
    a, b = (draw.randrange(draw.choice((10, 100, 100, 100))) for _ in range(2))
    about = (min(a, b), max(a, b))  # who has seen 17 + 25 has seen 25 + 17
    if not draw.randrange(3):  # subtraction, which is harder, is asked more often
        working, result = digit_by_digit(a, b, 1)
        ways = [f"What is {a} + {b}?", f"{a} + {b} =", f"Add {a} and {b}.", f"{a} plus {b}?"]
        return Exercise("addition", about, ways, f"{working}: {result}")
    working, result = digit_by_digit(max(a, b), min(a, b), -1)
    if a < b:  # the sign comes first: at the end, the model forgot it
        working = f"-({b}-{a}), {working}"
        result = -result
    ways = [f"What is {a} - {b}?", f"{a} - {b} =", f"Take {b} from {a}.", f"{a} minus {b}?"]
    return Exercise("subtraction", about, ways, f"{working}: {result}")


def letters(draw: random.Random) -> Exercise:
    """Return a question about a word of this repository's pages or, as often, of random letters."""
    word = "".join(draw.choices(LETTERS, k=draw.randint(3, LONGEST_WORD)))
    if draw.randrange(2):
        word = draw.choice(words_of_the_pages())
    kind = draw.choice(("spelling", "counting", "counting", "reversing"))
    if kind == "spelling":
        return Exercise(kind, word, [f"Spell {word}.", f"How is {word} spelt?"], "-".join(word))
    numbered = [f"{n}{letter}" for n, letter in enumerate(word, 1)]
    if kind == "reversing":
        working = f"{''.join(numbered)} {''.join(numbered[::-1])}"
        ways = [f"Reverse {word}.", f"Write {word} backwards."]
        return Exercise(kind, word, ways, f"{working}: {word[::-1]}")
    wanted = draw.choice(word if draw.randrange(4) else LETTERS)
    steps = [f"{letter}{wanted}{word[: n + 1].count(wanted)}" for n, letter in enumerate(word)]
    ways = [f"How many {wanted} are in {word}?", f"Count the {wanted} in {word}."]
    return Exercise(kind, word, ways, f"{''.join(steps)}: {word.count(wanted)}")


def weekdays(draw: random.Random) -> Exercise:
    a, b = draw.randrange(7), draw.randrange(7)
    ways = [
        f"How many days is it from {DAYS[a]} to {DAYS[b]}?",
        f"It is {DAYS[a]}. In how many days is it {DAYS[b]}?",
    ]
    # Numbers, which it also subtracts elsewhere. It learned to count from day to day, but not where
    # to stop for two days that it had never seen together.
    first, last = a + 1, b + 1 if b >= a else b + 8
    working = f"{DAYS[a]} {first}, {DAYS[b]} {last}, {last}-{first}={last - first}"
    return Exercise("weekdays", (a, b), ways, f"{working}: {last - first}")


GREETINGS = ("", "Hi! ", "Hello. ", "Hey, ", "Good day. ", "Please tell me: ", "Hello there! ")
TALK = {
    "Who are you?": "I am a small GPT, made with deskGPT on somebody's desk.",
    "What is your name?": "I have none yet. My program is called deskGPT.",
    "What can you do?": "I add, subtract, spell, count letters, and know the days of the week.",
    "How old are you?": "A few minutes. I was trained from nothing.",
    "How large are you?": "Less than a million parameters, which is small for a GPT.",
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
    greeted = draw.choice(GREETINGS) + asked
    return Exercise("talk", greeted, [greeted], TALK[asked])


@functools.cache
def words_of_the_pages() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    return sorted(set(re.findall(rf"\b[a-z]{{3,{LONGEST_WORD}}}\b", " ".join(texts))))


def exercises(n: int, seed: int, for_test: bool) -> list[dict[str, str]]:
    """Return n dialogues, as data/chat/prepare.py reads them, with questions of the test or none of
    them: which these are follows from the question, not from the seed.
    """
    draw = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < n:
        make = draw.choices((arithmetic, letters, weekdays, talk), weights=(7, 7, 1, 1))[0]
        found = make(draw)
        digest = hashlib.sha256(repr((found.kind, found.about)).encode()).digest()
        if (digest[0] % TEST_PART == 0) == for_test:
            question = draw.choice(found.ways)
            rows.append({"question": question, "answer": found.answer, "category": found.kind})
    return rows


if __name__ == "__main__":
    with one_line_errors():
        parser = OneLineParser(__doc__)
        parser.add_argument("--number", type=whole_number, default=250_000, help="of dialogues")
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
