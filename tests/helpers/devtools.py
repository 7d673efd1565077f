"""A browser that is driven: opened once, clicked, typed into, resized, looked at (Chrome's DevTools protocol).

It listens on two pipes, not on a port, so that nothing else on the machine can talk to it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from helpers.browser import BROWSER

PATIENCE_S = 120.0
KEY_CODES = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Navigated(Exception):
    """The page went elsewhere while a command was under way; it has no answer."""


class BrowserLost(Exception):
    """The browser has ended, its page has crashed, or a command has no answer: start another one."""


class Browser:
    """One headless browser with one page. `errors`: exceptions and console errors of the pages so far."""

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="arpo-browser-", ignore_cleanup_errors=True)
        read_commands, self._commands = os.pipe()
        self._replies, write_replies = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        flags += ["--disable-dev-shm-usage"]  # a container's 64 MB are too few: pages crash

        def as_3_and_4() -> None:  # where the browser looks for them
            a, b = os.dup(read_commands), os.dup(write_replies)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [BROWSER, *flags, f"--user-data-dir={self.profile.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=as_3_and_4, close_fds=False,
            start_new_session=True,
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_replies)
        self._numbers, self._buffer, self._session = count(1), b"", None
        self.patience_s, self.is_lost = PATIENCE_S, False
        self.errors: list[str] = []
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Accessibility", "DOM"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> dict:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self.patience_s
        while True:
            reply = self._receive(deadline)
            if reply.get("method") == "Inspector.targetCrashed":
                self._lose(f"{method}: the page has crashed")
            if reply.get("id") == number:
                if "navigated or closed" in str(reply.get("error")):
                    raise Navigated(method)
                assert "error" not in reply, (method, reply)
                return reply["result"]

    def _lose(self, reason: str) -> NoReturn:
        self.is_lost = True
        raise BrowserLost(reason)

    def _receive(self, deadline: float) -> dict:
        while b"\0" not in self._buffer:
            if not select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self._lose(f"no answer in {self.patience_s:g} s")
            read = os.read(self._replies, 1 << 20)
            if not read:
                self._lose("it has ended")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(message)
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        if event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] == "error":
            self.errors.append(str(event["params"]["args"]))
        return event

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path, address: str = "", *, ready: str = "document.readyState === 'complete'") -> None:
        """Load a page, also where it is shown already, and wait until `ready`."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=page.as_uri() + address)
        self.wait(ready)

    def js(self, expression: str) -> Any:
        """Return the value of an expression of the page's, as JSON."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, (expression, done["exceptionDetails"])
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a condition holds, on this page or on the one that it is leaving for."""
        deadline = time.monotonic() + self.patience_s
        met = False
        while not met:
            assert time.monotonic() < deadline, condition
            with suppress(Navigated):
                met = self.js(f"!!({condition})")
            time.sleep(0 if met else 0.02)

    def text(self, selector: str) -> str:
        """Return what a reader sees of an element."""
        return " ".join(self.js(f"document.querySelector({json.dumps(selector)}).innerText").split())

    def click(self, selector: str) -> None:
        """Click into the middle of an element, with the mouse."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{element}.scrollIntoView({{block: 'nearest'}})")
        box = self.js(f"{element}.getBoundingClientRect().toJSON()")
        self.click_at(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def click_at(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            with suppress(Navigated):  # what was clicked may lead to another page
                self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, *keys: str) -> None:
        """Press keys: "a", "?", "Enter", "ArrowDown", ..."""
        for key in keys:
            text = "\r" if key == "Enter" else key if len(key) == 1 else ""
            code = KEY_CODES.get(key, ord(key.upper()) if len(key) == 1 and key.isalnum() else 0)
            event = {"key": key, "windowsVirtualKeyCode": code}
            with suppress(Navigated):
                self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
                self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select, or fill an input."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{element}.value = {json.dumps(value)}")
        for event in ("input", "change"):
            with suppress(Navigated):
                self.js(f"{element}?.dispatchEvent(new Event('{event}', {{bubbles: true}}))")

    def accessible(self) -> list[dict]:
        """Return what a screen reader is told: of each node role, name, and properties by name."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            {"role": node["role"]["value"], "name": node.get("name", {}).get("value", "")}
            | {p["name"]: p["value"].get("value") for p in node.get("properties", [])}
            for node in nodes
            if not node["ignored"]
        ]

    def close(self) -> None:
        os.close(self._commands)
        os.close(self._replies)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.profile.cleanup()
