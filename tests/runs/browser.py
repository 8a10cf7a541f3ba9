"""A headless Chromium, driven over its debugging pipe: real pages, without a network."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_PACKAGE = "chromium"
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_SECONDS = 60.0


def why_no_browser() -> str | None:
    """The reason why there is no browser; None if there is one. In CI it is installed."""
    install = ["apt-get", "install", "-y", "--no-install-recommends", _PACKAGE]
    if _program() is None and os.environ.get("CI") and os.geteuid() == 0:
        for command in (["apt-get", "update"], install):
            if shutil.which("apt-get"):
                subprocess.run(command, capture_output=True, check=False)
    return None if _program() else f"no browser is installed: {' '.join(install)}"


def _program() -> str | None:
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


class Browser:
    """One tab.

    Attributes:
        errors: what scripts have thrown, and what the console calls an error.
        requests: addresses of all that was loaded.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._held = send, receive, b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page, as a window of that size shows it."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.errors, self.requests, self._loaded = [], [], False
        self.call("Page.navigate", url=page.absolute().as_uri())
        until = time.monotonic() + _SECONDS
        while not self._loaded:
            self._handle(self._message(until))

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of Chromium's DevTools protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while (answer := self._message(until)).get("id") != self._number:
            self._handle(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._receive, 1 << 20)
            assert more, "the browser has ended"
            self._held += more
        text, _, self._held = self._held.partition(b"\0")
        return json.loads(text)

    def _handle(self, event: dict[str, Any]) -> None:
        method, facts = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(facts["exceptionDetails"]))
        elif (method == "Log.entryAdded" and facts["entry"]["level"] == "error") or (
            method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning")
        ):
            self.errors.append(json.dumps(facts))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a new profile in `folder`."""
    program = _program()
    assert program is not None
    (read, send), (receive, write) = os.pipe(), os.pipe()
    words = [program, *_OPTIONS, f"--user-data-dir={folder}"]
    shell = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *words]
    process = subprocess.Popen(
        shell, pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(read)
    os.close(write)
    try:
        tab = Browser(send, receive)
        yield tab
    finally:
        os.close(send)  # which ends it
        os.close(receive)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
