"""The pages in a real browser: what a person sees and does there.

Needs Debian's chromium and chromium-driver.
"""

import re
import shutil
from contextlib import contextmanager

import pytest
from conftest import nightly, run_tiny, until
from test_serve import saved_characters, saved_chat, serving

pytestmark = [
    nightly,
    pytest.mark.skipif(
        shutil.which("chromedriver") is None, reason="no chromedriver and no Chromium for it"
    ),
]
SCREENS = {"light": (1280, 900), "dark": (390, 844)}  # a laptop and a phone, by colour scheme
BACKGROUND = {"light": range(200, 256), "dark": range(80)}  # of a page's red, green and blue
each_screen = pytest.mark.parametrize("scheme", SCREENS)


@contextmanager
def browser(scheme, address):
    """A headless Chromium of this colour scheme and its screen's size, with a page that fits
    into it.
    """
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for flag in ("headless", "no-sandbox", "disable-background-networking", "disable-sync"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    width, height = SCREENS[scheme]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        driver.get(address)
        yield driver
        wider = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert driver.execute_script(wider) <= 0
        background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        colours = map(int, re.findall(r"\d+", background)[:3])
        assert address.startswith("file:") or all(
            colour in BACKGROUND[scheme] for colour in colours
        ), background
        assert driver.get_log("browser") == []  # no error, no refused request
    finally:
        driver.quit()


def wait_for(driver, selector):
    until(lambda: bool(driver.find_elements("css selector", selector)))


@each_screen
def test_pages_about_runs_draw_their_charts_in_the_window(chars, tmp_path, scheme, script):
    one, other = tmp_path / "one", tmp_path / "other"
    for out_dir in (one, other):
        run_tiny(chars, out_dir, max_iters=30, eval_interval=10)
    compared = tmp_path / "compare.html"
    assert script("bench/report.py", one).code == 0
    assert script("bench/compare.py", one, other, "--html", compared).code == 0
    for page in (one / "report.html", compared):
        with browser(scheme, page.as_uri()) as driver:
            wait_for(driver, "path.point:not([clip-path] *)")  # whole, also at the edges
            charts = driver.find_elements("css selector", ".plotly-graph-div")
            assert charts
            for chart in charts:
                assert chart.find_elements(
                    "css selector", "path.js-line, g.point path, .trace path"
                )
            for across in ("tokens", "minutes"):
                driver.find_element("id", "across").send_keys(across)
                ranges = driver.execute_script(
                    "return plots.map(plot => plot.layout.xaxis.range.join())"
                )
                assert len({*ranges}) == 1
                assert not ranges[0].endswith(",30")


# ---- the playground ------------------------------------------------------------------------------


def set_fields(driver, **values):
    for name, value in values.items():
        driver.execute_script(
            f"document.getElementsByName('{name}')[0].value = arguments[0]", value
        )


CARD_IS_BESIDE_GENERATE = """
const button = generateButton.getBoundingClientRect();
const isBeside = [...Array(40).keys()].every(i => {
  text.style.paddingTop = `${10 * i}px`;
  placeTip();
  const {left, right, top, bottom} = tip.getBoundingClientRect();
  const across = left < button.right && button.left < right;
  return bottom > top && !(across && top < button.bottom && button.top < bottom);
});
text.style.paddingTop = "";
return isBeside;
"""


def wait_for_status(driver, beginning):
    until(lambda: driver.find_element("css selector", ".status").text.startswith(beginning))


@each_screen
def test_playground_writes_stops_and_repeats_a_text(tmp_path, scheme):
    from selenium.webdriver import Keys

    saved_characters(tmp_path)
    with serving(tmp_path) as served, browser(scheme, served.address) as driver:
        button = driver.find_element("id", "generate")
        until(button.is_enabled)
        texts = []
        for seed in (1, 1, 2):
            set_fields(driver, prompt="the ", max_new_tokens=30, seed=seed)
            driver.find_element("name", "prompt").send_keys(Keys.CONTROL, Keys.ENTER)
            wait_for_status(driver, "30 of 30 tokens")
            texts.append(driver.find_element("css selector", ".text").text)
            driver.execute_script("document.querySelector('.status').textContent = ''")
        assert texts[0] == texts[1] != texts[2]
        # The earlier texts are kept; a click brings one back, with its settings.
        kept = driver.find_elements("css selector", "#earlier button")
        driver.find_element("css selector", "#earlier summary").click()
        kept[-1].click()
        assert driver.find_element("css selector", ".text").text == texts[0]
        assert driver.find_element("name", "seed").get_attribute("value") == "1"
        token = driver.find_element("css selector", ".token")
        plain = token.value_of_css_property("background-color")
        driver.find_element("id", "heat").click()
        assert token.value_of_css_property("background-color") != plain

        driver.find_element("css selector", ".token").send_keys(Keys.ARROW_RIGHT)
        # The probabilities of the second token, wherever it stands
        assert driver.execute_script(CARD_IS_BESIDE_GENERATE)
        set_fields(driver, max_new_tokens=100_000)
        button.click()
        wait_for(driver, ".token")
        driver.find_element("css selector", "body").send_keys(Keys.ESCAPE)
        wait_for_status(driver, "stopped after")


@each_screen
def test_chat_answers_and_answers_again(tmp_path, scheme):
    from selenium.webdriver import Keys

    saved_chat(tmp_path)
    with serving(tmp_path, max_new_tokens=20) as served, browser(scheme, served.address) as driver:
        until(driver.find_element("id", "generate").is_enabled)
        set_fields(driver, prompt="Who is there?")
        driver.find_element("name", "prompt").send_keys(Keys.ENTER)
        again = driver.find_element("id", "again")
        until(again.is_enabled)
        first = driver.find_element("css selector", ".assistant").text
        again.click()
        until(again.is_enabled)
        (asked,) = driver.find_elements("css selector", ".user .written")
        assert asked.text == "Who is there?"
        (second,) = driver.find_elements("css selector", ".assistant")
        assert second.text != first
        driver.find_element("css selector", ".user button").click()  # Edit
        field = driver.find_element("name", "prompt")
        assert field.get_attribute("value") == "Who is there?"
        assert not driver.find_elements("css selector", ".assistant")
        field.send_keys(Keys.ENTER)
        until(again.is_enabled)
        driver.refresh()
        wait_for(driver, ".assistant button")
        driver.find_element("id", "new").click()
        assert driver.find_element("css selector", ".text").text == ""
        markdown = "# A\n- `<b>`\n- **c**\n\n```\n* d\n```\ne\nf"
        assert driver.execute_script("return rendered(arguments[0]).innerHTML", markdown) == (
            "<h3>A</h3><ul><li><code>&lt;b&gt;</code></li><li><strong>c</strong></li></ul>"
            "<pre><code>* d\n</code></pre><p>e<br>f</p>"
        )
