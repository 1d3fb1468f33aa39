"""bench/qualify.py: what is kept of a stage that passes, fails or is cut, and all of them at toy sizes."""

from __future__ import annotations

import psutil
import pytest
from conftest import until

from bench import qualify


def test_output_of_a_stage_that_is_cut_is_kept_and_all_its_processes_end(tmp_path):
    child = "import time; time.sleep(100)"
    popen = f"subprocess.Popen([sys.executable, '-c', {child!r}])"
    code = f"import subprocess, sys; print({popen}.pid, flush=True); {child}"
    assert qualify.run(["-c", code], tmp_path / "a.txt", 2.0) == "cut after 2 s"
    lines = qualify.lines_of(tmp_path / "a.txt")
    assert "KeyboardInterrupt" in lines  # as pytest gets it, which then prints what has failed
    assert lines[-1] == "cut after 2 s"
    pid = int(lines[0])
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("code", "outcome"), [("print(1)", "passed"), ("print(1); 1 / 0", "failed with exit status 1")]
)
def test_last_line_of_a_stage_is_its_outcome(code, outcome, tmp_path):
    assert qualify.run(["-c", code], tmp_path / "a.txt", 60.0) == outcome
    lines = qualify.lines_of(tmp_path / "a.txt")
    assert (lines[0], lines[-1]) == ("1", outcome)


@pytest.mark.slow
def test_later_call_continues_and_the_page_has_all_stages(tmp_path, script):
    ours = ["bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path}"]
    done = script(*ours, "--only", "facts", "check")
    [page] = tmp_path.glob("*/page.md")
    text = page.read_text()
    assert done.code == 0, text
    assert "## facts: passed" in text
    assert "6 passed" in text  # three dtypes, two models
    assert "## tests: not run" in text
    done = script(*ours, "--minutes=0")
    assert done.code == 1
    assert "no time was left for first, tests" in done.out
    assert page.read_text() == text


@pytest.mark.nightly
def test_all_stages_pass_at_toy_sizes(tmp_path, script):
    done = script("bench/qualify.py", "--device=cpu", f"--out_dir={tmp_path}")
    [page] = tmp_path.glob("*/page.md")
    assert done.code == 0, page.read_text()
