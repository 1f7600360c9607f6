"""Pulls from web servers, with nothing but the standard library."""

from __future__ import annotations

import http.client
import netrc
import os
import ssl
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPMessage, HTTPResponse
from typing import IO, cast

from clipper_container.artifacts.errors import ContentChanged, Interrupted, PullError, shown
from clipper_container.artifacts.source import CHUNK_BYTES, STALL_S, RemoteFile
from clipper_container.artifacts.url import ArtifactUrl

_AGAIN = (408, 425, 429)


class WebSource:
    """Reads one `https://` URL. Names and passwords come from the file in the variable NETRC."""

    def __init__(self, url: ArtifactUrl) -> None:
        self._url = url
        self._opener = urllib.request.build_opener(_StayEncrypted())

    def files(self, most: int) -> Sequence[RemoteFile]:
        """Return the file, as the headers of the answer describe it."""
        if self._url.is_folder:
            raise PullError(
                self._url.plain,
                "a web server does not list folders",
                "Put the folder into a bucket, or name a file.",
            )
        with self._open({}) as answer:
            return [self._described(answer)]

    def _described(self, answer: HTTPResponse) -> RemoteFile:
        size = int(answer.headers.get("Content-Length") or -1)
        etag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        return RemoteFile("", self._url.key, size, etag)

    def read(self, file: RemoteFile, offset: int) -> tuple[int, Iterator[bytes]]:
        """Read from `offset` on if the server can, else from the start."""
        headers = {}
        if offset and file.etag and not file.etag.startswith("W/"):
            headers = {"Range": f"bytes={offset}-", "If-Range": file.etag}
        answer = self._open(headers)
        if answer.status == 206:
            begins = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")
            if begins[0] != str(offset):
                answer.close()
                raise Interrupted("the server answered with another range")
            return offset, _chunks(answer)
        if self._described(answer).etag != file.etag:
            answer.close()
            raise ContentChanged(f"{self._url.plain} changed meanwhile")
        return 0, _chunks(answer)

    def _open(self, headers: Mapping[str, str]) -> HTTPResponse:
        """Send a request; return the open answer."""
        try:
            request = urllib.request.Request(self._url.plain, headers={**headers, **self._login()})
            return cast(HTTPResponse, self._opener.open(request, timeout=STALL_S))
        except urllib.error.HTTPError as error:
            error.close()
            why = f"the server answers {error.code} {error.reason}"
            if error.code >= 500 or error.code in _AGAIN:
                raise Interrupted(why) from None
            hint = "Check the URL: curl -I " + self._url.plain
            if error.code in (401, 403):
                hint = "Put its name and password into a file, and the file's path into NETRC."
            raise PullError(self._url.plain, why, hint, error.code in (404, 410)) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise PullError(
                    self._url.plain,
                    f"its certificate is not trusted: {error.reason.verify_message}",
                    "Name the file of who signed it in SSL_CERT_FILE.",
                    is_final=False,
                ) from None
            raise Interrupted(shown(error)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Interrupted(shown(error)) from None

    def _login(self) -> dict[str, str]:
        place = os.environ.get("NETRC", "")
        if not place or self._url.scheme != "https":
            return {}
        try:
            known = netrc.netrc(place).authenticators(self._url.place.rpartition("@")[2])
            known = known or netrc.netrc(place).authenticators(self._url.place.partition(":")[0])
        except (OSError, netrc.NetrcParseError) as error:
            what = error.strerror if isinstance(error, OSError) else "it is not a netrc file"
            raise PullError(self._url.plain, f"cannot read NETRC: {what}", "", False) from None
        if known is None:
            return {}
        return {"Authorization": "Basic " + b64encode(f"{known[0]}:{known[2]}".encode()).decode()}


class _StayEncrypted(urllib.request.HTTPRedirectHandler):
    """Follows redirects; never from https to http, and takes no password to another host."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the next request, or refuse."""
        there = super().redirect_request(req, fp, code, msg, headers, newurl)
        if req.type == "https" and not newurl.startswith("https://"):
            raise urllib.error.HTTPError(req.full_url, 403, "a redirect to http://", headers, fp)
        if there is not None and there.host != req.host:
            there.remove_header("Authorization")
        return there


def _chunks(answer: HTTPResponse) -> Iterator[bytes]:
    with answer:
        while True:
            try:
                chunk = answer.read(CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise Interrupted(shown(error)) from None
            if not chunk:
                return
            yield chunk
