"""Models named by a URL: pulled into the cache of this host before they are packed."""

from collections.abc import Callable
from pathlib import PurePosixPath

from clipper.deploy.packages.artifact import ENDINGS
from clipper.errors import PullFailed
from clipper.types import PulledFrom
from clipper_container.artifacts import (
    ArtifactUrl,
    CachedArtifact,
    PullError,
    PullLimits,
    is_url,
    pull,
)

_STEP_PERCENT = 10
__all__ = ["PullLimits", "failed", "pod_url", "pulled", "source_of", "url_of"]


def url_of(thing: object, sha256: str = "") -> str:
    """Return the URL of a model, with its sha256 in the fragment; "" if it is not named by a URL.

    Raises: PullFailed for a URL that cannot be pulled, or whose file has no known ending.
    """
    if not is_url(thing):
        if sha256:
            raise PullFailed(
                "sha256= is for a model that is pulled from a URL.",
                hint="Write s3://BUCKET/PATH, gs://, https:// or pvc://.",
            )
        return ""
    try:
        url = ArtifactUrl.parse(str(thing), sha256)
    except PullError as error:
        raise failed(error) from None
    ending = PurePosixPath(url.key).suffix.lower()
    if ending not in ENDINGS and (url.scheme in ("https", "http") or ending in (".zip", ".tar")):
        raise PullFailed(
            f"{url.plain} has no ending of a model's file.",
            hint=f"Known are {', '.join(ENDINGS)}, and folders of MLflow in a bucket.",
        )
    return url.text


def pulled(url: str, limits: PullLimits, on_progress: Callable[[str], object]) -> CachedArtifact:
    """Return the files of a URL, in the cache until they are closed.

    on_progress: called with the progress, "40 %". May raise to give up. Raises: PullFailed.
    """
    last = ""

    def progress(done: int, total: int) -> None:
        nonlocal last
        if total > 0:
            text = f"{100 * done // total // _STEP_PERCENT * _STEP_PERCENT} %"
        else:
            text = f"{done >> 20} MiB"
        if text != last:
            last = text
            on_progress(text)

    try:
        return pull(ArtifactUrl.parse(url), limits, progress)
    except PullError as error:
        raise failed(error) from None


def pod_url(url: str, limits: PullLimits) -> str:
    """Return the URL that a pod pulls, with the sha256 of what is there now; it is pulled for that
    unless the URL says it. What is on a volume is checked only if the URL says its sha256.

    Raises: PullFailed.
    """
    text = url_of(url)
    parsed = ArtifactUrl.parse(text)
    if parsed.sha256 or parsed.scheme == "pvc":
        return text
    with pulled(text, limits, lambda done: None) as found:
        return f"{parsed.plain}#sha256={found.sha256}"


def source_of(url: str, found: CachedArtifact) -> PulledFrom:
    """Return the record of what was pulled."""
    return PulledFrom(ArtifactUrl.parse(url).plain, found.sha256, found.etag)


def failed(error: PullError) -> PullFailed:
    """Return the error of this package for one of the container SDK."""
    return PullFailed(f"cannot pull {error.url}: {error.cause}.", hint=error.hint)
