from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from clipper_core.engine.engine import Engine
from clipper_core.http.http2_protocol import Http2Protocol
from clipper_core.http.http_route import HotRoute, HotTable
from clipper_core.results.future import Future
from clipper_core.runtime.histogram import Counter

class HotEnding(NamedTuple):
    owner: Any
    stream: int
    subject: Any
    futures: Sequence[Future]
    request_id: str
    began_ns: int
    trace: bytes

class HotRead(NamedTuple):
    owner: Any
    stream: int
    route: HotRoute
    futures: Sequence[Future | None]
    rows: Sequence[Any]
    error: Exception | None
    user: str
    slo_us: int
    id: str
    request_id: str
    began_ns: int
    trace: bytes
    band: int

@final
class HotCalls:
    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        calls_max: int,
        message_bytes_max: int,
        way_back_us: int,
        slo_us_max: int,
        finish: Callable[..., object],
        cancelled: Counter,
    ) -> None: ...
    @property
    def fds(self) -> list[int]: ...
    @property
    def open(self) -> int: ...
    outside: int
    @property
    def has_news(self) -> bool: ...
    def set_table(self, table: HotTable) -> None: ...
    def sweep(self) -> int: ...
    def take(self, protocol: Http2Protocol, owner: object) -> bool: ...
    def news(self) -> tuple[set[Any], list[HotEnding | HotRead]]: ...
    def respond(self, read: HotRead, futures: list[Future]) -> bool: ...
    def lose(self, protocol: Http2Protocol) -> None: ...
    def give(self, protocol: Http2Protocol) -> None: ...
    def drop(self, protocol: Http2Protocol) -> None: ...
    def adopt(self, protocol: Http2Protocol, owner: object) -> None: ...
