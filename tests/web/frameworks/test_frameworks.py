"""The same service in each framework, under a real server: what works where."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.redis.support import eventually
from tests.web.frameworks.frameworks import CHECKS, FRAMEWORKS, Framework, Service, running, table
from tests.web.frameworks.service import ALLOWED, PLACES, SLOW, TIMEOUT

pytestmark = pytest.mark.alone

PAGE = next((Path(__file__).resolve().parents[3] / "docs").rglob("frameworks.md"))


def rows(check: str) -> Any:
    """Parametrize a test by all frameworks that promise `check`."""
    promised = [framework for framework in FRAMEWORKS if check in framework.checks]
    return pytest.mark.parametrize("service", promised, indirect=True, ids=lambda row: row.name)


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """Serve one framework's service; pytest groups the tests by it."""
    framework: Framework = request.param
    with running(framework) as started:
        eventually(lambda: started.get("/hello").text == "hello")
        yield started


@rows("refusals")
@pytest.mark.parametrize(
    ("kind", "status", "retry_after"),
    [
        ("caller", 429, "2"),
        ("vendor", 503, "15"),
        ("late", 504, None),
        ("upstream", 502, None),
    ],
)
def test_errors_of_handlers_have_their_status(
    service: Service, kind: str, status: int, retry_after: str | None
) -> None:
    """No handler of the user's is needed, and a message is not disclosed."""
    answer = service.get(f"/errors/{kind}")
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    assert answer.headers.get("retry-after") == retry_after
    assert "guard" not in answer.text


@rows("refusals")
def test_a_bug_is_still_a_500(service: Service) -> None:
    """Nothing else is changed in the app's error handling."""
    answer = service.get("/errors/bug")
    assert answer.status_code == 500
    assert answer.headers["content-type"] != "application/problem+json"
    assert service.get("/no such path").status_code == 404


@rows("deadlines")
def test_a_cut_request_is_answered_in_time_and_holds_its_place_until_its_handler_ends(
    service: Service,
) -> None:
    """Never more handlers run than there are places, and in the end none does."""
    with ThreadPoolExecutor(8) as clients:
        waves = [list(clients.map(service.get, ["/slow"] * 8)) for _ in range(2)]
    statuses = [answer.status_code for wave in waves for answer in wave]
    assert set(statuses) == {503, 504}
    late = [answer for wave in waves for answer in wave if answer.status_code == 504]
    assert all(TIMEOUT * 0.8 < answer.elapsed.total_seconds() < SLOW for answer in late)
    assert len(late) >= PLACES
    assert service.get("/running").json()["most"] <= PLACES
    eventually(lambda: service.get("/running").json()["running"] == 0)


@rows("limits")
def test_a_caller_over_its_limit_is_refused(service: Service) -> None:
    """Others are not."""
    answers = [service.get("/hello", **{"x-user": "eve"}) for _ in range(ALLOWED + 1)]
    assert [answer.status_code for answer in answers] == [200] * ALLOWED + [429]
    assert "callers" in answers[0].headers["ratelimit"]
    assert answers[-1].json()["violated-policies"] == ["callers"]
    assert int(answers[-1].headers["retry-after"]) > 0
    assert service.get("/hello", **{"x-user": "bob"}).status_code == 200


@rows("health")
def test_probes_are_answered(service: Service) -> None:
    """Live, ready and deep."""
    for probe in ("live", "ready", "deep"):
        answer = service.get(f"/health/{probe}")
        assert (answer.status_code, answer.json()["status"]) == (200, "pass")


@rows("draining")
def test_a_stopped_service_loses_no_request(service: Service) -> None:
    """On SIGTERM it is not ready, answers what it has, and ends: so this test is the last one."""
    with ThreadPoolExecutor(4) as clients:
        assert service.get("/health/ready").status_code == 200
        working = [clients.submit(service.get, "/pause") for _ in range(4)]
        eventually(lambda: service.get("/running").json()["pauses"] == 4)
        service.process.send_signal(signal.SIGTERM)
        eventually(lambda: _readiness(service) != 200)
        assert [future.result().text for future in working] == ["done"] * 4
    assert service.process.wait(15) in (0, -signal.SIGTERM)


def _readiness(service: Service) -> int:
    try:
        return service.get("/health/ready").status_code
    except httpx.TransportError:
        return 0


def test_the_table_in_the_docs_is_what_is_tested_here() -> None:
    """A tick stands for tests of this file with that framework; nobody writes one by hand."""
    assert table() in PAGE.read_text()
    assert all(set(framework.checks) <= set(CHECKS) for framework in FRAMEWORKS)
