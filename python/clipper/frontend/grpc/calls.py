"""Common parts of the gRPC services: waiting for queries, worker threads, deadlines and errors.

An error has its own gRPC code and its text. `grpc-status-details-bin` has it for programs
(google.rpc.Status with an ErrorInfo and, where a retry makes sense, a RetryInfo), and
`grpc-retry-pushback-ms` is for clients with a retry policy.
"""

import asyncio
import functools
import hmac
import logging
import math
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import Executor
from typing import Final, NoReturn, TypeVar

from google.protobuf.message import DecodeError, Message

from clipper.errors import ClipperError, DeadlineExceeded, InvalidInput, Overloaded, ShuttingDown
from clipper.frontend.access_log import AccessLog
from clipper.frontend.auth.api_keys import ApiKeys, KeyOwner
from clipper.frontend.grpc.call_context import CallAborted, CallContext, Code
from clipper.frontend.grpc.method import CallMethod, CallMethods, Run, ServiceMethods
from clipper.frontend.http.messages import retry_after_s
from clipper.frontend.protocols import message, methods_of
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.context import Trace, start_trace
from clipper.frontend.tracing.exporter import SpanExporter
from clipper.frontend.tracing.spans import finished_call
from clipper.metrics.grpc_counts import GrpcCounts, MethodCounts
from clipper.metrics.http_counts import now_ns
from clipper.serving.query.application import fits_id
from clipper.serving.query.future_watcher import Future, FutureWatcher
from clipper.serving.query.processor import ResolvedApplication

_log = logging.getLogger(__name__)
_TEXT_MAX = 1000  # clients accept 8 KiB of metadata
_RETRIABLE: Final = frozenset((Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE))
_STATUS, _RETRY, _INFO = (
    message(f"google.rpc.{name}") for name in ("Status", "RetryInfo", "ErrorInfo")
)
_CALLS_RETRY_S = 0.1
OPEN_TO_ALL: Final = ("grpc.health.v1.Health",)
_T = TypeVar("_T")
_R = TypeVar("_R")
Read = Callable[..., object]  # (bytes, or a stream of them) -> message, or a stream of them
Handle = Run  # (what `Read` returns, call) -> reply, or a stream
Requests = bytes | AsyncIterator[bytes]


class GrpcCall:
    """One call. Threads: the event loop's. began_ns: of the monotonic clock. key: the owner of the
    key of a query; None: it has none."""

    __slots__ = ("_metadata", "began_ns", "context", "key", "trace")

    def __init__(self, context: CallContext, exporter: SpanExporter | None) -> None:
        self.context, self.began_ns = context, now_ns()
        self._metadata: dict[str, str | bytes] | None = None
        self.trace: Trace | None = None
        self.key: KeyOwner | None = None
        metadata = self.metadata
        if exporter is not None or "traceparent" in metadata:
            parent, state = (
                str(metadata.get(name, "")).encode("ascii", "replace")
                for name in ("traceparent", "tracestate")
            )
            self.trace = start_trace(None if exporter is None else exporter.sample, parent, state)
            if self.trace is not None:
                context.set_trailing_metadata(self.trailing)

    @property
    def trailing(self) -> tuple[tuple[str, str], ...]:
        """The trace's trailing metadata, which each response of a traced call has."""
        if self.trace is None:
            return ()
        found = (("traceparent", self.trace.header.decode()),)
        return (*found, ("tracestate", self.trace.state.decode())) if self.trace.state else found

    def start_query(self) -> None:
        """Note the start of a query's submission in the trace."""
        if self.trace is not None:
            self.trace.start_query()

    def end_query(self, resolved: ResolvedApplication, futures: Sequence[Future]) -> None:
        """Note the end of a query's submission in the trace."""
        if self.trace is not None:
            self.trace.end_query(resolved.name, futures)

    @property
    def metadata(self) -> dict[str, str | bytes]:
        """The metadata by name; of repeated names the last value."""
        if self._metadata is None:
            self._metadata = dict(self.context.invocation_metadata() or ())
        return self._metadata

    @property
    def peer(self) -> str:
        """The address of the caller, as `CallContext.peer` gives it."""
        return str(self.context.peer())

    @property
    def address(self) -> str:
        """The server's end of the caller's connection, HOST:PORT; empty for a unix socket."""
        return self.context.address()

    @property
    def authorization(self) -> bytes:
        """The value of `authorization`."""
        return str(self.metadata.get("authorization", "")).encode()

    @property
    def request_id(self) -> str:
        """The value of `x-request-id` if it is valid, else ""."""
        given = self.metadata.get("x-request-id", "")
        return given if isinstance(given, str) and fits_id(given) else ""


class GrpcDispatcher:
    """Runs the methods of the services. Threads: the event loop's.

    `closing` is set once no further query is accepted. pools: threads for queries, and for
    management.
    """

    def __init__(
        self,
        node: ServerInterface,
        watcher: FutureWatcher,
        pools: tuple[Executor, Executor],
        counts: GrpcCounts,
        access_log: AccessLog,
        keys: ApiKeys | None = None,
        exporter: SpanExporter | None = None,
    ) -> None:
        self.node, self._counts, self._keys, self._exporter = node, counts, keys, exporter
        self._access_log = access_log
        self._calls_max = node.config.grpc.calls_max
        self.closing = asyncio.Event()
        self.before_reading: Callable[[str, str, bytes], bytes] | None = (
            None  # (service, method, payload) -> payload
        )
        self._watcher = watcher
        self._workers, self._managers = pools
        self._way_back_us = round(node.config.grpc.way_back_ms * 1000)

    async def done(self, futures: Sequence[Future]) -> None:
        """Wait until all futures are done. Cancelling the caller cancels them."""
        loop = asyncio.get_running_loop()
        try:
            for future in futures:
                if future.done():
                    continue
                waiter = loop.create_future()
                if self._watcher.on_done(future, functools.partial(_settle, waiter)):
                    await waiter
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise

    def admit_query(self, call: "GrpcCall", applications: Sequence[str]) -> None:
        """Count a query against its key. applications: that it is about, or models by their names.
        Raises NotAllowed, Forbidden, RateExceeded."""
        if self._keys is not None:
            call.key = self._keys.admit(call.authorization, applications)

    def manages(self, call: "GrpcCall") -> bool:
        """Return whether a call has the management token."""
        token = self.node.config.http.token
        return bool(token) and hmac.compare_digest(call.authorization, f"Bearer {token}".encode())

    async def work(self, run: Callable[[], _T]) -> _T:
        """Run a blocking function on a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, run)

    async def manage(self, run: Callable[[], _T]) -> _T:
        """Run a blocking function of management on a thread of its own pool, so that no query
        waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._managers, run)

    def slo_us(self, call: "GrpcCall", given_us: int | None, otherwise_us: int) -> int:
        """Return the SLO of a query in microseconds.

        It is the query's own SLO, else the time until the call's deadline, else `otherwise_us`;
        never more than the call's deadline minus the time for the reply. Raises DeadlineExceeded if
        nothing is left.
        """
        remaining_s: float | None = call.context.time_remaining()
        if remaining_s is None:
            return otherwise_us if given_us is None else given_us
        left_us: int = math.floor(remaining_s * 1e6) - self._way_back_us
        if left_us <= 0:
            way_back_ms = self.node.config.grpc.way_back_ms
            why = (
                f"the call's deadline is {max(remaining_s, 0) * 1000:.3g} ms away, and its reply"
                f" takes up to {way_back_ms:g} ms"
            )
            raise DeadlineExceeded(f"{why}.", hint="Give the call more time; see grpc.way_back_ms.")
        if given_us is None:
            return min(left_us, round(self.node.config.limits.slo_ms_max * 1000))
        return min(left_us, given_us)

    def handlers(
        self,
        service: str,
        each: Mapping[str, Handle],
        names: Iterable[str] = (),
        readers: "Mapping[str, Callable[[bytes], object]] | None" = None,
    ) -> list[CallMethods]:
        """Return the methods of a service.

        each: a coroutine (request, call) by method name, or an async generator for streams. names:
        further names of the service. readers: by method name, what reads its requests from bytes
        without the package protobuf; such a method replies with bytes.
        """
        found = {}
        keys = None if service in OPEN_TO_ALL else self._keys
        for method in methods_of(service):
            counts = self._counts.method(service, method.name, method.server_streaming)
            admit = functools.partial(self._admit, keys)
            own = (readers or {}).get(method.name)
            read = _of_each(
                reader(message(method.input_type.full_name)) if own is None else own,
                method.client_streaming,
            )
            if self.before_reading is not None and not method.client_streaming:
                read = _after(functools.partial(self.before_reading, service, method.name), read)
            serve = self._streaming if method.server_streaming else self._calling
            write = message(method.output_type.full_name).SerializeToString
            found[method.name] = CallMethod(
                serve(each[method.name], read, admit, counts),
                method.client_streaming,
                method.server_streaming,
                write if own is None else None,
            )
        return [ServiceMethods(one, found) for one in (service, *names)]

    def unary(
        self, service: str, method: str, handle: Callable[[bytes, GrpcCall], Awaitable[bytes]]
    ) -> CallMethod:
        """Return the method whose request and reply are bytes."""
        admit, counts = (
            functools.partial(self._admit, self._keys),
            self._counts.method(service, method, False),
        )
        return CallMethod(self._calling(handle, bytes, admit, counts))

    def _admit(self, keys: ApiKeys | None, call: GrpcCall) -> None:
        """Admit a call. Raises NotAllowed, and Overloaded if there are too many calls."""
        if self._counts.open > self._calls_max:
            hint = "See grpc.calls_max."
            raise Overloaded(
                f"{self._calls_max} calls are under way already.",
                retry_after_s=_CALLS_RETRY_S,
                hint=hint,
            )
        if keys is not None:
            keys.check(call.authorization)

    def _calling(
        self,
        handle: Handle,
        read: Read,
        admit: Callable[[GrpcCall], None],
        counts: MethodCounts,
    ) -> Callable[[bytes, CallContext], Awaitable[Message | bytes]]:
        everything = self._counts

        async def serve(request: bytes, context: CallContext) -> Message | bytes:
            call, code = GrpcCall(context, self._exporter), "CANCELLED"
            everything.under_way += 1
            try:
                admit(call)
                reply = await handle(read(request), call)
                code = "OK"
                return reply
            except Exception as error:
                code = code_name(error)
                return await abort(call.context, error, call.trailing)
            finally:
                everything.under_way -= 1
                counts.count(code, call.began_ns)
                self._notify(call, counts, code)

        return serve

    def _streaming(
        self,
        handle: Handle,
        read: Read,
        admit: Callable[[GrpcCall], None],
        counts: MethodCounts,
    ) -> Callable[[Requests, CallContext], AsyncIterator[Message]]:
        everything = self._counts

        async def serve(requests: Requests, context: CallContext) -> AsyncIterator[Message]:
            call, code = GrpcCall(context, self._exporter), "CANCELLED"
            everything.under_way += 1
            try:
                admit(call)
                async for reply in handle(read(requests), call):
                    counts.messages += 1
                    yield reply
                code = "OK"
            except Exception as error:
                code = code_name(error)
                await abort(call.context, error, call.trailing)
            finally:
                everything.under_way -= 1
                counts.count(code, call.began_ns)
                self._notify(call, counts, code)

        return serve

    def _notify(self, call: GrpcCall, counts: MethodCounts, code: str) -> None:
        """Log a call that has ended, and export its spans, where that is wanted."""
        trace, began_ns = call.trace, call.began_ns
        if trace is not None or self._access_log.logs_all:
            method = f"{counts.service}/{counts.method}"
            self._access_log.call(trace, method, code, began_ns, call.peer, call.key)
        if trace is not None and trace.sampled and self._exporter is not None:
            self._exporter.put(finished_call(trace, counts.service, counts.method, code, began_ns))

    async def in_order(
        self,
        requests: AsyncIterator[_T],
        answer: Callable[[_T], Coroutine[None, None, _R]],
    ) -> AsyncIterator[_R]:
        """Yield the answers to a stream's requests, in order; up to `grpc.pipeline_max` are in
        progress.

        `answer` returns errors as answers. Ends with ShuttingDown when the server closes.
        """
        under_way: asyncio.Queue[asyncio.Task[_R] | None] = asyncio.Queue(
            self.node.config.grpc.pipeline_max
        )

        async def read() -> None:
            try:
                async for request in requests:
                    await under_way.put(asyncio.ensure_future(answer(request)))
            finally:
                await under_way.put(None)

        reader = asyncio.ensure_future(_until(self.closing, read()))
        try:
            while (task := await under_way.get()) is not None:
                yield await task
            await reader
            if self.closing.is_set():
                raise ShuttingDown("the server is closing.")
        finally:
            reader.cancel()
            while not under_way.empty():
                if (left := under_way.get_nowait()) is not None:
                    left.cancel()


def _settle(waiter: "asyncio.Future[None]", _: Future) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def _until(event: asyncio.Event, step: Coroutine[None, None, None]) -> None:
    """Run `step` to its end, or until the event is set."""
    both = [asyncio.ensure_future(step), asyncio.ensure_future(event.wait())]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if both[0].done():
            both[0].result()
    finally:
        for each in both:
            each.cancel()


def _after(
    first: Callable[[object], object], then: Callable[[object], object]
) -> Callable[[object], object]:
    return lambda data: then(first(data))


def decoder(kind: type[Message], is_stream: bool) -> Read:
    """Return a function that decodes bytes, or a stream of them. It raises InvalidInput."""
    return _of_each(reader(kind), is_stream)


def reader(kind: type[Message]) -> Callable[[bytes], Message]:
    """Return a function that decodes bytes. It raises InvalidInput."""

    def read(data: bytes) -> Message:
        try:
            return kind.FromString(data)
        except DecodeError:
            raise InvalidInput(f"the bytes are no {kind.DESCRIPTOR.full_name}.") from None

    return read


def _of_each(read: Callable[[bytes], object], is_stream: bool) -> Read:
    async def read_all(stream: AsyncIterator[bytes]) -> AsyncIterator[object]:
        async for data in stream:
            yield read(data)

    return read_all if is_stream else read


# -- failing


def known(error: Exception) -> ClipperError:
    """Return the error if it is a ClipperError. Others are logged and replaced by an internal
    error."""
    if isinstance(error, ClipperError):
        return error
    _log.error("a call failed", exc_info=error)
    return ClipperError("an internal error; the server's log has it.")


def code_name(error: Exception) -> str:
    """Return the name of an error's code, for the counts."""
    return error.grpc_code if isinstance(error, ClipperError) else "INTERNAL"


def code_of(error: ClipperError) -> Code:
    """Return the gRPC code of an error."""
    return Code[error.grpc_code]


def text_of(error: ClipperError) -> str:
    """Return the text of an error, limited to the size of metadata."""
    return str(error)[:_TEXT_MAX]


def retry_s_of(error: ClipperError) -> float:
    """Return the seconds after which a retry may succeed; 0 if a retry makes no sense."""
    if code_of(error) not in _RETRIABLE:
        return 0.0
    return error.retry_after_s if isinstance(error, Overloaded) else float(retry_after_s(error))


def ending_of(
    error: Exception, trailing: Iterable[tuple[str, str]] = ()
) -> tuple[Code, str, tuple[tuple[str, str | bytes], ...]]:
    """Return how an error ends a call: the code, the text and the trailing metadata. trailing:
    further ones."""
    ours = known(error)
    code, text, retry_s = code_of(ours), text_of(ours), retry_s_of(ours)
    status = _STATUS(code=code, message=text)
    status.details.add().Pack(
        _INFO(reason=ours.slug, domain="clipper", metadata={"hint": ours.hint[:_TEXT_MAX]})
    )
    again: list[tuple[str, str]] = []
    if retry_s:
        retry = _RETRY()
        retry.retry_delay.FromNanoseconds(round(retry_s * 1e9))
        status.details.add().Pack(retry)
        again += [
            ("grpc-retry-pushback-ms", str(math.ceil(retry_s * 1000))),
            ("retry-after", str(math.ceil(retry_s))),
        ]
    details = ("grpc-status-details-bin", status.SerializeToString())
    return code, text, (*trailing, details, *again)


async def abort(
    context: CallContext, error: Exception, trailing: Iterable[tuple[str, str]] = ()
) -> NoReturn:
    """End a call by an error. trailing: further trailing metadata."""
    if isinstance(error, CallAborted):
        raise error
    await context.abort(*ending_of(error, trailing))
    raise error  # abort() always raises
