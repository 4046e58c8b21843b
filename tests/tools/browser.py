"""A headless Chromium, told what to do over its DevTools pipe: no driver, no port."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 40.0  # of any wait
ON_3_AND_4 = """
import fcntl, os, sys
inwards, outwards, *words = sys.argv[1:]
inwards, outwards = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in (inwards, outwards))  # out of the way
os.dup2(inwards, 3)
os.dup2(outwards, 4)
os.execv(words[0], words)
"""


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page; `events` are all that the browser reported of it, as (method, params)."""

    def __init__(self, profile: Path, width: int, height: int) -> None:
        path = find()
        assert path is not None
        words = [path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        words += [f"--user-data-dir={profile}", "--no-first-run", "--disable-background-networking", "--no-zygote"]
        words += [f"--window-size={width},{height}"]
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._buffer = b""
        self._number = 0
        self._session = ""
        inwards, self._out = os.pipe()
        self._in, outwards = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", ON_3_AND_4, str(inwards), str(outwards), *words],
            pass_fds=(inwards, outwards),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(inwards)
        os.close(outwards)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Log", "Runtime"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told
                result: dict[str, Any] = told["result"]
                return result
            self.events.append((told["method"], told["params"]))

    def open(self, url: str) -> None:
        """Load a page to its end."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            told = self._next()
            self.events.append((told["method"], told["params"]))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]

    def close(self) -> None:
        self._session = ""
        try:
            os.write(self._out, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
            self._process.wait(SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            part = os.read(self._in, 2**16)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message
