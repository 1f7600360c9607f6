"""Settings of tracing: `[tracing]`.

Settings without a value come from OpenTelemetry's variables (OTEL_...).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, get_args

import msgspec

from clipper.settings.redaction import redacted
from clipper.settings.setting import about

Sampler = Literal[
    "",
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
]


class TracingSettings(msgspec.Struct, frozen=True):
    """Settings of the export of spans."""

    endpoint: Annotated[
        str,
        about(
            "URL of an OTLP/HTTP collector, as `http://127.0.0.1:4318`; empty: "
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        ),
    ] = ""
    headers: Annotated[
        str,
        about(
            "headers of each request, `name=value,name=value`; empty: OTEL_EXPORTER_OTLP_HEADERS"
        ),
    ] = ""
    ca: Annotated[
        str,
        about(
            "PEM file of the CA of the collector's certificate; empty: "
            "OTEL_EXPORTER_OTLP_CERTIFICATE"
        ),
    ] = ""
    service: Annotated[
        str, about("name of this service; empty: OTEL_SERVICE_NAME, else `clipper`")
    ] = ""
    sampler: Annotated[
        Sampler,
        about("sampler of requests; empty: OTEL_TRACES_SAMPLER, else `parentbased_always_on`"),
    ] = ""
    share: Annotated[
        float,
        about(
            "share of requests for `traceidratio`; below 0: OTEL_TRACES_SAMPLER_ARG, else all",
            "share",
            ge=-1,
            le=1,
        ),
    ] = -1.0
    timeout_s: Annotated[
        float,
        about(
            "timeout of one export; 0: OTEL_EXPORTER_OTLP_TIMEOUT, else 10 s",
            "s",
            ge=0,
            le=600,
        ),
    ] = 0.0
    queue_max: Annotated[
        int,
        about(
            "requests whose spans wait to be exported; further ones are dropped and counted",
            "requests",
            ge=1,
            le=1 << 20,
        ),
    ] = 2048
    batch_max: Annotated[int, about("requests in one export", "requests", ge=1, le=65_536)] = 256
    delay_s: Annotated[
        float, about("longest time that spans wait for others", "s", ge=0.01, le=600)
    ] = 1.0
    tries_max: Annotated[
        int,
        about("attempts to export the same spans before they are dropped", "posts", ge=1, le=100),
    ] = 4

    __repr__ = redacted


class ExportSettings(msgspec.Struct, frozen=True):
    """The effective settings of the export.

    url: None if nothing is exported.  attributes: of the OpenTelemetry resource.
    """

    url: str | None
    headers: dict[str, str]
    ca: str
    attributes: dict[str, str]
    sampler: str
    share: float
    timeout_s: float

    __repr__ = redacted


def export_settings(settings: TracingSettings, env: Mapping[str, str]) -> ExportSettings:
    """Combine the settings with OpenTelemetry's variables; settings come first.

    Raises ValueError for a variable with an invalid value.
    """

    def variable(name: str) -> str:
        return env.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "") or env.get(
            f"OTEL_EXPORTER_OTLP_{name}", ""
        )

    url: str | None = _url(settings, env)
    is_off = (
        env.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or env.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    )
    if not settings.endpoint and is_off:
        url = None
    attributes = {"service.name": "clipper", **_pairs(env.get("OTEL_RESOURCE_ATTRIBUTES", ""))}
    if name := settings.service or env.get("OTEL_SERVICE_NAME", ""):
        attributes["service.name"] = name
    sampler = settings.sampler or env.get("OTEL_TRACES_SAMPLER", "") or "parentbased_always_on"
    samplers = get_args(Sampler)
    if sampler not in samplers:
        known = ", ".join(filter(None, samplers))
        raise ValueError(f"OTEL_TRACES_SAMPLER={sampler!r}: one of {known}.")
    share = (
        settings.share
        if settings.share >= 0
        else _number(env, "OTEL_TRACES_SAMPLER_ARG", 1.0)
        if "ratio" in sampler
        else 1.0
    )
    if not 0 <= share <= 1:
        raise ValueError(f"OTEL_TRACES_SAMPLER_ARG={share:g}: a share from 0 to 1.")
    timeout_s = settings.timeout_s or float(variable("TIMEOUT") or 10_000) / 1000
    headers = {
        name.lower(): value
        for name, value in _pairs(settings.headers or variable("HEADERS")).items()
    }
    return ExportSettings(
        url, headers, settings.ca or variable("CERTIFICATE"), attributes, sampler, share, timeout_s
    )


def _url(settings: TracingSettings, env: Mapping[str, str]) -> str | None:
    """Return the URL of the collector; `/v1/traces` is added unless the variable for traces gives
    it.
    """
    if not settings.endpoint and (whole := env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return whole
    base = settings.endpoint or env.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    return f"{base.rstrip('/')}/v1/traces" if base else None


def _number(env: Mapping[str, str], name: str, otherwise: float) -> float:
    text = env.get(name, "")
    try:
        return float(text) if text else otherwise
    except ValueError:
        raise ValueError(f"{name}={text!r}: a number.") from None


def _pairs(text: str) -> dict[str, str]:
    return dict(_each_pair(text))


def _each_pair(text: str) -> Iterator[tuple[str, str]]:
    from urllib.parse import unquote

    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals and name.strip():
            yield name.strip(), unquote(value.strip())
