"""One HTTP exchange under a guard: from a request to its response, for any library.

Promises:

- A request that may not be repeated is sent once (a method that is not idempotent without a key, a
  body that can be read only once, a call for a request that is a retry itself).
- Nothing is sent after the deadline.
- Every response except the returned one is closed exactly once, also when the call is cancelled,
  hedged or abandoned.
- The guard sees a failed response as a failure, and the caller still gets it as the response.

The code is shared by sync and async: steps are generators that never block. They yield functions
without arguments, and receive their results or exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import call
from threading import Lock
from typing import Any, Final, NamedTuple

from seawall.clients.http.headers import headers_for
from seawall.clients.http.library import as_library_error, safety_margin
from seawall.clients.http.terms import BadStatus, Terms
from seawall.context import (
    current_attempt,
    deadline_passed,
    deadline_scope,
    end_scope,
    idempotency_key_var,
    reserve_scope,
    reset,
)
from seawall.errors import Rejected, SeawallError, TimedOut, add_note
from seawall.runtime.driver import Steps, adrive, drive
from seawall.wire.idempotency import IDEMPOTENCY_HEADER

__all__ = ["BadStatus", "Carrier", "Terms", "aexchange", "exchange"]


_SLACK: Final = 0.005
"""Inaccuracy of event loop timers, in seconds."""


class AttemptTime(NamedTuple):
    """Time left for an attempt, in seconds; None where it is unlimited."""

    left: float | None = None
    seconds: float | None = None
    """Seconds after which the library itself should give up."""
    cancels: bool = False
    """Whether a Timeout cancels the attempt."""


class Carrier(NamedTuple):
    """Functions that carry out an exchange; the first three are all sync or all async."""

    send: Callable[[Any, float | None, bool], Any]
    """Send a request; the library's timeouts end it after that number of seconds, unless None. If
    the third argument is True, another mechanism limits the reading."""

    read_failed: Callable[[Any], Any]
    """Read a failed response, if it is small and fast; return whether its connection is free. In
    any case, the response can still be returned to the caller."""

    close: Callable[[Any], Any]
    """Close a response that is not needed."""

    restore_timeouts: Callable[[Any, Any], None]
    """Apply the user's own timeouts to the rest of a response."""


class GuardedExchange:
    """One request with all its attempts."""

    def __init__(self, terms: Terms, request: Any, carrier: Carrier, task: Any = None) -> None:
        self._terms = terms
        self.request = request
        self._carrier = carrier
        self._task = task
        self._key, self._new_key = terms.key_of(request)
        self._retried_above = terms.retried_above() is not None
        self._no_repeat_reason = terms.reason_not_to_repeat(request, self._key)
        self.guard = terms.guard if self._no_repeat_reason is None else terms.unrepeatable_guard
        self._open_responses: list[tuple[int, Any]] = []
        """Open responses with their attempt numbers: one of them may become the result."""
        self._reading: list[Any] = []
        """Failed responses that are being read: no other attempt may close them."""
        self._tried_hosts: set[str] = set()
        """The hosts that were used, for an inner transport that chooses among hosts."""
        self._body_in_use = False
        """Whether a body that does not support concurrent reading is being read."""
        self._sent = False
        self._over = False
        self._lock = Lock()

    def run(self, guarded: Callable[..., Any], attempt: Callable[[Any], Any]) -> Steps[Any]:
        """Pass the guard with `guarded`, which makes each `attempt`; return the response."""
        response: Any = None
        failure: BaseException | None = None
        token = None
        if self._no_repeat_reason is not None or self._key is not None:
            # None also hides a key of the context: with a key, a guard considers every call
            # repeatable.
            token = idempotency_key_var.set(self._key if self._no_repeat_reason is None else None)
        reserve = reserve_scope(self._terms.reserve)
        try:
            response = yield partial(guarded, attempt, self.request)
        except BadStatus as bad:
            response = bad.response
            if self._no_repeat_reason is not None and self._terms.retries and self._sent:
                note = f"seawall: not retried: {self._no_repeat_reason}"
                self._terms.library.note(response, note)
        except GeneratorExit:
            raise  # the loop is gone: nothing can be awaited
        except BaseException as error:  # noqa: BLE001 - raised below, when all responses are closed
            failure = error
        finally:
            if reserve is not None:
                end_scope(reserve)
        if token is not None:
            reset(idempotency_key_var, token)
        failure = (yield from self._close_others(response)) or failure
        try:
            if failure is not None:
                raise self._error_for_caller(failure)
        finally:
            del failure
        return response

    def _close_others(self, result: Any) -> Steps[BaseException | None]:
        """Close all open responses except the result; return an exception to raise, if any.

        If an exception is returned, the result was closed too.
        """
        with self._lock:
            self._over = True
            still_open = [*self._reading, *(response for _, response in self._open_responses)]
            self._reading, self._open_responses = [], []
        others = [response for response in still_open if response is not result]
        failure: BaseException | None = None
        while others:
            try:
                yield from self._discard(others.pop())
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001 - the others are closed first
                if failure is None and result is not None:
                    others.append(result)
                failure = error
        return failure

    def _discard(self, response: Any) -> Steps[None]:
        try:
            yield partial(self._carrier.close, response)
        except Exception:  # noqa: BLE001, S110 - this response is not needed
            pass

    def _error_for_caller(self, error: BaseException) -> BaseException:
        """Return `error` as the user should see it."""
        # It holds for this request only; the function that made it may have sent others.
        vars(error).pop("nothing_sent", None)
        if self._no_repeat_reason is not None and self._terms.retries and self._sent:
            add_note(error, f"not retried: {self._no_repeat_reason}", "not retried: ")
        if isinstance(error, SeawallError):
            library = self._terms.library
            return as_library_error(error, library, library.request_of_error(self.request))
        return error

    def attempt(self) -> Steps[Any]:
        """Send the request once more; return the response, or raise it if it means failure."""
        if self._sent and self._no_repeat_reason is not None:
            # Only a policy that ignores the guard's knowledge of the call gets here.
            raise TypeError(f"this request cannot be sent again: {self._no_repeat_reason}")
        time = self._time_left()
        library = self._terms.library
        key = self._key if self._new_key else None
        given = library.headers(self.request)
        headers = headers_for(self._terms.propagate, given, key, time.left)
        number = current_attempt()
        while (earlier := self._pop_earlier_response(number)) is not None:
            # Its connection may be the only one there is.
            yield from self._discard(earlier)
        outgoing = library.copy(self.request, headers, self._tried_hosts)
        try:
            response = yield from self._send(outgoing, time)
            keyed = self._key is not None or IDEMPOTENCY_HEADER in outgoing.headers
            bad = self._terms.failure_in(outgoing, response, keyed=keyed)
            self._note_response(bad)
            with self._lock:
                over = self._over  # in a thread that is no longer awaited
                if bad is not None and not over:
                    self._reading.append(response)
                elif not over:
                    self._open_responses.append((number, response))
            if over:
                yield from self._discard(response)
            elif bad is not None:
                yield from self._read_failed(response, number)
            self._carrier.restore_timeouts(outgoing, response)
        except Exception as error:
            self._note_error(error)
            raise
        except BaseException:
            self._sent = True  # this cannot be ruled out
            raise
        if bad is not None:
            raise bad
        return response

    def _note_response(self, bad: BadStatus | None) -> None:
        """Remember whether the server may have carried out the request."""
        if bad is None or not bad.throttled:
            self._sent = True
        elif not self._retried_above:
            bad.nothing_sent = True

    def _pop_earlier_response(self, number: int) -> Any:
        """Remove and return a response to an attempt before `number`; None if there is none."""
        with self._lock:
            for index, (its_number, _) in enumerate(self._open_responses):
                # Hedged copies of one attempt leave each other's responses alone.
                if not self._terms.hedges or its_number < number:
                    return self._open_responses.pop(index)[1]
        return None

    def _send(self, outgoing: Any, time: AttemptTime) -> Steps[Any]:
        """Send the request; the library gives up shortly before the guard would cancel it.

        A request that is cancelled while it waits for a connection occupies its place in the pool
        of httpcore 1.0 forever. So this function waits for the guard's cancellation: the guard
        decides and counts the timeout.
        """
        library, clock = self._terms.library, self._terms.guard.clock
        alone = not library.shareable(self.request)
        if alone:
            self._claim_body()
        began = clock.now()
        try:
            response = yield partial(self._carrier.send, outgoing, time.seconds, time.cancels)
        except library.timeouts:
            left = time.left or 0.0
            rest = began + left - clock.now()
            # In a busy loop, the guard's timeout may have passed before it had a chance to cancel.
            if rest <= 2 * safety_margin(left) + _SLACK and (rest > 0 or time.cancels):
                yield partial(clock.sleep if self._task is None else _wait, max(rest, 0.0))
            raise
        finally:
            if alone:
                self._body_in_use = False
        return response

    def _claim_body(self) -> None:
        with self._lock:
            if self._body_in_use:
                raise Rejected(
                    "its files are being sent by another attempt",
                    guard=self._terms.guard.name,
                    policy="body",
                )
            self._body_in_use = True

    def _read_failed(self, response: Any, number: int) -> Steps[None]:
        """Read a failed response; an error while reading does not change the outcome."""
        free = False
        try:
            free = yield partial(self._carrier.read_failed, response)
        except Exception:  # noqa: BLE001, S110 - closed when another attempt is made
            pass
        finally:
            with self._lock:
                if response in self._reading:
                    self._reading.remove(response)
                    if not free:
                        self._open_responses.append((number, response))

    def _note_error(self, error: Exception) -> None:
        """Classify an exception: whether anything was sent, and whether the time was over."""
        library = self._terms.library
        ours = isinstance(error, SeawallError)
        if not isinstance(error, Rejected) and not library.nothing_sent(error):
            self._sent = True
        elif not self._retried_above:
            error.nothing_sent = True  # type: ignore[attr-defined]
        if not ours and isinstance(error, library.timeouts) and deadline_passed():
            name = self._terms.guard.name
            late = TimedOut(f"guard {name!r}: the deadline passed: {error}", guard=name)
            raise as_library_error(late, library, library.request_of_error(self.request)) from error

    def _time_left(self) -> AttemptTime:
        held = deadline_scope()
        if held is None:
            return AttemptTime()
        left = held[0] - held[1].now()
        if left <= 0:
            raise self._terms.deadline_error()
        # A waiting task can be cancelled at the end, by the guard or by `async with deadline`.
        seconds = left if self._task is None else left - safety_margin(left)
        return AttemptTime(left, seconds, self._task is not None and held[3] is not True)


def exchange(terms: Terms, request: Any, carrier: Carrier) -> Any:
    """Return the response to `request`, in this thread."""
    it = GuardedExchange(terms, request, carrier)

    def attempt(_request: Any) -> Any:
        return drive(it.attempt(), call)

    return drive(it.run(it.guard.call, attempt), call)


async def aexchange(terms: Terms, request: Any, carrier: Carrier) -> Any:
    """Return the response to `request`, in this task."""
    from asyncio import current_task

    it = GuardedExchange(terms, request, carrier, current_task())

    async def attempt(_request: Any) -> Any:
        return await adrive(it.attempt(), call)

    return await adrive(it.run(it.guard.acall, attempt), call)


async def _wait(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds + _SLACK)  # noqa: TID251 - waits for the loop's cancellation
