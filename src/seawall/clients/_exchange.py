"""One HTTP exchange under a guard: from a request to its answer, whatever library carries it.

Promises: what may not be repeated is sent once (a method that is not idempotent without a key, a
body that can be read once, a call for a request that is a retry itself); nothing is sent after its
deadline; every response but the one that is handed out is closed exactly once, also when the call
is cancelled, hedged or given up; an answer that means failure is seen as one by the guard, and is
still the answer that the user gets.

Written once for sync and async: steps are generators that never block. They yield functions
without arguments and are sent what these return, or thrown what they raise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from threading import Lock
from typing import Any, Final, NamedTuple, TypeVar

from seawall.clients._exchange_errors import as_library_error
from seawall.clients._exchange_headers import headers_for
from seawall.clients._exchange_terms import BadStatus, Terms, retryable
from seawall.context import deadline_var, idempotency_key_var, reset
from seawall.errors import DeadlineExceeded, Rejected, SeawallError, TimedOut, add_note

__all__ = ["BadStatus", "Carrier", "Terms", "aexchange", "exchange", "retryable"]

T = TypeVar("T")
Step = Callable[[], Any]
Steps = Generator[Step, Any, T]

_A_MOMENT: Final = 0.05


class Carrier(NamedTuple):
    """What an exchange is carried out with: three functions, all sync or all async."""

    send: Callable[[Any, float | None], Any]
    """Send a request; each of the library's timeouts is lowered to so many seconds, unless None."""

    keep: Callable[[Any], Any]
    """Free the connection of a failed answer, if it can be done, and leave the answer readable."""

    close: Callable[[Any], Any]
    """Close a response that nobody wants."""


class Exchange:
    """One request on its way, with all attempts that are made for it."""

    __slots__ = (
        "_bar",
        "_carrier",
        "_failed",
        "_fine",
        "_key",
        "_lock",
        "_new_key",
        "_over",
        "_sent",
        "_task",
        "_terms",
        "host",
        "request",
    )

    def __init__(self, terms: Terms, request: Any, carrier: Carrier, task: Any = None) -> None:
        """Prepare to send `request`; for `task`, where it is one."""
        self._terms = terms
        self.request = request
        self._carrier = carrier
        self._task = task
        self._key, self._new_key = terms.key_of(request)
        self._bar = terms.why_once(request, self._key)
        self.host = terms.guard if self._bar is None else terms.once
        self._fine: list[Any] = []
        self._failed: list[Any] = []
        """Answers that meant failure: one of them may still be the answer in the end."""
        self._sent = False
        self._over = False
        self._lock = Lock()

    def whole(self, call: Callable[..., Any], attempt: Callable[[Any], Any]) -> Steps[Any]:
        """Go through the guard by `call`, which makes each `attempt`; return the answer."""
        answer: Any = None
        failure: BaseException | None = None
        token = None
        if self._bar is not None or self._key is not None:
            # None also hides a key of the context: with one, a guard takes all to be repeatable.
            token = idempotency_key_var.set(self._key if self._bar is None else None)
        try:
            answer = yield partial(call, attempt, self.request)
        except BadStatus as bad:
            answer = bad.response
            if self._bar is not None and self._terms.retries:
                self._terms.library.note(answer, f"seawall: not retried: {self._bar}")
        except GeneratorExit:
            raise  # the loop is gone: there is nothing left to wait with
        except BaseException as error:  # noqa: BLE001 - raised below, when all is closed
            failure = error
        if token is not None:
            reset(idempotency_key_var, token)
        with self._lock:
            self._over = True
            losers = [r for r in (*self._failed, *self._fine) if r is not answer]
            self._failed, self._fine = [], []
        while losers:
            try:
                yield from self._discard(losers.pop())
            except BaseException as error:  # noqa: BLE001 - the others are closed first
                failure = error
        try:
            if failure is not None:
                raise self._seen_outside(failure)
        finally:
            del failure
        return answer

    def _discard(self, response: Any) -> Steps[None]:
        try:
            yield partial(self._carrier.close, response)
        except Exception:  # noqa: BLE001, S110 - nobody asked for that response
            pass

    def _seen_outside(self, error: BaseException) -> BaseException:
        """Return `error` as the user is to see it."""
        # True of this request; of the function that made it, and maybe others, nobody can tell.
        vars(error).pop("nothing_sent", None)
        if self._bar is not None and self._terms.retries and self._sent:
            add_note(error, f"not retried: {self._bar}", "not retried: ")
        if isinstance(error, SeawallError):
            return as_library_error(error, self._terms.library, self.request)
        return error

    def attempt(self) -> Steps[Any]:
        """Send the request once more; return the answer, or raise it if it means failure."""
        if self._sent and self._bar is not None:
            # Only a policy that ignores what the guard knows of the call gets here.
            raise TypeError(f"this request cannot be sent again: {self._bar}")
        left, seconds = self._time_left()
        library = self._terms.library
        key = self._key if self._new_key else None
        given = library.headers(self.request)
        headers = headers_for(self._terms.propagate, given, key, left)
        while self._failed:
            # Its connection may be the only one there is.
            with self._lock:
                loser = self._failed.pop()
            yield from self._discard(loser)
        outgoing = library.copy(self.request, headers)
        try:
            response = yield partial(self._carrier.send, outgoing, seconds)
            self._sent = True
            bad = self._terms.failure_in(response)
            with self._lock:
                over = self._over
                (self._fine if bad is None else self._failed).append(response)
            if over:
                yield from self._discard(response)
            elif bad is not None:
                yield partial(self._carrier.keep, response)
        except Exception as error:
            self._raised(error)
            raise
        except BaseException:
            self._sent = True  # as far as anybody can tell
            raise
        if over:  # in a thread that nobody waits for any more
            raise TimedOut("the answer came when nobody waited any more")
        if bad is not None:
            raise bad
        return response

    def _raised(self, error: Exception) -> None:
        """Look at what was raised: whether anything was sent, and whether time was over."""
        library = self._terms.library
        ours = isinstance(error, SeawallError)
        if not isinstance(error, Rejected) and not library.nothing_sent(error):
            self._sent = True
        elif self._terms.retried_above() is None:
            error.nothing_sent = True  # type: ignore[attr-defined]
        held = deadline_var.get()
        out_of_time = held is not None and held[1].now() >= held[0]
        if out_of_time and not ours and isinstance(error, library.timeout_error):
            name = self._terms.guard.name
            late = TimedOut(f"guard {name!r}: the deadline passed: {error}", guard=name)
            raise as_library_error(late, library, self.request) from error

    def _time_left(self) -> tuple[float | None, float | None]:
        """Return the seconds that are left, and those after which the library itself gives up."""
        held = deadline_var.get()
        left = seconds = None
        if held is not None:
            left = seconds = held[0] - held[1].now()
        if self._terms.timeouts:
            until = self._cancelled_at()
            if until is not None:
                own = until - self._terms.guard.clock.now()
                left = own if left is None else min(left, own)
                # A moment later, so that it is the guard who says and counts that time is over.
                own += _A_MOMENT
                seconds = own if seconds is None else min(seconds, own)
        if left is not None and left <= 0:
            name = self._terms.guard.name
            raise DeadlineExceeded(
                f"guard {name!r}: the deadline passed before the request was sent",
                guard=name,
                policy="deadline",
            )
        return left, seconds

    def _cancelled_at(self) -> float | None:
        from asyncio import current_task

        # A hedged copy runs in a task of its own, inside timeouts of its caller's task.
        tasks = {self._task, current_task()}
        found = (layer.until_of(task) for layer in self._terms.timeouts for task in tasks)
        return min((until for until in found if until is not None), default=None)


def exchange(terms: Terms, request: Any, carrier: Carrier) -> Any:
    """Return the answer to `request`, in this thread."""
    it = Exchange(terms, request, carrier)

    def attempt(_request: Any) -> Any:
        return _drive(it.attempt())

    return _drive(it.whole(it.host.call, attempt))


async def aexchange(terms: Terms, request: Any, carrier: Carrier) -> Any:
    """Return the answer to `request`, in this task."""
    from asyncio import current_task

    it = Exchange(terms, request, carrier, current_task())

    async def attempt(_request: Any) -> Any:
        return await _adrive(it.attempt())

    return await _adrive(it.whole(it.host.acall, attempt))


def _drive(steps: Steps[T]) -> T:
    try:
        step = next(steps)
        while True:
            try:
                result = step()
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as done:
        value: T = done.value
        return value


async def _adrive(steps: Steps[T]) -> T:
    try:
        step = next(steps)
        while True:
            try:
                result = await step()
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as done:
        value: T = done.value
        return value
