"""Pulling over https:// from a web server that breaks off, redirects, and asks for a password."""

import base64
import hashlib
import os
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from clipper_container.artifacts import PullError
from tests.artifacts.conftest import Puller
from tests.frontend.certificates import Authority
from tests.threads import join

CONTENT = os.urandom(5 << 20)
PASSWORD = "a-password-of-tests"


class Web(BaseHTTPRequestHandler):
    """A web server: `/cut.onnx` breaks off, `/down.onnx` redirects to http://, `/away.onnx` to
    another host, and `/mine.onnx` needs a password."""

    cuts = 0
    ranges: ClassVar[list[str]] = []
    logins: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        if self.path in ("/down.onnx", "/away.onnx"):
            host = self.headers["Host"].replace("localhost", "127.0.0.1")
            scheme = "http" if self.path == "/down.onnx" else "https"
            self.send_response(302)
            self.send_header("Location", f"{scheme}://{host}/open.onnx")
            self.end_headers()
            return
        login = self.headers.get("Authorization", "")
        Web.logins.append(f"{self.path} {login}")
        if self.path == "/mine.onnx" and login != expected():
            self.send_error(401)
            return
        if self.path == "/none.onnx":
            self.send_error(404)
            return
        begin = int(self.headers.get("Range", "bytes=0-")[6:-1])
        Web.ranges.append(self.headers.get("Range", ""))
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - begin))
        self.send_header("ETag", '"one"')
        self.end_headers()
        body = CONTENT[begin:]
        if self.path == "/cut.onnx" and Web.cuts and len(Web.ranges) > 1:  # the first only looks
            Web.cuts -= 1
            body = body[: 2 << 20]
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def expected() -> str:
    return "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.sign("web"))
    Web.cuts = 3  # two transfers, and a look at the headers between them
    Web.ranges, Web.logins = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients close early
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("SSL_CERT_FILE", authority.ca)
    yield f"https://localhost:{server.server_port}"
    server.shutdown()
    join(thread)
    server.server_close()


def test_a_transfer_goes_on_where_it_broke_off(web: str, pulls: Puller) -> None:
    found = pulls(f"{web}/cut.onnx")
    assert found.sha256 == hashlib.sha256(CONTENT).hexdigest()
    assert [line for line in Web.ranges if line] == [f"bytes={2 << 20}-", f"bytes={4 << 20}-"]
    ranges_before = len(Web.ranges)
    assert pulls(f"{web}/cut.onnx").path == found.path
    assert len(Web.ranges) == ranges_before + 1  # for the ETag


def test_what_a_server_refuses(
    web: str, pulls: Puller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PullError, match=r"answers 404 Not Found. Check the URL: curl -I https"):
        pulls(f"{web}/none.onnx")
    with pytest.raises(PullError, match="a redirect to http://"):
        pulls(f"{web}/down.onnx")
    with pytest.raises(PullError, match=r"answers 401 .*into NETRC"):
        pulls(f"{web}/mine.onnx")
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine localhost login me password {PASSWORD}\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert pulls(f"{web}/mine.onnx").path.read_bytes() == CONTENT
    del Web.logins[:]
    assert pulls(f"{web}/away.onnx").path.read_bytes() == CONTENT
    assert {*Web.logins} == {"/open.onnx "}  # the password stays with its host
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(PullError, match=r"certificate is not trusted.*SSL_CERT_FILE"):
        pulls(f"{web}/cut.onnx")
