"""Sets up and runs what people type often. `make` calls this file; where there is no make, type it yourself.

    python tasks.py train                      a first model in a few minutes, and text from it
    python tasks.py train --text novel.txt     the same on your own text
    python tasks.py train -- --n_embd=256      with other settings of train.py
    python tasks.py test                       the quick tests; with `-- -k word` some of them
    python tasks.py test-all                   all tests, and check-machines
    python tasks.py check                      lint and types
    python tasks.py check-machines             training on processors that this one can pass for
    python tasks.py clean                      removes the environment and caches; data and runs stay

All but clean first make a virtual environment, .venv, and install what they need into it. This file needs only the
standard library, and the syntax and the imports are those of Python 3.6, so that an old Python can say what is wrong.
"""

import argparse
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

NEEDED = (3, 11)
ROOT = Path(__file__).resolve().parent
CONSTRAINTS = "constraints.txt"
REQUIREMENTS = {"run": "requirements.txt", "dev": "requirements-dev.txt"}  # the second includes the first
# Which model learns most in the three minutes of the first run, by the TFLOP/s that matmuls reach: at least so many,
# layers, settings, and the validation loss to expect (bench/results/2026-11-22-first-run.md).
FIRST_MODELS: tuple = (
    (0.7, 4, [], "1.46 to 1.5"),
    (0.1, 2, ["--n_layer=2", "--norm=layer", "--learning_rate=8e-3"], "1.5 to 1.6"),
    (0.0, 1, ["--n_layer=1", "--norm=layer", "--learning_rate=8e-3"], "1.6 to 2"),
)
CACHES = (".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis")


def main(argv: list) -> None:
    if sys.version_info < NEEDED:
        sys.exit(too_old(sys.version_info, sys.executable))
    arguments, extra = argv, []
    if "--" in argv:
        at = argv.index("--")
        arguments, extra = argv[:at], argv[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["train", "test", "test-all", "check", "check-machines", "clean"])
    parser.add_argument("--text", metavar="FILE", default="", help="train on this, not on Shakespeare's plays")
    parser.add_argument("--out", metavar="FOLDER", default="out-first", help="of the run (default: %(default)s)")
    parser.add_argument("--venv", metavar="FOLDER", default=".venv", help="the environment (default: %(default)s)")
    args = parser.parse_args(arguments)
    text = os.path.abspath(args.text) if args.text else ""
    if text and not os.path.isfile(text):  # said now, not after minutes of installing
        sys.exit(f"error: cannot read {args.text}: there is no such file; is its name right?")
    os.chdir(ROOT)
    venv = ROOT / args.venv
    if args.task == "clean":
        clean(venv)
    elif args.task == "train":
        train(install(venv, "run"), text, args.out, extra)
    else:
        python = install(venv, "dev")
        if args.task == "check":
            run(python, "-m", "ruff", "check", ".")
            run(python, "-m", "ruff", "format", "--check", ".")
            run(python, "-m", "mypy")
        if args.task == "test":
            run(python, "-m", "pytest", "-n", "2", "--dist=worksteal", "-m", "not slow", *extra)
        if args.task == "test-all":
            run(python, "-m", "pytest", "-n", "2", "--dist=worksteal", *extra)
        if args.task in ("test-all", "check-machines"):
            run(python, "bench/check_machines.py")


def too_old(version: tuple, executable: str) -> str:
    """What to say where this Python is older than the scripts need."""
    needed = ".".join(map(str, NEEDED))
    found = ".".join(map(str, version[:3]))
    return (
        f"Python {needed} or newer is needed, this is {found} at {executable}; "
        "install it or name one: make PYTHON=python3.12"
    )


# ---- the first run -------------------------------------------------------------------------------------------


def train(python: Path, text: str, out: str, settings: list) -> None:
    """Prepares data, trains a small model on it for about three minutes and prints text from it."""
    dataset = prepare(python, text)
    recipe = ["config/train_shakespeare_char_fast.py", "--max_minutes=3", *first_model(python)]
    run(python, "train.py", *recipe, "--dataset=" + dataset, "--out_dir=" + out, *settings)
    run(python, "sample.py", "--out_dir=" + out, "--num_samples=3", "--max_new_tokens=300")


def first_model(python: Path) -> list:
    """Settings of the model that learns most in three minutes here, going by how fast matmuls are."""
    say("measuring how fast this machine multiplies")
    code = "from deskgpt import hardware, peak_flops; device = hardware.resolve_device('auto'); "
    code += "print(device.type, peak_flops.fastest_matmul(device))"
    done = subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return []  # train.py says what is wrong
    device, flops = done.stdout.split()
    tflops = float(flops) / 1e12
    layers, settings, expected = next(row[1:] for row in FIRST_MODELS if device != "cpu" or tflops >= row[0])
    model = f"a model of {layers} layer{'s' if layers > 1 else ''}"
    say(f"matmuls reach {tflops:.2g} TFLOP/s on {device}: {model} for three minutes;")
    say(f"on Shakespeare's plays its validation loss comes to about {expected}")
    return settings


def prepare(python: Path, text: str) -> str:
    """The name of the data to train on, prepared: the text, else Shakespeare's plays, else Python's own sources."""
    if text:
        run(python, "data/text/prepare.py", text, "--name", "own_text")
        return "own_text"
    data = ROOT / "data"
    if (data / "shakespeare_char" / "val.bin").exists():
        return "shakespeare_char"
    if (data / "python_char" / "val.bin").exists() and not (data / "shakespeare_char" / "input.txt").exists():
        return "python_char"
    say("preparing Shakespeare's plays: 1 MB is downloaded where it is not here yet, which is tried for 20 seconds")
    command = [str(python), "data/shakespeare_char/prepare.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = done.stdout.strip()
    if done.returncode == 0:
        say(said)
        return "shakespeare_char"
    say(f"No Shakespeare ({said}): training on the source code of Python's standard library instead.")
    run(python, "data/python_char/prepare.py")
    return "python_char"


# ---- the environment -----------------------------------------------------------------------------------------


def install(venv: Path, kind: str) -> Path:
    """The Python of the environment, once that holds the packages of this kind ("run" or "dev").

    What is installed is noted in the environment, by the content of the files that say it, once all of it is there:
    an interrupted installation is begun again, and so is one whose files have changed.
    """
    python = python_of(venv)
    kinds = ["run"] if kind == "run" else ["run", "dev"]
    if python.exists() and all(stamp(venv, k).exists() and stamp(venv, k).read_text() == content(k) for k in kinds):
        return python
    make_environment(venv)
    what = "torch and the other packages" if kind == "run" else "torch, the other packages and what the tests need"
    say(f"installing {what} into {venv.name}: a few minutes the first time; pip is silent while it unpacks torch")
    if sys.platform == "linux" and not shutil.which("nvidia-smi") and not os.environ.get("PIP_EXTRA_INDEX_URL"):
        say("no NVIDIA card was found: docs/install.md tells how to get a much smaller torch")
    files = ["-r", REQUIREMENTS[kind], "-c", CONSTRAINTS]
    code = call(python, "-m", "pip", "install", "--disable-pip-version-check", *files)
    if code:
        # Without a network pip speaks of "conflicting dependencies": constraints with nothing to choose from.
        sys.exit(
            f"error: pip could not install {REQUIREMENTS[kind]} into {venv}, see above; is there a network, and "
            f"is there a torch for Python {sys.version.split()[0]} on this system? Then run this again"
        )
    for k in kinds:
        stamp(venv, k).write_text(content(k))
    return python


def make_environment(venv: Path) -> None:
    """A virtual environment with pip in this folder: what is whole is left, what is broken is made again."""
    python = python_of(venv)
    runs = python.exists() and call(python, "-c", "pass", quiet=True) == 0
    if runs and call(python, "-c", "import pip", quiet=True) == 0:
        return
    if venv.exists() and not is_environment(venv) and any(venv.iterdir()):
        sys.exit(f"error: {venv} is no virtual environment and not empty; name another folder: make VENV=.venv-2")
    lacking = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if lacking:
        sys.exit(
            f"error: Python at {sys.executable} lacks {' and '.join(lacking)}, without which it makes no environment; "
            "on Debian and Ubuntu: sudo apt install python3-venv"
        )
    say(f"making the environment {venv.name}")
    there = venv.exists()
    try:
        # Where its Python runs, only pip is missing: that is added, and the packages that are there stay.
        code = call(sys.executable, "-m", "venv", *([] if runs else ["--clear"]), venv)
    except BaseException:
        code = 1
        raise
    finally:
        if code and not there:
            shutil.rmtree(venv, ignore_errors=True)
    if code:
        sys.exit(f"error: {sys.executable} -m venv could not make {venv}: see above")


def is_environment(venv: Path) -> bool:
    return (venv / "pyvenv.cfg").exists()


def python_of(venv: Path) -> Path:
    return venv / "Scripts" / "python.exe" if os.name == "nt" else venv / "bin" / "python"


def stamp(venv: Path, kind: str) -> Path:
    """The file that says what is installed."""
    return venv / ("." + kind)


def content(kind: str) -> str:
    """A checksum of the files that say what to install."""
    names = [CONSTRAINTS, REQUIREMENTS["run"], REQUIREMENTS[kind]]
    return hashlib.sha256(b"\n".join((ROOT / name).read_bytes() for name in names)).hexdigest()


def clean(venv: Path) -> None:
    if is_environment(venv):
        shutil.rmtree(venv)
    elif venv.exists():
        say(f"{venv} is no virtual environment: left as it is")
    for name in CACHES:
        shutil.rmtree(ROOT / name, ignore_errors=True)


# ---- commands ------------------------------------------------------------------------------------------------


def run(*command: object) -> None:
    """Shows a command and runs it; ends this script with its exit status where that is not 0."""
    shown = " ".join(shlex.quote(str(word)) for word in command)
    say("+ " + shown.replace(str(ROOT) + os.sep, ""))
    code = call(*command)
    if code:
        sys.exit(code if code > 0 else 128 - code)  # as a shell says by which signal a command ended


def call(*command: object, quiet: bool = False) -> int:
    """The exit status of a command, which shares this terminal unless quiet."""
    output = subprocess.DEVNULL if quiet else None
    try:
        process = subprocess.Popen([str(word) for word in command], stdout=output, stderr=output)
    except OSError as e:
        if not quiet:
            print(f"cannot run {command[0]}: {e.strerror}", file=sys.stderr)
        return 127
    interrupted = False
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the terminal sends it to the command too, which ends in its own way
            interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    return code


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
