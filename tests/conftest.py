"""What several test files share: a small data set, the real scripts as functions, and what is
skipped where.
"""

import functools
import gc
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from data.text.prepare import prepare
from deskgpt import cpu_kernels
from deskgpt.checkpoint import CKPT_BEST, load_checkpoint
from deskgpt.logger import read_events
from deskgpt.stopping import SIGNALS, signal_handler
from train import TrainConfig, main

ROOT = Path(__file__).resolve().parents[1]
SHAKESPEARE = ROOT.parent / "shared" / "data" / "shakespeare" / "input.txt"
BPE_CACHE = ROOT.parent / "shared" / "data" / "tiktoken_cache"
CPU = torch.device("cpu")
CUDA = torch.device("cuda")

# `make test` runs two tests at a time, and the waiting threads of two torches would take each
# other's cores.
os.environ["OMP_NUM_THREADS"] = "1"
# More would be processes, which import torch first.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
torch.set_num_threads(1)
hypothesis.settings.register_profile("whole", deadline=None)  # a slow machine fails no test
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = "1"
# As in a job in the background; the scripts would ignore it too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Whose workers share it, and the kernels that one of them compiles.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory()  # goes when the tests end
    # For what runs remember: the user's own files are left alone.
    os.environ["XDG_CACHE_HOME"] = _cache.name
if BPE_CACHE.is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(BPE_CACHE))

slow = pytest.mark.slow
nightly = pytest.mark.nightly
POSIX = pytest.mark.skipif(
    os.name == "nt", reason="needs fork, signals, a shell, modes, or files as POSIX has them"
)
needs_bpe = pytest.mark.skipif(
    "TIKTOKEN_CACHE_DIR" not in os.environ, reason="no TIKTOKEN_CACHE_DIR with GPT-2's BPE files"
)


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("quick" if "not slow" in config.option.markexpr else "whole")


@pytest.fixture(autouse=True)
def _each_test_compiles_anew():
    """Past eight models torch compiles no further one with the same code, which no run of its own
    ever meets.
    """
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
        spare_what_is_imported()


@functools.cache
def spare_what_is_imported() -> None:
    """Takes what is imported by now out of garbage collections: torch's compiler makes each of them
    take 0.2 s.
    """
    gc.collect()
    gc.freeze()


# A run of less than a second, as settings. The same on every machine: nothing is left to be chosen
# for the processor.
TINY: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "batch_size": 4}
TINY |= {"gradient_accumulation_steps": 1, "learning_rate": 1e-2, "warmup_iters": 2, "max_iters": 6}
TINY |= {"eval_interval": 3, "eval_iters": 2}
TINY |= {"compile": False, "device": "cpu", "dtype": "float32", "cpu_kernels": False}


def tiny(data: Path, out_dir: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(**(TINY | {"dataset": str(data), "out_dir": str(out_dir)} | settings))


def run_tiny(data: Path, out_dir: Path, **settings: Any) -> float:
    """Train as `tiny` says. Return what main returns."""
    return main(tiny(data, out_dir, **settings))


def flags(**settings: Any) -> list[str]:
    return [f"--{k}={v}" for k, v in settings.items()]


@pytest.fixture(params=["torch", "C++"])
def kernels(request):
    """The kernels of a run: torch's, and ours."""
    if request.param == "C++":
        if not cpu_kernels.is_supported_platform():
            pytest.skip("our kernels are for Linux on a processor with AVX2 or AVX-512")
        cpu_kernels.load()
    yield
    cpu_kernels.unload()


@dataclass
class Finished:
    code: int
    out: str
    err: str


@pytest.fixture
def script(capfd, monkeypatch):
    """Runs a script of the repository as `python SCRIPT ARGS` does, in this process: torch is
    imported already.
    """

    def run(path: str, *args: str | Path) -> Finished:
        monkeypatch.setattr(sys, "argv", [path, *map(str, args)])
        monkeypatch.chdir(ROOT)
        capfd.readouterr()
        code: Any = 0
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as e:
            code = e.code or 0
        finally:
            signal.set_wakeup_fd(-1)
            signal_handler.installed_at = None  # main may run in this process later on
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Finished(code, *capfd.readouterr())

    return run


def assert_one_line(message: object, *named: object) -> None:
    """An error that a user can cause is one line, and names the value, the file and the remedy."""
    line = str(message).strip()
    assert line
    assert "\n" not in line
    assert "Traceback" not in line
    for part in named:
        assert str(part) in line, f"{line!r} does not name {part}"


@contextmanager
def raises_one_line(*named: object, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Expect an error of one line that names these."""
    with pytest.raises(kind) as e:
        yield
    assert_one_line(e.value, *named)


def fails(done: Finished, *named: object, code: int = 1) -> None:
    """A script ended with this status and one line of error that names these."""
    assert done.code == code, done
    assert_one_line(done.err, "error: ", *named)


def assert_refused(done: Finished, *named: object) -> None:
    """A script refused its arguments."""
    fails(done, *named, code=2)


def shell(*command: object, code: int = 0, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command, which must end with this status, from the repository's root; its first word
    may be "python".
    """
    words = [sys.executable if w == "python" else str(w) for w in command]
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(words, **(options | kwargs))
    assert done.returncode == code, f"{words}\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture
def begin():
    """Return a function that starts commands from the repository's root, which end with the
    test.
    """
    processes = []

    def start(terminal, *command, **environ):
        env = os.environ | environ
        with open(terminal, "a") as file:
            processes.append(
                subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=env)
            )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    """Wait until this is true, for two minutes at most."""
    latest = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.005)


@contextmanager
def files_of_at_most(kib: int) -> Iterator[None]:
    """As on a full disk: writing further fails."""
    resource = pytest.importorskip("resource")  # which Windows lacks
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kib * 1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def copy_of_repository(folder: Path) -> Path:
    """Copy the repository into a folder, without its history and what git ignores.

    Return the copy.
    """
    ignored = shutil.ignore_patterns(
        ".*", "out", "out-*", "wandb", "__pycache__", "*.bin", "meta.*", "input.txt"
    )
    return Path(shutil.copytree(ROOT, folder / "deskgpt", ignore=ignored))


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def events(out_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in out_dir/log.jsonl."""
    return [e for e in read_events(out_dir / "log.jsonl") if e["event"] == kind]


def logged(out_dir: Path, kind: str, name: str = "iter") -> list[Any]:
    """One field of the events of one kind in out_dir/log.jsonl."""
    return [e[name] for e in events(out_dir, kind)]


def weights(out_dir: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(out_dir).model


def assert_equal(a: Any, b: Any) -> None:
    """Nested containers with the very same numbers in them."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a:
            assert_equal(a[k], b[k])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def trajectory(out_dir: Path) -> dict[str, Any]:
    """What a run computed, by event and step; times left out, steps computed twice must agree."""
    names = {
        "iter": ("loss", "lr", "grad_norm", "tokens"),
        "eval": ("train_loss", "val_loss", "lr"),
    }
    out: dict[str, Any] = {"iter": {}, "eval": {}}
    for kind, steps in out.items():
        for e in events(out_dir, kind):
            values = {name: e[name] for name in names[kind]}
            assert steps.setdefault(e["iter"], values) == values
    return out


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs computed the same to the last bit, and so did what their last and best checkpoints
    hold.
    """
    assert trajectory(one) == trajectory(other)
    for paths in ((one, other), (one / CKPT_BEST, other / CKPT_BEST)):
        a = load_checkpoint(paths[0])
        b = load_checkpoint(paths[1])
        assert_equal(dict(a.model), dict(b.model))
        # The learning rate is set anew at each step.
        assert_equal(a.optimizer["state"], b.optimizer["state"])
        for field in ("model_args", "scaler", "iter_num", "best_val_loss"):
            assert_equal(getattr(a, field), getattr(b, field))


def vector(out_dir: Path) -> torch.Tensor:
    """All weights in one."""
    return torch.cat([w.flatten() for w in weights(out_dir).values()])


@pytest.fixture(scope="session")
def text():
    """Tiny Shakespeare where it is at hand, else as many characters of Python's standard
    library.
    """
    if SHAKESPEARE.exists():
        return SHAKESPEARE.read_text()
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "".join(path.read_text("ascii", "ignore") for path in modules)[:1_115_394]


@pytest.fixture(scope="session")
def chars(text, tmp_path_factory):
    """A folder of character token files."""
    folder = tmp_path_factory.mktemp("data") / "chars"
    prepare(text, folder, "char", "test text")
    return folder


@pytest.fixture(scope="session")
def documents(text):
    """About 300 texts of very different lengths, one of them longer than a task of the tokenizing
    threads.
    """
    draw, at, out = random.Random(1), 0, [text[:600_000] * 2]
    while at < 600_000:
        n = int(draw.paretovariate(1.1) * 400)
        out.append(text[at : at + n])
        at += n
    return [*out, "ünïcödé 🧀\u2028" * 50, "<|endoftext|>\n<|endoftext|>"]


class Code:
    """Make a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def corrupted(content: bytes, draw: random.Random) -> bytes:
    """Other bytes: with a flipped bit, or a piece that is missing, twice there, zero or noise; or
    cut short there.
    """
    at = draw.randrange(len(content))
    piece = content[at : at + draw.choice((1, 2, 8, 512))]
    flipped = bytes([piece[0] ^ 1 << draw.randrange(8)]) + piece[1:]
    n = len(piece)
    new = draw.choice((flipped, flipped, b"", piece * 2, bytes(n), draw.randbytes(n)))
    rest = content[at + n :] if draw.randrange(5) else b""
    out = content[:at] + new + rest
    return out if out != content else corrupted(content, draw)
