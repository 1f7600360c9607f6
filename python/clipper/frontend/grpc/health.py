"""The services `grpc.health.v1.Health` and `grpc.reflection.v1.ServerReflection`.

They are implemented here because grpcio's packages require a newer protobuf than tritonclient and
others allow.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from clipper.errors import UnknownApplication
from clipper.frontend.grpc.call_context import Code
from clipper.frontend.grpc.calls import GrpcCall, GrpcDispatcher
from clipper.frontend.protocols import message, pool

HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = "grpc.reflection.v1.ServerReflection"
_CHECK_S = 1.0
SERVING: Final = 1
NOT_SERVING: Final = 2
_SERVICE_UNKNOWN: Final = 3


class HealthService:
    """Health of the server (""), of each service, and of each application. Threads: the event
    loop's."""

    def __init__(self, calls: GrpcDispatcher, services: tuple[str, ...]) -> None:
        self._calls, self._services = calls, services
        self._response = message("grpc.health.v1.HealthCheckResponse")
        self.handlers = calls.handlers(HEALTH, {"Check": self.check, "Watch": self.watch})

    async def check(self, request: Message, call: GrpcCall) -> Message:
        """Return the status of one service or application. Raises UnknownApplication."""
        status = await self._calls.work(lambda: self._status(request.service))
        if status == _SERVICE_UNKNOWN:
            known = {*self._services, *self._calls.node.catalog.view.applications}
            raise UnknownApplication.named(request.service[:200], known)
        return self._response(status=status)

    def watch(self, request: Message, call: GrpcCall) -> AsyncIterator[Message]:
        """Yield the status, and again at each change."""
        status = functools.partial(self._status, request.service)
        return statuses(lambda: self._calls.work(status), self._calls.closing, _CHECK_S)

    def _status(self, service: str) -> int:
        node = self._calls.node
        if node.closed():
            return NOT_SERVING
        if service in node.catalog.view.applications:
            return SERVING if node.is_ready(service, node.running()) else NOT_SERVING
        if service and service not in self._services:
            return _SERVICE_UNKNOWN
        return NOT_SERVING if node.unready() else SERVING


async def statuses(
    status: Callable[[], Awaitable[int]], closing: asyncio.Event, each_s: float
) -> AsyncIterator[Message]:
    """Yield a status, and again at each change; when it closes, that it does not serve.

    each_s: pause between two looks.
    """
    response = message("grpc.health.v1.HealthCheckResponse")
    reported = None
    while not closing.is_set():
        found = await status()
        if found != reported:
            reported = found
            yield response(status=found)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing.wait(), each_s)
    if reported != NOT_SERVING:
        yield response(status=NOT_SERVING)


class ReflectionService:
    """Descriptions of the services, for tools such as grpcurl. Threads: the event loop's."""

    def __init__(self, calls: GrpcDispatcher, services: tuple[str, ...]) -> None:
        self._calls, self._services = calls, services
        self._response = message("grpc.reflection.v1.ServerReflectionResponse")
        # the same messages under the name of older tools
        older = ("grpc.reflection.v1alpha.ServerReflection",)
        self.handlers = calls.handlers(REFLECTION, {"ServerReflectionInfo": self.info}, older)

    async def info(
        self, requests: AsyncIterator[Message], call: GrpcCall
    ) -> AsyncIterator[Message]:
        """Answer a stream of reflection requests."""

        async def answer(request: Message) -> Message:
            return self._response(
                valid_host=request.host, original_request=request, **about(request, self._services)
            )

        async for reply in self._calls.in_order(requests, answer):
            yield reply


def about(request: Message, services: tuple[str, ...]) -> dict[str, object]:
    """Return the fields of a ServerReflectionResponse to a request."""
    kind = request.WhichOneof("message_request")
    if kind == "list_services":
        return {"list_services_response": {"service": [{"name": name} for name in services]}}
    finders: dict[str, Callable[[str], FileDescriptor]] = {
        "file_by_filename": pool().FindFileByName,
        "file_containing_symbol": pool().FindFileContainingSymbol,
    }
    if kind not in finders:
        return _refusal(Code.UNIMPLEMENTED, "no message here has extensions")
    try:
        file = finders[kind](getattr(request, kind))
    except KeyError:
        return _refusal(Code.NOT_FOUND, f"there is no {getattr(request, kind)[:200]!r} here")
    return {
        "file_descriptor_response": {
            "file_descriptor_proto": [each.serialized_pb for each in _with_imports(file)]
        }
    }


def _with_imports(file: FileDescriptor) -> list[FileDescriptor]:
    """Return a file and all files that it imports, each once."""
    found = {file.name: file}
    for imported in file.dependencies:
        found |= {each.name: each for each in _with_imports(imported)}
    return list(found.values())


def _refusal(code: Code, text: str) -> dict[str, object]:
    return {"error_response": {"error_code": int(code), "error_message": text}}
