"""Which commands tasks.py and the Makefile run, and in which order. A fake Python only records how it was called."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, assert_one_line, shell

import tasks
from deskgpt.system import wheels
from deskgpt.system.wheels import Gpu

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the fake Python is a shell script")

# Makes "environments" that are copies of itself, and fails if a file such as no-network exists.
PYTHON = """#!/bin/sh
cd "FOLDER"
echo "$*" >> calls
case "$*" in
  "-c from deskgpt.system import"*) cat matmul;;
  "-m pip config list") cat pip-config;;
  "-m venv"*)
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python";;
  "-m pip install"*) [ ! -e no-network ];;
  data/shakespeare_char/*) echo "error: cannot download"; exit 1;;
  *killed*) kill -9 $$;;
  *fails*) exit 3;;
esac
"""
LISTS = ("constraints.txt", "requirements.txt", "requirements-dev.txt")


class Machine:
    """A checkout with a fake Python and without a card."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / ".venv"
        self.python = folder / "python3"
        self.python.write_text(PYTHON.replace("FOLDER", str(folder)))
        self.python.chmod(0o755)
        for name in LISTS:
            shutil.copy(ROOT / name, folder)
        (folder / "matmul").write_text("cpu 2.0\n")
        (folder / "pip-config").touch()

    def calls(self) -> list[str]:
        """The commands since the last call of this method, without questions."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return [line for line in lines if not line.startswith(("-c ", "-m pip config"))]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    monkeypatch.setattr(tasks, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    machine = Machine(tmp_path)
    monkeypatch.setattr(sys, "executable", str(machine.python))
    monkeypatch.setattr(wheels, "nvidia_gpu", lambda: None)
    return machine


def test_train_on_a_new_machine_installs_prepares_trains_samples_and_ends_with_the_report(machine, capfd):
    tasks.main(["train", "--", "--max_iters=3"])
    made, pip, *rest = machine.calls()
    assert made == f"-m venv {machine.venv}"
    assert pip.startswith("-m pip install ")
    assert "-r requirements.txt -c constraints.txt" in pip
    assert rest[:2] == ["data/shakespeare_char/prepare.py", "data/python_char/prepare.py"]
    assert rest[2].startswith("train.py config/train_shakespeare_char_fast.py ")
    assert rest[2].endswith(" --dataset=python_char --out_dir=out-first --max_iters=3")
    assert [call.split()[0] for call in rest[3:]] == ["sample.py", "bench/report.py"]
    printed = capfd.readouterr().out
    assert printed.splitlines()[-1].endswith("out-first/report.html")
    assert "three minutes" not in printed  # nor the loss of the plays: it is another run
    assert "1.46" not in printed
    tasks.main(["train"])
    assert machine.calls()[0] == rest[0]  # nothing is installed again, and the plays are tried again


@pytest.mark.parametrize(
    ("matmul", "settings"),
    [
        ("cuda 10.0", "config/train_shakespeare_char.py --max_minutes"),  # a card's own first model
        ("cpu 1.0", "fast.py --max_iters=1600 --max_minutes"),
        ("cpu 0.44", "--n_layer=3"),
        ("cpu 0.33", "--n_layer=2"),
        ("cpu 0.05", "--n_layer=1"),
        ("mps 0.0", "fast.py --max_iters=1600 --max_minutes"),
    ],
)
def test_first_model_fits_the_machine_and_what_is_printed_is_true_of_the_plays_only(matmul, settings, machine, capfd):
    (machine.folder / "matmul").write_text(matmul)
    (machine.folder / "data" / "shakespeare_char").mkdir(parents=True)
    (machine.folder / "data" / "shakespeare_char" / "val.bin").touch()
    (machine.folder / "my novel.txt").touch()
    tasks.main(["train"])
    [train] = [call for call in machine.calls() if call.startswith("train.py")]
    assert settings in train
    assert "--dataset=shakespeare_char" in train
    assert re.search(r"three minutes.* loss is (about )?1\.\d", capfd.readouterr().out)
    tasks.main(["train", "--text", "my novel.txt", "--out", "out-mine"])
    prepare, train, *_ = machine.calls()
    assert prepare == f"data/text/prepare.py {machine.folder / 'my novel.txt'} --name own_text"
    assert train.endswith("--dataset=own_text --out_dir=out-mine")
    assert "loss" not in capfd.readouterr().out


def test_missing_text_is_reported_before_anything_is_installed(machine):
    with pytest.raises(SystemExit) as error:
        tasks.main(["train", "--text", "nvoel.txt"])
    assert_one_line(error.value.code, "nvoel.txt", "is its name right?")
    assert machine.calls() == []


@pytest.mark.parametrize(
    ("gpu", "index", "named"),
    [
        (None, "cpu", "no NVIDIA card"),
        (Gpu("RTX 4070", (13, 0), (8, 9)), "cu130", "CUDA 13.0"),
        (Gpu("GTX 1080", (12, 4), (6, 1)), "cu126", "CUDA 12.6"),
        (Gpu("RTX 5090", (12, 8), (12, 0)), "cpu", "driver 580"),
    ],
)
def test_build_of_torch_that_serves_the_card_is_installed_and_its_size_printed_before(
    gpu, index, named, machine, monkeypatch, capfd
):
    monkeypatch.setattr(wheels, "nvidia_gpu", lambda: gpu)
    tasks.install(machine.venv, "requirements.txt")
    pip = machine.calls()[1]
    assert pip.endswith(f"/{index}") is (sys.platform != "darwin")
    line = capfd.readouterr().out.splitlines()[0]
    assert_one_line(line, named, "GB")
    shutil.rmtree(machine.venv)
    (machine.folder / "pip-config").write_text("global.extra-index-url='https://my.own/simple'\n")
    tasks.install(machine.venv, "requirements.txt")
    assert "index" not in machine.calls()[1]


def test_tests_need_one_installation_which_serves_training_too(machine):
    tasks.main(["test", "--", "-k", "resume"])
    _, pip, test = machine.calls()
    assert "-r requirements-dev.txt" in pip
    assert test == "-m pytest -n 2 --dist=worksteal -m not slow and not nightly -k resume"
    tasks.main(["test-nightly"])
    assert machine.calls() == ["-m pytest -n 2 --dist=worksteal -m nightly"]
    tasks.main(["check"])
    assert machine.calls() == ["-m ruff check .", "-m ruff format --check .", "-m mypy"]
    tasks.main(["qualify", "--", "--stages=0-3"])
    assert machine.calls() == ["bench/qualify.py --stages=0-3"]
    tasks.main(["train"])
    assert not [call for call in machine.calls() if "pip" in call]


def test_changed_requirements_and_what_could_not_be_installed_are_installed_by_the_next_call(machine):
    (machine.folder / "no-network").touch()
    with pytest.raises(SystemExit) as error:
        tasks.install(machine.venv, "requirements.txt")
    assert_one_line(error.value.code, "requirements.txt", "network", machine.venv)
    (machine.folder / "no-network").unlink()
    tasks.install(machine.venv, "requirements.txt")
    for name in ("requirements.txt", "constraints.txt"):
        machine.calls()
        with open(machine.folder / name, "a") as f:
            f.write("\n# another one")
        tasks.install(machine.venv, "requirements.txt")
        (pip,) = machine.calls()
        assert "pip install" in pip


def test_folder_that_is_no_environment_is_not_touched(machine):
    machine.venv.mkdir()
    (machine.venv / "thesis.tex").touch()
    with pytest.raises(SystemExit) as error:
        tasks.install(machine.venv, "requirements.txt")
    assert_one_line(error.value.code, machine.venv, "VENV=")
    assert (machine.venv / "thesis.tex").exists()


@pytest.mark.parametrize(("word", "status"), [("fails", 3), ("killed", 137)])
def test_status_of_a_command_is_passed_on(machine, word, status):
    with pytest.raises(SystemExit) as e:
        tasks.run(machine.python, word)
    assert e.value.code == status


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_command_ends_in_its_own_way_after_ctrl_c_or_a_kill_of_tasks_and_is_waited_for(number, to_group, tmp_path):
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep(0.6)\n"
        "    open('saved', 'w').close()\n"
        "    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, end); signal.signal(signal.SIGTERM, end)\n"
        "open('ready', 'w').close()\n"
        "time.sleep(60)\n"
    )
    caller = "import signal, sys; sys.path.insert(0, sys.argv[1]); import tasks\n"
    caller += "signal.signal(signal.SIGINT, lambda *_: None); tasks.run(sys.executable, '-c', sys.argv[2])"
    command = [sys.executable, "-c", caller, str(ROOT), code]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    (os.killpg if to_group else os.kill)(process.pid, number)
    assert process.wait(timeout=30) == 130
    assert (tmp_path / "saved").exists()


def test_constraints_name_an_exact_version_of_every_requirement():
    def lines(name: str) -> list[str]:
        return [line for line in (ROOT / name).read_text().splitlines() if line[:1] not in ("#", "-", "")]

    exact = dict(line.split("==") for line in lines("constraints.txt"))
    wanted = [*lines("requirements.txt"), *lines("requirements-dev.txt")]
    names = [re.match(r"[\w-]+", line) for line in wanted]
    assert {name[0] for name in names if name} == exact.keys()


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_make_hands_everything_to_tasks_and_alone_lists_the_targets(machine):
    shutil.copy(ROOT / "Makefile", machine.folder)
    options = [f"PYTHON={machine.python}", "TEXT=my novel.txt", "OUT=o", "VENV=v", "ARGS=--a=1 --b"]
    for target in ("train", "test-all"):
        subprocess.run(["make", "--no-print-directory", target, *options], cwd=machine.folder, check=True)
    assert machine.calls() == [
        "tasks.py train --venv v --out o --text my novel.txt -- --a=1 --b",
        "tasks.py test-all --venv v -- --a=1 --b",
    ]
    listed = subprocess.run(["make"], cwd=machine.folder, capture_output=True, text=True).stdout
    assert {f"make {name}" for name in ("train", "test", "check", "qualify")} <= {
        " ".join(line.split()[:2]) for line in listed.splitlines()
    }
    assert machine.calls() == []


def test_scripts_start_also_where_python_leaves_their_folder_out_of_its_path():
    env = os.environ | {"PYTHONSAFEPATH": "1"}
    for path in ("train.py", "sample.py", "export.py", "tasks.py"):
        done = shell("python", path, "--help", env=env)
        assert done.returncode == 0, done.stderr
