"""What says who may come in, from files that may change while the server runs: certificates and
keys. One thread looks at them."""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from clipper.errors import NotAllowed
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.http.messages import HandlerResult, HttpError, HttpRequest
from clipper.frontend.openapi.endpoint import PUBLIC
from clipper.metrics import TlsCounts
from clipper.settings.http import TlsFiles
from clipper.tls import Certificate

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
_PROBES = b"/v2/health/"
Handle = Callable[[HttpRequest], HandlerResult]


class _File(Protocol):
    def refresh(self) -> bool: ...


class CredentialFiles:
    """Threads: any; start and stop from one.

    certificates: of the listeners that speak TLS, by the name of their address's setting.  counts:
    of each of them.
    """

    def __init__(self) -> None:
        self.certificates: dict[str, tuple[Certificate, TlsCounts]] = {}
        self.keys: ApiKeys | None = None
        self.tokens: ApiKeys | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add_tls(self, key: str, files: TlsFiles | None, where: str, counts: TlsCounts) -> None:
        """ConfigError for files that are not in order."""
        if files is not None:
            self.certificates[key] = Certificate(files, where), counts
            counts.ends_s = self.certificates[key][0].ends_s

    def add_keys(self, path: str, token: str) -> None:
        """ConfigError, alike."""
        if path:
            self.keys = ApiKeys(path, token)

    def add_tokens(self, path: str, token: str) -> None:
        """Of who may manage. ConfigError, alike."""
        if path:
            self.tokens = ApiKeys(path, token, "http.tokens_file")

    def start(self) -> None:
        if self.certificates or self.keys is not None or self.tokens is not None:
            self._thread = threading.Thread(target=self._run, name="clipper-files", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """Take what has changed."""
        files: list[_File] = [certificate for certificate, _ in self.certificates.values()]
        for file in (*files, *(one for one in (self.keys, self.tokens) if one is not None)):
            try:
                file.refresh()
            except Exception:
                _log.exception("looking at a file failed")
        for certificate, counts in self.certificates.values():
            counts.ends_s = certificate.ends_s

    def stop(self) -> None:
        """Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def asking(self, handle: Handle) -> Handle:
        """The same for who may ask; probes of health may always, and whoever reads the page."""
        keys = self.keys
        if keys is None:
            return handle

        def checked(request: HttpRequest) -> HandlerResult:
            if not request.path.startswith(_PROBES) and request.path not in PUBLIC:
                try:
                    keys.check(request.headers.get(b"authorization", b""))
                except NotAllowed as error:
                    raise HttpError(
                        401, error.message, error.hint, ((b"www-authenticate", b"Bearer"),)
                    ) from None
            return handle(request)

        return checked
