"""Runs the common tasks, and installs what they need. `make` calls this file; without make, type it yourself.

    python tasks.py train                      a first model in a few minutes, and text from it
    python tasks.py train --text novel.txt     the same on your own text
    python tasks.py train -- --n_embd=256      with other settings of train.py
    python tasks.py test                       the quick tests; with `-- -k word` those with this word in their name
    python tasks.py test-all                   all tests but the nightly ones
    python tasks.py test-nightly               emulated machines, soak, several hosts, notebook, lm_eval, browsers
    python tasks.py check                      lint and types
    python tasks.py check-machines             training on the processors that this one can emulate
    python tasks.py qualify                    checks and measures this card; with `-- --stages=0-3` a part of it

All tasks first make a virtual environment, .venv, and install what they need into it. This file uses only the standard
library, and only syntax and modules of Python 3.6, so that an old Python can say that it is too old.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

NEEDED = (3, 11)
ROOT = Path(__file__).resolve().parent
CONSTRAINTS = "constraints.txt"
REQUIREMENTS = {"run": "requirements.txt", "dev": "requirements-dev.txt"}  # the second includes the first


def main(argv: list) -> None:
    """Runs the task that the command line names. What follows `--` goes to train.py, pytest or qualify.py."""
    if sys.version_info < NEEDED:
        sys.exit(too_old(sys.version_info, sys.executable))
    arguments = argv
    extra = []
    if "--" in argv:
        separator = argv.index("--")
        arguments = argv[:separator]
        extra = argv[separator + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "task", choices=["train", "test", "test-all", "check", "test-nightly", "check-machines", "qualify"]
    )
    parser.add_argument("--text", metavar="FILE", default="", help="train on this file, not on Shakespeare's plays")
    parser.add_argument(
        "--out", metavar="FOLDER", default="out-first", help="where the run is saved (default: %(default)s)"
    )
    parser.add_argument("--venv", metavar="FOLDER", default=".venv", help="the environment (default: %(default)s)")
    args = parser.parse_args(arguments)
    text = os.path.abspath(args.text) if args.text else ""
    if text and not os.path.isfile(text):  # checked before minutes of installing
        sys.exit(f"error: cannot read {args.text}: there is no such file; is its name right?")
    os.chdir(ROOT)
    venv = ROOT / args.venv
    if args.task == "train":
        python = install(venv, "run")
        train(python, text, args.out, extra)
        return
    python = install(venv, "dev")
    if args.task == "check":
        run(python, "-m", "ruff", "check", ".")
        run(python, "-m", "ruff", "format", "--check", ".")
        run(python, "-m", "mypy")
    if args.task == "test":
        run(python, "-m", "pytest", "-n", "2", "--dist=worksteal", "-m", "not slow and not nightly", *extra)
    if args.task == "test-all":
        run(python, "-m", "pytest", "-n", "2", "--dist=worksteal", "-m", "not nightly", *extra)
    if args.task == "test-nightly":
        run(python, "-m", "pytest", "-n", "2", "--dist=worksteal", "-m", "nightly", *extra)
    if args.task in ("test-nightly", "check-machines"):
        run(python, "bench/check_machines.py")
    if args.task == "qualify":
        run(python, "bench/qualify.py", *extra)


def too_old(version: tuple, executable: str) -> str:
    """The message for a Python that is older than the scripts need."""
    needed = ".".join(map(str, NEEDED))
    found = ".".join(map(str, version[:3]))
    return (
        f"Python {needed} or newer is needed, this is {found} at {executable}; "
        "install it or name one: make PYTHON=python3.12"
    )


# ---- the first run -------------------------------------------------------------------------------------------


class FirstModel(NamedTuple):
    """A model for the three minutes of the first run."""

    least_tflops: float  # that matmuls must reach on a CPU for this model to learn most
    n_layer: int
    settings: list  # of train.py
    expected_loss: str  # validation loss on Shakespeare's plays


# The largest first. The figures are from bench/results/2026-11-22-first-run.md and 2026-11-26-first-run-zen4.md. Slower
# machines take few steps, which a lower momentum than the recipe's suits (docs/answers.md#recipes).
SLOWER = ["--norm=layer", "--learning_rate=8e-3", "--momentum=0.85"]
FIRST_MODELS = (
    FirstModel(0.7, 4, [], "1.46 to 1.5"),
    FirstModel(0.4, 3, ["--n_layer=3", *SLOWER], "1.46 to 1.5"),
    FirstModel(0.1, 2, ["--n_layer=2", *SLOWER], "1.47 to 1.6"),
    FirstModel(0.0, 1, ["--n_layer=1", *SLOWER], "1.6 to 2"),
)


def train(python: Path, text: str, out: str, settings: list) -> None:
    """Prepares data, trains a small model on it for about three minutes and prints text from it."""
    dataset = prepare(python, text)
    # As many steps as fit into the three minutes, at most about three epochs of Shakespeare's plays.
    recipe = ["config/train_shakespeare_char_fast.py", "--max_minutes=3", "--max_iters=1600", *first_model(python)]
    run(python, "train.py", *recipe, "--dataset=" + dataset, "--out_dir=" + out, *settings)
    run(python, "sample.py", "--out_dir=" + out, "--num_samples=3", "--max_new_tokens=300")


def first_model(python: Path) -> list:
    """Settings of the model that learns most in three minutes here, chosen by how fast matmuls are."""
    print0("measuring how fast this machine multiplies matrices")
    code = "from deskgpt.system import hardware, peaks; device = hardware.resolve_device('auto'); "
    code += "print(device.type, peaks.fastest_matmul(device))"
    done = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return []  # train.py will say what is wrong
    words = done.stdout.split()
    device = words[0]
    tflops = float(words[1]) / 1e12
    model = first_model_for(device, tflops)
    layers = "1 layer" if model.n_layer == 1 else f"{model.n_layer} layers"
    print0(f"matmuls reach {tflops:.2g} TFLOP/s on {device}: training a model of {layers} for three minutes;")
    print0(f"on Shakespeare's plays its validation loss is then about {model.expected_loss}")
    return model.settings


def first_model_for(device: str, tflops: float) -> FirstModel:
    """The largest model that such a machine trains well in three minutes; a GPU always trains the largest."""
    for model in FIRST_MODELS:
        if device != "cpu" or tflops >= model.least_tflops:
            return model
    return FIRST_MODELS[-1]


def prepare(python: Path, text: str) -> str:
    """Prepares data and returns its name: the text, else Shakespeare's plays, else the source code of Python."""
    if text:
        run(python, "data/text/prepare.py", text, "--name", "own_text")
        return "own_text"
    shakespeare = ROOT / "data" / "shakespeare_char"
    python_source = ROOT / "data" / "python_char"
    if (shakespeare / "val.bin").exists():
        return "shakespeare_char"
    if (python_source / "val.bin").exists() and not (shakespeare / "input.txt").exists():
        return "python_char"
    print0("preparing Shakespeare's plays: downloading 1 MB unless it is here already; gives up after 20 seconds")
    command = [str(python), "data/shakespeare_char/prepare.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = done.stdout.strip()
    if done.returncode == 0:
        print0(output)
        return "shakespeare_char"
    print0(f"No Shakespeare ({output}): training on the source code of Python's standard library instead.")
    run(python, "data/python_char/prepare.py")
    return "python_char"


# ---- the environment -----------------------------------------------------------------------------------------


def install(venv: Path, kind: str) -> Path:
    """The environment's Python, after installing the packages of this kind: "run", or "dev", which includes "run".

    Where an installation succeeded, the environment keeps its requirements, so that they are installed again when they
    have changed.
    """
    python = python_of(venv)
    if python.exists() and is_installed(venv, kind):
        return python
    make_environment(venv)
    packages = "torch and the other packages"
    if kind == "dev":
        packages += ", also the ones that tests need,"
    print0(
        f"installing {packages} into {venv.name}: a few minutes the first time; pip is silent while it unpacks torch"
    )
    if sys.platform == "linux" and not shutil.which("nvidia-smi") and not os.environ.get("PIP_EXTRA_INDEX_URL"):
        print0("no NVIDIA card was found: docs/install.md explains how to get a much smaller torch")
    options = ["--disable-pip-version-check"]
    if not sys.dont_write_bytecode:
        # pip would compile all modules; Python compiles the small part that is imported, once, since it keeps that.
        options.append("--no-compile")
    files = ["-r", REQUIREMENTS[kind], "-c", CONSTRAINTS]
    code = call(python, "-m", "pip", "install", *options, *files)
    if code:
        # Without a network pip reports "conflicting dependencies", because it finds nothing that fits the constraints.
        sys.exit(
            f"error: pip could not install {REQUIREMENTS[kind]} into {venv}, see above; is there a network, and "
            f"is there a torch for Python {sys.version.split()[0]} on this system? If so, run this again"
        )
    for installed in ["run"] if kind == "run" else ["run", "dev"]:
        installed_file(venv, installed).write_text(requirements(installed))
    return python


def is_installed(venv: Path, kind: str) -> bool:
    """Whether all packages of this kind are installed as the requirements are now."""
    path = installed_file(venv, kind)
    return path.exists() and path.read_text() == requirements(kind)


def installed_file(venv: Path, kind: str) -> Path:
    """The file that keeps the requirements of this kind as they were installed."""
    return venv / ("." + kind)


def requirements(kind: str) -> str:
    """The text of the files that list the packages of this kind."""
    names = [CONSTRAINTS, REQUIREMENTS["run"], REQUIREMENTS[kind]]
    return "\n".join((ROOT / name).read_text() for name in names)


def make_environment(venv: Path) -> None:
    """Makes a virtual environment in this folder, completes one without pip, and clears one whose Python is gone."""
    python = python_of(venv)
    if python.exists() and call(python, "-m", "pip", "--version", quiet=True) == 0:
        return
    if venv.exists() and not (venv / "pyvenv.cfg").exists():
        sys.exit(f"error: {venv} is no virtual environment; name another folder: make VENV=.venv-2")
    print0(f"making the environment {venv.name}")
    options = [] if python.exists() else ["--clear"]
    code = call(sys.executable, "-m", "venv", *options, venv)
    if code:
        sys.exit(f"error: {sys.executable} -m venv could not make {venv}: see above")


def python_of(venv: Path) -> Path:
    """The environment's own Python."""
    if os.name == "nt":
        return venv / "Scripts" / "python.exe"
    return venv / "bin" / "python"


# ---- commands ------------------------------------------------------------------------------------------------


def run(*command: object) -> None:
    """Prints a command and runs it; if it fails, ends this script with the command's exit status."""
    shown = " ".join(shlex.quote(str(word)) for word in command)
    print0("+ " + shown.replace(str(ROOT) + os.sep, ""))
    code = call(*command)
    if code < 0:  # a signal ended it; a shell's status is then 128 + the signal's number
        sys.exit(128 - code)
    if code > 0:
        sys.exit(code)


def call(*command: object, quiet: bool = False) -> int:
    """Runs a command and returns its exit status; its output is shown unless quiet."""
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run([str(word) for word in command], stdout=output, stderr=output).returncode


def print0(line: str) -> None:
    """Prints a line at once, before what the next command prints."""
    print(line, flush=True)


if __name__ == "__main__":
    # Ctrl+C reaches the running command too: wait until it has saved and ended, then pass on its status.
    signal.signal(signal.SIGINT, lambda *_: None)
    main(sys.argv[1:])
