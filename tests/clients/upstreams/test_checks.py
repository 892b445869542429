"""Active checks: who fails them gets nothing, who passes again is back, and threads end."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import CircuitOpen, subscribe
from seawall.clients.upstreams import HealthCheck, Outliers, Upstreams
from seawall.clients.upstreams.checks import Checker
from seawall.clients.upstreams.hosts import UpstreamHost
from seawall.clock import VirtualClock
from seawall.events import HostEjected, HostRestored
from seawall.models.outliers import ActionBound
from seawall.models.outliers import Outliers as OutlierSettings
from seawall.testing import run_virtual
from tests.support import falsified, let_pass

URLS = ["http://one:1", "http://two:2", "http://three:3", "http://four:4"]


class Probes:
    """What each host says when it is asked: True, False, or an error to raise."""

    def __init__(self) -> None:
        self.says: dict[str, object] = {}
        self.asked: list[str] = []

    async def __call__(self, url: str) -> bool:
        self.asked.append(url)
        said = self.says.get(url, True)
        if isinstance(said, BaseException):
            raise said
        if said == "hang":
            await let_pass(60.0)
        return bool(said)


def new_upstreams(probes, **settings) -> Upstreams:
    health = HealthCheck(probe=probes, **settings)
    return Upstreams("vendor", URLS, rng=Random(1), health=health)


def picked(upstreams, times=100) -> set[str]:
    urls = set()
    for _ in range(times):
        try:
            with upstreams.pick() as host:
                urls.add(host.url)
        except CircuitOpen as error:
            raise AssertionError("no host is left") from error
    return urls


def test_who_fails_its_checks_gets_nothing_until_it_passes():
    """Two failed checks eject a host, two passed ones restore it; both emit events."""

    async def main():
        events = []
        stop = subscribe(events.append, HostEjected, HostRestored)
        probes = Probes()
        upstreams = new_upstreams(probes)
        probes.says[URLS[0]] = False
        await upstreams.acheck()
        assert URLS[0] in picked(upstreams)
        await upstreams.acheck()
        assert picked(upstreams) == set(URLS[1:])
        assert upstreams.snapshot()["hosts"][URLS[0]]["state"] == "failing checks"
        assert repr(upstreams) == "<Upstreams 'vendor': 4 hosts, 1 out of service>"
        probes.says[URLS[0]] = True
        await upstreams.acheck()
        assert URLS[0] not in picked(upstreams)
        await upstreams.acheck()
        assert URLS[0] in picked(upstreams)
        stop()
        assert [event.fields() for event in events] == [
            {"guard": "vendor", "host": URLS[0], "cause": "checks failed", "seconds": 10.0},
            {"guard": "vendor", "host": URLS[0], "cause": "checks passed"},
        ]

    run_virtual(main())


def test_late_and_broken_checks_are_failures(caplog):
    """A check that hangs is cut off after its timeout; one that raises is a failure, and logged."""

    async def main():
        probes = Probes()
        upstreams = new_upstreams(probes, timeout=2.0, failures=1)
        probes.says = {URLS[0]: "hang", URLS[1]: KeyError("a bug")}
        begun = asyncio.get_running_loop().time()
        await upstreams.acheck()
        assert asyncio.get_running_loop().time() - begun == pytest.approx(2.0)
        assert picked(upstreams) == set(URLS[2:])

    with caplog.at_level(logging.ERROR, "seawall"):
        run_virtual(main())
    assert "a health check failed to run" in caplog.text


def test_when_most_fail_their_checks_all_are_asked():
    """More failing hosts than may be out are a sign that it is not the hosts: all are asked."""

    async def main():
        probes = Probes()
        upstreams = new_upstreams(probes, failures=1)
        probes.says = dict.fromkeys(URLS[:2], False)
        await upstreams.acheck()
        assert picked(upstreams) == set(URLS[2:])
        probes.says[URLS[2]] = False
        await upstreams.acheck()
        assert upstreams.snapshot()["panic"] is True
        assert picked(upstreams) == set(URLS)
        probes.says[URLS[2]] = True
        await upstreams.acheck()
        await upstreams.acheck()
        assert picked(upstreams) == set(URLS[2:])

    run_virtual(main())


def test_checks_and_failures_share_the_room():
    """Once checks have used up the share of ejected hosts, failures eject none."""

    async def main():
        probes = Probes()
        upstreams = new_upstreams(probes, failures=1)
        probes.says = dict.fromkeys(URLS[:2], False)
        await upstreams.acheck()
        for _ in range(50):
            async with upstreams.pick() as host:
                if host.url == URLS[2]:
                    host.failed()
        states = [host["state"] for host in upstreams.snapshot()["hosts"].values()]
        assert states == ["failing checks", "failing checks", "serving", "serving"]

    run_virtual(main())


@pytest.mark.parametrize(("share", "asked"), [(0.5, URLS[2:]), (0.25, URLS[1:]), (0.0, URLS[1:])])
@pytest.mark.parametrize("most", [0.0, 0.25])
def test_checks_have_a_bound_of_their_own(share, asked, most):
    """However few may be ejected, a host that fails its checks is out: one at least, of several."""

    async def main():
        probes = Probes()
        health = HealthCheck(probe=probes, failures=1, panic=share)
        outliers = Outliers(max_ejected=most)
        upstreams = Upstreams("v", URLS, rng=Random(1), health=health, outliers=outliers)
        probes.says = {url: url in asked for url in URLS}
        await upstreams.acheck()
        assert picked(upstreams) == set(asked)
        probes.says[asked[0]] = False
        await upstreams.acheck()
        assert upstreams.snapshot()["panic"] is True

    run_virtual(main())


def told_as_it_is(case: list[str]) -> None:
    """Assert that each event tells of a change: out, in, out, in."""

    async def main():
        events = []
        stop = subscribe(events.append, HostEjected, HostRestored)
        probes = Probes()
        health = HealthCheck(probe=probes, failures=1, successes=1)
        upstreams = Upstreams(
            "v", URLS, rng=Random(1), health=health, outliers=Outliers(consecutive=1)
        )
        host = upstreams._set.hosts[0]
        bound = ActionBound()
        for step in case:
            if step == "fails":
                for _ in range(20):
                    async with upstreams.pick() as pick:
                        if pick.url == URLS[0]:
                            pick.failed()
            elif step == "waits":
                await let_pass(1000.0)
            elif step in ("doubted", "cleared"):
                hosts = URLS[:1] if step == "doubted" else []
                upstreams.set_aside(hosts, cause="doubt", bound=bound)
            else:
                probes.says[URLS[0]] = step == "passes"
                await upstreams.acheck()
            upstreams.snapshot()
            assert (bool(events) and isinstance(events[-1], HostEjected)) is host.out
        stop()
        kinds = [type(event) for event in events]
        assert kinds == [HostEjected, HostRestored] * (len(kinds) // 2) + (
            [HostEjected] if len(kinds) % 2 else []
        )

    run_virtual(main())


STEPS = st.lists(
    st.sampled_from(["fails", "waits", "ill", "passes", "doubted", "cleared"]), max_size=6
)


@given(STEPS)
def test_events_tell_only_what_changed(case):
    """A host that is out for several reasons is told of once: by failures, checks or doubt."""
    told_as_it_is(case)


def test_events_need_to_look_at_the_whole(monkeypatch):
    """A host with a second reason to be ejected must not be reported as restored."""
    out = property(lambda host: host.record.until is not None)
    monkeypatch.setattr(UpstreamHost, "out", out)
    assert falsified(told_as_it_is, STEPS)


def only_who_passes(case: list[dict[str, bool]]) -> None:
    """Assert that only hosts that pass are asked, except in a panic, and always some host."""

    async def main():
        probes = Probes()
        upstreams = new_upstreams(probes, failures=1, successes=1)
        for says in case:
            probes.says = says
            await upstreams.acheck()
            failing = {url for url in URLS if not says.get(url, True)}
            asked = picked(upstreams, 30)
            assert asked
            if len(failing) <= 2:
                assert not asked & failing
            else:
                assert upstreams.snapshot()["panic"]

    run_virtual(main())


ROUNDS = st.lists(st.fixed_dictionaries(dict.fromkeys(URLS, st.booleans())), max_size=6)


@given(ROUNDS)
def test_only_who_passes_is_asked(case):
    """Whatever the checks say, round by round, failing hosts get nothing while others are left."""
    only_who_passes(case)


def test_some_host_is_asked_needs_the_panic(monkeypatch):
    """Without the bound on ejections, four failing checks would leave no host to ask."""
    monkeypatch.setattr(OutlierSettings, "most_out", lambda _self, hosts: hosts)
    assert falsified(only_who_passes, ROUNDS)


# --- With a real clock: the thread, and HTTP ---


class Site:
    """A little HTTP server on loopback, which answers with `status` (None: breaks off)."""

    def __init__(self) -> None:
        self.status: int | None = 200
        self.asked: list[bytes] = []
        self.answered = threading.Event()

    async def serve(self, reader, writer) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        if self.status is not None:
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n\r\nok" % self.status)
        writer.close()
        self.answered.set()


def test_http_checks():
    """200 to 399 passes; other statuses, no HTTP, a closed door and a hung-up line do not."""

    async def main():
        site = Site()
        server = await asyncio.start_server(site.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        hosts = [f"http://127.0.0.1:{port}/base", "http://127.0.0.1:9", "http://127.0.0.1:8"]
        health = HealthCheck("/ready?deep=1", failures=1, successes=1)
        upstreams = Upstreams(
            "v", hosts, health=health, clock=VirtualClock(), outliers=Outliers(max_ejected=1.0)
        )
        seen = []
        for site.status in (200, 302, 404, 204, 503, 200, None):
            await upstreams.acheck()
            state = upstreams.snapshot()["hosts"][hosts[0]]["state"]
            seen.append(state == "serving")
        assert seen == [True, True, False, True, False, True, False]
        first, *lines = site.asked[0].decode().split("\r\n")
        assert first == "GET /base/ready?deep=1 HTTP/1.1"
        assert f"Host: 127.0.0.1:{port}" in lines
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_a_host_need_not_hang_up_and_may_give_hints():
    """200 counts though the connection stays open, or 103 came first; 103 alone does not."""

    async def main():
        over = asyncio.Event()

        def site(*lines: bytes):
            async def serve(reader, writer) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"".join(lines))
                await over.wait()
                writer.close()

            return serve

        good = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        hint = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
        sites = site(good), site(hint, good), site(*[hint] * 9)
        servers = [await asyncio.start_server(serve, "127.0.0.1", 0) for serve in sites]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        upstreams = Upstreams(
            "v",
            [f"http://127.0.0.1:{port}" for port in ports],
            health=HealthCheck(failures=1, timeout=5.0),
            clock=VirtualClock(),
        )
        await upstreams.acheck()
        states = [host["state"] for host in upstreams.snapshot()["hosts"].values()]
        assert states == ["serving", "serving", "failing checks"]
        over.set()
        for server in servers:
            server.close()
            await server.wait_closed()

    asyncio.run(main())


def test_an_answer_without_end_and_one_that_is_no_http():
    """The answer is read up to a limit, and anything but HTTP is a failed check."""

    async def flood(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1_000_000)
        writer.close()

    async def noise(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 mail ready\r\n")
        writer.close()

    async def main():
        servers = [await asyncio.start_server(f, "127.0.0.1", 0) for f in (flood, noise)]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        upstreams = Upstreams(
            "v",
            [f"http://127.0.0.1:{port}" for port in ports],
            health=HealthCheck(failures=1),
            clock=VirtualClock(),
        )
        await upstreams.acheck()
        states = [host["state"] for host in upstreams.snapshot()["hosts"].values()]
        assert states == ["serving", "failing checks"]
        for server in servers:
            server.close()
            await server.wait_closed()

    asyncio.run(main())


def checking() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "seawall-checks"]


class Bell:
    """A probe that signals when it was called that often."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.rung = threading.Event()

    async def __call__(self, _url: str) -> bool:
        self.left -= 1
        if self.left <= 0:
            self.rung.set()
        return True


def test_the_thread_begins_with_the_first_request_and_ends_with_close():
    """Nothing runs before it is needed; then rounds follow each other; close ends the thread."""
    bell = Bell(5)
    upstreams = Upstreams("v", ["x"], health=HealthCheck(every=0.01, probe=bell))
    assert not checking()
    with upstreams.pick():
        pass
    assert bell.rung.wait(10.0)
    assert len(checking()) == 1
    upstreams.close()
    upstreams.close()
    assert not checking()
    with upstreams.pick():
        pass
    assert not checking()


def test_close_right_after_the_first_request():
    """However soon the set is closed, the thread that has just begun ends."""
    for _ in range(20):
        with Upstreams("v", ["x"], health=HealthCheck(probe=Bell(1))) as upstreams:
            upstreams.pick()
        assert not checking()


def test_close_does_not_wait_for_a_check_that_hangs():
    """A check under way is cancelled when the set is closed, from a loop too."""
    begun = threading.Event()

    async def hang(_url: str) -> bool:
        begun.set()
        await asyncio.get_running_loop().create_future()
        return True

    async def main():
        health = HealthCheck(timeout=60.0, probe=hang)
        async with Upstreams("v", ["x"], health=health) as upstreams, upstreams.pick():
            assert await asyncio.to_thread(begun.wait, 10.0)
        assert not checking()

    asyncio.run(main())


def test_a_set_that_nobody_keeps_is_not_checked_any_more():
    """The thread does not keep its set alive, and ends when it is gone."""
    bell = Bell(1)
    upstreams = Upstreams("v", ["x"], health=HealthCheck(every=0.01, probe=bell))
    with upstreams.pick():
        pass
    assert bell.rung.wait(10.0)
    (thread,) = checking()
    del upstreams
    thread.join(10.0)
    assert not thread.is_alive()


def test_after_a_fork_the_checks_begin_anew():
    """A child process has no thread, and begins one with its first request."""
    bell = Bell(1)
    with Upstreams("v", ["x"], health=HealthCheck(every=0.01, probe=bell)) as upstreams:
        with upstreams.pick():
            pass
        assert bell.rung.wait(10.0)
        background = upstreams._checker._background
        loop, thread = background.loop, background.thread
        upstreams._after_fork()  # as it is called in a child
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        bell.rung.clear()
        with upstreams.pick():
            pass
        assert bell.rung.wait(10.0)
    assert not checking()


def test_without_a_thread_to_spare_requests_go_on(monkeypatch):
    """If no thread can be started, requests continue, and a later one tries again."""
    bell = Bell(1)
    start = threading.Thread.start

    def none_left(_thread) -> None:
        raise RuntimeError("can't start new thread")

    with Upstreams("v", ["x"], health=HealthCheck(probe=bell)) as upstreams:
        monkeypatch.setattr(threading.Thread, "start", none_left)
        with upstreams.pick():
            pass
        monkeypatch.setattr(threading.Thread, "start", start)
        with upstreams.pick():
            pass
        assert bell.rung.wait(10.0)
    assert not checking()


def test_no_thread_in_virtual_time():
    """Where time is virtual, checks are made by `acheck()` alone."""
    upstreams = Upstreams("v", ["x"], health=HealthCheck(probe=Probes()), clock=VirtualClock())
    with upstreams.pick():
        pass
    assert not checking()


def test_checks_differ_in_time_from_pod_to_pod(monkeypatch):
    """Pauses are drawn by chance, around the time that was asked for."""
    pauses = []
    bell = Bell(40)

    async def noted(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("seawall.clients.upstreams.checks.sleep_async", noted)
    with Upstreams("v", ["x"], health=HealthCheck(every=0.005, probe=bell)) as upstreams:
        with upstreams.pick():
            pass
        assert bell.rung.wait(10.0)
    assert 0 <= min(pauses) < 0.0007
    assert 0.0013 < max(pauses) <= 0.002


# --- Arguments ---


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": "health"}, "write a path"),
        ({"path": "/a b"}, "write a path"),
        ({"path": "/\r\nX: y"}, "write a path"),
        ({"every": 0}, "every"),
        ({"timeout": -1.0}, "timeout"),
        ({"failures": 0}, "failures"),
        ({"successes": 1.5}, "successes"),
        ({"probe": 5}, "probe"),
        ({"panic": 1.5}, "panic"),
        ({"ssl": True}, "SSLContext"),
    ],
)
def test_bad_settings_say_what_to_write(given, said):
    """A setting that makes no sense raises at once, and says what would."""
    with pytest.raises((TypeError, ValueError), match=said):
        HealthCheck(**given)


def test_asking_without_checks():
    """`acheck()` of a set without checks says what is missing; closing it needs nothing."""
    upstreams = Upstreams("v", ["x"])
    with pytest.raises(RuntimeError, match="health=HealthCheck"):
        asyncio.run(upstreams.acheck())
    upstreams.close()
    asyncio.run(upstreams.aclose())
    assert repr(HealthCheck()) == "HealthCheck('/health/ready', every=5, timeout=1)"
    assert Checker(upstreams._set, HealthCheck())._security(_https()) is not None
    own = ssl.create_default_context()
    assert Checker(upstreams._set, HealthCheck(ssl=own))._security(_https()) is own


def _https():
    from seawall.clients.upstreams.hosts import endpoint_of

    return endpoint_of("https://one")
