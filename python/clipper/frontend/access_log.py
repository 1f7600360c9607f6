"""The access log: a line for each request over HTTP and each call of gRPC that is logged.

Those are the ones whose callers sample their traces (W3C Trace Context), and of the others as many
in a second as `logging.access_lines_s_max` says.
"""

import logging
import time
from collections.abc import Callable

from clipper.foreign_text import Sampler, printable
from clipper.frontend.auth.api_keys import KeyOwner, key_of
from clipper.frontend.http.messages import HttpRequest, HttpResponse, StreamedResponse
from clipper.frontend.tracing.context import Trace, subject_of
from clipper.metrics.http_counts import now_ns

_log = logging.getLogger("clipper.requests")
_PATH_MAX = 200  # characters of a path
_LEFT_OUT = -1


class AccessLog:
    """Logs requests that have been answered. Threads: any.

    lines_s: requests that are logged in each second besides those that their callers sample; 0:
    none. The next line that is logged has the number of those that were left out.
    """

    def __init__(self, lines_s: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.logs_all = lines_s > 0
        self._sampler = Sampler(lines_s, now_s)

    @property
    def logs_sampled(self) -> bool:
        """True if requests whose callers sample their traces are logged."""
        return _log.isEnabledFor(logging.INFO)

    def request(
        self,
        request: HttpRequest,
        response: HttpResponse | StreamedResponse,
        id: bytes,
        client: str,
    ) -> None:
        """Log a request over HTTP, if it is to be logged. client: its address.

        Of the path what follows the `?` is not logged, for it may hold a secret.
        """
        left_out = self._admit(request.trace)
        if left_out == _LEFT_OUT:
            return
        path = printable(request.path.decode("ascii", "replace"))[:_PATH_MAX]
        about: dict[str, object] = {
            "request_id": id.decode(),
            "route": request.route,
            "path": path,
            "method": request.method,
            "status": response.status,
            "client": client,
            **({"actor": request.actor} if request.actor else {}),
            **key_of(request.key),
            **subject_of(request),
        }
        what = f"{request.method} {path}: {response.status}"
        _write(what, request.began_ns, request.trace, about, left_out)

    def call(
        self,
        trace: Trace | None,
        method: str,
        code: str,
        began_ns: int,
        client: str,
        key: KeyOwner | None = None,
    ) -> None:
        """Log a call of gRPC, if it is to be logged. client: its address. key: its owner."""
        left_out = self._admit(trace)
        if left_out != _LEFT_OUT:
            about: dict[str, object] = {"method": method, "code": code, "client": client}
            about |= key_of(key)
            _write(f"{method}: {code}", began_ns, trace, about, left_out)

    def _admit(self, trace: Trace | None) -> int:
        """Return how many requests were left out before this one; -1: this one is, too."""
        if not self.logs_sampled:
            return _LEFT_OUT
        if trace is not None and trace.sampled and trace.parent_id:
            return 0
        return self._sampler.admit() if self.logs_all else _LEFT_OUT


def _write(
    what: str, began_ns: int, trace: Trace | None, about: dict[str, object], left_out: int
) -> None:
    took_ms = (now_ns() - began_ns) / 1e6
    about["duration_ms"] = round(took_ms, 3)
    about |= trace.about() if trace is not None else {}
    others = f"; {left_out} before it are not logged" if left_out else ""
    about |= {"left_out": left_out} if left_out else {}
    _log.info("%s in %.1f ms%s", what, took_ms, others, extra=about)
