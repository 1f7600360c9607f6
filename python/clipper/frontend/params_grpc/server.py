"""gRPC server of a parameter shard: a thread with an event loop, beside the shard's own.

`become` and `python -m clipper.frontend.params_grpc.server` run the process of a shard
(`clipper.params.local.shard_process`) with this server. The module is here, above `params`, because
`params` does not import gRPC. A supervisor names it.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from clipper.component import (
    Backoff,
    Health,
    Loop,
    Pool,
    State,
    Tasks,
    fast_event_loop,
    require_descriptors,
)
from clipper.errors import ClipperError, NotAllowed, Unknown
from clipper.frontend.auth.credential_files import CredentialFiles
from clipper.frontend.grpc.call_context import CallContext
from clipper.frontend.grpc.call_stream import CallServer
from clipper.frontend.grpc.calls import Requests, abort, decoder
from clipper.frontend.grpc.door import Door
from clipper.frontend.grpc.health import HEALTH, NOT_SERVING, REFLECTION, SERVING, about, statuses
from clipper.frontend.grpc.method import CallMethod as GrpcMethod
from clipper.frontend.grpc.method import CallMethods, ServiceMethods
from clipper.frontend.http.body_memory import BodyMemory
from clipper.frontend.http.connection import HttpService
from clipper.frontend.http.listeners import Listener, bind_listener, refuse_no_call
from clipper.frontend.params_grpc.service import (
    ALIASES,
    SERVICE,
    ParamsService,
    ShardCall,
    WrongShard,
)
from clipper.frontend.params_grpc.shard_client import LocalShardConnection
from clipper.frontend.protocols import message, methods_of
from clipper.metrics import TlsCounts
from clipper.params.local import shard_process
from clipper.params.shard.shard import Shard
from clipper.params.tokens import TokenFile, check_role, digest_of
from clipper.serving.query.future_watcher import FutureWatcher
from clipper.settings.http import HttpSettings, bodies_bytes
from clipper.settings.params import ParamsSettings, grpc_address, params_tls
from clipper_container.forking.fork_server import Parent

CALLS_MAX: Final = 1024
PING_S_MIN: Final = 1.0  # between keepalive pings of a client
_WORKERS: Final = 1
_IDLE_S: Final = 86_400.0  # a worker may compute for long between two calls
_STOP_S: Final = 10.0
# time to send the last replies after every call has ended
_GRACE_S: Final = 1.0
_DESCRIPTORS: Final = 16  # of a loop and of connections
_CHECK_S: Final = 0.5
_GATHER_S: Final = 1.0
_SERVICES: Final = (SERVICE, HEALTH, REFLECTION)
_OLDER: Final = "grpc.reflection.v1alpha.ServerReflection"
Method = Callable[[Message, ShardCall], Awaitable[Message]]


class ShardGrpc:
    """The PServer service of one shard. Threads: start and stop from one; the rest runs on its
    own."""

    def __init__(self, shard: Shard) -> None:
        self._shard, place = shard, shard.config
        self._wanted = grpc_address(place.settings, place.number)
        self.address = ""
        self._access = _access_of(place.settings, place.token)
        self._connection = LocalShardConnection(
            place.plain or place.listen or place.addresses[place.number],
            place.token,
            f"shard {place.number}",
        )
        self._service = ParamsService(shard, self._connection)
        self._loop = Loop(
            "clipper-shard-grpc", self._listen, self._close, make=fast_event_loop, vital=True
        )
        self._tasks = Tasks("clipper-shard-grpc")
        self._closing: asyncio.Event
        self._workers = Pool("clipper-shard-grpc-work", _WORKERS)
        self._calls: CallServer
        self._listener: Listener | None = None

    def start(self) -> "ShardGrpc":
        """Start the thread. The shard's loop is running. Raises AddressInUse, NotStarted,
        OSError."""
        require_descriptors(_DESCRIPTORS, "params.grpc")
        try:
            self._workers.start()
            self._loop.start()
            self._access.start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop the thread. Open calls end with UNAVAILABLE unless they end at once. Idempotent."""
        try:
            self._access.stop()
        finally:
            self._loop.end(_STOP_S)
            self._workers.shutdown()
            if self._listener is not None:
                self._listener.stop()

    def health(self) -> list[Health]:
        """Return the state of the event loop and of its tasks."""
        found = [self._loop.health(), self._workers.health(), *self._tasks.health()]
        if why := self._connection.failure:
            name = "clipper-shard-grpc-connection"
            found.append(Health(name, State.FAILED, why, vital=True))
        return found

    # -- its thread

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        self._closing = asyncio.Event()
        settings = self._shard.config.settings
        await self._connection.open()
        shared = connection_settings(settings.connections_max)
        self._calls = calls = CallServer(
            (Door(self._check_token), *self._handlers()),
            settings.grpc_message_bytes_max,
            BodyMemory(bodies_bytes(shared)),
            self._workers,
            CALLS_MAX,
            PING_S_MIN,
        )
        watcher = FutureWatcher(loop, ())
        service = HttpService(
            shared, refuse_no_call, watcher, refuse_no_call, bodies=calls.memory, calls=calls
        )
        listening = bind_listener("params.grpc", self._wanted, shared.backlog)
        self.address = f"{self._wanted.rpartition(':')[0]}:{listening.getsockname()[1]}"
        self._listener = Listener(loop, service, listening)
        await self._listener.open(self._access.certificates.get("grpc"))
        self._tasks.keep("clipper-shard-grpc-gather", self._gather, Backoff(_GATHER_S, _GATHER_S))

    async def _gather(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(ClipperError):
                self._service.followers.gather()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _GATHER_S)

    async def _close(self) -> None:
        """End what was opened, each step also when the one before failed."""
        self._closing.set()
        try:
            await self._tasks.cancel()
            await self._connection.close()
        finally:
            if self._listener is not None:
                self._listener.drain()
                await self._listener.ended(time.monotonic() + _GRACE_S)
                await self._listener.close()
                await self._calls.tasks.cancel()

    # -- handlers

    def _handlers(self) -> Iterator[CallMethods]:
        names = {method.name: method.name for method in methods_of(SERVICE)}
        names |= ALIASES
        kinds = {method.name: method for method in methods_of(SERVICE)}
        unary = {
            alias: self._unary(kinds[name], self._service.methods[name])
            for alias, name in names.items()
        }
        yield ServiceMethods(SERVICE, unary)
        (check,) = [method for method in methods_of(HEALTH) if method.name == "Check"]
        health = {
            "Check": self._unary(check, self._check, open_to_all=True),
            "Watch": self._stream(HEALTH, self._watch),
        }
        yield ServiceMethods(HEALTH, health)
        reflection = {"ServerReflectionInfo": self._stream(REFLECTION, self._reflect)}
        for name in (REFLECTION, _OLDER):
            yield ServiceMethods(name, reflection)

    def _unary(
        self, kind: MethodDescriptor, run: Method, *, open_to_all: bool = False
    ) -> GrpcMethod:
        read = decoder(message(kind.input_type.full_name), False)

        async def serve(data: bytes, context: CallContext) -> Message:
            call = ShardCall(context)
            try:
                if not open_to_all:
                    self._admit(call, kind.name)
                answer = await run(read(data), call)
                if call.trailing:
                    context.set_trailing_metadata(tuple(call.trailing.items()))
                return answer
            except Exception as error:
                whose = (("shard", str(error.shard)),) if isinstance(error, WrongShard) else ()
                return await abort(context, error, whose)

        kinds = message(kind.output_type.full_name)
        return GrpcMethod(serve, write=kinds.SerializeToString)

    def _stream(
        self,
        service: str,
        run: Callable[[Message, CallContext], AsyncIterator[Message]],
    ) -> GrpcMethod:
        (kind,) = [method for method in methods_of(service) if method.server_streaming]
        read = decoder(message(kind.input_type.full_name), kind.client_streaming)

        async def serve(given: Requests, context: CallContext) -> AsyncIterator[Message]:
            try:
                if service != HEALTH:
                    self._admit(ShardCall(context), "stats")
                async for answer in run(read(given), context):
                    yield answer
            except Exception as error:
                await abort(context, error)

        write = message(kind.output_type.full_name).SerializeToString
        return GrpcMethod(serve, kind.client_streaming, writes_stream=True, write=write)

    def _admit(self, call: ShardCall, name: str) -> None:
        """Check the token of a call. name: of the method. Raises NotAllowed, Forbidden."""
        check_role(self._role(str(call.metadata.get("authorization", ""))), name)

    def _check_token(self, authorization: bytes) -> None:
        """Raise NotAllowed for a value of `authorization` that has no token of the set."""
        self._role(authorization.decode(errors="replace"))

    def _role(self, authorization: str) -> str:
        """Return the role of the token in a value of `authorization`. Raises NotAllowed."""
        scheme, _, token = authorization.partition(" ")
        assert self._access.workers is not None
        role = self._access.workers.role(digest_of(token.strip()))
        if not role or scheme.lower() != "bearer":
            hint = (
                "Send metadata: authorization, Bearer and the token of the set (params.token;"
                " shards.json has it), or a key of params.grpc_keys_file."
            )
            raise NotAllowed("the token is missing or wrong.", hint=hint)
        return role

    # -- health, reflection

    async def _check(self, request: Message, _: ShardCall) -> Message:
        return message("grpc.health.v1.HealthCheckResponse")(
            status=await self._status(request.service)
        )

    def _watch(self, request: Message, _: object) -> AsyncIterator[Message]:
        return statuses(lambda: self._status(request.service), self._closing, _CHECK_S)

    async def _status(self, service: str) -> int:
        """Return the health status. Raises Unknown for another service."""
        if service not in ("", *_SERVICES):
            raise Unknown.named(service[:200], _SERVICES)
        ready = self._shard.core.ready and self._connection.is_open
        return SERVING if ready and not self._closing.is_set() else NOT_SERVING

    async def _reflect(self, requests: AsyncIterator[Message], _: object) -> AsyncIterator[Message]:
        response = message("grpc.reflection.v1.ServerReflectionResponse")
        async for request in requests:
            yield response(
                valid_host=request.host, original_request=request, **about(request, _SERVICES)
            )


def connection_settings(connections_max: int) -> HttpSettings:
    """Return the settings of the connections of a shard, in the words of HTTP."""
    return HttpSettings(connections_max=connections_max, pipeline_max=CALLS_MAX, idle_s=_IDLE_S)


def _access_of(settings: ParamsSettings, token: str) -> CredentialFiles:
    """Return the certificates and keys of a shard. Raises ConfigError."""
    found = CredentialFiles()
    found.add_tls("grpc", params_tls(settings), "params.grpc_tls", TlsCounts("params"))
    found.workers = TokenFile(
        token, settings.grpc_keys_file, "params.grpc_keys_file", role="manage"
    )
    return found


@contextlib.contextmanager
def beside(shard: Shard) -> Iterator[None]:
    """Run the gRPC server while the shard runs, as an argument of `clipper.params.server.run`."""
    if not shard.config.settings.grpc:
        yield
        return
    front = ShardGrpc(shard).start()
    shard.watch(front.health)
    try:
        yield
    finally:
        front.stop()


def become(fds: Sequence[int], parent: Parent) -> int:
    """Run a shard with gRPC in a child that was just forked: an entry of a fork server."""
    return shard_process.become(fds, parent, beside)


if __name__ == "__main__":
    sys.exit(shard_process.main(beside))
