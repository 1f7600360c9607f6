"""Tokens of an identity provider (JWT): which are accepted, whose they are, and new keys."""

import base64
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("jwt", reason="pip install 'clipper-serving[jwt]'")

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

import clipper
from clipper.config import load
from clipper.credentials.credential_file import line_of, new_key
from clipper.credentials.key_limits import KeyLimits
from clipper.errors import ConfigError, NotAllowed
from clipper.frontend.auth import signed_tokens
from clipper.frontend.auth.signed_tokens import SignedTokens
from clipper.settings.http import HttpSettings
from tests.frontend.conftest import QUICK, ask, total

ISSUER: Final = "https://login.example"
AUDIENCE: Final = "clipper"
INPUT: Final = {"input": [1, 2, 3]}


class Provider:
    """An identity provider: its keys by id, which it publishes, and tokens that it signs."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {
            "rsa": rsa.generate_private_key(public_exponent=65537, key_size=2048),
            "ec": ec.generate_private_key(ec.SECP256R1()),
        }

    def published(self, *ids: str) -> bytes:
        """Return the JWKS with these keys."""
        found = []
        for id in ids or self.keys:
            public = self.keys[id].public_key()
            is_rsa = isinstance(self.keys[id], rsa.RSAPrivateKey)
            kind = jwt.algorithms.RSAAlgorithm if is_rsa else jwt.algorithms.ECAlgorithm
            found.append({**kind.to_jwk(public, as_dict=True), "kid": id, "use": "sig"})
        return json.dumps({"keys": found}).encode()

    def token(self, id: str = "rsa", header: Any = None, **claims: Any) -> str:
        """Return a token that one of the keys has signed; a claim that is None is left out."""
        said = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "exp": time.time() + 600}
        kept = {key: value for key, value in {**said, **claims}.items() if value is not None}
        algorithm = "RS256" if isinstance(self.keys[id], rsa.RSAPrivateKey) else "ES256"
        headers = {"kid": id, **(header or {})}
        return str(jwt.encode(kept, self.keys[id], algorithm, headers=headers))


@pytest.fixture(scope="module")
def provider() -> Provider:
    return Provider()


def settings(keys: str, **more: Any) -> HttpSettings:
    given = {"api_keys_file": "k", "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, **more}
    return HttpSettings(jwt_keys=keys, **given)


@pytest.fixture
def tokens(provider: Provider, tmp_path: Path) -> SignedTokens:
    (tmp_path / "jwks").write_bytes(provider.published())
    return SignedTokens(settings(str(tmp_path / "jwks")))


def owner_of(tokens: SignedTokens, token: str) -> Any:
    return tokens.owner(f"Bearer {token}".encode())


@pytest.mark.parametrize("id", ["rsa", "ec"])
def test_a_token_names_its_owner(tokens: SignedTokens, provider: Provider, id: str) -> None:
    token = provider.token(id, aud=["other", AUDIENCE], groups=["web", 3, "a\nb"])
    for _ in range(2):  # the second is known
        owner = owner_of(tokens, token)
        assert (owner.name, owner.groups) == ("ann", ("web",))


def unsigned(provider: Provider) -> str:
    return str(jwt.encode(jwt.decode(provider.token(), options=NO_CHECK), None, "none"))


def signed_by_a_public_key(provider: Provider) -> str:
    """Return what a library accepts that takes the algorithm of a token."""
    said = provider.token().split(".")[1]
    secret = (
        provider.keys["rsa"]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"rsa"}').rstrip(b"=").decode()
    code = base64.urlsafe_b64encode(hmac.digest(secret, f"{head}.{said}".encode(), "sha256"))
    return f"{head}.{said}.{code.rstrip(b'=').decode()}"


NO_CHECK: Final = {"verify_signature": False}
WRONG: Final[dict[str, Callable[[Provider], str]]] = {
    "has ended": lambda its: its.token(exp=time.time() - 60),
    "is not valid yet": lambda its: its.token(nbf=time.time() + 600),
    "has no end": lambda its: its.token(exp=None),
    "has no issuer": lambda its: its.token(iss=None),
    "is of another issuer": lambda its: its.token(iss="https://other.example"),
    "is for others": lambda its: its.token(aud="other"),
    "is for nobody": lambda its: its.token(aud=None),
    "has no name": lambda its: its.token(sub=None),
    "has an empty name": lambda its: its.token(sub=""),
    "has a name of two lines": lambda its: its.token(sub="a\nb"),
    "is of an unknown key": lambda its: its.token(header={"kid": "new"}),
    "says another key": lambda its: its.token(header={"kid": "ec"}),
    "is of a stranger": lambda its: Provider().token(),
    "is not signed": unsigned,
    "is signed by what is public": signed_by_a_public_key,
    "is changed": lambda its: its.token()[:-6] + "AAAAAA",
    "is too long": lambda its: its.token(more="x" * 9000),
    "is no JSON": lambda its: "a.b.c",
}


@pytest.mark.parametrize("why", WRONG)
@pytest.mark.filterwarnings("ignore")  # of the library, about keys of other algorithms
def test_a_token_that_is_refused(tokens: SignedTokens, provider: Provider, why: str) -> None:
    token = WRONG[why](provider)
    with pytest.raises(NotAllowed, match="the token is not valid here") as raised:
        owner_of(tokens, token)
    assert token not in str(raised.value)


@pytest.mark.parametrize("value", [b"", b"Bearer ck_key", b"Basic a.b.c", b"Bearer"])
def test_what_is_no_token_is_left_to_the_keys(tokens: SignedTokens, value: bytes) -> None:
    assert tokens.owner(value) is None


def test_a_token_that_was_seen_ends_too(
    tokens: SignedTokens, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, now = provider.token(), time.time()
    owner = owner_of(tokens, token)
    asked: list[bytes] = []
    monkeypatch.setattr(tokens, "_checked", lambda token: asked.append(token) or owner)
    assert owner_of(tokens, token) == owner
    assert not asked, "its signature was checked"
    monkeypatch.setattr(signed_tokens, "wall_time_us", lambda: round((now + 700) * 1e6))
    assert owner_of(tokens, token) == owner
    assert len(asked) == 1, "but not for longer than it holds"


def test_new_keys_of_a_file_hold_at_once(
    tokens: SignedTokens, provider: Provider, tmp_path: Path
) -> None:
    token = provider.token("rsa")
    assert owner_of(tokens, token)
    (tmp_path / "jwks").write_text("{}")
    assert not tokens.refresh(), "what is wrong changes nothing"
    assert owner_of(tokens, token)
    (tmp_path / "jwks").write_bytes(provider.published("ec"))
    assert tokens.refresh()
    with pytest.raises(NotAllowed, match="not one of"):
        owner_of(tokens, token)
    assert owner_of(tokens, provider.token("ec"))


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "AA"}]}', '{"keys": [{}]}'],
)
def test_what_are_no_keys(tmp_path: Path, text: str) -> None:
    (tmp_path / "jwks").write_text(text)
    with pytest.raises(ConfigError, match="has no keys of tokens"):
        SignedTokens(settings(str(tmp_path / "jwks")))
    with pytest.raises(ConfigError, match="cannot be read"):
        SignedTokens(settings(str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"jwt_issuer": ""}, "http.jwt_issuer"),
        ({"jwt_audience": ""}, "http.jwt_audience"),
        ({"api_keys_file": ""}, "http.api_keys_file"),
        ({"jwt_keys": "http://login.example/keys"}, "https://"),
        ({"jwt_keys": "ftp://login.example/keys"}, "https://"),
    ],
)
def test_settings_that_do_not_fit(more: dict[str, str], why: str) -> None:
    http = {"jwt_keys": "f", "api_keys_file": "k", "jwt_issuer": "i", "jwt_audience": "a", **more}
    with pytest.raises(ConfigError, match=why):
        load(env={}, http=http)


class _Keys(BaseHTTPRequestHandler):
    """Publishes keys at /keys, and leads elsewhere from /moved."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked += 1
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("Location", "/keys")
        self.end_headers()
        self.wfile.write(server.text)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def publisher() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Keys) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        server.asked, server.text = 0, b""  # type: ignore[attr-defined]
        yield server
        server.shutdown()
        thread.join()


def test_keys_of_a_url_are_read_again(
    provider: Provider, publisher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{publisher.server_port}/keys"
    tokens = SignedTokens(settings(url))  # none are published yet
    with pytest.raises(NotAllowed):
        owner_of(tokens, provider.token("rsa"))
    now = time.monotonic
    publisher.text = provider.published("rsa")
    assert not tokens.refresh(), "so soon after a failure"
    monkeypatch.setattr(time, "monotonic", lambda: now() + 11)
    assert tokens.refresh()
    assert owner_of(tokens, provider.token("rsa"))
    publisher.text = provider.published()
    monkeypatch.setattr(time, "monotonic", lambda: now() + 40)
    assert not tokens.refresh(), "they hold for a while"
    with pytest.raises(NotAllowed):
        owner_of(tokens, provider.token("ec"))  # it makes them due
    assert tokens.refresh()
    assert owner_of(tokens, provider.token("ec"))
    assert publisher.asked == 3
    publisher.text = b"x" * (signed_tokens.KEYS_BYTES_MAX + 1)
    monkeypatch.setattr(time, "monotonic", lambda: now() + 1000)
    assert not tokens.refresh()
    assert owner_of(tokens, provider.token("ec")), "the others stay"


def test_keys_come_from_nowhere_else(provider: Provider, publisher: Any) -> None:
    publisher.text = provider.published()
    tokens = SignedTokens(settings(f"http://127.0.0.1:{publisher.server_port}/moved"))
    with pytest.raises(NotAllowed):
        owner_of(tokens, provider.token("rsa"))
    assert publisher.asked == 1


def test_tokens_and_keys_open_every_door_alike(provider: Provider, tmp_path: Path) -> None:
    limits = KeyLimits.of("3/h", ["total"], ["web"])
    (tmp_path / "keys").write_text(line_of("shop", new_key(), "", limits))
    (tmp_path / "jwks").write_bytes(provider.published())
    http = {
        "address": "127.0.0.1:0",
        "api_keys_file": str(tmp_path / "keys"),
        "jwt_keys": str(tmp_path / "jwks"),
        "jwt_issuer": ISSUER,
        "jwt_audience": AUDIENCE,
    }
    with clipper.start(http=http, **QUICK) as server:
        server.deploy("sum", total, input="f64[3]")
        for name in ("total", "other"):
            server.app(name, models=["sum"], slo_ms=10_000)

        def status(token: str, application: str) -> int:
            shown = {"Authorization": f"Bearer {token}"}
            path = f"/api/{application}/predict"
            return ask(server.http_address, "POST", path, INPUT, shown).status

        shop, ann = provider.token(sub="shop"), provider.token("ec")
        assert [status(ann, "other") for _ in range(5)] == [200] * 5, "it has no limits"
        assert [status(shop, "total") for _ in range(4)] == [200, 200, 200, 429]
        assert status(shop, "other") == 403
        assert status(provider.token(exp=time.time() - 60), "total") == 401
