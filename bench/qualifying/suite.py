"""Stage 3: the tests of tests/test_gpu.py, in a process of their own.

On a CPU they are rehearsed, but for those that compile: this shows that the tests run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from typing import Any

from bench.qualifying.session import Session
from bench.timing import ROOT

TESTS = "tests/test_gpu.py"
ARGUMENTS = ["-o", "verbosity_test_cases=1", "-rfEs", "--tb=short", "-p", "no:cacheprovider"]
ENDED = re.compile(r"(\S+::.+) (PASSED|FAILED|ERROR|SKIPPED)\b")


def measure(s: Session) -> dict[str, Any]:
    """Says each test's outcome as it ends. Raises ValueError where pytest itself fails."""
    command = [sys.executable, "-u", "-m", "pytest", TESTS, *ARGUMENTS]
    if s.device.type != "cuda":
        command += ["-k", "not compiled and not True"]  # True: a test's parameter `compiled`
    env = os.environ | {"DESKGPT_TEST_DEVICE": str(s.device), "COLUMNS": "300"}  # pytest cuts lines at that width
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=env, errors="replace", **options)
    assert process.stdout is not None
    limit = threading.Timer(s.seconds_left(), process.kill)
    limit.start()
    lines = []
    outcomes: dict[str, str] = {}
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            found = ENDED.match(line)
            if found:
                outcomes[found[1]] = found[2]
                s.print0(found[0])
        status = process.wait()
    finally:
        limit.cancel()
        process.kill()
    return result_of(status, lines, outcomes, is_over=s.seconds_left() == 0)


def result_of(status: int, lines: list[str], outcomes: dict[str, str], is_over: bool) -> dict[str, Any]:
    """From pytest's exit status, its lines and the outcomes of the tests that ended. is_over: their time."""
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]  # at the end, with the reasons
    unfinished = []
    if status and is_over:
        failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
        unfinished = [f"the tests after {next(reversed(outcomes), 'the start')} (all of them: pytest {TESTS})"]
    elif status and (status > 1 or not failed):  # pytest itself failed, or is not installed
        reasons = [line for line in lines if line.startswith("E ")] or lines or ["it printed nothing"]
        raise ValueError(
            f"pytest {TESTS} ended with status {status}: {reasons[-1]}; are requirements-dev.txt installed?"
        )
    counts = Counter(outcomes.values())
    summary = ", ".join(f"{count} {outcome.lower()}" for outcome, count in sorted(counts.items())) or "none ended"
    skipped = [line.removeprefix("SKIPPED ") for line in lines if line.startswith("SKIPPED ")]
    return {"summary": summary, "outcomes": outcomes, "skipped": skipped, "failed": failed, "unfinished": unfinished}


def describe(result: dict[str, Any]) -> str:
    return "\n".join([f"`{TESTS}`: {result['summary']}.\n", *(f"- skipped: {line}" for line in result["skipped"])])
