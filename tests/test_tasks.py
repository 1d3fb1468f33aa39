"""Which commands tasks.py and the Makefile run, and in which order. A fake Python only records how it was called."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, assert_one_line

import tasks

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the fake Python is a shell script")

# Makes "environments" that are copies of itself, and fails if a file such as no-pip or no-network exists.
PYTHON = """#!/bin/sh
cd "FOLDER"
echo "$*" >> calls
case "$*" in
  "-m pip --version") [ ! -e no-pip ];;
  "-c from deskgpt.system import"*) cat matmul;;
  "-m venv"*)
    for venv; do :; done
    [ "$3" != --clear ] || rm -rf "$venv"
    mkdir -p "$venv/bin" && cp "$0" "$venv/bin/python" && touch "$venv/pyvenv.cfg"
    [ ! -e no-venv ] && rm -f no-pip;;
  "-m pip install"*) [ ! -e no-network ];;
  data/shakespeare_char/*) echo "error: cannot download"; exit 1;;
  *killed*) kill -9 $$;;
  *fails*) exit 3;;
esac
"""


PING = "-m pip --version"
FIRST = "train.py config/train_shakespeare_char_fast.py --max_minutes=3 --max_iters=1600"


class Machine:
    """A checkout with a fake Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / ".venv"
        self.python = folder / "python3"
        self.python.write_text(PYTHON.replace("FOLDER", str(folder)))
        self.python.chmod(0o755)
        for name in (tasks.CONSTRAINTS, *tasks.REQUIREMENTS.values()):
            shutil.copy(ROOT / name, folder)
        (folder / "data").mkdir()
        (folder / "matmul").write_text("cpu 2e12\n")

    def calls(self) -> list[str]:
        """The commands since the last call of this method, without questions (python -c ...)."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return [line for line in lines if not line.startswith("-c ")]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    monkeypatch.setattr(tasks, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    machine = Machine(tmp_path)
    monkeypatch.setattr(sys, "executable", str(machine.python))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return machine


def pip(name: str) -> str:
    return f"-m pip install --disable-pip-version-check --no-compile -r {name} -c constraints.txt"


def test_train_on_a_new_machine_installs_prepares_trains_and_samples(machine):
    tasks.main(["train", "--", "--max_iters=3"])
    calls = machine.calls()
    assert calls == [
        f"-m venv --clear {machine.venv}",
        pip("requirements.txt"),
        "data/shakespeare_char/prepare.py",
        "data/python_char/prepare.py",
        f"{FIRST} --dataset=python_char --out_dir=out-first --max_iters=3",
        "sample.py --out_dir=out-first --num_samples=3 --max_new_tokens=300",
    ]
    tasks.main(["train", "--", "--max_iters=3"])
    assert machine.calls() == calls[2:]


@pytest.mark.parametrize(
    ("matmul", "layers"),
    [("cuda 1e11", 4), ("cpu 1e12", 4), ("cpu 4.4e11", 3), ("cpu 3.3e11", 2), ("cpu 5e10", 1), ("mps 0.0", 4)],
)
def test_first_model_fits_the_machine(matmul, layers, machine, capsys):
    (machine.folder / "matmul").write_text(matmul)
    tasks.main(["train"])
    [train] = [call for call in machine.calls() if call.startswith("train.py")]
    settings = f" --n_layer={layers} --norm=layer --learning_rate=8e-3 --momentum=0.85" if layers < 4 else ""
    assert train == f"{FIRST}{settings} --dataset=python_char --out_dir=out-first"
    assert f"a model of {layers} layer" in capsys.readouterr().out


def test_own_text_and_prepared_data_are_taken(machine, monkeypatch):
    (machine.folder / "elsewhere").mkdir()
    (machine.folder / "elsewhere" / "my novel.txt").touch()
    monkeypatch.chdir(machine.folder / "elsewhere")
    tasks.main(["train", "--text", "my novel.txt", "--out", "out-mine"])
    text = machine.folder / "elsewhere" / "my novel.txt"
    prepare, train, _ = machine.calls()[2:]
    assert prepare == f"data/text/prepare.py {text} --name own_text"
    assert train.endswith("--dataset=own_text --out_dir=out-mine")
    for name in ("python_char", "shakespeare_char"):
        (machine.folder / "data" / name).mkdir()
        (machine.folder / "data" / name / "val.bin").touch()
        tasks.main(["train"])
        train, _ = machine.calls()
        assert f"--dataset={name} " in train


def test_missing_text_is_reported_before_anything_is_installed(machine):
    with pytest.raises(SystemExit) as error:
        tasks.main(["train", "--text", "nvoel.txt"])
    assert_one_line(error.value.code, "nvoel.txt", "is its name right?")
    assert machine.calls() == []


def test_tests_need_one_installation_which_serves_training_too(machine):
    tasks.main(["test", "--", "-k", "resume"])
    pytest_call = "-m pytest -n 2 --dist=worksteal"
    assert machine.calls()[1:] == [pip("requirements-dev.txt"), f"{pytest_call} -m not slow -k resume"]
    tasks.main(["test-all"])
    assert machine.calls() == [pytest_call, "bench/check_machines.py"]
    tasks.main(["check"])
    assert machine.calls() == ["-m ruff check .", "-m ruff format --check .", "-m mypy"]
    tasks.main(["qualify", "--", "--stages=0-3"])
    assert machine.calls() == ["bench/qualify.py --stages=0-3"]
    tasks.main(["train"])
    assert not [call for call in machine.calls() if "pip" in call]


def test_changed_requirements_are_installed_again(machine):
    for name in ("requirements.txt", "constraints.txt"):
        tasks.install(machine.venv, "run")
        machine.calls()
        with open(machine.folder / name, "a") as f:
            f.write("\n# another one")
        tasks.install(machine.venv, "run")
        assert machine.calls() == [PING, pip("requirements.txt")]


@pytest.mark.parametrize(
    ("missing", "named", "again"),
    [
        (["no-network"], ["requirements.txt", "network", "run this again"], []),
        (["no-venv", "no-pip"], ["python3"], ["-m venv VENV"]),  # Debian's Python without python3-venv
    ],
)
def test_what_could_not_be_installed_is_installed_by_the_next_call(missing, named, again, machine):
    for name in missing:
        (machine.folder / name).touch()
    with pytest.raises(SystemExit) as error:
        tasks.install(machine.venv, "run")
    assert_one_line(error.value.code, machine.venv, *named)
    (machine.folder / missing[0]).unlink()
    machine.calls()
    tasks.install(machine.venv, "run")
    made = [call.replace("VENV", str(machine.venv)) for call in again]
    assert machine.calls() == [PING, *made, pip("requirements.txt")]


def test_packages_are_compiled_in_advance_where_python_would_not_keep_what_it_compiles(machine, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    tasks.install(machine.venv, "run")
    assert machine.calls()[1:] == [pip("requirements.txt").replace(" --no-compile", "")]


def test_environment_whose_python_is_gone_is_made_again(machine):
    tasks.install(machine.venv, "run")
    python = machine.venv / "bin" / "python"
    python.unlink()
    python.symlink_to(machine.folder / "python3.10")  # an upgrade of the system has removed it
    machine.calls()
    tasks.install(machine.venv, "run")
    assert machine.calls() == [f"-m venv --clear {machine.venv}", pip("requirements.txt")]


def test_folder_that_is_no_environment_is_not_touched(machine):
    machine.venv.mkdir()
    (machine.venv / "thesis.tex").touch()
    with pytest.raises(SystemExit) as error:
        tasks.install(machine.venv, "run")
    assert_one_line(error.value.code, machine.venv, "VENV=")
    assert (machine.venv / "thesis.tex").exists()


@pytest.mark.parametrize(("word", "status"), [("fails", 3), ("killed", 137)])
def test_status_of_a_command_is_passed_on(machine, word, status):
    with pytest.raises(SystemExit) as e:
        tasks.run(machine.python, word)
    assert e.value.code == status


def test_ctrl_c_waits_until_the_command_has_ended_in_its_own_way(tmp_path):
    shutil.copy(ROOT / "tasks.py", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    for name in (tasks.CONSTRAINTS, *tasks.REQUIREMENTS.values()):
        shutil.copy(ROOT / name, tmp_path)
    tasks_there = (
        "import tasks; tasks.installed_file(tasks.ROOT / '.venv', 'dev').write_text(tasks.requirements('dev'))"
    )
    subprocess.run([sys.executable, "-c", tasks_there], cwd=tmp_path, check=True)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "qualify.py").write_text(
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep(0.6)  # subprocess.run kills 0.25 seconds after a KeyboardInterrupt\n"
        "    open('saved', 'w').close()\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, end)\n"
        "open('ready', 'w').close()\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "tasks.py", "qualify"], cwd=tmp_path, start_new_session=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert (tmp_path / "saved").exists()


def test_old_python_gets_one_line():
    assert_one_line(tasks.too_old((3, 9, 2, "final", 0), "/usr/bin/python3"), "3.9.2", "/usr/bin/python3", "PYTHON=")
    source = (ROOT / "tasks.py").read_text()
    ast.parse(source, feature_version=(3, 6))  # in an old Python, newer syntax would be a SyntaxError
    imported = re.findall(r"^(?:import|from) (\w+)", source, re.M)
    assert set(imported) <= {*sys.stdlib_module_names} - {"__future__", "dataclasses", "tomllib"}
    needed = ".".join(map(str, tasks.NEEDED))
    assert f'requires-python = ">={needed}"' in (ROOT / "pyproject.toml").read_text()


def test_constraints_name_an_exact_version_of_every_requirement():
    def lines(name: str) -> list[str]:
        return [line for line in (ROOT / name).read_text().splitlines() if line[:1] not in ("#", "-", "")]

    exact = dict(line.split("==") for line in lines("constraints.txt"))
    wanted = [*lines("requirements.txt"), *lines("requirements-dev.txt")]
    names = [re.match(r"[\w-]+", line) for line in wanted]
    assert {name[0] for name in names if name} == exact.keys()


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_make_hands_everything_to_tasks(machine):
    shutil.copy(ROOT / "Makefile", machine.folder)
    options = [f"PYTHON={machine.python}", "TEXT=my novel.txt", "OUT=o", "VENV=v", "ARGS=--a=1 --b"]
    for target in ("train", "test-all"):
        subprocess.run(["make", "--no-print-directory", target, *options], cwd=machine.folder, check=True)
    assert machine.calls() == [
        "tasks.py train --venv v --out o --text my novel.txt -- --a=1 --b",
        "tasks.py test-all --venv v -- --a=1 --b",
    ]
