"""A headless Chromium, driven through the DevTools protocol over two pipes."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.cluster.workers.packages import need_packages

_FLAGS = ("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
          "--disable-background-networking", "--disable-extensions", "--no-proxy-server", "--window-size=1400,1000")
_TIMEOUT = 180.0  # seconds, for one answer on a busy machine


class Browser:
    """A browser process. `page` opens a page in a new tab; `close` ends the process."""

    def __init__(self, profile: Path) -> None:
        need_packages("tests of HTML pages", {"chromium": "chromium"})
        program = shutil.which("chromium")
        assert program is not None
        flags = [*_FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        read_commands, self._to = os.pipe()
        self._from, write_answers = os.pipe()
        # the browser reads commands from descriptor 3, and writes answers to 4
        script = f'exec 3<&{read_commands} 4>&{write_answers}; exec "$@"'
        self._process = subprocess.Popen(["bash", "-c", script, "chromium", program, *flags], stderr=subprocess.DEVNULL,
                                         stdout=subprocess.DEVNULL, pass_fds=(read_commands, write_answers))
        os.close(read_commands)
        os.close(write_answers)
        self._number, self._buffer = 0, b""
        self._notices: list[dict[str, Any]] = []

    def page(self, url: str) -> "Page":
        """Open an empty tab, listen to its console, then load `url`."""
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.send(f"{domain}.enable", {}, session)
        page = Page(self, session)
        self.send("Page.navigate", {"url": url}, session)
        page.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page

    def send(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT
        while True:
            answer = self._receive(deadline - time.monotonic())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._notices.append(answer)

    def _receive(self, timeout: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(timeout, 0))
            data = os.read(self._from, 1 << 20) if ready else b""
            assert data, "the browser does not answer, or has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def notices(self, session: str) -> list[dict[str, Any]]:
        """Return the messages that the tab has sent without being asked."""
        return [notice for notice in self._notices if notice.get("sessionId") == session]

    def close(self) -> None:
        os.close(self._to)  # ends the browser
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)


class Page:
    """A tab of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        result = self.browser.send("Runtime.evaluate", {
            "expression": expression, "returnByValue": True, "awaitPromise": True}, self.session)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout: float = _TIMEOUT) -> None:
        deadline = time.monotonic() + timeout
        while not self.run(expression):
            assert time.monotonic() < deadline, f"not true after {timeout} s: {expression}; {self.errors()}"
            time.sleep(0.1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.browser.send("Input.dispatchKeyEvent", {"type": kind, "key": key}, self.session)

    def mouse(self, kind: str, x: float, y: float, **values: Any) -> None:
        self.browser.send("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **values}, self.session)

    def errors(self) -> list[str]:
        """Return the errors and warnings of the console so far: exceptions, blocked content, failed requests."""
        self.run("0")  # receive what was sent before
        found = []
        for notice in self.browser.notices(self.session):
            params = notice.get("params", {})
            if notice["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            if notice["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(params["args"]))
            if notice["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Return the addresses that the page has requested, without `data:`."""
        self.run("0")
        urls = [notice["params"]["request"]["url"] for notice in self.browser.notices(self.session)
                if notice["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("data:")]
