"""Run the common tasks, and install what they need.

`make` calls this file; without make, type it yourself.

    python tasks.py train                     a first model in a few minutes, text and its report
    python tasks.py train --text novel.txt    the same on your own text
    python tasks.py train --to novel.gguf     also a file for llama.cpp (my-model: a folder)
    python tasks.py train -- --n_embd=256     with other settings of train.py
    python tasks.py chat                      a small model that answers, in ten minutes
    python tasks.py test                      the quick tests; `-- -k word`: with this word
    python tasks.py test-all, test-nightly, check, qualify, check-cards    as `make` lists them

All tasks first make a virtual environment, .venv, and install what they need into it. This file
uses only the standard library.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (an old Python reads this)
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(
        f"Python 3.11 or newer is needed, this is {found} at {sys.executable}; name one: "
        "make PYTHON=python3.12"
    )

import argparse
import functools
import glob
import os
import re
import signal
import subprocess
import sysconfig
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PYTHONSAFEPATH leaves it out

from deskgpt import wheels  # noqa: E402
from deskgpt.errors import to_type  # noqa: E402
from deskgpt.files import check_unused, file_sha256, sha256  # noqa: E402

PYTEST = ("-m", "pytest", "-n", "2", "--dist=worksteal", "-m")
TASKS = {  # commands of the environment's Python; the first one gets what follows `--`
    "test": [[*PYTEST, "not slow and not nightly"]],
    "test-all": [[*PYTEST, "not nightly"]],
    "test-nightly": [[*PYTEST, "nightly"], ["tests/mutants.py", "--sample=20"]],
    "check": [
        ["-m", "ruff", "check", "."],
        ["-m", "ruff", "format", "--check", "."],
        ["-m", "mypy"],
    ],
    "qualify": [["bench/qualify.py"]],
    "check-cards": [["bench/check_cards.py"]],
}
print0 = functools.partial(print, flush=True)  # at once, before what the next command prints


def main(argv: list[str]) -> None:
    """Run the task that the command line names."""
    split = argv.index("--") if "--" in argv else len(argv)
    extra = argv[split + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=["train", "chat", *TASKS])
    parser.add_argument(
        "--text", type=absolute, default="", help="train on this file, folder or 'pattern'"
    )
    parser.add_argument(
        "--to", type=absolute, default="", help="also export the model, as export.py --to does"
    )
    home = os.path.expanduser  # a variable of the environment may hold "~"
    about = "where the run is saved (default: out-first, or out-exercises)"
    parser.add_argument("--out", type=home, default="", help=about)
    parser.add_argument("--venv", type=home, default=".venv", help="the environment's folder")
    args = parser.parse_args(argv[:split])
    # Before minutes of installing and training:
    if args.text and not any(map(os.path.getsize, matching(args.text))):
        sys.exit(
            f"error: cannot train on {args.text}: it is no file with text in it, or folder; is its "
            "name right?"
        )
    if args.to:
        try:
            check_unused(Path(args.to))
        except ValueError as e:
            sys.exit(f"error: {e}")
    os.chdir(ROOT)
    requirements = "requirements-dev.txt" if args.task in TASKS else "requirements.txt"
    python = install(ROOT / args.venv, requirements)
    if args.task == "train":
        train(python, args.text, args.out or "out-first", args.to, extra)
        return
    if args.task == "chat":
        chat(python, args.out or "out-exercises", extra)
        return
    first, *others = TASKS[args.task]
    run(python, *first, *extra)
    for command in others:
        run(python, *command)


def absolute(path: str) -> str:
    """Return the path from the root; nothing for no path."""
    return os.path.abspath(os.path.expanduser(path)) if path else ""


def matching(text: str) -> list[str]:
    """Return the path itself, or the files that it means as a pattern, such as src/*.py."""
    return [text] if os.path.exists(text) else sorted(glob.glob(text))


# ---- the first run -------------------------------------------------------------------------------

# Slower machines take few steps, which a lower momentum than the recipe's suits
# (docs/answers.md#recipes).
FAST = [
    "config/train_shakespeare_char_fast.py",
    "--eval_interval=200",
    "--eval_tokens=65536",
    "--max_iters=1600",
]
MINUTES = ["--max_minutes=3", "--sample_interval=2"]  # texts too: one sees it learn
SLOWER = ["--norm=layer", "--learning_rate=8e-3", "--momentum=0.85"]
# What other programs compute too. On a CPU the loss is about 0.05 higher
# (bench/results/2026-11-22-token-shift.md).
FOR_EXPORT = ["--token_shift=False", "--norm=rms"]
MATMULS = (
    "from deskgpt import compiling, device as d, peaks; d.limit_threads(); "
    "device = d.resolve_device('auto'); dtype = compiling.default_dtype(device); "
    "print(device.type, max(0.0, peaks.measured_matmul_flops(device, dtype) / 1e12))"
)


def first_model(device: str, tflops: float) -> list[str]:
    """Return the settings of three minutes on a device whose matmuls reach so many TFLOP/s.

    The limits are measured (bench/results/2026-11-22-first-run.md and
    2026-11-26-first-run-zen4.md).
    """
    if device == "cuda":
        return ["config/train_shakespeare_char.py"]
    if device == "mps" or tflops >= 0.7:
        return FAST
    layers = 3 if tflops >= 0.4 else 2 if tflops >= 0.1 else 1
    return [*FAST, f"--n_layer={layers}", *SLOWER]


def train(python: Path, text: str, out: str, to: str, extra: list[str]) -> None:
    """Prepare data, train a small model on it for about three minutes, which writes texts as it
    learns, and write its report.

    to: export the model there; then it is one that other programs have.
    """
    dataset = prepare(python, text)
    print0("measuring how fast this machine multiplies matrices")
    done = subprocess.run([str(python), "-c", MATMULS], stdout=subprocess.PIPE, text=True)
    # If this fails, train.py will say why.
    device, tflops = done.stdout.split() if done.returncode == 0 else ("cpu", "0")
    settings = first_model(device, float(tflops))
    if to and device != "cuda":  # whose model is a GPT-2
        settings = [*settings, *FOR_EXPORT]
    print0(f"matmuls reach {float(tflops):.2g} TFLOP/s on {device}")
    settings = [*settings, *MINUTES, f"--dataset={dataset}", f"--out_dir={out}", *extra]
    # Of a setting that is there twice, the last one counts.
    last = {word.partition("=")[0]: word for word in settings}
    # With large pages a step takes 0.9 of the time (bench/results/2026-11-29-small-models-cpu.md).
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    run(python, "train.py", *last.values())
    print0("the run's curves and texts, as a page for your browser:")
    call(python, "bench/report.py", out)
    if to:
        # Status 3: the export is written, but the program to compare it with is not there.
        run(python, "export.py", f"--out_dir={out}", f"--to={to}", accepted=3)


def chat(python: Path, out: str, extra: list[str]) -> None:
    """Train a model from nothing that answers questions, count its right answers to questions that
    it was never asked, and show a page to talk with it.
    """
    data = ROOT / "data" / "exercises"
    learned, asked = data / "exercises.jsonl", data / "test.jsonl"
    run(python, "data/chat/exercises.py", f"--out={learned}")
    form = ["--name=exercises", "--tokenizer=bytes", "--block_size=160"]
    run(python, "data/chat/prepare.py", learned, *form)
    run(python, "train.py", "config/train_exercises.py", f"--out_dir={out}", *extra)
    run(python, "data/chat/exercises.py", "--test", "--seed=2", "--number=2000", f"--out={asked}")
    run(python, "bench/accuracy.py", out, asked)
    print0("a page to talk with it, until Ctrl+C; the same command opens it again:")
    run(python, "sample.py", "--serve", f"--out_dir={out}")


def prepare(python: Path, text: str) -> str:
    """Prepare data and return its name: the text, else Shakespeare's plays, else the source code of
    Python.
    """
    if text:  # each text has a folder of its own: a run needs its data to resume
        files = sorted(path for path in Path(text).rglob("*") if path.is_file())
        files = files or [Path(path) for path in matching(text)]
        digests = "".join(file_sha256(path) for path in files)
        digest = digests if len(files) == 1 else sha256(digests.encode())
        name = f"{re.sub(r'[^A-Za-z0-9]+', '_', Path(text).stem)}_{digest[:8]}"
        run(python, "data/text/prepare.py", text, "--name", name)
        return name
    if (ROOT / "data" / "shakespeare_char" / "val.bin").exists():
        return "shakespeare_char"
    print0("preparing Shakespeare's plays: 1 MB to download unless it is here already")
    if call(python, "data/shakespeare_char/prepare.py") == 0:
        return "shakespeare_char"
    print0("No Shakespeare, see above: training on the source code of Python instead.")
    modules = Path(sysconfig.get_paths()["stdlib"]) / "*.py"
    run(python, "data/text/prepare.py", modules, "--name", "python_char")
    return "python_char"


# ---- the environment -----------------------------------------------------------------------------


def install(venv: Path, requirements: str) -> Path:
    """Return the environment's Python, with the packages of this file, installed again if the files
    have changed.
    """
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = "".join(
        (ROOT / f"{name}.txt").read_text()
        for name in ("constraints", "requirements", "requirements-dev")
    )
    for name in (requirements, "requirements-dev.txt"):  # the latter includes the former
        done = venv / f".installed-{name}"
        if python.exists() and done.exists() and done.read_text() == wanted:
            return python
    again = f"delete {venv} and start again, or name another folder: make VENV=.venv-2"
    os.environ["PIP_USER"] = "0"  # pip.conf of a shared machine may say 1, for its own Python
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT"):  # the environment is the place
        os.environ.pop(name, None)
    if not python.exists() and call(sys.executable, "-m", "venv", venv):
        sys.exit(f"error: {sys.executable} could not make an environment, see above; then {again}")
    pip = [str(python), "-m", "pip"]
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True)
    if listed.returncode and call(python, "-m", "ensurepip"):  # an environment of uv has no pip
        sys.exit(f"error: {venv} has no pip, see above: {again}")
    wheel, why = wheels.wheel_for(wheels.nvidia_gpu())
    print0(textwrap.fill(f"{why}. Installing {requirements} into {venv.name}", 79))
    command = [*pip, "install", "--disable-pip-version-check", "-r", requirements]
    if "index" not in listed.stdout and sys.platform != "darwin":  # unless the user has chosen one
        command += ["--extra-index-url", f"{wheels.INDEX}/{wheel}"]
    if call(*command, "-c", "constraints.txt", in_one_line=True):
        sys.exit(
            f"error: pip could not install {requirements}, see above; is there a network? "
            f"If so, {again}"
        )
    (venv / f".installed-{requirements}").write_text(wanted)
    return python


def run(*command: object, accepted: int = 0) -> None:
    """Print a command and run it; end this script with its exit status if that is neither 0 nor
    accepted.
    """
    words = [str(word).replace(str(ROOT) + os.sep, "") for word in command]
    print0(to_type("+ ", *words))
    code = call(*command)
    if code not in (0, accepted):
        sys.exit(128 - code if code < 0 else code)  # as a shell, if a signal ended it


def call(*command: object, in_one_line: bool = False) -> int:
    """Run a command and return its exit status. A kill of this process ends the command instead.

    in_one_line: show each line that it prints in place of the one before.
    """
    stdout = subprocess.PIPE if in_one_line else None
    process = subprocess.Popen([str(word) for word in command], stdout=stdout, text=True)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    for line in process.stdout or ():
        print0(f"\r{line.strip()[:78]:78}", end="")
    if in_one_line:
        print0()
    return process.wait()


if __name__ == "__main__":
    # Ctrl+C reaches the running command too: wait until it has saved and ended, then pass on its
    # status.
    signal.signal(signal.SIGINT, lambda *_: None)
    main(sys.argv[1:])
