"""What the scripts do where a package of requirements.txt is not installed, or its cache cannot be written."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY, flags, shell

NAMES = [line.split(">")[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if line[:1] != "#"]
# Found by Python at its start: from then on these packages are as if they were not installed.
HIDES = """
import os, sys
from importlib.machinery import PathFinder

class Rest(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in os.environ["HIDDEN"].split() else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Rest
"""


@pytest.fixture
def without(tmp_path):
    """Runs a script of the repository where some packages are not installed."""

    def run(hidden: list[str], *command: str | Path) -> subprocess.CompletedProcess[str]:
        (tmp_path / "sitecustomize.py").write_text(HIDES)
        return shell(*command, env=os.environ | {"PYTHONPATH": str(tmp_path), "HIDDEN": " ".join(hidden)})

    return run


def test_training_and_sampling_take_torch_numpy_and_tqdm_alone(without, chars, tmp_path):
    hidden = [name for name in NAMES if name not in ("torch", "numpy", "tqdm")]
    assert len(hidden) == 8
    settings: dict[str, Any] = TINY | {"dataset": chars, "out_dir": tmp_path / "out"}
    done = without([*hidden, "pandas", "pyarrow"], "python", "train.py", *flags(**settings))
    assert done.returncode == 0, done.stderr
    sample = ("python", "sample.py", f"--out_dir={tmp_path / 'out'}", "--num_samples=1", "--max_new_tokens=3")
    done = without(hidden, *sample, "--device=cpu")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("tiktoken", "data/text/prepare.py README.md --tokenizer gpt2 --name"),
        ("filelock", "data/fineweb_edu/prepare.py --source {} --encoding bytes --out"),
        ("datasets", "data/fineweb_edu/prepare.py --source {} --encoding bytes --out"),
        ("zstandard", "data/fineweb_edu/prepare.py --source {}.zst --encoding bytes --out"),
        ("safetensors", "train.py --dataset={data} --init_from=. --device=cpu --out_dir"),
    ],
)
def test_feature_whose_package_is_missing_names_it(without, chars, tmp_path, package, command):
    for name in ("a.jsonl", "a.jsonl.zst"):
        (tmp_path / name).write_text(json.dumps({"text": "words " * 1000}) + "\n")
    words = [word.format(tmp_path / "a.jsonl", data=chars) for word in command.split()]
    if words[0] == "train.py":
        words[-1] += f"={tmp_path / 'out'}"
    else:
        words.append(str(tmp_path / "out"))
    done = without([package], "python", *words)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "Warning" not in line]
    assert lines == [f"error: this needs the package {package}, which is not installed: pip install {package}"]


@pytest.mark.skipif(os.name == "nt", reason="/dev/null is not a folder even to root")
def test_documents_are_prepared_where_no_cache_can_be_written(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "words " * 1000}) + "\n")
    command = ("python", "data/fineweb_edu/prepare.py", "--source", tmp_path / "a.jsonl", "--encoding", "bytes")
    done = shell(*command, "--out", tmp_path / "out", env=os.environ | {"HF_HOME": "/dev/null/huggingface"})
    assert done.returncode == 0, done.stderr
    assert re.search(r"^train on them: ", done.stdout, re.M)
