"""The page of sample.py --serve: its server with real models, asked by hand and by headless Chromium."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Browser, Tab, needs_browser
from conftest import ROOT, assert_one_line
from test_page_server import ask, error_in, serving
from tiny_models import MODERN, SMALL, make

import sample
from data.tokenizer import BytesTokenizer, CharTokenizer
from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute.generation import GenerationConfig, Sample
from deskgpt.serve.page_server import Server
from deskgpt.serve.playground import Playground
from sample import SampleConfig

CPU = torch.device("cpu")
WISH: dict[str, Any] = {"prompt": "the ", "stop": "", "max_new_tokens": 40, "temperature": 0.8}
WISH |= {"top_k": 200, "top_p": 1.0, "seed": 1337}
EVIL = "<script>document.title='x'</script><img src=x onerror=\"document.title='x'\">"


class HtmlTokenizer:
    """Its model writes HTML, whatever it draws."""

    vocab_size = 3
    end_of_text = None
    texts = (EVIL.encode(), b"&amp;<b>", b"</div>")

    def encode_prompt(self, text: str) -> np.ndarray:
        return np.zeros(1, np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.texts[i] for i in ids)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """An out_dir with checkpoints of a model of characters, with random weights."""
    out_dir = tmp_path_factory.mktemp("run")
    tokenizer = CharTokenizer.of(string.printable).meta()
    state = make(SMALL).state_dict()
    saved = Checkpoint(state, {}, asdict(SMALL), iter_num=6, best_val_loss=4.5, config={}, tokenizer=tokenizer)
    store.save(saved, out_dir, best=True)
    return out_dir


def page_of(trained: sample.Trained) -> Playground:
    return sample.page_of(SampleConfig(), GenerationConfig(**WISH), trained, CPU)


@pytest.fixture(scope="module")
def page(run) -> Playground:
    return page_of(sample.load("resume", str(run), CPU))


@pytest.fixture(scope="module")
def server(page) -> Iterator[Server]:
    with serving(page) as made:
        yield made


def write(server: Server, **changes: Any) -> list[dict[str, Any]]:
    """The events of a text."""
    status, _, body = ask(server, "POST", "write", WISH | changes)
    assert status == 200, body
    return [json.loads(line) for line in body.splitlines()]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(e.get("text", "") for e in events)


# ---- what it writes ----


@pytest.mark.parametrize(
    "changes",
    [{}, {"seed": 7, "temperature": 0, "top_k": 0}, {"top_p": 0.5, "stop": "e"}, {"stop": "he", "temperature": 2.0}],
)
def test_text_is_the_very_one_that_sample_prints_first(server, run, changes):
    settings = {k: v for k, v in (WISH | changes).items() if k != "prompt"}
    (expected,) = sample.main(SampleConfig(out_dir=str(run), device="cpu", start="the ", num_samples=1, **settings))
    assert "the " + text_of(write(server, **changes)) == expected


def test_probabilities_are_the_models_and_sum_to_1_with_the_rest(server, page):
    model = page.model
    ids = page.encode("the ")
    events = write(server, top_k=40, temperature=3.0)  # neither of which changes them
    assert any(e["rank"] > 8 for e in events[1:-1])
    assert [len(events), events[0]["prompt_tokens"]] == [42, 4]
    for e in events[1:-1]:
        with torch.inference_mode():
            logits, _ = model(ids[:, -model.config.block_size :])
        p = logits[0, -1].double().softmax(0)
        listed = {t["id"]: t["p"] for t in e["top"]} | {e["id"]: e["p"]}
        for token, found in listed.items():
            assert found == pytest.approx(p[token].item(), rel=1e-4)
        assert sum(listed.values()) + e["rest"] == pytest.approx(1)
        assert [t["id"] for t in e["top"]] == p.topk(8).indices.tolist()
        assert e["rank"] == 1 + (p > p[e["id"]]).sum()
        ids = torch.cat((ids, torch.tensor([[e["id"]]])), 1)


def test_tokens_that_are_parts_of_characters_keep_their_bytes():
    model = make(replace(MODERN, vocab_size=256)).eval()
    page = page_of(sample.Trained(model, BytesTokenizer(), "bytes", None))
    with serving(page) as server:
        events = write(server, prompt="é", max_new_tokens=60, temperature=1.0)
    expected = Sample(BytesTokenizer(), "é", "")
    for e in events[1:-1]:
        assert e["text"] == expected.add(e["id"])
        assert e["name"] == (repr(chr(e["id"])) if e["id"] < 128 else f"bytes {e['id']:02X}")
    rest = expected.finish()
    assert events[-1]["text"] == rest
    drawn = model.generate(page.encode("é"), 60, seed=WISH["seed"], top_k=WISH["top_k"])
    assert [e["id"] for e in events[1:-1]] == [int(new) for new in drawn]
    assert any(e["text"] == "" for e in events[1:-1])


def test_stop_text_of_several_tokens_ends_the_text_and_is_never_sent(server):
    whole = text_of(write(server, max_new_tokens=100))
    stop = whole[30:35]
    events = write(server, max_new_tokens=100, stop=stop)
    assert text_of(events) == whole[: whole.find(stop)]
    assert events[-1]["end"] == "stop"
    # What only begins like the stop text is sent, and each token still has its own text.
    events = write(server, max_new_tokens=36, stop=whole[30:36] + "\x00")
    assert text_of(events) == whole[:36]
    assert [e["text"] for e in events[1:-1]] == list(whole[:36])
    assert events[-1]["end"] == "length"


def test_texts_that_are_asked_for_at_once_do_not_disturb_each_other(server):
    def text(seed: int) -> str:
        return text_of(write(server, seed=seed))

    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(text, range(3)))
    assert together == list(map(text, range(3)))


def test_weights_whose_logits_are_not_numbers_end_in_one_line(server, page):
    weight = page.model.lm_head.weight
    kept = weight.detach().clone()
    try:
        weight.data.fill_(float("nan"))
        assert_one_line(write(server)[-1]["error"]["message"], "NaN", "--dtype=float32")
    finally:
        weight.data.copy_(kept)


def test_what_is_not_known_of_a_model_is_not_shown(run):
    trained = sample.load("resume", str(run / "ckpt.pt"), CPU)
    trained.checkpoint = None
    page = page_of(trained)
    assert page.facts == ["0.03M parameters", "context of 32 tokens"]
    assert page.name == f"{run.name}/ckpt.pt"


# ---- whom it answers ----


def test_page_has_a_token_and_may_load_nothing_from_elsewhere(server, page):
    assert re.fullmatch(r"[\w-]{32}", page.token)
    kinds = {"": "text/html", "playground.css": "text/css", "playground.js": "text/javascript", "page.json": "json"}
    for place, kind in kinds.items():
        status, headers, _ = ask(server, "GET", place)
        assert (status, kind in headers["Content-Type"]) == (200, True)
    assert b"default-src 'none'; script-src 'self'" in ask(server, "GET", "")[2]
    assert ask(server, "GET", "playground.py")[0] == 404


NO_REQUESTS = [b"", b"\xff\xfe", b'{"seed": 1' + b"0" * 5000 + b"}", b"[" * 100_000, b"[]", b"{}"]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": "a" * 100_001}, "100,000"),
    ({"prompt": "\ud800"}, "UTF-8"),
    ({"prompt": 5}, "prompt=5"),
    ({"prompt": "the \u2603"}, "\u2603"),
    ({"max_new_tokens": 2001}, "from 1 to 2,000"),
    ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
    ({"temperature": 10**400}, "temperature="),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_p": "1"}, "top_p='1'"),
    ({"seed": []}, "seed=[]"),
    ({"x" * 999: 1}, "JSON"),
]


@pytest.mark.parametrize(("body", "named"), [*((b, "JSON") for b in NO_REQUESTS), *WRONG])
def test_bad_requests_get_one_line_that_names_the_value(server, body, named):
    status, headers, reply = ask(server, "POST", "write", body if isinstance(body, bytes) else WISH | body)
    assert (status, headers["Content-Type"]) == (400, "application/json")
    error = error_in(reply)
    assert_one_line(error, named)
    assert len(error) < 300


# ---- the command ----


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        (["--serve", "--port=65536"], 2, "port=65536"),
        (["--serve", "--compile"], 2, "compile=True"),
        (["--serve", "--max_new_tokens=2001"], 1, "max_new_tokens=2001"),
        (["--serve", "--port={taken}"], 1, "{taken}"),
    ],
)
def test_what_cannot_be_served_ends_in_one_line(run, script, server, flags, code, named):
    taken = server.server_address[1]
    done = script("sample.py", f"--out_dir={run}", "--device=cpu", *(f.format(taken=taken) for f in flags))
    assert (done.code, done.out) == (code, "")
    assert_one_line(done.err, "error: ", named.format(taken=taken))


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_command_serves_until_ctrl_c_in_the_middle_of_a_text(run):
    command = [sys.executable, "sample.py", f"--out_dir={run}", "--serve", "--device=cpu", "--max_new_tokens=2000"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", url)
        assert found, url
        of_api = process.stdout.readline()
        assert f"base_url=http://127.0.0.1:{found[1]}/v1 api_key={found[2]}\n" in of_api

        def ask(method: str, place: str, body: str | None = None) -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
            connection.request(method, f"/{found[2]}/{place}", body)
            return connection.getresponse()

        page = json.loads(ask("GET", "page.json").read())
        assert page["name"] == run.name
        assert {"step 6", "best val loss 4.5000", "context of 32 tokens"} < set(page["facts"])
        assert page["settings"]["max_new_tokens"] == 2000
        response = ask("POST", "write", json.dumps(page["settings"]))
        # The server answers another request only once the thread that writes runs. A signal before would cut it off.
        ask("GET", "page.json").read()
        process.send_signal(signal.SIGINT)
        *_, last = response.read().splitlines()
        out, err = process.communicate(timeout=20)
    assert error_in(last) == "the server was stopped"
    assert (process.returncode, out) == (0, "")
    assert_one_line(err)


# ---- in a browser ----


def opened(browser: Browser, server: Server, width: int = 1200) -> Tab:
    tab = browser.open(server.url, width, False, height=800, phone=width < 500)
    tab.wait("!document.getElementById('generate').disabled")
    return tab


TEXT = "document.querySelector('.text').textContent"
GENERATE = "document.getElementById('generate')"


@needs_browser
@pytest.mark.parametrize("width", [1200, 390])
def test_page_shows_the_text_and_the_probability_of_a_token(browser, server, width):
    tab = opened(browser, server, width)
    assert "best val loss" in tab.run("document.querySelector('.facts').textContent")
    tab.run(f"{GENERATE}.click()")
    tab.wait(f"!{GENERATE}.disabled")
    assert tab.run(TEXT) == "the " + text_of(write(server))
    token = next(e for e in write(server)[1:-1] if e["text"].strip())
    tab.run(f"document.querySelectorAll('.token')[{write(server).index(token) - 1}].id = 'this'")
    tab.run("document.getElementById('this').scrollIntoView({block: 'center'})")
    if width < 500:
        tab.tap("#this")
        tab.wait("document.activeElement.id === 'this'")
    else:
        tab.point("#this")
    tab.wait("!tip.hidden")
    said = tab.run("tip.innerText")
    assert token["name"] in said
    assert f"token {token['id']}" in said
    shares = [float(s) for s in re.findall(r"(?<!<)\b([\d.]+)%", tab.run("tip.querySelector('table').innerText"))]
    assert sum(shares) == pytest.approx(100, abs=0.6)
    left, top, right, bottom = tab.run("(r => [r.left, r.top, r.right, r.bottom])(tip.getBoundingClientRect())")
    assert (left >= 0, top >= 0, right <= width, bottom <= 800) == (True, True, True, True)
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.console() == []


@needs_browser
def test_keys_generate_stop_and_go_through_the_tokens(browser, server):
    tab = opened(browser, server)
    tab.run("form.elements.max_new_tokens.value = 2000; form.elements.prompt.focus()")
    tab.press("Enter", modifiers=2)
    tab.wait("document.querySelectorAll('.token').length > 20")
    tab.press("Escape")
    tab.wait(f"!{GENERATE}.disabled")
    said = tab.run("document.querySelector('.status').textContent")
    assert re.fullmatch(r"stopped after \d+ tokens", said)
    assert tab.run("document.querySelectorAll('.token').length") < 2000
    tab.run("document.querySelector('.token').focus()")
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    tab.press("ArrowLeft")
    assert tab.run("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 1
    assert tab.run("tip.querySelector('h3').textContent === document.activeElement.about.name")
    tab.press("Escape")
    assert tab.run("tip.hidden")
    for thread in list(server.streaming):  # the server has stopped too
        thread.join(10)
    assert not server.streaming


@needs_browser
def test_playground_names_the_folder_and_shows_no_sign_for_a_line_break(browser, server, run):
    tab = opened(browser, server, width=390)
    assert tab.run("document.querySelector('h2').textContent") == run.name
    assert not tab.run("document.getElementById('settings').open")
    tab.run("addToken({text: '\\n', name: 'line', id: 1, p: 1, rank: 1, top: [], rest: 0}, text)")
    color = "getComputedStyle(document.querySelector('.line'), '::before').color"
    assert tab.run(color) == "rgba(0, 0, 0, 0)"
    tab.run("document.querySelector('.line').focus()")
    assert tab.run(color) != "rgba(0, 0, 0, 0)"


@needs_browser
def test_errors_are_shown_and_the_next_text_is_written(browser, server):
    tab = opened(browser, server, width=390)
    status = "document.querySelector('.status').textContent"
    tab.run("form.elements.prompt.value = '\u2603'; generate()")
    tab.wait("stopper === null")
    assert "\u2603" in tab.run(status)
    assert tab.run("document.documentElement.scrollWidth") <= 390
    tab.run("form.elements.prompt.value = 'and'; generate()")
    tab.wait("stopper === null")
    assert tab.run(status).startswith("40 of 40 tokens")


@needs_browser
def test_html_that_a_model_writes_stays_text(browser):
    tokenizer: Any = HtmlTokenizer()
    evil = page_of(sample.Trained(make(SMALL).eval(), tokenizer, EVIL, None))
    evil.facts.append(EVIL)
    with serving(evil) as server:
        tab = opened(browser, server)
        tab.run(f"form.elements.prompt.value = {json.dumps(EVIL)}; generate()")
        tab.wait("document.querySelectorAll('.token').length > 20 && stopper === null")
        tab.run("document.querySelector('.token').focus()")
        time.sleep(0.1)
        assert tab.run(TEXT).startswith(EVIL)
        assert tab.run("document.title") == "deskGPT playground"
        assert tab.run("document.querySelectorAll('main img, main script, main b, #tip img, #tip script').length") == 0
        assert tab.console() == []
