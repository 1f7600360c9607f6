"""The services `grpc.health.v1.Health` and `grpc.reflection.v1.ServerReflection`.

They are implemented here because grpcio's packages require a newer protobuf than tritonclient and
others allow.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from clipper.errors import UnknownApplication
from clipper.frontend.grpc.calls import GrpcCall, GrpcDispatcher
from clipper.frontend.protocols import message, pool

HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = "grpc.reflection.v1.ServerReflection"
_CHECK_S = 1.0
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3


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

    async def watch(self, request: Message, call: GrpcCall) -> AsyncIterator[Message]:
        """Yield the status, and again at each change."""
        reported = None
        while not self._calls.closing.is_set():
            status = await self._calls.work(lambda: self._status(request.service))
            if status != reported:
                reported = status
                yield self._response(status=status)
            try:
                await asyncio.wait_for(self._calls.closing.wait(), _CHECK_S)
            except TimeoutError:
                continue
        if reported != _NOT_SERVING:
            yield self._response(status=_NOT_SERVING)

    def _status(self, service: str) -> int:
        node = self._calls.node
        if node.closed():
            return _NOT_SERVING
        if service in node.catalog.view.applications:
            return _SERVING if node.is_ready(service, node.running()) else _NOT_SERVING
        if service and service not in self._services:
            return _SERVICE_UNKNOWN
        return _NOT_SERVING if node.unready() else _SERVING


class ReflectionService:
    """Descriptions of the services, for tools such as grpcurl. Threads: the event loop's."""

    def __init__(self, calls: GrpcDispatcher, services: tuple[str, ...]) -> None:
        self._calls, self._services = calls, services
        self._response = message("grpc.reflection.v1.ServerReflectionResponse")
        older = (
            "grpc.reflection.v1alpha.ServerReflection",
        )  # the same messages under the name of older tools
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
        return _refusal(grpc.StatusCode.UNIMPLEMENTED, "no message here has extensions")
    try:
        file = finders[kind](getattr(request, kind))
    except KeyError:
        return _refusal(
            grpc.StatusCode.NOT_FOUND, f"there is no {getattr(request, kind)[:200]!r} here"
        )
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


def _refusal(code: grpc.StatusCode, text: str) -> dict[str, object]:
    return {"error_response": {"error_code": code.value[0], "error_message": text}}
