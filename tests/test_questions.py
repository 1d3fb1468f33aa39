"""Questions that are written down (bench/questions): each can be asked, and a file that is wrong is refused."""

from __future__ import annotations

import pytest
from conftest import ROOT

from bench import ask
from bench.asking import answers
from bench.asking.ledger import Ledger
from deskgpt.system.errors import ConfigError

ANSWERS = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")
FILES = sorted((ROOT / "bench" / "questions").glob("*.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_question_can_be_asked_and_compares_equal_work(file, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    a, common = ask.read_arguments([str(file)])
    assert a.belief
    assert a.instead
    assert f"(../bench/questions/{file.name})" in ANSWERS
    arms = ask.arms_of(a, common, Ledger(tmp_path))
    assert len(arms) > 1
    if a.at == "steps":
        assert len({ask.tokens_per_step(arm) for arm in arms}) == 1


def test_command_line_wins_over_the_file_wherever_it_stands(tmp_path):
    file = tmp_path / "question.toml"
    file.write_text('config = ["one.py", "two.py"]\nresolve = 1e-2\nb = "--n_layer=2"\n[settings]\ncompile = false')
    words = ["--min_effect=3", "--n_head=1", str(file), "--b", "--n_layer=4", "--compile=True"]
    a, common = ask.read_arguments(words)
    assert (a.b, a.min_effect) == ("--n_layer=4", 3)
    assert common == ["one.py", "two.py", "--compile=False", "--n_head=1", "--compile=True"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("b = ", "end of document"),
        ("[" * 9999, "bench/questions"),
        ("max_iters = 3", "[settings]"),
        ("[settings]\nmax_iter = 3", "max_iters"),
        ("[settings]\nmax_iters = 'x'", "max_iters"),
        ("min_effect = 'little'", "--min_effect"),
        ("b = ['--n_layer=2']", "b = "),
        ("config = [3]", "config"),
    ],
)
def test_file_that_is_wrong_is_refused_in_one_line_that_names_it(text, named, tmp_path):
    file = tmp_path / "question.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        ask.read_arguments([str(file)])
    message = str(refused.value)
    assert message.startswith(f"{file}: ")
    assert named in message
    assert "\n" not in message


def test_two_files_are_refused():
    with pytest.raises(ConfigError, match="one question"):
        ask.read_arguments(["a.toml", "b.toml"])


def test_page_of_answers_is_what_the_stored_runs_say():
    assert answers.rendered(ANSWERS) == ANSWERS
    cell = next(line for line in ANSWERS.splitlines() if line.startswith("| `--momentum=0.9` |"))
    stored = next(x for x in answers.STORED["recipes"] if x["arm"] == "--momentum=0.9")
    mean = sum(stored["values"]) / len(stored["values"]) - sum(stored["base"]) / len(stored["base"])
    assert f"{mean:+.3f}" in cell.split("|")[2]
