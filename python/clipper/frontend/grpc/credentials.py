"""TLS credentials for grpcio, from files that may change while the server runs."""

import grpc

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
