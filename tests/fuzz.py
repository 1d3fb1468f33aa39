"""Feeds odd input to everything here that reads what users and strangers write, and counts what comes of it.

    python tests/fuzz.py --cases=100000
    python tests/fuzz.py --only=checkpoints --cases=5000 --seed=3

Each target makes cases (arguments, config files, logs, token files, meta.json, meta.pkl, checkpoints), valid ones with
odd values as well as damaged bytes, and does with each what the scripts do with it, in this process. A case is read, or
refused as users see it: one line on stderr, raised on purpose by our own code, and an exit status. Everything else
is a defect: another exception, an accidental message, a crash, 10 s of processor time, 150 MB of memory.
Bytes that were damaged, read without a word and came out different are "silent". That too is a defect where the
file's own checksum, or one in meta.json, could have told.

Prints a line for each target, then each defect with the smallest case that hypothesis finds for it. The exit status is
1 if there is a defect.
"""

from __future__ import annotations

import ctypes
import dis
import faulthandler
import io
import itertools
import json
import math
import mmap
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from logs import TIMES, log, nanogpt

import train
from bench import compare, report
from bench.analysis import page
from bench.analysis.arms import letters
from bench.analysis.logs import read_run
from bench.analysis.runs import FACTS, complete
from bench.loss import LossConfig
from configurator import build, configure
from data.splits import Split
from data.token_files import HEADER_BYTES, MAGIC, VERSION, read_meta, write_dataset, write_meta, write_tokens
from data.tokenizer import BytesTokenizer, CharTokenizer, from_meta, padded_vocab_size
from data.verify import Verification
from deskgpt.checkpoint import store
from deskgpt.compute import forms
from deskgpt.compute.batching import Batching
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.compute.ranks import Ranks
from deskgpt.compute.runner import Form, Runner
from deskgpt.machine import hardware
from deskgpt.machine.errors import ROOT, one_line_errors
from deskgpt.machine.files import file_sha256
from deskgpt.run.run import Run
from model import GPT, GPTConfig
from sample import SampleConfig
from train import TrainConfig

BATCH = 1000  # cases in one child process: hypothesis remembers all of a batch, and a crash ends one
SLOW_S = 10  # processor time of a case that counts as a defect
STUCK_S = 120  # after which a case that waits for something is killed
LARGE = 150 * 2**20  # bytes of memory of a case that count as a defect
MOST = 2 * 2**30  # bytes that a child process may take beyond what it begins with
SHOWN = 60_000  # bytes of a case's repr that survive a crash
IN_MEMORY = "/dev/shm"  # for files, where there is such a folder: a disk is slow beside other work
LONGEST = 1500  # characters of a case that are printed


@dataclass
class FuzzConfig:
    cases: int = 5000  # of each target
    only: str = ""  # the name of one target; empty = all
    seed: int = 0  # the same cases again

    def __post_init__(self) -> None:
        if self.cases < 1:
            raise ValueError(f"cases={self.cases} must be at least 1")
        if self.only and self.only not in TARGETS:
            raise ValueError(f"only={self.only} is not one of {', '.join(TARGETS)}")


@dataclass(frozen=True)
class Target:
    """Something that reads files or words."""

    cases: SearchStrategy[Any]
    read: Callable[[Any], bool]  # does with a case what the scripts do; whether it was damaged, and read as if not
    has_checksum: bool = True  # False: nothing could tell damaged bytes, so silent ones are counted but no defects


# ---- one case ------------------------------------------------------------------------------------------------

READ = "read"
REFUSED = "refused"
SILENT = "silent"


class Slow(BaseException):
    """A case takes too long. Not an Exception, so that nobody takes it for one of a damaged file."""


def outcome(target: Target, case: Any) -> str:
    """READ, REFUSED, SILENT, or what is wrong."""
    errors = io.StringIO()
    forget_peak()  # which may be from before this process gave memory back
    before = peak_bytes()
    try:
        with limited_time(), redirect_stderr(errors), redirect_stdout(io.StringIO()), one_line_errors():
            found = SILENT if target.read(case) else READ
    except SystemExit as e:
        found = refusal(e, errors.getvalue())
    except Slow as e:
        found = f"takes more than {SLOW_S} s {place(e)}"
    except Exception as e:
        found = f"{type(e).__name__} {place(e)}"
    taken = peak_bytes() - before
    if taken > LARGE:
        return f"takes memory, and is {found}"
    return found


def refusal(e: SystemExit, printed: str) -> str:
    """REFUSED for an end with one line that was written on purpose, and for --help; else what is wrong."""
    if e.code == 0:
        return REFUSED
    cause = e.__context__
    if not isinstance(cause, Exception):
        return f"SystemExit({e.code!r}) {place(e)}"
    if isinstance(cause, MemoryError) or "out of memory" in printed:
        return f"out of memory {place(cause)}"
    if len(printed.splitlines()) != 1:
        return f"message of {len(printed.splitlines())} lines {place(cause)}"
    if isinstance(cause, ValueError) and not raised_on_purpose(cause):
        return f"accidental {type(cause).__name__} {place(cause)}"
    return REFUSED


def raised_on_purpose(e: BaseException) -> bool:
    """Whether a raise statement raised e, and not a call such as int("x")."""
    frame = e.__traceback__
    assert frame is not None
    while frame.tb_next:
        frame = frame.tb_next
    return frame.tb_frame.f_code.co_code[frame.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def place(e: BaseException) -> str:
    """The last line of ours that e came through, without this file's."""
    for frame in reversed(traceback.extract_tb(e.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(ROOT) and "site-packages" not in file.parts and file.name not in (NAME, "errors.py"):
            return f"at {file.relative_to(ROOT).as_posix()}:{frame.lineno}"
    return "in a library"


NAME = Path(__file__).name


@contextmanager
def limited_time() -> Iterator[None]:
    """Raises Slow in the block after SLOW_S of processor time, where the system has such clocks."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Slow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SLOW_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def peak_bytes() -> int:
    """The most memory that this process has had; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Lets peak_bytes begin again. Only Linux can; elsewhere it takes more memory than ever to be seen again."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# ---- many cases ----------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of many cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # the repr of a case, by what was wrong with it
    seeds: dict[str, int] = field(default_factory=dict)  # of the batch in which that was
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        self.outcomes += other.outcomes
        self.examples = other.examples | self.examples
        self.seeds = other.seeds | self.seeds
        self.seconds += other.seconds

    def cases(self) -> int:
        return self.outcomes.total()

    def defects(self, target: Target) -> list[str]:
        fine = {READ, REFUSED} if target.has_checksum else {READ, REFUSED, SILENT}
        return [kind for kind in self.outcomes if kind not in fine]


class Board:
    """Memory that a child process shares with this one: what the child wrote last survives its crash."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 64 * SHOWN)

    def write(self, value: Any) -> None:
        content = pickle.dumps(value)
        if len(content) + 8 <= len(self.memory):
            self.memory[: len(content) + 8] = len(content).to_bytes(8, "little") + content

    def read(self) -> Any:
        size = int.from_bytes(self.memory[:8], "little")
        return pickle.loads(self.memory[8 : 8 + size]) if size else None


def fuzz(name: str, cases: int, seed: int = 0) -> tuple[Target, Tally]:
    """What comes of this number of cases of a target. Its defects have the smallest examples."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None) as tmp:
        target = TARGETS[name](Path(tmp))
        return target, fuzz_target(target, cases, seed)


def fuzz_target(target: Target, cases: int, seed: int) -> Tally:
    whole = Tally()
    while whole.cases() < cases:
        n = min(BATCH, cases - whole.cases())
        t0 = time.perf_counter()
        found = batch(target, n, seed)
        found.seconds = time.perf_counter() - t0
        found.seeds = dict.fromkeys(found.examples, seed)
        whole.add(found)
        if found.cases() == 0:  # all that can be made are made
            break
        seed += 1
    for kind in whole.defects(target):
        if "killed" not in kind and "takes" not in kind:
            smaller = batch(target, BATCH, whole.seeds[kind], until=kind)
            whole.examples |= {k: v for k, v in smaller.examples.items() if k == kind}
    return whole


def batch(target: Target, cases: int, seed: int, until: str = "") -> Tally:
    """What comes of a batch of cases, in a child process where the system can fork.

    until: what is wrong with the case that hypothesis shall make smaller; its example is then the smallest found.
    """
    board = Board()

    def work() -> None:
        tally = Tally()

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=cases,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=list(hypothesis.HealthCheck),
            report_multiple_bugs=False,
        )
        @hypothesis.given(target.cases)
        def each(case: Any) -> None:
            if can_fork():
                board.write((tally, repr(case)[:SHOWN]))
                signal.alarm(STUCK_S)
            found = outcome(target, case)
            tally.outcomes[found] += 1
            if found == until or (found not in (READ, REFUSED) and found not in tally.examples):
                tally.examples[found] = repr(case)[:SHOWN]
            if found == until:
                raise AssertionError(found)

        with warnings.catch_warnings(), suppress(AssertionError):
            warnings.simplefilter("ignore")
            each()
        board.write((tally, ""))

    status = run_apart(work)
    tally, last = board.read() or (Tally(), "")
    if status:
        kind = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended the process with {status}"
        tally.outcomes[kind] += 1
        tally.examples[kind] = last
    return tally


def can_fork() -> bool:
    return hasattr(os, "fork")


def run_apart(work: Callable[[], None]) -> int:
    """Runs work in a forked process of limited memory; returns its exit status, minus the signal that killed it.

    Where the system cannot fork, it runs in this process.
    """
    if not can_fork():
        work()
        return 0
    sys.stdout.flush()
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    status = 1
    faulthandler.disable()  # pytest's would print a page for each crash
    try:
        give_back_freed_memory()
        limit_memory()
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def give_back_freed_memory() -> None:
    """Otherwise a case could take what hardware.keep_freed_memory has kept here, and nothing would show."""
    with suppress(OSError, AttributeError):  # glibc has this function
        ctypes.CDLL(None).malloc_trim(0)


def limit_memory() -> None:
    """Lets this process take MOST beyond what it has, where the system says what that is."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        has = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + MOST, resource.getrlimit(resource.RLIMIT_AS)[1]))


# ---- odd values ----------------------------------------------------------------------------------------------

share = st.binary(min_size=4, max_size=4)  # where in a file; bytes, because hypothesis does not draw integers evenly
damage = st.lists(
    st.tuples(
        st.sampled_from(["flip", "flip", "cut", "insert", "repeat", "swap", "zero"]),
        share,
        st.integers(0, 255),
        st.integers(1, 64),
    ),
    min_size=1,
    max_size=3,
)
odd_texts = st.one_of(
    st.text(st.characters(), max_size=20),  # lone surrogates too
    st.sampled_from(
        ["", "\0", "\n", "a\nb", "\ud800", "🧀", "None", "nan", "-inf", "1e999", "True", "' '", "../..", "-"]
    ),
    st.sampled_from(["0" * 5000, "1" + "0" * 400, "(" * 5000, "[" * 300 + "]" * 300, "-" * 3000 + "1", "x" * 70_000]),
    st.sampled_from(["{[]: 1}", "{{}}", "1j", "b'x'", "10**9", "1_0", "0x10", "1e400", "-1", "0", "٣", "²", "1,", "*"]),
)
odd_numbers = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.floats(),
    st.sampled_from([10**12, 2**31, 2**63 - 1, 2**63, 10**30, 10**309, -(10**400), 1e308, 5e-324, -0.0, 1e-30]),
)
odd_json = st.recursive(
    st.none() | st.booleans() | odd_numbers | odd_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_texts, inner, max_size=3),
    max_leaves=5,
)


def place_of(where: bytes, length: int) -> int:
    """The index, below length, that a drawn `share` stands for."""
    return int.from_bytes(where, "big") * length >> 32


def damaged(content: bytes, edits: list[tuple[str, bytes, int, int]]) -> bytes:
    """content with some bytes flipped, cut off, inserted, repeated, swapped with later ones or set to zero."""
    for kind, where, value, length in edits:
        at = place_of(where, len(content))
        head, part, tail = content[:at], content[at : at + length], content[at + length :]
        if kind == "flip":
            content = content[:at] + bytes([content[at] ^ (1 << value % 8)]) + content[at + 1 :] if content else b""
        elif kind == "cut":
            content = head
        elif kind == "insert":
            content = head + bytes([value]) * length + part + tail
        elif kind == "repeat":
            content = head + part + part + tail
        elif kind == "swap":
            content = head + tail[:length] + part + tail[length:]
        elif kind == "zero":
            content = head + bytes(len(part)) + tail
    return content


# ---- the command line and config files -----------------------------------------------------------------------

SCRIPTS = (TrainConfig, TrainConfig, SampleConfig, LossConfig)


def use(settings: Any) -> None:
    """What follows from settings before there is data or a model."""
    if not isinstance(settings, TrainConfig):
        return
    c = settings
    for step in (0, 1, 7, c.warmup_iters, c.max_iters - 1, c.max_iters, c.lr_decay_iters, 10**6):
        if step >= 0:
            train.learning_rate(c, step)
    GPTConfig.from_settings(c, 256)
    batching = Batching.of(asdict(c))
    assert batching.tokens_per_step == batching.sequences * c.block_size
    store.folder_of(c.out_dir)
    hardware.resolve_device(c.device)


def setting_names(cls: type) -> SearchStrategy[str]:
    return st.sampled_from([f.name for f in fields(cls)])


def settings_of(cls: type) -> SearchStrategy[tuple[str, Any]]:
    """The name of a setting and a value of its type, which may be out of range."""
    values = {int: st.integers(0, 2000) | odd_numbers, float: st.floats(0, 1) | odd_numbers, bool: st.booleans()}
    pairs = []
    for name, kind in get_type_hints(cls).items():
        if get_origin(kind) is Literal:
            value: SearchStrategy[Any] = st.sampled_from(get_args(kind))
        else:
            value = values.get(get_args(kind)[0] if get_args(kind) else kind, odd_texts)
        pairs.append(st.tuples(st.just(name), value))
    return st.one_of(pairs)


def arguments(folder: Path) -> Target:
    def of(cls: type) -> SearchStrategy[tuple[type, list[str]]]:
        fits = settings_of(cls).map(lambda pair: f"--{pair[0]}={pair[1]}")
        setting = st.builds("--{}={}".format, setting_names(cls), odd_texts)
        file = st.sampled_from(
            ["config/train_shakespeare_char.py", "config/nothing.py", ".", "/", "config", "a" * 5000]
        )
        odd = st.builds("{}{}".format, st.sampled_from(["", "-", "--", "--=", "--seed", "--seed="]), odd_texts)
        odd_word = setting | odd | file | st.sampled_from(["-h", "--help"])
        words = st.lists(fits, max_size=3)
        return st.tuples(st.just(cls), words | st.builds(lambda some, one: [*some, one], words, odd_word))

    def read(case: tuple[type, list[str]]) -> bool:
        use(configure(*case))
        return False

    return Target(st.one_of([of(cls) for cls in SCRIPTS]), read)


# The class of values whose text nobody can print, at the beginning of a config file.
ODD_CLASS = "class Odd:\n    def __repr__(self): raise RuntimeError('no text\\nof mine')\n"
ODD_SOURCES: tuple[str, ...] = ("{1, 2}", "b'x'", "1j", "10**5000", "-10**400", "float('nan')", "[0] * 10**5")
ODD_SOURCES += ("Odd()", "[Odd()]", "'a\\nb'", "(1,\n 2)", "[" * 90 + "]" * 90, "(" * 300 + ")" * 300, "lambda: 0")
ODD_SOURCES += ("-" * 3000 + "1", "__import__('os')", "nothing", "1/0", "[][1]", "open('')", "''.join(['\\ud800'])")
ODD_SOURCES += ("range(3)", "object()")
ODD_LINES: tuple[str, ...] = ("raise ValueError('a\\nb')", "raise SystemExit(3)", "exit()", "import nothing", "x: int")
ODD_LINES += ("def", "  x = 1", "\tx = 1", "# -*- coding: nothing -*-", "\0", "\ud800", "seed += 1", "'''", "\\")
ODD_LINES += ("assert False", "raise KeyError", "globals()[3] = 4", "class seed: pass", "for seed in (1, 2): pass")
ODD_LINES += ("from x import", "del seed")


def configs(folder: Path) -> Target:
    path = folder / "config.py"
    files = [p.read_text() for p in sorted((ROOT / "config").glob("*.py"))]
    values = st.sampled_from(ODD_SOURCES) | st.builds(repr, odd_numbers) | st.builds(repr, odd_texts)
    names = setting_names(TrainConfig) | st.sampled_from(["_own", "nothing", "ünicode", "a-b", "None"])
    fits = settings_of(TrainConfig).map(lambda pair: f"{pair[0]} = {pair[1]!r}")
    odd = st.builds("{} = {}".format, names, values) | st.sampled_from(ODD_LINES)
    lines = st.lists(fits | fits | odd, min_size=1, max_size=4)
    made = st.builds("\n".join, lines).map(lambda text: (ODD_CLASS + text).encode("utf-8", "surrogatepass"))
    # A config file is code: no change may make it compute forever, and "**" could.
    changed = st.builds(lambda text, edits: damaged(text.encode(), edits), st.sampled_from(files), damage)
    changed = changed.map(lambda content: content.replace(b"**", b"*"))

    def read(content: bytes) -> bool:
        path.write_bytes(content)
        use(configure(TrainConfig, [str(path)]))
        return False

    return Target(made | changed, read)


# ---- logs ----------------------------------------------------------------------------------------------------

NANOGPTS = ROOT.parent / "shared" / "data" / "nanogpt_logs" / "fineweb_33m_rtx4070.txt"
PAGES = 50  # one case in so many makes a whole page: plotly is slow
NUMBER = re.compile(r"-?\d[\d.,e+-]*")


def tiny_run(folder: Path) -> str:
    """What a run of a tiny model prints; it leaves its log and checkpoint in folder/out."""
    ids = BytesTokenizer().encode("a tiny model reads this again and again. " * 8)
    write_dataset(folder / "data", {"train": ids, "val": ids[:80]}, BytesTokenizer(), "fuzz")
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 4, "block_size": 8, "batch_size": 2}
    sizes |= {"max_iters": 4, "eval_interval": 2, "eval_iters": 2, "gradient_accumulation_steps": 1}
    machine = {"compile": False, "device": "cpu", "dtype": "float32"}
    given = sizes | machine | {"dataset": str(folder / "data"), "out_dir": str(folder / "out")}
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()):
        train.main(TrainConfig(**given))
    return printed.getvalue()


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys on the way to each value in nested dictionaries and lists."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_in(inner, (*path, key))


def copied(value: Any) -> Any:
    """Nested dictionaries and lists anew, with the same values in them."""
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    """Replaces what is at a path, if it is still there."""
    with suppress(LookupError, TypeError, AttributeError):
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = new


def changed_log(text: str, edits: list[tuple[Any, ...]]) -> bytes:
    """A log with some of its lines changed."""
    lines = text.splitlines()
    for kind, where, key, value in edits:
        if not lines:
            break
        at = 0 if kind == "start" else place_of(where, len(lines))  # facts and settings are at the start
        if kind in ("field", "start"):
            with suppress(ValueError, RecursionError):
                event = json.loads(lines[at])
                put(event, key, value)
                lines[at] = json.dumps(event)
        elif kind == "number":
            numbers = list(NUMBER.finditer(lines[at]))
            if numbers:
                found = numbers[where[0] % len(numbers)]
                lines[at] = lines[at][: found.start()] + value + lines[at][found.end() :]
        elif kind == "line":
            lines[at] = value
        elif kind == "drop":
            del lines[at]
        elif kind == "repeat":
            lines.append(lines[at])
        elif kind == "tear":
            lines[at] = lines[at][: where[1]]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def logs(folder: Path) -> Target:
    texts = [tiny_run(folder), (folder / "out" / "log.jsonl").read_text()]
    texts += [nanogpt(TIMES, (0, 40, 80), 200.0)]
    texts += [NANOGPTS.read_text()] if NANOGPTS.exists() else []
    val = {i: 4 - i / 40 for i in range(0, 24, 2)}
    text: dict[str, Any] = {"val_text": "abc", "val_text_bytes": 5000, "val_bytes": 4900, "bytes_per_token": 2.0}
    for tokenized, seed, batch_size in itertools.product((False, True), (1, 2), (4, 8)):  # twice two arms of two runs
        of_text = text | {"val_sha256": str(batch_size)} if tokenized else {}
        made = log(folder / "made", val, 90.0 + seed, seed=seed, batch_size=batch_size, **of_text)
        texts.append(Path(made, "log.jsonl").read_text())
    events = [json.loads(line) for text in texts if text[0] == "{" for line in text.splitlines()]
    paths = sorted({path for event in events for path in paths_in(event)}, key=str)

    huge = st.sampled_from(["9" * 400, "9" * 5000, ",,", "-1", "0", "1e-320", "1e308", "nan", "inf", "1.2.3", "1" * 16])
    deep = st.sampled_from(
        ["[" * 100_000, "data: " + "," * 100_000, '{"event": "iter", "iter": ' + "9" * 5000 + "}", '{"event": []}']
    )
    echo = st.builds("{} = {}".format, setting_names(TrainConfig), odd_texts | st.sampled_from(ODD_SOURCES))
    edit = st.one_of(
        st.tuples(st.just("field"), share, st.sampled_from(paths), odd_json),
        st.tuples(st.just("start"), share, st.sampled_from(paths), odd_json),
        st.tuples(st.just("number"), share, st.none(), huge | st.builds(str, st.floats())),
        st.tuples(st.just("line"), share, st.none(), odd_texts | deep | echo | st.builds("{} * {}".format, echo, huge)),
        st.tuples(st.sampled_from(["drop", "repeat", "tear"]), share, st.none(), st.none()),
    )
    flips: SearchStrategy[Any] = st.just([]) | st.just([]) | damage
    one = st.tuples(st.integers(0, len(texts) - 1), st.lists(edit, max_size=4), flips)
    in_nats, in_bits = [
        st.tuples(
            *[st.tuples(st.just(len(texts) - 1 - n), st.lists(edit, max_size=2), flips) for n in range(last, last + 4)]
        )
        for last in (4, 0)
    ]
    word = st.builds("{}={}".format, setting_names(TrainConfig) | st.sampled_from([*FACTS, "x", ""]), odd_texts)
    words: SearchStrategy[Any] = st.just([]) | st.just([]) | st.lists(word, max_size=2)
    case = st.tuples(
        st.lists(one, min_size=1, max_size=3) | in_nats | in_bits,
        words,
        st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=2),
    )

    def read(case: Any) -> bool:
        written, given, levels = case
        runs = []
        for number, (base, edits, flips) in enumerate(written):
            is_ours = texts[base][0] == "{"
            path = folder / f"{number}" / ("log.jsonl" if is_ours else "log.txt")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(damaged(changed_log(texts[base], edits), flips))
            runs.append(read_run(str(path)))
        compare.add_given(dict(zip(letters(len(runs)), runs, strict=True)), given, [])
        for run in runs:
            complete(run)
        tables, lines, figures = compare.compare(runs, levels)
        json.dumps(figures)
        for table in tables:
            compare.as_markdown(table)
        described = [report.describe(run) for run in runs]
        for run in runs:
            page.loss_traces(0, run)
        page.loss_range(runs)
        page.time_unit(runs)
        of_one = described[0]
        headlines = [d.headline for d in described]
        page.parts_html("fuzz", runs, [*tables, *of_one.tables], lines, [], of_one.about, headlines)
        if zlib.crc32(repr(case).encode("utf-8", "replace")) % PAGES == 0:
            page.page("fuzz", runs, [*tables, *of_one.tables], lines, [], of_one.about, headlines)
        return False

    return Target(case, read)


# ---- data ----------------------------------------------------------------------------------------------------

BLOCK = 8


def tokens(folder: Path) -> Target:
    ids = {"train": np.arange(300, dtype=np.uint16) % 256, "val": np.arange(100, dtype=np.uint16) % 251}
    bare = folder / "bare"
    headed = folder / "headed"
    meta = write_dataset(bare, ids, BytesTokenizer(), "fuzz")
    headed.mkdir()
    for split, of_split in ids.items():
        path = headed / f"{split}_000000.bin"
        write_tokens(path, of_split, header=True)
        entry = {"tokens": len(of_split), "sha256": file_sha256(path)}
        write_meta(headed, meta | {"files": {**read_files(headed), path.name: entry}})
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("*/*")}
    undamaged = {data: read_data(data) for data in (bare, headed)}
    binaries = sorted(name for name in contents if name.endswith(".bin"))

    head = st.tuples(*[st.sampled_from([MAGIC, VERSION, 300, -1]) | st.integers(-(2**31), 2**31 - 1)] * 3)
    odd_head = st.tuples(head, st.integers(0, 2000)).map(
        lambda made: np.array(made[0], "<i4").tobytes() + bytes(made[1] + HEADER_BYTES - 12)
    )
    case = st.tuples(st.sampled_from(binaries), damage | odd_head | st.binary(max_size=100))

    def read(case: tuple[str, Any]) -> bool:
        name, change = case
        is_damage = isinstance(change, list)
        content = damaged(contents[name], change) if is_damage else change
        path = folder / name
        path.write_bytes(content)
        try:
            found = read_data(path.parent)
        finally:
            path.write_bytes(contents[name])
        return is_damage and found != undamaged[path.parent]

    return Target(case, read)


def read_files(folder: Path) -> dict[str, Any]:
    """The files that meta.json lists, {} without one."""
    path = folder / "meta.json"
    return json.loads(path.read_text())["files"] if path.exists() else {}


def read_data(folder: Path) -> dict[str, str]:
    """The fingerprints of both splits' tokens, read as training does from scratch."""
    meta = read_meta(folder)
    out = {}
    for split in ("train", "val"):
        opened = Split(folder, split, BLOCK, padded_vocab_size(meta["tokenizer"], meta["vocab_size"]))
        opened.train_batch(0, np.arange(4), 4)
        opened.train_batch(10**6, np.arange(4), 4)
        opened.eval_batch(np.arange(4), opened.n_eval_windows(10**6))
        Verification(folder, [opened]).check()
        out[split] = opened.fingerprint()
    return out


def use_description(folder: Path) -> dict[str, Any]:
    """What training and sampling do with a data folder's description; returns it."""
    meta = read_meta(folder)
    padded_vocab_size(meta["tokenizer"], meta["vocab_size"])
    if meta["tokenizer"]:
        from_meta(meta["tokenizer"])
        Split(folder, "train", BLOCK, meta["vocab_size"], document_start=meta["end_of_text"]).train_batch(
            3, np.arange(4), 4
        )
    return meta


TEXT = "So shaken as we are, so wan with care, find we a time for frighted peace to pant: ünïcödé 🧀"


def meta_json(folder: Path) -> Target:
    tokenizer = CharTokenizer.of(TEXT)
    ids = tokenizer.encode(TEXT)
    write_dataset(folder, {"train": ids, "val": ids}, tokenizer, "fuzz")
    path = folder / "meta.json"
    content = path.read_bytes()
    undamaged = read_meta(folder)
    # Of a stranger, who would make the right checksum too: without any, as in older folders.
    plain = {"tokenizer": tokenizer.meta(), "vocab_size": tokenizer.vocab_size, "source": "x", "end_of_text": None}
    plain["files"] = json.loads(content)["files"]
    own = plain | {"tokenizer": {"name": "bpe", "merges": "Ġ t\nh e\nĠt he"}, "vocab_size": 260}
    odd_merges = st.lists(st.text("Ġthe \n\u0143é", max_size=6), max_size=5).map("\n".join)
    change = st.tuples(st.sampled_from([*paths_in(plain), *paths_in(own)]), odd_json)
    change |= st.tuples(st.just(("tokenizer", "merges")), odd_merges)
    bases = {"plain": plain, "own": own}
    of_stranger = st.tuples(st.sampled_from([*bases]), st.lists(change, min_size=1, max_size=2))
    case = damage | of_stranger | st.tuples(odd_json)

    def read(case: Any) -> bool:
        if isinstance(case, list):
            changed = damaged(content, case)
        elif len(case) == 2:
            made = copied(bases[case[0]])
            for where, value in case[1]:
                put(made, where, value)
            changed = json.dumps(made).encode()
        else:
            changed = json.dumps(case[0]).encode()
        path.write_bytes(changed)
        found = use_description(folder)
        return isinstance(case, list) and found != undamaged

    return Target(case, read)


# Parts of pickles: opcodes with odd arguments.
OPCODES = [
    b")",
    b"]",
    b"}",
    b"(",
    b"a",
    b"s",
    b"u",
    b"e",
    b"0",
    b"1",
    b"2",
    b".",
    b"t",
    b"l",
    b"d",
    b"N",
    b"\x88",
    b"K\5",
]
OPCODES += [
    b"M\xff\xff",
    b"J\xff\xff\xff\xff",
    b"\x8a\x04\xff\xff\xff\x7f",
    b"\x8b\xff\xff\xff\x7f",
    b"G" + b"\x7f" * 8,
]
OPCODES += [b"X\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 7 + b"\0", b"\x8d" + b"\xff" * 8, b"B\xff\xff\xff\x7f", b"U\1a"]
OPCODES += [
    b"q\0",
    b"h\0",
    b"r\xff\xff\xff\x7f",
    b"j\xff\xff\xff\x7f",
    b"p99999999\n",
    b"g1\n",
    b"\x94",
    b"I1\n",
    b"I01\n",
]
OPCODES += [
    b"L9999L\n",
    b"F1e999\n",
    b"Va\\ud800\n",
    b"S'a'\n",
    b"cos\nsystem\n",
    b"\x93",
    b"R",
    b"b",
    b"\x81",
    b"\x92",
    b"\x82\1",
]
OPCODES += [
    b"\x95" + b"\xff" * 7 + b"\x7f",
    b"\x8f",
    b"\x90",
    b"\x91",
    b"P1\n",
    b"Q",
    b"\x97",
    b"\x98",
    b"ibuiltins\neval\n",
]
OPCODES += [
    b"X\4\0\0\0itos",
    b"X\x0a\0\0\0vocab_size",
    b"X\4\0\0\0stoi",
    b"\x80\4",
    b"\x80\xff",
    b"\x96" + b"\xff" * 7 + b"\0",
]


def meta_pkl(folder: Path) -> Target:
    chars = sorted(set(TEXT))
    plain = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}
    ids = CharTokenizer.of(TEXT).encode(TEXT)
    for split in ("train", "val"):
        write_tokens(folder / f"{split}.bin", ids)
    path = folder / "meta.pkl"
    content = pickle.dumps(plain)
    path.write_bytes(content)
    undamaged = read_meta(folder)
    opcodes = st.lists(st.sampled_from(OPCODES) | st.binary(max_size=3), max_size=30).map(b"".join)
    itos = st.dictionaries(st.integers(0, 3) | odd_json.filter(is_hashable), odd_json, max_size=4) | odd_json
    odd = st.fixed_dictionaries({}, optional={"vocab_size": odd_json, "itos": itos, "stoi": odd_json}) | odd_json
    case = damage | opcodes | odd.map(pickle.dumps)

    def read(case: Any) -> bool:
        changed = damaged(content, case) if isinstance(case, list) else case
        path.write_bytes(changed)
        found = use_description(folder)
        return isinstance(case, list) and found != undamaged

    return Target(case, read, has_checksum=False)


def is_hashable(value: Any) -> bool:
    return not isinstance(value, list | dict)


# ---- checkpoints ---------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
odd_tensors = st.tuples(
    st.just("tensor"),
    st.sampled_from(["zeros", "nan", "expanded", "sparse", "meta", "part"]),
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 12, 256, 100_000]), max_size=3),
    st.sampled_from(DTYPES),
)


def make(value: Any) -> Any:
    """The tensor that odd_tensors describes; any other value is itself."""
    if not (isinstance(value, tuple) and len(value) == 4 and value[0] == "tensor"):
        return value
    _, kind, shape, dtype = value
    if math.prod(shape) > 100_000 and kind not in ("expanded", "meta"):
        shape = shape[:1]
    if kind == "expanded":  # a few bytes in the file, any size as a copy
        return torch.zeros((), dtype=dtype).expand(shape)
    if kind == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    made = torch.zeros(shape, dtype=dtype)
    if kind == "nan" and dtype.is_floating_point:
        made.fill_(math.nan)
    if kind == "sparse" and dtype != torch.bool:
        return made.to_sparse()
    return made[..., ::2] if kind == "part" and shape else made


def checkpoints(folder: Path) -> Target:
    tiny_run(folder)
    path = folder / "out" / store.NAME
    content = path.read_bytes()
    loaded = saved_content(store.load(path))
    plain = torch.load(path, weights_only=True)
    plain.pop("format", None)  # as older checkpoints are, and strangers': without a checksum
    without_checksum = to_bytes(plain)
    paths = list(paths_in(plain))
    numbers = itertools.count()

    value = odd_tensors | odd_json | st.dictionaries(odd_texts | odd_numbers, odd_tensors | odd_json, max_size=2)
    change = st.tuples(st.sampled_from(paths), value)
    case = st.one_of(
        st.tuples(st.just("damaged"), damage),
        st.tuples(st.just("changed"), st.lists(change, min_size=1, max_size=3)),
        st.tuples(st.just("pickle"), damage),
        st.tuples(st.just("alone"), value),
    )

    def read(case: tuple[str, Any]) -> bool:
        kind, change = case
        if kind == "damaged":
            changed = damaged(content, change)
        elif kind == "pickle":
            changed = with_damaged_pickle(without_checksum, change)
        elif kind == "alone":
            changed = to_bytes(make(change))
        else:
            made = copied(plain)
            for where, new in change:
                put(made, where, make(new))
            changed = to_bytes(made)
        file = folder / "odd" / f"{next(numbers)}.pt"  # a new name: what is known of a file may be remembered
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(changed)
        try:
            is_other = kind == "damaged" and saved_content(store.load(file)) != loaded
            resume(file)
        finally:
            file.unlink()
        return is_other

    return Target(case, read)


def resume(file: Path) -> None:
    """What train.py does to go on from a checkpoint, a step of it, and what sample.py does with the tokenizer."""
    c = build(TrainConfig, train.resumed_settings([], str(file)))
    saved = store.load(file)
    model = GPT.from_state(GPTConfig.from_args(saved.model_args, str(file)), saved.model, str(file))
    cpu = torch.device("cpu")
    runner = Runner(model, Form("float16" if saved.scaler else "float32"))
    optimizer = make_optimizer(model, c.optimizer, 0.1, 1e-3, (0.9, 0.95), 0.9)
    run = Run(asdict(c), runner, optimizer, Ranks(cpu))
    run.resume(saved, str(file), saved.best_val_loss, saved.health, trains=True)
    forms.EarlierForm.of(saved.form, cpu)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    train.learning_rate(c, saved.iter_num)
    from_meta(saved.tokenizer or {"name": "bytes"})


def saved_content(saved: store.Checkpoint) -> bytes:
    return to_bytes(store.content_of(saved))


def to_bytes(value: Any) -> bytes:
    """The file that torch.save makes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def with_damaged_pickle(content: bytes, edits: Any) -> bytes:
    """A checkpoint whose pickle is damaged and whose zip is whole: its checksums match."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            part = old.read(name)
            new.writestr(name, damaged(part, edits) if name.endswith("data.pkl") else part)
    return out.getvalue()


# ---- script --------------------------------------------------------------------------------------------------

TARGETS: dict[str, Callable[[Path], Target]] = {
    "arguments": arguments,
    "configs": configs,
    "logs": logs,
    "tokens": tokens,
    "meta.json": meta_json,
    "meta.pkl": meta_pkl,
    "checkpoints": checkpoints,
}


def main(c: FuzzConfig) -> int:
    """Fuzzes what c names; returns the number of defects."""
    defects = 0
    for name in [c.only] if c.only else TARGETS:
        target, tally = fuzz(name, c.cases, c.seed)
        found = tally.defects(target)
        defects += len(found)
        print(summary(name, tally), flush=True)
        for kind in found:
            print(f"  {tally.outcomes[kind]:,} x {kind}, seed {tally.seeds.get(kind)}")
            print(f"    {tally.examples.get(kind, '')[:LONGEST]}", flush=True)
    return defects


def summary(name: str, tally: Tally) -> str:
    """The counts of a target in one line."""
    counts = {kind: tally.outcomes[kind] for kind in (READ, REFUSED, SILENT)}
    others = tally.cases() - sum(counts.values())
    shown = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    rate = tally.cases() / tally.seconds
    return f"{name}: {tally.cases():,} cases: {shown}, {others:,} undocumented; {rate:,.0f} cases/s"


if __name__ == "__main__":
    with one_line_errors():
        torch.set_num_threads(1)
        found = main(configure(FuzzConfig, sys.argv[1:]))
    raise SystemExit(1 if found else 0)
