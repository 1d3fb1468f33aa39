from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import assert_one_line, shell
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from deskgpt.system import errors
from deskgpt.system.errors import ConfigError, is_out_of_memory, one_line_errors


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried"),
        RuntimeError("can't allocate memory: you"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("NCCL error in: NCCLUtils.hpp:275\nLast error:\nFailed to CUDA calloc 6291456"),
    ],
)
def test_running_out_of_memory_is_one_line_with_the_remedy(error, capsys):
    with pytest.raises(SystemExit) as exit, one_line_errors("take less"):
        raise error
    assert exit.value.code == 1
    assert_one_line(capsys.readouterr().err, "out of memory", "take less")


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (ConfigError("x=1 must be 2"), 2, "x=1 must be 2"),
        (ConfigError("of a stranger: \x1b[31mred"), 2, r"\x1b[31mred"),
        (ValueError("no such model"), 1, "no such model"),
        (FileNotFoundError(2, "No such file or directory", "a.bin"), 1, "a.bin"),
        (ModuleNotFoundError("no", name="wandb"), 1, "wandb"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_error_of_a_user_is_one_line_and_an_exit_status(error, status, named, capsys):
    with pytest.raises(SystemExit) as exit, one_line_errors():
        raise error
    assert exit.value.code == status
    assert_one_line(capsys.readouterr().err, named)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("data/chat/prepare.py", ["FILE", "python data/chat/prepare.py dialogues.jsonl"]),
        ("data/text/prepare.py novel.txt", ["--name", "python data/text/prepare.py novel.txt"]),
        ("bench/compare.py", ["RUN", "python bench/compare.py out-a out-b"]),
        ("bench/report.py out --port=x", ["--port", "'x'", "python bench/report.py"]),
    ],
)
def test_command_line_that_lacks_something_is_one_line_with_an_example(script, command, named):
    done = script(*command.split())
    assert done.code == 2
    assert_one_line(done.err, *named)


@pytest.fixture
def error_file(monkeypatch, tmp_path) -> Path:
    """The second of three ranks that torchrun started, and what it reads."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(errors, "FIRST_SPEAKS_S", 0.2)
    return tmp_path / "error.json"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_error_of_a_rank_names_it_and_its_host_unless_torchrun_ends_it_for_the_firsts_sake(
    is_stopped, error_file, capsys
):
    with pytest.raises(SystemExit) as exit, one_line_errors(is_stopped=lambda: is_stopped):
        raise ConfigError("x=1 must be 2")
    assert exit.value.code == 2
    line = f"rank 1 on {platform.node()}: x=1 must be 2"
    assert capsys.readouterr().err == ("" if is_stopped else f"error: {line}\n")
    assert ProcessFailure(1, 123, 2, str(error_file)).message == line


def test_silence_of_the_rank_that_hangs_tells_which_it_is(error_file, monkeypatch, capsys):
    monkeypatch.setattr(errors, "FIRST_SPEAKS_S", 1e9)
    with pytest.raises(SystemExit), one_line_errors(is_stopped=lambda: True):
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation")
    assert_one_line(capsys.readouterr().err, "rank 1 on", "lost the other ranks", "says nothing hangs")


def test_torchrun_gets_the_traceback_of_a_defect(error_file):
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("name")
    assert "KeyError: 'name'" in ProcessFailure(1, 123, 1, str(error_file)).message


def test_shared_memory_too_small_for_a_kernel_is_not_out_of_memory():
    words = "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes may help."
    assert not is_out_of_memory(RuntimeError(f"OutOfResources: {words}"))


@pytest.mark.parametrize("error", [RuntimeError("a shape"), ModuleNotFoundError(name="torch.nothing"), KeyError()])
def test_defect_keeps_its_traceback(error):
    with pytest.raises(type(error)), one_line_errors():
        raise error


def test_value_error_out_of_a_library_is_a_defect():
    with pytest.raises(json.JSONDecodeError), one_line_errors():
        json.loads("{")


def test_traceback_is_shown_on_request(monkeypatch):
    monkeypatch.setenv("DESKGPT_TRACEBACK", "1")
    with pytest.raises(ConfigError), one_line_errors():
        raise ConfigError("x=1 must be 2")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["sample.py", "--help"], ["data/shakespeare/prepare.py", "--help"]])
def test_output_that_cannot_be_written_is_one_line(words):
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = shell("python", *words, stdout=full, stderr=subprocess.PIPE, capture_output=False, env=env)
    assert done.returncode == 1
    assert_one_line(done.stderr, "cannot print", "No space left on device")


def test_names_of_a_stranger_give_the_terminal_no_commands(capfdbinary):
    with one_line_errors():
        print("name\x1b]0;owned\x07\x9b31m\tand\n\x1b[Aa bar\r")
        print("\x1b[31mnote", file=sys.stderr, flush=True)
    captured = capfdbinary.readouterr()
    assert captured.out == rb"name\x1b]0;owned\x07\x9b31m" + b"\tand\n\x1b[Aa bar\r\n"
    assert captured.err == rb"\x1b[31mnote" + b"\n"
