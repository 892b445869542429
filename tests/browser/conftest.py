"""A real browser for all of these tests. Without one they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import pytest

from seawall import registry

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE: Final = Path(__file__).parent
NAMES: Final = ("chromium", "chromium-browser", "google-chrome")  # as in ./dev
FLAGS: Final = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)


def missing_browser() -> str:
    """Say what these tests lack here; nothing if they can run."""
    if find_spec("playwright") is None:
        return "no playwright: run ./dev test, which installs it"
    if not any(map(shutil.which, NAMES)):
        return "no browser: run ./dev browser, which finds or installs chromium"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the machine to the browser; leave the tests out where there is none."""
    missing = missing_browser()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.alone)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(autouse=True)
def _nothing_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show only what the test itself has made: what others left waits for the collector."""
    monkeypatch.setattr(registry, "_entries", WeakKeyDictionary())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return a headless browser with a fresh profile.

    One for each file: while Playwright runs, no other test of this process can run an event loop.
    """
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, NAMES)))
    with sync_playwright() as playwright:
        # Its own sandbox needs rights that containers lack; these pages are ours, on loopback.
        made = playwright.chromium.launch(
            executable_path=program, args=list(FLAGS), chromium_sandbox=False
        )
        yield made
        made.close()


class Complaints(list[str]):
    """What a page complained of: on its console, by an error, or by a request that failed."""

    expected = False
    """Set by a test that does what a browser complains of."""

    def watch(self, page: Page) -> None:
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.append(f"error: {error}"))
        page.on("requestfailed", self._failed)
        page.on("response", self._answered)

    def _heard(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.append(f"{message.type}: {message.text}")

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page was left while it was listening
            self.append(f"failed: {request.url}: {request.failure}")

    def _answered(self, response: Any) -> None:
        if response.status >= 400:
            self.append(f"answered {response.status}: {response.url}")


@pytest.fixture
def complaints() -> Complaints:
    """Return what the pages of this test complained of."""
    return Complaints()


@pytest.fixture
def open_page(browser: Browser, complaints: Complaints) -> Iterator[Callable[..., Page]]:
    """Return a function that opens a URL in a page of its own; it takes what a context takes.

    The test fails if a page complains and that is not expected.
    """
    contexts: list[Any] = []

    def opening(url: str, **options: Any) -> Page:
        options = {"viewport": {"width": 1440, "height": 900}, **options}
        contexts.append(browser.new_context(**options))
        contexts[-1].set_default_timeout(30_000)  # a busy machine is no failure
        page: Page = contexts[-1].new_page()
        complaints.watch(page)
        page.goto(url, wait_until="domcontentloaded")
        return page

    yield opening
    for context in contexts:
        context.close()
    assert complaints == [] or complaints.expected
