"""Actors of dramatiq, in a real worker with a real broker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from queue import Queue
from secrets import token_hex
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker

from seawall import (
    Breaker,
    CircuitOpen,
    Criticality,
    Retry,
    TimedOut,
    Timeout,
    criticality,
    deadline,
)
from seawall.context import current_attempt, idempotency_key, tenant
from seawall.tasks.dramatiq import GuardedActors
from tests.support import new_guard
from tests.tasks.test_celery import WALL, context

pytestmark = pytest.mark.alone


class Actors:
    """A broker, its worker, and what its actors reported."""

    def __init__(self, broker: RedisBroker) -> None:
        self.broker = broker
        self.reports: Queue[Any] = Queue()

    def actor(self, function: Any, **options: Any) -> Any:
        """Declare `function` as an actor under a name of its own."""
        name = f"actor-{token_hex(4)}"
        return dramatiq.actor(function, actor_name=name, broker=self.broker, **options)

    def next(self) -> Any:
        """Return the next report of an actor."""
        return self.reports.get(timeout=60.0)


class Ends(dramatiq.Middleware):
    """Reports the errors of messages that will not be run again."""

    def __init__(self) -> None:
        self.errors: Queue[BaseException] = Queue()

    def after_nack(self, broker: Any, message: Any) -> None:
        """Report why the message is given up."""
        self.errors.put(message._exception)


@pytest.fixture(scope="module")
def ends() -> Ends:
    """Return the errors of messages that were given up."""
    return Ends()


@pytest.fixture(scope="module")
def actors(redis_url: str, ends: Ends) -> Iterator[Actors]:
    """Run a worker in threads, for all tests of this file."""
    logging.getLogger("dramatiq").setLevel(logging.CRITICAL)
    broker = RedisBroker(url=redis_url, namespace=f"dramatiq-{token_hex(4)}")
    broker.add_middleware(GuardedActors())
    broker.add_middleware(ends)
    broker.declare_queue("default")
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=2)
    worker.start()
    try:
        yield Actors(broker)
    finally:
        worker.stop()
        broker.close()


def tripped(**settings: Any) -> Any:
    """Return a guard whose breaker is open."""
    guard = new_guard(Breaker(consecutive=1, **settings))
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 / 0)
    return guard


def test_an_actor_has_the_context_of_its_sender(actors: Actors):
    """Deadline, criticality, tenant and key are in the worker what they were at the sender's."""
    seen = actors.actor(lambda: actors.reports.put(context()))
    with (
        deadline(30.0),
        criticality(Criticality.SHEDDABLE),
        tenant("acme"),
        idempotency_key("order-7"),
    ):
        seen.send()
    found = actors.next()
    assert 0.0 < found.pop("left") <= 30.0
    assert found == {"criticality": "SHEDDABLE", "tenant": "acme", "key": "order-7"}
    seen.send()
    assert actors.next() == {
        "left": None,
        "criticality": "CRITICAL",
        "tenant": None,
        "key": None,
    }


def test_a_message_that_waited_too_long_is_given_up(actors: Actors, ends: Ends):
    """The actor is not run, and the message is not retried."""
    late = actors.actor(lambda: actors.reports.put("ran"))
    headers = {"x-server-timeout": "30.000", "seawall-sent": f"{WALL() - 31:.3f}"}
    late.send_with_options(seawall=headers)
    assert "DeadlineExceeded" in repr(ends.errors.get(timeout=60.0))
    assert actors.reports.empty()


def test_an_actor_whose_circuit_is_open_is_rescheduled(actors: Actors):
    """It runs again when the breaker may let it through, and not before."""
    guard = tripped(break_for=0.5)
    work = actors.actor(lambda: actors.reports.put("done"), guard=guard, max_retries=20)
    work.send()
    assert actors.next() == "done"
    assert guard.snapshot()["rejected"] >= 1
    assert actors.reports.empty()


def test_a_refusal_is_final_where_the_deadline_would_pass_first(actors: Actors, ends: Ends):
    """No message is rescheduled beyond its deadline."""
    guard = tripped(break_for=3600.0)
    work = actors.actor(lambda: actors.reports.put("done"), guard=guard)
    with deadline(60.0):
        work.send()
    assert "CircuitOpen" in repr(ends.errors.get(timeout=60.0))
    assert guard.snapshot()["rejected"] == 1


@pytest.mark.parametrize("idempotent", [True, False])
def test_an_actor_that_ran_out_of_time_runs_again_if_that_is_safe(
    actors: Actors, ends: Ends, *, idempotent: bool
):
    """A time limit of the guard ends one run; the next one is dramatiq's."""
    runs: list[int] = []

    def work() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise TimedOut("as a client in the actor does at the deadline of the attempt")
        actors.reports.put("done")

    guard = new_guard(Timeout(5.0, sync="cooperative"), idempotent=idempotent)
    actors.actor(work, guard=guard, min_backoff=1).send()
    if idempotent:
        assert actors.next() == "done"
    else:
        assert "TimedOut" in repr(ends.errors.get(timeout=60.0))
        assert len(runs) == 1


def test_attempts_do_not_multiply(actors: Actors, ends: Ends):
    """The guard retries in the first run only: 3 attempts, and one in each of dramatiq's."""
    attempts: list[int] = []

    def work() -> None:
        attempts.append(current_attempt())
        raise ConnectionError("down")

    guard = new_guard(Retry(on=ConnectionError, attempts=3, backoff=0.001))
    actors.actor(work, guard=guard, max_retries=2, min_backoff=1, max_backoff=2).send()
    assert "ConnectionError" in repr(ends.errors.get(timeout=60.0))
    assert len(attempts) == 5


def test_messages_of_an_actor_inherit_its_deadline_but_not_its_key(actors: Actors):
    """Also the next actor of a pipeline."""
    seen = actors.actor(lambda: actors.reports.put(context()))

    def parent() -> None:
        seen.send()
        actors.reports.put(context())

    first = actors.actor(parent)
    with deadline(30.0), idempotency_key("order-7"):
        dramatiq.pipeline(
            [first.message(), seen.message_with_options(pipe_ignore=True)], broker=actors.broker
        ).run()
    found = sorted((actors.next() for _ in range(3)), key=lambda one: one["key"] or "")
    assert [one["key"] for one in found] == [None, None, "order-7"]
    assert all(0.0 < one["left"] <= 30.0 for one in found)


def test_work_that_nobody_waits_for_has_no_deadline(actors: Actors):
    """It may run long after the request, or the actor, that has sent it; the rest is carried."""
    background = actors.actor(lambda: actors.reports.put(context()), carry_deadline=False)
    parent = actors.actor(background.send)
    with deadline(30.0), tenant("acme"):
        for one in (background, parent):
            one.send()
            found = actors.next()
            assert (found["left"], found["tenant"]) == (None, "acme")


def test_a_direct_call_is_guarded(actors: Actors):
    """Who calls an actor as a function has its guard, too."""
    guard = new_guard(Breaker())
    assert actors.actor(lambda: "done", guard=guard)() == "done"
    assert guard.snapshot()["succeeded"] == 1


@pytest.mark.parametrize("left", [60.0, 7200.0])  # before and after the end of the break
def test_an_actor_that_an_actor_calls_is_a_plain_function(actors: Actors, ends: Ends, left: float):
    """Its refusal is for its caller to handle, and does not decide about the caller's message."""
    callee = actors.actor(lambda: 1 / 0, guard=tripped(break_for=3600.0))

    def caller() -> None:
        with pytest.raises(CircuitOpen):
            callee()
        actors.reports.put("handled")
        raise ConnectionError("another failure, which dramatiq retries")

    with deadline(left):
        actors.actor(caller, max_retries=1, min_backoff=1, max_backoff=2).send()
    assert "ConnectionError" in repr(ends.errors.get(timeout=60.0))
    assert [actors.next(), actors.next()] == ["handled", "handled"]


def test_a_guard_that_cannot_act_is_told_by_every_call(actors: Actors):
    """A word in place of a guard, and a timeout that cannot act on a plain function."""
    for guard, advice in (("vendor", "write a Guard"), (new_guard(Timeout(1.0)), "cooperative")):
        with pytest.raises(TypeError, match=advice):
            actors.actor(context, guard=guard)()
