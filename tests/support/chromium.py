"""A headless Chromium that shows a file at the size and in the colours of a device; driven through a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")


class Browser:
    """A browser, driven over the DevTools protocol.

    A message is a JSON object and a zero byte, each way, on the browser's descriptors 3 and 4.
    """

    def __init__(self, folder: Path) -> None:
        theirs, self._asks = os.pipe()
        self._answers, theirs_too = os.pipe()

        def place_pipes() -> None:
            read, write = os.dup(theirs), os.dup(theirs_too)
            os.dup2(read, 3)
            os.dup2(write, 4)

        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, close_fds=False, preexec_fn=place_pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(theirs_too)
        self._waiting = b""
        self._number = 0
        self._passed: list[dict[str, Any]] = []  # what it told since the last page was asked for
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._asks)
        os.close(self._answers)
        self._process.kill()
        self._process.wait()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises RuntimeError if the browser refuses it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._asks, json.dumps(message).encode() + b"\0")
        answer = self._read(lambda told: told.get("id") == self._number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def show(self, page: Path, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        """Open a page as a device of that width would, and wait until all of it is loaded."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self._passed.clear()
        page_id = self.ask("Page.navigate", url=page.absolute().as_uri())["loaderId"]

        def is_loaded(told: dict[str, Any]) -> bool:
            of = told.get("params", {})
            return told.get("method") == "Page.lifecycleEvent" and (page_id, "load") == (of["loaderId"], of["name"])

        if not any(map(is_loaded, self._passed)):  # it may come before the answer
            self._read(is_loaded)

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, file: Path, top: float = 0, height: float | None = None) -> None:
        """Write a PNG of the page from `top` px on, to its end unless a height is given."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        self.ask(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={"x": 0, "y": top, "width": 1, "height": 1, "scale": 1},
        )
        tall = min(height or size["height"], size["height"] - top)
        clip = {"x": 0, "y": top, "width": size["width"], "height": tall, "scale": 1}
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _read(self, is_it: Any) -> dict[str, Any]:
        while True:
            while b"\0" not in self._waiting:
                data = os.read(self._answers, 1 << 16)
                if not data:
                    raise RuntimeError("the browser has gone")
                self._waiting += data
            line, _, self._waiting = self._waiting.partition(b"\0")
            told: dict[str, Any] = json.loads(line)
            if is_it(told):
                return told
            self._passed.append(told)
