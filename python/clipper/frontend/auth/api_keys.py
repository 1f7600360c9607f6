"""API keys for queries (`http.api_keys_file`) and named tokens of managers (`http.tokens_file`)."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from clipper.credentials.credential_file import Credential, CredentialFile, shares_of
from clipper.credentials.key_shares import KeyShares
from clipper.errors import Forbidden, NotAllowed, RateExceeded
from clipper.frontend.auth.signed_tokens import SignedTokens
from clipper.frontend.http.messages import problem
from clipper.metrics.samples import Samples
from clipper.serving.query.processor import ResolvedApplication
from clipper_core.http.key_table import KeyTable, KeyUse
from clipper_core.scheduling.bands import band_number

_OUTCOMES: Final = ("admitted", "not_permitted", "limited")  # by KeyOutcome of the core
_NOT_PERMITTED: Final = 1
_TOO_MANY: Final = 2


class KeyOwner(NamedTuple):
    """The owner of a key: who makes a request. name: empty: who has the management token. share:
    its number; 0: of all without one. priority: 0: that of the application."""

    name: str
    groups: tuple[str, ...] = ()
    share: int = 0
    priority: int = 0


def band_of(application: ResolvedApplication, owner: KeyOwner | None, priority: int | None) -> int:
    """Return the band of a query. owner: of its key; None: none is needed. priority: that it asks
    for; None or 0: none.

    Raises InvalidInput for a priority that there is not, Forbidden for one above that of the key.
    """
    if owner is None or not owner.name:
        return application.band(priority or None)
    usual = owner.priority or application.priority
    band = band_number(owner.share, priority or usual)
    if priority and priority < usual:
        raise Forbidden(
            f"the key of {owner.name!r} is for priority {usual}, and the query asks for"
            f" {priority}, which is above it.",
            hint="Leave the priority out, or use a key that has it: clipper key create NAME"
            " --priority 1",
        )
    return band


def key_of(owner: KeyOwner | None) -> dict[str, str]:
    """Return what a log or a span tells of the owner of a key."""
    if owner is None or not owner.name:
        return {}
    return {"key": owner.name, **({"groups": ",".join(owner.groups)} if owner.groups else {})}


class _Known(NamedTuple):
    """The keys of a file as it was read, by the numbers of the table. The last is the management
    token. by_name: the number of a key, by the name of its owner."""

    table: KeyTable
    credentials: list[Credential]
    by_name: dict[str, int]


class ApiKeys:
    """The keys of one file. Threads: any.

    token: the management token, which is always valid; empty for none. limited: whether keys may
    have limits. signed: also accepts tokens; one whose owner has a key has its limits. Raises
    ConfigError for a file that cannot be read, or has a line of another form.
    """

    def __init__(
        self,
        path: str,
        token: str = "",
        setting: str = "http.api_keys_file",
        *,
        limited: bool = True,
        signed: SignedTokens | None = None,
    ) -> None:
        self._token, self._signed = token.encode(), signed
        self._file = CredentialFile(path, setting, limited=limited)
        self._uses: dict[str, KeyUse] = {}
        self._shares = KeyShares()
        self._known = self._read()
        self._is_stale = False  # the file has changed, and not everybody has been told
        self._listeners: list[Callable[[], None]] = []

    def _read(self) -> _Known:
        credentials = self._file.credentials
        names = dict.fromkeys(one.name for one in credentials)
        self._uses = {name: self._uses.get(name) or KeyUse() for name in names}
        self._shares.assign(shares_of(credentials))
        limits = [
            (
                self._uses[one.name],
                one.limits.interval_ns,
                one.limits.ahead_ns,
                one.limits.applications,
                one.limits.policy.encode(),
                _body_of(_not_permitted(one)),
                _body_of(_too_many(one, 0.0)),
                self._shares.number(one.name),
                one.limits.priority,
            )
            for one in credentials
        ]
        table = KeyTable([one.digest for one in credentials], self._token, limits)
        by_name = {one.name: number for number, one in enumerate(credentials)}
        return _Known(table, [*credentials, Credential(b"", "", "")], by_name)

    @property
    def weights(self) -> list[int]:
        """The weights of the keys' shares by their numbers, as `Engine.set_weights` takes them."""
        return self._shares.weights

    @property
    def table(self) -> KeyTable:
        """The keys that are valid now."""
        return self._known.table

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every change of the keys, on the thread that reloads the file,
        before `refresh` returns; return what ends that."""
        self._listeners.append(listener)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return end

    def refresh(self) -> bool:
        """Reload the file if it has changed; return whether new keys are in use.

        Raises what a listener raises; then the next call goes on.
        """
        self._is_stale = self._file.refresh() or self._is_stale
        if not self._is_stale:
            return False
        self._known = self._read()
        for listener in tuple(self._listeners):
            listener()
        self._is_stale = False
        return True

    def check(self, authorization: bytes) -> str:
        """Return the name of the key's owner; empty for the management token.

        authorization: the value of the header. Raises NotAllowed for an unknown or missing key.
        """
        return self._owner(self._known, authorization)[1].name

    def admit(self, authorization: bytes, applications: Sequence[str] = ("",)) -> KeyOwner:
        """Count a request against its key, and return whose it is.

        authorization: the value of the header. applications: that it is about, or models by their
        names. Raises NotAllowed for an unknown or missing key, Forbidden if the key is for other
        applications, RateExceeded.
        """
        known = self._known
        number, owner = self._owner(known, authorization)
        if number is not None:
            self._count(known, number, applications)
        return owner

    @staticmethod
    def _count(known: _Known, number: int, applications: Sequence[str]) -> None:
        """Count a request against a key. Raises Forbidden, RateExceeded."""
        credential = known.credentials[number]
        for application in applications:
            outcome, wait_ns = known.table.admit(number, application)
            if outcome == _NOT_PERMITTED:
                raise _not_permitted(credential)
            if outcome == _TOO_MANY:
                raise _too_many(credential, wait_ns / 1e9)

    def collect(self, into: Samples) -> None:
        """Add the counts of the keys' requests to `into`."""
        for name, use in self._uses.copy().items():
            counts = dict(zip(_OUTCOMES, use.requests, strict=True))
            into.add_by("clipper_key_requests_total", counts, name)

    def _owner(self, known: _Known, authorization: bytes) -> tuple[int | None, KeyOwner]:
        """Return the number of a key and its owner; of a token the number of its owner's key, if
        there is one. Raises NotAllowed."""
        number = known.table.find(authorization)
        if number is not None:
            return number, self._owner_of(known.credentials[number])
        signed = self._signed.owner(authorization) if self._signed is not None else None
        if signed is not None:
            number = known.by_name.get(signed.name)
            if number is None:
                return None, KeyOwner(signed.name, signed.groups)
            key = self._owner_of(known.credentials[number])
            return number, key._replace(groups=signed.groups)
        wrong = "the key is not known here" if authorization else "this server requires a key"
        raise NotAllowed(
            f"{wrong}.", hint="Send Authorization: Bearer KEY; `clipper key NAME` makes one."
        )

    def _owner_of(self, credential: Credential) -> KeyOwner:
        limits = credential.limits
        share = self._shares.number(credential.name)
        return KeyOwner(credential.name, limits.groups, share, limits.priority)


def _not_permitted(credential: Credential) -> Forbidden:
    return Forbidden(
        f"the key of {credential.name!r} is for other applications.",
        hint="Use a key that is for this one; `clipper key list` shows which are.",
    )


def _too_many(credential: Credential, wait_s: float) -> RateExceeded:
    limits = credential.limits
    return RateExceeded(
        f"{credential.name!r} makes more requests than its key allows: {limits.rate}.",
        hint="Send fewer, after the time in Retry-After.",
        retry_after_s=wait_s,
        policy=limits.policy,
    )


def _body_of(error: Forbidden | RateExceeded) -> bytes:
    """Return the body of the response to an error, up to the request's id, which is its end."""
    return problem(error, b"").body.removesuffix(b'"}')
