"""Errors that a user can cause are one line and a status; output is harmless, and a run outlives
it.
"""

import os
import re
import subprocess
import sys
from subprocess import PIPE
from unittest import mock

import pytest
from conftest import (
    POSIX,
    ROOT,
    TINY,
    assert_one_line,
    flags,
    logged,
    raises_one_line,
    shell,
    slow,
    tiny,
)
from gloo import forked

import train
from deskgpt.errors import ConfigError, clock, one_line_errors
from deskgpt.launch import init_distributed
from deskgpt.peaks import peaks_path, read_peaks, write_peaks


def test_error_of_a_user_is_one_line_and_an_exit_status(capsys):
    nccl = "NCCL error in: NCCLUtils.hpp:275\nLast error:\nFailed to CUDA calloc 6"
    for error, status, named in (
        (ConfigError("untrusted: \x1b[2J"), 2, r"\x1b[2J"),
        (FileNotFoundError(2, "No such file or directory", "a.bin"), 1, "a.bin"),
        (ModuleNotFoundError("no", name="wandb"), 1, "pip install wandb"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "take a smaller input"),
        (RuntimeError("CUDA out of memory. Tried"), 1, "take a smaller input"),
        (RuntimeError(nccl), 1, "out of memory"),
    ):
        with pytest.raises(SystemExit) as exit, one_line_errors():
            raise error
        assert exit.value.code == status
        assert_one_line(capsys.readouterr().err, named)


def test_defect_keeps_its_traceback():
    of_triton = "OutOfResources: out of resource: shared memory, Required: 1, Hardware limit: 0."
    for error in (ModuleNotFoundError(name="torch.nothing"), RuntimeError(of_triton)):
        with pytest.raises(type(error)), one_line_errors():
            raise error


def test_times_are_rounded_to_what_they_show():
    found = [clock(seconds) for seconds in (42, 186.6, 18_120)]
    assert found == ["42.0s", "3m07s", "5h02m"]


# ---- output --------------------------------------------------------------------------------------


@slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_an_error():
    with open("/dev/full", "w") as full:
        done = shell(
            "python",
            "-OO",
            "train.py",
            "--help",
            code=1,
            capture_output=False,
            stdout=full,
            stderr=PIPE,
        )
    assert_one_line(done.stderr, "No space left on device")


def test_untrusted_names_give_the_terminal_no_commands(capfdbinary):
    with one_line_errors():
        print("name\x1b]0;owned\x07\x9b31m\tand\n\x1b[Aa bar\r")
        print("\x1b[8mhidden, \x1b[34mblue\x1b[0m", file=sys.stderr, flush=True)
    captured = capfdbinary.readouterr()
    assert captured.out == rb"name\x1b]0;owned\x07\x9b31m" + b"\tand\n\x1b[Aa bar\r\n"
    assert captured.err == rb"\x1b[8mhidden, " + b"\x1b[34mblue\x1b[0m\n"  # colours are W&B's


@POSIX
def test_file_opened_after_the_start_is_not_taken_for_the_terminal(tmp_path):
    code = """
import os, sys
from deskgpt.errors import open_standard_files, safe_output
open_standard_files()
file = open(os.environ['X'], 'wb')
assert file.fileno() > 2
os.system('echo noise; echo noise >&2')
with safe_output(ignore_write_errors=True):
    print('x')
    print('x', file=sys.stderr)
"""
    env = os.environ | {"PYTHON": sys.executable, "CODE": code, "X": str(tmp_path / "x")}
    for closed in ("2>&-", "<&- >&- 2>&-"):
        shell("bash", "-c", f'"$PYTHON" -c "$CODE" {closed}', env=env)
        assert (tmp_path / "x").read_bytes() == b""


@slow
@POSIX
@pytest.mark.parametrize(("action", "status"), [("ignore", 0), ("default", 128 + 1)])
def test_run_outlives_its_terminal_with_nohup_and_stops_well_without(
    action, status, chars, tmp_path
):
    import pty
    import termios

    settings = flags(**TINY | {"max_iters": 400, "eval_interval": 400}, dataset=chars)
    # setsid --ctty makes the terminal the run's own, so that its end is announced by SIGHUP.
    command = ["setsid", "--ctty", "env", f"--{action}-signal=HUP", sys.executable, "train.py"]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))  # tqdm is silent in a width of 0
    process = subprocess.Popen(
        [*command, *settings, f"--out_dir={tmp_path}"],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    printed = b""
    while b"iter 3:" not in printed:
        printed += os.read(ours, 1 << 12)
    os.close(ours)
    assert re.search(rb"evaluating: .*/2", printed)  # the progress bar
    assert process.wait(60) == status
    steps = logged(tmp_path, "iter")
    assert steps == list(range(len(steps) if status else 400))
    assert (tmp_path / "ckpt.pt").exists()


@POSIX
def test_of_ranks_the_models_words_are_seen_and_ddps_warning_is_not(chars, tmp_path, capfd):
    """DDP says for each run that all parameters have gradients, from C++, which no filter stops."""
    settings = tiny(chars, tmp_path, max_iters=2, gradient_accumulation_steps=2)
    logits = train.GPT.logits

    def loud(*args):
        os.write(2, b"loud ")
        return logits(*args)

    def train_loudly(rank):
        setattr(train.GPT, "logits", loud)  # noqa: B010
        train.main(settings)

    forked(1, train_loudly)
    said = capfd.readouterr().err
    assert "loud" in said
    assert not re.sub("loud |evaluating.*", "", said).strip()


@POSIX
def test_host_without_an_address_is_named_while_torch_waits(monkeypatch, capsys):
    waits = mock.Mock(side_effect=RuntimeError("timed out"))
    monkeypatch.setattr("torch.distributed.init_process_group", waits)
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with raises_one_line("no-such-host.invalid", "timed out", kind=OSError):
        init_distributed("cpu", "auto", 600.0)
    assert_one_line(capsys.readouterr().err, "600 s", "no-such-host.invalid", "--local-addr")


@POSIX
def test_damaged_cache_counts_as_none_and_without_a_home_it_is_in_the_temporary_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_peaks("a", 1.5)
    assert read_peaks() == {"a": 1.5}
    for content in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        peaks_path().write_bytes(content)
        assert read_peaks() == {}
    write_peaks("b", 2)
    peaks_path().chmod(0o666)  # others may have written it
    assert read_peaks() == {}
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")  # which is in the folder that a run starts in
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert peaks_path().parent == tmp_path / "home" / ".cache" / "deskgpt"
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_peaks("c", 3)
    assert peaks_path().parent == tmp_path / f"deskgpt-{os.getuid()}"
    assert read_peaks() == {"c": 3}
