"""OpenAI's API of sample.py --serve, asked with the openai package and by hand, and the page as a chat."""

from __future__ import annotations

import http.client
import io
import json
import string
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from browser import Browser, Tab, needs_browser
from conftest import assert_one_line
from test_page_server import HEADERS, ask, error_in, serving
from tiny_models import SMALL, make

import sample
from data.chat import template
from data.tokenizer import BytesTokenizer, CharTokenizer, Tokenizer
from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.serve.page_server import HOST, Server
from deskgpt.system.terminal import harmless
from sample import SampleConfig

CPU = torch.device("cpu")
ASK: Any = [{"role": "user", "content": "Who is there?"}]


def saved(out_dir: Path, tokenizer: Tokenizer, chat: str | None) -> Path:
    """A run of a model with random weights."""
    config = replace(SMALL, vocab_size=tokenizer.vocab_size, block_size=96)
    state = make(config).state_dict()
    kept = Checkpoint(state, {}, asdict(config), 6, 4.5, {}, tokenizer=tokenizer.meta(), chat=chat)
    store.save(kept, out_dir, best=True)
    return out_dir


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("run"), BytesTokenizer(), template.NAME)


def page_of(run: Path, **settings: Any) -> sample.openai_api.Api:
    c = SampleConfig(out_dir=str(run), device="cpu", max_new_tokens=40, **settings)
    return sample.page_of(c, sample.wish_of(c), sample.load("resume", str(run), CPU), CPU)


@pytest.fixture(scope="module")
def server(run) -> Iterator[Server]:
    with serving(page_of(run)) as made:
        yield made


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Iterator[Server]:
    """Of a model of characters that saw no dialogues."""
    run = saved(tmp_path_factory.mktemp("plain"), CharTokenizer.of(string.printable), None)
    with serving(page_of(run)) as made:
        yield made


def client_of(server: Server, key: str | None = None) -> openai.OpenAI:
    key = server.page.token if key is None else key
    return openai.OpenAI(base_url=f"http://{HOST}:{server.server_port}/v1", api_key=key, max_retries=0)


def message_in(e: openai.APIStatusError) -> str:
    body: Any = e.body
    return body["message"]


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return client_of(server)


# ---- what it writes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drawn", [{"temperature": 0, "seed": 0}, {"seed": 7, "temperature": 1.3, "top_p": 0.8}])
def test_completion_is_the_text_of_sample_streamed_or_not(client, run, drawn):
    stop = ""
    for end in ("length", "stop"):
        c = SampleConfig(
            out_dir=str(run), device="cpu", start="the ", stop=stop, num_samples=1, max_new_tokens=60, **drawn
        )
        (expected,) = sample.main(c)
        asked = {"model": "any", "prompt": "the ", "stop": stop, "max_tokens": 60} | drawn
        whole = client.completions.create(**asked)
        (choice,) = whole.choices
        assert "the " + choice.text == expected
        assert choice.finish_reason == end
        assert whole.model == run.name
        assert whole.usage.prompt_tokens == 4
        assert whole.usage.completion_tokens == 60 if end == "length" else whole.usage.completion_tokens < 60
        pieces = list(client.completions.create(**asked | {"prompt": ["the "]}, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == choice.text
        assert [piece.choices[0].finish_reason for piece in pieces[-2:]] == [None, end]
        stop = expected[20:23]


def test_answers_are_those_of_chat_streamed_or_not(client, run, script, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Who is there?\nAnd now?\n"))
    done = script("sample.py", "--chat", f"--out_dir={run}", "--system=Be kind.", "--max_new_tokens=30", "--seed=5")
    messages = [{"role": "system", "content": "Be kind."}, *ASK]
    printed = ""
    for n in range(2):
        settings = {"model": "any", "messages": messages, "max_completion_tokens": 30, "seed": 5 + n}
        whole = client.chat.completions.create(**settings)
        answer = whole.choices[0].message.content
        first, *pieces, last = client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
        assert first.choices[0].delta.role == "assistant"
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer
        assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert last.choices == []
        assert last.usage == whole.usage
        printed += answer + "\n"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    assert harmless(printed) == done.out


def test_long_dialogue_is_cut_to_the_context_and_parts_of_a_message_are_one(client):
    def tokens_of(messages: Any) -> int:
        return client.chat.completions.create(model="any", messages=messages, max_tokens=1).usage.prompt_tokens

    turn = [*ASK, {"role": "assistant", "content": "Nobody."}]
    assert tokens_of(turn * 50 + ASK) <= 72  # three quarters of the context
    parts = [{"type": "text", "text": "Who is "}, {"type": "text", "text": "there?"}]
    assert tokens_of([{"role": "user", "content": parts}]) == tokens_of(ASK)


def test_answer_ends_at_the_first_of_several_stop_texts(client):
    text = client.completions.create(model="any", prompt="a", max_tokens=80, seed=1).choices[0].text
    stops = [text[40:44], text[20:23]]
    ended = client.completions.create(model="any", prompt="a", max_tokens=80, seed=1, stop=stops).choices[0]
    assert ended.text == text[: min(map(text.find, stops))]
    assert ended.finish_reason == "stop"


def test_seed_is_drawn_where_none_is_given_and_fields_without_a_meaning_are_ignored(client):
    more: Any = {"frequency_penalty": 1, "user": "me", "extra_body": {"top_k": 50, "min_p": 0.1}, "stop": None, "n": 1}
    texts = {client.completions.create(model="any", prompt="a", **more).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_what_a_request_leaves_out_is_as_the_flags_say(client, run):
    whole = client.completions.create(model="any", prompt="a", temperature=0, max_tokens=50).choices[0].text
    with serving(page_of(run, temperature=0.0, stop=whole[20:23])) as server:
        (choice,) = client_of(server).completions.create(model="any", prompt="a").choices
    assert choice.text == whole[: whole.find(whole[20:23])]
    assert choice.finish_reason == "stop"


def test_system_message_without_room_is_refused_at_the_start(run):
    with pytest.raises(ValueError, match="system's message takes") as e:
        page_of(run, system="x" * 100)
    assert_one_line(e.value, 96)


def test_models_are_listed_by_the_name_of_the_run(client, run):
    assert [model.id for model in client.models.list()] == [run.name]


def test_model_that_saw_no_chat_data_only_completes(plain, client):
    assert client_of(plain).completions.create(model="any", prompt="a", max_tokens=3).choices[0].text
    with pytest.raises(openai.BadRequestError) as e:
        client_of(plain).chat.completions.create(model="any", messages=ASK)
    assert_one_line(message_in(e.value), "docs/chat.md", "--chat")
    assert json.loads(ask(plain, "GET", "page.json")[2])["system"] is None
    with pytest.raises(openai.BadRequestError) as e:  # it has no token for this
        client_of(plain).completions.create(model="any", prompt="☃")
    assert_one_line(message_in(e.value), "☃")


# ---- what it refuses -----------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": None}, "prompt=None"),
    ({"prompt": ["a", "b"]}, "prompt="),
    ({"prompt": [1, 2]}, "prompt="),
    ({"prompt": "a" * 100_001}, "100,000"),
    ({"prompt": "\ud800"}, "UTF-8"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": "5"}, "max_tokens='5'"),
    ({"max_completion_tokens": 10**400}, "max_completion_tokens="),
    ({"temperature": -1}, "temperature=-1"),
    ({"temperature": True}, "temperature=True"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_p": []}, "top_p=[]"),
    ({"seed": 1.5}, "seed=1.5"),
    ({"seed": -1}, "seed=-1"),
    ({"n": 2}, "n=2"),
    ({"n": "x" * 9999}, "n="),
    ({"stop": {}}, "stop={}"),
    ({"stop": ["a", 5]}, "stop=5"),
    ({"stop": ["a" * 999] * 9}, "1,000"),
    ({"stream": "yes"}, "stream='yes'"),
    ({"stream": True, "stream_options": []}, "stream_options=[]"),
]


def post(server: Server, place: str, body: Any, **headers: str) -> tuple[int, Any, bytes]:
    return ask(server, "POST", f"/v1/{place}", body, **{"Authorization": f"Bearer {server.page.token}"} | headers)


@pytest.mark.parametrize(("change", "named"), WRONG, ids=lambda value: ascii(value)[:40])
def test_bad_requests_get_an_error_in_the_apis_format(server, change, named):
    status, headers, body = post(server, "completions", {"prompt": "a", "max_tokens": 3} | change)
    assert (status, headers["Content-Type"]) == (400, "application/json")
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    assert_one_line(error_in(body), named)
    assert len(error_in(body)) < 300


@pytest.mark.parametrize(
    "messages", [None, "hi", [], [5], [{"role": "tool", "content": "x"}], ASK * 2 + [{"role": "user"}]]
)
def test_messages_that_are_no_dialogue_are_refused(server, messages):
    status, _, body = post(server, "chat/completions", {"messages": messages})
    assert status == 400
    assert_one_line(error_in(body))


def test_only_the_key_opens_it_and_no_other_page_can_use_it(server):
    for key in ("wrong", server.page.token[:-1], server.page.token + "x"):
        for stream in (False, True):
            with pytest.raises(openai.AuthenticationError) as e:
                client_of(server, key).completions.create(model="any", prompt="a", stream=stream)
            assert_one_line(message_in(e.value), "API key")
    big = {"prompt": "a" * 1_500_000}
    assert post(server, "completions", big, Authorization="Basic x")[0] == 401  # read to its end before it is refused
    assert ask(server, "GET", "/v1/models")[0] == 401
    assert ask(server, "GET", "/v1/models", Authorization="Bearer ä")[0] == 401
    assert post(server, "completions", {"prompt": "a"}, Host="example.com")[0] == 404
    assert post(server, "nothing", {})[0] == 404
    for body in (b"", b"[]", b"\xff", b"[" * 100_000):
        assert post(server, "completions", body)[0] == 400
    # What a browser asks before another page may send a key.
    status, headers, _ = ask(server, "OPTIONS", "/v1/completions", Origin="http://example.com")
    assert status == 501
    assert not [name for name in headers if name.lower().startswith("access-control")]
    _, headers, _ = post(server, "completions", {"prompt": "a", "max_tokens": 1})
    assert {name: headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_once_its_reader_has_gone_and_once_the_server_ends(run, stream):
    for ends_first in ("reader", "server"):
        with (
            serving(page_of(run)) as server,
            closing(http.client.HTTPConnection(HOST, server.server_port)) as connection,
        ):
            body = json.dumps({"prompt": "a", "max_tokens": 900_000, "stream": stream})
            connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {server.page.token}"})
            while not server.streaming:
                time.sleep(0.01)
            threads = list(server.streaming)
            if ends_first == "server":
                server.ending.set()
                assert b"the server was stopped" in connection.getresponse().read()
            else:
                connection.close()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()


# ---- the page as a chat --------------------------------------------------------------------------------------

SEND = "document.getElementById('generate')"
TURNS = "[...document.querySelectorAll('.text > div')].map(turn => [turn.className, turn.textContent])"


def opened(browser: Browser, server: Server, width: int = 1200) -> Tab:
    tab = browser.open(server.url, width, False, height=800, phone=width < 500)
    tab.wait(f"!{SEND}.disabled")
    return tab


def sent(tab: Tab, content: str) -> None:
    tab.run(f"form.elements.prompt.value = {json.dumps(content)}; form.elements.prompt.focus()")
    tab.press("Enter")
    tab.wait("stopper === null")


@pytest.fixture
def answer_to(client) -> Callable[..., str]:
    def answer(messages: Any, seed: int, **more: Any) -> str:
        return (
            client.chat.completions.create(model="any", messages=messages, seed=seed, **more).choices[0].message.content
        )

    return answer


@needs_browser
@pytest.mark.parametrize("width", [1200, 390])
def test_page_of_a_model_that_answers_is_a_dialogue(browser, server, answer_to, width):
    tab = opened(browser, server, width)
    assert tab.run("document.getElementById('settings').open") == (width > 500)
    tab.run("form.elements.system.value = 'Be kind.'")
    sent(tab, "Who is there?")
    messages = [{"role": "system", "content": "Be kind."}, *ASK]
    first = answer_to(messages, 1337)
    assert tab.run(TURNS) == [["user", ASK[0]["content"]], ["assistant", first]]
    tab.run("document.getElementById('again').click()")  # another answer, with the next seed
    tab.wait("stopper === null")
    second = answer_to(messages, 1338)
    assert tab.run(TURNS) == [["user", ASK[0]["content"]], ["assistant", second]]
    sent(tab, "<b>And</b>\nnow?")
    messages += [{"role": "assistant", "content": second}, {"role": "user", "content": "<b>And</b>\nnow?"}]
    assert tab.run(TURNS)[2:] == [["user", messages[-1]["content"]], ["assistant", answer_to(messages, 1339)]]
    assert tab.run("document.documentElement.scrollWidth") <= width
    bottom = tab.run("document.getElementById('stop').getBoundingClientRect().bottom")
    assert bottom <= tab.run("innerHeight") + 1
    assert tab.console() == []


@needs_browser
def test_chat_goes_on_from_an_answer_that_was_stopped_and_after_a_refused_message(browser, server, answer_to):
    tab = opened(browser, server)
    tab.run("form.elements.max_new_tokens.value = 2000; form.elements.prompt.value = 'Who is there?'; void generate()")
    tab.wait("tokens > 5")
    tab.press("Escape")
    tab.wait("stopper === null")
    (_, begun) = tab.run(TURNS)
    assert len(begun[1]) < 2000
    tab.run("form.elements.max_new_tokens.value = 40")
    sent(tab, "x" * 200)  # which the context cannot hold
    assert "room for 72" in tab.run("document.querySelector('.status').textContent")
    assert tab.run("form.elements.prompt.value") == "x" * 200
    assert len(tab.run(TURNS)) == 2
    sent(tab, "And?")
    messages = [*ASK, {"role": "assistant", "content": begun[1]}, {"role": "user", "content": "And?"}]
    assert tab.run(TURNS)[-1][1] == answer_to(messages, 1338)
    assert tab.run("document.title") == "deskGPT playground"
