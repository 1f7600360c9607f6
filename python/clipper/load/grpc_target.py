"""Queries over gRPC (clipper.v1.Applications): any number of concurrent calls over a few
channels.
"""

import asyncio
import base64
import time
from collections.abc import Sequence

import grpc
import grpc.aio
import numpy as np

from clipper.component import Tasks
from clipper.errors import ClipperError, NoServer
from clipper.frontend.inference import codec
from clipper.frontend.protocols import message
from clipper.load.http_target import salt
from clipper.load.measurement import Measurement, QueryOutcome
from clipper.mesh.splice import varint
from clipper.schema import TensorSpec
from clipper.types import InputType, UserValue

Row = UserValue  # a JSON value
_METHOD = "/clipper.v1.Applications/Predict"
_UNDER_WAY_MAX = 20_000
_PATIENCE_S = 10.0
_WRONG = [
    grpc.StatusCode[name]
    for name in ("UNAUTHENTICATED", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED")
]


class GrpcTarget:
    """Sends queries to an application. address: HOST:PORT. type_: input type of the application.
    fresh: as for HttpTarget.

    Threads: the event loop's.
    """

    def __init__(
        self,
        address: str,
        application: str,
        rows: Sequence[object],
        type_: InputType,
        channels: int,
        fresh: bool = True,
        key: str = "",
    ) -> None:
        self.url = f"grpc://{address}/{application}"
        self._address = address
        self._channels: list[grpc.Channel] = []
        self._count = channels
        self._metadata = (("authorization", f"Bearer {key}"),) if key else None
        self._requests = [_request(application, row, type_) for row in rows]
        self._salt = salt() if fresh else 0
        self._calls: list[grpc.Channel] = []
        self._tasks = Tasks("the load")
        self._measured: Measurement
        self._zero_s = 0.0

    async def open(self) -> None:
        """Open all channels and send one query to check that the server accepts them. Raises:
        NoServer, ClipperError.
        """
        read = message("clipper.v1.Prediction").FromString
        for number in range(self._count):
            own = [("clipper.channel", number), ("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(self._address, own)
            self._channels.append(channel)
            self._calls.append(channel.unary_unary(_METHOD, None, read))
        try:
            await asyncio.wait_for(self._channels[0].channel_ready(), _PATIENCE_S)
        except TimeoutError:
            hint = "Start one with: clipper up --grpc HOST:PORT"
            raise NoServer(f"no gRPC server answers at {self._address}.", hint=hint) from None
        try:
            await self._calls[0](self._requests[0], metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() in _WRONG:
                raise ClipperError(
                    f"{self.url} does not take the queries: {error.details()}", hint="See --input."
                ) from None

    def count_in(self, measured: Measurement, zero_s: float) -> None:
        """Record outcomes in `measured`, with times relative to zero_s."""
        self._measured, self._zero_s = measured, zero_s

    def send(self, number: int) -> None:
        """Send query `number`."""
        if len(self._tasks) >= _UNDER_WAY_MAX:
            self._finish(
                self._measured,
                number,
                QueryOutcome.ERROR,
                f"more than {_UNDER_WAY_MAX} calls are under way",
            )
            return
        self._tasks.spawn(self._send(self._measured, number))

    async def _send(self, measured: Measurement, number: int) -> None:
        call = self._calls[number % len(self._calls)]
        try:
            request = self._requests[number % len(self._requests)]
            request += _salted(self._salt + number) if self._salt else b""
            reply = await call(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            refused = any(
                key == "grpc-retry-pushback-ms" for key, _ in error.trailing_metadata() or ()
            )
            outcome = QueryOutcome.REFUSED if refused else QueryOutcome.ERROR
            self._finish(
                measured, number, outcome, f"{error.code().name} {(error.details() or '')[:200]}"
            )
            return
        outcome = (
            QueryOutcome.DEFAULT
            if reply.default
            else QueryOutcome.MISSING
            if reply.missing
            else QueryOutcome.OK
        )
        self._finish(measured, number, outcome)

    def _finish(
        self, measured: Measurement, number: int, outcome: QueryOutcome, error: str = ""
    ) -> None:
        measured.done(number, outcome, time.perf_counter() - self._zero_s, error)

    async def close(self) -> None:
        """Cancel all calls and close the channels."""
        await self._tasks.cancel()
        for channel in self._channels:
            await channel.close()


def _request(application: str, row: Row, type_: InputType) -> bytes:
    return bytes(
        message("clipper.v1.PredictRequest")(
            application=application, input=_value(row, type_)
        ).SerializeToString()
    )


def _value(row: Row, type_: InputType) -> dict[str, Row]:
    if isinstance(row, dict):
        specs = type_.named.by_name if type_.named is not None else {}
        values = {
            name: _tensor(value, specs[name]) if name in specs else _value(value, type_)
            for name, value in row.items()
        }
        return {"record": {"values": values}}
    if isinstance(row, str):
        return {"data": base64.b64decode(row)} if type_.dtype == "bytes" else {"text": row}
    if isinstance(row, bool):
        return {"truth": row}
    if isinstance(row, int | float):
        return {"number": float(row)}
    return {"numbers": {"values": _flat(row)}}


def _tensor(value: Row, spec: TensorSpec) -> dict[str, Row]:
    if not spec.shape:
        return _value(value, InputType.parse(spec.dtype))
    if spec.dtype == "bytes":
        raise ClipperError(f"tensor {spec.name!r}: lists of bytes are not sent over gRPC.")
    datatype, shape, values = codec.tensor_of(np.array(value, spec.numpy))
    data = codec.to_binary(values)
    return {"tensor": {"datatype": datatype, "shape": shape, "data": data}}


def _salted(value: int) -> bytes:
    """Return field 5 of a PredictRequest, which may follow all others."""
    return b"\x28" + varint(value)


def _flat(row: Row) -> list[float]:
    return [number for part in row for number in _flat(part)] if isinstance(row, list) else [row]
