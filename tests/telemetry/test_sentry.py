"""Reports to Sentry: the real SDK, with a transport that keeps what it would send."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import sentry_sdk
from hypothesis import given
from hypothesis import strategies as st
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

from seawall import Breaker, Bulkhead, Guard, Rejected, Retry, Timeout, errors
from seawall.clients.llm import http_client
from seawall.durable import Database, Jobs, JobWorker, Sqlite, migrate
from seawall.events import JobDied
from seawall.events.bus import emit
from seawall.telemetry import log_events, sentry_before_send
from seawall.testing import run_virtual
from tests.clients.llm.support import Vendor, refuses
from tests.support import let_pass, new_guard


class Memory(Transport):
    """Keeps the events that it is given."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.events: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        if (event := envelope.get_event()) is not None:
            self.events.append(event)


@pytest.fixture
def sent(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Return what the SDK sends, in a scope of this test's own."""
    gc.collect()  # asyncio logs errors that other tests have never read when they are freed
    memory = Memory()
    client = sentry_sdk.Client(
        dsn="http://key@127.0.0.1:9/1",
        transport=memory,
        before_send=getattr(request, "param", sentry_before_send),
        default_integrations=False,
        auto_enabling_integrations=False,
        integrations=[LoggingIntegration()],
    )
    with sentry_sdk.isolation_scope() as scope:
        scope.set_client(client)
        yield memory.events
    client.close()


def capture(error: BaseException) -> None:
    """Report as a service does: what was raised, with its traceback."""
    try:
        raise error  # noqa: TRY301 - what is reported has a traceback
    except BaseException as raised:  # noqa: BLE001 - it is what is reported
        sentry_sdk.capture_exception(raised)


def refusals() -> list[type[Rejected]]:
    found = [getattr(errors, name) for name in errors.__all__]
    return [one for one in found if isinstance(one, type) and issubclass(one, Rejected)]


@pytest.mark.parametrize("kind", refusals(), ids=lambda kind: kind.__name__)
def test_no_refusal_is_reported(kind: type[Rejected], sent: list[dict[str, Any]]):
    """Alone or in a group of one; what is raised beside it is reported."""
    refused = kind("no")
    capture(refused)
    capture(ExceptionGroup("tasks", [refused]))
    assert sent == []
    capture(ExceptionGroup("tasks", [refused, KeyError("real")]))
    assert len(sent) == 1


@pytest.mark.parametrize("sent", [None], indirect=True)
def test_without_it_refusals_are_reported(sent: list[dict[str, Any]]):
    """Ablation: the SDK alone reports each of them."""
    capture(errors.CircuitOpen("open", guard="vendor"))
    assert len(sent) == 1
    assert "fingerprint" not in sent[0]


def test_a_refusal_inside_an_sdk_is_not_reported_and_its_cause_is(sent: list[dict[str, Any]]):
    """The vendor's 500 is an issue; the calls that the open breaker then refuses are none."""
    vendor = Vendor(refuses(500), refuses(500))
    with http_client(new_guard(Breaker(consecutive=1)), vendor.transport()) as http:
        sdk = openai.OpenAI(http_client=http, max_retries=0, api_key="k", base_url="http://v/v1")
        for _ in range(5):
            try:
                sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            except openai.OpenAIError as error:
                sentry_sdk.capture_exception(error)
    assert vendor.asked == 1
    assert [event["exception"]["values"][-1]["type"] for event in sent] == ["InternalServerError"]


def test_timeouts_of_a_guard_are_one_issue(sent: list[dict[str, Any]]):
    """Raised in two functions: the same group; those of another guard are in another."""
    guards = [Guard(name, Timeout(1.0)) for name in ("slow vendor", "slow vendor 2")]

    async def one() -> None:
        await let_pass(5.0)

    async def other() -> None:
        await let_pass(9.0)

    async def main() -> None:
        for guard, function in ((guards[0], one), (guards[0], other), (guards[1], one)):
            try:
                await guard.acall(function)
            except TimeoutError as error:
                sentry_sdk.capture_exception(error)

    run_virtual(main())
    for guard in guards:
        guard.close()
    assert [event["fingerprint"] for event in sent] == [
        ["seawall", "timed_out", "slow vendor"],
        ["seawall", "timed_out", "slow vendor"],
        ["seawall", "timed_out", "slow vendor 2"],
    ]
    assert sent[0]["tags"] == {"seawall.reason": "timed_out", "seawall.guard": "slow vendor"}


def test_errors_of_the_user_are_left_alone(sent: list[dict[str, Any]]):
    """Also one that was raised from a refusal: who wraps it wants it reported."""
    capture(KeyError("mine"))
    wrapper = LookupError("no price for this order")
    wrapper.__cause__ = errors.CircuitOpen("open", guard="prices")
    capture(wrapper)
    assert len(sent) == 2
    assert not any("fingerprint" in event for event in sent)


def test_events_are_breadcrumbs_of_the_next_report(sent: list[dict[str, Any]]):
    """What the guard did before the error is in its report, with its values."""
    guard = Guard("crumbs", Retry(on=OSError, attempts=2, backoff=0.0), Bulkhead(1))

    def down() -> None:
        raise ConnectionRefusedError

    logger = logging.getLogger("seawall.test.sentry")
    logger.setLevel(logging.INFO)
    with log_events(logger):
        try:
            guard.call(down)
        except OSError as error:
            sentry_sdk.capture_exception(error)
    guard.close()
    (event,) = sent
    crumbs = [crumb["data"] for crumb in event["breadcrumbs"]["values"]]
    assert [crumb["seawall_event"] for crumb in crumbs] == ["call_retried", "retry_stopped"]
    assert crumbs[0]["seawall_guard"] == "crumbs"
    assert crumbs[0]["seawall_reason"] == "ConnectionRefusedError"


def test_lines_about_an_event_are_one_issue(sent: list[dict[str, Any]]):
    """Each job that dies has its id in the message; the issue is that jobs of this queue die."""
    with log_events("seawall.test.sentry"):
        for job in ("17", "18"):
            emit(JobDied, "mails", job=job, attempts=3, cause="KeyError", traceback="")
    assert [event["fingerprint"] for event in sent] == [["seawall", "job_died", "mails"]] * 2
    assert sent[0]["logentry"]["message"] == "%s in %r: %s"


def test_an_error_of_a_handler_is_reported_with_its_stack(
    sent: list[dict[str, Any]], tmp_path: Any
):
    """The last attempt of a job is an error of the log, whose exception Sentry groups itself."""
    source = Sqlite(tmp_path / "jobs.db")
    database = Database(source, name="sentry jobs")
    migrate(database)
    jobs = Jobs(database, attempts=1)

    def broken(_job: Any) -> None:
        raise KeyError("no such customer")

    async def main() -> None:
        await jobs.asubmit(None, "mail", {}, scope="a")
        await JobWorker(jobs, {"mail": broken}).run_once()

    try:
        run_virtual(main())
    finally:
        database.close()
        source.close()
    (event,) = sent
    (raised,) = event["exception"]["values"]
    assert raised["type"] == "KeyError"
    assert raised["stacktrace"]["frames"][-1]["function"] == "broken"
    assert "fingerprint" not in event


@given(guard=st.text(max_size=300), reason=st.text(max_size=50))
def test_no_name_breaks_a_report(guard: str, reason: str):
    """A fingerprint is printable text of bounded length."""
    error = errors.TimedOut("late", guard=guard)
    error.reason = reason
    event = sentry_before_send({"tags": {"own": "1"}}, {"exc_info": (type(error), error, None)})
    assert event["tags"]["own"] == "1"
    assert event["fingerprint"][2].isprintable()
    assert len(event["fingerprint"][2]) <= 200
