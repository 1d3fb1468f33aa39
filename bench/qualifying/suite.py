"""Stage 3: the tests of tests/test_gpu.py, in a process of their own.

On a CPU they are rehearsed, but for those that compile: this shows that the tests run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from bench.qualifying.session import Session
from bench.timing import ROOT

TESTS = "tests/test_gpu.py"
ARGUMENTS = ["-v", "-rfEs", "--tb=short", "-p", "no:cacheprovider"]


def measure(s: Session) -> dict[str, Any]:
    """Raises ValueError where the tests cannot be run to their end."""
    command = [sys.executable, "-m", "pytest", TESTS, *ARGUMENTS]
    if s.device.type != "cuda":
        command += ["-k", "not compiled and not True"]  # True: a test's parameter `compiled`
    env = os.environ | {"DESKGPT_TEST_DEVICE": str(s.device), "COLUMNS": "300"}  # pytest cuts lines at that width
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=s.seconds_left(), env=env, **options)
    except subprocess.TimeoutExpired as e:
        reached = (e.stdout or b"").decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(
            f"the tests did not end within {e.timeout:.0f} s; run them alone: pytest {TESTS}; the last was: {reached}"
        ) from None
    lines = done.stdout.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode and (done.returncode > 1 or not failed):  # pytest itself failed, or is not installed
        reasons = [line for line in lines if line.startswith("E ")] or lines
        raise ValueError(
            f"pytest {TESTS} ended with status {done.returncode}: {reasons[-1]}; are requirements-dev.txt installed?"
        )
    skipped = [line.removeprefix("SKIPPED ") for line in lines if line.startswith("SKIPPED ")]
    return {"summary": lines[-1].strip("= "), "skipped": skipped, "failed": failed}


def describe(result: dict[str, Any]) -> str:
    return "\n".join([f"`{TESTS}`: {result['summary']}.\n", *(f"- skipped: {line}" for line in result["skipped"])])
