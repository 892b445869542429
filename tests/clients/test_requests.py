"""The adapter of requests over real sockets; what holds for all libraries is in test_exchange."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import requests
from urllib3.util import Timeout as Urllib3Timeout

from seawall import Breaker, CircuitOpen, Retry, TimedOut, Timeout, deadline
from seawall.clients.requests import GuardedAdapter, _lowered, retryable
from tests.clients.support import LARGE, real_server
from tests.support import new_guard


def session_of(guard: Any, **settings: Any) -> requests.Session:
    """Return a session all of whose requests go through `guard`."""
    session = requests.Session()
    session.mount("http://", GuardedAdapter(guard, **settings))
    return session


def retrying(*policies: Any) -> Any:
    """Return a guard that makes up to three attempts, with next to no pause."""
    return new_guard(Retry(on=retryable, backoff=0.001), *policies)


@pytest.mark.parametrize("body", [b"sorry", LARGE], ids=["small", "large"])
def test_no_connection_leaks(body: bytes):
    """The session's one connection serves all attempts, and is back in its pool at the end."""
    guard = retrying()
    with real_server(503, body=body) as server, session_of(guard) as session:
        for _ in range(20):
            assert session.get(server.url).content == body
        assert server.requests == 60
        adapter: Any = session.get_adapter(server.url)
        pools = adapter.adapter.poolmanager.pools
        pool = pools[next(iter(pools.keys()))]
        assert pool.num_connections == 1
        assert pool.pool.qsize() == pool.pool.maxsize  # nothing is lent out


def test_an_answer_after_a_retry_is_handed_out_as_it_is():
    """Redirects, streaming and the request of an answer are those of requests."""
    with real_server(503, 200, body=LARGE) as server, session_of(retrying()) as session:
        with session.get(server.url, stream=True) as answer:
            assert sum(len(part) for part in answer.iter_content(1000)) == len(LARGE)
        assert "seawall-attempt" not in answer.request.headers


def test_a_hung_server_is_given_up_on():
    """A cooperative timeout bounds requests' own, which has none by default."""
    guard = new_guard(Timeout(0.1, sync="cooperative"))
    with real_server(hangs=True) as server, session_of(guard) as session:
        with pytest.raises(TimedOut) as caught:
            session.get(server.url)
        assert isinstance(caught.value, requests.Timeout)


def test_a_refused_connection_is_tried_again_for_a_post():
    """Where nobody listens nothing was sent, so a POST without a key is tried again as well."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    guard = retrying()
    with session_of(guard) as session, pytest.raises(requests.ConnectionError):
        session.post(f"http://127.0.0.1:{port}/", data=b"x")
    assert guard.snapshot()["retries"] == 2


def test_old_code_catches_refusals():
    """Code that catches requests' errors catches an open circuit."""
    breaker = Breaker()
    breaker.isolate()
    with session_of(new_guard(breaker)) as session, pytest.raises(requests.ConnectionError) as it:
        session.get("http://vendor.test/")
    assert isinstance(it.value, CircuitOpen)
    assert it.value.request is not None


@pytest.mark.parametrize(
    ("given", "lowered"),
    [
        (None, (2.0, None, None)),
        (1.0, (2.0, 1.0, 1.0)),
        ((5, None), (2.0, 5, None)),
        ((1, 9), (2.0, 1, 9)),
        (Urllib3Timeout(connect=0.5, read=7.0), (2.0, 0.5, 7.0)),
        (Urllib3Timeout(1.5, connect=0.5, read=7.0), (1.5, 0.5, 7.0)),
    ],
    ids=str,
)
def test_timeouts_are_lowered_in_all_their_forms(given: Any, lowered: Any):
    """Seconds, pairs and urllib3's own timeouts get a total, and are never raised."""
    total, connect, read = lowered
    found = _lowered(given, 2.0)
    assert (found.total, found._connect, found._read) == (total, connect, read)
    assert _lowered(given, None) is given


def test_a_passed_deadline_sends_nothing():
    """With no time left nothing is sent."""
    with real_server() as server, session_of(retrying()) as session, deadline(0.0):
        with pytest.raises(requests.Timeout):
            session.get(server.url)
        assert server.requests == 0
