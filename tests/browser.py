"""A headless Chromium that tests drive, through Chromium's DevTools protocol over two pipes.

with Browser(folder) as browser:
    browser.open("http://127.0.0.1:8000/", width=390, dark=True)
    assert browser.run("document.title") == "Hello"
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or os.name == "nt", reason="no chromium, chromium-browser or google-chrome on a POSIX system"
)
PROBLEMS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


class Browser:
    def __init__(self, folder: Path, timeout_s: float = 60) -> None:
        """folder: for the browser's profile. timeout_s: the longest that anything here waits."""
        import fcntl  # not on Windows

        self.timeout_s = timeout_s
        self.console: list[str] = []  # what it said about the page, errors and refusals included
        self._buffer = b""
        self._id = 0
        self._session: str | None = None
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (its_in, its_out)]  # 3 and 4 may be taken

        def place_pipes() -> None:  # Chromium reads commands from 3 and writes replies to 4
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
        command += ["--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, preexec_fn=place_pipes, close_fds=False, **silent)
        for fd in (its_in, its_out, *high):
            os.close(fd)
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol. Raises RuntimeError where the browser refuses it."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("method") in PROBLEMS:
                self.console.append(json.dumps(reply["params"]))
            if reply.get("id") == self._id:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], self.timeout_s)[0]:
                raise TimeoutError("the browser is silent")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        """Shows a page in a window of this size and theme, and waits until it is loaded; below 500, of a phone."""
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.command("Emulation.setEmulatedMedia", features=[theme])
        self.command("Emulation.setDeviceMetricsOverride", **size)
        self.command("Emulation.setTouchEmulationEnabled", enabled=width < 500)
        self.command("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise. Raises RuntimeError, as it does."""
        done = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"]))
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until a JavaScript expression is true. Raises TimeoutError."""
        end = time.monotonic() + self.timeout_s
        while not self.run(condition):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def point(self, selector: str) -> None:
        """Moves the mouse onto the first element that a CSS selector finds."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def tap(self, selector: str) -> None:
        """Taps, as on a phone, on the first element that a CSS selector finds."""
        self.command("Input.dispatchTouchEvent", type="touchStart", touchPoints=[self._middle(selector)])
        self.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def _middle(self, selector: str) -> dict[str, float]:
        middle = "(r => ({x: r.left + r.width / 2, y: r.top + r.height / 2}))"
        return self.run(f"{middle}(document.querySelector({json.dumps(selector)}).getClientRects()[0])")

    def press(self, key: str) -> None:
        self.command("Input.dispatchKeyEvent", type="keyDown", key=key)
        self.command("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot")["data"]))
