"""The breaker inside one guard: a gate that asks the model, or the model of the call's key.

A shared model may not know the answer. Then the call waits for the store, whose reply is handled
like any model's answer.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

from seawall._failures import described, log_failure, reason_of
from seawall.errors import CircuitOpen
from seawall.models.breaker.probes import CallVerdict
from seawall.models.breaker.state import BreakerModel, BreakerRefusal, Ticket
from seawall.models.windows import CallCount, Tracked
from seawall.policies.breaker.fast_path import calm_breaker
from seawall.runtime.call import STREAMED, patience
from seawall.runtime.layers import (
    FAILED,
    OK,
    DeferredVerdict,
    Host,
    Kind,
    Layer,
    Outcome,
    Wait,
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
    """The breaker inside one guard.

    A ticket is the model's own. With keys it is the model, the key, and the model's own ticket.
    """

    policy: Breaker

    def __init__(self, policy: Breaker, host: Host) -> None:
        super().__init__(policy, host)
        self.takes_arguments = policy.key is not None
        if policy.counts == "attempts":
            self.attempted = None  # type: ignore[assignment]
        if LOCK_FREE and policy.key is None and policy.is_failure is None:
            self.inline = calm_breaker(policy.model)

    def layer(self, kind: Kind) -> Layer:
        """Return this gate; for async calls of a shared breaker, one that waits in the loop."""
        return self if self.policy._share is None or kind == "sync" else _InLoop(self)

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Admit the call, or refuse it."""
        return self.enter_as("sync", now, *args, **kwargs)

    def enter_as(self, kind: Kind, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Admit or refuse a call of that kind, by the breaker of its key."""
        policy, key = self.policy, None
        model = policy.model
        if policy.key is not None:
            key = policy.key(*args, **kwargs)
            model = policy._model_for(key)
        if model.calm:
            return model.generation if policy.key is None else (model, key, model.generation)
        answer = self.admit(model, key, now)
        if isinstance(answer, BreakerRefusal) and policy._prober is not None:
            policy._prober.begin()  # in a child process it has not been started yet
        share = policy._share
        if share is not None and isinstance(answer, BreakerRefusal) and policy.mode != "off":
            share.begin()  # a pod that refuses must also learn when to stop
            if answer.reason == "unknown":
                result = partial(self._answered, model, key)
                waiter = share.ask(kind, model, self.host.clock, result)
                patient = now + patience(self.host)
                if patient < (inf if waiter.until is None else waiter.until):
                    waiter.until = patient
                raise Wait(waiter)
        return self._answered(model, key, answer)

    def admit(self, model: BreakerModel, key: Hashable, now: float) -> Ticket | BreakerRefusal:
        """Ask the model, under the lock, and report resulting changes."""
        with self.policy._mutex:
            answer = model.admit(now)
        if model.changes:
            self.policy._report(model, key)
        return answer

    def _ticket(self, model: BreakerModel, key: Hashable, own: Any) -> object:
        return own if self.policy.key is None else (model, key, own)

    def _admitted(self, ticket: Any) -> tuple[BreakerModel, Hashable, Any]:
        """Return the model that admitted a call, its key, and the model's own ticket."""
        return (self.policy.model, None, ticket) if self.policy.key is None else ticket

    def _answered(
        self, model: BreakerModel, key: Hashable, answer: Ticket | BreakerRefusal
    ) -> object:
        """Return the ticket of a call, or refuse it."""
        if not isinstance(answer, BreakerRefusal):
            return self._ticket(model, key, answer)
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
        return self._ticket(model, key, _UNCOUNTED)

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Record how the call ended. A success of a calm breaker needs no lock."""
        model, key, own = self._admitted(ticket)
        if self.inline is not None and outcome is OK and own == model.generation:
            model.success(now)
        elif own is not _UNCOUNTED:
            verdict = self._verdict(outcome, detail)
            self.settle(model, key, own, verdict, (outcome, detail), now)

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
        failed, opened = verdict is CallVerdict.FAILURE, False

        def settle() -> None:
            nonlocal opened
            if failed:
                opened = model.settle_failure(ticket, ended, now, count)
            else:
                model.settle(ticket, verdict, now, count)

        # Described without the lock, since that runs the error's own code.
        if failed and model.wants_failure(now):
            model.note_failure(failure_text(*ended), now)
        self.policy._mutex.do(settle)
        if opened:
            model.note_failure(failure_text(*ended), now)
        if model.changes:
            self.policy._report(model, key)

    def _verdict(self, outcome: Outcome, detail: Any) -> CallVerdict:
        if outcome is not OK and outcome is not FAILED:
            return CallVerdict.NONE
        failed: bool | None = outcome is FAILED
        classify = self.policy.is_failure
        ours = failed and not isinstance(detail, Exception)  # an end by a timeout of ours
        if classify is not None and detail is not STREAMED and not ours:
            try:
                failed = classify(detail, None) if failed else classify(None, detail)
                failed = None if failed is None else bool(failed)
            except Exception:  # noqa: BLE001 - logged
                name = self.host.name
                log_failure("is_failure of guard %r failed; the call counts as failed", name)
                failed = True
        if failed is None:
            return CallVerdict.NONE
        return CallVerdict.FAILURE if failed else CallVerdict.SUCCESS

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the state and the counts, of each key if there are keys."""
        policy, models = self.policy, self.policy.models()
        policy._follow_store()
        with policy._mutex:
            keys = {str(key): model.snapshot(now) for key, model in models.items()}
            if policy._overflowed:
                keys["(others)"] = policy.model.snapshot(now)
            transitions = dict(policy.transitions)
        if policy.key is None:
            own: dict[str, Any] = keys["None"]
        else:
            opened = sum(one["state"] in ("open", "isolated") for one in keys.values())
            own = {"state": policy.state, "keys": keys, "open_keys": opened}
        shared = {} if policy._share is None else {"shared": policy._share.snapshot()}
        return {**super().snapshot(now), **own, **shared, "transitions": transitions}


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
