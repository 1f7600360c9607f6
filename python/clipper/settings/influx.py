"""What can be set of metrics that are pushed: `[influx]` of a file."""

from typing import Annotated

import msgspec

from clipper.setting import about


class InfluxSettings(msgspec.Struct, frozen=True):
    url: Annotated[
        str,
        about(
            "where metrics are pushed as InfluxDB's lines: `http://HOST:8086/write?db=NAME`, say;"
            " empty: nowhere"
        ),
    ] = ""
    token: Annotated[str, about("what `Authorization: Token` says there; empty for none")] = ""
    ca: Annotated[
        str,
        about("PEM file of who signed its certificate, for https; empty: whom this host trusts"),
    ] = ""
    each_s: Annotated[float, about("how often", "s", ge=0.05, le=86_400)] = 10.0
    timeout_s: Annotated[float, about("for one post", "s", ge=0.05, le=600)] = 5.0
    tries_max: Annotated[
        int, about("posts of the same metrics before they are dropped", "posts", ge=1, le=100)
    ] = 3

    def __repr__(self) -> str:
        items = msgspec.structs.asdict(self).items()
        shown = (
            f"{key}={'***' if key == 'token' and value else repr(value)}" for key, value in items
        )
        return f"InfluxSettings({', '.join(shown)})"
