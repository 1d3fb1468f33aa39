"""The scripts without a package of requirements.txt; and what an installation holds."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, TINY, flags, shell

PACKAGES = [line.split(">")[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if line[:1] != "#"]
# Python runs this file at its start: from then on it does not find the packages named in HIDDEN.
SITECUSTOMIZE = """
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
    """Return a function that runs a command as if some packages were not installed."""

    def run(hidden: list[str], *command: str | Path) -> subprocess.CompletedProcess[str]:
        (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
        return shell("python", *command, env=os.environ | {"PYTHONPATH": str(tmp_path), "HIDDEN": " ".join(hidden)})

    return run


@pytest.mark.slow
def test_training_and_sampling_need_only_torch_numpy_psutil_tqdm_and_filelock(without, chars, tmp_path):
    needed = ("torch", "numpy", "psutil", "tqdm", "filelock")
    hidden = [name for name in [*PACKAGES, "pandas", "pyarrow"] if name not in needed]
    out_dir = f"--out_dir={tmp_path / 'out'}"
    train = ["train.py", *flags(**TINY, dataset=chars), out_dir]
    for command in (train, ["sample.py", out_dir, "--num_samples=1", "--max_new_tokens=3", "--device=cpu"]):
        done = without(hidden, *command)
        assert done.returncode == 0, done.stderr


COMMANDS = {
    "tiktoken": "data/text/prepare.py README.md --tokenizer gpt2 --name {out}",
    "pyarrow": "data/fineweb_edu/prepare.py --source {source} --tokenizer bytes --out {out}",
    "plotly": "bench/report.py {out}",
}


@pytest.mark.parametrize("package", ["tiktoken", "pyarrow", pytest.param("plotly", marks=pytest.mark.slow)])
def test_feature_names_its_missing_package(without, tmp_path, package):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    command = COMMANDS[package].format(source=tmp_path / "a.parquet", out=tmp_path / "out")
    done = without([package], *command.split())
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "Warning" not in line]
    assert lines == [f"error: this needs the package {package}, which is not installed: pip install {package}"]


def test_installation_holds_all_modules():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setuptools["py-modules"]) == {path.stem for path in ROOT.glob("*.py")}
    for package, files in setuptools["package-data"].items():
        for file in files:
            assert (ROOT / package.replace(".", "/") / file).exists()
