"""Guarded tasks of Celery.

    @app.task(base=GuardedTask, guard=vendor, max_retries=10)
    def charge(order: str) -> None: ...

See docs/tasks/celery.md for what a message carries and when a task runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

try:
    import celery
except ImportError as error:
    raise ImportError("seawall.tasks.celery needs celery: pip install 'seawall[celery]'") from error

from seawall.errors import Rejected, TimedOut
from seawall.guard import Guard
from seawall.tasks.messages import (
    check_guard,
    inherited,
    message_headers,
    pause_before_next_run,
    received,
)

__all__ = ["GuardedTask"]


class GuardedTask(celery.Task):  # type: ignore[misc] # Celery has no types
    """A task that carries its sender's deadline, and is rescheduled when it is refused."""

    abstract = True
    guard: Guard | None = None
    """The guard of the task's function, if it has one of its own."""
    carry_deadline: bool = True
    """Whether the task has its sender's deadline; False for work that nobody waits for."""

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the guard when the task is made."""
        check_guard(cls.guard)
        if cls.guard is not None and not cls.guard.idempotent:
            # It had begun: `autoretry_for=(Exception,)` must not repeat it.
            cls.dont_autoretry_for = (*getattr(cls, "dont_autoretry_for", ()), TimedOut)
        super().on_bound(app)

    def apply_async(self, *args: Any, headers: dict[str, Any] | None = None, **options: Any) -> Any:
        """Send the task, with deadline, criticality, tenant and idempotency key of the context."""
        parent = celery.current_task
        carry = self.carry_deadline
        known = inherited(parent.request.headers, carry_deadline=carry) if parent else {}
        carried = message_headers({**known, **(headers or {})}, carry_deadline=carry)
        return super().apply_async(*args, headers=carried, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task: under its guard, and in the context that its message brought."""
        request = self.request
        with received(request.headers, run=request.retries + 1):
            inner = getattr(self, "_orig_run", None)
            if inner is None:
                return self._guarded(self.run, *args, **kwargs)
            # With `autoretry_for`, `run` schedules the next run itself: so the guard goes inside.
            if not isinstance(inner, partial):
                self._orig_run = partial(self._guarded, inner)
            return self.run(*args, **kwargs)

    def _guarded(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            if self.guard is None:
                return function(*args, **kwargs)
            return self.guard.call(function, *args, **kwargs)
        except (Rejected, TimedOut) as error:
            pause = pause_before_next_run(error, self.guard, self.default_retry_delay)
            if pause is None or self.request.called_directly:
                raise
            return self.retry(exc=error, countdown=pause)  # raises
