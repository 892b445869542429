"""Several models or vendors that can replace each other, in order of preference.

Promises:

- The first model that admits the call and answers serves it.
- The next one is tried when a model refuses (its breaker is open, its limits are exhausted),
  exceeds a vendor's limit, or fails for a transient reason; never on a bad request, which is bad
  everywhere; never after the deadline; never after the first item of a stream.
- If none answers, the exception of the first is raised, with a note.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from inspect import isawaitable
from typing import Any, Final

from seawall import _checks as check
from seawall import registry
from seawall._failures import reason_of
from seawall.clients.llm.outcomes import CLIENT, SERVER, TIMEOUT, TOO_MANY, status_of
from seawall.clock import current_clock
from seawall.context import current_deadline
from seawall.errors import (
    DeadlineExceeded,
    ErrorKinds,
    Rejected,
    add_note,
    error_predicate,
)
from seawall.guard import Guard
from seawall.runtime.degradation import Degradation
from seawall.runtime.result import Result
from seawall.runtime.streams import aprime, prime

_CONNECTION_ERRORS: Final = frozenset(("TransportError", "APIConnectionError"))
"""Exceptions of HTTP libraries and SDKs, by name, that say nothing about the request itself."""

_CAUSES: Final = 5


def should_fall_back(error: Exception) -> bool:
    """Return whether another model may do better: a refusal, a network failure, 408, 429 or 5xx."""
    cause: BaseException | None = error
    for _ in range(_CAUSES):
        if cause is None or isinstance(cause, DeadlineExceeded):
            return False
        status = status_of(cause)
        if status is not None and status >= CLIENT:
            return status in (TIMEOUT, TOO_MANY) or status >= SERVER
        if isinstance(cause, (Rejected, TimeoutError, ConnectionError)):
            return True
        if any(kind.__name__ in _CONNECTION_ERRORS for kind in type(cause).__mro__):
            # An SDK reports a refusal, or a deadline, as a lost connection.
            return not isinstance(cause.__cause__, DeadlineExceeded)
        cause = cause.__cause__
    return False


class Model:
    """One candidate: a function that calls it, and the guard around that function."""

    __slots__ = ("ask", "guard", "name")

    def __init__(self, name: str, ask: Callable[..., Any], *, guard: Guard | None = None) -> None:
        """Call `ask(...)`, under `guard` unless `ask` is already guarded."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"Model({name!r}): the first argument is a name, such as 'large'")
        if guard is not None and not isinstance(guard, Guard):
            raise TypeError(f"guard={guard!r}: pass a Guard, such as Guard('vendor', ...)")
        self.name = name
        self.ask = check.function("ask", ask)
        self.guard = guard
        if guard is not None:
            self.ask = guard(ask)

    def __repr__(self) -> str:
        under = "" if self.guard is None else f", guard={self.guard.name!r}"
        return f"Model({self.name!r}{under})"


class Models:
    """Candidates in order of preference, called as one."""

    def __init__(
        self,
        *candidates: Model,
        name: str = "models",
        fall_back_on: Callable[[Exception], bool] | ErrorKinds = should_fall_back,
    ) -> None:
        """Prefer the first of `candidates`; `fall_back_on(error)` returns whether to try the next.

        Exception types may be given instead of a function. `name` is used in events.
        """
        if not candidates:
            raise TypeError("Models(): give it a Model, such as Models(Model('large', ask_large))")
        for candidate in candidates:
            if not isinstance(candidate, Model):
                raise TypeError(f"{candidate!r} is no Model: write Model('large', ask_large)")
        names = [candidate.name for candidate in candidates]
        if len(set(names)) < len(names):
            raise ValueError(f"two models have the same name: {', '.join(names)}")
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={name!r}: write text, such as name='chat'")
        self.name = name
        self.candidates = candidates
        self._fall_back_on = error_predicate("fall_back_on", fall_back_on)
        self._served = [0] * len(candidates)
        self._failed = 0
        registry.enter(self, "models", name)

    def __repr__(self) -> str:
        return f"Models({', '.join(candidate.name for candidate in self.candidates)})"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models; a `Result.level` is an index into them."""
        return tuple(candidate.name for candidate in self.candidates)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the models in order, by plain functions; return the first result."""
        return self.attempt(*args, **kwargs).unwrap()

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """Async twin of `call`."""
        return (await self.aattempt(*args, **kwargs)).unwrap()

    def attempt(self, *args: Any, **kwargs: Any) -> Result[Any]:
        """Call the models like `call`, and return a `Result`: `level` is the index of the model."""
        calls = _ModelCalls(self)
        for ask in calls:
            with calls:
                calls.value = _not_async(ask(*args, **kwargs), "acall")
        return calls.result()

    async def aattempt(self, *args: Any, **kwargs: Any) -> Result[Any]:
        """Async twin of `attempt`."""
        calls = _ModelCalls(self)
        for ask in calls:
            with calls:
                calls.value = await ask(*args, **kwargs)
        return calls.result()

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield from a stream (a generator, or an SDK's); fall back only before the first item.

        A stream that has `close` is closed in any case.
        """
        calls = _ModelCalls(self)
        for ask in calls:
            with calls:
                items = prime(_not_async(ask(*args, **kwargs), "astream"))
            if calls.answered:
                yield from items
        calls.result().unwrap()

    async def astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Async twin of `stream`, for async generators and results of async functions."""
        calls = _ModelCalls(self)
        for ask in calls:
            with calls:
                items = ask(*args, **kwargs)
                items = await items if isawaitable(items) else items
                items = await aprime(items, owned=True)
            if calls.answered:
                async with aclosing(items):
                    async for item in items:
                        yield item
        calls.result().unwrap()

    def snapshot(self) -> dict[str, Any]:
        """Return how often each model served, and how often none did."""
        return {
            "name": self.name,
            "served": dict(zip(self.names, self._served, strict=True)),
            "failed": self._failed,
        }


def _not_async(answer: Any, instead: str) -> Any:
    """Return the result of a plain function; raise if it is an awaitable."""
    if isawaitable(answer):
        if hasattr(answer, "close"):
            answer.close()
        raise TypeError(f"this model is asked by an async function: write models.{instead}(...)")
    return answer


class _ModelCalls:
    """The progress of one call: the next model to call, and the results so far.

    Each model is called in a `with` block, whose end is its result; an Exception is kept.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._level = -1
        self._first: Exception | None = None
        self._last: Exception | None = None
        self._over = False
        self.answered = False
        """Whether the last model serves the call."""
        self._clock = current_clock()
        self._began = self._clock.now()
        self.value: Any = None

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        for level, candidate in enumerate(self._models.candidates):
            self._level = level
            yield candidate.ask
            if self._over:
                return

    def __enter__(self) -> None:
        """Begin to call a model."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None:
            self._answered()
        elif isinstance(error, Exception):
            self._failed(error)
        return isinstance(error, Exception)

    def _failed(self, error: Exception) -> None:
        if self._first is None:
            self._first = error
        self._last = error
        deadline = current_deadline()
        late = deadline is not None and deadline.remaining() <= 0
        self._over = late or not self._models._fall_back_on(error)
        if self._over and not late and not isinstance(error, DeadlineExceeded):
            self._first = error  # a bad request: the caller must see this exception

    def _answered(self) -> None:
        self._over = self.answered = True
        models = self._models
        models._served[self._level] += 1
        if self._first is not None:
            name = models.candidates[self._level].name
            Degradation(name, self._level, self._first).report(models.name)
            self._last = None

    def result(self) -> Result[Any]:
        """Return the result of the call."""
        error = None if self._last is None else self._first
        if error is not None:
            self._models._failed += 1
            if self._last is not error:
                add_note(error, f"the other models failed too: {self._last!r}", "the other models")
        less = error is None and self._level > 0
        return Result(
            value=self.value,
            error=error,
            level=self._level if error is None else 0,
            reason=None if self._first is None else reason_of(self._first),
            attempts=self._level + 1,
            elapsed=self._clock.now() - self._began,
            source=self._models.names[self._level] if less else None,
            cause=self._first if less else None,
        )
