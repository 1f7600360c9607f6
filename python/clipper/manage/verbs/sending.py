"""Methods that send the request of a verb to a server, made from its row."""

import inspect
import urllib.parse
from collections.abc import Callable
from typing import Protocol, Unpack

from clipper.errors import InvalidInput
from clipper.manage.verbs.table import REQUIRED, Verb
from clipper.types import UserValue


class Requests(Protocol):
    """Interface of what sends requests to a server, as manage.client.Client."""

    def request(
        self, method: str, path: str, members: dict[str, object] | None = None
    ) -> dict[str, UserValue]:
        """Send a request, and return the object that answers it."""


def method_of(verb: Verb) -> Callable[..., object]:
    """Return the method of a client: it sends what is given, and returns what `verb.gives` says."""
    signature = _signature(verb)

    def call(self: Requests, *given: object, **named: object) -> object:
        stated = dict(signature.bind(self, *given, **named).arguments)
        stated |= stated.pop("settings", {})
        del stated["self"]
        dry_run = stated.pop("dry_run", False)
        stated = {name: value for name, value in stated.items() if value is not None}
        route = next(
            (one for one in reversed(verb.routes) if all(map(stated.get, one.names))),
            verb.routes[0],
        )
        path = route.path.format_map({name: quoted(stated.pop(name, "")) for name in route.names})
        if not route.changes:
            words = {name: value for name, value in stated.items() if value != ""}
            query = urllib.parse.urlencode(words)
            reply = self.request(route.method, f"{path}?{query}" if query else path)
        else:
            query = "?dry_run=true" if dry_run else ""
            reply = self.request(route.method, f"{path}{query}", stated)
        return reply[verb.member] if verb.member else reply

    call.__name__ = call.__qualname__ = verb.method
    call.__doc__ = verb.text
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _signature(verb: Verb) -> inspect.Signature:
    """Return the signature of the client's method."""
    kind = inspect.Parameter
    found = [kind("self", kind.POSITIONAL_OR_KEYWORD)]
    for one in verb.arguments:
        default = kind.empty if one.default is REQUIRED else one.default
        place = kind.POSITIONAL_OR_KEYWORD
        found.append(kind(one.name, place, default=default, annotation=one.type))
    if verb.changes:
        found.append(kind("dry_run", kind.KEYWORD_ONLY, default=False, annotation=bool))
    if verb.spec is not None:
        found.append(kind("settings", kind.VAR_KEYWORD, annotation=Unpack[verb.keywords]))
    return inspect.Signature(found)


def quoted(name: UserValue) -> str:
    """Return a name as a part of a path. Raises InvalidInput for an empty one."""
    if not name:
        raise InvalidInput("a name is empty.", hint="See clipper models and clipper apps.")
    return urllib.parse.quote(str(name), safe=":")
