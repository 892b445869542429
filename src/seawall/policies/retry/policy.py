"""Retry policy: repeat calls that failed for a transient reason.

Promises:
- At most `attempts` attempts.
- No wait and no attempt for which the deadline leaves no time.
- No retry beyond the budget.
- No retry of a call that is already part of a retry, by an outer guard or by this service's caller.
- Cancellation, KeyboardInterrupt and SystemExit are never retried.
- A refusal (`Rejected`) is retried only if `on=` names it.
- A call that is not idempotent is retried only with an idempotency key, or if nothing was sent.
- The last error itself is raised, with notes that name the earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final

from seawall import _checks as check
from seawall._failures import attribute_of, described, log_failure, reason_of
from seawall._forks import survives_fork
from seawall.context import current_idempotency_key, retried_above
from seawall.errors import Rejected, add_note
from seawall.events import CallRetried, RetryStopped
from seawall.events.bus import emit, listening
from seawall.models.backoff import Backoff, above_floor, as_backoff
from seawall.models.budget import Budget, SuccessDeposit
from seawall.models.pressure import Pressure, RetryThresholds
from seawall.policies.retry.conditions import On, read_on, transient
from seawall.runtime.call import STREAMED, current_trace
from seawall.runtime.layers import FAILED, OK, UNUSED, Flow, Host, Next, Outcome
from seawall.runtime.mutex import Mutex
from seawall.runtime.policy import Bound, Policy
from seawall.runtime.stats import FOLD_EVERY

if TYPE_CHECKING:
    from seawall.runtime.call import Call


RetryAfter = Callable[[Exception], float | None]
Load = Callable[[], float]

MOST_OUTER_GUARDS: Final = 8  # maximum number of remembered names of outer guards that also retry

MOST_EARLIER = 6
"""Maximum number of earlier failures that a note names: the first, and the latest ones."""

NOT_RETRIED: Final = {
    "budget": "the retry budget is spent",
    "deadline": "the deadline leaves no time for another attempt",
    "not idempotent": "the guard is not idempotent, and the call has no idempotency key",
    "server said no": "the server asked not to",
}
"""Notes on the error, by the cause for which no further attempt was made."""


class RetrySwitch:
    """Lets tests make all retries instant, or turn them off; see `seawall.testing.retries`."""

    def __init__(self) -> None:
        mode = check.environment("SEAWALL_RETRIES", ("instant", "off"))
        self.instant = mode == "instant"
        self.off = mode == "off"
        if mode is not None:
            from logging import getLogger

            getLogger("seawall").warning("SEAWALL_RETRIES=%s: retries are not as configured", mode)


switch = RetrySwitch()


AttemptsRule = RetryThresholds | Callable[[Pressure], int]
"""Thresholds, or a function that returns the attempts allowed under a pressure."""


class AdaptiveAttempts:
    """As many attempts as the pressure allows. Created by `adaptive_attempts(...)`."""

    def __init__(self, maximum: int, rule: AttemptsRule | None, signals: Iterable[Load]) -> None:
        self.maximum = check.count("maximum", maximum, minimum=2)
        if rule is not None and not isinstance(rule, RetryThresholds):
            rule = check.plain_function(
                "rule", rule, "write RetryThresholds(...), or a function of the Pressure"
            )
        self.rule: AttemptsRule = RetryThresholds() if rule is None else rule
        looked_at = check.listed("signals", signals, "[process_cpu()]")
        self.load: Load | None = None
        if looked_at:
            from seawall.load.signals import highest

            self.load = highest(*looked_at)

    def __repr__(self) -> str:
        rule = self.rule
        thresholds = isinstance(rule, RetryThresholds)
        shown = repr(rule) if thresholds else getattr(rule, "__name__", repr(rule))
        if shown == repr(RetryThresholds()):
            return f"adaptive_attempts({self.maximum})"
        return f"adaptive_attempts({self.maximum}, {shown})"

    def allowed(self, pressure: Pressure) -> int:
        """Return the number of attempts allowed now, including the first."""
        rule = self.rule
        if isinstance(rule, RetryThresholds):
            return 1 + rule.allowed_retries(pressure, self.maximum - 1)
        return min(self.maximum, max(1, int(rule(pressure))))


def adaptive_attempts(
    maximum: int = 4, rule: AttemptsRule | None = None, *, signals: Iterable[Load] = ()
) -> AdaptiveAttempts:
    """Retry less as pressure grows: not at all while the breaker is open or calls queue up.

    `rule` defines how much less: `RetryThresholds(...)`, or a function that returns the attempts
    for a `Pressure`, of which at least one and at most `maximum` are made. `signals` are those of
    `seawall.load.signals`, or functions like them; the highest is the pressure's `load`.
    """
    return AdaptiveAttempts(maximum, rule, signals)


class RetryBudget:
    """Bounds the retries of all calls together. May be shared between guards.

    `RetryBudget()` lets successes pay for retries. Other rules from `seawall.models.budget`:
    `RetryBudget(RequestRatio(0.2))`, `RetryBudget(InFlightRatio(0.2))`.
    """

    def __init__(self, rule: Budget | None = None) -> None:
        """Follow `rule`; `SuccessDeposit()` by default."""
        if rule is not None and not isinstance(rule, Budget):
            raise TypeError(
                f"RetryBudget({rule!r}): write SuccessDeposit(), RequestRatio() or InFlightRatio()"
            )
        self.rule: Budget = SuccessDeposit() if rule is None else rule
        self._mutex = Mutex()
        survives_fork(self)

    def __repr__(self) -> str:
        return f"RetryBudget({self.rule!r})"

    def _note(self, what: str, now: float) -> None:
        """Report an event to the rule, such as "failed", under the lock."""
        note = getattr(self.rule, what)
        self._mutex.do(lambda: note(now))

    def try_retry(self, now: float) -> bool:
        """Take the permission for one retry."""
        with self._mutex:
            return self.rule.try_retry(now)

    def snapshot(self) -> dict[str, float]:
        """Return the state of the rule."""
        with self._mutex:
            return self.rule.snapshot()

    def _after_fork(self) -> None:
        """Reset in a child process, where nothing is in flight."""
        self._mutex = Mutex()
        self.rule.forget_in_flight()


class Retry(Policy):
    """Make up to `attempts` attempts."""

    kind: ClassVar[str] = "retry"

    def __init__(
        self,
        *,
        on: On,
        attempts: int | AdaptiveAttempts = 3,
        backoff: float | Backoff | Iterable[float] | Callable[[int], float] = 0.1,
        budget: RetryBudget | None = None,
        retry_after: RetryAfter | None = None,
        max_retry_after: float = 60.0,
    ) -> None:
        """Retry the cases in `on`: exception types, a predicate over (error, value), or several.

        `backoff` is the pause before the next attempt: seconds (full jitter from there), a
        `Backoff`, delays, or a function of the attempt's number. `retry_after(error)` returns how
        long the server asks to wait; by default the error's own `retry_after`. The pause is at
        least that long, plus a random addition of up to a quarter. If the server asks for more than
        `max_retry_after` seconds, or for a negative time, there is no retry.
        """
        super().__init__()
        self._types, self._predicates = read_on(on)
        if not isinstance(attempts, AdaptiveAttempts):
            attempts = check.count("attempts", attempts)
        self.attempts = attempts
        self.backoff = as_backoff(backoff)
        if budget is not None and not isinstance(budget, RetryBudget):
            raise TypeError(
                f"budget={budget!r}: write budget=RetryBudget(), or RetryBudget(RequestRatio())"
            )
        self.budget = budget
        reader = own_retry_after if retry_after is None else retry_after
        self.retry_after = check.plain_function("retry_after", reader)
        self.max_retry_after = check.seconds("max_retry_after", max_retry_after, zero=True)

    def __repr__(self) -> str:
        items = [*self._types, *self._predicates]
        names = [getattr(item, "__name__", repr(item)) for item in items]
        on = names[0] if len(names) == 1 else f"({', '.join(names)})"
        budget = "" if self.budget is None else f", budget={self.budget!r}"
        return f"Retry(on={on}, attempts={self.attempts!r}, backoff={self.backoff!r}{budget})"

    @property
    def most_attempts(self) -> int:
        """Maximum number of attempts of a call."""
        attempts = self.attempts
        return attempts.maximum if isinstance(attempts, AdaptiveAttempts) else attempts

    def load(self) -> float:
        """Return the highest of the signals of adaptive attempts; 0 without any."""
        attempts = self.attempts
        signal = attempts.load if isinstance(attempts, AdaptiveAttempts) else None
        return 0.0 if signal is None else signal()

    @property
    def types(self) -> tuple[type[BaseException], ...]:
        """The exception types in `on`."""
        return self._types

    @property
    def checks_values(self) -> bool:
        """Whether a returned value can lead to a retry."""
        return any(predicate is not transient for predicate in self._predicates)

    @property
    def _retries_refusals(self) -> bool:
        """Whether `on=` names a kind of `Rejected`."""
        return any(issubclass(kind, Rejected) for kind in self._types)

    def is_retryable(self, error: BaseException | None, value: Any) -> bool:
        """Return whether a call that ended this way is worth another attempt."""
        if error is None:
            return any(predicate(None, value) for predicate in self._predicates)
        if isinstance(error, ExceptionGroup) and not isinstance(error, self._types):
            return all(self.is_retryable(leaf, None) for leaf in error.exceptions)
        if not isinstance(error, Exception):
            return False
        if isinstance(error, Rejected):
            return any(isinstance(error, t) for t in self._types if issubclass(t, Rejected))
        return isinstance(error, self._types) or any(
            predicate(error, None) for predicate in self._predicates
        )

    def _bind(self, host: Host) -> RetryFlow:
        return RetryFlow(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        settings = ("attempts", "backoff", "max_retry_after")
        self._reject_unknown(changes, settings)
        today = {name: getattr(self, name) for name in settings}
        fresh = Retry(on=Exception, **{**today, **changes})
        for name in settings:
            setattr(self, name, getattr(fresh, name))


class _RetryMemory:
    """State of one call: its own schedule of delays, and the tries so far.

    A try is not always an attempt: it may have been refused before the function was started.
    """

    __slots__ = ("delays", "earlier", "failure", "left_out", "made", "retrying", "tries")

    def __init__(self, delays: Iterator[float]) -> None:
        self.delays = delays
        self.earlier: list[str] = []
        """The failures that were retried, as text, so that the errors are not kept alive."""
        self.left_out = 0
        self.made = ""
        """The line of the latest real attempt. Others were refused before an attempt."""
        self.failure: BaseException | None = None
        """The error of the latest attempt that was really made."""
        self.tries = 0
        self.retrying = False

    def note(self, call: Call) -> None:
        """Record a description of what is about to be retried."""
        error = call.error
        what = "the value was not accepted" if error is None else described(error)
        if call.reached:
            line = self.made = f"attempt {call.attempts}: {what}"
        else:
            line = f"before attempt {call.attempts + 1}: {what}"
        self.earlier.append(line)
        if len(self.earlier) > MOST_EARLIER:
            del self.earlier[1]
            self.left_out += 1

    def notes(self, *, raised: bool) -> list[str]:
        """Return a line for each recorded failure; with `raised`, except the latest attempt's."""
        lines = [line for line in self.earlier if not (raised and line is self.made)]
        if self.left_out:
            lines.insert(1, f"(attempts not named here: {self.left_out})")
        return lines


class RetryFlow(Flow, Bound):
    """The retry inside one guard: decides after each attempt whether there is another."""

    policy: Retry
    repeats = True

    def __init__(self, policy: Retry, host: Host) -> None:
        super().__init__(policy, host)
        self.retries = 0
        self.stopped: dict[str, int] = {}
        self.values_retried = 0
        self.succeeded_after_retry = 0
        self.failed = 0  # number of calls that failed without a retry
        self.failed_after_retry = 0
        self._succeeded = 0
        self.retried_by: set[str] = set()  # outer guards that also retry, for `explain()`
        self._watch_at = float("-inf")
        self._budget = budget = policy.budget
        if budget is not None:
            self.leave = self._ended
            if budget.rule.counts_calls:
                self.enter = self._started
            elif isinstance(budget.rule, SuccessDeposit):
                self._deposit = budget.rule
                self.leave = self._deposited
        if policy.checks_values:
            self.again = self._is_value_retryable
        self.passes_refusals = not policy._retries_refusals

    def note_retried_by(self, guard: str) -> None:
        """Remember an outer guard that also retries, up to a maximum number."""
        if len(self.retried_by) < MOST_OUTER_GUARDS:
            self.retried_by.add(guard)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the numbers of retries and outcomes, why it stopped, and the budget."""
        budget = self.policy.budget
        return {
            "attempts": self.policy.most_attempts,
            "retries": self.retries,
            "outcomes": self.outcomes(now),
            "stopped": dict(self.stopped),
            **({} if budget is None else {"budget": budget.snapshot()}),
        }

    def outcomes(self, now: float) -> dict[str, int]:
        """Return how many calls succeeded and failed, each without a retry and after one.

        A first attempt that succeeds never gets here, so that it costs nothing: the number of such
        calls is what remains of the guard's successes.
        """
        stats = self.host.stats
        others = self.succeeded_after_retry + self.values_retried + stats.succeeded_blocks
        stats.fold(now)
        # A success is counted a moment before it is known to follow a retry: never decrease.
        self._succeeded = max(self._succeeded, stats.succeeded - others)
        return {
            "succeeded": self._succeeded,
            "succeeded_after_retry": self.succeeded_after_retry,
            "failed": self.failed,
            "failed_after_retry": self.failed_after_retry,
        }

    def count(self, outcome: Outcome, memory: _RetryMemory | None) -> None:
        """Count how a call ended, except for a success at the first attempt."""
        if memory is None or not memory.earlier:
            self.failed += outcome is FAILED
        elif outcome is OK:
            self.succeeded_after_retry += 1
        elif outcome is FAILED or (outcome is UNUSED and memory.failure is not None):
            self.failed_after_retry += 1

    def _is_value_retryable(self, value: Any) -> bool:
        try:
            return self.policy.is_retryable(None, value)
        except BaseException:  # noqa: BLE001 - it will raise again in settle, and is handled there
            return True

    def _started(self, now: float) -> None:
        self._note("started", now)

    def _ended(self, ticket: None, outcome: Outcome, detail: Any, now: float) -> None:
        if outcome is OK:
            self._note("succeeded", now)
        self._note("ended", now)

    def _deposited(self, ticket: None, outcome: Outcome, detail: Any, now: float) -> None:
        deposit = self._deposit
        if outcome is OK and deposit.tokens < deposit.maximum:
            self._note("succeeded", now)

    def _note(self, what: str, now: float) -> None:
        if self._budget is not None:
            self._budget._note(what, now)

    def settle(self, call: Call, ticket: None) -> Next | None:
        """Try again if the error, the attempts, the budget and the deadline allow it."""
        now = call.host.clock.now()
        memory: _RetryMemory | None = call.memory.get(self)
        if memory is not None and memory.retrying:
            memory.retrying = False
            self._note("retry_ended", now)
        try:
            todo = self._next(call, memory, now) if self._is_worth_another(call) else None
        except BaseException as error:  # noqa: BLE001 - a user's own function (on, backoff...) failed
            todo = None
            if not (isinstance(error, Exception) and isinstance(call.error, Exception)):
                call.value, call.error = None, error
            elif error is not call.error:
                _report_broken_decision(call, error)
        if todo is None:
            call.memory.pop(self, None)
            outcome = call.outcome()
            self.count(outcome, memory)
            if self.leave is not None:
                self.leave(ticket, outcome, None, now)
            failure = None if memory is None else memory.failure
            refused = "" if failure is None else self._prefer_failure(call, failure)
            self._give_notes(call, memory, now, refused)
        return todo

    def _prefer_failure(self, call: Call, failure: BaseException) -> str:
        """Raise the error of the attempt, not the refusal of the next one: a request was sent."""
        refusal = call.error
        if not isinstance(refusal, Rejected) or call.reached:
            return ""
        call.error = failure
        return f", the next was refused: {refusal}"

    def _is_worth_another(self, call: Call) -> bool:
        if call.error is None:
            looked_at = not call.streaming and call.value is not STREAMED
            return looked_at and self.policy.is_retryable(None, call.value)
        started = call.reached or isinstance(call.error, Rejected)
        return started and self.policy.is_retryable(call.error, None)

    def _next(self, call: Call, memory: _RetryMemory | None, now: float) -> Next | None:
        self._note("failed", now)
        if memory is None:
            delays = self.policy.backoff.delays(call.host.rng.random)
            memory = call.memory[self] = _RetryMemory(delays)
            watch = call.host.stats.watch
            if watch is not None and now >= self._watch_at:
                self._watch_at = now + FOLD_EVERY
                watch()
        memory.tries += 1
        if call.reached:
            memory.failure = call.error
        cause, delay = self._decide(call, memory, now)
        name = call.host.name
        failed = _how(call.error) if listening() else {"reason": ""}
        if cause is not None:
            self.stopped[cause] = self.stopped.get(cause, 0) + 1
            if cause in NOT_RETRIED:
                _note_why(call, NOT_RETRIED[cause])
            trace = current_trace(name)
            if trace is not None and cause == "deadline":
                trace.short_of_time = True
            emit(RetryStopped, name, attempt=memory.tries, cause=cause, **failed)
            return None
        memory.retrying = True
        memory.note(call)
        self.values_retried += call.error is None
        self.retries += 1
        call.host.stats.retries += 1
        emit(CallRetried, name, attempt=memory.tries, delay=delay, **failed)
        return Next(delay=delay)

    def _decide(self, call: Call, memory: _RetryMemory, now: float) -> tuple[str | None, float]:
        """Return the reason against another attempt, or None and the pause before it."""
        cause = self._own_objection(call, memory)
        if cause is not None:
            return cause, 0.0
        asked = _server_asks(self.policy.retry_after, call.error)
        cause = self._server_objection(call, asked)
        if cause is not None:
            return cause, 0.0
        delay = next(memory.delays)
        if asked is not None:
            delay = max(delay, above_floor(asked, call.host.rng.random))
        if switch.instant:
            delay = 0.0
        if _ends_too_late(call, now, delay):
            return "deadline", 0.0
        budget = self._budget
        if budget is not None and not budget.try_retry(now):
            return "budget", 0.0
        return None, delay

    def _own_objection(self, call: Call, memory: _RetryMemory) -> str | None:
        attempts = self.policy.attempts
        if isinstance(attempts, AdaptiveAttempts):
            attempts = attempts.allowed(call.host.pressure_on(call))
        if memory.tries >= attempts or switch.off:
            return "attempts"
        above = retried_above(call.outer_attempt)
        if above is not None:
            if above.guard is not None:
                self.note_retried_by(above.guard)
            _note_why(call, above.reason)
            return "retried above"
        # An outer Retry of the same guard is retrying.
        if any(other is not self and isinstance(other, RetryFlow) for other in call.memory):
            return "retried above"
        if not call.host.idempotent and not _is_safe(call.error):
            return "not idempotent"
        return None

    def _server_objection(self, call: Call, asked: float | None) -> str | None:
        if asked is None:
            return None
        if not asked >= 0:  # negative or NaN
            return "server said no"
        most = self.policy.max_retry_after
        if asked <= most:
            return None
        _note_why(call, f"the server asks for {asked:g} s, max_retry_after is {most:g} s")
        return "retry_after too long"

    def _give_notes(
        self, call: Call, memory: _RetryMemory | None, now: float, refused: str
    ) -> None:
        error = call.error
        if error is None or (call.attempts < 2 and not refused):  # noqa: PLR2004
            return
        plural = "" if call.attempts == 1 else "s"
        made = f"{call.attempts} attempt{plural} in {now - call.began:.3f} s"
        earlier = [] if memory is None else memory.notes(raised=bool(refused))
        add_note(error, f"{made}{refused}", " attempt", *earlier)


def _note_why(call: Call, reason: str) -> None:
    """Add to the error, if there is one, why there is no further attempt."""
    if call.error is not None:
        add_note(call.error, f"not retried: {reason}", "not retried: ")


def _ends_too_late(call: Call, now: float, delay: float) -> bool:
    """Return whether there is no time for a typical call after a pause of `delay` seconds."""
    until = call.until()
    if until is None:
        return False
    return now + delay + call.host.stats.typical(now) >= until


def _how(error: BaseException | None) -> dict[str, str]:
    if error is None:
        return {"reason": "value"}
    return {"reason": reason_of(error), "failure": described(error)}


def _report_broken_decision(call: Call, error: Exception) -> None:
    """Keep the call's own error, and add that the retry decision failed."""
    what = "on=, attempts=, retry_after= or backoff="
    log_failure(f"{what} of guard %r failed: not retried", call.host.name, error=error)
    assert call.error is not None  # noqa: S101 - for the type checker
    add_note(call.error, f"not retried, as {what} failed: {error!r}", "not retried, as on=")


def _is_safe(error: BaseException | None) -> bool:
    """Return whether a call that is not idempotent may be repeated: with a key, or never sent.

    Clients mark the errors after which nothing has reached the other side.
    """
    return current_idempotency_key() is not None or bool(attribute_of(error, "nothing_sent"))


def own_retry_after(error: Exception) -> float | None:
    """Return what the error itself says: the default of `Retry(retry_after=)`."""
    return getattr(error, "retry_after", None)


def _server_asks(read: RetryAfter, error: BaseException | None) -> float | None:
    """Return the seconds the server asks for; negative for no retry, None if not given."""
    asked = read(error) if isinstance(error, Exception) else None
    if asked is None:
        return None
    try:
        return float(asked)
    except (TypeError, ValueError):
        return -1.0  # invalid, so it is not a permission
