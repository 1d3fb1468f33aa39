"""README.md, docs/ and the notebook: commands run as a user types them, links lead somewhere,
figures are as stored.
"""

import ast
import itertools
import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import POSIX, ROOT, copy_of_repository, needs_bpe, nightly, shell
from scipy import stats

from bench.asking.statistics import ALPHA, difference

# In this order: commands of later pages use the data and the checkpoints of earlier ones.
PAGES = [ROOT / "README.md"]
PAGES += [ROOT / "docs" / f"{name}.md" for name in ("data", "training", "sampling")]
PAGES += [page for page in sorted((ROOT / "docs").glob("*.md")) if page not in PAGES]
RESULTS = ROOT / "bench" / "results"
CODE = [*ROOT.glob("*.py"), *ROOT.glob("deskgpt/*.py"), *ROOT.glob("bench/*.py")]
CODE += ROOT.glob("data/**/*.py")


def read(path: str | Path) -> str:
    """Return a file's text; its path may be relative to the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.M | re.S)


def commands_of(page: Path) -> list[str]:
    """Return the commands of the sh blocks of a page, without comments.

    A \\ at its end continues a line.
    """
    lines = "".join(blocks_of(page, "sh")).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line]


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))
# Beginnings of commands that other tests run, or that need what is not here.
NOT_RUN = """\
make train
make chat
make test
make qualify
python bench/qualify.py
python bench/ask.py
python bench/speed.py config/train_shakespeare_char_cpu.py --grid
python bench/check_cards.py
python data/fineweb_edu/prepare.py --hub
python data/chat/prepare.py --hub
python -m bench
python sample.py --serve
sbatch
torchrun --nnodes=2
curl
llama-server
git clone
hf download
lm_eval --model hf"""
# Compiling takes longer than the steps of these runs.
PLAIN = "--eval_iters=1 --compile=False --device=cpu --dtype=float32"
# In Hugging Face's format, instead of OpenAI's, which would have to be downloaded.
GPT2 = "tiny-gpt2"
SHORT = (
    "--n_layer=1 --n_head=1 --n_embd=8 --block_size=16 --batch_size=2 --max_iters=2 "
    f"--eval_interval=2 {PLAIN}"
)


DIALOGUE = """{"messages": [{"role": "user", "content": "Who is there?"}, \
{"role": "assistant", "content": "It is me."}]}
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory, text):
    """Make a copy of the repository with texts to train on and a .venv of this Python."""
    from transformers import (  # takes seconds, which the quick tests do without
        GPT2Config,
        GPT2LMHeadModel,
    )

    folder = copy_of_repository(tmp_path_factory.mktemp("clone"))
    (folder / "data" / "shakespeare_char" / "input.txt").write_text(text)
    for name in ("novel.txt", "notes.txt"):
        (folder / name).write_text(text[:20_000])
    (folder / "prompt.txt").write_text("the ")
    (folder / "documents").mkdir()
    for i in range(2):
        parts = [text[n : n + 2000] for n in range(i * 2000, 100_000, 4000)]
        lines = [json.dumps({"text": part, "body": part}) for part in parts]
        (folder / "documents" / f"{i}.jsonl").write_text("\n".join(lines))
    for name in ("dialogues.jsonl", "test.jsonl"):
        (folder / name).write_text(DIALOGUE * 20)
    header = np.array([20240520, 1, 5000, *[0] * 253], "<i4")  # llm.c's
    ids = np.random.default_rng(0).integers(0, 50257, 5000, np.uint16)
    for name in ("val_000000", "train_000001"):  # as hf download brings them
        tokens = folder / "data" / "fineweb_edu" / f"finewebedu_{name}.bin"
        tokens.write_bytes(header.tobytes() + ids.tobytes())
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=32)).save_pretrained(
        folder / GPT2
    )
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, words in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    settings = f"'', 'out-first', 'first.gguf', {SHORT.split()}"
    run(folder, f'python -c "import sys, tasks; tasks.train(sys.executable, {settings})"')
    assert (folder / "first.gguf").exists()
    assert (folder / "out-first" / "report.html").exists()
    return folder


def run(clone: Path, command: str) -> str:
    """Run a command in the clone and return what it prints."""
    path = f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "COLUMNS": "80"}
    return shell("bash", "-c", command, cwd=clone, env=env).stdout


def shortened(command: str) -> str:
    """Return the same command with a tiny model, few steps, and data that is here instead of on the
    hub.
    """
    # The texts are too small for more.
    command = re.sub(r"--vocab_size[ =]\d+", "--vocab_size=512", command)
    if "data/chat/prepare.py" in command:
        # As training_flags sets it
        if "mine" in command:  # a whole dialogue fits
            return f"{command} --block_size 64"
        return f"{command} --block_size {16 if 'novel' in command else 32}"
    if "fineweb_edu/prepare.py" in command:
        tokenizer = "" if "--tokenizer" in command else " --tokenizer bytes"
        return f"{command.replace(' --source folder/', '')} --source documents/{tokenizer}"
    if "train.py" in command and "--help" not in command:
        return f"{command} {training_flags(command)}"
    if "sample.py" in command:
        weights = f" --init_from={GPT2}" if "init_from=gpt2" in command else ""
        return f"{command} --max_new_tokens=20 --num_samples=1 --device=cpu{weights}"
    return command


def training_flags(command: str) -> str:
    """Return settings that make a train.py command short."""
    if "--init_from" in command:  # the checkpoint decides the model and the batch
        return f"--max_iters=4 {PLAIN} --resume_changed=True"
    if "mine" in command:
        return f"{SHORT} --block_size=64"
    if "finetune" in command or "eval_gpt2" in command:  # the weights decide the model
        return (
            f"--max_iters=4 {PLAIN} --block_size=32 --init_from={GPT2} "
            "--gradient_accumulation_steps=1"
        )
    return f"{SHORT} --eval_tokens=64 --gradient_accumulation_steps=8"


@needs_bpe
@nightly
@POSIX
def test_commands_of_the_pages_run(clone):
    for command in COMMANDS:
        if command.startswith(tuple(NOT_RUN.splitlines())):
            continue
        out = run(clone, shortened(command))
        if "train.py" in command and not any(
            word in command for word in ("--help", "--dry_run", "--plan_for")
        ):
            assert re.search(r"^step \d+: train loss", out, re.M), command
    for page in ("export", "looking-inside"):
        (block,) = blocks_of(ROOT / "docs" / f"{page}.md", "python")
        (clone / "block.py").write_text(block)
        run(clone, "python block.py")
    assert (clone / "attention.html").exists()


def test_links_lead_to_files_that_exist():
    for page in [*PAGES, *RESULTS.glob("*.md")]:
        for name in re.findall(r"\]\((?!https?:)([^)#]+)", read(page)):
            assert (page.parent / name).exists(), f"{page.name} links to {name}"


def test_scripts_and_options_of_commands_exist_or_are_history():
    # Of arguments, and of settings
    options = {*re.findall(r'(?m)(?:"--|^    )(\w+)(?="|: )', "".join(map(read, CODE)))}
    for page in [*PAGES, *RESULTS.glob("2*.md")]:
        commands = [] if "\nHistory: " in read(page) else commands_of(page)
        for command in commands:
            if script := re.match(r"python ([\w/]+\.py)", command):
                assert (ROOT / script[1]).exists(), command
                assert {*re.findall(r"--(\w+)", command)} <= options, command


NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
UNIT = r"(?= ?%| (?:ms|s|us|GiB|GB|MB|nats)\b)"
MEASURED = rf"(?<![\w.,/^=-])(?:{NUMBER}{UNIT}|\d[\d,]*\.\d+(?:e-?\d+)?(?![\d.]))"
# Papers, versions of programs, what others report, arithmetic: they stand beside their source.
OF_OTHERS = """
2302.06675 2305.13245 2106.09685 2204.02311 12.6 2.11 2.14 2.15 4.57 2026.10 8.9
7.5 12.1 13.0 1.4697 1.47 9.3 0.3256 0.0065 10.8
9.34 4.385 3.596 3.358 3.9 4.459 3.657 4.17 1.5 5.7 25 123.6 9.83 0.999 2.6 10.65 134 0.67 22.6
"""
TABLES = r"(?s)<!-- (?:false answers|beliefs|recipes) -->.*?\n\n"  # other tests measure them again


def numbers_in(text: str) -> set[float]:
    """Return the numbers of a text, and what they round to."""
    found = {float(number.replace(",", "")) for number in re.findall(NUMBER, text)}
    return found | {round(x, decimals) for x in found for decimals in range(4)}


def parts_of(path: Path) -> list[str]:
    """Return the paragraphs, items and rows of a page, a notebook or a file's comments, without
    code, tables that are measured again and cards' figures, whose commands are on their page.
    """
    text = read(path)
    if path.suffix == ".ipynb":
        text = "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    elif path.suffix == ".py":
        documented = ast.Module | ast.ClassDef | ast.FunctionDef
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
        docstrings = [ast.get_docstring(node) or "" for node in nodes]
        comments = [line.partition("# ")[2] for line in text.splitlines()]
        text = "\n\n".join(["\n".join(comments), *docstrings])
    text = re.sub(TABLES, "", text.partition("## A new card")[0])
    return re.split(r"\n\n|\n(?=[-|*])", re.sub(r"(?ms)^```.*?^```", "", text))


def test_figures_are_on_the_pages_that_they_cite_or_all_in_one_place_of_the_results():
    """Code that cites no page may have figures of its own."""
    tables = [table for page in PAGES for table in re.findall(TABLES, read(page))]
    measured_again = numbers_in("".join(tables))
    places = [numbers_in(part) for page in RESULTS.glob("*.md") for part in parts_of(page)]
    others = [ROOT / "notebook.ipynb", *(ROOT / "config").glob("*.py")]
    for path in [*PAGES, *others, *CODE]:
        folders = "bench/results" if path in PAGES else "(?:bench/results|docs)"
        for part in parts_of(path):
            cited = re.findall(rf"{folders}/[\w-]+\.md", part)
            figures = {*re.findall(MEASURED, re.sub(r"`[^`]*`|\]\([^)]*\)", "", part))}
            figures -= {*OF_OTHERS.split()}
            new = {float(figure.replace(",", "")) for figure in figures} - measured_again
            known = [numbers_in("".join(map(read, cited)))] if cited else places
            if cited or path not in CODE:
                assert any(new <= place for place in known), f"{path.name}: {new} in {part[:80]!r}"


def assert_line_with(page: str, *values: Any) -> None:
    """A line of a page has all of these."""
    lines = read(f"docs/{page}").splitlines()
    assert any(all(str(value) in line for value in filter(None, values)) for line in lines), values


def with_interval(
    new: list[float], old: list[float], alpha: float = ALPHA, is_percent: bool = False
) -> str:
    """Return the difference and its interval, in bold if it leaves out 0; in percent from the runs'
    logarithms.
    """
    x, y = (np.log(values) if is_percent else values for values in (new, old))
    e = difference(x, y, alpha)
    figures = 100 * np.expm1([e.d, e.low, e.high]) if is_percent else (e.d, e.low, e.high)
    places = 1 if is_percent else 3
    # Never -0.000
    d, low, high = (f"{round(float(figure), places) + 0.0:+.{places}f}" for figure in figures)
    if not e.known:
        return f"{d} (too few runs for an interval)"
    return f"**{d} ({low} to {high})**" if e.low > 0 or e.high < 0 else f"{d} ({low} to {high})"


def test_speeds_and_losses_are_those_of_the_stored_runs():
    figures = json.loads(read("bench/results/figures.json"))
    for r in figures["speed"]:
        assert_line_with("figures.md", *r.values())
    for r in figures["loss"]:
        found = f"{np.mean(r['losses']):.4f}"
        if len(r["losses"]) > 1:
            t = stats.t.isf(ALPHA / 2, len(r["losses"]) - 1)
            found += f" ± {t * stats.sem(r['losses']):.4f}"
        others = [value for name, value in r.items() if name != "losses"]
        assert_line_with("figures.md", f"| {found} | {len(r['losses'])} |", *others)
    readme = " ".join(read("README.md").split())
    for machine in ("with AMX", "Zen 4", "Zen 5", "without fast bfloat16"):
        rows = [
            r
            for r in figures["speed"]
            if r["machine"].endswith(machine) and r["ours"].endswith("not compiled")
        ]
        newest = {r["model"]: r["ratio"] for r in sorted(rows, key=lambda r: r["date"])}
        ratios = sorted(newest.values(), key=float)
        assert f"{ratios[0]} to {ratios[-1]}" in readme
        assert all(r["date"] in readme for r in rows)


def test_answers_are_those_of_the_stored_runs():
    answers = read("docs/answers.md")
    stored_answers = json.loads(read("bench/answers.json"))
    for stored in stored_answers["questions"]:
        is_percent = stored["figure"] != "val_loss"
        pairs = [*itertools.combinations(stored["arms"], 2)]
        for x, y in pairs:
            n = min(len(stored["arms"][x]), len(stored["arms"][y]))
            found = with_interval(
                stored["arms"][y][:n], stored["arms"][x][:n], ALPHA / len(pairs), is_percent
            )
            assert_line_with(
                "answers.md",
                stored["belief"],
                f"`{y}` less `{x}`: {found}, n = {n}",
                stored["page"],
            )
    for stored in stored_answers["recipes"]:
        found = with_interval(stored["values"], stored["base"])
        cell = f"| {found}, {len(stored['values'])} {stored['machine']} |"
        assert_line_with("answers.md", f"| `{stored['arm']}` |", cell)
    n_bold = sum(
        line.count("**") // 2 for line in answers.splitlines() if line.startswith("| `--momentum=")
    )
    assert f"exclude 0 in {n_bold} of 12 cells" in answers


# ---- the notebook --------------------------------------------------------------------------------


@nightly
def test_whole_notebook_trains_plots_and_writes_text_without_a_network(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    folder = copy_of_repository(tmp_path)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    book = nbformat.read(folder / "notebook.ipynb", as_version=4)
    cells = {cell.id: cell for cell in book.cells if cell.cell_type == "code"}
    assert not any(cell.outputs or cell.execution_count for cell in cells.values())
    settings = "--n_layer=1 --n_head=1 --n_embd=16 --batch_size=4 --eval_tokens=512 --compile=False"
    (parameters,) = [cell for cell in cells.values() if cell.metadata.get("tags") == ["parameters"]]
    parameters.source += f"\nMINUTES = 0.05\nSETTINGS = {settings!r}"
    resources = {"metadata": {"path": str(folder)}}
    with suppress(CellExecutionError):  # the cell's own output says more
        NotebookClient(book, timeout=120, kernel_name="python3", resources=resources).execute()

    printed = {name: str(cell.outputs) for name, cell in cells.items()}
    assert "No Shakespeare: training on the source code" in printed["data"]
    assert re.search(r"\bstep \d+: train loss", printed["train"]), printed["train"]
    assert (folder / "out-notebook" / "ckpt.pt").is_file()
    assert "127.0.0.1" in printed["playground"]
    assert "'image/png': 'iVBOR" in printed["plot"]  # how PNG begins in base64
    said = "".join(output.text for output in cells["sample"].outputs)
    assert len(re.findall(r"(?s)==== temperature \S+\ndef (.{400,}?)\n-{15}", said)) == 2, said
