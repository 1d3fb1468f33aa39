"""Stage 3: the tests of tests/test_gpu.py, in a process of their own. Without a GPU all of them are skipped."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from bench.qualifying.session import Session
from bench.timing import ROOT

TESTS = "tests/test_gpu.py"
NEEDED = ("pytest", "hypothesis")  # of tests/conftest.py


def measure(s: Session) -> dict[str, Any]:
    """Raises ValueError where pytest is not installed, or where the tests cannot be run to their end."""
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(f"the tests need {' and '.join(missing)}: pip install -r requirements-dev.txt")
    report = s.folder / "test_gpu.xml"
    command = [sys.executable, "-m", "pytest", TESTS, "-vv", f"--junitxml={report}", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=s.seconds_left())
    except subprocess.TimeoutExpired as e:
        reached = (e.stdout or b"").decode(errors="replace").strip().rpartition("\n")[2]  # bytes, even for text=True
        raise ValueError(
            f"the tests did not end within {e.timeout:.0f} s; run them alone: pytest {TESTS}; the last was: {reached}"
        ) from None
    tests = outcomes(report) if report.exists() else []
    if not tests or done.returncode > 1:  # 1: some failed; above that, pytest itself did
        last = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise ValueError(f"pytest {TESTS} ended with status {done.returncode}: {last}")
    failed = [f"{test['name']}: {test['why']}" for test in tests if test["outcome"] == "failed"]
    return {"tests": tests, "failed": failed}


def outcomes(report: Path) -> list[dict[str, Any]]:
    """Each test of a JUnit report: its name, seconds, outcome (passed, failed or skipped), and why."""
    tests = []
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                why = " ".join(child.get("message", "").split())[:300]
        name = case.get("name", "")
        tests.append({"name": name, "seconds": float(case.get("time", 0)), "outcome": outcome, "why": why})
    return tests


def describe(result: dict[str, Any]) -> str:
    tests = result["tests"]
    seconds = sum(test["seconds"] for test in tests)
    passed = sum(test["outcome"] == "passed" for test in tests)
    lines = [f"`{TESTS}`: {passed} of {len(tests)} tests passed, in {seconds:.0f} s.\n"]
    skipped = Counter(test["why"] for test in tests if test["outcome"] == "skipped")
    lines += [f"- {count} skipped: {why}" for why, count in skipped.items()]
    lines += [f"- failed: {line}" for line in result["failed"]]
    return "\n".join(lines)
