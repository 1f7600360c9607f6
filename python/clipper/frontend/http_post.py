"""HTTP posts to another server, with retries, from a thread that may block."""

import http.client
import logging
import ssl
import urllib.parse
from collections.abc import Mapping
from typing import Final

from clipper.component import Stop
from clipper.errors import ConfigError, without_secrets
from clipper.tls import client_context
from clipper_container.backoff import Backoff

_log = logging.getLogger(__name__)
_RETRIED: Final = frozenset((408, 429, 500, 502, 503, 504))
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.2, 10.0
_LAST_S = 2.0  # timeout of the last posts when the server closes
_ANSWER_BYTES_MAX = 1 << 16


class Poster:
    """Posts bodies to one URL, each by a connection of its own. Threads: one.

    what: what is posted, for the log, which has the start and the end of each outage. setting: the
    name of the setting that holds the URL, for errors. stopping: once requested, nothing is waited
    for.
    Raises ConfigError for an invalid URL.
    """

    def __init__(
        self,
        setting: str,
        url: str,
        headers: Mapping[str, str],
        ca: str,
        timeout_s: float,
        tries_max: int,
        stopping: Stop,
        what: str,
        port: int = 80,
    ) -> None:
        """Parse the URL. Raises ConfigError."""
        split = urllib.parse.urlsplit(url)
        try:
            self._port = split.port or (443 if split.scheme == "https" else port)
        except ValueError:
            split = urllib.parse.urlsplit("")
        if split.scheme not in ("http", "https") or not split.hostname:
            raise ConfigError(
                f"{setting}: {url!r} is not an address.", hint=f"Write http://HOST:{port}."
            )
        self._host, self._headers = split.hostname, dict(headers)
        self._path = (split.path or "/") + (f"?{split.query}" if split.query else "")
        self._tls: ssl.SSLContext | None = client_context(ca) if split.scheme == "https" else None
        self._timeout_s, self._tries_max, self._stopping = timeout_s, tries_max, stopping
        self._what = what
        self._where = without_secrets(url.partition("?")[0])
        self._is_away = False

    def send(self, body: bytes) -> str:
        """Post a body, with retries.

        Returns "exported", "refused" if the receiver rejected it, or "dropped" if no attempt
        succeeded.
        """
        backoff = Backoff(_PAUSE_S_MIN, _PAUSE_S_MAX)
        for tried in range(1, self._tries_max + 1):
            after_s, why = self._post(body)
            self._log_outage(why)
            if after_s is None:
                return "refused" if why else "exported"
            if self._stopping.requested or tried == self._tries_max:
                break
            self._stopping.wait(min(_PAUSE_S_MAX, max(after_s, backoff.next_s())))
        return "dropped"

    def _log_outage(self, why: str) -> None:
        if why and not self._is_away:
            _log.warning("%s do not reach %s: %s", self._what, self._where, why)
        elif not why and self._is_away:
            _log.info("%s reach %s again", self._what, self._where)
        self._is_away = bool(why)

    def _post(self, body: bytes) -> tuple[float | None, str]:
        """Post once. Returns the seconds until a retry (None for no retry) and the reason of a
        failure."""
        timeout_s = min(self._timeout_s, _LAST_S) if self._stopping.requested else self._timeout_s
        line: http.client.HTTPConnection
        if self._tls is None:
            line = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        else:
            line = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout_s, context=self._tls
            )
        try:
            line.request("POST", self._path, body, self._headers)
            response = line.getresponse()
            response.read(_ANSWER_BYTES_MAX)
            if response.status < 300:
                return None, ""
            why = f"status {response.status} {response.reason}"
            if response.status not in _RETRIED:
                return None, why
            after = response.getheader("retry-after") or ""
            return (float(after) if after.isdecimal() else 0.0), why
        except (OSError, http.client.HTTPException) as error:
            return 0.0, str(error) or type(error).__name__
        finally:
            line.close()
