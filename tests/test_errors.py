"""Errors that a user can cause are one line and a status; defects keep their traceback. What is printed is harmless."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest
from conftest import assert_one_line, shell

from deskgpt.system import cache
from deskgpt.system.errors import ConfigError, OneLineParser, one_line_errors


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (ConfigError("untrusted: \x1b[2J"), 2, r"\x1b[2J"),
        (ValueError("no such model"), 1, "no such model"),
        (FileNotFoundError(2, "No such file or directory", "a.bin"), 1, "a.bin"),
        (ModuleNotFoundError("no", name="wandb"), 1, "pip install wandb"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "take a smaller input"),
        (RuntimeError("CUDA out of memory. Tried"), 1, "take a smaller input"),
        (RuntimeError("NCCL error in: NCCLUtils.hpp:275\nLast error:\nFailed to CUDA calloc 6"), 1, "out of memory"),
    ],
)
def test_error_of_a_user_is_one_line_and_an_exit_status(error, status, named, capsys):
    with pytest.raises(SystemExit) as exit, one_line_errors():
        raise error
    assert exit.value.code == status
    assert_one_line(capsys.readouterr().err, named)


OUT_OF_SHARED_MEMORY = "OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376."


@pytest.mark.parametrize("error", [ModuleNotFoundError(name="torch.nothing"), RuntimeError(OUT_OF_SHARED_MEMORY)])
def test_defect_keeps_its_traceback(error):
    with pytest.raises(type(error)), one_line_errors():
        raise error


def test_tilde_in_an_option_means_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    parser = OneLineParser(None)
    parser.add_argument("file")
    parser.add_argument("--name")
    assert parser.parse_args(["~/a", "--name=~/b"]).__dict__ == {"file": "/home/me/a", "name": "/home/me/b"}


def test_package_that_is_there_and_cannot_be_imported_is_not_called_missing(tmp_path, monkeypatch, capsys):
    """Print the package's own error, such as versions that do not fit each other."""
    (tmp_path / "halfway").mkdir()
    (tmp_path / "halfway" / "__init__.py").write_text("raise ImportError('needs protobuf>=6')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit), one_line_errors():
        import halfway  # type: ignore[import-not-found] # noqa: F401
    message = capsys.readouterr().err
    assert_one_line(message, "halfway", "needs protobuf>=6")
    assert "not installed" not in message


def test_error_of_one_of_several_ranks_names_it_and_its_host(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit), one_line_errors():
        raise ConfigError("x=1 must be 2")
    assert capsys.readouterr().err == f"error: rank 1 on {platform.node()}: x=1 must be 2\n"


# ---- output --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a POSIX shell and a device that is always full")
@pytest.mark.parametrize(
    ("redirected", "named"), [(">/dev/full", "No space left on device"), (">&-", "standard output is closed")]
)
def test_output_that_cannot_be_written_is_an_error(redirected, named):
    code = "from deskgpt.system.errors import *\nwith one_line_errors(): print(1)"
    done = shell("bash", "-c", f'{sys.executable} -c "{code}" {redirected}')
    assert done.returncode == 1
    assert_one_line(done.stderr, named)


def test_untrusted_names_give_the_terminal_no_commands(capfdbinary):
    with one_line_errors():
        print("name\x1b]0;owned\x07\x9b31m\tand\n\x1b[Aa bar\r")
        print("\x1b[8mhidden, \x1b[34mblue\x1b[0m", file=sys.stderr, flush=True)
    captured = capfdbinary.readouterr()
    assert captured.out == rb"name\x1b]0;owned\x07\x9b31m" + b"\tand\n\x1b[Aa bar\r\n"
    assert captured.err == rb"\x1b[8mhidden, " + b"\x1b[34mblue\x1b[0m\n"  # colours are W&B's


# ---- the cache -----------------------------------------------------------------------------------------------


def test_damaged_cache_counts_as_none_and_is_repaired(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.keep("x", "a", 1.5)
    assert cache.read("x") == {"a": 1.5}
    for content in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        cache.path_of("x").write_bytes(content)
        assert cache.read("x") == {}
    cache.keep("x", "b", 2)
    cache.path_of("x").chmod(0o666)  # others may have written it
    assert cache.read("x") == {}
    cache.keep("x", "c", 3)
    assert cache.read("x") == {"c": 3}


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX's owners and modes")
def test_without_a_home_the_cache_is_in_the_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache.keep("x", "a", 1)
    assert cache.path_of("x").parent == tmp_path / f"deskgpt-{os.getuid()}"
    assert cache.read("x") == {"a": 1}
