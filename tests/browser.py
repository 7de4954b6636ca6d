"""A headless Chromium over its debugging pipe, for tests that need a real browser."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
PATIENCE = 60  # seconds
#: The plots of a page.
PLOTS = "[...document.querySelectorAll('[id^=plot-]')]"
#: Chromium reads from descriptor 3 and writes to 4.
START = "import os, sys; os.dup2({}, 3); os.dup2({}, 4); os.execv(sys.argv[1], sys.argv[1:])"


class Browser:
    """One page in a browser of its own; ``events`` is all that it told."""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (theirs_in, self._in), (self._out, theirs_out) = os.pipe(), os.pipe()
        theirs = [
            fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)
        ]  # not 3 or 4
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START.format(*theirs), *command],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *theirs):  # so that we notice when it ends
            os.close(fd)
        self.events: list[dict[str, Any]] = []
        self._buffer, self._count, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(20)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def show(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file and wait until it is loaded and drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("location.protocol === 'file:' && document.readyState === 'complete'")
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))")

    def wait(self, condition: str) -> None:
        """Until an expression in the page is true."""
        until = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < until, f"still not so: {condition}"
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console and of the page."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._out], [], [], PATIENCE)[0]:
                raise RuntimeError("the browser does not answer")
            chunk = os.read(self._out, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has gone")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def opened(browser, folder, found, **more):
    """Save a page and look at it: it asks for nothing; of each plot, whether it is there."""
    path = folder / "page.html"
    found.save(path)
    browser.events.clear()
    browser.show(path, **more)
    browser.wait(f"{PLOTS}.every(plot => plot.querySelector('.main-svg'))")
    assert browser.complaints() == []
    assert {u for u in browser.requests() if not u.startswith("data:")} == {path.resolve().as_uri()}
    return browser.run(f"{PLOTS}.map(plot => plot.getBoundingClientRect().height > 99)")
