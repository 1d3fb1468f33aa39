"""Dialogues that are made: their answers by another computation, and what is held out. Answers
that are exact, counted in one pass and by writing them.
"""

import operator
import re
from dataclasses import replace

import jinja2
import torch
from conftest import CPU, logged, run_tiny
from tiny_models import MODERN, make, tokens

from data.chat import template
from data.chat.exercises import DAYS, TALK, exercises
from deskgpt.compute import ComputeMode
from deskgpt.distributed import DistContext
from deskgpt.engine import GenerationConfig, generate
from deskgpt.evaluation import share_answered


def result_of(kind: str, question: str) -> str:
    """Return the result of an exercise, from its question alone."""
    numbers = [int(n) for n in re.findall(r"\d+", question)]
    if kind == "addition":
        return str(sum(numbers))
    if kind == "subtraction":
        a, b = numbers[::-1] if question.startswith("Take") else numbers
        return str(operator.sub(a, b))
    if kind == "weekdays":
        a, b = (DAYS.index(day) for day in re.findall(r"\w+day", question))
        return str((b - a) % len(DAYS))
    if kind == "talk":
        return next(answer for asked, answer in TALK.items() if question.endswith(asked))
    about = r"(?:is|in|Spell|Reverse|Write) (\w+)(?: spelt\?| backwards.|[.?])$"
    found = re.search(about, question)
    assert found
    word = found[1]
    if kind == "spelling":
        return "-".join(word)
    if kind == "reversing":
        return word[::-1]
    letter = re.search(r"(?:many|the) (\w) ", question)
    assert letter
    return str(word.count(letter[1]))


def test_answers_are_right_and_the_test_asks_what_was_never_learned():
    learned = exercises(3000, seed=1, for_test=False)
    asked = exercises(1000, seed=2, for_test=True)
    assert not {row["question"] for row in learned} & {row["question"] for row in asked}
    assert {row["category"] for row in learned} == {row["category"] for row in asked}
    for row in learned + asked:
        result = row["answer"].rpartition(": ")[2]
        assert result == result_of(row["category"], row["question"]), row


def test_answer_counts_as_exact_just_if_the_model_writes_it():
    model = make(replace(MODERN, dropout=0.5)).eval()
    prompts = tokens(3, 4)
    drawn = generate(model, prompts, GenerationConfig(max_new_tokens=12, temperature=0.0))
    written = torch.cat((prompts, torch.stack([ids for ids, _ in drawn], 1)), 1)
    targets = written.clone()
    targets[:, :6] = -1
    targets[:, 11] = -1  # two answers a row, which are what the model writes
    for share in (1, 5 / 6):
        batch = (written[:, :-1], targets[:, 1:], 1.0)
        assert share_answered(model.train(), ComputeMode(), [batch], DistContext(CPU)) == share
        assert model.training
        targets[0, 15] = (targets[0, 15] + 1) % 100  # then the last token of one is another


def test_run_on_dialogues_counts_the_answers_that_it_writes(tmp_path, script):
    (tmp_path / "d.jsonl").write_text("".join(f'["Say {i}.", "ok"]\n' for i in range(60)))
    form = ["--tokenizer=bytes", "--block_size=32", "--out", tmp_path / "d"]
    assert script("data/chat/prepare.py", tmp_path / "d.jsonl", *form).code == 0
    run_tiny(
        tmp_path / "d",
        tmp_path / "out",
        eval_answers=True,
        eval_iters=9,
        block_size=32,
        batch_size=16,
        max_iters=40,
        eval_interval=40,
        learning_rate=0.03,
    )
    assert logged(tmp_path / "out", "eval", "val_answers") == [0.0, 1.0]
    rows = ['["Say 1.", "ok"]'] * 3 + ['{"question": "a", "answer": "b: ok", "category": "c"}']
    (tmp_path / "t.jsonl").write_text("\n".join([*rows, '["Say 2.", "no"]']))
    table = script("bench/accuracy.py", tmp_path / "out", tmp_path / "t.jsonl").out
    cells = [line.split("|")[1:-1] for line in table.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in cells] == [
        ["any", "4", "75.0%", "75.0%"],
        ["c", "1", "0.0%", "100.0%"],
        ["all", "5", "60.0%", "80.0%"],
    ]


def test_ollamas_template_writes_what_the_model_was_trained_on():
    """Its few statements as Jinja's, which is at hand."""
    text = template.MODELFILE.format(name="a.gguf").split('"""')[1]
    for ours, jinja in (
        ("range .Messages", "for m in messages"),
        ('if eq .Role "user"', "if m.role == 'user'"),
        ('else if eq .Role "assistant"', "elif m.role == 'assistant'"),
        ("else", "else"),
    ):
        text = text.replace(f"{{{{ {ours} }}}}", f"{{% {jinja} %}}")
    text = text.replace("{{ .Content }}", "{{ m.content }}")
    text = text.replace("{{ end }}", "{% endif %}", 1).replace("{{ end }}", "{% endfor %}")
    messages = [{"role": role, "content": f"{role} 1"} for role in template.ROLES]
    expected = jinja2.Template(template.JINJA).render(
        messages=messages, eos_token="<|endoftext|>", add_generation_prompt=True
    )
    assert jinja2.Template(text, keep_trailing_newline=True).render(messages=messages) == expected
