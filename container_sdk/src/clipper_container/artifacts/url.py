"""URLs of models: `s3://bucket/key`, `gs://bucket/key`, `https://host/path`, `pvc://claim/path`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from clipper_container.artifacts.errors import PullError

SCHEMES = ("s3", "gs", "https", "http", "pvc")
PVC_FOLDER = "/mnt/pvc"  # volumes are mounted at /mnt/pvc/CLAIM
URL_CHARS_MAX = 2000
_HEX = re.compile(r"[0-9a-f]{64}")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def is_url(text: object) -> bool:
    """Return whether a model is named by a URL that can be pulled."""
    return isinstance(text, str) and text.partition("://")[0] in SCHEMES and "://" in text


@dataclass(frozen=True, slots=True)
class ArtifactUrl:
    """The parsed URL of a model.

    plain: without its fragment. scheme: one of SCHEMES. place: bucket, host with port, or claim.
    key: decoded path below it. is_folder: the URL ends in a slash. sha256, etag: what the fragment
    says that the content must have, `#sha256=HEX&etag=TEXT`; empty: it does not.
    """

    plain: str
    scheme: str
    place: str
    key: str
    is_folder: bool
    sha256: str = ""
    etag: str = ""

    @classmethod
    def parse(cls, text: str, sha256: str = "") -> ArtifactUrl:
        """Parse a URL. sha256: as if it were in the fragment. Raises: PullError for a URL that is
        not allowed; the text of the error hides a password.
        """
        parts = urlsplit(text)
        plain = text.partition("#")[0]
        if "@" in parts.netloc:
            plain = f"{parts.scheme}://***@{parts.netloc.rpartition('@')[2]}{parts.path}"
            raise PullError(
                plain,
                "it has a password, and URLs are stored and shown",
                "Put credentials into the environment (docs/models.md, Artifacts).",
            )
        if parts.query:
            raise PullError(
                plain.partition("?")[0],
                "a query (?...) may hold a credential, and URLs are stored and shown",
                "Leave it out, and put credentials into the environment.",
            )
        if len(text) > URL_CHARS_MAX:
            raise PullError(f"{plain[:60]}...", f"it has more than {URL_CHARS_MAX} characters")
        pins = _pins(plain, parts.fragment)
        if sha256 and pins.setdefault("sha256", sha256) != sha256:
            raise PullError(plain, "its fragment has another sha256 than the argument")
        key = unquote(parts.path).strip("/")
        if parts.scheme not in SCHEMES or not parts.netloc or not key:
            raise PullError(
                plain, "it names no file", "Write s3://BUCKET/PATH, gs://, https:// or pvc://."
            )
        if any(part in ("", ".", "..") for part in key.split("/")) or not key.isprintable():
            raise PullError(plain, "its path has an empty part, '.', '..' or a control character")
        if "sha256" in pins and not _HEX.fullmatch(pins["sha256"]):
            raise PullError(plain, "its sha256 is not 64 hexadecimal digits", "Run: sha256sum FILE")
        if parts.scheme == "http" and "sha256" not in pins:
            raise PullError(
                plain,
                "http:// is not encrypted, so its content needs a sha256",
                "Use https://, or add #sha256=HEX.",
            )
        if parts.scheme == "pvc" and not _CLAIM.fullmatch(parts.netloc):
            raise PullError(plain, f"{parts.netloc!r} is not the name of a PersistentVolumeClaim")
        return cls(plain, parts.scheme, parts.netloc, key, parts.path.endswith("/"), **pins)

    @property
    def name(self) -> str:
        """Return a file name with the URL's ending."""
        return re.sub(r"[^\w.+-]", "_", self.key.rpartition("/")[2], flags=re.ASCII)[-120:]

    @property
    def text(self) -> str:
        """Return the URL with its fragment."""
        pins = {"sha256": self.sha256, "etag": self.etag}
        pinned = "&".join(f"{name}={value}" for name, value in pins.items() if value)
        return f"{self.plain}#{pinned}" if pinned else self.plain

    @property
    def mounted(self) -> str:
        """Return where the file of a `pvc://` URL is mounted; "" for others."""
        return f"{PVC_FOLDER}/{self.place}/{self.key}" if self.scheme == "pvc" else ""


def _pins(plain: str, fragment: str) -> dict[str, str]:
    pins: dict[str, str] = {}
    for part in filter(None, fragment.split("&")):
        name, _, value = part.partition("=")
        if name not in ("sha256", "etag") or not value:
            raise PullError(plain, f"its fragment {part[:40]!r} is not sha256=HEX")
        pins[name] = value.lower() if name == "sha256" else value
    return pins
