"""Methods of gRPC, and where the method of a call is found."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from clipper.frontend.grpc.call_context import CallDetails

Run = Callable[..., Any]


class CallMethod(NamedTuple):
    """A method that calls can name.

    run: called with the request and the CallContext. A request is the bytes of a message, or an
    async iterator of them if reads_stream. It is a coroutine function, which returns the reply, or
    an async generator function of replies if writes_stream. write: makes bytes of a reply; None:
    it is bytes.
    """

    run: Run
    reads_stream: bool = False
    writes_stream: bool = False
    write: Callable[..., bytes] | None = None


class CallMethods(Protocol):
    """Methods, found by the head of a call. Threads: the event loop's."""

    def method_of(self, details: CallDetails) -> CallMethod | None:
        """Return the method of a call; None if it is not known here."""


class ServiceMethods:
    """The methods of one service (CallMethods). each: by name."""

    def __init__(self, service: str, each: Mapping[str, CallMethod]) -> None:
        self._each = {f"/{service}/{name}": method for name, method in each.items()}

    def method_of(self, details: CallDetails) -> CallMethod | None:
        """Return the method of a call; None for one of another service."""
        return self._each.get(details.method)
