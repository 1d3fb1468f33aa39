"""The pages in a real browser: what a person sees and does there. Needs Debian's chromium and chromium-driver."""

from __future__ import annotations

import re
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, tiny
from test_export import saved
from tiny_models import SMALL

import train
from data.chat import template
from data.tokenizer import CharTokenizer

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="no chromedriver and no Chromium for it"),
]
SCREENS = {"light": (1280, 900), "dark": (390, 844)}  # a laptop and a phone, by colour scheme
BACKGROUND = {"light": range(200, 256), "dark": range(80)}  # of a page's red, green and blue


@contextmanager
def browser(scheme: str) -> Iterator[Any]:
    """A headless Chromium of this colour scheme and its screen's size."""
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for flag in ("headless", "no-sandbox", "disable-background-networking", "disable-component-update", "disable-sync"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    width, height = SCREENS[scheme]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        yield driver
        assert driver.get_log("browser") == []  # no error, no refused request
    finally:
        driver.quit()


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return the first true value of the condition."""
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def assert_fits(driver: Any) -> None:
    """Nothing is wider than the window."""
    wider = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert driver.execute_script(wider) <= 0


def assert_has_colours(driver: Any, scheme: str) -> None:
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert all(int(part) in BACKGROUND[scheme] for part in re.findall(r"\d+", background)[:3]), background


@pytest.fixture(scope="module")
def pages(chars, tmp_path_factory) -> dict[str, Path]:
    """The pages of report.py, while a run trains and after it, and of compare.py."""
    folder = tmp_path_factory.mktemp("pages")
    done, training = folder / "done", folder / "training"
    for seed, out_dir in enumerate((done, training)):
        train.main(tiny(chars, out_dir, seed=seed, max_iters=30, eval_interval=10, sample_interval=1))
    both = folder / "compare.html"
    log = training / "log.jsonl"
    subprocess.run([sys.executable, "bench/compare.py", done, training, "--html", both], cwd=ROOT, check=True)
    log.write_text("".join(log.read_text().splitlines(True)[:8]))  # the first steps, as while it trains
    for out_dir in (done, training):
        subprocess.run([sys.executable, "bench/report.py", out_dir], cwd=ROOT, check=True)
    return {"report": done / "report.html", "live": training / "report.html", "compare": both}


@pytest.mark.parametrize("scheme", SCREENS)
@pytest.mark.parametrize("name", ["report", "live", "compare"])
def test_page_about_runs_draws_its_charts_in_the_window(pages, name, scheme):
    with browser(scheme) as driver:
        driver.get(pages[name].as_uri())
        wait_for(lambda: driver.find_elements("css selector", ".main-svg"))
        charts = driver.find_elements("css selector", ".plotly-graph-div")
        assert charts
        for chart in charts:
            assert chart.find_elements("css selector", "path.js-line, g.point path, .trace path")
        assert_fits(driver)


@contextmanager
def served(out_dir: Path, *args: str) -> Iterator[str]:
    """The address that `sample.py --serve` prints."""
    command = [sys.executable, "-u", "sample.py", f"--out_dir={out_dir}", "--serve", "--device=cpu", *args]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        printed = []
        for line in server.stdout:
            printed.append(line)
            if "http://" in line:
                break
        address = re.search(r"http://127\S+", printed[-1])
        assert address is not None, printed
        yield address.group()
    finally:
        server.terminate()
        server.wait()


def text_of(driver: Any) -> str:
    return driver.find_element("css selector", ".text").text


def status_of(driver: Any) -> str:
    return driver.find_element("css selector", ".status").text


def set_field(driver: Any, name: str, value: Any) -> None:
    driver.execute_script(f"document.getElementsByName('{name}')[0].value = arguments[0]", value)


@pytest.mark.parametrize("scheme", SCREENS)
def test_playground_writes_stops_and_repeats_a_text(tmp_path, scheme):
    from selenium.webdriver.common.keys import Keys

    out_dir = tmp_path / "run"
    saved(out_dir, replace(SMALL, block_size=96), CharTokenizer.of(string.printable).meta())  # vocab_size is 100
    with served(out_dir, "--port=0", "--start=the ") as address, browser(scheme) as driver:
        driver.get(address)
        button = driver.find_element("id", "generate")
        wait_for(button.is_enabled)
        prompt = driver.find_element("name", "prompt")
        texts = []
        for seed in (1, 1, 2):
            set_field(driver, "prompt", "the ")
            set_field(driver, "max_new_tokens", 30)
            set_field(driver, "seed", seed)
            prompt.send_keys(Keys.CONTROL, Keys.ENTER)
            wait_for(lambda: status_of(driver).startswith("30 of 30 tokens"))
            texts.append(text_of(driver))
            driver.execute_script("document.querySelector('.status').textContent = ''")
        assert texts[0] == texts[1] != texts[2]
        assert_fits(driver)
        assert_has_colours(driver, scheme)

        token = driver.find_element("css selector", ".token")
        token.send_keys(Keys.ARROW_RIGHT)
        assert driver.find_element("id", "tip").is_displayed()  # the probabilities of the second token
        set_field(driver, "max_new_tokens", 100_000)
        button.click()
        wait_for(lambda: driver.find_elements("css selector", ".token"))
        driver.find_element("css selector", "body").send_keys(Keys.ESCAPE)
        wait_for(lambda: status_of(driver).startswith("stopped after"))
        button.click()
        wait_for(lambda: status_of(driver).startswith("writing"))
        driver.get("about:blank")  # the reader leaves while a text is written
        driver.get(address)
        button = driver.find_element("id", "generate")
        wait_for(button.is_enabled)
        set_field(driver, "max_new_tokens", 5)
        button.click()
        wait_for(lambda: status_of(driver).startswith("5 of 5 tokens"))


@pytest.mark.parametrize("scheme", SCREENS)
def test_chat_answers_and_answers_again(tmp_path, scheme):
    from selenium.webdriver.common.keys import Keys

    out_dir = tmp_path / "run"
    saved(out_dir, replace(SMALL, vocab_size=256, block_size=96), {"name": "bytes"}, template.NAME)
    with served(out_dir, "--port=0", "--chat", "--max_new_tokens=20") as address, browser(scheme) as driver:
        driver.get(address)
        wait_for(driver.find_element("id", "generate").is_enabled)
        driver.find_element("name", "prompt").send_keys("Who is there?", Keys.ENTER)
        again = driver.find_element("id", "again")
        wait_for(again.is_enabled)
        first = driver.find_element("css selector", ".assistant").text
        again.click()
        wait_for(again.is_enabled)
        assert [x.text for x in driver.find_elements("css selector", ".user")] == ["Who is there?"]
        (second,) = driver.find_elements("css selector", ".assistant")
        assert second.text != first
        assert_fits(driver)
        assert_has_colours(driver, scheme)
