"""Three real servers on loopback, one of which turns bad: its share falls, and comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from threading import Event, Thread

import httpx
import pytest

from seawall import Hedge, Retry, transient
from seawall.clients.httpx import AsyncGuardedTransport, GuardedTransport
from seawall.clients.upstreams import HealthCheck, Outliers, Upstreams
from seawall.clock import current_clock
from tests.support import new_guard

pytestmark = pytest.mark.alone


class Site:
    """A server that answers well, with 500, slowly, or by hanging up."""

    def __init__(self) -> None:
        self.mood = "well"
        self.over = Event()
        self.served = 0
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                ready = self.path == "/health/ready"
                site.served += not ready
                if site.mood == "refusing":
                    return
                if site.mood == "slow" and not ready:
                    site.over.wait(0.25)
                self.send_response(500 if site.mood == "failing" else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False  # so that closing joins them
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@contextmanager
def three_sites() -> Iterator[list[Site]]:
    sites = [Site() for _ in range(3)]
    try:
        yield sites
    finally:
        for site in sites:
            site.close()


def requests(client: httpx.Client, times: int) -> Counter:
    """Make requests one after another, all of which must succeed; count them by host."""
    counts: Counter = Counter()
    for _ in range(times):
        response = client.get("http://vendor/")
        assert response.status_code == 200
        counts[response.extensions["seawall.host"]] += 1
    return counts


def until_asked(client: httpx.Client, sites: list[Site]) -> None:
    """Make requests until each site has answered five of them."""
    clock = current_clock()
    late = clock.now() + 10.0
    counts: Counter = Counter()
    while min(counts[site.url] for site in sites) < 5:
        counts += requests(client, 5)
        assert clock.now() < late, counts


@pytest.mark.parametrize("mood", ["failing", "refusing", "slow"])
def test_a_bad_host_loses_its_share_and_gets_it_back(mood):
    """Users see no error; the bad host is asked next to never, and again when it is well."""
    with three_sites() as sites:
        bad = sites[0]
        upstreams = Upstreams(
            "vendor",
            [site.url for site in sites],
            half_life=0.2,
            outliers=Outliers(consecutive=3, eject_for=1.0, max_eject_for=1.0),
            rng=Random(5),
        )
        guard = new_guard(Retry(on=transient, attempts=3, backoff=0.001))
        with httpx.Client(transport=GuardedTransport(guard, upstreams.transport())) as client:
            until_asked(client, sites)
            bad.mood = mood
            served = bad.served
            requests(client, 100)
            assert bad.served - served <= 15  # a third would be its share
            bad.mood = "well"
            bad.over.set()
            until_asked(client, sites)
        assert upstreams.snapshot()["in_flight"] == 0


def test_checks_keep_users_from_finding_out():
    """A host that fails its checks is out of service before any request has failed."""
    health = HealthCheck(every=0.02, failures=2, successes=2)
    clock = current_clock()
    with (
        three_sites() as sites,
        Upstreams("vendor", [site.url for site in sites], health=health) as upstreams,
        httpx.Client(transport=upstreams.transport()) as client,
    ):
        bad = sites[0]

        def seen() -> dict:
            return upstreams.snapshot()["hosts"][bad.url]

        requests(client, 3)
        bad.mood = "failing"
        late = clock.now() + 10.0
        while seen()["state"] == "serving":
            assert clock.now() < late
        assert requests(client, 20)[bad.url] == 0
        assert seen()["failures"] == 0
        bad.mood = "well"
        late = clock.now() + 10.0
        while requests(client, 10)[bad.url] == 0:
            assert clock.now() < late


def test_a_hedge_gets_its_answer_from_another_host():
    """While one host is slow, the second request of a hedge is answered by another one."""

    async def main(sites: list[Site]) -> None:
        upstreams = Upstreams("vendor", [site.url for site in sites[:2]], rng=Random(1))
        guard = new_guard(Hedge(0.03, cap=1.0, burst=100))
        transport = AsyncGuardedTransport(guard, upstreams.transport())
        async with httpx.AsyncClient(transport=transport) as client:
            sites[0].mood = "slow"
            answers = [await client.get("http://vendor/") for _ in range(6)]
        assert {answer.extensions["seawall.host"] for answer in answers} == {sites[1].url}
        assert sites[0].served >= 1
        seen = upstreams.snapshot()
        assert seen["in_flight"] == 0
        assert seen["hosts"][sites[0].url]["failures"] == 0
        assert seen["hosts"][sites[0].url]["ejections"] == 0

    with three_sites() as sites:
        asyncio.run(main(sites))
