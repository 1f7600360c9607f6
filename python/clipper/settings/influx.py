"""Settings for pushing metrics to InfluxDB: `[influx]`."""

from typing import Annotated

import msgspec

from clipper.settings.redaction import redacted
from clipper.settings.setting import about


class InfluxSettings(msgspec.Struct, frozen=True):
    """Settings for pushing metrics."""

    url: Annotated[
        str,
        about(
            "URL to push metrics to in InfluxDB's line protocol, as "
            "`http://HOST:8086/write?db=NAME`; empty: no push"
        ),
    ] = ""
    token: Annotated[str, about("token sent as `Authorization: Token`; empty: none")] = ""
    ca: Annotated[
        str,
        about(
            "PEM file of the CA of the server's certificate, for https; empty: the CAs that "
            "this host trusts"
        ),
    ] = ""
    each_s: Annotated[float, about("interval between pushes", "s", ge=0.05, le=86_400)] = 10.0
    timeout_s: Annotated[float, about("timeout of one push", "s", ge=0.05, le=600)] = 5.0
    tries_max: Annotated[
        int,
        about("attempts to push the same metrics before they are dropped", "posts", ge=1, le=100),
    ] = 3

    __repr__ = redacted
