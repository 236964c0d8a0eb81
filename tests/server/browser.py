"""A headless Chromium, told what to do in its DevTools protocol through a socket: it needs no package for that."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--window-size=1280,900",
)  # fmt: skip
PATIENCE = 30.0  # seconds until something that does not happen is an error


def find() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Sends commands, and keeps the events that come in between."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._rest = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The command's result."""
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._channel.sendall(json.dumps(message).encode() + b"\0")
        while True:
            came = self._receive()
            if came.get("id") == number:
                assert "error" not in came, f"{method}: {came['error']}"
                return came["result"]

    def wait_for(self, method: str) -> dict[str, Any]:
        """The parameters of the next such event that nobody has waited for."""
        while True:
            for i, event in enumerate(self.events):
                if event["method"] == method:
                    return self.events.pop(i)["params"]
            self._receive()

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._channel.recv(2**16)
            assert data, "the browser has gone"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        came = json.loads(line)
        if "id" not in came:
            self.events.append(came)
        return came


class Page:
    """A tab with storage of its own."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        browser.wait_for("Page.loadEventFired")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self._session, **params)

    def close(self) -> None:
        self.browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def reload(self) -> None:
        self.call("Page.reload")
        self.browser.wait_for("Page.loadEventFired")

    def events(self, method: str) -> list[dict[str, Any]]:
        """The parameters of all such events so far."""
        self.run("0")  # what was before has arrived then
        return [
            event["params"]
            for event in self.browser.events
            if event["method"] == method and event.get("sessionId") == self._session
        ]

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, of a promise its result."""
        got = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"].get("exception", got)
        return got["result"].get("value")

    def until(self, expression: str) -> Any:
        """The expression's value, once it is true."""
        return self.run(f"""new Promise((resolve, reject) => {{
            const end = Date.now() + {PATIENCE * 1000};
            const look = () => {{
                const value = {expression};
                if (value) resolve(value);
                else if (Date.now() > end) reject(new Error({json.dumps("never: " + expression)}));
                else setTimeout(look, 10);
            }};
            look();
        }})""")

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def texts(self, selector: str) -> list[str]:
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")

    def type(self, selector: str, text: str) -> None:
        """Replace what a field has."""
        self.run(f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.focus(); it.select(); }})()")
        self.call("Input.insertText", text=text) if text else self.press("Delete")

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": 13, "Delete": 46, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "Escape": 27}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 * shift}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def point(self, selector: str) -> tuple[float, float]:
        """Move the pointer there."""
        x, y = self.run(f"""(() => {{
            const box = document.querySelector({json.dumps(selector)}).getClientRects()[0];
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector: str) -> None:
        x, y = self.point(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@contextmanager
def chromium(program: str, folder: Path) -> Iterator[Browser]:
    """Run it until the block ends. What it keeps goes to the folder."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE + 10)
    fd = theirs.fileno()
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to have one as root
    process = subprocess.Popen(
        # It reads from descriptor 3 and writes to 4.
        ["bash", "-c", f'exec "$0" "$@" 3<&{fd} 4>&{fd}', program, *FLAGS, *sandbox, f"--user-data-dir={folder}"],
        pass_fds=(fd,), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    theirs.close()
    try:
        yield Browser(ours)
    finally:
        ours.close()  # by which it ends
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
