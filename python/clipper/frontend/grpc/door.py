"""The door of a gRPC server: connections, and calls that are refused before their message is read.

A handler of one request is called with the whole message. The handler of a call is looked for as
soon as the metadata is there, and that of a stream of requests reads none unless it asks for
it. So the door answers calls that may not be made by a handler of a stream that reads nothing.
"""

import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Final, NoReturn

from clipper.errors import ClipperError, InvalidInput
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.frontend.grpc.call_context import CallContext, CallDetails
from clipper.frontend.grpc.calls import OPEN_TO_ALL, abort
from clipper.frontend.grpc.method import CallMethod

# metadata of which two readers could take different ones, if a call had two
_SINGLE: Final = frozenset(
    (
        "authorization",
        "clipper-actor",
        "clipper-deadline-ms",
        "grpc-timeout",
        "traceparent",
        "x-request-id",
    )
)


Check = Callable[[bytes], object]


def check_of(keys: ApiKeys | None) -> Check | None:
    """Return the check of API keys; None if no keys are configured."""
    return None if keys is None else keys.check


class Door:
    """Refuses calls without permission, and calls that repeat metadata that comes once
    (CallMethods). Threads: the event loop's.

    check: raises for a value of `authorization` without permission; None: all may call.
    on_refused: called with the path of a refused call and its code. Add it before the other
    handlers: it has none for a call that may be made.
    """

    def __init__(
        self, check: Check | None, on_refused: Callable[[str, str], None] | None = None
    ) -> None:
        self._check_permission, self._on_refused = check, on_refused

    def method_of(self, details: CallDetails) -> CallMethod | None:
        """Return a method that refuses the call; None for a call that may be made."""
        try:
            self._check(details)
        except ClipperError as error:
            refusal = functools.partial(self._refuse, error, details.method)
            return CallMethod(refusal, reads_stream=True)
        return None

    def _check(self, details: CallDetails) -> None:
        """Raise NotAllowed or InvalidInput for a call that may not be made."""
        metadata = details.invocation_metadata or ()
        once = [name for name, _ in metadata if name in _SINGLE]
        if len(once) > 1:
            for name, times in Counter(once).items():
                if times > 1:
                    raise InvalidInput(f"the metadata {name} comes {times} times.")
        if self._check_permission is None:
            return
        if details.method.removeprefix("/").partition("/")[0] not in OPEN_TO_ALL:
            self._check_permission(str(dict(metadata).get("authorization", "")).encode())

    async def _refuse(
        self,
        error: ClipperError,
        method: str,
        requests: AsyncIterator[bytes],
        context: CallContext,
    ) -> NoReturn:
        if self._on_refused is not None:
            self._on_refused(method, error.grpc_code)
        await abort(context, error)
