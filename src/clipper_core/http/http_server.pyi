from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from clipper_core.engine.engine import Engine
from clipper_core.http.hot_calls import HotCalls
from clipper_core.http.http2_protocol import Http2Protocol
from clipper_core.http.http_route import HotRoute, HotTable
from clipper_core.results.future import Future
from clipper_core.runtime.histogram import Counter
from clipper_core.tls.tls_context import TlsContext

class Handed(NamedTuple):
    fd: int
    data: bytes
    age_s: float
    returns: int
    worker: int
    relay: int
    ends: tuple[tuple[str, int] | None, ...]
    http2: Http2Protocol | None = None
    queries: tuple[tuple[int, int], ...] = ()

class WithoutTls(NamedTuple):
    fd: int

class Ending(NamedTuple):
    route: HotRoute
    futures: list[Future]
    id: bytes
    began_ns: int
    worker: int
    ticket: int
    tag: bytes
    binary: bool
    trace: bytes

class Read(NamedTuple):
    route: HotRoute
    futures: list[Future | None]
    rows: list[Any]
    error: Exception | None
    user: str
    slo_us: int
    id: bytes
    trace: bytes
    began_ns: int
    worker: int
    ticket: int
    tag: bytes
    binary: bool
    band: int

class Feedback(NamedTuple):
    route: HotRoute
    answer: str
    label: Any
    id: bytes
    trace: bytes
    began_ns: int
    worker: int
    ticket: int

class Gone(NamedTuple):
    ticket: int

class Late(NamedTuple):
    ticket: int
    message: bytes | None
    trailers: bytes | None

class HttpServer:
    def __init__(
        self,
        engines: Sequence[Engine],
        workers: int,
        prefix: bytes,
        *,
        header_s: float,
        idle_s: float,
        connections_max: int,
        header_bytes_max: int,
        body_bytes_max: int,
        pipeline_max: int,
        unsent_bytes_max: int,
        finish: Callable[[Future], Any],
        encode: Callable[[object], bytes],
        bodies_bytes_max: int = ...,
        tls: TlsContext | None = None,
        handshakes: Sequence[Counter] = (),
    ) -> None: ...
    @property
    def fd(self) -> int: ...
    @property
    def connections(self) -> int: ...
    @property
    def handing(self) -> int: ...
    outside: int
    @property
    def kept(self) -> int: ...
    kept_outside: int
    @property
    def relays(self) -> int: ...
    def listen(self, fd: int) -> None: ...
    def run(self, number: int) -> None: ...
    def set_table(self, table: HotTable) -> None: ...
    def serve_calls(self, calls: HotCalls, ping_us_min: int) -> None: ...
    def set_calls_table(self, table: HotTable) -> None: ...
    def set_tls(self, tls: TlsContext) -> None: ...
    def sweep(self) -> int: ...
    def take(self) -> list[Handed | WithoutTls | Ending | Read | Feedback | Gone | Late]: ...
    def respond(self, read: Read, futures: list[Future] | None = None) -> bool: ...
    def respond_feedback(self, feedback: Feedback, counted: bool) -> None: ...
    def adopt(self, fd: int, returns: int = 0, protocol: Http2Protocol | None = None) -> bool: ...
    def resume(
        self,
        worker: int,
        relay: int,
        fd: int,
        returns: int,
        protocol: Http2Protocol | None = None,
    ) -> bool: ...
    def answer(self, worker: int, ticket: int, response: bytes, close: bool) -> None: ...
    def reply(
        self,
        worker: int,
        ticket: int,
        message: bytes | None,
        trailers: Iterable[tuple[bytes, bytes]],
    ) -> None: ...
    def drain(self) -> None: ...
    def stop(self) -> None: ...
