"""TLS credentials for grpcio, from files that may change while the server runs."""

from collections.abc import Mapping

import grpc
import grpc.aio

from clipper.metrics import TlsCounts
from clipper.tls import Certificate, Pem


def credentials_of(certificate: Certificate) -> grpc.ServerCredentials:
    """Return server credentials that follow the certificate's files.

    grpcio calls this at each handshake; None means that nothing has changed.
    """
    known = certificate.pem

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(pem.key, pem.cert)], pem.client_ca or None
        )

    def current() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        if certificate.pem is known:
            return None
        known = certificate.pem
        return configuration(known)

    return grpc.dynamic_ssl_server_credentials(
        configuration(known), current, bool(certificate.files.client_ca)
    )


def bind(
    server: grpc.aio.Server, address: str, certificates: Mapping[str, tuple[Certificate, TlsCounts]]
) -> int:
    """Let a server listen on an address, by TLS if there is a certificate for "grpc"; return the
    port. Raises RuntimeError.
    """
    secured = certificates.get("grpc")
    if secured is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, credentials_of(secured[0])))
