"""Stop calling a dependency that fails, and try again carefully.

Promises: what a call admitted before a change of state says afterwards counts for nothing; a
cancelled or further-in refused call is no verdict and gives a probe's permit back; half-open, no
more probes run than configured; no lock is held while the call runs. The rules are in
`seawall.models.breaker`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall.clock import current_clock
from seawall.errors import CircuitOpen
from seawall.models.breaker import BreakerModel, Refusal, State
from seawall.models.breaker_settings import BreakerSettings
from seawall.models.probes import Probes, Verdict
from seawall.runtime.call import STREAMED
from seawall.runtime.events import BreakerChanged, emit
from seawall.runtime.gil import LOCK_FREE
from seawall.runtime.layers import FAILED, OK, Host, Inline, Outcome
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.policy import MODES, GateBound, GatePolicy, Mode

Classifier = Callable[[Exception | None, Any], bool]
"""`is_failure(error, value)`: whether a call that raised `error`, or returned `value`, failed."""

BREAK_FOR: Final = 15.0

_WHY: Final = {
    "open": "open",
    "probing": "being tried by others at the moment",
    "isolated": "isolated by hand",
}

_UNCOUNTED = object()
"""The ticket of a call let through where the breaker is not enforced."""


class Breaker(GatePolicy):
    """Refuse calls while the dependency is failing."""

    kind: ClassVar[str] = "breaker"
    needs_statistics = False

    def __init__(
        self,
        *,
        failure_ratio: float | None = None,
        window: float | None = None,
        window_calls: int | None = None,
        min_calls: int | None = None,
        consecutive: int | None = None,
        slow_after: float | None = None,
        slow_ratio: float | None = None,
        break_for: float | Callable[[int], float] = BREAK_FOR,
        probes: Probes | None = None,
        probe_timeout: float = 60.0,
        is_failure: Classifier | None = None,
        key: Callable[..., Hashable] | None = None,
        max_keys: int = 1024,
        mode: Mode = "enforce",
    ) -> None:
        """Trip by any of the rules given; `failure_ratio=0.5` over 30 s and 20 calls if none is.

        Rules: `consecutive` failures; a `failure_ratio` of the calls of the last `window` seconds
        (or the last `window_calls` calls) once there were `min_calls`; a `slow_ratio` of calls
        that take `slow_after` seconds or more, running ones included. Then it stays open for
        `break_for` seconds (or a function of consecutive opens, such as `growing(5.0)`), lets
        `probes` through (`single()`, `n_of_m(2, 3)`, `ramp(step=10.0)`), and closes if they pass.

        `is_failure(error, value)` decides what is a failure; by default any Exception is. With
        `key`, a function of the call's arguments, each key has a breaker of its own, at most
        `max_keys` of them.
        """
        super().__init__(mode)
        self.settings = BreakerSettings(
            failure_ratio=failure_ratio,
            window=window,
            window_calls=window_calls,
            min_calls=min_calls,
            consecutive=consecutive,
            slow_after=slow_after,
            slow_ratio=slow_ratio,
            break_for=_NeverRaising(break_for) if callable(break_for) else break_for,
            probes=probes,
            probe_timeout=probe_timeout,
        )
        self.is_failure = None if is_failure is None else check.function("is_failure", is_failure)
        self.key = None if key is None else check.function("key", key)
        self.max_keys = check.count("max_keys", max_keys)
        self._mutex = Mutex()
        survives_fork(self)
        self.model = BreakerModel(self.settings)
        self._keyed: OrderedDict[Hashable, BreakerModel] = OrderedDict()
        self._overflowed = False

    def __repr__(self) -> str:
        given = {
            name: value for name, value in self.settings._asdict().items() if value is not None
        }
        return f"Breaker({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def state(self) -> str:
        """The state by name; of a keyed breaker the worst state of any key."""
        states = {model.state for model in self.models().values()}
        worst = (State.ISOLATED, State.OPEN, State.HALF_OPEN, State.CLOSED)
        return next((state.value for state in worst if state in states), State.CLOSED.value)

    def is_open(self, now: float, *args: Any, **kwargs: Any) -> bool:
        """Tell whether calls are refused at this moment: of the key of these arguments, or any."""
        models = self.models()
        if self.key is not None and (args or kwargs):
            key = self.key(*args, **kwargs)
            models = {key: models[key]} if key in models else {}
        return any(
            model.state is State.ISOLATED or bool(model.retry_after(now))
            for model in models.values()
        )

    def isolate(self, key: Hashable = None) -> None:
        """Refuse all calls (of `key`, if keyed) until `close`."""
        self._command(key, "isolate")

    def close(self, key: Hashable = None) -> None:
        """Let calls through again, whatever has happened."""
        self._command(key, "close")

    def models(self) -> dict[Hashable, BreakerModel]:
        """Return the breakers by key; one under None if it is not keyed."""
        if self.key is None:
            return {None: self.model}
        with self._mutex:
            return dict(self._keyed)

    def _model_for(self, key: Hashable) -> BreakerModel:
        """Return the breaker of `key`, made if it is new."""
        with self._mutex:
            model = self._keyed.get(key)
            if model is None:
                model = self._add_key(key)
            else:
                self._keyed.move_to_end(key)
            return model

    def _add_key(self, key: Hashable) -> BreakerModel:
        if len(self._keyed) >= self.max_keys:
            evicted = self._evictable()
            if evicted is None:
                self._overflowed = True
                return self.model  # shared by all keys that find no room
            del self._keyed[evicted]
        model = self._keyed[key] = BreakerModel(self.settings)
        return model

    def _evictable(self) -> Hashable | None:
        """Return the key that was longest unused and is in no trouble.

        An open one may go once its break is over: else a flood of keys could reset it.
        """
        now = self._now()
        for key, model in self._keyed.items():
            broken = model.state is State.OPEN and not model.retry_after(now)
            if model.state is State.CLOSED or broken:
                return key
        return None

    def _now(self) -> float:
        clocks = (bound.host.clock for bound in self.bindings)
        return next(clocks, current_clock()).now()

    def _command(self, key: Hashable, command: str) -> None:
        if (key is None) != (self.key is None):
            raise TypeError(f"{command}(): give the key of a keyed breaker, and only of such a one")
        model = self.model if self.key is None else self._model_for(key)
        if self.key is not None and model is self.model:
            raise RuntimeError(
                f"{command}({key!r}): all {self.max_keys} keys are in use and broken"
            )
        with self._mutex:
            getattr(model, command)(self._now())
        self._report(model, key)

    def _report(self, model: BreakerModel, key: Hashable) -> None:
        """Tell of changes of state, to the guards that share this breaker."""
        with self._mutex:
            changes, model.changes = model.changes, []
        for change in changes:
            fields = {
                "before": change.before.value,
                "after": change.after.value,
                "cause": change.cause.value,
                "key": key,
            }
            for bound in self.bindings:
                emit(BreakerChanged, bound.host.name, **fields)

    def _after_fork(self) -> None:
        """Be usable in a child process; probes of threads that are gone time out."""
        self._mutex = Mutex()

    def _bind(self, host: Host) -> GateBound:
        return _BreakerGate(self, host) if self.key is None else _KeyedBreakerGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        known = tuple(self.settings._asdict())
        self._reject_unknown(changes, (*known, "mode"))
        mode = check.choice("mode", changes.get("mode", self.mode), MODES)
        rest = {name: value for name, value in changes.items() if name != "mode"}
        if callable(rest.get("break_for")):
            rest["break_for"] = _NeverRaising(rest["break_for"])
        settings = self.settings.replace(**rest)
        now = self._now()
        models = [self.model, *self.models().values()]
        with self._mutex:
            self.mode, self.settings = mode, settings
            for model in models:
                model.update(settings, now)


class _NeverRaising:
    """A user's `break_for`: should it fail in the middle of an outage, the default is taken."""

    def __init__(self, function: Callable[[int], float]) -> None:
        self._function = function
        check.seconds("break_for(1)", function(1))

    def __call__(self, opens: int) -> float:
        try:
            return check.seconds("break_for(...)", self._function(opens))
        except Exception:
            from logging import getLogger

            getLogger("seawall").exception("break_for(%d) failed; %g s instead", opens, BREAK_FOR)
            return BREAK_FOR

    def __repr__(self) -> str:
        return repr(self._function)


class _BreakerGate(GateBound):
    """The breaker inside one guard."""

    policy: Breaker

    def __init__(self, policy: Breaker, host: Host) -> None:
        super().__init__(policy, host)
        self._model = policy.model
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

    def enter(self, now: float, /) -> object:
        """Let the call through, or refuse it."""
        model = self._model
        if model.calm:
            return model.generation
        return self.ask(model, None, now)

    def leave(self, ticket: object, outcome: Outcome, detail: Any, now: float) -> None:
        """Take in how the call ended; a success in calm times needs no lock."""
        model = self._model
        if outcome is OK and ticket == model.generation:
            model.success(now)
        else:
            self.tell(model, None, ticket, outcome, detail, now)

    def _leave_slow(self, ticket: object, outcome: Outcome, detail: Any, now: float) -> None:
        self.tell(self._model, None, ticket, outcome, detail, now)

    def ask(self, model: BreakerModel, key: Hashable, now: float) -> object:
        """Ask the model, under the lock."""
        with self.policy._mutex:
            answer = model.admit(now)
        if model.changes:
            self.policy._report(model, key)
        if not isinstance(answer, Refusal):
            return answer
        what = f"circuit of {key!r}" if self.policy.key is not None else "circuit"
        why = _WHY[answer.reason]
        after = answer.retry_after
        hint = "" if after is None else f", for another {after:.3f} s"
        message = f"guard {self.host.name!r}: the {what} is {why}{hint}"
        self.refuse(CircuitOpen(message, retry_after=after))
        return _UNCOUNTED

    def tell(
        self,
        model: BreakerModel,
        key: Hashable,
        ticket: Any,
        outcome: Outcome,
        detail: Any,
        now: float,
    ) -> None:
        """Tell the model, under the lock."""
        if ticket is _UNCOUNTED:
            return
        verdict = self._verdict(outcome, detail)
        self.policy._mutex.do(lambda: model.settle(ticket, verdict, now))
        if model.changes:
            self.policy._report(model, key)

    def _verdict(self, outcome: Outcome, detail: Any) -> Verdict:
        if outcome is not OK and outcome is not FAILED:
            return Verdict.NONE
        classify = self.policy.is_failure
        failed = outcome is FAILED
        if classify is not None and detail is not STREAMED:
            error = detail if isinstance(detail, Exception) and failed else None
            if error is not None or not failed:
                try:
                    failed = bool(classify(error, None if failed else detail))
                except Exception:
                    import logging

                    logging.getLogger("seawall").exception(
                        "is_failure of guard %r failed; the call counts as failed", self.host.name
                    )
                    failed = True
        return Verdict.FAILURE if failed else Verdict.SUCCESS

    def snapshot(self, now: float) -> dict[str, Any]:
        with self.policy._mutex:
            return {**super().snapshot(now), **self._model.snapshot(now)}


class _KeyedBreakerGate(_BreakerGate):
    """One breaker for each key, inside one guard."""

    takes_arguments = True

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> object:
        """Let the call through, or refuse it, by the breaker of its key."""
        key = self.policy.key(*args, **kwargs)  # type: ignore[misc]
        model = self.policy._model_for(key)
        if model.calm:
            return model, key, model.generation
        return model, key, self.ask(model, key, now)

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Take in how the call ended."""
        model, key, own = ticket
        self.tell(model, key, own, outcome, detail, now)

    def snapshot(self, now: float) -> dict[str, Any]:
        models = self.policy.models()
        with self.policy._mutex:
            keys = {str(key): model.snapshot(now) for key, model in models.items()}
            if self.policy._overflowed:
                keys["(others)"] = self._model.snapshot(now)
        return {**GateBound.snapshot(self, now), "state": self.policy.state, "keys": keys}
