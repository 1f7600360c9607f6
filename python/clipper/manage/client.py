"""A running server from elsewhere: the verbs of operations.py over its management address, with the
same names and errors.

server = clipper.connect()                       # the only server of this user on this host
server = clipper.connect("https://10.0.0.7:8002", token="...", ca="ca.pem")
server.deploy("svm", "svm.onnx")
server.promote("svm:2")
"""

import contextlib
import copy
import getpass
import hashlib
import math
import os
import shlex
import socket
import ssl
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack, cast

import msgspec
import numpy as np

from clipper.deploy.deployers import ENGINES
from clipper.deploy.packages.artifact import artifact_of, is_data, is_registered
from clipper.deploy.packages.environments import lines_of
from clipper.deploy.packages.pulling import url_of
from clipper.errors import (
    ClipperError,
    Forbidden,
    InvalidInput,
    NoServer,
    NotAllowed,
    PackagingError,
)
from clipper.host_port import join_host_port
from clipper.manage.running import running_at, the_one
from clipper.manage.streams.client import StreamClient
from clipper.manage.tables.client import TableClient
from clipper.manage.verbs.calls import ManagementCalls
from clipper.manage.verbs.sending import quoted
from clipper.options import refusing_unknown_keywords, types_of
from clipper.spec.keywords import ApplicationKeywords, SentModelKeywords
from clipper.tls import client_context, fingerprint_of
from clipper.types import Answer, InputType, UserValue, VersionedModel

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

    from clipper.manage.mesh.client import MeshClient
    from clipper.manage.rows import ChangeResult
    from clipper.manage.stream import Stream

_TOKEN = "CLIPPER_ADMIN_TOKEN"
_URL = "CLIPPER_URL"
_CA, _CERT, _KEY = "CLIPPER_CA", "CLIPPER_CERT", "CLIPPER_KEY"
_KNOWN = ("clipper.errors", "clipper.mesh.", "clipper_container.errors")  # errors of servers
_BUILD_S = 3600.0  # an environment may take its time; server.build_s ends it


def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    ca: str | None = None,
    cert: tuple[str, str] | None = None,
    timeout_s: float = 120.0,
    state: str = "",
    admin: str = "",
    folder: str = "",
) -> "Client":
    """Return a client of the server that is managed at `url` (None: CLIPPER_URL; else the server of
    this user on this host that runs on `state`, or is managed at `admin`, or was started in
    `folder`, or is the only one). token: http.token of the server (None: CLIPPER_ADMIN_TOKEN, else
    the private one of a server of this user on this host). Nothing is sent yet.

    For https: ca: a PEM file of the CA of the server's certificate (None: CLIPPER_CA, else the CAs
    of this host); cert: the PEM files of a client certificate and its key, for a server that
    requires them (None: CLIPPER_CERT, CLIPPER_KEY). Raises NoServer when there is none here, or it
    is not clear which; InvalidInput for a URL that cannot be; ConfigError for a file that is none.
    """
    ca = os.environ.get(_CA, "") if ca is None else ca
    cert = (os.environ.get(_CERT, ""), os.environ.get(_KEY, "")) if cert is None else cert
    url = url or os.environ.get(_URL)
    found = running_at(url) if url else the_one(state, admin, folder)
    if token is None:
        token = os.environ.get(_TOKEN, "") or (found.token if found else "")
    if found is None:
        return Client(url or "", token, timeout_s, Trust(ca, *cert))
    # its own URL, not the one given: another process may listen at another address of that port
    pinned = "" if url and ca else found.certificate
    return Client(found.url, token, timeout_s, Trust(ca, *cert, pinned))


class Trust(NamedTuple):
    """Trust in a server's certificate. pinned: the PEM file of the one certificate to accept;
    empty: one that `ca` or this host trusts, checked by name.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    pinned: str = ""


_TRUST = Trust()


@refusing_unknown_keywords
class Client(ManagementCalls):
    """A client of a running server. Each verb of `clipper.manage.verbs.table` is a method; a change
    returns a ChangeResult, as one with dry_run=True would. tables: the parameter tables of the
    server, docs/params.md. streams: its Redis streams, docs/streams.md. Threads: any, one request
    at a time a client.
    """

    def __init__(
        self, url: str, token: str = "", timeout_s: float = 120.0, trust: Trust = _TRUST
    ) -> None:
        split = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if split.scheme not in ("http", "https") or not split.hostname:
            raise InvalidInput(
                f"url={url!r} is not an address of a server.",
                hint="Write http://HOST:PORT or https://HOST:PORT.",
            )
        self.tables = TableClient(self)
        self.streams = StreamClient(self)
        self._trust = trust
        self._tls = (
            client_context(*trust[:3], pinned=bool(trust.pinned))
            if split.scheme == "https"
            else None
        )
        try:
            self._port = split.port or (443 if self._tls else 80)
        except ValueError:
            raise InvalidInput(
                f"url={url!r} has no port from 1 to 65535.", hint="Write http://HOST:PORT."
            ) from None
        self.url, self._host, self._timeout_s = (
            f"{split.scheme}://{split.netloc}",
            split.hostname,
            timeout_s,
        )
        self.headers = {"Clipper-Actor": _actor()} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )

    @property
    def tls(self) -> ssl.SSLContext:
        """Return the TLS context for other connections to the same host."""
        return self._tls or client_context(*self._trust[:3], pinned=False)

    def openapi(self, *, management: bool = False) -> dict[str, object]:
        """OpenAPI 3.1 of the address that takes queries, or of the one that manages."""
        return self._object("GET", f"/openapi.json?of={'management' if management else 'queries'}")

    def stream(self, path: str = "/admin/stream") -> "Stream":
        """Iterate over server-sent events (name, content) as they come. Close the iterator.

        path: of the events; those of the dashboard by default. Raises NoServer, NotAllowed.
        """
        from clipper.manage.stream import Stream

        connection, response = self._requested("GET", path, None)
        if response.status == 200:
            return Stream(self.url, connection, response)
        with contextlib.closing(connection), self._as_errors():
            text = response.read()
        raise _stream_refused(response.status, text, self.url)

    # -- the mesh

    @property
    def mesh(self) -> "MeshClient":
        """The mesh that the server is a node of: the verbs of `server.mesh`. docs/mesh.md."""
        from clipper.manage.mesh.client import MeshClient

        return MeshClient(self)

    def request(
        self, method: str, path: str, members: dict[str, object] | None = None
    ) -> dict[str, UserValue]:
        """Make one request. Return the object of the response, {} for none. Raises the error that
        the server raised."""
        return self._object(method, path, members)

    # -- models

    def deploy(
        self,
        name: str,
        model: str | os.PathLike[str] | None = None,
        *,
        promote: bool = True,
        wait: bool = True,
        dry_run: bool = False,
        **settings: Unpack[SentModelKeywords],
    ) -> "ChangeResult":
        """Deploy "module:attribute" of the server's host, or a model's file of this one: .onnx,
        .skops, .ubj, .txt, .pt. One that may hold pickles (.pkl, .joblib, .pt2, a folder of MLflow)
        is not sent: the server reads it by its path, on this host.
        A URL (s3://, gs://, https://) is pulled by the server.

        settings: as of ClipperServer.deploy: `clipper.spec.model.ModelSpec`. command: instead of a
        model, a program of the server's host that is named in its server.commands; `folder` is
        where it runs. requirements: a file of this host, or lines. Functions are not sent: what
        they are pickled in would be run by whoever receives it. Deploy them in the server's
        process, or from a module. promote, wait: as there.
        """
        members: dict[str, UserValue] = {**settings}
        if not promote:
            members["promote"] = False
        if not wait:
            members["wait"] = False
        if requirements := members.get("requirements"):
            members["requirements"] = lines_of(requirements)
        if isinstance(code := members.get("code"), str):
            members["code"] = [code]
        _state_types(members)
        members |= _what_runs(name, model, members)
        builds = requirements or members.get("python") or members.get("deployer") in ENGINES
        patient = copy.copy(self)
        if builds or url_of(members.get("model")):
            patient._timeout_s = max(self._timeout_s, _BUILD_S)
        return patient._change(f"/admin/models/{quoted(name)}/deploy", dry_run, members)

    # -- applications

    def set_application(
        self,
        name: str,
        models: Sequence[str] | None = None,
        *,
        dry_run: bool = False,
        **settings: Unpack[ApplicationKeywords],
    ) -> "ChangeResult":
        """Make an application, or change what is named of it; settings as of ClipperServer.app."""
        members: dict[str, object] = {**settings}
        if models is not None:
            members["models"] = list(models)
        if isinstance(members.get("input"), InputType):
            members["input"] = str(members["input"])
        return self._change(f"/admin/applications/{quoted(name)}/set", dry_run, members)

    # -- the state as one file

    def export_state(self) -> bytes:
        """Return models with their files, applications, and what was learned, as JSON for
        `import_state`."""
        return msgspec.json.encode(self._object("GET", "/admin/export"))

    def import_state(self, state: bytes, *, dry_run: bool = False) -> "ChangeResult":
        """Add what `export_state` gave to this server. It runs code that is in there."""
        path = "/admin/import" + ("?dry_run=true" if dry_run else "")
        return cast("ChangeResult", self._object("POST", path, body=state))

    # -- queries

    def predict(self, application: str, input: object, **settings: object) -> Answer:
        """Make one query, which is answered by its deadline. settings: user, context, slo_ms,
        salt."""
        reply = self.predict_plainly(application, input, **settings)
        return Answer(
            reply["output"],
            reply["confidence"],
            reply["default"],
            reply["reason"],
            _models(reply["models"]),
            _models(reply["missing"]),
            reply["latency_us"],
            reply["id"],
            reply["agreement"],
        )

    def predict_plainly(
        self, application: str, input: object, **settings: object
    ) -> dict[str, UserValue]:
        """Return the answer as the members of JSON: see docs/http.md."""
        return self._object(
            "POST",
            f"/admin/applications/{quoted(application)}/predict",
            {"input": input, **settings},
        )

    def feedback(
        self, application: str, id: str, *, dry_run: bool = False, **truth: object
    ) -> bool | None:
        """Send feedback about the answer of that id: label, correct, or score; weight.

        Returns False when its feedback had come before. dry_run: only tell whether it would count;
        None when another server gave the answer, which alone knows.
        """
        path = f"/admin/applications/{quoted(application)}/feedback"
        path += "?dry_run=true" if dry_run else ""
        counted = self._object("POST", path, {"id": id, **truth})["counted"]
        return None if counted is None else bool(counted)

    # -- inside

    def _change(self, path: str, dry_run: bool, members: dict[str, object]) -> "ChangeResult":
        path += "?dry_run=true" if dry_run else ""
        return cast("ChangeResult", self._object("POST", path, members))

    def _object(
        self,
        method: str,
        path: str,
        members: dict[str, object] | None = None,
        body: bytes | None = None,
    ) -> dict[str, Any]:
        body = body if members is None else _body(members)
        status, reply = self._exchange(method, path, body)
        try:
            found = msgspec.json.decode(reply or b"{}")
        except msgspec.DecodeError:
            found = None
        if not isinstance(found, dict):
            hint = "See server.admin_address."
            raise NoServer(
                f"what answers at {self.url} is not a Clipper server (status {status}).", hint=hint
            )
        if status >= 400:
            raise _error(status, found, self.url)
        return found

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection, response = self._requested(method, path, body)
        with contextlib.closing(connection), self._as_errors():
            return response.status, response.read()

    def _requested(
        self, method: str, path: str, body: bytes | None
    ) -> "tuple[HTTPConnection, HTTPResponse]":
        """Send a request; return the connection, which the caller closes, and the response."""
        connection = self._connection()
        try:
            with self._as_errors():
                connection.connect()
                self._check_pinned(connection)
                # a text is sent as Latin-1, but a server compares tokens as UTF-8
                headers = {name: value.encode() for name, value in self.headers.items()}
                connection.request(method, path, body, headers)
                return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    @contextlib.contextmanager
    def _as_errors(self) -> Iterator[None]:
        """Raise NoServer for whatever goes wrong with a connection."""
        import http.client  # imported late: `import clipper` stays quick

        try:
            yield
        except NoServer:  # of `_check_pinned`; it is an OSError, too
            raise
        except TimeoutError:
            hint = "It may be done all the same: see clipper history."
            raise NoServer(
                f"{self.url} has not answered within {self._timeout_s:g} s.", hint=hint
            ) from None
        except ssl.SSLError as error:
            raise _untrusted(self.url, error) from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", "") or str(error) or type(error).__name__
            hint = (
                f"Start one with: clipper up --admin {join_host_port(self._host, self._port)}   Or"
                " name another: --url, or CLIPPER_URL."
            )
            raise NoServer(f"no server answers at {self.url}: {why}.", hint=hint) from None

    def _connection(self) -> "HTTPConnection":
        import http.client

        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout_s, context=self._tls
        )

    def _check_pinned(self, connection: "HTTPConnection") -> None:
        """Check the pinned certificate before anything is sent, the token in particular."""
        if self._tls is None or not self._trust.pinned:
            return
        try:
            expected = fingerprint_of(Path(self._trust.pinned).read_text())
        except (OSError, ValueError):
            expected = ""
        shown = cast(ssl.SSLSocket, connection.sock).getpeercert(True) or b""
        if hashlib.sha256(shown).hexdigest() != expected:
            raise NoServer(
                f"{self.url} shows another certificate than {self._trust.pinned}.",
                hint="Give its URL and CA: --url, --ca.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: each request has its own connection, which is closed."""


def _untrusted(url: str, error: ssl.SSLError) -> NoServer:
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = (
            "Name who signed it: --ca FILE, or CLIPPER_CA; and the server as its certificate does."
        )
        return NoServer(
            f"the certificate of {url} is not trusted: {error.verify_message}.", hint=hint
        )
    why = (error.reason or str(error)).lower().replace("_", " ")
    hint = "Is it http:// there? If it requires a certificate: CLIPPER_CERT and CLIPPER_KEY."
    return NoServer(f"no TLS with {url}: {why}.", hint=hint)


def _state_types(members: dict[str, UserValue]) -> None:
    """Replace what states the types of a model by two texts. Raises InvalidInput."""
    given = [members.pop(key, None) for key in ("input", "output", "inputs", "outputs", "schema")]
    stated = types_of(given[0] or None, given[1] or "any", *given[2:])
    for side, type_ in zip(("input", "output"), stated, strict=True):
        if type_ is not None and type_ != "any":
            members[side] = str(InputType.parse(type_))


def _what_runs(
    name: str, model: str | os.PathLike[str] | None, members: dict[str, UserValue]
) -> dict[str, UserValue]:
    """Return the members that say what a deployment runs: a command, a URL, a file or its bytes.

    Raises InvalidInput for two of them, PackagingError for what is not sent.
    """
    command = members.get("command")
    if command is not None:
        if model is not None:
            raise InvalidInput(f"deploy of {name!r}: give a model or a command.")
        return {"command": shlex.split(command) if isinstance(command, str) else command}
    if not isinstance(model, str | os.PathLike):
        hint = 'Put it into a module and deploy "module:attribute", or save it as .onnx or .skops.'
        raise PackagingError(f"a {type(model).__name__} is not sent to a server.", hint=hint)
    if url := url_of(model, str(members.pop("sha256", None) or "")):
        return {"model": url}
    if not is_data(model):
        return {"model": str(model)}
    artifact = artifact_of(model)
    if artifact.is_code:
        return {"model": _here(model)}
    return {"data": artifact.data, "kind": artifact.kind}


def _here(model: str | os.PathLike[str]) -> str:
    return str(model) if is_registered(model) else str(Path(model).absolute())


def _actor() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}".encode("ascii", "replace").decode()[:128]


def _models(names: list[str]) -> tuple[VersionedModel, ...]:
    return tuple(map(VersionedModel.parse, names))


def _body(members: dict[str, object]) -> bytes:
    try:
        return msgspec.json.encode(
            {name: _plain(value) for name, value in members.items()}, enc_hook=_plain
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"this cannot be sent as JSON: {error}.") from None


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Path | VersionedModel):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("JSON has no NaN and no infinities")
    if value is None or isinstance(
        value, bool | int | float | str | bytes | list | tuple | dict | msgspec.Struct
    ):
        return value
    raise TypeError(f"a {type(value).__name__} is not JSON")


# -- errors: the class that the server raised, by the last part of the problem's type


def _classes(root: type[ClipperError] = ClipperError) -> Iterator[type[ClipperError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _classes(kind)


def _stream_refused(status: int, text: bytes, url: str) -> ClipperError:
    if status == 404:
        return ClipperError(
            f"{url} has no readings to watch.",
            hint="Start it with http.dashboard = true, or see: clipper ps",
        )
    try:
        problem = msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError:
        problem = {}
    return _error(status, problem, url)


def _error(status: int, problem: dict[str, object], url: str) -> ClipperError:
    slug = str(problem.get("type", "")).rpartition(":")[2]
    message, hint = (
        str(problem.get("detail") or problem.get("error") or f"status {status}"),
        str(problem.get("hint", "")),
    )
    if status in (401, 403) and slug != Forbidden.slug:
        return NotAllowed(
            f"{url}: {message}", hint=f"Give a token of that server: --token, or {_TOKEN}."
        )
    if slug.startswith("http-"):
        return ClipperError(f"{url}: {message}", hint=hint)
    known = (
        kind
        for kind in _classes()
        if kind.__module__.startswith(_KNOWN) and vars(kind).get("slug") == slug
    )
    kind = next(known, ClipperError)
    return kind(message, hint=hint)
