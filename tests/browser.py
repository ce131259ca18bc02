"""A real browser, for tests of pages; they are skipped where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def page_data(page: Path) -> Any:
    """The JSON block that a report draws."""
    block = page.read_text().partition('<script type="application/json" id="report">')[2]
    return json.loads(block.partition("</script>")[0])


class Browser:
    """Chromium over its debugging pipe: JSON messages that end with a zero byte."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        inward, self._to = os.pipe()
        self._from, outward = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-background-networking"
        command = f'exec "$0" {flags} --remote-debugging-pipe --user-data-dir="$1" about:blank'
        self.process = subprocess.Popen(
            ["bash", "-c", f"{command} 3<&{inward} 4>&{outward}", CHROMIUM, str(folder)],
            pass_fds=(inward, outward),
            stderr=subprocess.DEVNULL,
        )
        os.close(inward)
        os.close(outward)
        self._rest, self._number, self._session, self._page = b"", 0, "", ""
        self.events: list[dict[str, Any]] = []  # of the page that is open

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._from, 1 << 16)
                assert data, "the browser has ended"
                self._rest += data
            line, _, self._rest = self._rest.partition(b"\0")
            reply = json.loads(line)
            if "method" in reply:
                self.events.append(reply)
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return reply["result"]

    def visit(self, url: str) -> None:
        self._session, before = "", self._page
        self._page = self.call("Target.createTarget", url="about:blank")["targetId"]
        if before:  # it may be asking its server for ever
            self.call("Target.closeTarget", targetId=before)
        session = self.call("Target.attachToTarget", targetId=self._page, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    @property
    def troubles(self) -> list[Any]:
        """What the console of the page complained of, and what it asked the network for."""
        found = [(event["method"], event["params"]) for event in self.events]
        urls = [of["request"]["url"] for method, of in found if method == "Network.requestWillBeSent"]
        bad = {("Runtime.exceptionThrown", None), ("Log.entryAdded", None), ("Runtime.consoleAPICalled", "error")}
        errors = [of for method, of in found if (method, of.get("type")) in bad]
        return errors + [url for url in urls if not url.startswith(("file:", "data:", "about:"))]

    def press(self, *keys: str) -> None:
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def run(self, code: str) -> Any:
        return self.call("Runtime.evaluate", expression=code)["result"].get("value")

    def until(self, code: str) -> Any:
        for _ in range(300):
            if value := self.run(code):
                return value
            time.sleep(0.1)
        raise AssertionError(f"never true: {code}; the page: {self.run('document.body.innerText')}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        os.close(self._to)
        os.close(self._from)
