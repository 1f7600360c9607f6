"""The tries of one call: how long it may take, and what is tried again.

A call is sent again where that can do nothing twice: the server answered 503 with Retry-After, or
the connection ended before a byte of the response; and only if the call may be repeated, which no
feedback may. Anything else is the result of the call.
"""

import struct
import time
from collections.abc import Sequence
from typing import Final, Generic, NoReturn, TypeVar

from clipper_client.address import Address
from clipper_client.calls import Call
from clipper_client.errors import DeadlineExceeded, error_of, not_clipper
from clipper_client.http_wire import Response

_T = TypeVar("_T")
UNREADABLE: Final = (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error)


class ConnectionEnded(Exception):
    """A connection ended, or was not HTTP, before the response was whole. begun: bytes of the
    response had come."""

    def __init__(self, why: str, begun: bool) -> None:
        super().__init__(why)
        self.begun = begun


class Attempts(Generic[_T]):
    """The tries of one call. Threads: one.

    until_s: when the call has to be over, by time.monotonic.
    """

    __slots__ = ("_address", "_began_s", "_call", "_limit_s", "_tries", "_tries_max", "until_s")

    def __init__(self, call: Call[_T], address: Address, timeout_s: float, tries_max: int) -> None:
        """Begin a call. timeout_s, tries_max: as of Client."""
        self._call, self._address = call, address
        self._tries, self._tries_max = 0, tries_max
        self._began_s = time.monotonic()
        own_s = 0.0 if call.slo_ms is None else call.slo_ms / 1000
        self._limit_s = timeout_s + own_s
        self.until_s = self._began_s + self._limit_s

    def request(self) -> Sequence[bytes | memoryview]:
        """Return the next request, with the time that the server has left. Raises InvalidInput."""
        slo_ms = self._call.slo_ms
        if slo_ms is not None and self._tries > 0:
            slo_ms = max(slo_ms - 1000 * (time.monotonic() - self._began_s), 0.001)
        self._tries += 1
        return self._address.request(self._call, self._call.body(slo_ms))

    def pause_s(self, response: Response) -> float | None:
        """Return the seconds after which to try again; None if the response is the last one."""
        if response.status != 503 or response.retry_after_s is None:
            return None
        return response.retry_after_s if self._may_wait(response.retry_after_s) else None

    def _may_wait(self, pause_s: float) -> bool:
        """Return whether the call may be sent again after a pause, within its own time."""
        slo_ms = self._call.slo_ms
        until_s = self.until_s if slo_ms is None else self._began_s + slo_ms / 1000
        is_in_time = time.monotonic() + pause_s < until_s
        return self._call.may_repeat and self._tries < self._tries_max and is_in_time

    def after_loss(self, lost: ConnectionEnded) -> None:
        """Return if the call is to be sent again at once. Raises NoServer if not."""
        if lost.begun or not self._may_wait(0.0):
            raise self._address.lost(str(lost), may_be_done=not self._call.may_repeat) from None

    def late(self) -> NoReturn:
        """Raise the error of a call that took too long."""
        done = "" if self._call.may_repeat else " It may be done all the same."
        raise DeadlineExceeded(
            f"{self._address.url} has not answered within {self._limit_s:g} s.",
            hint=f"Give more time: timeout_s=.{done}",
        ) from None

    def result(self, response: Response) -> _T:
        """Return the result of the call. Raises the error that the server raised, NoServer for what
        no server of Clipper answers."""
        url = self._address.url
        if response.status != 200:
            raise error_of(response, url)
        try:
            return self._call.read(response)
        except UNREADABLE as error:
            raise not_clipper(url, f"{type(error).__name__}: {error}") from None
