"""A real browser, driven through chromedriver's plain HTTP: opens pages, points, types, listens to the console."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import Request, urlopen

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
CAN_INSTALL = os.environ.get("CI") == "true" and os.geteuid() == 0 and shutil.which("apt-get") is not None
CONTRAST = Path(__file__).with_name("contrast.js").read_text()  # a script for `Browser.run`

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Browser:
    """One window. Use as a context manager."""

    def __init__(self, profile: Path, *, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        assert DRIVER is not None
        assert CHROMIUM is not None
        self._server = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        found = next(m for line in self._server.stdout if (m := re.search(r"started successfully on port (\d+)", line)))
        self._base = f"http://127.0.0.1:{found[1]}"
        flags = [*_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"]
        if dark:
            flags.append("--blink-settings=preferredColorScheme=0")
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._base += f"/session/{session['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a file and wait until its script is through."""
        self._call("POST", "/url", {"url": "about:blank"})  # a change of the fragment alone does not load it again
        self._call("POST", "/url", {"url": page.resolve().as_uri() + fragment})
        self.wait("return document.documentElement.dataset.ready === 'yes'")
        self.settle()

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def resize(self, width: int, height: int) -> None:
        """Show the page on a screen of this size, narrower than any window may be. A width of 0 ends it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        ending = "Emulation.clearDeviceMetricsOverride"
        command = ("Emulation.setDeviceMetricsOverride", size) if width else (ending, {})
        self._call("POST", "/goog/cdp/execute", {"cmd": command[0], "params": command[1]})
        self.settle()

    def screenshot(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def wait(self, script: str, seconds: float = 15) -> None:
        """Until the script gives something true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"still not so: {script}; console: {self.console()}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until deferred drawing is done."""
        self._call(
            "POST",
            "/execute/async",
            {
                "script": "const done = arguments[0];"
                "setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(() => done(1))), 160)",
                "args": [],
            },
        )

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def type(self, keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        presses = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": presses}]})
        self.settle()

    def point(self, selector: str, x: float, y: float, *, click: bool = False) -> None:
        """Move the mouse to a place of an element, in CSS pixels from its corner, after bringing it into view."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        self.settle()
        script = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.left, box.top]"
        left, top = self.run(script, selector)
        move = {"type": "pointerMove", "duration": 0, "x": round(left + x), "y": round(top + y)}
        moves: list[dict[str, Any]] = [move]
        if click:
            moves += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": moves}
        self._call("POST", "/actions", {"actions": [mouse]})
        self.settle()

    def console(self) -> list[str]:
        """What was logged since the last time, errors and refusals among it."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._server.terminate()
            self._server.wait(20)
            assert self._server.stdout is not None
            self._server.stdout.close()
