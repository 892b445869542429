"""What a client is told of each error."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import errors
from seawall.errors import CircuitOpen, Overloaded, RateLimited, SeawallError
from seawall.web import problems
from seawall.web.problems import Problem, problem_of
from tests.support import SEEDS, falsified

STATUSES = {
    errors.CircuitOpen: 503,
    errors.BulkheadFull: 503,
    errors.RateLimited: 503,
    errors.Overloaded: 503,
    errors.PoolExhausted: 503,
    errors.ChannelFull: 503,
    errors.QueueFull: 503,
    errors.Rejected: 503,
    errors.StoreUnavailable: 503,
    errors.DeadlineExceeded: 504,
    errors.TimedOut: 504,
    errors.UnknownJob: 404,
    errors.JobLost: 409,
    errors.JobFailed: 500,
    errors.WorkerDied: 500,
    errors.CacheMiss: 503,
    errors.ChannelClosed: 503,
    errors.Contended: 503,
    errors.LeaseLost: 503,
    errors.SeawallError: 500,
}


def told(problem: Problem | None) -> dict[str, str]:
    """Return the headers of a problem, which there must be."""
    assert problem is not None
    return {name.decode(): value.decode() for name, value in problem.headers()}


def every_error() -> list[type[SeawallError]]:
    """Return every class of errors that Seawall has."""
    found = [SeawallError]
    for cls in found:
        found += [sub for sub in cls.__subclasses__() if sub.__module__ == "seawall.errors"]
    return found


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
def test_every_error_of_ours_has_its_status(cls: type[SeawallError]) -> None:
    """No error is forgotten, and a 429 or 503 always says when to ask again."""
    problem = problem_of(cls("guard 'x': secret detail 10.0.0.1"))
    assert problem is not None
    assert problem.status == STATUSES[cls]
    assert ("retry-after" in told(problem)) == (problem.status in (429, 503))
    body = json.loads(problem.body())
    assert body["status"] == problem.status
    assert body["reason"] == cls.reason
    assert "secret" not in problem.body().decode()


def test_the_callers_own_limit_is_429_with_the_policy_that_was_violated() -> None:
    """A limit of the edge names itself; a vendor's is a matter of this service's."""
    error = RateLimited("over", limit="per-user", retry_after=2.2)
    error.own_limit = True  # type: ignore[attr-defined]
    problem = problem_of(error)
    assert problem is not None
    assert problem.status == 429
    assert told(problem)["retry-after"] == "3"
    body = json.loads(problem.body())
    assert body["violated-policies"] == ["per-user"]
    assert body["type"].endswith("#quota-exceeded")
    vendor = problem_of(RateLimited("over", limit="vendor", retry_after=2.2))
    assert vendor is not None
    assert vendor.status == 503
    assert "violated-policies" not in json.loads(vendor.body())


def test_what_is_known_exactly_is_told_exactly() -> None:
    """A breaker knows when it will ask again."""
    assert told(problem_of(CircuitOpen("open", retry_after=15.0)))["retry-after"] == "15"


def check_spread(seed: int) -> None:
    """Those who were shed together come back at different times, none of them at once."""
    rng = Random(seed)
    waits = {
        int(told(problem_of(Overloaded("shed", retry_after=0.01), rng=rng))["retry-after"])
        for _ in range(30)
    }
    assert waits <= {1, 2, 3}
    assert len(waits) > 1


@given(SEEDS)
def test_who_was_shed_comes_back_at_different_times(seed: int) -> None:
    """The clients that were refused in one moment are not the next wave."""
    check_spread(seed)


def test_without_the_spread_they_come_back_in_one_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spread is what the property needs."""
    monkeypatch.setattr(problems, "SPREAD", 0.0)
    assert falsified(check_spread, SEEDS)


@given(st.one_of(st.floats(), st.integers(), st.none(), st.text()))
def test_a_strange_time_to_wait_never_breaks_the_answer(wait: object) -> None:
    """Whatever somebody put there, the header is a whole number of seconds."""
    problem = problem_of(CircuitOpen("open", retry_after=wait))  # type: ignore[arg-type]
    assert told(problem)["retry-after"].isdigit()


def test_an_upstream_that_failed_is_502_and_one_that_was_late_504() -> None:
    """The errors of HTTP clients are known by their base classes."""
    import httpx
    import requests

    for error in (httpx.ConnectError("no"), requests.ConnectionError("no")):
        problem = problem_of(error)
        assert problem is not None
        assert problem.status == 502
    for late in (httpx.ReadTimeout("late"), requests.Timeout("late")):
        problem = problem_of(late)
        assert problem is not None
        assert problem.status == 504


def test_other_errors_are_not_ours() -> None:
    """A bug of the app is its own affair."""
    assert problem_of(ValueError("bug")) is None
    assert repr(problem_of(Overloaded())) == "<Problem 503 'Temporary reduced capacity'>"


def test_a_starlette_app_can_answer_by_itself() -> None:
    """The handler gives the same answer, and lets others' errors pass."""
    response = asyncio.run(problems.problem_handler(None, Overloaded("shed")))
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/problem+json"
    assert "retry-after" in response.headers
    with pytest.raises(ValueError, match="bug"):
        asyncio.run(problems.problem_handler(None, ValueError("bug")))
