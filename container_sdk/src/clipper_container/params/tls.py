"""TLS of a client of shards: `tls:HOST:PORT`, and what the client shows and trusts as parameters.

`tls:h:7000?ca=/etc/ca.pem&cert=/etc/me.crt&key=/etc/me.key`: ca is a PEM file of the authority that
signed the shards' certificates, without it the authorities that this host trusts; cert and key are
the client's own, where shards require it. A certificate must be valid for HOST. TLS 1.2 is the
least.
"""

import socket
import ssl
import urllib.parse
from collections.abc import Callable
from typing import NamedTuple

from clipper_container.errors import InvalidInput, ShardAway, TlsFailed

# How a handshake fails when the peer closes the connection; the second is that of Python 3.11.2.
CLOSED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)

_PARAMETERS = ("ca", "cert", "key")


class TlsAddress(NamedTuple):
    """Parts of an address. plain: `tcp:HOST:PORT`. ca, cert, key: files; empty: none."""

    plain: str
    host: str
    ca: str
    cert: str
    key: str


def parse_tls_address(address: str) -> TlsAddress:
    """Parse `tls:HOST:PORT?ca=FILE&cert=FILE&key=FILE`. Raises InvalidInput."""
    where, _, text = address.removeprefix("tls:").partition("?")
    given = dict(urllib.parse.parse_qsl(text))
    if strange := sorted(set(given) - set(_PARAMETERS)):
        raise InvalidInput(
            f"address {address!r}: no parameter {strange[0]!r}.",
            hint=f"There are: {', '.join(_PARAMETERS)}.",
        )
    host = where.rpartition(":")[0].strip("[]")
    return TlsAddress(f"tcp:{where}", host, *(given.get(name, "") for name in _PARAMETERS))


def connect_tls(
    address: str, answer_s: float, connect: Callable[[str, float], socket.socket]
) -> ssl.SSLSocket:
    """Connect to a shard, and shake hands. connect: makes the connection without TLS.

    Raises InvalidInput (the address, a file), TlsFailed, ShardAway (the connection ended), OSError.
    """
    found = parse_tls_address(address)
    context = _context(found)
    return _handshake(connect(found.plain, answer_s), context, found, answer_s)


def _handshake(
    line: socket.socket, context: ssl.SSLContext, address: TlsAddress, answer_s: float
) -> ssl.SSLSocket:
    try:
        line.settimeout(answer_s)
        return context.wrap_socket(line, server_hostname=address.host)
    except (*CLOSED, ConnectionError):
        line.close()
        raise ShardAway(
            f"{address.plain} closed the connection during the TLS handshake.",
            hint="If it listens without TLS, its address is tcp:HOST:PORT.",
        ) from None
    except ssl.SSLError as error:
        line.close()
        raise tls_failed(error, address.plain) from None
    except BaseException:
        line.close()
        raise


def _context(address: TlsAddress) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=address.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if address.cert:
            context.load_cert_chain(address.cert, address.key or None)
    except (ssl.SSLError, OSError) as error:
        raise InvalidInput(
            f"ca={address.ca!r}, cert={address.cert!r}, key={address.key!r}: {_reason(error)}.",
            hint="All are PEM files; the key is that of the certificate.",
        ) from None
    return context


def tls_failed(error: OSError, where: str) -> Exception:
    """Return the error of a failed handshake or an alert; another error as it is."""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "Name the authority that signed it: tls:HOST:PORT?ca=FILE."
        return TlsFailed(f"{where}: its certificate: {error.verify_message}.", hint=hint)
    if isinstance(error, ssl.SSLError) and not isinstance(error, CLOSED):
        hint = "A shard that requires certificates: tls:HOST:PORT?ca=FILE&cert=FILE&key=FILE."
        return TlsFailed(f"{where}: TLS failed: {_reason(error)}.", hint=hint)
    return error


def _reason(error: OSError) -> str:
    return (getattr(error, "reason", "") or str(error)).lower().replace("_", " ")
