"""A small service with a dashboard, and what its tests do with its guards and with its page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastapi import FastAPI, Request

from seawall import Breaker, Bulkhead, Guard, RateLimit, Rejected, Retry, Timeout
from seawall.dashboard import Dashboard
from tests.redis.support import free_port
from tests.web.support import serve

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT: Final = Path(__file__).resolve().parents[2]
HOSTILE: Final = "<img src=x onerror=window.hacked=1>"
OPERATOR: Final = "ann"


class Posted(NamedTuple):
    """A request that was to change something, as it arrived."""

    path: str
    origin: str | None
    cookie: bool
    """Whether the operator's cookie came with it."""


class Service:
    """Three guards, one with a name that means harm, and the dashboard over them."""

    def __init__(self) -> None:
        self.payments = Guard(
            "payments",
            Retry(on=(ConnectionError,), attempts=2, backoff=0),
            Breaker(consecutive=5, break_for=60),
            Timeout(2.0, sync="cooperative"),
        )
        self.search = Guard("search", RateLimit("1000/s"), Bulkhead(20))
        self.hostile = Guard(
            HOSTILE, Breaker(consecutive=5, break_for=60), Timeout(1.0, sync="cooperative")
        )
        self.posted: list[Posted] = []
        self.url = ""
        self._thread = ThreadPoolExecutor(1)

    def call(self, guard: Guard, times: int = 1, *, well: bool = True) -> None:
        """Call through `guard` and let each call go well or badly.

        In a thread: in the test's own Playwright has an event loop running.
        """
        self._thread.submit(self._call, guard, times, well=well).result(10)

    def _call(self, guard: Guard, times: int, *, well: bool) -> None:
        def dependency() -> None:
            if not well:
                raise ConnectionError("the vendor is down")

        for _ in range(times):
            try:
                guard.call(dependency)
            except (ConnectionError, Rejected):
                pass

    def breaker(self) -> str:
        """Return the state of the breaker of `payments`."""
        (found,) = [policy for policy in self.payments.policies if isinstance(policy, Breaker)]
        return found.state

    def close(self) -> None:
        self._thread.shutdown()
        for guard in (self.payments, self.search, self.hostile):
            guard.close()


def _who(visit: Any) -> str | None:
    return OPERATOR if visit.cookies.get("who") == OPERATOR else None


@contextmanager
def running(
    *, port: int = 0, dashboard: type[Dashboard] = Dashboard, **options: Any
) -> Iterator[Service]:
    """Serve one; its dashboard is below /seawall, and whoever has the cookie is the operator.

    With `port`, it is where another one was before.
    """
    service = Service()
    made = dashboard(local=True, operate=_who, every=0.2, pod="pod-1", **options)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with made:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.middleware("http")
    async def note(request: Request, call_next: Any) -> Any:
        if request.method == "POST":
            cookie = request.cookies.get("who") == OPERATOR
            origin = request.headers.get("origin")
            service.posted.append(Posted(request.url.path, origin, cookie))
        return await call_next(request)

    app.mount("/seawall", made)
    try:
        with _serve_at(app, port) if port else serve(app) as base:
            service.url = f"{base}/seawall/"
            yield service
            made.end_streams()
    finally:
        service.close()


@contextmanager
def _serve_at(app: Any, port: int) -> Iterator[str]:
    import uvicorn

    config = uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, name="uvicorn")
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def running_demo(*arguments: str) -> Iterator[str]:
    """Run the demo as its command does; give where its page is."""
    command = [sys.executable, "-m", "seawall_demo", *arguments, "--no-browser"]
    command += ["--port", str(free_port())]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(  # noqa: S603 - our own program
        command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    said: list[str] = []
    begun = threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                said.append(line)
                if "http://" in line:
                    begun.set()
        begun.set()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        begun.wait(30)
        found = re.search(r"http://\S+", "".join(said))
        assert found, "".join(said)
        yield found[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0, "".join(said)
    finally:
        if process.poll() is None:
            process.terminate()  # it takes its processes with it
            process.wait(15)
        listener.join(5)


def as_operator(page: Page) -> None:
    """Give the page's browser the cookie of who may act, and load it again."""
    page.context.add_cookies([{"name": "who", "value": OPERATOR, "url": page.url}])
    page.reload(wait_until="domcontentloaded")


# --- The page ---


def band(page: Page, guard: str) -> Any:
    """Return the part of the page about a guard."""
    return page.locator(".band").filter(has=page.get_by_role("heading", name=guard, exact=True))


def breaker_of_payments(page: Page) -> Any:
    """Return the breaker in the stack of that guard."""
    return band(page, "payments").locator(".layer").filter(has_text="Breaker")


def until_live(page: Page) -> None:
    """Wait until the page has heard of the service."""
    page.locator("#live[data-tone=ok]").wait_for()
    page.locator(".band").first.wait_for()


def focused(page: Page) -> dict[str, Any]:
    """Tell what has the focus, and whether one sees that it has."""
    found: dict[str, Any] = page.evaluate(
        """() => {
            const it = document.activeElement, style = getComputedStyle(it);
            return {
                tag: it.tagName, id: it.id, classes: it.className,
                name: it.getAttribute('aria-label') || it.textContent.trim(),
                visible: it.matches(':focus-visible')
                    && ((style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1)
                        || style.boxShadow !== 'none'),
            };
        }"""
    )
    return found


def sideways(page: Page) -> list[str]:
    """Return what makes the page wider than the screen; nothing if one need not scroll sideways."""
    found: list[str] = page.evaluate(
        """() => {
            const room = document.documentElement.clientWidth;
            if (document.documentElement.scrollWidth <= room) return [];
            return [...document.body.querySelectorAll('*')]
                .filter((it) => it.getBoundingClientRect().right > room + 1)
                .map((it) => it.tagName + '.' + it.getAttribute('class'));
        }"""
    )
    return found
