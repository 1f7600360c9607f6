from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from clipper_core.engine.engine import Engine
from clipper_core.http.http2_protocol import Http2Protocol
from clipper_core.http.http_route import HotTable
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

@final
class HotCalls:
    def __init__(
        self,
        engines: Sequence[Engine],
        *,
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
    def set_table(self, table: HotTable) -> None: ...
    def sweep(self) -> int: ...
    def take(self, protocol: Http2Protocol, owner: object, open_max: int) -> bool: ...
    def news(self) -> tuple[set[Any], list[HotEnding]]: ...
    def lose(self, protocol: Http2Protocol) -> None: ...
