"""A real browser for tests of pages, which are skipped without one."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and find_spec("playwright")), reason="chromium or playwright is not installed"
)


def page_data(page: Path) -> Any:
    """The JSON block that a report draws."""
    block = page.read_text().partition('<script type="application/json" id="report">')[2]
    return json.loads(block.partition("</script>")[0])


class Browser:
    """Chromium, driven by playwright; each visit opens a new page."""

    def __init__(self) -> None:
        from playwright.sync_api import sync_playwright

        self._driver = sync_playwright().start()
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        self._chromium = self._driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        self.page: Any = None
        self.troubles: list[str] = []  # errors of the page and its console, and requests to the network

    def visit(self, url: str) -> None:
        if self.page:  # it may poll its server for ever
            self.page.close()
        self.page, self.troubles = self._chromium.new_page(), (troubles := [])
        near = ("file:", "data:", "about:")
        self.page.on("console", lambda said: troubles.extend([said.text] * (said.type == "error")))
        self.page.on("pageerror", lambda error: troubles.append(str(error)))
        self.page.on("request", lambda asked: troubles.extend([asked.url] * (not asked.url.startswith(near))))
        self.page.goto(url)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def write(self, text: str) -> None:
        self.page.keyboard.insert_text(text)

    def run(self, code: str) -> Any:
        return self.page.evaluate(code)

    def until(self, code: str) -> Any:
        """Polls until the expression is true; one that throws is not true yet. The content security policy of our pages
        forbids `wait_for_function`.
        """
        for _ in range(600):
            if value := self.run(f"(() => {{ try {{ return {code} }} catch {{ return null }} }})()"):
                return value
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {code}; the page: {self.run('document.body.innerText')}; {self.troubles}")

    def close(self) -> None:
        self._chromium.close()
        self._driver.stop()
