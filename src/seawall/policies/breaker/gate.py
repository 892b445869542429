"""The breaker inside one guard: a gate that asks the model, or the model of the call's key.

A shared model may not know the answer. Then the call waits for the store, whose reply is handled
like any model's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from seawall._failures import described, reason_of
from seawall.errors import CircuitOpen
from seawall.models.breaker.probes import CallVerdict
from seawall.models.breaker.state import BreakerModel, BreakerRefusal, Ticket
from seawall.models.windows import CallCount, Tracked
from seawall.runtime.call import STREAMED, patience
from seawall.runtime.layers import (
    FAILED,
    OK,
    DeferredVerdict,
    Host,
    Inline,
    Kind,
    Layer,
    Outcome,
    Wait,
    Waiter,
)
from seawall.runtime.mutex import LOCK_FREE
from seawall.runtime.policy import GateBound

if TYPE_CHECKING:
    from seawall.policies.breaker.policy import Breaker

_WHY: Final = {
    "open": "open",
    "probing": "being tried by others at the moment",
    "unknown": "being tried by others at the moment",
    "isolated": "isolated by hand",
    "store": "taken to be open",
}

_UNCOUNTED = object()
"""The ticket of a call admitted although the breaker refused it, because it is not enforced."""


class BreakerGate(GateBound):
    """The breaker inside one guard."""

    policy: Breaker

    def __init__(self, policy: Breaker, host: Host) -> None:
        super().__init__(policy, host)
        self._model = policy.model
        if policy.counts == "attempts":
            self.attempted = None  # type: ignore[assignment]
        if policy.key is None and (not LOCK_FREE or policy.is_failure is not None):
            self.leave = self._leave_slow  # type: ignore[method-assign]
        elif policy.key is None:
            self.inline = Inline(
                names={"model": policy.model},
                enter=("{ticket} = {model}.generation if {model}.calm else {enter}(now_)",),
                leave=(
                    "if {ticket} == {model}.generation:",
                    "    {bucket} = {model}.counter.bucket",
                    "    if end_ < {bucket}.end:",
                    "        {bucket}.calls += 1",
                    "    else:",
                    "        {model}.success(end_)",
                    "else:",
                    "    {leave}({ticket}, OK_, value_, end_)",
                ),
            )

    def layer(self, kind: Kind) -> Layer:
        """Return this gate; for async calls of a shared breaker, one that waits in the loop."""
        return self if self.policy._share is None or kind == "sync" else _InLoop(self)

    def enter(self, now: float, /) -> object:
        """Admit the call, or refuse it."""
        return self.enter_as("sync", now)

    def enter_as(self, kind: Kind, now: float, /) -> object:
        """Admit or refuse a call of that kind."""
        model = self._model
        if model.calm:
            return model.generation
        return self.ask(kind, model, None, now)

    def leave(self, ticket: object, outcome: Outcome, detail: Any, now: float) -> None:
        """Record how the call ended. A success of a calm breaker needs no lock."""
        model = self._model
        if outcome is OK and ticket == model.generation:
            model.success(now)
        else:
            self.report(model, None, ticket, outcome, detail, now)

    def attempted(
        self,
        ticket: Any,
        outcome: Outcome,
        detail: Any,
        now: float,
        count: CallCount,
        *,
        defer: bool,
    ) -> DeferredVerdict | None:
        """Report to the model how an attempt of the call of `count` ended, or defer a failure.

        A probe and a call that can become slow count immediately: other calls wait for the permit,
        and a pause is not part of an attempt.
        """
        model, key, own = self._admitted(ticket)
        if own is _UNCOUNTED:
            return None
        verdict = self._verdict(outcome, detail)
        ended = outcome, detail
        if defer and verdict is CallVerdict.FAILURE and isinstance(own, int):
            return lambda then: self.settle(model, key, own, verdict, ended, then, count)
        self.settle(model, key, own, verdict, ended, now, count)
        return None if verdict is CallVerdict.NONE else _counted

    def continued(self, ticket: Any, count: CallCount) -> None:
        """Treat `ticket` as another attempt of the call of `count`, if it can become slow."""
        model, _key, own = self._admitted(ticket)
        if isinstance(own, Tracked):
            self.policy._mutex.do(lambda: model.continue_call(own, count))

    def begun(self, ticket: Any, now: float, count: CallCount) -> None:
        """Treat the call of `count` as successful so far: it has started to answer."""
        model, _key, _own = self._admitted(ticket)
        self.policy._mutex.do(lambda: model.retract_failure(count, now))

    def _admitted(self, ticket: Any) -> tuple[BreakerModel, Hashable, Any]:
        """Return the model that admitted a call, its key, and the model's own ticket."""
        return self._model, None, ticket

    def _leave_slow(self, ticket: object, outcome: Outcome, detail: Any, now: float) -> None:
        self.report(self._model, None, ticket, outcome, detail, now)

    def ask(self, kind: Kind, model: BreakerModel, key: Hashable, now: float) -> object:
        """Ask the model, under the lock."""
        with self.policy._mutex:
            answer = model.admit(now)
        if model.changes:
            self.policy._report(model, key)
        if isinstance(answer, BreakerRefusal) and self.policy._prober is not None:
            self.policy._prober.begin()  # in a child process it has not been started yet
        share = self.policy._share
        if share is not None and isinstance(answer, BreakerRefusal) and self.policy.mode != "off":
            share.begin()  # a pod that refuses must also learn when to stop
            if answer.reason == "unknown":
                asked = share.ask(kind, model, self.host.clock)
                waiter = _Asked(asked, lambda answer: self.answered(model, key, answer))
                patient = now + patience(self.host)
                if patient < (inf if waiter.until is None else waiter.until):
                    waiter.until = patient
                raise Wait(waiter)
        return self.answered(model, key, answer)

    def answered(
        self, model: BreakerModel, key: Hashable, answer: Ticket | BreakerRefusal
    ) -> object:
        """Return the ticket of a call, or refuse it."""
        if not isinstance(answer, BreakerRefusal):
            return answer
        what = f"circuit of {key!r}" if self.policy.key is not None else "circuit"
        why = _WHY[answer.reason]
        after = answer.retry_after
        hint = "" if after is None else f", for another {after:.3f} s"
        if answer.reason == "store" and self.policy.shared is not None:
            hint = f": the store {self.policy.shared.name!r} does not answer"
        open_for, failure = model.open_for(self.host.clock.now()), model.failure
        since = "" if open_for is None else f"; not closed for {open_for:.3f} s"
        last = f"; the last failure: {failure}" if failure else ""
        message = f"guard {self.host.name!r}: the {what} is {why}{hint}{since}{last}"
        error = CircuitOpen(message, failure=failure, open_for=open_for, retry_after=after)
        error.key = key
        try:
            self.refuse(error)
        finally:
            del error  # Break the reference cycle between the exception and this frame.
        return _UNCOUNTED

    def report(
        self,
        model: BreakerModel,
        key: Hashable,
        ticket: Any,
        outcome: Outcome,
        detail: Any,
        now: float,
    ) -> None:
        """Report to the model how a call ended."""
        if ticket is not _UNCOUNTED:
            verdict = self._verdict(outcome, detail)
            self.settle(model, key, ticket, verdict, (outcome, detail), now)

    def settle(
        self,
        model: BreakerModel,
        key: Hashable,
        ticket: Ticket,
        verdict: CallVerdict,
        ended: tuple[Outcome, Any],
        now: float,
        count: CallCount | None = None,
    ) -> None:
        """Let the model count a verdict, under the lock, and report resulting changes."""
        if verdict is CallVerdict.FAILURE:
            self._settle_failure(model, ticket, ended, now, count)
        else:
            self.policy._mutex.do(lambda: model.settle(ticket, verdict, now, count))
        if model.changes:
            self.policy._report(model, key)

    def _settle_failure(
        self,
        model: BreakerModel,
        ticket: Ticket,
        ended: tuple[Outcome, Any],
        now: float,
        count: CallCount | None,
    ) -> None:
        opened = False

        def settle() -> None:
            nonlocal opened
            opened = model.settle_failure(ticket, ended, now, count)

        # Described without the lock, since that runs the error's own code.
        if model.wants_failure(now):
            model.note_failure(failure_text(*ended), now)
        self.policy._mutex.do(settle)
        if opened:
            model.note_failure(failure_text(*ended), now)

    def _verdict(self, outcome: Outcome, detail: Any) -> CallVerdict:
        if outcome is not OK and outcome is not FAILED:
            return CallVerdict.NONE
        classify = self.policy.is_failure
        failed = outcome is FAILED
        if classify is not None and detail is not STREAMED:
            error = detail if isinstance(detail, Exception) and failed else None
            if error is not None or not failed:
                try:
                    answer = classify(error, None if failed else detail)
                    if answer is None:
                        return CallVerdict.NONE
                    failed = bool(answer)
                except Exception:
                    import logging

                    logging.getLogger("seawall").exception(
                        "is_failure of guard %r failed; the call counts as failed", self.host.name
                    )
                    failed = True
        return CallVerdict.FAILURE if failed else CallVerdict.SUCCESS

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the state, the counts, and why it opened."""
        self.policy._follow_store()
        with self.policy._mutex:
            known = {**super().snapshot(now), **self._model.snapshot(now), **self._sharing()}
            return {**known, "transitions": dict(self.policy.transitions)}

    def _sharing(self) -> dict[str, Any]:
        share = self.policy._share
        return {} if share is None else {"shared": share.snapshot()}


class KeyedBreakerGate(BreakerGate):
    """One breaker for each key, inside one guard."""

    takes_arguments = True

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Admit or refuse the call, by the breaker of its key."""
        return self.enter_as("sync", now, *args, **kwargs)

    def enter_as(self, kind: Kind, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Admit or refuse a call of that kind, by the breaker of its key."""
        key = self.policy.key(*args, **kwargs)  # type: ignore[misc]
        model = self.policy._model_for(key)
        if model.calm:
            return model, key, model.generation
        try:
            return model, key, self.ask(kind, model, key, now)
        except Wait as wait:
            asked = _Asked(wait.waiter, lambda own: (model, key, own))
        raise Wait(asked)

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Record how the call ended."""
        model, key, own = ticket
        self.report(model, key, own, outcome, detail, now)

    def _admitted(self, ticket: Any) -> tuple[BreakerModel, Hashable, Any]:
        admitted: tuple[BreakerModel, Hashable, Any] = ticket
        return admitted

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the state of each key, and how many are open."""
        models = self.policy.models()
        with self.policy._mutex:
            keys = {str(key): model.snapshot(now) for key, model in models.items()}
            if self.policy._overflowed:
                keys["(others)"] = self._model.snapshot(now)
        seen = {**GateBound.snapshot(self, now), "state": self.policy.state, "keys": keys}
        seen["transitions"] = dict(self.policy.transitions)
        seen["open_keys"] = sum(one["state"] in ("open", "isolated") for one in keys.values())
        return seen | self._sharing()


def _counted(_now: float) -> None:
    """Represent a verdict that is already counted. It replaces one that was deferred before."""


def failure_reason(outcome: Outcome, detail: Any) -> str:
    """Return a short reason for a failure: the error's, "value", or empty if unknown."""
    if isinstance(detail, BaseException):
        return reason_of(detail)
    return "value" if outcome is OK else ""


def failure_text(outcome: Outcome, detail: Any) -> str:
    """Return the type and message of a call's failure, without secrets."""
    if isinstance(detail, BaseException):
        return described(detail)
    return "a value that counts as a failure" if outcome is OK else ""


class _InLoop(Layer):
    """The same gate, for calls that wait in an event loop."""

    def __init__(self, gate: BreakerGate) -> None:
        self.takes_arguments = gate.takes_arguments
        self.inline = gate.inline
        self.enter = partial(gate.enter_as, "async")
        self.leave = gate.leave
        self.attempted = gate.attempted
        self.continued = gate.continued
        self.begun = gate.begun


class _Asked:
    """A call that waits for the store's reply, which `meant` turns into a ticket or a refusal."""

    __slots__ = ("_meant", "_waiter", "until")

    def __init__(self, waiter: Waiter, meant: Callable[[Any], Any]) -> None:
        self._waiter = waiter
        self._meant = meant
        self.until = waiter.until

    def publish(self, wake: Callable[[], bool]) -> None:
        """Ask the store."""
        self._waiter.publish(wake)

    def claim(self) -> Any:
        """Return the ticket, or refuse the call."""
        return self._meant(self._waiter.claim())

    def abandon(self) -> None:
        """Stop waiting. A grant is given back."""
        self._waiter.abandon()
