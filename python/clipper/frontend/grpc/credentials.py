"""TLS for grpcio, of files that may change while it serves."""

from typing import Any

import grpc

from clipper.tls import Certificate, Pem


def credentials_of(certificate: Certificate) -> Any:
    """Those of the files as they are when a client comes: grpcio asks at each handshake, and takes
    None for no change."""
    known = certificate.pem

    def configuration(pem: Pem) -> Any:
        return grpc.ssl_server_certificate_configuration(
            [(pem.key, pem.cert)], pem.client_ca or None
        )

    def current() -> Any:
        nonlocal known
        if certificate.pem is known:
            return None
        known = certificate.pem
        return configuration(known)

    return grpc.dynamic_ssl_server_credentials(
        configuration(known), current, bool(certificate.files.client_ca)
    )
