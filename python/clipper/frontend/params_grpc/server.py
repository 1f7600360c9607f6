"""gRPC server of a parameter shard: a thread with an event loop, beside the shard's own.

`python -m clipper.frontend.params_grpc.server` runs `clipper.params.local.fork_server` with this
server. The module is here, above `params`, because `params` does not import gRPC. A supervisor
starts it by its module name.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

import grpc
import grpc.aio
import uvloop
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from clipper.errors import AddressInUse, ClipperError, NotAllowed, Unknown
from clipper.frontend.auth.credential_files import CredentialFiles
from clipper.frontend.grpc.calls import Requests, abort, decoder
from clipper.frontend.grpc.credentials import credentials_of
from clipper.frontend.grpc.health import HEALTH, REFLECTION, about
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
from clipper.params.local import fork_server as standby
from clipper.params.shard.shard import Shard
from clipper.params.tokens import TokenFile, check_role, digest_of
from clipper.settings.params import ParamsSettings, grpc_address, params_tls

CALLS_MAX: Final = 1024
_GRACE_S: Final = 1.0
_CHECK_S: Final = 0.5
_GATHER_S: Final = 1.0
_SERVICES: Final = (SERVICE, HEALTH, REFLECTION)
_OLDER: Final = "grpc.reflection.v1alpha.ServerReflection"
_SERVING, _NOT_SERVING = 1, 2
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
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="clipper-shard-grpc", daemon=True)
        self._started = threading.Event()
        self._closing: asyncio.Event
        self._gathering: asyncio.Task[None]
        self._server: grpc.aio.Server
        self._trouble: Exception | None = None

    def start(self) -> "ShardGrpc":
        """Start the thread. The shard's loop is running. Raises AddressInUse, OSError."""
        self._thread.start()
        self._started.wait()
        if self._trouble is not None:
            self._thread.join()
            raise self._trouble
        self._access.start()
        return self

    def stop(self) -> None:
        """Stop the thread. Open calls end with UNAVAILABLE unless they end at once."""
        self._access.stop()
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(self._leave(), self._loop)
            self._thread.join()

    # -- its thread

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._listen())
            self._started.set()
            loop.run_forever()
        except Exception as error:
            self._trouble = error
        finally:
            self._started.set()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _listen(self) -> None:
        self._closing = asyncio.Event()
        settings = self._shard.config.settings
        options = [
            ("grpc.max_receive_message_length", settings.grpc_message_bytes_max),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        await self._connection.open()
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=CALLS_MAX)
        self._server.add_generic_rpc_handlers(tuple(self._handlers()))
        try:
            port = self._bound()
        except RuntimeError as error:
            await self._connection.close()
            hint = "Choose another params.grpc."
            raise AddressInUse(
                f"cannot listen on {self._wanted}, of params.grpc: {error}.", hint=hint
            ) from None
        self.address = f"{self._wanted.rpartition(':')[0]}:{port}"
        await self._server.start()
        self._gathering = asyncio.ensure_future(self._gather())

    def _bound(self) -> int:
        secured = self._access.certificates.get("grpc")
        if secured is None:
            return int(self._server.add_insecure_port(self._wanted))
        return int(self._server.add_secure_port(self._wanted, credentials_of(secured[0])))

    async def _gather(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(ClipperError):
                self._service.followers.gather()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _GATHER_S)

    async def _leave(self) -> None:
        self._closing.set()
        await self._gathering
        await self._connection.close()
        await self._server.stop(_GRACE_S)
        self._loop.stop()

    # -- handlers

    def _handlers(self) -> Iterator[grpc.GenericRpcHandler]:
        names = {method.name: method.name for method in methods_of(SERVICE)}
        names |= ALIASES
        kinds = {method.name: method for method in methods_of(SERVICE)}
        unary = {
            alias: self._unary(kinds[name], self._service.methods[name])
            for alias, name in names.items()
        }
        yield grpc.method_handlers_generic_handler(SERVICE, unary)
        (check,) = [method for method in methods_of(HEALTH) if method.name == "Check"]
        health = {
            "Check": self._unary(check, self._check, open_to_all=True),
            "Watch": self._stream(HEALTH, self._watch),
        }
        yield grpc.method_handlers_generic_handler(HEALTH, health)
        reflection = {"ServerReflectionInfo": self._stream(REFLECTION, self._reflect)}
        for name in (REFLECTION, _OLDER):
            yield grpc.method_handlers_generic_handler(name, reflection)

    def _unary(
        self, kind: MethodDescriptor, run: Method, *, open_to_all: bool = False
    ) -> grpc.RpcMethodHandler:
        read = decoder(message(kind.input_type.full_name), False)

        async def serve(data: bytes, context: grpc.aio.ServicerContext) -> Message:
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
        return grpc.unary_unary_rpc_method_handler(
            serve, response_serializer=kinds.SerializeToString
        )

    def _stream(
        self,
        service: str,
        run: Callable[[Message, grpc.aio.ServicerContext], AsyncIterator[Message]],
    ) -> grpc.RpcMethodHandler:
        (kind,) = [method for method in methods_of(service) if method.server_streaming]
        read = decoder(message(kind.input_type.full_name), kind.client_streaming)

        async def serve(
            given: Requests, context: grpc.aio.ServicerContext
        ) -> AsyncIterator[Message]:
            try:
                if service != HEALTH:
                    self._admit(ShardCall(context), "stats")
                async for answer in run(read(given), context):
                    yield answer
            except Exception as error:
                await abort(context, error)

        make = (
            grpc.stream_stream_rpc_method_handler
            if kind.client_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        return make(
            serve, response_serializer=message(kind.output_type.full_name).SerializeToString
        )

    def _admit(self, call: ShardCall, name: str) -> None:
        """Check the token of a call. name: of the method. Raises NotAllowed, Forbidden."""
        scheme, _, token = str(call.metadata.get("authorization", "")).partition(" ")
        assert self._access.workers is not None
        role = self._access.workers.role(digest_of(token.strip()))
        if not role or scheme.lower() != "bearer":
            hint = (
                "Send metadata: authorization, Bearer and the token of the set (params.token;"
                " shards.json has it), or a key of params.grpc_keys_file."
            )
            raise NotAllowed("the token is missing or wrong.", hint=hint)
        check_role(role, name)

    # -- health, reflection

    async def _check(self, request: Message, _: ShardCall) -> Message:
        return message("grpc.health.v1.HealthCheckResponse")(status=self._status(request.service))

    async def _watch(self, request: Message, _: object) -> AsyncIterator[Message]:
        reported = None
        while not self._closing.is_set():
            status = self._status(request.service)
            if status != reported:
                reported = status
                yield message("grpc.health.v1.HealthCheckResponse")(status=status)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _CHECK_S)
        if reported != _NOT_SERVING:
            yield message("grpc.health.v1.HealthCheckResponse")(status=_NOT_SERVING)

    def _status(self, service: str) -> int:
        """Return the health status. Raises Unknown for another service."""
        if service not in ("", *_SERVICES):
            raise Unknown.named(service[:200], _SERVICES)
        return _SERVING if self._shard.core.ready and not self._closing.is_set() else _NOT_SERVING

    async def _reflect(self, requests: AsyncIterator[Message], _: object) -> AsyncIterator[Message]:
        response = message("grpc.reflection.v1.ServerReflectionResponse")
        async for request in requests:
            yield response(
                valid_host=request.host, original_request=request, **about(request, _SERVICES)
            )


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
    try:
        yield
    finally:
        front.stop()


if __name__ == "__main__":
    sys.exit(standby.main(beside))
