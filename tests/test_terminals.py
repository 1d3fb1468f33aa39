"""A terminal, pipe, disk or locale that fails: the run continues, and the log has everything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, events, flags, shell

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")


def test_file_opened_after_the_start_is_not_taken_for_the_terminal(tmp_path):
    code = (
        "import os; from deskgpt.system.terminal import *; open_standard_files(); file = open(os.environ['X'], 'wb')\n"
    )
    code += "assert file.fileno() > 2; os.write(1, b'noise'); os.write(2, b'noise'); os.system('echo noise >&2')\n"
    code += "with safe_output(lasts=True): print('x'); import sys; print('x', file=sys.stderr)"
    env = os.environ | {"PYTHON": sys.executable, "CODE": code, "X": str(tmp_path / "x")}
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        subprocess.run(["bash", "-c", f'"$PYTHON" -c "$CODE" {closed}'], cwd=ROOT, check=True, env=env)
        assert (tmp_path / "x").read_bytes() == b""


@pytest.mark.slow
def test_run_continues_to_its_end_when_its_output_fails(chars, tmp_path):
    command = f"{sys.executable} train.py {' '.join(flags(**TINY, dataset=chars, out_dir=tmp_path))}"
    done = shell("bash", "-c", f"{command} 2>/dev/full | head -1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")
    assert [e["iter"] for e in events(tmp_path, "iter")] == list(range(6))
    assert (tmp_path / "ckpt.pt").exists()


@pytest.mark.slow
def test_run_outlives_its_terminal_with_nohup_and_stops_well_without(chars, tmp_path):
    import pty
    import termios

    for action, status in (("ignore", 0), ("default", 128 + 1)):
        out_dir = tmp_path / action
        settings = TINY | {"dataset": chars, "out_dir": out_dir, "max_iters": 400, "eval_interval": 400}
        # setsid --ctty makes the terminal the run's own, so that its end is announced by SIGHUP.
        command = ["setsid", "--ctty", "env", f"--{action}-signal=HUP", sys.executable, "train.py", *flags(**settings)]
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))  # tqdm is silent in a width of 0
        process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        printed = b""
        while b"iter 3:" not in printed:
            printed += os.read(ours, 1 << 12)
        os.close(ours)
        assert re.search(rb"evaluating: .*/2", printed)  # the progress bar
        assert process.wait(60) == status
        steps = [e["iter"] for e in events(out_dir, "iter")]
        assert steps == list(range(len(steps) if status else 400))
        assert (out_dir / "ckpt.pt").exists()


@pytest.mark.slow
def test_names_that_the_locale_does_not_know_train_resume_and_sample(chars, tmp_path):
    out_dir = tmp_path / "öut"
    data = tmp_path / "dätä"
    data.symlink_to(chars)
    commands = [
        ["train.py", *flags(**TINY, dataset=data, out_dir=out_dir)],
        ["train.py", "--init_from=resume", f"--out_dir={out_dir}", "--max_iters=8", "--lr_decay_iters=6"],
        ["sample.py", f"--out_dir={out_dir}", "--num_samples=1", "--max_new_tokens=2", "--device=cpu"],
    ]
    # One after the other in one process, which imports torch once.
    code = "import json, runpy, sys\nfor sys.argv in json.loads(sys.argv[1]):\n"
    code += "    runpy.run_path(sys.argv[0], run_name='__main__')"
    env = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = shell("python", "-c", code, json.dumps(commands, ensure_ascii=False), env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert [e["iter"] for e in events(out_dir, "iter")] == list(range(8))
