"""The address of an etcd cluster, as a URL."""

from typing import Final
from urllib.parse import parse_qs, unquote

import msgspec

from clipper.errors import ConfigError, without_secrets

_PORT: Final = "2379"
_OPTIONS: Final = ("ca", "cert", "key", "user", "password")


class EtcdAddress(msgspec.Struct, frozen=True):
    """A parsed URL of an etcd cluster.

    `etcd://[USER:PASSWORD@]HOST:PORT,HOST:PORT/PREFIX?OPTION=VALUE&OPTION=VALUE`, with the options
    `ca`, `cert` and `key` (PEM files), `user` and `password`.

    `etcds://`, or a ca or a cert, selects TLS.  shown: the URL without its password.
    """

    shown: str
    endpoints: tuple[str, ...]
    prefix: str
    secure: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password: str = ""


def parse_url(url: str) -> EtcdAddress:
    """Parse a URL. Raises ConfigError for an unknown option or a missing host."""
    # urlsplit of newer and of patched Pythons refuses a list of hosts with an IPv6 address in it
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    netloc, _, path = address.partition("/")
    login, _, hosts = netloc.rpartition("@")
    user, _, password = (unquote(part) for part in login.partition(":"))
    options = {name: values[-1] for name, values in parse_qs(query).items()}
    unknown = sorted(set(options) - set(_OPTIONS))
    endpoints = tuple(_endpoint(host) for host in hosts.split(",") if host)
    if unknown or not endpoints:
        why = f"unknown {unknown[0]!r}" if unknown else "it names no host"
        raise ConfigError(
            f"no store for state={without_secrets(url)!r}: {why}.",
            hint="Write etcd://HOST:2379,HOST:2379/PREFIX?ca=FILE.",
        )
    prefix = path.strip("/") + "/" if path.strip("/") else "clipper/"
    secure = scheme == "etcds" or bool(options.get("ca") or options.get("cert"))
    return EtcdAddress(
        without_secrets(url),
        endpoints,
        prefix,
        secure,
        **{"user": user, "password": password, **options},
    )


def _endpoint(host: str) -> str:
    bare = host.rpartition("]")[2]  # of [::1]:2379
    return host if ":" in bare else f"{host}:{_PORT}"
