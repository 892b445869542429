"""Guarded actors of dramatiq.

    broker.add_middleware(GuardedActors())

    @dramatiq.actor(guard=vendor, max_retries=10)
    def charge(order: str) -> None: ...

See docs/tasks/dramatiq.md for what a message carries and when an actor runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Final

try:
    import dramatiq
except ImportError as error:
    raise ImportError(
        "seawall.tasks.dramatiq needs dramatiq: pip install 'seawall[dramatiq]'"
    ) from error

from dramatiq.middleware.retries import DEFAULT_MIN_BACKOFF

from seawall.errors import Rejected, TimedOut
from seawall.guard import Guard
from seawall.tasks.messages import (
    check_guard,
    inherited,
    message_headers,
    pause_before_next_run,
    received,
)

__all__ = ["GuardedActors"]

_OPTION: Final = "seawall"  # the option of a message that holds its headers

_current: ContextVar[Any] = ContextVar("_current", default=None)
"""The message that this thread works on, or did last."""

_begun: ContextVar[Any] = ContextVar("_begun", default=None)
"""The message whose actor runs: another actor that it calls is a plain function to it."""


class GuardedActors(dramatiq.Middleware):
    """A middleware whose actors carry their sender's deadline, and run again when refused."""

    @property
    def actor_options(self) -> set[str]:
        """The options of an actor: its guard, and whether it has its sender's deadline."""
        return {"guard", "carry_deadline"}

    def before_declare_actor(self, broker: dramatiq.Broker, actor: Any) -> None:
        """Put the guard around the actor's function."""
        actor.fn = _guarded(actor.fn, actor.options)

    def before_enqueue(self, broker: dramatiq.Broker, message: Any, delay: int | None) -> None:
        """Add deadline, criticality, tenant and idempotency key of the context."""
        given, actor = message.options.get(_OPTION), broker.actors.get(message.actor_name)
        carry = actor is None or actor.options.get("carry_deadline", True)
        if given is None:
            parent = _current.get()
            known = None if parent is None else parent.options.get(_OPTION)
            given = inherited(known, carry_deadline=carry)
        message.options[_OPTION] = message_headers(given, carry_deadline=carry)

    def before_process_message(self, broker: dramatiq.Broker, message: Any) -> None:
        """Remember the message."""
        _current.set(message)


def _guarded(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return the function of an actor with these `options`, guarded."""
    guard: Guard | None = options.get("guard")

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        check_guard(guard)  # here: dramatiq would only log it when the actor is made
        call = partial(
            function if guard is None else partial(guard.call, function), *args, **kwargs
        )
        message = _current.get()
        if message is None or message is _begun.get():
            return call()
        token = _begun.set(message)
        try:
            return _process(message, call, options)
        except (Rejected, TimedOut):
            message.options["max_retries"] = 0  # another run cannot help
            raise
        finally:
            _begun.reset(token)

    return guarded


def _process(message: Any, call: Callable[[], Any], options: dict[str, Any]) -> Any:
    """Run an actor in the context that its message brought; if refused, say when to repeat."""
    with received(message.options.get(_OPTION), run=message.options.get("retries", 0) + 1):
        try:
            return call()
        except (Rejected, TimedOut) as error:
            default = options.get("min_backoff", DEFAULT_MIN_BACKOFF) / 1000
            pause = pause_before_next_run(error, options.get("guard"), default)
            if pause is None:
                raise
            raise dramatiq.errors.Retry(str(error), delay=round(pause * 1000)) from error
