"""Which commands tasks.py and the Makefile run, by a fake Python that records them; the scripts
without a package.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import POSIX, ROOT, TINY, assert_one_line, flags, nightly, shell, slow, until

import tasks
from deskgpt import wheels
from deskgpt.files import sha256

pytestmark = POSIX

# Makes "environments" that are copies of itself, and fails if a file such as no-network exists.
PYTHON = """#!/bin/sh
cd "FOLDER"
echo "$*" >> calls
case "$*" in
  "-c from deskgpt import"*) cat matmul;;
  "-m pip config"*) [ -e pip ];;
  "-m ensurepip") touch pip;;
  "-m venv"*)
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
  "-m pip install"*) [ ! -e no-network ];;
  data/shakespeare_char/*) echo "error: cannot download"; exit 1;;
  export.py*) exit 3;;  # as without llama.cpp
esac
"""


class Machine:
    """A checkout with a fake Python and without a card."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / ".venv"
        self.python = folder / "python3"
        self.python.write_text(PYTHON.replace("FOLDER", str(folder)))
        self.python.chmod(0o755)
        for name in ("constraints", "requirements", "requirements-dev"):
            shutil.copy(ROOT / f"{name}.txt", folder)
        (folder / "matmul").write_text("cpu 2.0\n")
        (folder / "pip").touch()

    def calls(self) -> list[str]:
        """Return the commands since the last call of this method, without questions."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return [line for line in lines if not line.startswith(("-c ", "-m pip config"))]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    machine = Machine(tmp_path)
    monkeypatch.setattr(sys, "executable", str(machine.python))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_USER", "0")
    monkeypatch.setattr(wheels, "nvidia_gpu", lambda: None)
    return machine


def test_train_on_a_new_machine_installs_prepares_trains_and_ends_with_the_report(machine, capfd):
    tasks.main(["train", "--", "--max_iters=3", "--max_minutes=1"])
    made, pip, *rest = machine.calls()
    assert made == f"-m venv {machine.venv}"
    assert pip.startswith("-m pip install ")
    assert {"-r requirements.txt", "-c constraints.txt"} <= set(re.findall(r"-[rc] \S+", pip))
    assert rest[0] == "data/shakespeare_char/prepare.py"
    assert rest[1].startswith("data/text/prepare.py ")
    assert rest[2].startswith("train.py config/train_shakespeare_char_fast.py ")
    words = rest[2].split()
    assert {"--dataset=python_char", "--out_dir=out-first", "--max_iters=3"} <= {*words}
    assert [word for word in words if "max_minutes" in word] == ["--max_minutes=1"]
    assert rest[3:] == ["bench/report.py out-first"]
    assert max(map(len, capfd.readouterr().out.splitlines())) <= 80
    tasks.main(["train"])
    # Nothing is installed again, and the plays are tried again.
    assert machine.calls()[0] == rest[0]


def test_chat_makes_questions_trains_counts_what_it_answers_and_ends_with_the_page(machine):
    tasks.main(["chat", "--out", "o", "--", "--max_minutes=1"])
    _, _, *calls = machine.calls()
    scripts = ["data/chat/exercises.py", "data/chat/prepare.py", "train.py"]
    scripts += ["data/chat/exercises.py", "bench/accuracy.py", "sample.py"]
    assert [call.split()[0] for call in calls] == scripts
    assert calls[2] == "train.py config/train_exercises.py --out_dir=o --max_minutes=1"
    learned, asked = (call.split("--out=")[1] for call in (calls[0], calls[3]))
    assert calls[1].split()[1] == learned
    assert calls[4] == f"bench/accuracy.py o {asked}"
    assert calls[5] == "sample.py --serve --out_dir=o"


def test_first_model_fits_the_machine():
    assert tasks.first_model("cuda", 10.0) == ["config/train_shakespeare_char.py"]
    assert tasks.first_model("mps", 0.0) == tasks.first_model("cpu", 1.0) == tasks.FAST
    for tflops, layers in ((0.44, 3), (0.2, 2), (0.05, 1)):
        assert f"--n_layer={layers}" in tasks.first_model("cpu", tflops)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_own_text_has_a_folder_of_its_own_and_its_model_is_exported(device, machine):
    (machine.folder / "matmul").write_text(f"{device} 1.0")
    (machine.folder / "my novel.txt").write_text("a text")
    tasks.main(["train", "--text", "my novel.txt", "--out", "out-mine", "--to", "my.gguf"])
    _, _, prepare, train, *_, export = machine.calls()
    # Each text has its own, so that runs on others can be resumed.
    name = f"my_novel_{sha256(b'a text')[:8]}"
    assert prepare == f"data/text/prepare.py {machine.folder / 'my novel.txt'} --name {name}"
    assert train.endswith(f"--dataset={name} --out_dir=out-mine")
    assert ("--token_shift=False" in train) == (device == "cpu")  # a card's first model is a GPT-2
    assert export == f"export.py --out_dir=out-mine --to={machine.folder / 'my.gguf'}"


def test_folder_and_a_pattern_are_one_text(machine):
    (machine.folder / "docs").mkdir()
    (machine.folder / "docs" / "a.md").write_text("a text")
    for text in ("docs", "docs/*.md"):
        tasks.main(["train", "--text", text])
        (prepare,) = re.findall("data/text.*", "\n".join(machine.calls()))
        assert prepare.startswith(f"data/text/prepare.py {machine.folder / text} --name ")


def test_missing_or_empty_text_and_a_name_that_is_taken_are_reported_before_anything_is_installed(
    machine,
):
    (machine.folder / "taken.gguf").touch()
    for words in (("--text", "nvoel.txt"), ("--text", "taken.gguf"), ("--to", "taken.gguf")):
        with pytest.raises(SystemExit) as error:
            tasks.main(["train", *words])
        assert_one_line(error.value.code, words[1], "name")
    assert machine.calls() == []


def test_tests_need_one_installation_which_serves_training_too(machine):
    tasks.main(["test", "--", "-k", "resume"])
    _, pip, test = machine.calls()
    assert "-r requirements-dev.txt" in pip
    assert test.endswith(" -m not slow and not nightly -k resume")
    tasks.main(["train"])
    assert not [call for call in machine.calls() if "pip" in call]


def test_what_could_not_be_installed_and_changed_requirements_are_installed_by_the_next_call(
    machine,
):
    (machine.folder / "no-network").touch()
    with pytest.raises(SystemExit) as error:
        tasks.install(machine.venv, "requirements.txt")
    assert_one_line(error.value.code, "requirements.txt", "network", machine.venv)
    (machine.folder / "no-network").unlink()
    for name in ("", "requirements.txt", "constraints.txt"):
        machine.calls()
        if name:
            (machine.folder / name).write_text("another")
        tasks.install(machine.venv, "requirements.txt")
        (pip,) = machine.calls()
        assert "pip install" in pip


def test_pip_installs_into_the_environment_also_where_uv_made_it_without_pip(machine, monkeypatch):
    """PIP_USER=1 is usual on shared machines, and pip refuses it in an environment."""
    (machine.folder / "pip").unlink()
    elsewhere = {"PIP_USER": "1", "PIP_TARGET": "/elsewhere"}
    for name, value in elsewhere.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wheels, "nvidia_gpu", lambda: elsewhere.update(os.environ))
    tasks.main(["test", "--venv", "~/v"])
    made, ensured, installed, _ = machine.calls()
    assert made == f"-m venv {Path.home() / 'v'}"
    assert ensured == "-m ensurepip"
    assert installed.startswith("-m pip install ")
    assert elsewhere["PIP_USER"] == "0"
    assert "PIP_TARGET" not in os.environ


ENDS_LATE = """
import signal, sys, time
def end(*_):
    time.sleep(0.2)
    open("saved", "w").close()
    sys.exit(130)
signal.signal(signal.SIGINT, end); signal.signal(signal.SIGTERM, end)
open("ready", "w").close()
time.sleep(60)
"""
CALLER = """
import signal, sys, tasks
signal.signal(signal.SIGINT, lambda *_: None)
tasks.run(sys.executable, sys.argv[1])
"""


@pytest.mark.parametrize("ended", ["Ctrl+C", "kill"])
def test_command_ends_in_its_own_way_and_is_waited_for(ended, tmp_path):
    (tmp_path / "ends_late.py").write_text(ENDS_LATE)
    command = [sys.executable, "-c", CALLER, "ends_late.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, stderr=subprocess.DEVNULL, env=env
    )
    until((tmp_path / "ready").exists)
    if ended == "Ctrl+C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    assert process.wait(timeout=30) == 130
    assert (tmp_path / "saved").exists()


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_make_hands_everything_to_tasks_and_alone_lists_the_targets(machine):
    shutil.copy(ROOT / "Makefile", machine.folder)
    options = ["TEXT=my novel.txt", "TO=a.gguf", "OUT=o", "VENV=v", "ARGS=--a=1 --b"]
    for target in ("train", "test-all"):
        make = ["make", target, f"PYTHON={machine.python}", *options]
        shell(*make, cwd=machine.folder)
    assert machine.calls() == [
        "tasks.py train --venv v --out o --text my novel.txt --to a.gguf -- --a=1 --b",
        "tasks.py test-all --venv v -- --a=1 --b",
    ]
    listed = shell("make", cwd=machine.folder).stdout
    assert {*re.findall(r"^make ([\w-]+)", listed, re.M)} == {"train", "chat", *tasks.TASKS}
    assert machine.calls() == []


def test_tasks_start_before_any_package_is_installed_and_with_pythonsafepath():
    # -S: the standard library alone
    assert shell("python", "-SP", ROOT / "tasks.py", "--help", cwd="/").stderr == ""


# ---- packages ------------------------------------------------------------------------------------

PACKAGES = [
    line.split(">")[0]
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line[:1] != "#"
]
# Python runs this file at its start: from then on it does not find the packages named in HIDDEN.
SITECUSTOMIZE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec

@staticmethod
def found(name, *more):
    return None if name.split(".")[0] in HIDDEN else find(name, *more)

PathFinder.find_spec = found
"""


@slow
def test_training_and_sampling_need_only_torch_numpy_psutil_tqdm_and_filelock(chars, tmp_path):
    hidden = {*PACKAGES, "pandas", "pyarrow"} - {"torch", "numpy", "psutil", "tqdm", "filelock"}
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.replace("HIDDEN", str(hidden)))
    for script, *words in (
        ["train.py", *flags(**TINY, dataset=chars)],
        ["sample.py", "--num_samples=1", "--max_new_tokens=3", "--device=cpu"],
    ):
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        shell("python", script, f"--out_dir={tmp_path / 'out'}", *words, env=env)


def test_script_outside_of_the_environment_names_what_it_lacks_and_the_way_in(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.replace("HIDDEN", "{'torch', 'tqdm'}"))
    done = shell("python", "train.py", code=1, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert_one_line(done.stderr, "has no torch, tqdm;", ROOT / ".venv", "activate")


def test_installation_holds_all_modules():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setuptools["py-modules"]) == {path.stem for path in ROOT.glob("*.py")}
    for package, files in setuptools["package-data"].items():
        for file in files:
            assert (ROOT / package.replace(".", "/") / file).exists()


@nightly
def test_quick_tests_pass_with_the_oldest_packages_that_requirements_admit(tmp_path):
    bounds = re.findall(r"^(\w+)>=([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M)
    packages = [f"{name}=={version}" for name, version in bounds if name != "torch"]
    packages.append(f"torch=={version('torch').partition('+')[0]}")
    python = tmp_path / "bin" / "python"
    shell("python", "-m", "venv", tmp_path)
    pip = [python, "-m", "pip", "install", "-q", "-r", "requirements-dev.txt"]
    shell(*pip, *packages, timeout=1800)
    quick = ["-m", "pytest", "-q", "-n2", "-m", "not slow and not nightly"]
    shell(python, *quick, timeout=1800)
