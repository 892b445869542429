"""Several hosts behind one name, in virtual time: who is asked, and who is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
from collections import Counter
from random import Random

import httpx
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, CircuitOpen, Guard, Hedge, Retry, Timeout, subscribe, transient
from seawall.clients import httpx as guarded_httpx
from seawall.clients import httpx2 as guarded_httpx2
from seawall.clients.upstreams import HealthCheck, Outliers, Upstreams, UpstreamTransport
from seawall.clients.upstreams.host_set import HostSet
from seawall.clients.upstreams.picks import Pick
from seawall.clock import VirtualClock
from seawall.events import HostEjected, HostRestored
from seawall.models.outliers import Outliers as OutlierSettings
from seawall.runtime.layers import Wait
from seawall.testing import run_virtual
from tests.support import SEEDS, falsified, let_pass, new_guard

URLS = ["http://one:1", "http://two:2", "http://three:3"]
LIBRARIES = [(httpx, guarded_httpx), (httpx2, guarded_httpx2)]


def new_upstreams(hosts=URLS, **settings) -> Upstreams:
    return Upstreams("vendor", hosts, rng=Random(7), **settings)


class Farm:
    """Hosts by netloc: an answer is a status, an error to raise, or (seconds, status)."""

    def __init__(self, library=httpx, **answers) -> None:
        self.library = library
        self.answers = answers
        self.seen: list[str] = []
        self.requests = []

    def _answer(self, request):
        name = request.url.host
        self.seen.append(name)
        self.requests.append(request)
        answer = self.answers.get(name, 200)
        return answer if isinstance(answer, tuple) else (0.0, answer)

    def _end(self, answer):
        if isinstance(answer, int):
            return self.library.Response(answer, text="hello")
        raise answer

    def handle_request(self, request):
        _, answer = self._answer(request)
        return self._end(answer)

    async def handle_async_request(self, request):
        seconds, answer = self._answer(request)
        if seconds:
            await let_pass(seconds)
        return self._end(answer)

    def close(self):
        self.answers["closed"] = 0

    async def aclose(self):
        self.close()

    __enter__ = __exit__ = lambda self, *_: self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.close()


def states(upstreams) -> list[str]:
    return [host["state"] for host in upstreams.snapshot()["hosts"].values()]


def told() -> tuple[list, object]:
    events = []
    return events, subscribe(events.append, HostEjected, HostRestored)


# --- Addresses ---


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_a_request_goes_to_a_host_and_keeps_its_path(library):
    """Scheme, host and port are the host's, path and query the request's, behind the prefix."""
    farm = Farm(library)
    upstreams = new_upstreams(["https://one:8443/api/"])
    with library.Client(transport=upstreams.transport(farm)) as client:
        response = client.get("http://vendor/v1/a%2Fb?x=1&y=%20")
    (sent,) = farm.requests
    assert str(sent.url) == "https://one:8443/api/v1/a%2Fb?x=1&y=%20"
    assert sent.headers["host"] == "one:8443"
    assert str(response.request.url) == "http://vendor/v1/a%2Fb?x=1&y=%20"
    assert response.extensions["seawall.host"] == "https://one:8443/api/"


def test_a_host_header_of_the_users_own_is_kept():
    """Only a Host header that the library generated is replaced."""
    farm = Farm()
    with httpx.Client(transport=new_upstreams().transport(farm)) as client:
        client.get("http://vendor/", headers={"Host": "tenant.example"})
        client.get("http://vendor/")
    assert farm.requests[0].headers["host"] == "tenant.example"
    assert farm.requests[1].headers["host"] == farm.requests[1].url.netloc.decode()


def test_an_address_in_brackets():
    """An IPv6 host is asked as it was given, its body as it was sent."""
    farm = Farm()
    with httpx.Client(transport=new_upstreams(["http://[::1]:8080"]).transport(farm)) as client:
        client.post("http://vendor/x", content=b"body")
    (sent,) = farm.requests
    assert (sent.url.host, sent.headers["host"]) == ("::1", "[::1]:8080")
    assert b"".join(sent.stream) == b"body"


def test_the_users_request_is_not_changed():
    """What is sent is a copy: another attempt may be under way with the same request."""
    farm = Farm()
    request = httpx.Request("GET", "http://vendor/x", headers={"a": "1"})
    UpstreamTransport(new_upstreams(), farm).handle_request(request)
    assert request.url.host == "vendor"
    assert request.headers["host"] == "vendor"
    assert farm.requests[0].headers["a"] == "1"


def test_paths_and_queries_are_kept():
    """Only the host of an address changes."""
    farm = Farm()
    transport = new_upstreams().transport(farm)
    for number in range(20):
        path = f"/{number}?secret={number}" if number % 2 == 0 else f"/{number}"
        transport.handle_request(httpx.Request("GET", f"http://vendor{path}"))
        sent = farm.requests[-1].url
        assert sent.raw_path.decode() == path
        assert f"http://{sent.netloc.decode()}" in URLS


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_a_default_transport_is_the_librarys(library):
    """Without an inner transport the library's own is made, when the first request comes."""
    transport = new_upstreams(["http://127.0.0.1:9"]).transport()
    with library.Client(transport=transport) as client, pytest.raises(library.ConnectError):
        client.get("http://vendor/")

    async def main():
        async with library.AsyncClient(transport=transport) as client:
            with pytest.raises(library.ConnectError):
                await client.get("http://vendor/")

    asyncio.run(main())
    kinds = {type(inner) for inner in transport._default_transports.values()}
    assert kinds == {library.HTTPTransport, library.AsyncHTTPTransport}


def test_closing_closes_what_is_inside():
    """Closing the client closes the transport that was given, and leaves the hosts alone."""
    upstreams = new_upstreams()
    farms = [Farm(), Farm(), Farm()]
    upstreams.transport(farms[0]).close()
    asyncio.run(upstreams.transport(farms[1]).aclose())

    async def main():
        async with httpx.AsyncClient(transport=upstreams.transport(farms[2])) as client:
            await client.get("http://vendor/")

    asyncio.run(main())
    assert all("closed" in farm.answers for farm in farms)
    with upstreams.pick() as host:
        assert host.url in URLS


# --- Other hosts for other attempts ---


@pytest.mark.parametrize(("library", "guarded"), LIBRARIES)
def test_each_attempt_asks_another_host(library, guarded):
    """A retry goes to a host that this call has not tried, in any order, until all were."""
    farm = Farm(library, one=503, two=503, three=503)
    guard = new_guard(Retry(on=transient, attempts=3, backoff=0.1), clock=VirtualClock())
    transport = guarded.GuardedTransport(guard, new_upstreams().transport(farm))
    with library.Client(transport=transport) as client:
        for _ in range(5):
            del farm.seen[:]
            assert client.get("http://vendor/").status_code == 503
            assert sorted(farm.seen) == ["one", "three", "two"]


@pytest.mark.parametrize(("library", "guarded"), LIBRARIES)
def test_a_hedge_asks_another_host(library, guarded):
    """The second request of a hedge is sent to another host, and the first is no failure."""

    async def main():
        farm = Farm(library, one=(60.0, 200))
        upstreams = new_upstreams(URLS[:2])
        guard = new_guard(Hedge(0.5, cap=1.0, dispose=lambda _: None))
        transport = guarded.AsyncGuardedTransport(guard, upstreams.transport(farm))
        async with library.AsyncClient(transport=transport) as client:
            for _ in range(10):
                response = await client.get("http://vendor/")
                assert response.extensions["seawall.host"] == URLS[1]
        assert "one" in farm.seen
        for earlier, later in zip(farm.seen, farm.seen[1:], strict=False):
            assert (earlier, later) != ("one", "one")
        seen = upstreams.snapshot()["hosts"]
        assert seen[URLS[0]]["failures"] == 0
        assert seen[URLS[0]]["in_flight"] == seen[URLS[1]]["in_flight"] == 0

    run_virtual(main())


def test_an_attempts_timeout_is_the_hosts_failure():
    """A host that hangs until our timeout has failed; a cancellation by others is no verdict."""

    async def main():
        farm = Farm(one=(60.0, 200))
        upstreams = new_upstreams(URLS[:1])
        guard = new_guard(Timeout(1.0))
        transport = guarded_httpx.AsyncGuardedTransport(guard, upstreams.transport(farm))
        async with httpx.AsyncClient(transport=transport) as client:
            with pytest.raises(httpx.TimeoutException):
                await client.get("http://vendor/")
            task = asyncio.create_task(client.get("http://vendor/"))
            await let_pass(0.5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        seen = upstreams.snapshot()["hosts"][URLS[0]]
        assert (seen["requests"], seen["failures"], seen["in_flight"]) == (2, 1, 0)

    run_virtual(main())


def test_picks_with_the_same_tried_differ():
    """A caller that passes the same set to all attempts asks each host once."""
    upstreams = new_upstreams()
    tried: set[str] = set()
    for _ in range(3):
        with upstreams.pick(tried=tried) as host:
            assert host.url in URLS
    assert tried == set(URLS)
    with upstreams.pick(tried=tried) as host:
        assert host.url in URLS


def another_each_time(seed: int) -> None:
    """Assert that of as many picks as there are hosts no two are of the same host."""
    upstreams = Upstreams("vendor", URLS, rng=Random(seed), clock=VirtualClock())
    tried: set[str] = set()
    urls = []
    for _ in URLS:
        with upstreams.pick(tried=tried) as host:
            urls.append(host.url)
    assert len(set(urls)) == len(URLS)


@given(SEEDS)
def test_no_host_is_asked_twice_while_there_is_another(seed):
    """Whatever chance says, attempts of one call go to different hosts."""
    another_each_time(seed)


def test_no_host_twice_needs_the_memory(monkeypatch):
    """Without what was tried, a retry finds the same host again now and then."""
    take = HostSet.take
    monkeypatch.setattr(HostSet, "take", lambda self, _tried, refused: take(self, None, refused))
    assert falsified(another_each_time, SEEDS)


# --- What is a failure ---


@pytest.mark.parametrize(
    ("answer", "failures"),
    [
        (200, 0), (404, 0), (429, 0), (501, 0), (505, 0), (500, 1), (502, 1), (503, 1), (599, 1),
        (httpx.ConnectError("refused"), 1), (httpx.ReadTimeout("late"), 1),
        (408, 1), (OSError("of the network"), 1),
        (httpx.PoolTimeout("own pool"), 0), (ValueError("the user's own body"), 0),
    ],
)  # fmt: skip
def test_what_counts_as_a_hosts_failure(answer, failures):
    """Errors and 5xx are the host's; what it says of the request, or never heard of, is not."""
    upstreams = new_upstreams(URLS[:1])
    transport = upstreams.transport(Farm(one=answer))
    raised = None if isinstance(answer, int) else pytest.raises(type(answer))
    with raised or contextlib.nullcontext():
        transport.handle_request(httpx.Request("GET", "http://vendor/"))
    assert upstreams.snapshot()["hosts"][URLS[0]]["failures"] == failures


def test_a_replayed_failure_is_not_the_hosts():
    """A replayed failure may come from another host, so it ejects none."""
    upstreams = new_upstreams(URLS[:1])
    for headers in ({}, {"Idempotent-Replayed": "true"}):
        with upstreams.pick() as host:
            host.answered(httpx.Response(500, headers=headers))
    assert upstreams.snapshot()["hosts"][URLS[0]]["failures"] == 1


def test_is_failure_decides():
    """A function of the user's own says what is a failure, of errors and of answers."""
    upstreams = new_upstreams(URLS[:1], is_failure=lambda _error, answer: answer == "bad")
    with upstreams.pick() as host:
        host.answered("bad")
    with upstreams.pick() as host:
        host.answered("good")
    with pytest.raises(ValueError, match="x"), upstreams.pick():
        raise ValueError("x")
    assert upstreams.snapshot()["hosts"][URLS[0]]["failures"] == 1


def test_is_failure_that_fails_counts_as_one(caplog):
    """A classifier that raises does no harm to the answer; it is logged."""
    upstreams = new_upstreams(URLS[:1], is_failure=lambda _error, _answer: 1 / 0)
    with caplog.at_level(logging.ERROR, "seawall"), upstreams.pick() as host:
        host.answered("fine")
    assert "is_failure" in caplog.text
    assert upstreams.snapshot()["hosts"][URLS[0]]["failures"] == 1


def test_what_is_raised_after_the_verdict_changes_nothing():
    """A 404 that was judged to be fine is no failure because the user's code raises for it."""
    upstreams = new_upstreams(URLS[:1])

    def get(status: int, error: BaseException) -> None:
        with contextlib.suppress(type(error)), upstreams.pick() as host:
            host.answered(httpx.Response(status))
            raise error

    get(404, ValueError("raise_for_status"))
    get(200, asyncio.CancelledError())
    assert upstreams.snapshot()["hosts"][URLS[0]]["failures"] == 0
    get(503, ValueError("raise_for_status"))
    assert upstreams.snapshot()["hosts"][URLS[0]]["failures"] == 1


def test_a_pick_can_say_that_the_host_failed():
    """For clients without exceptions: `failed()` is a failure though the block ends well."""
    upstreams = new_upstreams(URLS[:1])
    with upstreams.pick() as host:
        host.failed()
    assert upstreams.snapshot()["hosts"][URLS[0]]["failures"] == 1


# --- Ejection ---


def drive(upstreams, clock, bad, *, calls=200, step=0.05) -> Counter:
    """Make calls one after another; hosts in `bad` fail. Return how many each host got."""
    counts: Counter = Counter()
    for _ in range(calls):
        clock.advance(step)
        with upstreams.pick() as host:
            counts[host.url] += 1
            clock.advance(0.001)
            if host.url in bad:
                host.failed()
    return counts


def test_a_failing_host_is_ejected_and_comes_back():
    """A host that fails gets next to nothing, then is tried again, and serves when it is well."""
    clock = VirtualClock()
    upstreams = new_upstreams(clock=clock)
    events, stop = told()
    assert min(drive(upstreams, clock, set()).values()) > 40
    during = drive(upstreams, clock, {URLS[0]}, calls=1000, step=0.1)
    assert 5 <= during[URLS[0]] <= 40
    assert upstreams.snapshot()["hosts"][URLS[0]]["ejections"]
    clock.advance(60.0)
    assert min(drive(upstreams, clock, set(), calls=300).values()) > 60
    stop()
    assert [type(event).__name__ for event in events[:2]] == ["HostEjected", "HostRestored"]
    assert events[0].fields() == {
        "guard": "vendor",
        "host": URLS[0],
        "cause": "5 failures in a row",
        "seconds": 10.0,
    }
    assert events[1].cause == "its time was over"


@pytest.mark.parametrize("mood", ["failing", "slow", "failing fast"])
def test_under_load_a_bad_host_loses_all_but_a_trickle(mood):
    """At 100 requests a second a bad host's share falls from a third below 1 %, and comes back."""
    rng = Random(2)
    ill: set[str] = set()

    async def call(upstreams, counts):
        async with upstreams.pick() as host:
            counts[host.url] += 1
            bad = host.url in ill
            slow = 0.2 if mood == "slow" else 0.001 if mood == "failing fast" else 0.02
            await let_pass(slow if bad else 0.015 + 0.01 * rng.random())
            if bad and mood != "slow":
                host.failed()

    async def share(upstreams, seconds) -> float:
        counts: Counter = Counter()
        tasks = []
        for _ in range(100 * seconds):
            tasks.append(asyncio.create_task(call(upstreams, counts)))
            await let_pass(0.01)
        await asyncio.gather(*tasks)
        return counts[URLS[0]] / counts.total()

    async def main():
        upstreams = new_upstreams()
        assert 0.25 < await share(upstreams, 5) < 0.4
        ill.add(URLS[0])
        assert await share(upstreams, 15) < 0.01
        ill.clear()
        await let_pass(30.0)
        assert 0.25 < await share(upstreams, 5) < 0.4

    run_virtual(main())


def test_when_all_are_bad_all_are_used():
    """Of three failing hosts one is ejected; the others are asked, since it is not the hosts."""
    clock = VirtualClock()
    upstreams = new_upstreams(clock=clock)
    drive(upstreams, clock, set(URLS), calls=100, step=0.01)
    assert sorted(states(upstreams)) == ["ejected", "serving", "serving"]
    assert upstreams.snapshot()["panic"] is False


def test_answers_from_before_an_ejection_count_for_nothing():
    """What was sent before a host came back says nothing about the host as it is now."""
    clock = VirtualClock()
    upstreams = new_upstreams(URLS[:2], clock=clock, outliers=Outliers(consecutive=2))
    old = [upstreams.pick() for _ in range(8)]
    for pick in old:
        pick.__enter__()
    mine = [pick for pick in old if pick.url == URLS[0]]
    for pick in mine[:2]:
        pick.failed()
        pick.__exit__(None, None, None)
    assert states(upstreams)[0] == "ejected"
    clock.advance(10.0)
    assert states(upstreams)[0] == "serving"
    for pick in mine[2:]:
        pick.failed()
        pick.__exit__(None, None, None)
    assert states(upstreams)[0] == "serving"
    for pick in old:
        pick.__exit__(None, None, None)
    assert upstreams.snapshot()["in_flight"] == 0


def late_answers_say_nothing(case: tuple[int, list[bool]]) -> None:
    """Assert that a host is not ejected by answers to what was sent before it was restored."""
    early, results = case
    clock = VirtualClock()
    upstreams = Upstreams(
        "vendor", URLS[:2], rng=Random(1), clock=clock, outliers=Outliers(consecutive=2)
    )
    old = [upstreams.pick() for _ in range(2 * (early + 2))]
    for pick in old:
        pick.__enter__()
    mine = [pick for pick in old if pick.url == URLS[0]]
    for pick in mine[:2]:
        pick.failed()
        pick.__exit__(None, None, None)
    clock.advance(10.0)
    for pick, ok in zip(mine[2:], results, strict=False):
        if not ok:
            pick.failed()
        pick.__exit__(None, None, None)
        assert states(upstreams)[0] == "serving"


LATE = st.tuples(st.integers(0, 5), st.lists(st.booleans(), max_size=8))


@given(LATE)
def test_late_answers_eject_nobody(case):
    """However answers come in from before an ejection, the restored host stays in service."""
    late_answers_say_nothing(case)


def test_late_answers_need_the_generation(monkeypatch):
    """If late answers counted, the host would be ejected again for what is long over."""
    end = HostSet.end

    def count(self, sent, outcome, **parts):
        end(self, sent._replace(generation=sent.host.record.generation), outcome, **parts)

    monkeypatch.setattr(HostSet, "end", count)
    assert falsified(late_answers_say_nothing, LATE)


def test_without_outliers_nobody_is_ejected():
    """`outliers=None` leaves all hosts in service; the load still avoids a failing one."""
    clock = VirtualClock()
    upstreams = new_upstreams(clock=clock, outliers=None)
    counts = drive(upstreams, clock, {URLS[0]})
    assert states(upstreams) == ["serving"] * 3
    assert counts[URLS[0]] < 50


# --- Counted out exactly once ---

ENDS = st.sampled_from(["ok", "failed", "error", "cancelled", "rejected", "collected"])


async def block(upstreams, end):
    async with upstreams.pick() as host:
        await let_pass(0.5)
        if end == "failed":
            host.failed()
        elif end == "error":
            raise ConnectionError
        elif end == "rejected":
            raise CircuitOpen("further in")
        elif end == "cancelled":
            await let_pass(60.0)


def nothing_in_flight(case: list[tuple[str, bool]]) -> None:
    """Assert that however blocks end, nothing is in flight when all are over."""

    async def main():
        upstreams = Upstreams("vendor", URLS[:2], rng=Random(1))
        known = set(upstreams._set.hosts)
        tasks = []
        for end, change in case:
            if end == "collected":
                made = block(upstreams, end)
                made.send(None)
                del made
                gc.collect(0)
                continue
            tasks.append(asyncio.create_task(block(upstreams, end)))
            await let_pass(0.1)
            if change:
                upstreams.update(hosts=URLS[1:])
                known.update(upstreams._set.hosts)
        await let_pass(1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(host.load.in_flight for host in known) == 0

    run_virtual(main())


CASES = st.lists(st.tuples(ENDS, st.booleans()), max_size=6)


@given(CASES)
def test_what_was_in_flight_is_counted_out_once(case):
    """Whatever ends a request, also a change of hosts meanwhile, in flight comes back to zero."""
    nothing_in_flight(case)


def test_counting_out_needs_the_exit(monkeypatch):
    """If a cancelled request were not counted out, hosts would fill up with ghosts."""
    end = Pick._end

    def only_verdicts(self, error):
        if error is None or isinstance(error, Exception):
            end(self, error)

    monkeypatch.setattr(Pick, "_end", only_verdicts)
    assert falsified(nothing_in_flight, CASES)


def test_leaving_twice_counts_once():
    """A second exit, or a second use, changes nothing."""
    upstreams = new_upstreams(URLS[:1])
    pick = upstreams.pick()
    with pick:
        pass
    pick.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="used already"):
        pick.__enter__()
    with pytest.raises(RuntimeError, match="when its block begins"):
        pick.url  # noqa: B018
    seen = upstreams.snapshot()["hosts"][URLS[0]]
    assert (seen["in_flight"], seen["requests"]) == (0, 1)


def test_threads_and_tasks_at_once():
    """Many threads and a loop share the hosts, and every request is counted in and out."""
    upstreams = Upstreams("vendor", URLS, rng=Random(3))

    def thread():
        for number in range(200):
            with upstreams.pick() as host:
                if number % 7 == 0:
                    host.failed()

    async def task():
        for _ in range(50):
            async with upstreams.pick():
                await asyncio.sleep(0)  # noqa: TID251 - lets the other tasks run

    async def main():
        await asyncio.gather(*(task() for _ in range(8)))

    threads = [threading.Thread(target=thread) for _ in range(4)]
    for each in threads:
        each.start()
    asyncio.run(main())
    for each in threads:
        each.join()
    seen = upstreams.snapshot()
    assert seen["in_flight"] == 0
    assert sum(host["requests"] for host in seen["hosts"].values()) == 4 * 200 + 8 * 50


# --- Breakers ---


def test_a_host_with_an_open_breaker_is_not_picked():
    """Each host has its own breaker; while it is open the others are asked."""
    clock = VirtualClock()
    upstreams = new_upstreams(
        clock=clock,
        outliers=None,
        breaker=lambda _url: Breaker(consecutive=2, break_for=30.0),
    )
    rejections = []
    stop = subscribe(rejections.append)
    counts = drive(upstreams, clock, {URLS[0]}, calls=100, step=0.01)
    stop()
    assert counts[URLS[0]] == 2
    assert upstreams.snapshot()["hosts"][URLS[0]]["breaker"] == "open"
    assert [event.name for event in rejections] == ["breaker_changed"]
    clock.advance(30.0)
    assert drive(upstreams, clock, set())[URLS[0]] > 30
    assert upstreams.snapshot()["hosts"][URLS[0]]["breaker"] == "closed"


@pytest.mark.parametrize("how", ["each", "keyed"])
def test_all_open_raises_the_soonest(how):
    """With all circuits open the call is refused, with the earliest time one may close."""
    clock = VirtualClock()
    breaker = lambda _url: Breaker(consecutive=1, break_for=10.0)  # noqa: E731
    if how == "keyed":
        breaker = Breaker(consecutive=1, break_for=10.0, key=lambda url: url)
    upstreams = new_upstreams(clock=clock, outliers=None, breaker=breaker)
    for _ in URLS:
        with upstreams.pick() as host:
            host.failed()
        clock.advance(1.0)
    with pytest.raises(CircuitOpen, match="the circuits of 3 hosts are open") as caught:
        upstreams.pick().__enter__()
    assert caught.value.retry_after == pytest.approx(7.0)
    assert (caught.value.guard, caught.value.policy) == ("vendor", "upstreams")
    assert upstreams.snapshot()["in_flight"] == 0
    assert {host["breaker"] for host in upstreams.snapshot()["hosts"].values()} == {"open"}


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_all_open_is_an_error_of_the_library_too(library):
    """Code that catches the library's own errors catches a refusal as well."""
    upstreams = new_upstreams(URLS[:1], breaker=lambda _url: Breaker(consecutive=1))
    with library.Client(transport=upstreams.transport(Farm(library, one=500))) as client:
        client.get("http://vendor/")
        with pytest.raises(library.TransportError) as caught:
            client.get("http://vendor/")
    assert isinstance(caught.value, CircuitOpen)
    assert str(caught.value.request.url) == "http://vendor/"

    async def main():
        transport = upstreams.transport(Farm(library, one=500))
        async with library.AsyncClient(transport=transport) as client:
            await client.get("http://vendor/")

    with pytest.raises(CircuitOpen):
        asyncio.run(main())


def test_a_cancelled_probe_is_given_back():
    """A half-open host whose probe was cancelled can be probed again at once."""

    async def main():
        upstreams = new_upstreams(
            URLS[:1], outliers=None, breaker=lambda _url: Breaker(consecutive=1, break_for=5.0)
        )
        async with upstreams.pick() as host:
            host.failed()
        await let_pass(5.0)
        pick = upstreams.pick()
        await pick.__aenter__()
        with pytest.raises(CircuitOpen):
            await upstreams.pick().__aenter__()
        await pick.__aexit__(asyncio.CancelledError, asyncio.CancelledError(), None)
        async with upstreams.pick():
            pass
        assert upstreams.snapshot()["hosts"][URLS[0]]["breaker"] == "closed"

    run_virtual(main())


def test_a_breaker_in_shadow_only_counts():
    """A breaker that is not enforced keeps no host from being asked."""
    upstreams = new_upstreams(
        URLS[:1], outliers=None, breaker=lambda _url: Breaker(consecutive=1, mode="shadow")
    )
    for _ in range(3):
        with upstreams.pick() as host:
            host.failed()
    assert upstreams.snapshot()["hosts"][URLS[0]]["requests"] == 3


def test_a_breakers_own_classifier_sees_the_answer():
    """`is_failure` of a breaker is asked about the response, as in a guard."""
    seen = []

    def classify(error, value):
        seen.append((error, value))
        return False

    upstreams = new_upstreams(
        URLS[:1], breaker=lambda _url: Breaker(consecutive=1, is_failure=classify)
    )
    with upstreams.pick() as host:
        host.answered("hello")
    assert seen == [(None, "hello")]


class Asked:
    """A layer that has to ask a store first, which then says what `says` holds."""

    takes_arguments = False

    def __init__(self, says) -> None:
        self.says = says
        self.until = None
        self.wake = None
        self.abandoned = 0
        self.left = []

    def enter(self, _now):
        raise Wait(self)

    def publish(self, wake):
        self.wake = wake
        if self.says is not None:
            wake()

    def claim(self):
        if self.says == "open":
            raise CircuitOpen("open in all pods", retry_after=3.0)
        if self.says == "again":
            self.says = "closed"
            raise Wait(self)
        return "ticket"

    def abandon(self):
        self.abandoned += 1

    def leave(self, ticket, outcome, _detail, _now):
        self.left.append((ticket, outcome.value))


def asking(says) -> tuple[Upstreams, Asked]:
    upstreams = new_upstreams(URLS[:1], breaker=lambda _url: Breaker())
    layer = Asked(says)
    upstreams._set.hosts[0].gate.layers = {"sync": layer, "async": layer}
    return upstreams, layer


@pytest.mark.parametrize("says", ["closed", "again"])
def test_a_breaker_that_pods_share_is_waited_for(says):
    """Where a store has to be asked first, plain code and coroutines wait in their own way."""
    upstreams, layer = asking(says)
    with upstreams.pick():
        pass
    layer.says = says

    async def main():
        async with upstreams.pick():
            pass

    asyncio.run(main())
    assert layer.left == [("ticket", "ok")] * 2


def test_a_breaker_that_is_open_in_all_pods_refuses():
    """What the store says is taken as any breaker's word, and nothing stays in flight."""
    upstreams, layer = asking("open")
    with pytest.raises(CircuitOpen, match="the circuit of its host is open") as caught:
        upstreams.pick().__enter__()
    assert caught.value.retry_after == 3.0
    assert layer.left == []
    assert upstreams.snapshot()["in_flight"] == 0


def test_cancelled_while_waiting_for_the_store():
    """Who gives up before the store has answered leaves nothing behind."""

    async def main():
        upstreams, layer = asking(None)
        task = asyncio.create_task(upstreams.pick().__aenter__())
        await let_pass(1.0)
        assert upstreams.snapshot()["in_flight"] == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert layer.abandoned == 1
        assert upstreams.snapshot()["in_flight"] == 0

    run_virtual(main())


# --- Hosts that change ---


def test_hosts_change_at_run_time():
    """Who stays keeps its record, who is new begins, who is gone finishes what it has."""
    clock = VirtualClock()
    upstreams = new_upstreams(clock=clock, outliers=Outliers(consecutive=2))
    drive(upstreams, clock, {URLS[0]}, calls=60, step=0.01)
    assert states(upstreams)[0] == "ejected"
    with upstreams.pick() as gone:
        upstreams.update(hosts=[URLS[0], "http://new:4"])
        assert upstreams.hosts == [URLS[0], "http://new:4"]
        assert states(upstreams) == ["ejected", "serving"]
        assert gone.url not in upstreams.hosts
    counts = drive(upstreams, clock, set(), calls=10, step=0.01)
    assert set(counts) == {"http://new:4"}
    upstreams.update(hosts=[URLS[0]])
    assert upstreams.snapshot()["panic"] is True
    with upstreams.pick() as host:
        assert host.url == URLS[0]


def test_a_new_host_is_not_flooded():
    """Beside busy hosts a new one gets as much in flight as they have, and no more."""
    clock = VirtualClock()
    upstreams = new_upstreams(URLS[:2], clock=clock)
    drive(upstreams, clock, set(), calls=20)
    picks = [upstreams.pick() for _ in range(20)]
    for pick in picks:
        pick.__enter__()
    upstreams.update(hosts=URLS)
    more = [upstreams.pick() for _ in range(40)]
    for pick in more:
        pick.__enter__()
    flying = [host["in_flight"] for host in upstreams.snapshot()["hosts"].values()]
    assert sum(flying) == 60
    assert max(flying) <= 24
    for pick in (*picks, *more):
        pick.__exit__(None, None, None)


def test_a_breaker_is_made_outside_of_the_lock():
    """While the user's function makes a breaker, others may go on to pick."""
    waiting = []

    def factory(_url):
        if waiting:
            other = threading.Thread(target=waiting[0].snapshot, daemon=True)
            other.start()
            other.join(5.0)
            assert not other.is_alive()
        return Breaker()

    upstreams = new_upstreams(URLS[:1], breaker=factory)
    waiting.append(upstreams)
    upstreams.update(hosts=URLS[1:])
    assert upstreams.hosts == URLS[1:]


def test_hosts_that_change_while_they_change():
    """An update that happens while a breaker is made leaves no host without one."""
    turns = []

    def factory(_url):
        if turns:
            turns.pop().update(hosts=URLS[2:])  # takes away who was to stay
        return Breaker()

    upstreams = new_upstreams(URLS[:1], breaker=factory)
    turns.append(upstreams)
    upstreams.update(hosts=URLS[:2])
    assert upstreams.hosts == URLS[:2]
    assert all(host["breaker"] == "closed" for host in upstreams.snapshot()["hosts"].values())


# --- Seen from outside ---


def test_snapshot_and_repr():
    """All there is to see, by host."""
    clock = VirtualClock()
    upstreams = new_upstreams(URLS[:1], clock=clock)
    with upstreams.pick() as host:
        assert repr(host) == "<Pick of 'vendor': http://one:1>"
        clock.advance(0.25)
    assert upstreams.snapshot() == {
        "name": "vendor",
        "panic": False,
        "in_flight": 0,
        "hosts": {
            "http://one:1": {
                "state": "serving",
                "in_flight": 0,
                "latency": 0.25,
                "requests": 1,
                "failures": 0,
                "ejections": 0,
                "ejected_for": None,
                "breaker": None,
            }
        },
    }
    assert repr(upstreams) == "<Upstreams 'vendor': 1 hosts, 0 out of service>"
    assert repr(upstreams.transport()) == f"UpstreamTransport({upstreams!r})"
    assert repr(upstreams.pick()) == "<Pick of 'vendor': not begun, or over>"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_begins_with_nothing_in_flight():
    """After a fork the requests of the parent's threads are not the child's."""
    upstreams = new_upstreams(URLS[:1])
    pick = upstreams.pick()
    with pick:
        upstreams._after_fork()  # as it is called in a child
        assert upstreams.snapshot()["in_flight"] == 0
    assert upstreams.snapshot()["in_flight"] == 0


# --- Arguments ---


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("http://one", "write a list"),
        ([], "at least one"),
        (["http://one", "http://one"], "there twice"),
        (["http://one", "HTTP://ONE:80/"], "there twice"),
        (["https://one/api", "https://one:443/api/"], "there twice"),
        (["one:50051", "one:50051"], "there twice"),
        ([1], "base URL"),
        (["http://one:99999"], "base URL"),
        (["http://one\r\nX: y"], "base URL"),
        (["http://user:secret@one"], "no user"),
        (["http://one/?q"], "no user, query"),
    ],
)
def test_bad_hosts_say_what_to_write(hosts, said):
    """Hosts that cannot be asked, or must not be shown, raise immediately."""
    with pytest.raises((TypeError, ValueError), match=said) as caught:
        Upstreams("vendor", hosts)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"half_life": 0}, "half_life"),
        ({"outliers": 5}, "Outliers"),
        ({"health": "/health"}, "HealthCheck"),
        ({"breaker": Breaker()}, "lambda host"),
        ({"breaker": 5}, "breaker"),
        ({"breaker": lambda _url: 5}, "return a Breaker"),
        ({"rng": Random}, "random.Random"),
        ({"is_failure": 5}, "is_failure"),
        ({"clock": 5}, "clock"),
    ],
)
def test_bad_settings_say_what_to_write(settings, said):
    """A setting that makes no sense raises at once, and says what would."""
    with pytest.raises((TypeError, ValueError), match=said):
        Upstreams("vendor", URLS, **settings)


def test_http_needs_urls():
    """Other addresses are for pick() alone; a transport says so at once, and update later."""
    upstreams = Upstreams("vendor", ["10.0.0.1:50051"])
    with upstreams.pick() as host:
        assert host.url == "10.0.0.1:50051"
    with pytest.raises(ValueError, match="http or https"):
        upstreams.transport()
    with pytest.raises(ValueError, match="http or https"):
        Upstreams("vendor", ["10.0.0.1:50051"], health=HealthCheck())
    spoken = new_upstreams()
    spoken.transport()
    with pytest.raises(ValueError, match="http or https"):
        spoken.update(hosts=["10.0.0.1:50051"])
    with pytest.raises(TypeError, match="name"):
        Upstreams("", URLS)
    with pytest.raises(TypeError, match="first argument is an Upstreams"):
        UpstreamTransport("vendor")
    with pytest.raises(TypeError, match="transport="):
        UpstreamTransport(new_upstreams(), transport=5)


def never_all_out(case: tuple[float, list[tuple[int, bool]]]) -> None:
    """Assert that whatever fails, some host is asked, and no more are out than may be."""
    share, results = case
    clock = VirtualClock()
    settings = Outliers(consecutive=1, max_ejected=share, eject_for=1000.0, max_eject_for=1000.0)
    upstreams = Upstreams("vendor", URLS, rng=Random(1), clock=clock, outliers=settings)
    for _, ok in results:
        clock.advance(0.1)
        with upstreams.pick() as host:
            if not ok:
                host.failed()
        assert states(upstreams).count("ejected") <= share * len(URLS)
        assert not upstreams.snapshot()["panic"]


RESULTS = st.tuples(
    st.sampled_from([0.0, 0.4, 0.7, 1.0]), st.lists(st.tuples(st.integers(0, 2), st.booleans()))
)


@given(RESULTS)
def test_some_host_is_always_asked(case):
    """Failures never put more hosts out than the share, nor lead to a panic."""
    never_all_out(case)


def test_some_host_needs_the_share(monkeypatch):
    """Without the share, failures of all would put all out."""
    monkeypatch.setattr(OutlierSettings, "most_out", lambda _self, hosts: hosts)
    assert falsified(never_all_out, RESULTS)


def test_guards_and_upstreams_together_stand_for_themselves():
    """A guard of the same name is another thing: names of upstreams need not be unique."""
    guard = Guard("vendor", Retry(on=ConnectionError))
    assert new_upstreams().name == guard.name
