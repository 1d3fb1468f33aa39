"""sample.py --serve: what the page and OpenAI's API write, whom they answer, bad requests, and how
streams end.
"""

import http.client
import io
import json
import re
import signal
import socket
import string
import sys
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from conftest import CPU, POSIX, ROOT, assert_one_line, slow, until
from test_export import saved
from tiny_models import SMALL

import sample
from data.chat import template
from data.tokenizer import CharTokenizer
from deskgpt import server
from deskgpt.engine import InferenceEngine, encode_prompt, load_model
from deskgpt.errors import escape_control_chars
from sample import SampleConfig

ASK = [{"role": "user", "content": "Who is there?"}]


@dataclass
class Served:
    writer: Any  # a Writer
    port: int
    token: str

    @property
    def page(self) -> str:
        return f"/{self.token}/"

    @property
    def address(self) -> str:
        return f"http://{server.HOST}:{self.port}{self.page}"

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, bytes]:
        """Return (status, headers, body) of the answer to a request."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with closing(http.client.HTTPConnection(server.HOST, self.port, timeout=60)) as connection:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def post(self, path: str, body: Any) -> tuple[int, Any, bytes]:
        return self.ask("POST", path, body, Authorization=f"Bearer {self.token}")

    def client(self) -> openai.OpenAI:
        address = f"http://{server.HOST}:{self.port}/v1"
        return openai.OpenAI(base_url=address, api_key=self.token, max_retries=0)


@contextmanager
def serving(folder, **settings):
    """Serve the model of a checkpoint, by default at most 40 tokens at a time."""
    values: dict[str, Any] = {"device": "cpu", "max_new_tokens": 40, "start": "the "}
    c = SampleConfig(**values | settings)
    trained = load_model("resume", str(folder), CPU)
    ids = encode_prompt(c.start, trained.tokenizer)
    writer = sample.writer_of(c, c.start, ids, trained)
    with socket.create_server((server.HOST, 0)) as free:
        port = free.getsockname()[1]
    app = server.make_app(writer)
    thread = threading.Thread(target=server.run_app, args=(app, port), daemon=True)
    thread.start()
    until(lambda: hasattr(app.state, "server") and app.state.server.started)
    yield Served(writer, port, app.state.token)
    app.state.server.should_exit = True
    thread.join()


def saved_characters(folder: Path) -> None:
    """Save a model of 100 characters that saw no dialogues."""
    saved(folder, replace(SMALL, block_size=96), CharTokenizer.of(string.printable).meta())


def saved_chat(folder: Path) -> None:
    """Save a model of bytes that saw dialogues."""
    saved(folder, replace(SMALL, vocab_size=256, block_size=96), {"name": "bytes"}, template.NAME)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    saved_chat(folder)
    return folder


@pytest.fixture(scope="module")
def chat(run):
    with serving(run) as served:
        yield served


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Serve a model of characters that saw no dialogues."""
    folder = tmp_path_factory.mktemp("plain")
    saved_characters(folder)
    with serving(folder) as served:
        yield served


def error_in(body: bytes) -> str:
    return json.loads(body)["error"]["message"]


def test_probabilities_are_the_models(chat):
    trained = chat.writer.trained
    ids = encode_prompt("the ", trained.tokenizer)
    # Neither temperature nor top_p changes them.
    drawn = {"seed": 1, "temperature": 3.0, "top_p": 0.9}
    asked = drawn | {"prompt": "the ", "max_tokens": 9, "logprobs": 8}
    _, _, body = chat.post("/v1/completions", asked)
    entries = json.loads(body)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 9
    for e in entries:
        with torch.inference_mode():
            expected = trained.model(ids)[0][0, -1].double().log_softmax(0)
        for listed in (e, *e["top_logprobs"]):
            assert listed["logprob"] == pytest.approx(expected[listed["id"]].item(), rel=1e-4)
        assert [t["id"] for t in e["top_logprobs"]] == expected.topk(8).indices.tolist()
        assert e["rank"] == 1 + (expected > expected[e["id"]]).sum()
        assert e["bytes"] == [e["id"]]
        ids = torch.cat((ids, torch.tensor([[e["id"]]])), 1)


def test_completion_is_the_text_of_sample_streamed_or_not(plain):
    folder = Path(plain.writer.trained.source)
    drawn: dict[str, Any] = {"seed": 7, "temperature": 1.3, "top_p": 0.8}
    completions = plain.client().completions
    stop = ""
    for end in ("length", "stop"):
        settings = drawn | {"max_new_tokens": 60, "stop": stop}
        c = SampleConfig(out_dir=str(folder), device="cpu", start="the ", num_samples=1, **settings)
        (expected,) = sample.main(c)
        new = expected.removeprefix("the ")
        asked = drawn | {"model": "any", "max_tokens": 60, "stop": [stop, "no such text"]}
        full = completions.create(**asked, prompt="the ")
        (choice,) = full.choices
        assert (choice.text, choice.finish_reason, full.model) == (new, end, folder.name)
        assert full.usage.prompt_tokens == 4
        assert (full.usage.completion_tokens == 60) == (end == "length")
        pieces = list(completions.create(**asked, prompt=["the "], stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == new
        assert (pieces[-1].choices[0].finish_reason, pieces[-1].usage) == (end, full.usage)
        stop = expected[20:23]


def test_answers_are_those_of_chat_streamed_or_not(chat, run, script, monkeypatch):
    typed = f"\n  \nWho is there?\n{'x' * 100}\nAnd now?\n"  # empty lines are passed over
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    flags = ("--system=Be kind.", "--max_new_tokens=30", "--seed=5")
    done = script("sample.py", "--chat", f"--out_dir={run}", *flags)
    assert_one_line(done.err, "error: the message takes 107 tokens")
    messages = [{"role": "system", "content": "Be kind."}, *ASK]
    printed = ""
    create = chat.client().chat.completions.create
    for n in range(2):
        asked = {"model": "any", "messages": messages, "max_completion_tokens": 30, "seed": 5 + n}
        full = create(**asked)
        answer = full.choices[0].message.content
        first, *pieces = create(**asked, stream=True, logprobs=True, top_logprobs=2)
        assert first.choices[0].delta.role == "assistant"
        assert len(pieces[0].choices[0].logprobs.content[0].top_logprobs) == 2
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer
        ends = [piece.choices[0].finish_reason for piece in pieces[-2:]]
        assert ends == [None, full.choices[0].finish_reason]
        assert pieces[-1].usage == full.usage
        printed += answer + "\n"
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": "And now?"})
    assert escape_control_chars(printed) == done.out


def test_talking_ends_in_one_line_if_the_input_is_not_text_and_without_a_word_at_ctrl_c(
    run, script, monkeypatch
):
    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(InferenceEngine, "write", pressed)
    for typed, code, named in (
        (b"\xff\xfe\n", 1, "UTF-8"),
        (b"x" * 200, 1, "no message was answered"),
        (b"hi\nnobody hears this", 0, ""),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        done = script("sample.py", "--chat", f"--out_dir={run}", "--device=cpu")
        assert (done.code, named in done.err) == (code, True)
    assert done.err == ""


def test_what_a_request_leaves_out_is_as_the_flags_say_but_the_seed_is_drawn(chat, run):
    def text(served, **asked):
        create = served.client().completions.create
        return create(model="any", prompt="a", **asked).choices[0].text

    ignored = {"frequency_penalty": 1, "user": "me", "stop": None, "n": 1, "echo": False}
    assert len({text(chat, **ignored) for _ in range(3)}) == 3
    assert [model.id for model in chat.client().models.list()] == [run.name]
    with serving(run, temperature=0.0, max_new_tokens=7) as served:
        assert text(served) == text(chat, temperature=0, max_tokens=7)


def test_programs_of_the_page_about_sampling_run(plain, chat, monkeypatch, capsys):
    page = (ROOT / "docs" / "sampling.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    # Some seeds draw the end of the text at once.
    monkeypatch.setattr(server.secrets, "randbelow", lambda n: 1)
    for served, block in zip((plain, chat), blocks, strict=True):
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://{server.HOST}:{served.port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", served.token)
        exec(block, {})
        assert capsys.readouterr().out
    (path, body) = re.findall(r"^curl \$OPENAI_BASE_URL(\S+) .* --json '(.*)'$", page, re.M)[0]
    assert plain.post(f"/v1{path}", body.encode())[0] == 200


# ---- whom it answers, and bad requests -----------------------------------------------------------


def test_only_who_has_the_token_is_answered(chat):
    files = {}
    for kind, path in {"html": "", "css": "playground.css", "javascript": "playground.js"}.items():
        status, headers, body = chat.ask("GET", chat.page + path)
        assert (status, kind in headers["Content-Type"]) == (200, True), path
        files[kind] = body.decode()
    assert "default-src 'none'; script-src 'self'" in files["html"]
    used = re.findall(r'getElementById\("(\w+)"\)', files["javascript"])
    assert set(used) <= set(re.findall(r'\bid="(\w+)"', files["html"]))
    for path in ("/", f"/x{chat.page}", f"{chat.page}%2e%2e/server.py", f"{chat.page[:-2]}/"):
        status, headers, _ = chat.ask("GET", path)
        assert status == 404, path
        assert headers["Referrer-Policy"] == "no-referrer"  # the token is part of the address
    for key in ("wrong", chat.token[:-1], chat.token + "x", "\xe4"):
        status, _, body = chat.ask("POST", "/v1/completions", b"{}", Authorization=f"Bearer {key}")
        assert status == 401
        assert_one_line(error_in(body), "API key")
    assert chat.ask("GET", "/v1/models")[0] == 401


NO_OBJECTS = [b"", b"\xff\xfe", b"[" * 100_000, b"[]"]
WRONG: dict[str, list[Any]] = {
    "prompt": ["", 5, ["a", "b"], "a" * 97],  # the context has 96 tokens
    "temperature": [10**400, float("nan")],
    "stop": [["a", 5]],
    "max_tokens": [-1, 1.5],
    "n": [2],
    "echo": [True],
    "logprobs": [21, "x"],
    "tools": [[{"type": "function"}]],
}
NO_DIALOGUES = [None, "hi", [], [5], [{"role": "x", "content": "y"}], [*ASK, {"role": "user"}]]


def assert_bad_request(served: Served, path: str, body: Any, named: str = "") -> None:
    status, headers, reply = served.post(path, body)
    assert (status, headers["Content-Type"]) == (400, "application/json"), body
    line = error_in(reply)
    assert_one_line(line, named)
    assert len(line) < 300
    assert "--" not in line  # no flags of sample.py, nor their names
    assert "max_new_tokens" not in line


def test_bad_requests_get_one_line_that_names_the_value(plain, chat):
    of_text, of_dialogue = "/v1/completions", "/v1/chat/completions"
    for body in NO_OBJECTS:
        assert_bad_request(plain, of_text, body, "JSON")
    for name, values in WRONG.items():
        for value in values:
            assert_bad_request(plain, of_text, {"prompt": "a", "max_tokens": 3, name: value}, name)
    for messages in NO_DIALOGUES:
        assert_bad_request(chat, of_dialogue, {"messages": messages})
    # It saw no dialogues
    assert_bad_request(plain, of_dialogue, {"messages": ASK}, of_text)


@pytest.mark.parametrize("stream", [False, True])
def test_reader_that_reads_nothing_or_leaves_keeps_nobody_waiting(chat, stream, monkeypatch, capfd):
    written = []

    def endless(*_):
        while True:
            written.append(1)
            yield ["x" * 10_000], torch.zeros(1, 9)  # more than the system's buffers hold

    def has_ended():
        n = len(written)
        time.sleep(0.1)
        return len(written) == n

    monkeypatch.setattr(InferenceEngine, "write", endless)
    connection = http.client.HTTPConnection(server.HOST, chat.port)
    headers = {"Authorization": f"Bearer {chat.token}"}
    body = json.dumps({"prompt": "a", "stream": stream})
    connection.request("POST", "/v1/completions", body, headers)
    until(lambda: bool(written))
    monkeypatch.undo()
    assert chat.post("/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
    connection.close()
    until(has_ended)
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_served_ends_in_one_line(run, script, chat):
    refused = {f"--port={chat.port}": chat.port, f"--system={'x' * 100}": "room for 0"}
    for flag, named in refused.items():
        done = script("sample.py", f"--out_dir={run}", "--device=cpu", "--serve", flag)
        assert (done.code, done.out) == (1, "")
        assert_one_line(done.err, "error: ", named)


@slow
@POSIX
def test_command_serves_until_ctrl_c_in_the_middle_of_a_text(run, begin, tmp_path):
    terminal = tmp_path / "terminal.txt"
    flags = (f"--out_dir={run}", "--serve", "--device=cpu", "--max_new_tokens=100000")
    process = begin(terminal, sys.executable, "-u", "sample.py", *flags)
    until(lambda: terminal.read_text().count("\n") == 2)
    printed = terminal.read_text()
    [(port, token)] = re.findall(r"^http://127\.0\.0\.1:(\d+)/([\w-]{32})/", printed)
    assert f"base_url=http://127.0.0.1:{port}/v1 api_key={token}\n" in printed
    client = Served(None, int(port), token).client()
    (page,) = client.models.list()
    facts = {"iter_num": 6, "block_size": 96, "system": ""}
    shown: dict[str, Any] = page.to_dict()
    assert facts.items() <= shown.items()
    assert shown["val_loss"] > 0
    pieces = client.completions.create(model="any", prompt="a", stream=True)
    next(pieces)
    process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="the server was stopped"):
        list(pieces)
    assert process.wait(20) == 130
    assert terminal.read_text().removeprefix(printed).split() == ["interrupted"]
