"""The commands of README.md, as a user types them, in a copy of the repository, on models that take a moment.

The quick suite runs those of CORE, the whole one all of them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BPE_CACHE, ROOT, SHAKESPEARE

import tasks

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S) for line in block.splitlines() if line]
SHORT = (
    "--n_layer=1 --n_head=1 --n_embd=8 --block_size=16 --batch_size=2 --max_iters=2 --eval_interval=2 --eval_iters=1"
)
SHORT += " --compile=False --device=cpu"
# What a first afternoon takes; each goes on from what those before it left.
CORE = (
    "make train",
    "python data/text/prepare.py novel.txt",
    "python train.py config/train_shakespeare_char_cpu.py --dataset=mine",
    "python sample.py --out_dir=",
    "python train.py --init_from=resume",
    "python bench/compare.py",
)
NEEDS_BPE = ("gpt2", "data/shakespeare/", "config/finetune")
WITHOUT_BPE = "TIKTOKEN_CACHE_DIR" not in os.environ and not BPE_CACHE.is_dir()


@pytest.fixture(scope="module")
def clone(tmp_path_factory, text) -> Path:
    """The repository without what git ignores, a text to train on, and a .venv that runs this very Python."""
    folder = tmp_path_factory.mktemp("clone") / "deskgpt"
    ignored = shutil.ignore_patterns(".*", "out*", "wandb", "__pycache__", "*.bin", "meta.*", "input.txt")
    shutil.copytree(ROOT, folder, ignore=ignored)
    corpus = SHAKESPEARE.read_text() if SHAKESPEARE.exists() else text
    (folder / "data" / "shakespeare_char" / "input.txt").write_text(corpus)
    for name in ("novel.txt", "notes.txt", "prompt.txt"):
        (folder / name).write_text(corpus[:20_000] if name != "prompt.txt" else "the ")
    documents = [dict.fromkeys(("text", "body"), corpus[i : i + 2000]) for i in range(0, 100_000, 2000)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    for name in ("python", "python3"):
        python = folder / ".venv" / "bin" / name
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
    for kind in tasks.REQUIREMENTS:  # as if all were installed
        tasks.stamp(folder / ".venv", kind).write_text(tasks.requirements_checksum(kind))
    return folder


def run(clone: Path, command: str) -> str:
    path = f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"
    torchrun = clone / ".venv" / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    env = os.environ | {"PATH": path, "COLUMNS": "80"}
    done = subprocess.run(["bash", "-c", command], cwd=clone, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def gpt2_weights(clone: Path) -> Path:
    """A tiny GPT-2 in Hugging Face's format, where OpenAI's would have to be downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = clone / "tiny-gpt2"
    if not folder.exists():
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=32)).save_pretrained(folder)
    return folder


def core_lines() -> list[str]:
    """The first line of README for each of CORE, in README's order."""
    firsts = []
    for start in CORE:
        found = [line for line in LINES if line.startswith(start)]
        assert found, f"README has no command that begins with {start!r}"
        firsts.append(found[0])
    return [line for line in LINES if line in firsts]


@pytest.mark.skipif(os.name == "nt", reason="README's commands are for a POSIX shell")
@pytest.mark.parametrize("which", ["core", pytest.param("all", marks=pytest.mark.slow)])
def test_commands_of_the_readme(clone, which):
    assert LINES[:2] == ["make train", "make test"]
    skipped = []
    lines = LINES if which == "all" else core_lines()
    for line in lines:
        command = line.split("  #")[0].strip()
        if command == "make test":
            continue  # what is running now
        if WITHOUT_BPE and "data/text/prepare.py" in command:
            command = command.replace("--tokenizer gpt2", "--tokenizer bytes")
        if WITHOUT_BPE and any(word in command for word in NEEDS_BPE):
            skipped.append(command)
            continue
        if "fineweb_edu/prepare.py" in command:  # documents that are here, where they would come from the hub
            command = command.replace(" --pretokenized", "").replace(" --source folder/", "")
            command += " --source documents.jsonl --encoding bytes --shard_tokens 5000"
        if command.startswith("make train"):
            command += f' ARGS="{SHORT} --eval_tokens=64"'
        elif "train.py" in command and "--help" not in command:
            short = SHORT
            if "init_from=resume" in command or "finetune" in command or "eval_gpt2" in command:  # the model is given
                short = "--max_iters=4 --eval_iters=1 --compile=False --device=cpu"
            if "torchrun" in command:
                short += " --gradient_accumulation_steps=2"
            if "finetune" in command or "eval_gpt2" in command:
                short += f" --init_from={gpt2_weights(clone)} --block_size=32 --gradient_accumulation_steps=1"
            if "train_gpt2" in command:
                short += " --dataset=shakespeare --gradient_accumulation_steps=2"
            if "fast" in command:
                short += " --eval_tokens=64"
            if "train_fineweb" in command:
                short += " --eval_tokens=64 --gradient_accumulation_steps=2"
            command += " " + short
        elif "bench/sweep.py" in command:
            command += f" {SHORT} --steps=3 --rounds=1"
        elif "sample.py" in command:
            command += " --max_new_tokens=20 --num_samples=1 --device=cpu"
            if "init_from=gpt2" in command:
                command += f" --init_from={gpt2_weights(clone)}"
        out = run(clone, command)
        if "--dry_run" in command:
            assert "predicted peak memory" in out
        elif "train.py" in command and "--help" not in command:
            assert re.search(r"^step \d+: train loss", out, re.M), command
        elif "bench/sweep.py" in command:
            assert re.search(r"^python train.py config/.* --batch_size=[12] --gradient_accumulation_steps", out, re.M)
    if skipped:
        pytest.skip(f"no GPT-2 BPE files for {len(skipped)} of {len(lines)} commands; the others passed")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="make is for POSIX")
def test_make_train_without_a_network_or_shakespeare_takes_pythons_sources(clone, tmp_path):
    shutil.copytree(clone, tmp_path / "c", ignore=shutil.ignore_patterns("out*", "*.bin", "meta.json", "input.txt"))
    command = f'https_proxy=http://127.0.0.1:9 make train ARGS="{SHORT} --eval_tokens=64"'
    out = run(tmp_path / "c", command)
    assert "training on the source code of Python's standard library instead" in out
    assert re.search(r"^step 2: train loss", out, re.M)
    assert out.count("---------------") == 3
    again = run(tmp_path / "c", command)  # neither asks the network again nor prepares again
    assert "instead" not in again
    assert "train.bin has" not in again
    assert (tmp_path / "c" / "out-first" / "previous-1" / "ckpt.pt").exists()


def test_files_that_the_readme_names_exist():
    for name in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"^\| `([^`]+)`", README, re.M):
        assert (ROOT / name).exists(), name
