"""Flask under a real gunicorn on loopback: refusals, deadlines, limits, health, draining."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection

import pytest

from tests.redis.support import eventually
from tests.web.wsgi.support import Gunicorn, gunicorn

pytestmark = pytest.mark.alone

APP = "tests.web.wsgi.flask_service:app"
THREADS = ("--worker-class", "gthread", "--threads", "4")


@pytest.fixture(scope="module")
def server() -> Iterator[Gunicorn]:
    """Serve with two workers of four threads, forked after the app was imported."""
    with gunicorn(APP, *THREADS, "--workers", "2", "--preload") as running:
        yield running


def test_errors_are_problems(server: Gunicorn) -> None:
    """A refusal inside the app has its status, Retry-After and problem+json."""
    status, headers, body = server.get("/open")
    assert (status, headers["retry-after"]) == (503, "7")
    assert headers["content-type"] == "application/problem+json"
    assert b"secret" not in body


def test_a_deadline_of_the_caller_ends_the_work(server: Gunicorn) -> None:
    """The guard inside sees it, and the answer is 504."""
    assert server.get("/steps/9.0", {"Grpc-Timeout": "200m"})[0] == 504
    assert server.get("/steps/0.1", {"Grpc-Timeout": "9S"})[2] == b"worked"


def test_a_views_limit_holds(server: Gunicorn) -> None:
    """Each worker counts for itself, without a shared store."""
    statuses = [server.get("/limited")[0] for _ in range(9)]
    assert set(statuses) == {200, 429}
    assert 2 <= statuses.count(200) <= 4


def test_health_is_answered_by_every_worker(server: Gunicorn) -> None:
    """Each of them has its own background loop, made after the fork."""
    pids = set()

    def both() -> bool:
        assert server.get("/health/ready")[0] == 200
        assert server.get("/health/live")[0] == 200
        pids.add(json.loads(server.get("/")[2])["pid"])
        return len(pids) == 2

    eventually(both, 20)


def test_an_unread_body_does_not_confuse_the_connection(server: Gunicorn) -> None:
    """A refused upload is followed by another request on the same connection."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    big = b"x" * 20_000  # gunicorn closes the connection after much more
    connection.request("POST", "/body", big, {"Grpc-Timeout": "0S"})
    refused = connection.getresponse()
    assert (refused.status, json.loads(refused.read())["status"]) == (504, 504)
    connection.request("POST", "/body", big)
    assert connection.getresponse().read() == b"20000"
    connection.close()


def test_a_client_that_goes_away_holds_nothing(server: Gunicorn) -> None:
    """The server closes the body, and the request is counted out."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /stream/0.2 HTTP/1.1\r\nHost: x\r\n\r\n")
        heard = b""
        while b"begin" not in heard:
            heard += client.recv(10_000)

    def none_left() -> bool:
        shown = [json.loads(server.get("/state")[2])["lifecycle"]["in_flight"] for _ in range(8)]
        return shown == [1] * 8  # the request that asks

    eventually(none_left, 20)


# Draining


def ask(pool: ThreadPoolExecutor, server: Gunicorn, path: str) -> Future[tuple[int, bytes]]:
    """Ask in a thread; wait until the request runs."""

    def get() -> tuple[int, bytes]:
        status, _, body = server.get(path)
        return status, body

    asked = pool.submit(get)
    eventually(lambda: json.loads(server.get("/state")[2])["lifecycle"]["in_flight"] == 2, 20)
    return asked


@pytest.mark.parametrize("options", [THREADS, (*THREADS, "--preload")], ids=["gthread", "preload"])
def test_running_requests_end_before_the_worker_does(options: tuple[str, ...]) -> None:
    """SIGTERM: no new connections, the running request is answered whole, then it exits."""
    with gunicorn(APP, *options) as server, ThreadPoolExecutor() as pool:
        assert server.status("/health/ready") == 200
        running = ask(pool, server, "/stream/1.0")
        server.terminate()
        assert running.result(20) == (200, b"begin end")
        code, log = server.end()
        assert code == 0, log
        assert "Traceback" not in log


def test_readiness_fails_while_requests_are_still_taken() -> None:
    """With a delay, load balancers see it before the port closes; accepted requests are served."""
    life = {"delay": 1.5, "drain_timeout": 20.0}
    with gunicorn(APP, *THREADS, lifecycle=life) as server, ThreadPoolExecutor() as pool:
        assert server.status("/health/ready") == 200
        running = ask(pool, server, "/sleep/2.5")
        server.terminate()
        eventually(lambda: server.status("/health/ready") == 503, 10)
        assert json.loads(server.get("/health/ready")[2])["output"] == "draining"
        assert server.status("/") == 200
        assert running.result(20) == (200, b"slept")
        code, log = server.end()
        assert code == 0, log
        assert "Traceback" not in log


def test_a_sync_worker_drains_too() -> None:
    """Its one request runs in the main thread, where the signal arrives."""
    with gunicorn(APP, "--worker-class", "sync") as server:
        assert server.status("/health/ready") == 200
        connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", "/stream/1.0")
        running = connection.getresponse()
        assert running.read(6) == b"begin "
        server.terminate()
        assert running.read() == b"end"
        connection.close()
        assert server.end()[0] == 0


def test_a_delay_that_cannot_hold_is_told() -> None:
    """With preload and threads nobody can stand before gunicorn's handler: the log says so."""
    life = {"delay": 1.0, "drain_timeout": 20.0}
    with gunicorn(APP, *THREADS, "--preload", lifecycle=life) as server:
        assert server.status("/health/ready") == 200
        assert "the delay of 1 s cannot hold" in server.log


# Overload


def test_requests_that_waited_too_long_are_refused() -> None:
    """More than the threads can do: some are served, the others refused, none waits for ever."""
    admission = {"target": 0.05, "patience": 0.2}
    with gunicorn(APP, *THREADS, queue_admission=admission) as server:
        for _ in range(4):
            assert server.status("/sleep/0.05") == 200
        with ThreadPoolExecutor(60) as pool:
            statuses = list(pool.map(lambda _: server.status("/sleep/0.05"), range(400)))
        assert set(statuses) == {200, 503}
        assert statuses.count(200) >= 20
        policy = json.loads(server.get("/state")[2])["policies"][0]
        assert policy["rejected"] == statuses.count(503)
        assert server.status("/health/live") == 200
