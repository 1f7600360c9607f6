"""Certificates and API keys that are reloaded when their files change. One thread checks the
files."""

import logging
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Protocol

from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import NotAllowed
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.auth.signed_tokens import SignedTokens, signed_tokens
from clipper.frontend.http.health import PROBES
from clipper.frontend.http.messages import HttpError, HttpRequest
from clipper.frontend.openapi.endpoint import PUBLIC
from clipper.metrics import Samples, TlsCounts
from clipper.params.tokens import TokenFile
from clipper.settings.grpc import GrpcSettings, grpc_tls, own_address
from clipper.settings.http import HttpSettings, TlsFiles, admin_tls, query_tls
from clipper.tls import Certificate
from clipper_core.http.key_table import application_of

_log = logging.getLogger(__name__)
_CHECK_S = 1.0
_MODEL_IDS = (b"mm-model-id", b"mm-vmodel-id")
Admit = Callable[[HttpRequest], None]
# paths that need no credentials: probes, and the page of the documentation
OPEN = PUBLIC | PROBES


# settings of the certificate of each listener
_TLS_SETTINGS = {"address": "http.tls", "admin": "http.admin_tls", "grpc": "grpc.tls"}


def tls_of_listeners(http: HttpSettings, grpc: GrpcSettings) -> dict[str, TlsFiles]:
    """Return the certificate files of the configured listeners that use TLS: `address`, `admin`
    and `grpc`."""
    each = (
        ("address", http.address, query_tls(http)),
        ("admin", http.admin, admin_tls(http)),
        ("grpc", own_address(grpc, http), grpc_tls(grpc, http)),
    )
    return {key: files for key, address, files in each if address and files is not None}


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
        self._signed: SignedTokens | None = None
        self.tokens: ApiKeys | None = None
        self.workers: TokenFile | None = None
        self._worker = Worker("clipper-files", self._run, again=Backoff(_CHECK_S, _CHECK_S))

    def read(self, http: HttpSettings, grpc: GrpcSettings, counts: Mapping[str, TlsCounts]) -> None:
        """Load the files that the settings of the listeners name. Raises ConfigError.

        counts: of the handshakes, by listener.
        """
        for key, files in tls_of_listeners(http, grpc).items():
            self.add_tls(key, files, _TLS_SETTINGS[key], counts[key])
        self._signed = signed_tokens(http)
        self.add_keys(http.api_keys_file, http.token)
        self.add_tokens(http.tokens_file if http.admin else "", http.token)

    def add_tls(self, key: str, files: TlsFiles | None, where: str, counts: TlsCounts) -> None:
        """Load the certificate of a listener. Raises ConfigError for files that cannot be used."""
        if files is not None:
            self.certificates[key] = Certificate(files, where), counts
            counts.ends_s = self.certificates[key][0].ends_s

    def add_keys(self, path: str, token: str) -> None:
        """Load the API keys for queries. Raises ConfigError."""
        if path:
            self.keys = ApiKeys(path, token, signed=self._signed)

    def add_tokens(self, path: str, token: str) -> None:
        """Load the tokens for management. Raises ConfigError."""
        if path:
            self.tokens = ApiKeys(path, token, "http.tokens_file", limited=False)

    def collect(self, into: Samples) -> None:
        """Add the counts of the keys' requests to `into`."""
        if self.keys is not None:
            self.keys.collect(into)

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
        each: tuple[_File | None, ...] = (self.keys, self._signed, self.tokens, self.workers)
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
        """Return a check that raises HttpError for requests without an API key, and for those that
        their key does not allow; None if no keys are configured.

        Health probes and the files of the documentation page need no key.
        """
        keys = self.keys
        if keys is None:
            return None

        def check(request: HttpRequest) -> None:
            if request.path not in OPEN:
                try:
                    given = request.headers.get(b"authorization", b"")
                    request.key = keys.admit(given, _applications_of(request))
                except NotAllowed as error:
                    raise HttpError(
                        401, error.message, error.hint, ((b"www-authenticate", b"Bearer"),)
                    ) from None

        return check


def _applications_of(request: HttpRequest) -> list[str]:
    """Return the applications, and models by their names, that a request is about; an empty name
    if it is about none."""
    path = urllib.parse.unquote_to_bytes(request.path)
    named = [request.headers.get(name, b"") for name in _MODEL_IDS]
    ids = [id.strip() for id in b",".join(named).decode("latin-1").split(",")]
    return [application_of(path), *filter(None, ids)]
