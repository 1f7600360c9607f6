"""Authorization of management requests.

Without a token, only processes of the server's own user on this host may manage (http/connection.py
checks this). With a token, or a file of tokens, each request must carry one; a token of the file
also names the person who acts.
"""

import hmac
from collections.abc import Callable

from clipper.errors import NotAllowed
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.http.messages import HttpError, HttpRequest
from clipper.settings.http import HttpSettings, is_loopback

_PAGE = b"/dashboard"
_SESSION = b"/dashboard/session"  # its own code is its authorization
_BEARER = ((b"www-authenticate", b"Bearer"),)


def guard(settings: HttpSettings, tokens: ApiKeys | None = None) -> Callable[[HttpRequest], None]:
    """Return a check that raises HttpError for requests that may not manage.

    tokens: those of `http.tokens_file`; a request is attributed to the owner of its token, whatever
    its headers contain. Without any token, the check rejects what a web page could have sent,
    because a browser on this host reaches loopback too: a request with another Origin, or with a
    Host name that only a foreign resolver maps to this host. The static files of the dashboard are
    open to all, and so is the trade of a one-time code for the token.
    """
    expected = f"Bearer {settings.token}".encode()

    def check(request: HttpRequest) -> None:
        if request.method in ("GET", "HEAD") and _is_of_the_page(request):
            return
        if request.method == "POST" and request.path == _SESSION:
            return
        if tokens is not None:
            try:
                request.actor = tokens.check(request.headers.get(b"authorization", b""))
            except NotAllowed:
                hint = (
                    "Send Authorization: Bearer TOKEN, one of http.tokens_file; `clipper key NAME"
                    " --file FILE` makes one."
                )
                raise HttpError(
                    401, "management needs a token that is known here.", hint, _BEARER
                ) from None
            return
        if settings.token:
            given = request.headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, expected):
                hint = "Send Authorization: Bearer, and the value of http.token."
                raise HttpError(401, "management needs the token.", hint, _BEARER)
            return
        host = request.headers.get(b"host", b"localhost").decode("ascii", "replace")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        origin = request.headers.get(b"origin", b"")
        if (
            origin and origin not in (f"http://{host}".encode(), f"https://{host}".encode())
        ) or not is_loopback(name):
            raise HttpError(
                403,
                "management takes no requests of web pages or under other names.",
                "Set http.token to allow them.",
            )

    return check


def _is_of_the_page(request: HttpRequest) -> bool:
    path = request.path
    accepts_html = b"text/html" in request.headers.get(b"accept", b"")
    return path == _PAGE or path.startswith(_PAGE + b"/") or (path == b"/" and accepts_html)
