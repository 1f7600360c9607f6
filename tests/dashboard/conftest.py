"""One browser a module, one page a test."""

from collections.abc import Iterator

import pytest

from tests.dashboard.browser import Chromium, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as started:
        yield started


@pytest.fixture
def page(browser: Chromium) -> Iterator[Page]:
    opened = browser.page()
    yield opened
    opened.close()
