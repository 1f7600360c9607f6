"""The thread that follows the catalog: it cannot miss its stop, and an error is no end."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from clipper.errors import StoreError
from clipper.manage.following import CatalogFollower

LIMIT_S = 20.0


class FakeCatalog:
    """A fake catalog. It keeps the one listener that is told its changes."""

    def __init__(self) -> None:
        self.listener: Callable[[Any], None] = lambda view: None

    def on_change(self, listener: Callable[[Any], None]) -> Callable[[], None]:
        self.listener = listener
        return lambda: None


def ended(follower: CatalogFollower) -> bool:
    closing = threading.Thread(target=follower.stop)
    closing.start()
    closing.join(LIMIT_S)
    return not closing.is_alive()


def test_a_stop_at_any_moment_ends_the_thread() -> None:
    """The stop comes while the catalog is followed, and right when the thread goes to wait."""
    for _ in range(200):
        catalog, followed = FakeCatalog(), threading.Event()
        follower = CatalogFollower(catalog, followed.set)  # type: ignore[arg-type]
        follower.start()
        assert followed.wait(LIMIT_S)
        catalog.listener(None)
        assert ended(follower)


def test_a_stop_between_the_look_at_it_and_the_clear_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, goes_on = threading.Event(), threading.Event()
    known = threading.Event.is_set

    def is_set(event: threading.Event) -> bool:
        found = known(event)
        if threading.current_thread().name == "clipper-catalog-follower" and not found:
            looked.set()
            goes_on.wait(60)
        return found

    monkeypatch.setattr(threading.Event, "is_set", is_set)
    catalog, followed = FakeCatalog(), threading.Event()
    follower = CatalogFollower(catalog, followed.set)  # type: ignore[arg-type]
    follower.start()
    looked.wait(0.2)  # only where the thread looks at an event
    closing = threading.Thread(target=follower.stop)
    closing.start()
    closing.join(0.1)
    goes_on.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()


@pytest.mark.parametrize("error", [StoreError("away"), MemoryError(), KeyError("field")])
def test_the_catalog_is_followed_again_after_any_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipper.manage.following.AGAIN_S", 0.0)
    monkeypatch.setattr("clipper.manage.following.AGAIN_S_MAX", 0.0)
    calls, done = list[int](), threading.Event()

    def follow() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise error
        done.set()

    follower = CatalogFollower(FakeCatalog(), follow)  # type: ignore[arg-type]
    follower.start()
    assert done.wait(LIMIT_S)
    assert follower.health()[0].state in ("running", "degraded")
    assert ended(follower)
