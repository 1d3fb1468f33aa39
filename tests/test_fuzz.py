"""Odd and damaged arguments, logs, prepared data and checkpoints, read as the scripts read them.

    FUZZ_EXAMPLES=20000 python -m pytest tests/test_fuzz.py -k checkpoints

They must be read, or end as users see it: one line on stderr, raised on purpose by our own code,
and an exit status. Anything else is a defect: another exception, an accidental message, 10 s of
processor time, 300 MB of memory.
"""

import io
import json
import os
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, fields
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from conftest import CPU, corrupted, run_tiny, slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from logs import TIMES, nanogpt

import train
from bench import compare
from bench.logs import read_runs
from configurator import build, configure
from data.prepared import write_dataset
from data.tokenizer import BytesTokenizer, from_meta
from deskgpt.checkpoint import CKPT, load_checkpoint, run_folder
from deskgpt.compiling import saved_compute
from deskgpt.compute import ComputeMode
from deskgpt.device import resolve_device
from deskgpt.distributed import DistContext
from deskgpt.errors import is_out_of_memory, one_line_errors
from deskgpt.optim import make_optimizer
from deskgpt.resume import resumed_settings
from deskgpt.train_state import TrainState
from model import GPT, GPTConfig
from train import TrainConfig

pytestmark = slow

LARGE = 1 << 30  # bytes of address space, beyond what the process has
fuzzed = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "200")),
    deadline=10_000,  # ms
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module", autouse=True)
def _memory_is_limited(folder):
    """An absurd size in a file is found before memory is taken, or here."""
    resource = pytest.importorskip("resource")  # which Windows lacks
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + LARGE, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@contextmanager
def ends_as_documented():
    """Fail if the block, which reads something odd, neither succeeds nor ends with an error for
    users.
    """
    errors = io.StringIO()
    try:
        with redirect_stderr(errors), redirect_stdout(io.StringIO()), one_line_errors():
            yield
    except SystemExit as e:
        cause = e.__context__
        if isinstance(cause, Exception):  # else it is the end of --help
            raised_by = str(traceback.extract_tb(cause.__traceback__)[-1].line)
            # Such as int("x")
            by_accident = isinstance(cause, ValueError) and not raised_by.startswith("raise ")
            if is_out_of_memory(cause) or by_accident:
                raise cause from None
            assert len(errors.getvalue().splitlines()) == 1, errors.getvalue()


# What a number, a setting, a name or a line may be instead.
ODD_TEXTS = ["", "\0", "a\nb", "\ud800", "🧀", "None", "nan", "-inf", "1e999", "' '", "../..", "1,"]
ODD_TEXTS += ["1" + "0" * 400, "(" * 5000, "[" * 300 + "]" * 300, "-" * 3000 + "1", "x" * 70_000]
ODD_TEXTS += ["{[]: 1}", "10**9", "1_0", "0x10", "-1", "٣", "²", "*", "lambda: 0", "1/0"]
# Lone surrogates too
odd_texts = st.text(st.characters(), max_size=20) | st.sampled_from(ODD_TEXTS)
LARGE_NUMBERS = [10**12, 2**31, 2**63 - 1, 2**63, 10**309, 1e308, 5e-324, -0.0]
odd_numbers = st.integers(-3, 300) | st.integers() | st.floats() | st.sampled_from(LARGE_NUMBERS)
randoms = st.randoms(use_true_random=True)
odd_json = st.recursive(
    st.none() | st.booleans() | odd_numbers | odd_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_texts, inner, max_size=3),
    max_leaves=5,
)


def changed(value, draw, new):
    """Return a copy in which one value, at any depth, is replaced by a new one."""
    if not isinstance(value, dict | list) or not value or not draw(st.integers(0, 3)):
        return draw(new)
    made = value.copy()
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
    made[key] = changed(value[key], draw, new)
    return made


names = st.sampled_from([f.name for f in fields(TrainConfig)])
odd_words = st.builds(
    "--{}={}".format, names, st.booleans() | st.floats(0, 1) | odd_numbers | odd_texts
)
odd_words |= st.builds("{}{}".format, st.sampled_from(["", "-", "--", "--="]), odd_texts)
odd_words |= st.sampled_from(["config/train_shakespeare_char.py", "config", "--help"])


@fuzzed
@given(words=st.lists(odd_words, max_size=4))
def test_arguments(words):
    with ends_as_documented():
        c = configure(TrainConfig, words)
        train.learning_rate(c.schedule(), max(0, c.max_iters))
        GPTConfig.from_settings(c, 256)
        c.batch_split()
        run_folder(c.out_dir)
        resolve_device(c.device)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tiny model's run: out."""
    folder = tmp_path_factory.mktemp("fuzz")
    ids = BytesTokenizer().encode("a tiny model reads this again and again. " * 8)
    write_dataset(folder / "bytes", {"train": ids, "val": ids[:80]}, BytesTokenizer(), "fuzz")
    sizes = {"n_layer": 1, "n_embd": 4, "block_size": 8, "batch_size": 2, "max_iters": 2}
    with redirect_stdout(io.StringIO()):
        run_tiny(folder / "bytes", folder / "out", **sizes)
    return folder


@fuzzed
@given(data=st.data(), random=randoms)
def test_logs(folder, data, random):
    """A field of a line is changed, or bytes are damaged."""
    base = folder / "out" / "log.jsonl"
    undamaged = data.draw(st.sampled_from([base.read_text(), nanogpt(TIMES, (0, 40))]))
    lines = undamaged.splitlines()
    at = data.draw(st.just(0) | st.integers(0, len(lines) - 1))  # the first has the settings
    with suppress(ValueError):  # it is not JSON
        lines[at] = json.dumps(changed(json.loads(lines[at]), data.draw, odd_json))
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    path = folder / "odd.txt"
    path.write_bytes(corrupted(content, random) if data.draw(st.booleans()) else content)
    with ends_as_documented():
        found = compare.compare(read_runs([str(path), str(base)]))
        for run in found.runs:
            json.dumps(compare.summary(run))


SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 8, 256]), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64])
odd_values: SearchStrategy[Any] = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype), SIZES, DTYPES
)
odd_values |= odd_json
odd_parts = odd_values | st.dictionaries(odd_texts | odd_numbers, odd_values, max_size=2)


@fuzzed
@given(data=st.data(), random=randoms)
def test_untrusted_checkpoints(folder, data, random):
    """Values are changed, or bytes of the file are damaged.

    Without a checksum: an attacker would make it right.
    """
    plain = torch.load(folder / "out" / CKPT)
    is_damaged = data.draw(st.booleans())
    file = io.BytesIO()
    torch.save(plain if is_damaged else changed(plain, data.draw, odd_parts), file)
    path = folder / "untrusted.pt"
    path.write_bytes(corrupted(file.getvalue(), random) if is_damaged else file.getvalue())
    # As train.py resumes it and does a step, and sample.py takes its tokenizer.
    with ends_as_documented():
        c = build(TrainConfig, resumed_settings(TrainConfig, [], str(path)))
        saved = load_checkpoint(path)
        model = GPT.from_state(
            GPTConfig.from_args(saved.model_args, str(path)), saved.model, str(path)
        )
        optimizer = make_optimizer(model, c.optimizer, 0.1, 1e-3, (0.9, 0.95), 0.9)
        scaler = torch.amp.GradScaler("cpu", enabled=bool(saved.scaler))
        no_data = Mock(tokenizer=None, chat=None, metadata={}, eval_metadata=lambda _: {})
        parts = (asdict(c), model, optimizer, scaler, ComputeMode(), c.batch_split(), c.schedule())
        run = TrainState(*parts, train.learning_rate, no_data, DistContext(CPU))
        run.resume(saved, str(path), trains=True)
        saved_compute(saved.variant, CPU)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        train.learning_rate(run.schedule, saved.iter_num)
        from_meta(saved.tokenizer or {"name": "bytes"})
