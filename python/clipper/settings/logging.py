"""Settings of the log: `[logging]`."""

from typing import Annotated, Literal

import msgspec

from clipper.settings.redaction import redacted
from clipper.settings.setting import about


class LoggingSettings(msgspec.Struct, frozen=True):
    """Settings of the server's log. `level` and `format` hold at once when the file is read again;
    the others from the next start on."""

    level: Annotated[
        Literal["", "debug", "info", "warning", "error"],
        about(
            "least level that is logged; empty: as `logging` is configured in a program, `info` in"
            " `clipper up` and `clipper node`, `warning` in `clipper serve`"
        ),
    ] = ""
    format: Annotated[
        Literal["text", "json"],
        about(
            "`text` (as `logging` is configured; of commands: date, level and message), or `json`"
            " objects on stderr"
        ),
    ] = "text"
    access_lines_s_max: Annotated[
        int,
        about(
            "requests over HTTP and gRPC that are logged in each second; of others only their"
            " number is; 0: none. Python then answers all requests",
            "requests/s",
            ge=0,
            le=100_000,
        ),
    ] = 0

    __repr__ = redacted
