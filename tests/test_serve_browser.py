"""The page of sample.py --serve in headless Chromium."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from browser import Browser, Tab, without_browser
from test_serve import ASK, Served, chat, plain, plain_run, run, serving, text_of, writer_of  # noqa: F401 (fixtures)
from tiny_models import SMALL, make

from deskgpt.sampling.trained import Trained

pytestmark = [pytest.mark.nightly, without_browser]

EVIL = "<script>document.title='x'</script><img src=x onerror=\"document.title='x'\">"
TEXT = "document.querySelector('.text').textContent"
STATUS = "document.querySelector('.status').textContent"
GENERATE = "document.getElementById('generate')"
TURNS = "[...document.querySelectorAll('.text > div')].map(turn => [turn.className, turn.textContent])"


def opened(browser: Browser, served: Served, width: int = 1200) -> Tab:
    tab = browser.open(f"http://127.0.0.1:{served.port}{served.page}", width, False, height=800, phone=width < 500)
    tab.wait(f"!{GENERATE}.disabled")
    return tab


@pytest.mark.parametrize("width", [1200, 390])
def test_page_shows_the_text_and_the_probability_of_a_token(browser, plain, plain_run, width):  # noqa: F811
    tab = opened(browser, plain, width)
    assert tab.run("document.querySelector('h2').textContent") == plain_run.name
    assert tab.run("document.getElementById('settings').open") == (width > 500)
    tab.run(f"{GENERATE}.click()")
    tab.wait(f"!{GENERATE}.disabled")
    events = plain.write()
    assert tab.run(TEXT) == "the " + text_of(events)
    token = next(e for e in events[1:-1] if e["text"].strip())
    tab.run(f"document.querySelectorAll('.token')[{events.index(token) - 1}].id = 'this'")
    tab.run("document.getElementById('this').scrollIntoView({block: 'center'})")
    if width < 500:
        tab.tap("#this")
    else:
        tab.point("#this")
    tab.wait("!tip.hidden")
    shown = tab.run("tip.innerText")
    assert token["name"] in shown
    assert f"token {token['id']}" in shown
    shares = [float(s) for s in re.findall(r"(?<!<)\b([\d.]+)%", tab.run("tip.querySelector('table').innerText"))]
    assert sum(shares) == pytest.approx(100, abs=0.6)
    left, top, right, bottom = tab.run("(r => [r.left, r.top, r.right, r.bottom])(tip.getBoundingClientRect())")
    assert (left >= 0, top >= 0, right <= width, bottom <= 800) == (True, True, True, True)
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.console() == []


def test_keys_generate_stop_and_go_through_the_tokens_and_errors_are_shown(browser, plain):  # noqa: F811
    tab = opened(browser, plain)
    tab.run("form.elements.max_new_tokens.value = 2000; form.elements.prompt.focus()")
    tab.press("Enter", modifiers=2)
    tab.wait("document.querySelectorAll('.token').length > 20")
    tab.press("Escape")
    tab.wait(f"!{GENERATE}.disabled")
    assert re.fullmatch(r"stopped after \d+ tokens", tab.run(STATUS))
    assert tab.run("document.querySelectorAll('.token').length") < 2000
    tab.run("document.querySelector('.token').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        tab.press(key)
    assert tab.run("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 1
    assert tab.run("tip.querySelector('h3').textContent === document.activeElement.about.name")
    tab.press("Escape")
    assert tab.run("tip.hidden")
    tab.run("form.elements.max_new_tokens.value = 40; form.elements.prompt.value = '\u2603'; generate()")
    tab.wait("stopper === null")
    assert "\u2603" in tab.run(STATUS)
    tab.run("form.elements.prompt.value = 'and'; generate()")
    tab.wait("stopper === null")
    assert tab.run(STATUS).startswith("40 of 40 tokens")


class HtmlTokenizer:
    """Its model writes HTML, whatever it draws."""

    vocab_size = 3
    end_of_text = None
    texts = (EVIL.encode(), b"&amp;<b>", b"</div>")

    def encode_prompt(self, text: str) -> np.ndarray:
        return np.zeros(1, np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.texts[i] for i in ids)


def test_html_that_a_model_writes_stays_text(browser):
    tokenizer: Any = HtmlTokenizer()
    with serving(writer_of(Trained(make(SMALL).eval(), tokenizer, EVIL))) as served:
        tab = opened(browser, served)
        tab.run(f"{GENERATE}.click()")
        tab.wait("stopper === null")
        assert EVIL in tab.run(TEXT)
        tab.run("document.querySelector('.token').focus()")
        assert tab.run("tip.hidden") is False
        assert tab.run("document.querySelectorAll('#model img, #model script, #tip img').length") == 0
        assert tab.run("document.title") == "deskGPT playground"
        assert all(url.startswith("http://127.0.0.1") for url in tab.requests())


@pytest.mark.parametrize("width", [1200, 390])
def test_page_of_a_model_that_talks_is_a_dialogue(browser, chat, width):  # noqa: F811
    def answer_to(messages: Any, seed: int) -> str:
        asked = {"model": "any", "messages": messages, "seed": seed}
        return chat.client().chat.completions.create(**asked).choices[0].message.content

    def send(content: str) -> None:
        tab.run(f"form.elements.prompt.value = {json.dumps(content)}; form.elements.prompt.focus()")
        tab.press("Enter")
        tab.wait("stopper === null")

    tab = opened(browser, chat, width)
    tab.run("form.elements.system.value = 'Be kind.'")
    send("Who is there?")
    messages = [{"role": "system", "content": "Be kind."}, *ASK]
    assert tab.run(TURNS) == [["user", ASK[0]["content"]], ["assistant", answer_to(messages, 1337)]]
    tab.run("document.getElementById('again').click()")  # another answer, with the next seed
    tab.wait("stopper === null")
    second = answer_to(messages, 1338)
    assert tab.run(TURNS)[1] == ["assistant", second]
    assert tab.console() == []
    send("x" * 200)  # which the context cannot hold; the browser logs the status 400
    assert "are left for it" in tab.run(STATUS)
    assert tab.run("form.elements.prompt.value") == "x" * 200
    send("<b>And</b>\nnow?")
    messages += [{"role": "assistant", "content": second}, {"role": "user", "content": "<b>And</b>\nnow?"}]
    assert tab.run(TURNS)[2:] == [["user", messages[-1]["content"]], ["assistant", answer_to(messages, 1339)]]
    assert tab.run("document.documentElement.scrollWidth") <= width
