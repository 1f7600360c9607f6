"""clipper_core.tls: which OpenSSL is used, and contexts that cannot be made."""

import ssl
from pathlib import Path

import pytest

from clipper.frontend.http.tls import SecuredBy, secured_by
from clipper.metrics import TlsCounts
from clipper.settings.http import TlsFiles
from clipper.tls import Certificate
from clipper_core.tls import tls_context
from clipper_core.tls.tls_context import TlsContext, look_up
from tests.frontend.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def test_the_library_is_that_of_the_interpreter() -> None:
    assert tls_context.version() == ssl.OPENSSL_VERSION


def test_a_library_without_the_functions_is_not_used() -> None:
    """The library that is in use stays."""
    assert look_up(["/nothing.so"]) == "/nothing.so lacks OpenSSL"
    assert look_up(["libm.so.6"]) == "libm.so.6 lacks OpenSSL_version"
    assert "lacks OpenSSL; " in look_up(["/nothing.so", "libm.so.6"])
    assert tls_context.version() == ssl.OPENSSL_VERSION


def pem_of(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.mark.parametrize("wrong", ["certificate", "key", "other key", "CA of clients"])
def test_files_that_are_not_in_order(authority: Authority, wrong: str) -> None:
    cert, key = authority.sign("one")
    like = Certificate(TlsFiles(cert, key, "")).context
    pem = {"certificate": pem_of(cert), "key": pem_of(key), "CA of clients": b""}
    pem |= {wrong: b"nothing"} if wrong != "other key" else {"key": pem_of(authority.sign("b")[1])}
    with pytest.raises(ssl.SSLError, match=wrong.removeprefix("other ")):
        TlsContext(pem["certificate"], pem["key"], pem["CA of clients"], like)


def test_where_the_core_cannot_python_speaks(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(TlsFiles(*authority.sign("one"), ""))
    counts = TlsCounts("query")
    assert secured_by((certificate, counts)) is not None
    monkeypatch.setattr(certificate, "pem", certificate.pem._replace(key=b"nothing"))
    with pytest.raises(OSError, match="key"):
        SecuredBy(certificate, counts)
    assert secured_by((certificate, counts)) is None
    assert "TLS is spoken by Python" in caplog.text
