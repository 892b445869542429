"""Admission by the time that a request has waited for a thread; and how that time is known."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from seawall import Criticality, Overloaded
from seawall.clients.http.terms import wall_time
from seawall.clock import SYSTEM, VirtualClock
from seawall.context import criticality
from seawall.web import Trust
from seawall.web.request import Incoming
from seawall.web.wsgi import Edge, QueueAdmission
from seawall.web.wsgi.queue_wait import queue_wait
from seawall.web.wsgi.wsgi_request import WsgiRequest, incoming_of
from tests.redis.support import eventually
from tests.web.wsgi.support import ask, environ_of

SERVICE = 0.01


def _unused(*_start: Any) -> Any:
    raise AssertionError


class Pod:
    """An edge whose requests take 10 ms, and a queue in front of it that a test makes up."""

    def __init__(self, **settings: float) -> None:
        self.clock = VirtualClock()
        self.edge = Edge(self._app, queue_admission=QueueAdmission(**settings), clock=self.clock)
        for _ in range(20):  # its gate learns how long a request takes
            assert ask(self.edge).status == 200
            self.clock.advance(0.1)
        self.busy(8, of=8)

    def _app(self, _environ: Any, start: Any) -> list[bytes]:
        self.clock.advance(SERVICE)
        start("200 OK", [])
        return [b""]

    def busy(self, number: int, *, of: int) -> None:
        """Have so many threads serve a request."""
        self.edge._threads.busy, self.edge._threads.max_busy = number, of

    def serves(self, seconds: float, rank: Criticality = Criticality.CRITICAL) -> bool:
        """Tell whether a request is served that has waited for so long."""
        incoming = WsgiRequest(environ_of(), _unused, self.edge)
        incoming.waited = seconds
        try:
            with criticality(rank):
                self.edge._queue_admission.enter(self.clock.now(), incoming)
        except Overloaded as error:
            return error.reason != "shed_by_queue_time"
        return True

    def stand(self, seconds: float, wait: float) -> list[bool]:
        """Serve from a queue in which each request has waited for `wait`; a request every 10 ms."""
        served = []
        for _ in range(round(seconds / 0.01)):
            served.append(self.serves(wait))
            self.clock.advance(0.01)
        return served


@pytest.fixture
def pod() -> Iterator[Pod]:
    """Return a pod with the default settings."""
    made = Pod()
    yield made
    made.edge.close()


def test_a_burst_is_served_whole(pod: Pod) -> None:
    """A queue that is served within half a second refuses no request, however long it waited."""
    waits = [0.45 - n * 0.01 for n in range(45)]
    served = []
    for wait in waits:
        served.append(pod.serves(wait))
        pod.clock.advance(0.01)
    assert all(served)
    assert not pod.edge.snapshot()["policies"][0]["strict"]


def test_a_queue_that_stands_is_cut_to_the_target(pod: Pod) -> None:
    """After `patience` only those are served that have not waited for longer than `target`."""
    served = pod.stand(3.0, 0.3)
    assert all(served[:50])
    assert not any(served[52:])
    assert [pod.serves(wait) for wait in (0.09, 0.11)] == [True, False]
    assert pod.edge.snapshot()["policies"][0]["strict"]


def test_it_is_over_when_hardly_any_is_refused(pod: Pod) -> None:
    """Then a burst is served whole again."""
    pod.stand(3.0, 0.3)
    pod.stand(2.5, 0.0)
    assert all(pod.stand(0.45, 0.5))


def test_a_wait_long_ago_does_not_count_against_a_burst(pod: Pod) -> None:
    """One request that waited, a pause, and a burst: no queue has stood."""
    assert pod.serves(0.3)
    pod.clock.advance(60)
    assert pod.serves(0.0)
    assert all(pod.stand(0.45, 0.5))


def test_less_critical_requests_may_wait_for_less(pod: Pod) -> None:
    """At a wait of 60 ms nothing below CRITICAL is served; CRITICAL_PLUS waits for longer."""
    pod.stand(2.0, 0.3)
    ranks = list(Criticality)
    for wait, served in (
        (0.02, [True, True, True, True]),
        (0.04, [False, True, True, True]),
        (0.06, [False, False, True, True]),
        (0.2, [False, False, False, True]),
        (0.5, [False, False, False, False]),
    ):
        assert [pod.serves(wait, rank) for rank in ranks] == served, wait


def test_idle_threads_serve_rather_than_refuse(pod: Pod) -> None:
    """In a bad queue all have waited too long: three quarters of the threads serve some of them."""
    pod.stand(2.0, 0.3)
    pod.busy(6, of=8)
    assert [pod.serves(wait) for wait in (0.3, 0.9, 2.4)] == [True, True, True]
    pod.busy(7, of=8)
    assert not any(pod.serves(wait) for wait in (0.3, 0.9, 2.4))


def test_slow_requests_may_wait_for_as_long_as_they_take() -> None:
    """Where a request takes 300 ms, a wait of 200 ms is no bad queue."""
    pod = Pod()
    pod.edge.guard.stats.samples.extend([0.3] * 2000)
    pod.clock.advance(1)
    pod.edge.guard.stats.fold(pod.clock.now())
    assert all(pod.stand(4.0, 0.25))
    pod.edge.close()


def test_its_settings_can_be_changed(pod: Pod) -> None:
    """From the next request on, and only to sane ones."""
    policy = pod.edge._queue_admission.policy
    policy.update(target=0.4, patience=2.0)
    assert all(pod.stand(5.0, 0.3))
    policy.update(mode="off")
    assert all(pod.stand(5.0, 0.9))
    with pytest.raises(ValueError, match="patience"):
        policy.update(patience=0.1)
    assert repr(policy) == "QueueAdmission(target=0.4, patience=2)"


# How long a request has waited


def request(**headers: str) -> tuple[dict[str, Any], Incoming]:
    environ = environ_of(headers=headers.items(), client="10.0.0.1")
    incoming = incoming_of(environ)
    incoming.trust = Trust(proxies=["10.0.0.1"])
    return environ, incoming


@pytest.mark.parametrize("unit", [1, 1e3, 1e6])
@pytest.mark.parametrize("prefix", ["t=", ""])
def test_a_proxy_tells_in_any_unit(unit: float, prefix: str) -> None:
    """Nginx writes seconds, Heroku milliseconds, others microseconds."""
    text = f"{prefix}{(wall_time() - 5) * unit:.{3 if unit == 1 else 0}f}"
    assert queue_wait(*request(X_Request_Start=text)) == pytest.approx(5, abs=1)


@pytest.mark.parametrize("text", ["", "t=", "soon", "-1700000000", "99999999999", "1", "9" * 400])
def test_nonsense_says_nothing(text: str) -> None:
    """Neither does a time in the future, or long ago: clocks differ."""
    assert queue_wait(*request(X_Request_Start=text)) == 0.0


def test_strangers_are_not_believed() -> None:
    """Else a caller could have its own requests, or the whole queue, look old."""
    environ, incoming = request(X_Request_Start=f"t={wall_time() - 5:.3f}")
    incoming.trust = Trust()
    assert queue_wait(environ, incoming) == 0.0


def test_the_kernel_knows_when_the_request_came() -> None:
    """The time in the server's queue is the time since its last bytes arrived."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\n")
        with closing(listener.accept()[0]) as connection:
            environ, incoming = request()
            environ["gunicorn.socket"] = connection
            eventually(lambda: queue_wait(environ, incoming) >= 0.1)
            before = SYSTEM.now()
            client.sendall(b"\r\n")
            eventually(lambda: queue_wait(environ, incoming) < 0.1)
            assert queue_wait(environ, incoming) <= SYSTEM.now() - before + 0.05
        client.close()


def test_a_unix_socket_says_nothing() -> None:
    """The kernel does not keep that time for it."""
    one, other = socket.socketpair()
    environ, incoming = request()
    environ["gunicorn.socket"] = one
    assert queue_wait(environ, incoming) == 0.0
    one.close()
    other.close()
