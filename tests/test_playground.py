"""The playground: its server with real models, asked by hand and by headless Chromium."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import Browser, Tab, needs_browser
from conftest import ROOT
from tiny_models import MODERN, SMALL, make

import sample
from data.tokenizer import BytesTokenizer, CharTokenizer
from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.share import playground
from deskgpt.share.playground import HEADERS, MOST_BODY_BYTES, MOST_PROMPT_CHARS, Player, Server, Wish
from sample import Sample, SampleConfig

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


def player_of(name: str, config: Any, tokenizer: Any) -> Player:
    """A model with random weights."""
    trained = sample.Trained(make(config).eval(), tokenizer, name, None)
    return sample.player(SampleConfig(), trained, CPU)


def serving(*players: Player) -> Iterator[Server]:
    with Server(list(players), Wish(**WISH), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(run) -> Iterator[Server]:
    """A page with a model of characters from a checkpoint, and one of bytes."""
    of_chars = sample.player(SampleConfig(), sample.load("resume", str(run), CPU), CPU)
    yield from serving(of_chars, player_of("bytes", replace(MODERN, vocab_size=256), BytesTokenizer()))


def ask(server: Server, method: str, place: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """(status, headers, body) of a request; place: the path below the token, or a whole one."""
    path = place if place.startswith("/") else f"/{server.token}/{place}"
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)) as connection:
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def write(server: Server, model: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """The events of a text."""
    status, _, body = ask(server, "POST", "write", {"model": model} | WISH | changes)
    assert status == 200, body
    return [json.loads(line) for line in body.splitlines()]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(e.get("text", "") for e in events)


# ---- what it writes ----


@pytest.mark.parametrize(
    "changes",
    [{}, {"seed": 7}, {"temperature": 0, "top_k": 0}, {"top_p": 0.5, "stop": "e"}, {"stop": "he", "temperature": 2.0}],
)
def test_text_is_the_very_one_that_sample_prints_first(server, run, changes):
    settings = {k: v for k, v in (WISH | changes).items() if k != "prompt"}
    (expected,) = sample.main(SampleConfig(out_dir=str(run), device="cpu", start="the ", num_samples=1, **settings))
    assert "the " + text_of(write(server, **changes)) == expected


def test_probabilities_are_the_models_and_sum_to_1_with_the_rest(server):
    model = server.players[0].model
    ids = server.players[0].encode("the ")
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


def test_tokens_that_are_parts_of_characters_keep_their_bytes(server):
    player = server.players[1]
    events = write(server, 1, prompt="é", max_new_tokens=60, temperature=1.0)
    expected = Sample(BytesTokenizer(), "é", "")
    for e in events[1:-1]:
        assert e["text"] == expected.add(e["id"])
        assert e["name"] == (repr(chr(e["id"])) if e["id"] < 128 else f"bytes {e['id']:02X}")
    rest = expected.finish()
    assert events[-1]["text"] == rest
    assert [e["id"] for e in events[1:-1]] == drawn(player, "é", 60)
    assert any(e["text"] == "" for e in events[1:-1])


def drawn(player: Player, prompt: str, n: int) -> list[int]:
    options: dict[str, Any] = {"seed": WISH["seed"], "top_k": WISH["top_k"]}
    return [int(new) for new in player.model.generate(player.encode(prompt), n, **options)]


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


def test_watched_generation_draws_the_same_tokens():
    model, seen = make(SMALL).eval(), []
    ids = torch.tensor([[1, 2, 3]])
    watched = torch.stack(list(model.generate(ids, 40, seed=3, vocab_size=90, watch=lambda x: seen.append(x.shape))))
    assert torch.equal(watched, torch.stack(list(model.generate(ids, 40, seed=3, vocab_size=90))))
    assert seen == [(1, 90)] * 40


def test_prompt_beyond_the_context_is_cut_as_generation_cuts_it(server):
    events = write(server, prompt="the " * 10, max_new_tokens=5)
    assert events[0] == {"prompt_tokens": 40, "block_size": 32}
    assert [e["id"] for e in events[1:-1]] == [
        e["id"] for e in write(server, prompt="the " * 8, max_new_tokens=5)[1:-1]
    ]


# ---- whom it answers ----


@pytest.mark.parametrize("place", ["page.json", "", "playground.js", "write", "nothing"])
def test_answers_keep_the_browser_to_this_server_and_let_no_other_page_read(server, place):
    _, headers, _ = ask(server, "GET", place)
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert re.fullmatch(r"deskGPT", headers["Server"])


def test_nothing_is_served_without_the_token(server):
    token = server.token
    swapped = token[:-1] + ("A" if token[-1] != "A" else "B")
    for path in (
        "/",
        "/page.json",
        f"/{swapped}/",
        f"/{token[:-1]}/",
        f"/{token}x/",
        "//",
        f"/x/{token}/",
        "/%C3%A9/",
        "/%00",
    ):
        for method in ("GET", "POST"):
            status, _, body = ask(server, method, path)
            assert (status, json.loads(body)) == (404, {"error": "there is nothing here"}), path


def test_nothing_is_served_beside_the_page(server):
    for place in (
        "playground.py",
        "../playground.py",
        "..%2fplayground.py",
        "./",
        "page.json?x",
        "write",
        "/etc/passwd",
    ):
        assert ask(server, "GET", place)[0] == 404
    assert ask(server, "POST", "page.json", {})[0] == 404
    for method in ("HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(server, method, "")[0] == 501


@pytest.mark.parametrize("host", ["example.com", "example.com:{port}", "127.0.0.1", "127.0.0.1:1", "", "localhost"])
def test_other_host_names_are_answered_as_if_nothing_were_here(server, host):
    port = server.server_address[1]
    assert ask(server, "GET", "", Host=f"localhost:{port}")[0] == 200
    assert ask(server, "GET", "", Host=host.format(port=port))[0] == 404
    assert ask(server, "POST", "write", {"model": 0} | WISH, Host=host.format(port=port))[0] == 404


def first_line(server: Server, request: str) -> bytes:
    """What the server answers to a request as it is, which http.client would refuse to send."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as connection:
        connection.sendall(request.encode())
        return connection.makefile("rb").readline()


def test_malformed_requests_are_refused(server):
    host = f"Host: {server.hosts[0]}\r\n"
    start = f"GET /{server.token}/ HTTP/1.1\r\n"
    assert b" 200 " in first_line(server, f"{start}{host}\r\n")
    assert b" 404 " in first_line(server, f"{start}{host}{host}\r\n")  # two hosts are one too many
    assert b" 404 " in first_line(server, f"{start}\r\n")
    assert b" 404 " in first_line(server, f"GET /é/ HTTP/1.1\r\n{host}\r\n")
    assert b" 400 " in first_line(server, f"GET / / /\r\n{host}\r\n")
    assert b" 414 " in first_line(server, f"GET /{'x' * 70_000} HTTP/1.1\r\n")
    assert b" 431 " in first_line(server, f"{start}{host}{'X: y' * 20_000}\r\n\r\n")


def test_request_without_a_length_or_with_too_great_a_one_is_refused_unread(server):
    head = f"POST /{server.token}/write HTTP/1.1\r\nHost: {server.hosts[0]}\r\n"
    for length, status in ((MOST_BODY_BYTES + 1, b" 413 "), ("9" * 5000, b" 411 "), ("-1", b" 411 "), ("x", b" 411 ")):
        assert status in first_line(server, f"{head}Content-Length: {length}\r\n\r\n")
    assert b" 411 " in first_line(server, f"{head}Transfer-Encoding: chunked\r\n\r\n")


def test_only_this_machine_can_connect(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


BAD = {
    b"": "the request is not JSON in UTF-8",
    b"{": "the request is not JSON in UTF-8",
    b"\xff\xfe": "the request is not JSON in UTF-8",
    b'{"seed": NaN}': "the request is not JSON in UTF-8",
    b'{"seed": 1' + b"0" * 5000 + b"}": "the request is not JSON in UTF-8",
    b"[" * 100_000: "the request is not JSON in UTF-8",
    b"[]": "the request is not a JSON object",
    b"{}": "prompt is missing",
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "the prompt is empty; type some text or a line break"),
    (
        {"prompt": "a" * (MOST_PROMPT_CHARS + 1)},
        "prompt has 100,001 characters, at most 100,000 are allowed; shorten it",
    ),
    ({"prompt": "\ud800"}, "prompt is not UTF-8 text: it holds half of a character"),
    ({"prompt": 5}, "prompt=5 is not text"),
    ({"prompt": "the \u2603"}, "the tokenizer does not know '\u2603'; its .*"),
    ({"stop": "a" * 1001}, "stop has 1,001 characters, at most 1,000 are allowed; shorten it"),
    ({"max_new_tokens": 2001}, "max_new_tokens=2001 must be from 1 to 2,000"),
    ({"max_new_tokens": 0}, "max_new_tokens=0 must be from 1 to 2,000"),
    ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 is not a whole number"),
    ({"max_new_tokens": True}, "max_new_tokens=True is not a whole number"),
    ({"temperature": -0.1}, "temperature=-0.1 must be from 0 to 100"),
    ({"temperature": 10**400}, "temperature=10+... must be from 0 to 100"),
    ({"temperature": None}, "temperature=None is not a number"),
    ({"temperature": "1"}, "temperature='1' is not a number"),
    ({"temperature": False}, "temperature=False is not a number"),
    ({"top_k": -1}, "top_k=-1 must be from 0 to 1,000,000"),
    ({"top_p": 0}, "top_p=0 must be from 1e-06 to 1"),
    ({"seed": 2**53}, "seed=9007199254740992 must be from 0 to 9,007,199,254,740,991"),
    ({"seed": []}, "seed=.. is not a whole number"),
    ({"model": 2}, "model=2 must be below 2"),
    ({"model": -1}, "model=-1 must be below 2"),
    ({"model": "0"}, "model='0' is not a whole number"),
    ({"x" * 99: 1}, "'x+... is not a setting; these are: prompt, .*, model"),
]


@pytest.mark.parametrize(("body", "message"), [*BAD.items(), *(({"model": 0} | WISH | w, m) for w, m in WRONG)])
def test_bad_requests_get_one_line_that_names_the_value(server, body, message):
    status, headers, reply = ask(server, "POST", "write", body)
    assert (status, headers["Content-Type"]) == (400, "application/json")
    error = json.loads(reply)["error"]
    assert re.fullmatch(message, error), error


def test_numbers_beyond_a_float_are_refused(server):
    body = json.dumps({"model": 0} | WISH).replace("0.8", "1e999").encode()
    status, _, reply = ask(server, "POST", "write", body)
    assert (status, json.loads(reply)["error"]) == (400, "temperature=inf must be from 0 to 100")


# ---- how texts end, and who waits ----


def test_text_ends_at_the_next_token_once_its_reader_has_gone(server, monkeypatch):
    player = server.players[0]
    drawn = []

    class Counted(Sample):
        def add(self, token: int) -> str:
            drawn.append(token)
            return super().add(token)

    monkeypatch.setattr(player, "grow", lambda prompt, stop: Counted(player.tokenizer, prompt, stop))
    with server.turn:  # no token is computed meanwhile
        with closing(http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)) as connection:
            connection.request("POST", f"/{server.token}/write", json.dumps({"model": 0} | WISH))
            response = connection.getresponse()
            assert b"prompt_tokens" in response.readline()
            response.close()
        assert player.busy.locked()
    assert player.busy.acquire(timeout=10)
    player.busy.release()
    assert len(drawn) <= 1


def test_second_text_of_a_model_waits_and_is_then_told_that_it_is_busy(server, monkeypatch):
    player = server.players[0]
    player.busy.acquire()
    threading.Timer(0.1, player.busy.release).start()
    assert write(server)[-1]["end"] == "length"  # it waited
    monkeypatch.setattr(playground, "BUSY_S", 0.01)
    with player.busy:
        status, _, body = ask(server, "POST", "write", {"model": 0} | WISH)
        assert write(server, model=1)[-1]["end"] == "length"  # the other model is free
    assert (status, json.loads(body)["error"]) == (
        503,
        f"{player.name} is busy with another text; try again when that is done",
    )


def test_weights_whose_logits_are_not_numbers_end_in_one_line(server):
    player = server.players[0]
    weight = player.model.lm_head.weight
    with torch.no_grad():
        kept = weight.clone()
        weight.fill_(float("nan"))
    try:
        assert write(server)[-1] == {"error": "the model's output is NaN, which gives no text; try --dtype=float32"}
    finally:
        with torch.no_grad():
            weight.copy_(kept)


# ---- the command ----


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--compare_with=out-b"], 2, "compare_with=out-b needs the page; add --serve"),
        (["--serve", "--port=65536"], 2, "port=65536 must be from 0 to 65535"),
        (["--serve", "--compile"], 2, "compile=True is not for --serve; leave one of them out"),
        (["--serve", "--max_new_tokens=2001"], 1, "max_new_tokens=2001 must be from 1 to 2,000"),
        (["--serve", "--compare_with=nowhere"], 1, "init_from=nowhere: .*"),
        (["--serve", "--port={taken}"], 1, "port={taken} is in use; try another, or --port=0 for one that is free"),
    ],
)
def test_what_cannot_be_served_ends_in_one_line(run, script, server, flags, code, message):
    taken = server.server_address[1]
    done = script("sample.py", f"--out_dir={run}", "--device=cpu", *(f.format(taken=taken) for f in flags))
    assert (done.code, done.out) == (code, "")
    assert re.fullmatch(f"error: {message.format(taken=taken)}\n", done.err), done.err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_command_serves_two_models_until_ctrl_c_in_the_middle_of_a_text(run):
    command = [sys.executable, "sample.py", f"--out_dir={run}", f"--compare_with={run / 'ckpt_best.pt'}", "--serve"]
    command += ["--device=cpu", "--start=and", "--max_new_tokens=2000"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"the playground, until Ctrl\+C: http://127\.0\.0\.1:(\d+)/([\w-]{32})/\n", line)
        assert found, line
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
        connection.request("GET", f"/{found[2]}/page.json")
        page = json.loads(connection.getresponse().read())
        assert [m["name"] for m in page["models"]] == [str(run), str(run / "ckpt_best.pt")]
        for m in page["models"]:
            assert re.fullmatch(
                r"step 6, best val loss 4\.5000, 0\.\d\dM parameters, context of 32 tokens", ", ".join(m["facts"])
            )
        assert (page["settings"]["prompt"], page["settings"]["max_new_tokens"]) == ("and", 2000)
        connection.request("POST", f"/{found[2]}/write", json.dumps({"model": 1} | page["settings"]))
        response = connection.getresponse()
        response.readline()
        process.send_signal(signal.SIGINT)
        *_, last = response.read().splitlines()
        out, err = process.communicate(timeout=20)
    assert json.loads(last) == {"error": "the server was stopped"}
    assert (process.returncode, out, err) == (0, "the playground is closed\n", "")


# ---- in a browser ----


def opened(browser: Browser, server: Server, width: int = 1200, dark: bool = False) -> Tab:
    tab = browser.open(server.url, width, dark, height=800, phone=width < 500)
    tab.wait("!document.getElementById('generate').disabled")
    return tab


TEXTS = "[...document.querySelectorAll('.text')].map(t => t.textContent)"
GENERATE = "document.getElementById('generate')"


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False), (390, True)])
def test_page_shows_both_models_texts_and_the_probability_of_a_token(browser, server, width, dark):
    page = opened(browser, server, width=width, dark=dark)
    assert (
        page.run("[...document.querySelectorAll('.facts')].map(f => f.textContent.includes('best val loss'))")
        == [True] * 2
    )
    assert page.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 20, 20)" if dark else "rgb(255, 255, 255)"
    )
    page.run(f"{GENERATE}.click()")
    page.wait(f"!{GENERATE}.disabled")
    assert page.run(TEXTS) == ["the " + text_of(write(server, model)) for model in (0, 1)]
    token = next(e for e in write(server)[1:-1] if e["text"].strip())
    page.run(f"document.querySelectorAll('.token')[{write(server).index(token) - 1}].id = 'this'")
    page.run("document.getElementById('this').scrollIntoView({block: 'center'})")
    if width < 500:
        page.tap("#this")
        page.wait("document.activeElement.id === 'this'")
    else:
        page.point("#this")
    page.wait("!tip.hidden")
    said = page.run("tip.innerText")
    assert token["name"] in said
    assert f"token {token['id']}" in said
    assert "At temperature 1, before top-k and top-p." in said
    shares = [float(s) for s in re.findall(r"(?<!<)\b([\d.]+)%", page.run("tip.querySelector('table').innerText"))]
    assert sum(shares) == pytest.approx(100, abs=0.6)
    box = page.run("(r => [r.left, r.top, r.right, r.bottom])(tip.getBoundingClientRect())")
    assert min(box) >= 0
    assert (box[2] <= width, box[3] <= 800) == (True, True)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.console() == []


@needs_browser
def test_keys_generate_stop_and_go_through_the_tokens(browser, server):
    page = opened(browser, server)
    page.run("form.elements.max_new_tokens.value = 2000; form.elements.prompt.focus()")
    page.press("Enter", modifiers=2)
    page.wait("document.querySelectorAll('.token').length > 20")
    page.press("Escape")
    page.wait(f"!{GENERATE}.disabled")
    said = page.run("document.querySelector('.status').textContent")
    assert re.fullmatch(r"stopped after \d+ tokens", said)
    assert page.run("document.querySelectorAll('.model:first-child .token').length") < 2000
    page.run("document.querySelector('.token').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.press("ArrowLeft")
    assert page.run("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 1
    assert page.run("tip.querySelector('h3').textContent === document.activeElement.about.name")
    assert page.run("document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.press("Escape")
    assert page.run("tip.hidden")
    for player in server.players:  # the server has stopped too
        assert player.busy.acquire(timeout=10)
        player.busy.release()


@needs_browser
def test_errors_of_one_model_are_shown_at_its_text_and_the_other_writes(browser, server):
    page = opened(browser, server, width=390)
    page.run("form.elements.prompt.value = '\u2603'; generate()")
    page.wait("stopper === null")
    statuses = page.run("[...document.querySelectorAll('.status')].map(s => s.textContent)")
    assert statuses[0].startswith("the tokenizer does not know '\u2603'")
    assert statuses[1].startswith("40 of 40 tokens")
    assert page.run("document.documentElement.scrollWidth") <= 390
    page.run("form.elements.temperature.value = 101; generate()")
    assert page.run("stopper === null")  # the browser shows the range at the field


@needs_browser
def test_html_that_a_model_writes_stays_text(browser):
    evil = player_of(EVIL, SMALL, HtmlTokenizer())
    evil.facts.append(EVIL)
    for server in serving(evil):
        page = opened(browser, server)
        page.run(f"form.elements.prompt.value = {json.dumps(EVIL)}; generate()")
        page.wait("document.querySelectorAll('.token').length > 20 && stopper === null")
        page.run("document.querySelector('.token').focus()")
        time.sleep(0.1)
        assert page.run(TEXTS)[0].startswith(EVIL)
        assert page.run("document.title") == "deskGPT playground"
        assert page.run("document.querySelectorAll('main img, main script, main b, #tip img, #tip script').length") == 0
        assert page.console() == []
