"""The page that follows runs: what it reads of growing logs, its server, and a real run in a browser."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, needs_browser
from conftest import ROOT
from logs import log
from test_page_server import ask, serving

from bench import report
from bench.analysis import live
from bench.analysis.live import Follower, Live, status
from bench.analysis.logs import read_run
from bench.analysis.runs import Run, complete
from deskgpt.serve.page_server import Server

EVIL = "</script><script>document.title='x'</script><img src=//example.com/a.png onerror=alert(1)>"


def followed(follower: Follower) -> Run:
    follower.read()
    return follower.run()


def write(path: Path, *events: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.writelines(json.dumps(e) + "\n" for e in events)


def start(step: int = 0, **settings: Any) -> dict[str, Any]:
    return {"event": "start", "iter": step, "settings": {"max_iters": 100, "log_interval": 1} | settings}


def step(i: int, **fields: Any) -> dict[str, Any]:
    return {"event": "iter", "iter": i, "loss": 3.0, "time_ms": 10.0, "train_s": (i + 1) / 100} | fields


# ---- reading -------------------------------------------------------------------------------------------------


def test_log_read_in_pieces_is_the_log_read_at_once(tmp_path):
    whole = Path(log(tmp_path / "whole", {0: 4.0, 30: 3.0, 60: 2.5})) / "log.jsonl"
    lines = whole.read_text().splitlines()
    again = [json.dumps(start(30, n_layer=2)), *lines[35:50]]  # killed and resumed
    content = "\n".join([*lines[:-1], *again, "{torn", lines[-1], ""]).encode()
    whole.write_bytes(content)
    expected = read_run(str(whole))
    complete(expected)
    growing = tmp_path / "growing" / "log.jsonl"
    follower = Follower(str(growing.parent), "whole")
    follower.read()  # nothing is there yet
    growing.parent.mkdir()
    draw = random.Random(1)
    cuts = [0, *sorted(draw.sample(range(1, len(content)), 40)), len(content)]
    for begin, end in itertools.pairwise(cuts):
        with open(growing, "ab") as file:
            file.write(content[begin:end])
        found = followed(follower)
    assert found == expected
    assert follower.lines == len(content.splitlines())
    assert followed(Follower(str(growing), "whole")) == expected


@pytest.mark.parametrize("kind", ["rewind", "start"])
def test_rewound_or_resumed_run_forgets_what_it_computes_again(tmp_path, kind):
    path = tmp_path / "log.jsonl"
    follower = Follower(str(path), "x")
    write(path, start(), *map(step, range(50)), {"event": "sample", "iter": 40, "texts": ["a"]})
    assert len(followed(follower).iters) == 50
    write(path, start(10) | {"event": kind}, step(10, loss=1.0))
    run = followed(follower)
    assert [e["iter"] for e in run.iters] == [*range(11)]
    assert (run.iters[-1]["loss"], run.samples) == (1.0, [])


def test_log_of_another_run_in_the_same_place_is_read_from_its_start(tmp_path):
    path = tmp_path / "log.jsonl"
    follower = Follower(str(tmp_path), "x")
    write(path, start(seed=1), step(0), step(1))
    assert len(followed(follower).iters) == 2
    path.rename(tmp_path / "aside")  # as train.py does
    assert followed(follower).iters == []
    write(path, start(seed=2), step(0, loss=1.0), step(1), step(2))  # longer than the one before
    assert [e["loss"] for e in followed(follower).iters] == [1.0, 3.0, 3.0]
    path.rename(tmp_path / "aside2")
    write(path, start(seed=3), *[step(i, loss=2.0) for i in range(9)])  # before the next look
    assert [e["loss"] for e in followed(follower).iters] == [2.0] * 9
    first, second = path.read_text().splitlines()[:2]
    path.write_text(f"{first}\n{second}\n")
    assert len(followed(follower).iters) == 1
    path.write_text("")
    assert followed(follower).iters == []


def test_status_says_where_a_run_is_and_when_it_last_wrote(tmp_path):
    path = tmp_path / "out" / "log.jsonl"
    follower = Follower(str(tmp_path / "out"), "x")

    def now(age_s: float) -> str:
        run = followed(follower)
        return status(follower, run, (follower.written_at or 0) + age_s)

    assert now(0) == f"waiting for {path}"
    write(path, start())
    assert now(1) == "step 0 of 100, last line 1.0s ago"
    write(path, *map(step, range(40)))
    assert now(12) == "step 40 of 100, 0.6s left, last line 12.0s ago"
    write(path, {"event": "end", "iter": 100})
    assert now(7300) == "ended 2h01m ago, at step 100 of 100"
    shutil.rmtree(path.parent)
    path.mkdir(parents=True)
    assert now(0).startswith(f"cannot read {path}: ")


# ---- the server ----------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    """Serves a run named "run"."""
    log(tmp_path / "run", {0: 4.0, 10: 3.0})
    with serving(Live([str(tmp_path / "run")], report.describe)) as made:
        yield made


def test_server_gives_the_page_and_its_data(server):
    assert server.root == "/"
    code, _, content = ask(server, "GET", "")
    assert (code, content[:15]) == (200, b"<!doctype html>")
    code, _, content = ask(server, "GET", "data")
    data = json.loads(content)
    assert code == 200
    assert re.search(r"ended [\d.]+s ago, at step 10", data["parts"]["head"])
    assert {"loss", "time_ms"} <= data["charts"].keys()
    again = json.loads(ask(server, "GET", f"data?have={data['version']}")[2])
    assert (again["parts"].keys(), again["charts"]) == ({"head"}, None)
    for have in ("%ff&" * 100, EVIL.replace(" ", "+")):
        assert json.loads(ask(server, "GET", f"data?have={have}")[2])["charts"] is not None
    assert ask(server, "GET", "run/log.jsonl")[0] == 404
    assert ask(server, "POST", "data", {})[0] == 404


def test_figures_that_a_run_lacks_are_said_in_plain_words(server, tmp_path):
    (tmp_path / "running").mkdir()
    write(tmp_path / "running" / "log.jsonl", start(), step(0))
    ended = tmp_path / "ended" / "log.jsonl"
    write(ended, start(), {"event": "end", "iter": 100})
    page = Live([str(tmp_path / name) for name in ("running", "ended", "run")], report.describe)
    parts = json.loads(page.answer(""))["parts"]
    assert "n/a" not in parts["head"] + parts["tables"]
    assert "<dt>best val loss</dt><dd>not yet</dd>" in parts["head"]
    assert "<dt>best val loss</dt><dd>not in the log</dd>" in parts["head"]
    memory = r"peak memory</th><td[^>]*>not yet</td><td[^>]*>not in the log</td><td[^>]*>2.00 GiB"
    assert re.search(memory, parts["tables"])


def test_several_clients_share_what_was_read(server, tmp_path):
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(server, "GET", "data")[2])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({json.loads(answer)["version"] for answer in answers}) == 1
    write(tmp_path / "run" / "log.jsonl", start(10, max_iters=20), step(10))
    server.page.next_read_at = 0.0
    assert "step 11 of 20" in json.loads(ask(server, "GET", "data")[2])["parts"]["head"]


def test_server_stays_within_its_share_of_a_core(server, tmp_path):
    path = tmp_path / "run" / "log.jsonl"
    path.unlink()
    write(path, start(), *map(step, range(20_000)))
    server.page.next_read_at = 0.0
    t0 = time.process_time()
    server.page.answer("")
    spent_s = time.process_time() - t0
    assert server.page.wait_s >= 0.5 * spent_s / live.SHARE
    write(path, step(20_000))
    assert "step 20,000 " in server.page.answer("")  # not read yet
    server.page.next_read_at = 0.0
    assert "step 20,001 " in server.page.answer("")


# ---- in a browser --------------------------------------------------------------------------------------------

TEXT = "document.getElementById('part-{}').textContent"


@needs_browser
def test_page_says_loading_before_plotly_has_come(browser: Browser, server):
    content = ask(server, "GET", "")[2]
    assert content.index(b">loading<") < content.index(b"<script>") < len(content) - 4_000_000
    tab = browser.open("about:blank#")
    slow = {"offline": False, "latency": 0, "downloadThroughput": 1 << 20, "uploadThroughput": 1 << 20}
    tab.call("Network.emulateNetworkConditions", **slow)  # about 5 s
    tab.call("Page.navigate", url=server.url)
    tab.wait("document.body?.innerText.includes('loading') && document.readyState === 'loading'")
    tab.wait("document.querySelector('#loss .trace')")
    assert not tab.run("document.body.innerText.includes('loading')")
    tab.close()


@needs_browser
def test_page_follows_a_run_that_is_killed_and_resumed_beside_another(browser: Browser, tmp_path):
    ended = Path(log(tmp_path / "ended", {0: 4.0, 6: 3.0}))
    growing = tmp_path / "out" / "log.jsonl"
    command = [sys.executable, "bench/report.py", str(growing.parent), str(ended), "--serve"]
    serving = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        url = serving.stdout.readline().split()[0]
        tab = browser.open(url)  # before the run
        tab.wait(TEXT.format("head") + ".includes('waiting for')")
        tab.wait("document.querySelector('#loss .trace')")  # of the other run

        write(growing, start(), *map(step, range(40)), {"event": "sample", "iter": 40, "texts": ["Once"]})
        tab.wait(TEXT.format("head") + ".includes('step 40 of 100')")
        tab.wait(TEXT.format("samples") + ".includes('out, step 40')")
        write(growing, start(20), *map(step, range(20, 100)), {"event": "end", "iter": 100})  # killed and resumed
        tab.wait(TEXT.format("head") + ".includes('at step 100 of 100')")
        points = "document.getElementById('loss')._fullData.filter(t => t.meta.run === 0).flatMap(t => [...t.x])"
        tab.wait(f"{points}.length === 100")
        assert tab.run("document.querySelectorAll('header').length") == 2
        assert tab.console() == []
        assert all(request.startswith(url) for request in tab.requests())

        phone = browser.open(url, 360, dark=True)
        phone.wait("document.querySelector('#loss .trace')")
        assert phone.run("document.documentElement.scrollWidth") == 360
        assert (
            phone.run("Math.max(...[...document.querySelectorAll('main *')].map(e => e.getBoundingClientRect().right))")
            <= 360
        )
        assert phone.run("document.getElementById('loss').layout.paper_bgcolor") == "#141414"
        phone.run("document.querySelector('[data-run=\"1\"]').click()")
        write(ended / "log.jsonl", {"event": "sample", "iter": 6, "texts": [EVIL]})
        phone.wait(TEXT.format("samples") + ".includes('onerror')")
        assert phone.run("document.getElementById('loss').data.filter(t => t.meta.run === 1 && t.visible).length") == 0
        assert phone.run("document.title") == "out and ended"
        assert phone.console() == []
        phone.close()

        serving.send_signal(signal.SIGINT)
        _, err = serving.communicate(timeout=30)
        assert (serving.returncode, err) == (0, "no longer served\n")
        tab.wait("document.body.classList.contains('lost')")
        tab.close()
    finally:
        serving.kill()
        serving.wait()
