"""The page of `bench/report.py --serve`, which follows runs by their logs as these grow.

It answers two requests: for the page, and for what the page shows now. It reads only when a page asks, and only what is
new in a log: the runs do not notice.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs

from bench.analysis import page
from bench.analysis.logs import NO_END, InferenceEngine
from bench.analysis.page import Headline, Table
from bench.analysis.runs import Run, complete
from deskgpt.run.log import event_of
from deskgpt.serve import page_server
from deskgpt.system.formatting import clock

POLL_S = 2.0  # between two requests of an open page
SHARE = 0.03  # of a core, at most: after an answer that cost more, a page waits longer
LONGEST_LINE = 8 << 20  # bytes; no line of a run is as long
HEAD = 1 << 16  # bytes of a log's first line, by which it is known again

# ---- reading -------------------------------------------------------------------------------------------------


class Follower:
    """A run whose log is read as it grows. It may begin later, be killed and resumed, or make way for a new run."""

    def __init__(self, out_dir: str, name: str) -> None:
        self.file = Path(out_dir)
        if self.file.suffix != ".jsonl":
            self.file = self.file / "log.jsonl"
        self.name = name
        self.changes = 0
        self.begin()

    def begin(self) -> None:
        """Forgets all that was read."""
        self.reading = InferenceEngine(Run(self.name))
        self.head = b""  # the first line
        self.offset = 0  # of the first byte that is not read yet
        self.lines = 0
        self.written_at: float | None = None  # seconds since the epoch; None if there is no log
        self.problem = ""

    def read(self) -> None:
        """Takes in the next whole lines of the log."""
        try:
            with open(self.file, "rb") as file:
                self.read_from(file)
            self.problem = ""
        except (FileNotFoundError, NotADirectoryError):
            if self.written_at is not None:
                self.begin()
                self.changes += 1
        except OSError as e:
            self.problem = f"cannot read {self.file}: {e.strerror}"

    def read_from(self, file: BinaryIO) -> None:
        found = os.fstat(file.fileno())
        if found.st_size < self.offset or file.read(len(self.head)) != self.head:  # a new run's log
            self.begin()
            self.changes += 1
        self.written_at = found.st_mtime
        file.seek(self.offset)
        while line := file.readline(LONGEST_LINE):
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                return  # it may be written just now
            if self.offset == 0:
                self.head = line[:HEAD]
            self.offset += len(line)
            self.changes += 1
            if line.strip():
                self.lines += 1
                event = event_of(line.decode("utf-8", errors="replace"))
                if event is not None:
                    self.reading.add(event)

    def run(self) -> Run:
        """The run so far."""
        run = self.reading.result(self.lines)
        complete(run)
        run.notes = [note for note in run.notes if note != NO_END]  # the status says it better
        return run


# ---- where a run is ------------------------------------------------------------------------------------------


def status(follower: Follower, run: Run, now: float) -> str:
    """Where a run is, how long it still takes, and when it last wrote to its log. now: seconds since the epoch."""
    if follower.problem:
        return follower.problem
    if follower.written_at is None:
        return f"waiting for {follower.file}"
    age_s = max(0.0, now - follower.written_at)
    steps = steps_done(run)
    goal = run.settings.get("max_iters")
    where = f"step {steps:,}" + (f" of {goal:,}" if goal else "")
    if run.end:
        return f"ended {clock(age_s)} ago, at {where}"
    left_s = seconds_left(run, steps)
    left = "" if left_s is None else f"{clock(left_s)} left, "
    return f"{where}, {left}last line {clock(age_s)} ago"


def steps_done(run: Run) -> int:
    """How many steps the log says were done."""
    logged = [int(events[-1]["iter"]) + is_step for events, is_step in ((run.iters, 1), (run.evals, 0)) if events]
    return max([*logged, int(run.end.get("iter") or 0)])


def seconds_left(run: Run, steps: int) -> float | None:
    """Until max_iters, evaluations included, at the pace of the last logged steps; None if it is not known."""
    goal = run.settings.get("max_iters")
    last = [e["time_ms"] for e in run.iters[-20:] if e["time_ms"]]
    if not goal or not last:
        return None
    evals = [e["eval_s"] for e in run.evals if e["eval_s"]]
    every = run.settings.get("eval_interval")
    evaluations = math.ceil(goal / every) - steps // every if evals and every else 0
    return max(0, goal - steps) * sorted(last)[len(last) // 2] / 1e3 + max(0, evaluations) * (evals or [0.0])[-1]


# ---- what the page shows -------------------------------------------------------------------------------------


@dataclass
class Described:
    """What bench/report.py says about a run."""

    headline: Headline
    tables: list[Table]
    about: str


class Live(page_server.Page):
    """The page, and what it shows now. Raises ValueError if plotly is missing."""

    def __init__(self, out_dirs: list[str], describe: Callable[[Run, str], Described]) -> None:
        names = [Path(os.path.abspath(path)).name for path in out_dirs]
        if len(set(names)) < len(names):
            names = out_dirs
        names = [name.encode("utf-8", "replace").decode() for name in names]  # Linux allows names that are no text
        self.followers = [Follower(path, name) for path, name in zip(out_dirs, names, strict=True)]
        self.describe = describe
        self.title = " and ".join(names) if len(names) < 4 else f"{len(names)} runs"
        self.lock = threading.Lock()
        self.of_this_server = secrets.token_hex(4)
        self.version = ""
        self.next_read_at = 0.0  # time.monotonic()
        self.wait_s = POLL_S
        self.runs: list[Run] = []
        self.described: list[Described] = []
        self.parts: dict[str, str] = {}
        self.charts = "{}"
        document = page.live_page(self.title, [Run(follower.name) for follower in self.followers])
        self.document = document.encode("utf-8", errors="replace")

    def get(self, place: str, query: str) -> tuple[str, bytes] | None:
        if place == "":
            return "text/html; charset=utf-8", self.document
        if place == "data":
            have = parse_qs(query).get("have", [""])[0]
            return "application/json", self.answer(have).encode("utf-8", errors="replace")
        return None

    def answer(self, have: str) -> str:
        """What has changed since the version that the page has; always where the runs are. A JSON object."""
        with self.lock:
            if time.monotonic() >= self.next_read_at:
                self.read()
            fields = {"version": self.version, "wait_ms": round(1000 * self.wait_s)}
            parts = self.parts if have != self.version else {}
            parts = parts | {"head": self.head()}
            charts = self.charts if have != self.version else "null"
        return f'{json.dumps(fields)[:-1]}, "parts": {json.dumps(parts)}, "charts": {charts}}}'

    def read(self) -> None:
        """Reads what is new in the logs, and makes the page's parts from it."""
        t0 = time.thread_time()
        for follower in self.followers:
            follower.read()
        version = f"{self.of_this_server}-{sum(follower.changes for follower in self.followers)}"
        if version != self.version:
            self.runs = [follower.run() for follower in self.followers]
            missing = ["not in the log" if run.end else "not yet" for run in self.runs]
            self.described = [self.describe(run, words) for run, words in zip(self.runs, missing, strict=True)]
            names = [run.name for run in self.runs]
            of_all = zip(*(d.tables for d in self.described), strict=True)  # by kind, those of all runs
            tables = [page.side_by_side(names, list(of_kind), missing) for of_kind in of_all]
            about = "; ".join(d.about for d in self.described) if len(names) == 1 else ""
            self.parts = page.parts_html(self.title, self.runs, tables, [], [], about, [])
            self.charts = page.charts_json(page.make_charts(self.runs))
            self.version = version
        self.wait_s = max(POLL_S, (time.thread_time() - t0) / SHARE)
        self.next_read_at = time.monotonic() + 0.9 * self.wait_s

    def head(self) -> str:
        """The headlines of the runs, and where each is."""
        headlines = []
        several = len(self.runs) > 1
        for number, (follower, run, d) in enumerate(zip(self.followers, self.runs, self.described, strict=True)):
            goal = run.settings.get("max_iters")
            d.headline.number = number if several else None
            d.headline.status = status(follower, run, time.time())
            d.headline.done = min(1.0, steps_done(run) / goal) if goal else None
            headlines.append(d.headline)
        return page.head_html(self.title, headlines)


def serve(out_dirs: list[str], port: int, describe: Callable[[Run, str], Described]) -> None:
    """Serves the page until Ctrl+C. port: 0 for a free one. Raises OSError if the port is taken."""
    page_server.serve(Live(out_dirs, describe), port)
