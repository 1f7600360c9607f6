"""gRPC channels to the endpoints of an etcd cluster, with failover.

One endpoint is used at a time; if it does not answer, the next one is. Every call has a deadline,
because gRPC's keep-alive did not detect a hung server within half a minute. A read is repeated at
another endpoint. A transaction is not, unless it was never sent: without an answer it is unknown
whether it was executed.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc

from clipper.errors import ConfigError, StoreError
from clipper.store.etcd import protocol
from clipper.store.etcd.address import EtcdAddress
from clipper.store.store import closed_error

PATIENCE_S = 2.0  # deadline of one call
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
)
# min_reconnect_backoff_ms is, despite its name, the timeout for establishing a connection
_NEVER_SENT: Final = ("failed to connect", "Connection refused", "DNS resolution", "No such file")
_RETRIED: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_AUTH_ERRORS: Final = (
    "invalid auth token",
    "user name is empty",
    "authentication failed",
    "permission denied",
    "auth store is old",
)
_LEASE_LOST: Final = "requested lease not found"


class EtcdChannel:
    """A connection to one of several endpoints.

    Threads: any. Errors: StoreError with the store's name.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        self.name = address.shown
        self._credentials = _credentials(address)
        self._channels: dict[int, grpc.Channel] = {}
        self.at = 0  # index of the current endpoint
        self._token = ""
        self._lock = threading.Lock()
        self._closed = False

    # -- calls

    def call(
        self, name: str, request: object, *, again: bool = False, patience_s: float = 0.0
    ) -> protocol.Message:
        """Call an RPC and return its answer.

        name: `Service.Method`.  again: the request is idempotent, so every endpoint is tried.
        patience_s: deadline; 0 for the default of 2 s.
        """
        error: StoreError = StoreError("")
        for _ in self._address.endpoints:
            at = self.at
            try:
                return self._authenticated(at, name, request, patience_s or PATIENCE_S)
            except grpc.RpcError as problem:
                error = self.explained(problem, patience_s or PATIENCE_S)
                if problem.code() not in _RETRIED:
                    break
                self.leave(at)
                if not again and not any(text in (problem.details() or "") for text in _NEVER_SENT):
                    break
            except ValueError:
                if self._closed:
                    raise closed_error(self.name) from None
                raise
        raise error

    def _authenticated(
        self, at: int, name: str, request: object, patience_s: float
    ) -> protocol.Message:
        try:
            return self._call(at, name, request, patience_s)
        except grpc.RpcError as problem:
            if not self._address.user or not _is_auth_error(problem):
                raise
        self._token = ""  # expired: request a new one
        return self._call(at, name, request, patience_s)

    def _call(
        self, at: int, name: str, request: protocol.Message, patience_s: float
    ) -> protocol.Message:
        path, _, answer = protocol.method(name)
        if name == "Lease.LeaseKeepAlive":
            stream = self.stream(at, name, iter((request,)), patience_s)
            try:
                return next(stream)
            except StopIteration:
                raise StoreError(f"store {self.name} did not renew the lease.") from None
            finally:
                stream.cancel()
        call = self._channel(at).unary_unary(
            path, type(request).SerializeToString, answer.FromString
        )
        return call(request, timeout=patience_s, metadata=self._login(at, name))

    def stream(
        self, at: int, name: str, requests: Iterator[object], timeout_s: float | None = None
    ) -> grpc.Call:
        """Open a bidirectional stream to the endpoint `at`."""
        path, request, answer = protocol.method(name)
        call = self._channel(at).stream_stream(path, request.SerializeToString, answer.FromString)
        return call(requests, timeout=timeout_s, metadata=self._login(at, name))

    def _login(self, at: int, name: str) -> tuple[tuple[str, str], ...]:
        if not self._address.user or name == "Auth.Authenticate":
            return ()
        if not self._token:
            request = protocol.message("AuthenticateRequest")(
                name=self._address.user, password=self._address.password
            )
            self._token = self._call(at, "Auth.Authenticate", request, PATIENCE_S).token
        return (("token", self._token),)

    # -- endpoints

    def leave(self, at: int) -> None:
        """Switch to the next endpoint, unless another thread has already left `at`."""
        with self._lock:
            if self.at == at:
                self.at = (at + 1) % len(self._address.endpoints)

    def forget_token(self) -> None:
        """Drop the authentication token; the next call requests a new one."""
        self._token = ""

    def _channel(self, at: int) -> grpc.Channel:
        with self._lock:
            if self._closed:
                raise closed_error(self.name)
            if at not in self._channels:
                target = self._address.endpoints[at]
                if self._credentials is None:
                    self._channels[at] = grpc.insecure_channel(target, _OPTIONS)
                else:
                    self._channels[at] = grpc.secure_channel(target, self._credentials, _OPTIONS)
            return self._channels[at]

    def explained(self, problem: grpc.RpcError, patience_s: float = PATIENCE_S) -> StoreError:
        """Convert a gRPC error to a StoreError."""
        if self._closed:
            return closed_error(self.name)
        code, details = (
            problem.code(),
            (problem.details() or "").removeprefix("etcdserver: ").rstrip("."),
        )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return StoreError(
                f"store {self.name} did not answer within {patience_s:g} s.",
                hint="Check the load of etcd and the network.",
            )
        if code is grpc.StatusCode.UNAVAILABLE:
            return StoreError(
                f"store {self.name} cannot be reached: {details}.",
                hint="Check that etcd is running there.",
            )
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "space exceeded" in details:
            hint = (
                "Compact it and defragment it, then etcdctl alarm disarm; run etcd with"
                " --auto-compaction-retention=1h."
            )
            return StoreError(f"store {self.name} is full: {details}.", hint=hint)
        if _is_auth_error(problem):
            return StoreError(
                f"store {self.name} refused the user: {details}.",
                hint="Check user and password of the URL.",
            )
        return StoreError(f"store {self.name} refused: {details or code.name}.")

    def close(self) -> None:
        """Close all channels."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()


def _is_auth_error(problem: grpc.RpcError) -> bool:
    details = problem.details() or ""
    return problem.code() is grpc.StatusCode.UNAUTHENTICATED or any(
        text in details for text in _AUTH_ERRORS
    )


def is_lost_lease(problem: StoreError) -> bool:
    """Return True if the error says that a lease has expired."""
    return _LEASE_LOST in problem.message


def _credentials(address: EtcdAddress) -> grpc.ChannelCredentials | None:
    if not address.secure:
        return None
    try:
        ca, key, cert = (
            Path(file).read_bytes() if file else None
            for file in (address.ca, address.key, address.cert)
        )
    except OSError as error:
        hint = "Check ca, cert and key of the URL."
        raise ConfigError(
            f"state={address.shown!r}: cannot read {error.filename}: {error.strerror}.", hint=hint
        ) from None
    return grpc.ssl_channel_credentials(ca, key, cert)
