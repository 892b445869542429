"""What the message of a task carries, and when a task that was refused runs again.

Promises:

- The deadline of the sender is that of the task, unless the task is marked `carry_deadline=False`.
  Time in the queue counts, and the deadline never grows, also if the clocks of sender and worker
  differ.
- A task whose deadline has passed is not run, and no task is rescheduled beyond its deadline.
- Inside a task that its queue runs again, no guard retries: attempts do not multiply.
- An idempotency key stays with its task: tasks that are sent by a task do not inherit it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from random import Random
from typing import Any, Final

from seawall.clients.http.headers import headers_for
from seawall.context import (
    Attempt,
    attempt_var,
    criticality,
    current_idempotency_key,
    deadline,
    end_attempt,
    idempotency_key,
    seconds_left,
    tenant,
)
from seawall.errors import DeadlineExceeded, SeawallError, TimedOut
from seawall.guard import Guard
from seawall.models.backoff import above_floor
from seawall.wire.criticality import (
    BAGGAGE_HEADER,
    read_baggage,
    read_criticality,
    read_tenant,
)
from seawall.wire.deadlines import TIMEOUT_HEADERS, least_timeout
from seawall.wire.idempotency import IDEMPOTENCY_HEADER, read_key
from seawall.wire.text import decimal_of

SENT: Final = "seawall-sent"
"""When the message was sent, in seconds since 1970: its timeouts count from then."""

_KEY: Final = IDEMPOTENCY_HEADER.lower()
_CARRIED: Final = frozenset({"deadline", "criticality", "tenant"})
_INHERITED: Final = TIMEOUT_HEADERS | {SENT, BAGGAGE_HEADER}

_CHANCE: Final = Random()  # noqa: S311 - spreads tasks that were refused together

_key_of_task: ContextVar[str | None] = ContextVar("_key_of_task", default=None)


def check_guard(guard: object) -> None:
    """Raise unless `guard` is None, or a Guard that can act on a plain function."""
    if guard is None:
        return
    if not isinstance(guard, Guard):
        raise TypeError(f"guard={guard!r}: write a Guard, such as Guard('vendor', Breaker())")
    guard._plan.check("sync")


def inherited(headers: Mapping[str, Any] | None, *, carry_deadline: bool) -> dict[str, str]:
    """Return the headers of a task that a task it sends inherits."""
    names = _INHERITED if carry_deadline else {BAGGAGE_HEADER}
    return {name: value for name, value in (headers or {}).items() if name in names}


def message_headers(given: Mapping[str, Any], *, carry_deadline: bool) -> dict[str, Any]:
    """Return the headers of a message: those `given`, and what the context says."""
    left, key = seconds_left() if carry_deadline else None, current_idempotency_key()
    if _KEY in given or key == _key_of_task.get():
        key = None
    ours = headers_for(_CARRIED, {name: str(value) for name, value in given.items()}, key, left)
    if not TIMEOUT_HEADERS.isdisjoint(ours):
        ours[SENT] = f"{_wall():.3f}"
    return {**given, **ours}


@contextmanager
def received(headers: Mapping[str, Any] | None, run: int) -> Iterator[None]:
    """Set the context of a task from the headers of its message; this is its run number `run`."""
    said = {name: str(value) for name, value in (headers or {}).items()}
    members = read_baggage(said.get(BAGGAGE_HEADER, ""))
    level, whose = read_criticality(members), read_tenant(members)
    key = read_key(said.get(_KEY, ""))
    left = _time_left(said)
    with ExitStack() as scopes:
        if left is not None:
            scopes.enter_context(deadline(left))
        if level is not None:
            scopes.enter_context(criticality(level))
        if whose is not None:
            scopes.enter_context(tenant(whose))
        if key is not None:
            scopes.enter_context(idempotency_key(key))
        token = _key_of_task.set(key)
        scopes.callback(_key_of_task.reset, token)
        if run > 1:
            scopes.callback(end_attempt, attempt_var.set(Attempt(run, None, attempt_var.get())))
        yield


def _time_left(said: Mapping[str, str]) -> float | None:
    least = least_timeout(said.items())
    if least is None:
        return None
    sent = decimal_of(said.get(SENT, ""))
    left = least if sent is None else least - max(0.0, _wall() - sent)
    if left <= 0:
        raise DeadlineExceeded(
            "the deadline of the task passed while it was in its queue", policy="deadline"
        )
    return left


def pause_before_next_run(error: SeawallError, guard: Guard | None, default: float) -> float | None:
    """Return after how many seconds to run a refused task again; None if it must not.

    That is what the refusal says, and up to a quarter more; `default` if it does not say.
    """
    if isinstance(error, DeadlineExceeded):
        return None
    may_repeat = guard is None or guard.idempotent or current_idempotency_key() is not None
    if isinstance(error, TimedOut) and not may_repeat:  # then the task had begun
        return None
    asked = getattr(error, "retry_after", None)
    pause = default if asked is None else above_floor(asked, _CHANCE.random)
    left = seconds_left()
    return None if left is not None and pause >= left else pause


def _wall() -> float:
    import time

    return time.time()  # noqa: TID251 - two machines have no other clock in common
