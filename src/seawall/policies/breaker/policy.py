"""Circuit breaker policy: stop calling a failing dependency, and try again carefully.

Promises:
- The result of a call that was admitted before a change of state does not count.
- A call that was cancelled, or refused by an inner layer, has no verdict, and returns a probe's
  permit.
- While half-open, no more probes run than configured.
- A call counts once, however many attempts it makes: by the latest attempt that has a verdict, and
  from the first on.
- No lock is held while the call runs.
- With `shared` all of this holds for all pods together, and a closed or open breaker costs no more
  than a local one.

The rules are in `seawall.models.breaker.state`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from seawall import _checks as check
from seawall._failures import log_failure
from seawall._forks import survives_fork
from seawall.clock import current_clock
from seawall.errors import ErrorKinds, error_predicate
from seawall.events import BreakerChanged
from seawall.models.breaker.probes import Probes
from seawall.models.breaker.settings import BREAK_FOR, BreakerSettings
from seawall.models.breaker.state import BreakerCause, BreakerModel, BreakerState
from seawall.policies.breaker.gate import BreakerGate, failure_reason, failure_text
from seawall.runtime.layers import Host
from seawall.runtime.mutex import Mutex
from seawall.runtime.policy import (
    MODES,
    GatePolicy,
    Mode,
    PolicyShareOwner,
    emit_for,
    now_of,
)
from seawall.runtime.store import BreakerShare, BreakerStore

if TYPE_CHECKING:
    from seawall.policies.breaker.probe import Prober

Classifier = Callable[[Exception | None, Any], bool | None]
"""`is_failure(error, value)`: whether a call that raised `error`, or returned `value`, failed.

None means no verdict: the call counts neither as failed nor as succeeded.
"""

Probing = Callable[..., object]
"""`probe()` or `probe(key)`, plain or async: raises or returns False while calls would fail."""

Counts = Literal["calls", "attempts"]

OnStoreFailure = Literal["local", "open", "closed"]


class Breaker(GatePolicy):
    """Refuse calls while the dependency is failing."""

    kind: ClassVar[str] = "breaker"
    _needs_statistics = False

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
        probe: Probing | None = None,
        probe_every: float = 1.0,
        is_failure: Classifier | ErrorKinds | None = None,
        counts: Counts = "calls",
        key: Callable[..., Hashable] | None = None,
        max_keys: int = 1024,
        mode: Mode = "enforce",
        shared: BreakerStore | None = None,
        name: str | None = None,
        on_store_failure: OnStoreFailure = "local",
        quorum: int | None = None,
    ) -> None:
        """Trip by any of the given rules; by default `failure_ratio=0.5` over 30 s and 20 calls.

        Rules: `consecutive` failures; a `failure_ratio` of the calls of the last `window` seconds
        (or the last `window_calls` calls) once there were `min_calls`; a `slow_ratio` of calls that
        take `slow_after` seconds or more, including running ones. Then it stays open for
        `break_for` seconds (or a function of consecutive opens, such as `growing(5.0)`), admits
        `probes` (`single_probe()`, `n_of_m(2, 3)`, `ramp(step=10.0)`), and closes if they pass.

        While it is open and there are no calls, `probe()` runs every `probe_every` seconds, as a
        probe like any other: a plain or an async function, which fails by raising, returning False,
        or taking longer than that. A keyed breaker passes the key.

        `is_failure(error, value)` or types of errors define what is a failure; by default any
        Exception is. If it returns None, the call has no verdict, and a probe's permit is returned.
        A call that is retried by the same guard counts once, when it ends, or as failed when it has
        failed and takes longer than a second; with `counts="attempts"` each attempt counts. With
        `key`, a function of the call's arguments, each key has a breaker of its own, at most
        `max_keys` of them.

        With `shared`, a store, and a `name`, all pods that use that name share one breaker: ratios
        are computed over the calls of all pods, `consecutive` over each pod's own. With a `quorum`
        each pod judges its own calls, and the breaker trips when that many pods agree. While the
        store is unreachable each pod judges by its own calls ("local"), admits all ("open"), or
        refuses all ("closed").
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
            break_for=NeverRaising(break_for) if callable(break_for) else break_for,
            probes=probes,  # type: ignore[arg-type]  # None is a single one
            probe_timeout=probe_timeout,
        )
        self.is_failure = None if is_failure is None else error_predicate("is_failure", is_failure)
        self.counts: Counts = check.choice("counts", counts, ("calls", "attempts"))
        self.key = None if key is None else check.plain_function("key", key)
        self.max_keys = check.count("max_keys", max_keys)
        self._mutex = Mutex()
        survives_fork(self)
        self.transitions = dict.fromkeys((state.value for state in BreakerState), 0)
        """Number of times each state was entered, all keys together."""
        self.shared = shared
        self.name = name
        self.on_store_failure = on_store_failure
        self.quorum = quorum
        self._share = self._shared_by(on_store_failure, quorum)
        self.probe = probe
        self.probe_every = check.seconds("probe_every", probe_every)
        self._prober: Prober | None = None
        if probe is not None:
            from seawall.policies.breaker.probe import Prober

            self._prober = Prober(self, check.function("probe", probe), self.probe_every)
        self.model = self._new_model(None) if key is None else BreakerModel(self.settings)
        self._keyed: OrderedDict[Hashable, BreakerModel] = OrderedDict()
        self._overflowed = False

    def __repr__(self) -> str:
        given = {name: value for name, value in vars(self.settings).items() if value is not None}
        if self.counts != "calls":
            given["counts"] = self.counts
        if self.shared is not None:
            given |= {"shared": self.shared, "name": self.name}
        return f"Breaker({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def state(self) -> str:
        """Name of the state; for a keyed breaker the worst state of any key."""
        self._follow_store()
        states = {model.state for model in self.models().values()}
        bad = (BreakerState.ISOLATED, BreakerState.OPEN, BreakerState.HALF_OPEN)
        return next((state for state in bad if state in states), BreakerState.CLOSED).value

    def is_open(self, now: float, *args: Any, **kwargs: Any) -> bool:
        """Return whether calls are refused now: for the key of these arguments, or for any key."""
        self._follow_store()
        models = self.models()
        if self.key is not None and (args or kwargs):
            key = self.key(*args, **kwargs)
            models = {key: models[key]} if key in models else {}
        return any(
            model.state is BreakerState.ISOLATED or bool(model.retry_after(now))
            for model in models.values()
        )

    def isolate(self, key: Hashable = None) -> None:
        """Refuse all calls (of `key`, if keyed) until `close`."""
        self._command(key, "isolate")

    def trip(self, key: Hashable = None) -> None:
        """Open as if calls had failed: probes follow after `break_for`.

        Has no effect if isolated.
        """
        self._command(key, "trip")

    def close(self, key: Hashable = None) -> None:
        """Admit calls again and forget all history, even if already closed."""
        self._command(key, "close")

    def models(self) -> dict[Hashable, BreakerModel]:
        """Return the breakers by key; a single one under None if it is not keyed."""
        if self.key is None:
            return {None: self.model}
        with self._mutex:
            return dict(self._keyed)

    def _follow_store(self) -> None:
        """Start receiving changes from other pods, even if there was no call here yet."""
        if self._share is not None:
            self._share.begin()

    def _model_for(self, key: Hashable) -> BreakerModel:
        """Return the breaker of `key`, and create it if it is new."""
        with self._mutex:
            model = self._keyed.get(key)
            if model is not None:
                self._keyed.move_to_end(key)
                return model
            if len(self._keyed) >= self.max_keys and not self._evict():
                self._overflowed = True
                return self.model  # shared by all keys for which there is no room
            model = self._keyed[key] = self._new_model(key)
            return model

    def _new_model(self, key: Hashable) -> BreakerModel:
        return BreakerModel(self.settings) if self._share is None else self._share.model(key)

    def _evict(self) -> bool:
        """Evict the least recently used breaker that may go. Return whether there is one."""
        now = now_of(self)
        for key, model in self._keyed.items():
            if _is_evictable(model, now):
                del self._keyed[key]
                if self._share is not None:
                    self._share.forget(model)
                return True
        return False

    def _at_rest(self, now: float) -> bool:
        return all(_is_evictable(model, now) for model in self.models().values())

    def _command(self, key: Hashable, command: str) -> None:
        if (key is None) != (self.key is None):
            raise TypeError(f"{command}(): give the key of a keyed breaker, and only of such a one")
        model = self.model if self.key is None else self._model_for(key)
        if self.key is not None and model is self.model:
            raise RuntimeError(
                f"{command}({key!r}): all {self.max_keys} keys are in use and broken"
            )
        self._follow_store()
        with self._mutex:
            getattr(model, command)(now_of(self))
        self._report(model, key)

    def _report(self, model: BreakerModel, key: Hashable) -> None:
        """Publish changes of state to the guards that share this breaker."""
        with self._mutex:
            changes, model.changes = model.changes, []
            for change in changes:
                self.transitions[change.after.value] += 1
        for change in changes:
            reason = failure = ""
            if change.failure is not None:
                reason, failure = failure_reason(*change.failure), failure_text(*change.failure)
            elif self._share is not None and change.after is BreakerState.OPEN:
                failure = "" if change.cause is BreakerCause.TRIP else model.failure
            emit_for(
                self,
                BreakerChanged,
                before=change.before.value,
                after=change.after.value,
                cause=change.cause.value,
                key=key,
                reason=reason,
                failure=failure,
            )
        if self._prober is not None and model.state is BreakerState.OPEN:
            self._prober.begin()

    def _after_fork(self) -> None:
        """Reset in a child process. Probes of threads that no longer exist time out."""
        self._mutex = Mutex()

    def _bind(self, host: Host) -> BreakerGate:
        return BreakerGate(self, host)

    def _shared_by(
        self, on_store_failure: OnStoreFailure, quorum: int | None
    ) -> BreakerShare | None:
        check.choice("on_store_failure", on_store_failure, ("local", "open", "closed"))
        if quorum is not None:
            check.count("quorum", quorum)
        if self.shared is None:
            if (self.name, on_store_failure, quorum) != (None, "local", None):
                raise TypeError(
                    "name, on_store_failure and quorum are for a breaker that pods share: write"
                    " shared=store too"
                )
            return None
        if isinstance(self.shared, type) or not callable(getattr(self.shared, "_breaker", None)):
            raise TypeError(f"shared={self.shared!r}: pass a store, such as RedisStore(url)")
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(
                f"name={self.name!r}: write under which name pods share it, such as name='vendor'"
            )
        return self.shared._breaker(
            self.name,
            self.settings,
            _BreakerShareOwner(self),
            on_store_failure=on_store_failure,
            quorum=quorum,
            keyed=self.key is not None,
        )

    def _update(self, changes: dict[str, Any]) -> None:
        known = tuple(vars(self.settings))
        self._reject_unknown(changes, (*known, "mode"))
        rest = dict(changes)
        mode = check.choice("mode", rest.pop("mode", self.mode), MODES)
        if callable(rest.get("break_for")):
            rest["break_for"] = NeverRaising(rest["break_for"])
        settings = self.settings.replace(**rest)
        now = now_of(self)
        models = [self.model, *self.models().values()]
        with self._mutex:
            if self._share is not None:
                self._share.update(settings)
            self.mode, self.settings = mode, settings
            for model in models:
                model.update(settings, now)


def _is_evictable(model: BreakerModel, now: float) -> bool:
    """Return whether a breaker may be evicted: it is closed, or its break is over.

    Otherwise a flood of keys could reset an open one.
    """
    over = model.state is BreakerState.OPEN and not model.retry_after(now)
    return over or model.state is BreakerState.CLOSED


class NeverRaising:
    """A user's `break_for`. If it fails during an outage, the default is used."""

    def __init__(self, function: Callable[[int], float]) -> None:
        self.function = check.plain_function("break_for", function)
        check.seconds("break_for(1)", function(1))

    def __call__(self, opens: int) -> float:
        """Return the break after so many opens."""
        try:
            return check.seconds("break_for(...)", self.function(opens))
        except Exception:  # noqa: BLE001 - logged
            log_failure("break_for(%d) failed; %g s instead", opens, BREAK_FOR)
            return BREAK_FOR

    def __repr__(self) -> str:
        return repr(self.function)


class _BreakerShareOwner(PolicyShareOwner):
    """What a store's share knows of its breaker."""

    _policy: Callable[[], Breaker | None]

    def __init__(self, policy: Breaker) -> None:
        super().__init__(policy)
        self._spare = Mutex()

    @property
    def mutex(self) -> Mutex:
        policy = self._policy()
        return self._spare if policy is None else policy._mutex

    def now(self) -> float:
        policy = self._policy()
        return current_clock().now() if policy is None else now_of(policy)

    def report(self, model: BreakerModel, key: Hashable) -> None:
        policy = self._policy()
        if policy is not None:
            policy._report(model, key)
