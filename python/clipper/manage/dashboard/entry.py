"""Links that open the dashboard once. Whoever opens one in time gets the token that the page sends.

The code of a link is behind its #, which no browser sends to a server, and no proxy logs. A page of
its own trades it for the token, and stores that where the dashboard looks for it.
"""

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Final

VALID_S: Final = 3600.0
_OPEN_MAX: Final = 64  # links that nobody has opened yet; the oldest are forgotten
PATH: Final = "/dashboard/open.html"
SESSION_PATH: Final = "/dashboard/session"
_HTML: Final = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>clipper</title>
<link rel="icon" href="/dashboard/icon.svg">
<p id="text" role="status">Opening the dashboard&hellip;</p>
<p><a href="/dashboard">Log in with a token instead</a></p>
<script src="/dashboard/open.js"></script>
</html>
"""
_SCRIPT: Final = b"""// Trades the code of a one-time link for the token of the dashboard.
const code = location.hash.slice(1);
history.replaceState(null, "", location.pathname);
const say = (text) => { document.getElementById("text").textContent = text; };

async function enter() {
  const headers = { "Content-Type": "application/json" };
  const body = JSON.stringify({ code });
  const response = await fetch("/dashboard/session", { method: "POST", headers, body });
  const found = await response.json();
  if (!response.ok) return say(`${found.detail || found.error} ${found.hint || ""}`);
  if (found.token) sessionStorage.setItem("clipper-token", found.token);
  location.replace("/dashboard");
}

enter().catch(() => say("The server cannot be reached."));
"""
FILES: Final = {"open.html": _HTML, "open.js": _SCRIPT}


class EntryCodes:
    """The codes of links that nobody has opened yet. Threads: any. now_s: the monotonic clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        # by the hash of the code
        self._until_s: dict[str, float] = {}
        self._changing = threading.Lock()

    def issue(self) -> str:
        """Return a new code, which is good for one use within VALID_S."""
        code = secrets.token_urlsafe(24)
        with self._changing:
            while len(self._until_s) >= _OPEN_MAX:
                del self._until_s[next(iter(self._until_s))]
            self._until_s[_hash(code)] = self._now_s() + VALID_S
        return code

    def redeem(self, code: str) -> bool:
        """Use a code up; return whether it was good."""
        with self._changing:
            until_s = self._until_s.pop(_hash(code), 0.0)
        return self._now_s() < until_s


def _hash(code: str) -> str:
    return hashlib.sha256(code.encode("utf-8", "replace")).hexdigest()
