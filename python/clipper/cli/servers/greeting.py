"""The lines that a command prints first when it starts a server: a query that works, and how to go
on."""

import json
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from clipper.cli.servers.addresses import moved
from clipper.errors import ClipperError, without_secrets

if TYPE_CHECKING:
    from clipper.config import Config
    from clipper.schema import Tensors
    from clipper.server import ClipperServer
    from clipper.types import InputType

_QUERIES_MAX = 5  # queries that are shown, one for each application
_UNKNOWN = "INPUT"


def greeting(server: "ClipperServer", title: str, *, made_up: bool, by_hand: bool) -> str:
    """Return the first lines of a server that has started.

    title: what it serves. made_up: its token is of this start, and nobody knows it. by_hand: also
    say how to start a container by hand, if others than those of the server can connect.
    """
    from clipper import __version__

    lines = [f"clipper {__version__} · {title}", *moved(server)]
    lines += _queries(server)
    lines += _addresses(server, made_up)
    view = server.catalog.view
    lines.append(f"models: {', '.join(str(model.id) for model in view.models()) or 'none yet'}")
    lines.append(f"applications: {', '.join(sorted(view.applications)) or 'none yet'}")
    lines.append(f"state: {_state(server.config)}")
    if by_hand and server.config.server.address not in ("", "unix"):
        lines += _containers(server)
    return "\n".join(lines)


def _queries(server: "ClipperServer") -> Iterator[str]:
    """Yield a command for each of the first applications that sends it a query."""
    names = sorted(server.catalog.view.applications)
    if not names or not server.http_address:
        return
    yield "to send a query:"
    inputs = [_input_of(server, name) for name in names[:_QUERIES_MAX]]
    for name, type_ in zip(names, inputs, strict=False):
        yield f"  {curl_of(server, name, type_)}"
    if len(names) > _QUERIES_MAX:
        yield f"  and {len(names) - _QUERIES_MAX} more: clipper apps"
    if any(_body(type_) == _UNKNOWN for type_ in inputs):
        yield f"  {_UNKNOWN}: one row as JSON, such as [1, 2.5]: the model does not say its type"


def _addresses(server: "ClipperServer", made_up: bool) -> Iterator[str]:
    """Yield where the server is reached, and how."""
    from clipper.settings.http import admin_tls, query_tls, scheme_of

    http = server.config.http
    admin = f"{scheme_of(admin_tls(http))}://{server.admin_address}"
    if server.admin_address and http.dashboard:
        yield f"dashboard at {_way_in(server, admin, made_up)}"
    if server.http_address:
        yield f"queries come in at {scheme_of(query_tls(http))}://{server.http_address}"
    if server.grpc_address:
        yield f"queries come in over gRPC at {server.grpc_address}"
    if server.admin_address:
        yield f"management at {admin}/admin, or: clipper ps; clipper deploy --help; clipper down"


def _way_in(server: "ClipperServer", url: str, made_up: bool) -> str:
    """Return the address of the dashboard, and what it needs. A link that opens it is good for one
    use; that of a token that somebody chose is printed by request only."""
    http = server.config.http
    if http.tokens_file:
        return f"{url}/, which requires a token of http.tokens_file"
    if not http.token:
        return f"{url}/"
    if not made_up:
        return f"{url}/, which requires http.token; clipper dashboard prints a link that opens it"
    return f"{server.dashboard_link()} (opens once; another link: clipper dashboard)"


def _state(config: "Config") -> str:
    state = config.server.state
    if state in ("", "memory"):
        return 'memory: lost at the end, unless a file sets [server] state = ".clipper"'
    return without_secrets(state)


def _containers(server: "ClipperServer") -> Iterator[str]:
    """Yield how a container is started by hand."""
    config = server.config
    token = "your token" if config.server.token or not sys.stdout.isatty() else server.token
    by_hand = f"clipper-container serve MODULE:MODEL --connect {server.address} --name NAME"
    yield f"containers connect to {server.address}; by hand: CLIPPER_TOKEN='{token}' {by_hand}"
    if not config.server.token:
        yield "  (the token changes at each start, unless server.token or server.token_file is set)"


# -- a query


def curl_of(server: "ClipperServer", application: str, type_: "InputType | Tensors") -> str:
    """Return a command that sends a query with one input of a type to an application."""
    from clipper.settings.http import query_tls, scheme_of
    from clipper.settings.ports import reachable

    http = server.config.http
    tls = query_tls(http)
    words = ["curl -s"]
    if tls is not None:
        words.append(f"--cacert {shlex.quote(tls.cert)}")
    if http.api_keys_file:
        words.append('-H "Authorization: Bearer $KEY"')
    words.append(f"{scheme_of(tls)}://{reachable(server.http_address)}/api/{application}/predict")
    body = _body(type_)
    quote = '"' if "$(" in body else "'"
    member = '{\\"input\\": ' if quote == '"' else '{"input": '
    words.append(f"-d {quote}{member}{body}}}{quote}")
    return " ".join(words)


def _body(type_: "InputType | Tensors") -> str:
    """Return an input of a type as it is written in a shell: JSON, a command that prints a long
    one, or the word for an unknown one."""
    from clipper.frontend.openapi.document import example_of_input
    from clipper.types import InputType

    example = example_of_input(type_)
    text = json.dumps(example)
    if example is not None and len(text) <= 120:
        return text
    if not isinstance(type_, InputType) or type_.variable or type_.dtype[0] not in "iuf":
        return _UNKNOWN if example is None else text
    row = "0"
    for count in reversed(type_.shape):
        row = f"[{row}]*{count}"
    return f"$(python3 -c 'print({row})')"


def _input_of(server: "ClipperServer", application: str) -> "InputType | Tensors":
    """Return the type of one input of the application's first model."""
    from clipper.types import InputType

    links = server.catalog.view.applications[application].models
    try:
        core = server.model(links[0])
    except (ClipperError, IndexError):
        return InputType.parse("any")
    if tensors := getattr(core, "tensors", None):
        return cast("Tensors", tensors)
    # which a model of the mesh has not
    describe = getattr(core, "describe_input", None)
    return InputType.parse(describe() if describe is not None else "any")
