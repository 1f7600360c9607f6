"""A real Chromium over a pipe: the part of the DevTools protocol that the tests of the dashboard
need."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from base64 import b64decode
from pathlib import Path
from typing import Any, Self

PATIENCE_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowDown": 40, "ArrowUp": 38}


def found() -> str:
    """Return the path of the browser's command, or an empty string."""
    return next((path for name in NAMES if (path := shutil.which(name))), "")


class Chromium:
    """A Chromium process. `page()` opens a page in a profile of its own. Threads: one."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="dashboard-browser-")
        low_in, ours_out = os.pipe()
        ours_in, low_out = os.pipe()
        # 3 and 4 are its own
        theirs_in, theirs_out = (
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (low_in, low_out)
        )
        command = [
            found(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-default-apps",
            "--disable-sync",
            "--disable-extensions",
            "--hide-scrollbars",
            "--font-render-hinting=none",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder}",
            "about:blank",
        ]
        redirected = [
            "bash",
            "-c",
            f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-',
            "bash",
            *command,
        ]
        self._process = subprocess.Popen(
            redirected,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (low_in, low_out, theirs_in, theirs_out):
            os.close(fd)
        self._out, self._in = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb", 0)
        os.set_blocking(self._in.fileno(), False)
        self._rest = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.pages: dict[str, Page] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.ask("Browser.close")
        except (OSError, TimeoutError):
            self._process.kill()
        self._process.wait(PATIENCE_S)
        self._out.close()
        self._in.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, method: str, session: str = "", **params: Any) -> Any:
        """Send a command; return its result. RuntimeError for a refused one."""
        self._number += 1
        number = self._number
        message = {
            "id": number,
            "method": method,
            "params": params,
            **({"sessionId": session} if session else {}),
        }
        self._out.write(json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE_S
        while number not in self._answers:
            self.listen()
            if time.monotonic() > until:
                raise TimeoutError(f"the browser did not answer {method}")
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer.get("result", {})

    def listen(self, wait_s: float = 0.01) -> None:
        """Take in what has come."""
        data = self._in.read(1 << 20)
        if data is None:
            threading.Event().wait(wait_s)
            return
        if not data:
            raise OSError("the browser is gone")
        *whole, self._rest = (self._rest + data).split(b"\0")
        for text in whole:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self.pages:
                self.pages[message["sessionId"]].on_event(message["method"], message["params"])

    def page(self, width: int = 1280, height: int = 900) -> "Page":
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)[
            "targetId"
        ]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.ask(f"{domain}.enable")
        page.size(width, height)
        return page


class Page:
    """One page. troubles: errors of its console, exceptions, refused scripts. urls: its
    requests."""

    def __init__(self, browser: Chromium, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context
        self.troubles: list[str] = []
        self.urls: list[str] = []
        self.sent_headers: list[dict[str, str]] = []

    def ask(self, method: str, **params: Any) -> Any:
        return self._browser.ask(method, self._session, **params)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            about = params["exceptionDetails"]
            self.troubles.append(str(about.get("exception", {}).get("description", about)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.troubles.append(
                " ".join(str(one.get("value", one.get("description"))) for one in params["args"])
            )
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.troubles.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def close(self) -> None:
        self._browser.pages.pop(self._session, None)
        self._browser.ask("Target.disposeBrowserContext", browserContextId=self._context)

    # -- what a person does

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def prefer(self, scheme: str) -> None:
        """Set the preferred colour scheme, `dark` or `light`."""
        self.ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression; of a promise, the value that it resolves to."""
        found = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(
                f"{script[:200]}:"
                f" {found['exceptionDetails'].get('exception', {}).get('description')}"
            )
        return found["result"].get("value")

    def until(self, script: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until an expression is true."""
        give_up = time.monotonic() + patience_s
        while True:
            try:
                if self.run(f"!!({script})"):
                    return
            except RuntimeError as error:  # the page is being replaced
                if time.monotonic() > give_up:
                    raise AssertionError(f"never: {script}; {error}") from None
            if time.monotonic() > give_up:
                raise AssertionError(
                    f"never: {script}; the page says: {self.text()[:2000]}; troubles:"
                    f" {self.troubles}"
                )
            self._browser.listen(0.03)

    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def until_text(self, text: str, patience_s: float = PATIENCE_S) -> None:
        self.until(f"document.body.innerText.includes({json.dumps(text)})", patience_s)

    def press(self, key: str, shift: bool = False) -> None:
        about = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": _KEYS.get(key, 0),
            "modifiers": 8 if shift else 0,
        }
        text = {"Enter": "\r", " ": " "}.get(key)
        self.ask(
            "Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {})
        )
        self.ask("Input.dispatchKeyEvent", type="keyUp", **about)

    def write(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        self.until(f"document.querySelector({json.dumps(selector)})")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, path: Path, whole: bool = False) -> None:
        data = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(b64decode(data))
