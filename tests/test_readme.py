"""The commands of README.md and of docs/, as a user types them, in a copy of the repository, on tiny models."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import BPE_CACHE, ROOT, SHAKESPEARE
from warm_python import warm_python, write_program

import tasks

# In this order: commands of later pages use the data and the checkpoints of earlier ones.
PAGES = [ROOT / "README.md"]
PAGES += [ROOT / "docs" / f"{name}.md" for name in ("your-data", "fineweb-edu", "training", "sampling")]
PAGES += [page for page in sorted((ROOT / "docs").glob("*.md")) if page not in PAGES]
PYTHON_PAGES = ("export", "sampling", "chat")  # whose python blocks are whole programs


def commands_of(page: Path) -> list[str]:
    """The commands of the sh blocks of a page, without their comments; a python block is one command.

    A line that ends with \\ goes on in the next.
    """
    commands = []
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        if language == "python":
            commands += [f"python -c {shlex.quote(block)}"] * (page.stem in PYTHON_PAGES)
        else:
            lines = block.replace("\\\n", " ").splitlines()
            commands += [line.split("  #")[0].strip() for line in lines if line]
    return commands


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))
NOT_RUN = {
    "make test": "this test is part of it",
    "make qualify": "takes minutes; test_qualify.py runs its stages",
    "python bench/qualify.py": "takes minutes; test_qualify.py runs its stages",
    "python bench/ask.py": "takes minutes; test_ask.py asks questions",
    "sbatch --array": "needs SLURM; test_parts.py runs the command in it",
    "python sample.py --serve": "serves until it is stopped; test_serve.py runs it",
    "curl": "asks what --serve prints; test_serve.py asks the same",
    "python -c 'from openai": "asks what --serve prints; test_serve.py asks the same",
    "llama-server": "llama.cpp; test_gguf.py runs the file in it",
    "ollama create": "Ollama is not installed",
    "torchrun --nnodes=2": "for two hosts; test_several_hosts.py runs two torchruns",
    "sbatch slurm.sbatch": "needs SLURM; test_several_hosts.py runs the script with made-up commands",
    "python bench/report.py out-shakespeare-char-cpu out-first --serve": "ends with Ctrl+C; test_page.py runs it",
}
NEEDS_BPE = ("gpt2", "data/shakespeare/", "config/finetune", "--name chat ", "--out_dir=out-chat ")
WITHOUT_BPE = "TIKTOKEN_CACHE_DIR" not in os.environ and not BPE_CACHE.is_dir()

# Stands for the tasks of lm_eval whose data would have to be downloaded.
WORDS_TASK = {
    "task": "words",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "words.jsonl"}},
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{text}}",
    "doc_to_target": " or not",
    "metric_list": [{"metric": "acc"}],
}
# With dtype=auto each run would time and check several forms, which takes longer than its steps.
PLAIN = "--eval_iters=1 --compile=False --device=cpu --dtype=float32"
MODEL_SHORT = "--n_layer=1 --n_head=1 --n_embd=8 --block_size=16"
SHORT = f"{MODEL_SHORT} --batch_size=2 --max_iters=2 --eval_interval=2 {PLAIN}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory, text) -> Iterator[Path]:
    """The repository without what git ignores, a text to train on, and a .venv that runs this very Python."""
    folder = tmp_path_factory.mktemp("clone") / "deskgpt"
    ignored = shutil.ignore_patterns(".*", "out", "out-*", "wandb", "__pycache__", "*.bin", "meta.*", "input.txt")
    shutil.copytree(ROOT, folder, ignore=ignored)
    corpus = SHAKESPEARE.read_text() if SHAKESPEARE.exists() else text
    (folder / "data" / "shakespeare_char" / "input.txt").write_text(corpus)
    (folder / "novel.txt").write_text(corpus[:20_000])
    (folder / "notes.txt").write_text(corpus[:20_000])
    (folder / "prompt.txt").write_text("the ")
    (folder / "words.jsonl").write_text(json.dumps({"text": "to be or not to be"}) + "\n")
    (folder / "words.yaml").write_text(json.dumps(WORDS_TASK))  # JSON is YAML
    documents = [dict.fromkeys(("text", "body"), corpus[i : i + 2000]) for i in range(0, 100_000, 2000)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    turns = [{"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "It is me."}]
    (folder / "dialogues.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    write_program(programs / "python3", sys.executable)
    write_program(programs / "torchrun", str(programs / "python"), "-m", "torch.distributed.run")
    for kind in tasks.REQUIREMENTS:  # as if all were installed
        tasks.installed_file(folder / ".venv", kind).write_text(tasks.requirements(kind))
    with warm_python(programs / "python"):
        yield folder


def run(clone: Path, command: str) -> str:
    """Runs a command in the clone and returns what it prints."""
    path = f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "COLUMNS": "80"}
    done = subprocess.run(["bash", "-c", command], cwd=clone, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def gpt2_weights(clone: Path) -> Path:
    """A tiny GPT-2 in Hugging Face's format, instead of OpenAI's, which would have to be downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = clone / "tiny-gpt2"
    if not folder.exists():
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=32)).save_pretrained(folder)
    return folder


# ---- a long command, shortened ---------------------------------------------------------------------------------


def is_training(command: str) -> bool:
    return "train.py" in command and "--help" not in command


def shortened(command: str, clone: Path) -> str:
    """The same command with a tiny model, few steps, and data that is here instead of on the hub."""
    command = re.sub(r"--vocab_size[ =]\d+", "--vocab_size=512", command)  # the texts are too small for more
    command = re.sub(r"--tasks=\S+", "--tasks=words.yaml", command)
    if "data/text/prepare.py" in command and WITHOUT_BPE:
        return command.replace("--tokenizer gpt2", "--tokenizer bytes")
    if "data/chat/prepare.py" in command and "--like" not in command:
        return f"{command} --block_size 32"
    if "fineweb_edu/prepare.py" in command:
        command = command.replace(" --pretokenized", "").replace(" --source folder/", "")
        tokenizer = "" if "--tokenizer bpe" in command else " --tokenizer bytes"
        return f"{command} --source documents.jsonl{tokenizer} --shard_tokens 5000"
    if command.startswith("make train"):
        return f'{command} ARGS="{SHORT} --eval_tokens=64"'
    if is_training(command):
        return f"{command} {training_flags(command, clone)}"
    if "bench/speed.py" in command:
        return f"{command} {SHORT} --seconds=0 --rounds=1"
    weights = f" --init_from={gpt2_weights(clone)}" if "init_from=gpt2" in command else ""
    if "bench/evaluate.py" in command:
        return f"{command} --device=cpu{weights}"
    if "sample.py" in command:
        return f"{command} --max_new_tokens=20 --num_samples=1 --device=cpu{weights}"
    return command


def training_flags(command: str, clone: Path) -> str:
    """Settings that make a train.py command short."""
    if "init_from=resume" in command:  # the checkpoint decides the model and the batch
        return f"--max_iters=4 {PLAIN} --resume_changed=True"
    if "init_from=out-" in command:
        return f"--max_iters=4 {PLAIN} --gradient_accumulation_steps=1"
    if "finetune" in command or "eval_gpt2" in command:  # the weights decide the model
        return (
            f"--max_iters=4 {PLAIN} --block_size=32 --init_from={gpt2_weights(clone)} --gradient_accumulation_steps=1"
        )
    flags = SHORT
    if "torchrun" in command or "train_fineweb" in command:
        flags += " --gradient_accumulation_steps=2"
    if "fast" in command or "train_fineweb" in command:
        flags += " --eval_tokens=64"
    return flags


# ---- the tests -------------------------------------------------------------------------------------------------


def test_readme_begins_with_the_two_commands():
    assert commands_of(ROOT / "README.md")[:2] == ["make train", "make test"]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the pages' commands are for a POSIX shell")
def test_commands_of_the_pages_run(clone):
    skipped = []
    for command in COMMANDS:
        if command.startswith(tuple(NOT_RUN)):
            continue
        short = shortened(command, clone)
        if WITHOUT_BPE and any(word in short for word in NEEDS_BPE):
            skipped.append(command)
            continue
        out = run(clone, short)
        if "--dry_run" in command or "--plan_for" in command:
            assert "predicted peak memory" in out
        elif is_training(command):
            assert re.search(r"^step \d+: train loss", out, re.M), command
        elif "bench/speed.py" in command:
            assert re.search(r"^python train.py config/.* --batch_size=[12] --gradient_accumulation_steps", out, re.M)
            assert re.search(
                r"^\| batch_size=2 \| \w+ \| no \| 32 \| .* \| [\d.]+ GB \| [\d.]+% \| [^|]*\|$", out, re.M
            )
    if skipped:
        pytest.skip(f"no GPT-2 BPE files for {len(skipped)} of {len(COMMANDS)} commands; the others passed")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is Python itself")
def test_python_of_the_clone_starts_as_python_does_and_reports_what_fails(clone):
    def python(*words: str) -> tuple[int, str, str]:
        command = [clone / ".venv" / "bin" / "python", *words]
        done = subprocess.run(command, cwd=clone / "docs", input="typed", capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code = "import os, sys; print(sys.argv, os.getcwd(), input(), __name__); print('odd', file=sys.stderr); sys.exit(3)"
    assert python("-c", code, "a b") == (3, f"['-c', 'a b'] {clone / 'docs'} typed __main__\n", "odd\n")
    assert python("-c", "import os; os.kill(os.getpid(), 9)")[0] != 0
    command = [clone / ".venv" / "bin" / "python", "-u", "-c", "import time; print(1); time.sleep(100)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        killed.kill()
        assert killed.communicate(timeout=20)[0] == b""  # what held the other end is gone too
    assert python("-c", "import sys; print([name for name in sys.modules if 'deskgpt' in name])")[1] == "[]\n"


def heading_anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


WITH_LINKS = [*PAGES, *sorted((ROOT / "bench").glob("*/*.md"))]


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page):
    for name, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {name}"
        if anchor:
            assert anchor in heading_anchors(target), f"{page.name} links to {name}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_in_the_first_column_of_a_table_exist(page):
    for name in re.findall(r"^\| `([^`]+)`", page.read_text(encoding="utf-8"), re.M):
        if re.fullmatch(r"[\w./-]+(/|\.py|\.md)", name):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS += [ROOT / name for name in ("train.py", "sample.py", "export.py", "bench/evaluate.py")]


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.name)
def test_what_each_checkpoint_is_for_is_said_where_both_are_named(file):
    words = " ".join(file.read_text(encoding="utf-8").replace("`", "").split())
    if re.search(r"\bckpt\.pt", words) and "ckpt_best.pt" in words:
        assert "ckpt.pt, the last model (to resume)" in words
        assert "ckpt_best.pt, the best (to use)" in words
