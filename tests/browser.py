"""A headless Chromium that tests open pages in: one process, driven over its debugging pipe."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
without_browser = pytest.mark.skipif(
    CHROMIUM is None or os.name == "nt", reason="no chromium, chromium-browser or google-chrome"
)


PATIENCE_S = 60  # a machine under load starts Chromium in ten


class Browser:
    """One Chromium. It finds no host but this machine, and its profile is thrown away."""

    def __init__(self, profile: Path) -> None:
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --hide-scrollbars --no-first-run"
        flags += " --disable-background-timer-throttling --disable-renderer-backgrounding"  # all tabs count as seen
        flags += " --disable-backgrounding-occluded-windows"
        words = [str(CHROMIUM), *flags.split(), f"--user-data-dir={profile}"]
        words += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        # Chromium reads commands from descriptor 3 and writes to 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_commands, write_answers)]
        start = f"import os, sys; os.dup2({ends[0]}, 3); os.dup2({ends[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, *words], pass_fds=ends, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for end in ends:
            os.close(end)
        os.close(read_commands)
        os.close(write_answers)
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command of the Chrome DevTools Protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE_S
        while True:
            answer = self._read(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium has not answered within {PATIENCE_S} s"
            got = os.read(self._answers, 1 << 20)
            assert got, "Chromium has ended"
            self._rest += got
        answer, _, self._rest = self._rest.partition(b"\0")
        return json.loads(answer)

    def open(self, url: str, width: int = 1200, dark: bool = False, height: int = 900, phone: bool = False) -> Tab:
        """A new tab that has loaded url, in a window of this size, or on a phone."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        tab.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        tab.call("Page.navigate", url=url)
        tab.wait("location.href !== 'about:blank' && document.readyState === 'complete'")
        return tab

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)


class Tab:
    """A page in the browser."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser = browser
        self.session = session
        self.target = target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of what it promises."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = PATIENCE_S) -> None:
        """Until the expression is true."""
        until = time.monotonic() + seconds
        while True:
            if self.run(f"Boolean({expression})"):
                return
            assert time.monotonic() < until, f"not true within {seconds} s: {expression}"
            time.sleep(0.05)

    def point(self, selector: str) -> None:
        """Moves the mouse onto the first element that a CSS selector finds."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def tap(self, selector: str) -> None:
        """Taps, as on a phone, on the first element that a CSS selector finds."""
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[self._middle(selector)])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses a key; modifiers: 2 = Ctrl."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=modifiers)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=modifiers)

    def console(self) -> list[str]:
        """What the page, or the browser about it, has written to the console; exceptions too."""
        self.run("0")
        seen = []
        for e in self._events():
            if e["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                seen.append(json.dumps(e["params"])[:500])
        return seen

    def requests(self) -> list[str]:
        """The addresses that the page has asked for."""
        self.run("0")
        asked = [e["params"]["request"]["url"] for e in self._events() if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("data:", "blob:"))]

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)

    def _middle(self, selector: str) -> dict[str, float]:
        middle = "(r => ({x: r.left + r.width / 2, y: r.top + r.height / 2}))"
        return self.run(f"{middle}(document.querySelector({json.dumps(selector)}).getClientRects()[0])")

    def _events(self) -> list[dict[str, Any]]:
        return [e for e in self.browser.events if e.get("sessionId") == self.session]
