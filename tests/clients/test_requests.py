"""The adapter of requests over real sockets; what holds for all libraries is in test_exchange."""

from __future__ import annotations

import gzip
import socket
from http.client import IncompleteRead
from io import BytesIO
from typing import Any

import pytest
import requests
from requests.adapters import BaseAdapter
from requests.auth import HTTPDigestAuth
from urllib3 import HTTPResponse
from urllib3.util import Timeout as Urllib3Timeout

from seawall import Breaker, CircuitOpen, Retry, TimedOut, Timeout, deadline, transient
from seawall.clients.http.bodies import KEPT
from seawall.clients.http.library import lower_urllib3_timeout as lower
from seawall.clients.requests import GuardedAdapter
from tests.clients.support import CARRIERS, LARGE, Server, Step, real_server
from tests.support import new_guard


def session_of(guard: Any, **settings: Any) -> requests.Session:
    """Return a session all of whose requests go through `guard`."""
    session = requests.Session()
    session.mount("http://", GuardedAdapter(guard, **settings))
    return session


def retrying(*policies: Any) -> Any:
    """Return a guard that makes up to three attempts, with next to no pause."""
    return new_guard(Retry(on=transient, backoff=0.001), *policies)


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


@pytest.mark.alone
def test_a_hung_server_is_given_up_on():
    """A cooperative timeout bounds requests' own, which has none by default."""
    guard = new_guard(Timeout(0.1, sync="cooperative"))
    with real_server(hangs=True) as server, session_of(guard) as session:
        with pytest.raises(TimedOut) as caught:
            session.get(server.url)
        assert isinstance(caught.value, requests.Timeout)


def test_a_refused_connection_is_tried_again_for_a_post():
    """A refused connection sent nothing, so a POST without a key is retried as well."""
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
    assert (it.value.request is None, it.value.response) == (False, None)


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
    found = lower(given, 2.0)
    assert (found.total, found._connect, found._read) == (total, connect, read)
    assert lower(given, None) is given


def test_a_total_of_urllib3s_own_works_too():
    """A urllib3 timeout with nothing but a total is understood, under a deadline as well."""
    with real_server() as server, session_of(retrying()) as session, deadline(5.0):
        assert session.get(server.url, timeout=Urllib3Timeout(total=3)).status_code == 200


@pytest.mark.parametrize(
    ("own", "later"), [(9.0, 9.0), ((1, 8.0), 8.0), (None, None), (Urllib3Timeout(read=7), 7)]
)
def test_the_users_timeout_counts_for_the_body(own: Any, later: float | None):
    """Once the headers are there, each piece of a stream has the time that the user gave it."""
    guard = new_guard(Timeout(2.0, sync="cooperative"))
    with (
        real_server(body=LARGE) as server,
        session_of(guard) as session,
        session.get(server.url, stream=True, timeout=own) as answer,
    ):
        assert answer.raw.connection.sock.gettimeout() == later
        assert answer.content == LARGE


def test_a_digest_is_sent_through_the_guard():
    """The request that answers a challenge is guarded as the first was."""
    challenge = {"www-authenticate": 'Digest realm="r", nonce="n", qop="auth"'}
    server = Server(Step(401, challenge), Step(503), Step(200))
    options: Any = {"auth": HTTPDigestAuth("user", "secret")}
    assert CARRIERS[-1].request(retrying(), server, **options).status_code == 200
    assert [seen.headers["seawall-attempt"] for seen in server.seen] == ["1", "1", "2"]
    assert ["authorization" in seen.headers for seen in server.seen] == [False, True, True]


def test_a_failed_answer_is_kept_as_it_came():
    """What is kept of a failed answer is not unpacked, and can be read in all ways."""
    packed = gzip.compress(bytes(1_000_000))
    assert len(packed) < KEPT
    with real_server(503, body=packed) as server, session_of(new_guard(Breaker())) as session:
        server.headers = [("content-encoding", "gzip"), ("set-cookie", "a=b")]
        with session.get(server.url, stream=True) as answer:
            assert answer.raw.read(decode_content=False) == packed
        assert session.get(server.url).content == bytes(1_000_000)
        assert session.cookies["a"] == "b"


def test_a_body_that_cannot_be_unpacked_does_not_spoil_the_retry():
    """A failed answer that lies about its encoding is a failed answer all the same."""
    server = Server(Step(503, {"content-encoding": "gzip"}), Step(200))
    assert CARRIERS[-1].request(retrying(), server).status_code == 200


class _Breaks(BytesIO):
    """A body of which nothing can be read."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def read(self, *_: Any) -> Any:
        raise self._error


class _Breaking(BaseAdapter):
    """An adapter all of whose answers mean failure, and have a body that breaks."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def send(self, request: Any, *_: Any, **__: Any) -> requests.Response:
        answer = requests.Response()
        answer.status_code, answer.request, answer.url = 503, request, request.url
        answer.headers.update({"content-length": "10"})
        answer.raw = HTTPResponse(
            _Breaks(self._error), headers=answer.headers, status=503, preload_content=False
        )
        return answer

    def close(self) -> None:
        """Have nothing to close."""


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (IncompleteRead(b"abc", 7), requests.exceptions.ChunkedEncodingError),
        (TimeoutError(), requests.ConnectionError),
    ],
    ids=["cut off", "stalled"],
)
def test_a_body_that_breaks_is_the_librarys_error(error: Exception, seen: type[Exception]):
    """Who reads the broken body of a failed answer gets what requests raises without a guard."""
    inner = _Breaking(error)
    plain = requests.Session()
    plain.mount("http://", inner)
    guard = retrying()
    for session in plain, session_of(guard, adapter=inner):
        with pytest.raises(requests.RequestException) as caught:
            session.get("http://vendor.test/")
        assert type(caught.value) is seen
        with session.get("http://vendor.test/", stream=True) as answer:
            assert answer.status_code == 503
            assert not answer.raw.closed
        assert answer.raw.closed
    assert guard.snapshot()["retries"] == 4


def test_a_passed_deadline_sends_nothing():
    """With no time left nothing is sent."""
    with real_server() as server, session_of(retrying()) as session, deadline(0.0):
        with pytest.raises(requests.Timeout):
            session.get(server.url)
        assert server.requests == 0
