"""What a client is told of each error."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    errors.DeferredCallsFull: 503,
    errors.FifoFull: 503,
    errors.KeyInFlight: 409,
    errors.AmbiguousHeader: 400,
    errors.KeyMissing: 400,
    errors.KeyReused: 422,
    errors.RecordedFailure: 500,
    errors.ReportedFailure: 500,
    errors.AnswerNotKept: 500,
    errors.RecordGarbled: 500,
    errors.JobExpired: 410,
    errors.JobCancelled: 409,
    errors.FifoStateLost: 500,
    errors.NotDelivered: 502,
    errors.BadSignature: 403,
    errors.SeawallError: 500,
}


def told(problem: Problem | None) -> dict[str, str]:
    """Return the headers of a problem, which there must be."""
    assert problem is not None
    return problem.headers()


def every_error() -> list[type[SeawallError]]:
    """Return every class of errors that Seawall has."""
    found = [SeawallError]
    for cls in found:
        found += [sub for sub in cls.__subclasses__() if sub.__module__ == "seawall.errors"]
    return found


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
def test_every_error_of_ours_has_its_status(cls: type[SeawallError]) -> None:
    """No error is forgotten; a 429, a 503 and what is under way always say when to ask again."""
    problem = problem_of(cls("guard 'x': secret detail 10.0.0.1"))
    assert problem is not None
    assert problem.status == STATUSES[cls]
    waiting = problem.status in (429, 503) or cls is errors.KeyInFlight
    assert ("retry-after" in told(problem)) == waiting
    body = json.loads(problem.body())
    assert body["status"] == problem.status
    assert body["reason"] == cls.reason
    assert "secret" not in problem.body().decode()


def test_the_callers_own_limit_is_429_with_the_policy_that_was_violated() -> None:
    """A limit of the edge names itself; a vendor's is a matter of this service's."""
    error = RateLimited("over", limit="per-user", retry_after=2.2)
    error.own_limit = True
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


def test_all_limits_of_its_own_that_a_request_is_over_are_named() -> None:
    """Those that the edge has found are told, not only the first."""
    error = RateLimited("over", limit="user", retry_after=2.0)
    error.own_limit = True
    error.violated = ("user", "address")
    problem = problem_of(error)
    assert problem is not None
    assert json.loads(problem.body())["violated-policies"] == ["user", "address"]


def test_the_limit_of_all_together_is_the_services_affair() -> None:
    """It is 503 without the limit's name, and who is refused comes back at different times."""
    error = RateLimited("over", limit="global", retry_after=0.5)
    error.violated = ("global",)
    rng = Random(1)
    problems_told = [problem_of(error, rng=rng) for _ in range(30)]
    assert {problem.status for problem in problems_told if problem} == {503}
    body = problems_told[0].body() if problems_told[0] else b""
    assert json.loads(body)["detail"] == "The service has more requests than it accepts."
    assert b"global" not in body
    assert len({told(problem)["retry-after"] for problem in problems_told}) > 1


@pytest.mark.parametrize("own", [True, False], ids=["own", "of all"])
def test_what_never_fits_is_not_told_to_come_again(*, own: bool) -> None:
    """A limit of the edge that knows no time to wait will never let the request pass."""
    error = RateLimited("never", limit="user")
    error.own_limit = own
    error.violated = ("user",)
    assert "retry-after" not in told(problem_of(error))


def test_a_store_that_is_away_is_told_in_fixed_words() -> None:
    """A limit that cannot be looked up is nobody's quota."""
    error = RateLimited("the store redis://10.0.0.1 is away", limit="user", retry_after=0.1)
    error.reason = errors.StoreUnavailable.reason
    problem = problem_of(error)
    assert problem is not None
    assert problem.status == 503
    body = json.loads(problem.body())
    assert body["detail"] == "A store that this service needs is unavailable."
    assert body["reason"] == "store_unavailable"
    assert told(problem)["retry-after"] == "1"


def test_what_is_known_exactly_is_told_exactly() -> None:
    """A breaker knows when it will ask again."""
    assert told(problem_of(CircuitOpen("open", retry_after=15.0)))["retry-after"] == "15"


def test_who_asks_for_what_is_under_way_is_told_when_it_may_be_done() -> None:
    """A key in flight knows the rest of its lease; other conflicts are no matter of waiting."""
    problem = problem_of(errors.KeyInFlight("at work", retry_after=7.5))
    assert problem is not None
    assert (problem.status, told(problem)["retry-after"]) == (409, "8")
    assert "retry-after" not in told(problem_of(errors.JobLost("over")))


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
    import urllib3

    refused = urllib3.exceptions.NewConnectionError(None, "no")  # type: ignore[arg-type]
    for error in (httpx.ConnectError("no"), requests.ConnectionError("no"), refused):
        problem = problem_of(error)
        assert problem is not None
        assert problem.status == 502
    for late in (httpx.ReadTimeout("late"), requests.Timeout("late")):
        problem = problem_of(late)
        assert problem is not None
        assert problem.status == 504


def test_an_upstream_that_was_late_by_grpc_is_504() -> None:
    """The code of the error tells."""
    import grpc

    class Failed(grpc.RpcError):
        def __init__(self, code: grpc.StatusCode) -> None:
            self._code = code

        def code(self) -> grpc.StatusCode:
            return self._code

    codes = {grpc.StatusCode.DEADLINE_EXCEEDED: 504, grpc.StatusCode.UNAVAILABLE: 502}
    for code, status in codes.items():
        problem = problem_of(Failed(code))
        assert problem is not None
        assert problem.status == status


def test_what_an_sdk_has_wrapped_is_told_as_what_it_is() -> None:
    """A circuit that is open below a vendor's SDK is no failure of the vendor's."""
    import openai

    error = openai.APIConnectionError(request=None)  # type: ignore[arg-type]
    error.__cause__ = RuntimeError("between")
    error.__cause__.__cause__ = CircuitOpen("open", retry_after=4.0)
    problem = problem_of(error)
    assert problem is not None
    assert problem.status == 503
    assert told(problem)["retry-after"] == "4"
    error.__cause__.__cause__ = error  # a circle ends
    circle = problem_of(error)
    assert circle is not None
    assert circle.status == 502
    bug = ValueError("bug")
    bug.__cause__ = CircuitOpen("open")
    assert problem_of(bug) is None


def test_other_errors_are_not_ours() -> None:
    """A bug of the app is its own affair."""
    assert problem_of(ValueError("bug")) is None
    assert repr(problem_of(Overloaded())) == "<Problem 503 'Temporary reduced capacity'>"


def mistakes() -> list[Exception]:
    """Return errors by which clients say that they were called wrongly."""
    import httpx
    import httpx2
    import requests
    import urllib3

    def raised_by(call: Callable[[], object]) -> Exception:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - of any client's
            return error
        raise AssertionError("it raises nothing")

    return [
        raised_by(lambda: httpx.get("vendor/orders")),
        raised_by(lambda: httpx.get("http://vendor:port/")),
        raised_by(lambda: httpx2.get("vendor/orders")),
        raised_by(lambda: requests.get("vendor/orders", timeout=1)),
        raised_by(lambda: requests.get("ftp://vendor/orders", timeout=1)),
        raised_by(lambda: requests.get("http://", timeout=1)),
        raised_by(lambda: requests.get("http://vendor", headers={"a": "b\n"}, timeout=1)),
        raised_by(lambda: requests.post("http://vendor", json=float("nan"), timeout=1)),
        raised_by(lambda: urllib3.PoolManager().request("GET", "ftp://vendor/orders")),
        raised_by(lambda: urllib3.PoolManager().request("GET", "http://vendor:port/")),
        httpx.LocalProtocolError("Illegal header value b'Bearer '"),
        urllib3.exceptions.ClosedPoolError(None, "closed"),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("error", mistakes(), ids=lambda error: type(error).__qualname__)
def test_a_client_that_is_called_wrongly_is_no_upstream_that_failed(error: Exception) -> None:
    """It is a bug of the app, also where a vendor's SDK has wrapped what its client says."""
    import openai

    assert problem_of(error) is None
    wrapped = openai.APIConnectionError(request=None)  # type: ignore[arg-type]
    wrapped.__cause__ = error
    assert problem_of(wrapped) is None
    wrapped.__cause__ = CircuitOpen("open")
    wrapped.__cause__.__cause__ = error  # what Seawall refuses is Seawall's
    problem = problem_of(wrapped)
    assert problem is not None
    assert problem.status == 503


def test_an_answer_that_makes_no_sense_is_no_mistake_of_the_callers() -> None:
    """JSON that cannot be read, and a redirect to nowhere, come from the upstream."""
    import requests

    class ClientError(Exception):
        """The base of aiohttp's errors."""

    class InvalidURL(ClientError):
        """What aiohttp says of a URL that was given to it."""

    class RedirectClientError(ClientError):
        """What it says of an answer."""

    class InvalidUrlRedirectClientError(InvalidURL, RedirectClientError):
        """What it says of a URL in an answer."""

    for kind in (ClientError, InvalidURL, RedirectClientError, InvalidUrlRedirectClientError):
        kind.__module__ = "aiohttp.client_exceptions"
    assert problem_of(InvalidURL("vendor")) is None
    for error in (
        InvalidUrlRedirectClientError("vendor"),
        requests.JSONDecodeError("no value", "<html>", 0),
    ):
        problem = problem_of(error)
        assert problem is not None
        assert problem.status == 502


def test_headers_are_text_and_the_raw_ones_are_what_asgi_sends():
    """Frameworks take text; the edge sends the very same as bytes."""
    problem = problem_of(CircuitOpen("open", retry_after=2.0))
    assert problem.headers() == {"content-type": "application/problem+json", "retry-after": "2"}
    raw = [(name.encode(), value.encode()) for name, value in problem.headers().items()]
    assert problem.raw_headers() == raw
