"""Certificates and API keys that are reloaded when their files change. One thread checks the
files."""

import logging
from collections.abc import Callable
from typing import Protocol

from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import NotAllowed
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.http.messages import HttpError, HttpRequest
from clipper.frontend.openapi.endpoint import PUBLIC
from clipper.metrics import TlsCounts
from clipper.params.tokens import TokenFile
from clipper.settings.http import TlsFiles
from clipper.tls import Certificate

_log = logging.getLogger(__name__)
_CHECK_S = 1.0
_PROBES = b"/v2/health/"
Admit = Callable[[HttpRequest], None]


class _File(Protocol):
    def refresh(self) -> bool: ...


class CredentialFiles:
    """TLS certificates, API keys and management tokens, read from files.

    certificates: by the name of the setting that holds the listener's address; each with the
    counters of its handshakes. keys, tokens, workers (of the parameter server): None when no such
    file is configured. Threads: any; start and stop from one.
    """

    def __init__(self) -> None:
        self.certificates: dict[str, tuple[Certificate, TlsCounts]] = {}
        self.keys: ApiKeys | None = None
        self.tokens: ApiKeys | None = None
        self.workers: TokenFile | None = None
        self._worker = Worker("clipper-files", self._run, again=Backoff(_CHECK_S, _CHECK_S))

    def add_tls(self, key: str, files: TlsFiles | None, where: str, counts: TlsCounts) -> None:
        """Load the certificate of a listener. Raises ConfigError for files that cannot be used."""
        if files is not None:
            self.certificates[key] = Certificate(files, where), counts
            counts.ends_s = self.certificates[key][0].ends_s

    def add_keys(self, path: str, token: str) -> None:
        """Load the API keys for queries. Raises ConfigError."""
        if path:
            self.keys = ApiKeys(path, token)

    def add_tokens(self, path: str, token: str) -> None:
        """Load the tokens for management. Raises ConfigError."""
        if path:
            self.tokens = ApiKeys(path, token, "http.tokens_file")

    def start(self) -> None:
        """Start the thread that checks the files, if there are any. Raises NotStarted."""
        if self._files():
            self._worker.start()

    def health(self) -> list[Health]:
        """Return the state of the thread, if there is one."""
        return [self._worker.health()] if self._worker.is_started else []

    def _run(self, stop: Stop) -> None:
        while not stop.wait(_CHECK_S):
            self.check()

    def _files(self) -> list[_File]:
        files: list[_File] = [certificate for certificate, _ in self.certificates.values()]
        each: tuple[_File | None, ...] = (self.keys, self.tokens, self.workers)
        return [*files, *(one for one in each if one is not None)]

    def check(self) -> None:
        """Reload the files that have changed."""
        for file in self._files():
            try:
                file.refresh()
            except Exception:
                _log.exception("reading a file failed")
        for certificate, counts in self.certificates.values():
            counts.ends_s = certificate.ends_s

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._worker.end()

    def key_check(self) -> Admit | None:
        """Return a check that raises HttpError for requests without an API key; None if no keys
        are configured.

        Health probes and the files of the documentation page need no key.
        """
        keys = self.keys
        if keys is None:
            return None

        def check(request: HttpRequest) -> None:
            if not request.path.startswith(_PROBES) and request.path not in PUBLIC:
                try:
                    keys.check(request.headers.get(b"authorization", b""))
                except NotAllowed as error:
                    raise HttpError(
                        401, error.message, error.hint, ((b"www-authenticate", b"Bearer"),)
                    ) from None

        return check
