"""The addresses of a server that a command starts, where neither its file nor an option names them:
127.0.0.1:8000 for queries over HTTP and gRPC, 8002 for management; or the next free ones."""

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clipper.config import Config
    from clipper.server import ClipperServer


def with_addresses(config: "Config", *, http: bool = True, grpc: bool = False) -> "Config":
    """Return the configuration with the usual addresses of this host where it names none.

    http: also for queries over HTTP; a file that sets http.address = "" wants none. grpc: also over
    gRPC, if its packages are installed. Management always gets one, and then a token that commands
    of this user find in the server's private folder.
    """
    from msgspec.structs import replace

    from clipper.settings.grpc import SHARED, has_protobuf
    from clipper.settings.ports import ADMIN_PORT, GRPC_PORT, HTTP_PORT, local_address

    moving = set()
    found, calls = config.http, config.grpc
    if http and not found.address and "http.address" not in config.origins:
        found = replace(found, address=local_address(HTTP_PORT))
        moving.add("http.address")
    if grpc and not calls.address and "grpc.address" not in config.origins and has_protobuf():
        if found.address:
            calls = replace(calls, address=SHARED)
        else:
            calls = replace(calls, address=local_address(GRPC_PORT))
            moving.add("grpc.address")
    if not found.admin:
        token = found.token or secrets.token_urlsafe(24)
        admin = local_address(ADMIN_PORT)
        found = replace(found, admin=admin, token=token, admin_tls_cert="off")
        moving.add("http.admin")
    return replace(config, http=found, grpc=calls, may_move=frozenset(moving))


def moved(server: "ClipperServer") -> Iterator[str]:
    """Yield a line for each address of a running server that is not the usual one, since that is
    taken."""
    from clipper.serving.models.address import held_by
    from clipper.settings.grpc import own_address

    config = server.config
    each = (
        ("http.address", config.http.address, server.http_address, "queries come in"),
        ("grpc.address", own_address(config.grpc, config.http), server.grpc_address, "gRPC is"),
        ("http.admin", config.http.admin, server.admin_address, "management is"),
    )
    for key, usual, found, what in each:
        if key in config.may_move and found != usual:
            yield f"{usual} is taken{held_by(usual)}: {what} at {found} instead"
