"""Tokens that an identity provider has signed (JWT, RFC 7519), as credentials of queries.

A token names who sends a request, and until when it holds. Its signature is checked by the keys
that the provider publishes (JWKS, RFC 7517), of which this has a copy: of a file, or of a URL that
is read again from time to time. Only RS256 and ES256 are accepted, whatever a token asks for, so
that no public key is taken for a secret.
"""

import hashlib
import json
import logging
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple, NoReturn

from clipper.clock import wall_time_us
from clipper.credentials.credential_file import stamp_of
from clipper.errors import ConfigError, NotAllowed
from clipper.settings.http import HttpSettings
from clipper.types import UserValue

if TYPE_CHECKING:
    from jwt import PyJWK

_log = logging.getLogger(__name__)
_ALGORITHMS: Final = {"RS256": "RSA", "ES256": "EC"}  # with the kinds of their keys
TOKEN_BYTES_MAX: Final = 8192
NAME_CHARS_MAX: Final = 128
GROUPS_MAX: Final = 16
KEYS_BYTES_MAX: Final = 256 << 10
KEYS_MAX: Final = 64
SEEN_MAX: Final = 4096  # tokens whose signatures are not checked again
FETCH_S: Final = 5.0
FETCH_AGAIN_S: Final = 300.0
FETCH_SOON_S: Final = 10.0  # after a token of an unknown key, or a failure
_LEEWAY_S: Final = 10.0  # between the clocks of this host and of the provider
_HINT: Final = "Get a token of http.jwt_issuer for http.jwt_audience."
_CLAIMS: Final = ("exp", "iss", "aud")


class SignedOwner(NamedTuple):
    """The owner of a token. ends_s: when it ends, seconds since 1970."""

    name: str
    groups: tuple[str, ...]
    ends_s: float


class SignedTokens:
    """Checks the tokens of one provider. Threads: any; `refresh` from one.

    Raises ConfigError for a file of keys that cannot be used, or without the package PyJWT.
    """

    def __init__(self, http: HttpSettings) -> None:
        try:
            import jwt
        except ModuleNotFoundError:
            raise ConfigError(
                "http.jwt_keys is set, and the package PyJWT is not installed.",
                hint='pip install "clipper-serving[jwt]".',
            ) from None
        self._jwt = jwt
        self._http, self._is_url = http, "://" in http.jwt_keys
        self._seen: dict[bytes, SignedOwner] = {}
        self._keys: Mapping[str, PyJWK] = {}
        self._stamp = stamp_of(http.jwt_keys)
        self._due_s = 0.0  # of the next request of the keys, by the monotonic clock
        self._asked_s = 0.0  # when they were requested last
        if self._is_url:
            self.refresh()
        else:
            self._take(self._read())

    # -- keys

    def refresh(self) -> bool:
        """Read the keys again, if that is due; return whether others are in use. Those that were
        read before stay in use while there is an error. It blocks: do not call it on an event
        loop."""
        if self._is_url:
            now_s = time.monotonic()
            if now_s < self._due_s:
                return False
            self._asked_s, self._due_s = now_s, now_s + FETCH_SOON_S
        else:
            stamp = stamp_of(self._http.jwt_keys)
            if stamp == self._stamp:
                return False
            self._stamp = stamp
        try:
            self._take(self._read())
        except ConfigError as error:
            _log.warning("the keys of tokens that were read before stay: %s", error)
            return False
        if self._is_url:
            self._due_s = self._asked_s + FETCH_AGAIN_S
        return True

    def _read(self) -> bytes:
        """Return the keys as they are published. Raises ConfigError."""
        place = self._http.jwt_keys
        try:
            if not self._is_url:
                return Path(place).read_bytes()
            with _OPENER.open(place, timeout=FETCH_S) as response:
                found: bytes = response.read(KEYS_BYTES_MAX + 1)
                return found
        except (OSError, HTTPException, ValueError) as error:
            raise ConfigError(f"http.jwt_keys = {place!r} cannot be read: {error}.") from None

    def _take(self, text: bytes) -> None:
        """Use these keys from now on. Raises ConfigError."""
        found: dict[str, PyJWK] = {}
        try:
            if len(text) > KEYS_BYTES_MAX:
                raise ValueError(f"it has more than {KEYS_BYTES_MAX} bytes")
            each: list[dict[str, UserValue]] = json.loads(text)["keys"]
            if len(each) > KEYS_MAX:
                raise ValueError(f"it has more than {KEYS_MAX} keys")
            for one in each:
                kind, use = one["kty"], one.get("use", "sig")
                names = [name for name, wanted in _ALGORITHMS.items() if wanted == kind]
                if names and use == "sig" and one.get("alg", names[0]) == names[0]:
                    found[one.get("kid", "")] = self._jwt.PyJWK(one, algorithm=names[0])
            if not found:
                raise ValueError(f"it has no key for {' or '.join(_ALGORITHMS)}")
        except (ValueError, KeyError, TypeError, AttributeError, self._jwt.PyJWTError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"http.jwt_keys = {self._http.jwt_keys!r} has no keys of tokens: {why}.",
                hint="It is a JSON Web Key Set: {'keys': [...]}.",
            ) from None
        self._keys = found
        self._seen = {}  # a key may have been withdrawn

    # -- tokens

    def owner(self, authorization: bytes) -> SignedOwner | None:
        """Return whose token it is; None for a value of `Authorization` that has none. Raises
        NotAllowed."""
        scheme, _, token = authorization.strip().partition(b" ")
        token = token.strip()
        if scheme.lower() != b"bearer" or token.count(b".") != 2:
            return None
        digest = hashlib.sha256(token).digest()
        found = self._seen.get(digest)
        if found is None or found.ends_s + _LEEWAY_S <= wall_time_us() / 1e6:
            found = self._checked(token)
            seen = self._seen
            if len(seen) >= SEEN_MAX:
                seen.clear()
            seen[digest] = found
        return found

    def _checked(self, token: bytes) -> SignedOwner:
        """Return what a token says, if it is valid. Raises NotAllowed."""
        if len(token) > TOKEN_BYTES_MAX:
            _refuse(f"it has more than {TOKEN_BYTES_MAX} bytes")
        try:
            key = self._key_of(self._jwt.get_unverified_header(token))
            claims = self._jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm_name],
                issuer=self._http.jwt_issuer,
                audience=self._http.jwt_audience,
                leeway=_LEEWAY_S,
                options={"require": [*_CLAIMS, self._http.jwt_name]},
            )
        except self._jwt.PyJWTError as error:
            _refuse(str(error).removesuffix("."))
        name, groups = claims[self._http.jwt_name], claims.get("groups", ())
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
            _refuse(f"its {self._http.jwt_name} is no name")
        if not name.isprintable() or not isinstance(groups, list | tuple):
            _refuse("its name or its groups have another form")
        named = tuple(one for one in groups if isinstance(one, str) and one.isprintable())
        return SignedOwner(name, named[:GROUPS_MAX], float(claims["exp"]))

    def _key_of(self, header: Mapping[str, object]) -> "PyJWK":
        """Return the key of a token by its header. Raises NotAllowed."""
        id = header.get("kid", "")
        key = self._keys.get(id) if isinstance(id, str) else None
        if key is None:
            # the provider may have a new one
            self._due_s = min(self._due_s, self._asked_s + FETCH_SOON_S)
            _refuse("its key is not one of http.jwt_keys")
        if header.get("alg") != key.algorithm_name:
            _refuse(f"its key is for {key.algorithm_name}")
        return key


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: keys come from where the operator has said."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, *rest: object
    ) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(_NoRedirect)


def signed_tokens(http: HttpSettings) -> SignedTokens | None:
    """Return the check of tokens; None where none are accepted. Raises ConfigError."""
    return SignedTokens(http) if http.jwt_keys else None


def _refuse(why: str) -> NoReturn:
    raise NotAllowed(f"the token is not valid here: {why}.", hint=_HINT)
