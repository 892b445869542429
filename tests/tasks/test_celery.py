"""Tasks of Celery, in a real worker with a real broker."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import celery
import pytest
from celery.contrib.testing.worker import start_worker

from seawall import (
    Breaker,
    CircuitOpen,
    Criticality,
    DeadlineExceeded,
    Retry,
    TimedOut,
    Timeout,
    criticality,
    current_deadline,
    deadline,
)
from seawall.context import (
    current_attempt,
    current_criticality,
    current_idempotency_key,
    current_tenant,
    idempotency_key,
    tenant,
)
from seawall.tasks.celery import GuardedTask
from tests.support import new_guard

pytestmark = [
    pytest.mark.alone,
    # Celery's own: it calls redis-py by an old name.
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
]


WALL = time.time  # noqa: TID251 - what messages carry


def left() -> float | None:
    """Return what is left of the current deadline."""
    now = current_deadline()
    return None if now is None else now.remaining()


def context() -> dict[str, Any]:
    """Return what a task can see of its sender."""
    return {
        "left": left(),
        "criticality": current_criticality().name,
        "tenant": current_tenant(),
        "key": current_idempotency_key(),
    }


def done() -> str:
    """Do the work of a task that has nothing to do."""
    return "done"


@pytest.fixture(scope="module")
def app(redis_url: str) -> Iterator[Any]:
    """Run a worker of an app in a thread, for all tests of this file."""
    made: Any = celery.Celery(
        "shop", broker=redis_url, backend=redis_url, task_cls=GuardedTask, set_as_current=False
    )
    made.conf.update(
        task_default_queue=f"queue-{token_hex(4)}",
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
        result_backend_transport_options={"global_keyprefix": token_hex(4)},
    )
    with start_worker(made, perform_ping_check=False, shutdown_timeout=30.0) as worker:
        made.worker = worker
        yield made
    gc.collect()  # results forget themselves as long as there is a backend
    made.close()


def task_of(app: Any, function: Any, **options: Any) -> Any:
    """Register `function` as a task under a name of its own."""
    made = app.task(name=f"task-{token_hex(4)}", shared=False, **options)(function)
    assert made.name  # which makes it
    app.worker.consumer.update_strategies()
    return made


def result(sent: Any) -> Any:
    """Return the result of a task that was sent."""
    return sent.get(timeout=20.0, interval=0.01)


def test_a_task_has_the_context_of_its_sender(app: Any):
    """Deadline, criticality, tenant and key are in the worker what they were at the sender's."""
    seen = task_of(app, context)
    with (
        deadline(30.0),
        criticality(Criticality.SHEDDABLE),
        tenant("acme"),
        idempotency_key("order-7"),
    ):
        found = result(seen.delay())
    assert 0.0 < found.pop("left") <= 30.0
    assert found == {"criticality": "SHEDDABLE", "tenant": "acme", "key": "order-7"}
    assert result(seen.delay()) == {
        "left": None,
        "criticality": "CRITICAL",
        "tenant": None,
        "key": None,
    }


def test_time_in_the_queue_counts(app: Any):
    """A task that waited 10 of its 30 seconds has 20 left; one that waited longer is not run."""
    ran: list[float | None] = []

    def work() -> float | None:
        ran.append(left())
        return ran[-1]

    task = task_of(app, work)

    def sent(ago: float) -> Any:
        headers = {"x-server-timeout": "30.000", "seawall-sent": f"{WALL() - ago:.3f}"}
        return result(task.apply_async(headers=headers))

    assert 5.0 < sent(10.0) <= 20.0
    assert sent(-3600.0) <= 30.0, "the sender's clock is fast: the time does not grow"
    with pytest.raises(DeadlineExceeded):
        sent(31.0)
    assert len(ran) == 2


def test_a_task_whose_circuit_is_open_is_rescheduled(app: Any):
    """It runs again when the breaker may let it through, and not before."""
    breaker = Breaker(consecutive=1, break_for=0.5)
    guard = new_guard(breaker)
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 / 0)
    runs: list[int] = []

    def work(self: Any) -> str:
        runs.append(self.request.retries)
        return "done"

    task = task_of(app, work, bind=True, guard=guard)
    assert guard.snapshot()["policies"][0]["state"] == "open"
    assert result(task.delay()) == "done"
    assert len(runs) == 1, "the function was not started while the circuit was open"
    assert runs[0] >= 1
    assert guard.snapshot()["rejected"] == runs[0]


def test_a_refusal_is_final_where_the_deadline_would_pass_first(app: Any):
    """No task is rescheduled beyond its deadline, nor more often than Celery allows."""
    breaker = Breaker(consecutive=1, break_for=3600.0)
    guard = new_guard(breaker)
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 / 0)
    task = task_of(app, context, guard=guard)
    with deadline(60.0), pytest.raises(CircuitOpen):
        result(task.delay())
    assert guard.snapshot()["rejected"] == 1
    impatient = task_of(app, context, guard=guard, max_retries=0)
    with pytest.raises(CircuitOpen):
        result(impatient.delay())
    assert guard.snapshot()["rejected"] == 2


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_task_that_ran_out_of_time_runs_again_if_that_is_safe(app: Any, *, idempotent: bool):
    """A time limit of the guard ends one run; the next one is Celery's."""
    runs: list[int] = []

    def work(self: Any) -> str:
        runs.append(self.request.retries)
        if len(runs) == 1:
            raise TimedOut("as a client in the task does at the deadline of the attempt")
        return "done"

    guard = new_guard(Timeout(5.0, sync="cooperative"), idempotent=idempotent)
    task = task_of(app, work, bind=True, guard=guard, default_retry_delay=0)
    if idempotent:
        assert result(task.delay()) == "done"
        return
    with pytest.raises(TimedOut):
        result(task.delay())
    with idempotency_key("k"):
        runs.clear()
        assert result(task.delay()) == "done"


def test_autoretry_does_not_repeat_what_began_and_may_not_be_repeated(app: Any):
    """`autoretry_for=(Exception,)` means every failure, but not the one that may have charged."""
    runs: list[int] = []

    def work() -> None:
        runs.append(1)
        raise TimedOut("as a client in the task does at the deadline of the attempt")

    guard = new_guard(Timeout(5.0, sync="cooperative"), idempotent=False)
    options = {"autoretry_for": (Exception,), "default_retry_delay": 0, "max_retries": 2}
    with pytest.raises(TimedOut):
        result(task_of(app, work, guard=guard, **options).delay())
    assert len(runs) == 1


def test_attempts_do_not_multiply(app: Any):
    """The guard retries in the first run only: 3 attempts, and one in each of Celery's retries."""
    attempts: list[int] = []

    def work() -> None:
        attempts.append(current_attempt())
        raise ConnectionError("down")

    guard = new_guard(Retry(on=ConnectionError, attempts=3, backoff=0.001))
    task = task_of(
        app,
        work,
        guard=guard,
        autoretry_for=(Exception,),
        max_retries=2,
        default_retry_delay=0,
    )
    with pytest.raises(ConnectionError):
        result(task.delay())
    assert len(attempts) == 5


def test_autoretry_leaves_refusals_to_us(app: Any):
    """With `autoretry_for=(Exception,)` a refused task still waits for its circuit."""
    guard = new_guard(Breaker(consecutive=1, break_for=0.3))
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 / 0)
    options = {"autoretry_for": (Exception,), "default_retry_delay": 3600, "max_retries": 5}
    task = task_of(app, done, guard=guard, **options)
    assert result(task.delay()) == "done"


def test_tasks_of_a_task_inherit_its_deadline_but_not_its_key(app: Any):
    """Links of a chain, and tasks that are sent by a task; a key names one effect."""
    seen = task_of(app, context)
    sent = []

    def parent() -> dict[str, Any]:
        sent.append(seen.delay())
        return context()

    first = task_of(app, parent)
    with deadline(30.0), idempotency_key("order-7"):
        chain = first.si() | seen.si()
        found = chain.apply_async()
    last, middle, whole = result(found), result(sent[0]), result(found.parent)
    assert whole["key"] == "order-7"
    assert (last["key"], middle["key"]) == (None, None)
    for one in (whole, middle, last):
        assert 0.0 < one["left"] <= 30.0


def test_work_that_nobody_waits_for_has_no_deadline(app: Any):
    """It may run long after the request, or the task, that has sent it; the rest is carried."""
    background = task_of(app, context, carry_deadline=False)

    def work() -> Any:
        return background.delay().id

    parent = task_of(app, work)
    with deadline(30.0), tenant("acme"):
        assert result(background.delay()) == {
            "left": None,
            "criticality": "CRITICAL",
            "tenant": "acme",
            "key": None,
        }
        child = result(parent.delay())
    found = result(background.AsyncResult(child))
    assert (found["left"], found["tenant"]) == (None, "acme")


def test_a_direct_call_is_guarded(app: Any):
    """Who calls a task as a function gets its result, or the refusal itself."""
    breaker = Breaker()
    task = task_of(app, done, guard=new_guard(breaker))
    assert task() == "done"
    breaker.isolate()
    with pytest.raises(CircuitOpen):
        task()


def test_a_guard_that_cannot_act_is_refused_when_the_task_is_made(app: Any):
    """A word in place of a guard, and a timeout that cannot act on a plain function."""
    with pytest.raises(TypeError, match="write a Guard"):
        task_of(app, context, guard="vendor")
    with pytest.raises(TypeError, match="cooperative"):
        task_of(app, context, guard=new_guard(Timeout(1.0)))
