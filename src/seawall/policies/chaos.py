"""Chaos: make a share of calls slow, fail, answer wrongly or hang, to see the effects.

Promises:
- No call is disturbed until it is switched on.
- The same seed disturbs the same calls, in their order.
- A disturbed call is counted as if the dependency itself had behaved so.
- A disturbed call can be cancelled, and waits no longer than the deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any, ClassVar, Final, NamedTuple

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.context import give_up_at
from seawall.errors import TimedOut
from seawall.events import SettingsChanged
from seawall.runtime.call import Call
from seawall.runtime.driver import CallbackWaiter, wait_async
from seawall.runtime.interpreter import run_async, run_sync
from seawall.runtime.layers import Driver, Host, Kind
from seawall.runtime.mutex import Mutex
from seawall.runtime.policy import Bound, Policy, emit_for


class _Nothing:
    """Sentinel for a result that was not given: None is a valid result."""

    def __repr__(self) -> str:
        return "<nothing>"


NOTHING: Final = _Nothing()

_SETTINGS: Final = ("share", "latency", "error", "result", "hang", "when", "seed", "enabled")

_ENDS: Final[dict[str, Any]] = {"error": None, "result": NOTHING, "hang": False}
"""Ways in which a call can end, with the value that disables each. At most one may be set."""


class Chaos(Policy):
    """Disturb a share of calls, while switched on."""

    kind: ClassVar[str] = "chaos"

    def __init__(
        self,
        share: float,
        *,
        latency: float | tuple[float, float] | None = None,
        error: Callable[[], Exception] | None = None,
        result: Any = NOTHING,
        hang: bool = False,
        when: Callable[..., bool] | None = None,
        seed: int = 0,
        enabled: bool = False,
    ) -> None:
        """Disturb a `share` of calls (1.0 for all), chosen by `seed`, once it is `enabled`.

        `latency` is added before the call: seconds, or a pair to draw from. `error` (a type, or a
        function that creates an error) is raised, or `result` returned (the same object each time),
        instead of the call, after the latency if both are given. `hang` never answers: a plain
        function then needs a deadline. `when(*args, **kwargs)` selects the calls that may be
        disturbed by their arguments.
        """
        super().__init__()
        self.share = check.ratio("share", share, zero=True)
        self.latency = None if latency is None else _read_latency(latency)
        if error is not None and not _makes_errors(error):
            raise TypeError(
                f"error={error!r}: pass a type, such as error=ConnectionError, or a function that"
                " makes a new error each time"
            )
        self.error = error
        self.result = result
        self.hang = check.flag("hang", hang)
        self.when = None if when is None else check.plain_function("when", when)
        self.seed = check.count("seed", seed, minimum=0)
        self.enabled = check.flag("enabled", enabled)
        self._lasting = enabled
        self._open: set[ChaosBlock] = set()  # blocks of `on()` that have not ended
        self._mutex = Mutex()
        self._rng = Random(seed)  # noqa: S311 - it has to be predictable
        self._check_kinds()
        survives_fork(self)

    def _check_kinds(self) -> None:
        ends = [self.error is not None, self.result is not NOTHING, self.hang]
        if sum(ends) > 1 or (self.hang and self.latency is not None):
            raise ValueError(
                "Chaos does one thing: error=, result= or hang=, and latency= with the first two;"
                " put several Chaos policies into the guard for several things"
            )
        if not any(ends) and self.latency is None:
            raise ValueError("Chaos does nothing so: write latency=, error=, result= or hang=True")

    def _after_fork(self) -> None:
        self._mutex = Mutex()

    def __repr__(self) -> str:
        parts = [f"{self.share:g}"]
        if self.latency is not None:
            low, high = self.latency
            parts.append(f"latency={low if low == high else self.latency!r}")
        if self.error is not None:
            parts.append(f"error={getattr(self.error, '__name__', repr(self.error))}")
        if self.result is not NOTHING:
            parts.append(f"result={self.result!r}")
        if self.hang:
            parts.append("hang=True")
        return f"<Chaos({', '.join(parts)}), {'on' if self.enabled else 'off'}>"

    def on(self) -> ChaosBlock:
        """Switch on; as `with chaos.on():` until the end of the block and of overlapping ones."""
        block = ChaosBlock(self)
        with self._mutex:
            self._open.add(block)
        self._switch()
        return block

    def off(self) -> None:
        """Switch off, even inside a block. Calls that are being disturbed continue."""
        self.update(enabled=False)

    def _leave(self, block: ChaosBlock) -> None:
        with self._mutex:
            self._open.discard(block)
        self._switch()

    def _switch(self) -> None:
        """Update `enabled` from the open blocks, and publish a change."""
        with self._mutex:
            before, self.enabled = self.enabled, self._lasting or bool(self._open)
            after = self.enabled
        if after is not before:
            emit_for(self, SettingsChanged, policy=self.kind, changes={"enabled": after})

    def _bind(self, host: Host) -> _ChaosBound:
        return _ChaosBound(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        """Change settings. A given one replaces those that it excludes."""
        named = [name for name, none in _ENDS.items() if changes.get(name, none) is not none]
        new = dict(_ENDS) if named else {}
        if "hang" in named:
            new["latency"] = None
        elif changes.get("latency") is not None:
            new["hang"] = False
        new |= changes
        fresh = Chaos._changed(new, **{name: getattr(self, name) for name in _SETTINGS})
        with self._mutex:
            for name in new:
                setattr(self, name, getattr(fresh, name))
            if "seed" in changes:
                self._rng = fresh._rng  # the sequence begins again
            if "enabled" in changes:
                self._lasting = fresh.enabled
                if not fresh.enabled:
                    self._open.clear()

    def _draw(self) -> Strike | None:
        """Return what to do to one call, or None. Needs the mutex."""
        random = self._rng.random
        if random() >= self.share:
            return None
        if self.hang:
            return Strike("hang", float("inf"), None, NOTHING)
        seconds = 0.0
        if self.latency is not None:
            low, high = self.latency
            seconds = low if low == high else low + (high - low) * random()
        does = "latency" if self.result is NOTHING else "result"
        return Strike(does if self.error is None else "error", seconds, self.error, self.result)


class ChaosBlock:
    """A block in which Chaos is on. After it, Chaos is as if the block had never been."""

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos

    def __enter__(self) -> Chaos:
        return self._chaos

    def __exit__(self, *exc: object) -> None:
        self._chaos._leave(self)


class _ChaosBound(Driver, Bound):
    """The chaos inside one guard: runs the inner layers, or disturbs the call."""

    policy: Chaos

    def __init__(self, policy: Chaos, host: Host) -> None:
        super().__init__(policy, host)
        self.injected: dict[str, int] = {}

    def strike(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Strike | None:
        """Decide what to do to one call, and count it if it is disturbed."""
        policy = self.policy
        when = policy.when
        if not policy.enabled or (when is not None and not when(*args, **kwargs)):
            return None
        with policy._mutex:
            strike = policy._draw()
            if strike is not None:
                self.injected[strike.does] = self.injected.get(strike.does, 0) + 1
            return strike

    def snapshot(self, now: float) -> dict[str, Any]:
        policy = self.policy
        with policy._mutex:
            injected = dict(self.injected)
        return {"enabled": policy.enabled, "share": policy.share, "injected": injected}

    def wrap(
        self, host: Host, inner: Callable[..., Any], kind: Kind, function: Any
    ) -> Callable[..., Any]:
        """Return a function that runs `inner`, with disturbances."""
        policy = self.policy
        run: Callable[[Call], Any] = run_async if kind == "async" else run_sync
        disturb = disturb_async if kind == "async" else disturb_sync
        bounds: list[Any] = getattr(host, "bounds", [self])
        further = bounds[bounds.index(self) + 1 :]
        innermost = all(isinstance(other, _ChaosBound) for other in further)
        # The function is counted once, with all its disturbances. If other layers are inside, they
        # count the function, and a latency belongs to the layers around it.
        real = function if innermost else inner
        for other in reversed(further if innermost else ()):
            real = other.disturbed(real, disturb)

        def chaotic(*args: Any, **kwargs: Any) -> Any:
            strike = self.strike(args, kwargs) if policy.enabled else None
            if strike is None:
                return inner(*args, **kwargs)
            disturbed = disturb(strike, real if strike.goes_on else None, host)
            call = Call(host, (), disturbed, args, kwargs, host.clock.now())
            call.counts = innermost or not strike.goes_on
            return run(call)

        return chaotic

    def disturbed(
        self, real: Callable[..., Any], disturb: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return `real` with disturbances, to be counted by an outer layer."""

        def function(*args: Any, **kwargs: Any) -> Any:
            strike = self.strike(args, kwargs)
            if strike is None:
                return real(*args, **kwargs)
            return disturb(strike, real if strike.goes_on else None, self.host)(*args, **kwargs)

        return function


def _read_latency(latency: Any) -> tuple[float, float]:
    pair = latency if isinstance(latency, (tuple, list)) else (latency, latency)
    if len(pair) != 2:  # noqa: PLR2004
        raise ValueError(f"latency={latency!r}: write seconds, or a pair such as (0.1, 0.5)")
    low = check.seconds("latency", pair[0], zero=True)
    high = check.seconds("latency", pair[1])
    if high < low:
        raise ValueError(f"latency={latency!r}: write the lower number first")
    return low, high


def _makes_errors(error: Any) -> bool:
    if isinstance(error, type):
        return issubclass(error, Exception)
    if not callable(error) or isinstance(error, BaseException):
        return False
    return check.function_kind(error) == "sync"


class Strike(NamedTuple):
    """What is done to one call."""

    does: str
    seconds: float
    error: Callable[[], Exception] | None
    result: Any

    @property
    def goes_on(self) -> bool:
        """Whether the call itself follows."""
        return self.does == "latency"

    def answer(self) -> Any:
        """Raise the error, or return the result."""
        if self.error is not None:
            raise self.error()
        return self.result


def disturb_sync(strike: Strike, real: Any, host: Host) -> Callable[..., Any]:
    """Return what runs instead of a call. `real` is the function that follows, or None."""

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        pause = _pause(strike, host)
        if pause.until is None:
            raise RuntimeError(
                f"guard {host.name!r}: a plain function would hang for ever here: give it a"
                " deadline, such as Timeout(2.0, sync='cooperative') around Chaos, or use latency="
            )
        if strike.seconds:
            host.clock.sleep(max(0.0, pause.until - host.clock.now()))
            pause.claim()
        return strike.answer() if real is None else real(*args, **kwargs)

    return disturbed


def disturb_async(strike: Strike, real: Any, host: Host) -> Callable[..., Any]:
    """Async twin of `disturb_sync`."""

    async def disturbed(*args: Any, **kwargs: Any) -> Any:
        if strike.seconds:
            await wait_async(_pause(strike, host), host.clock)
        return strike.answer() if real is None else await real(*args, **kwargs)

    return disturbed


def _pause(strike: Strike, host: Host) -> CallbackWaiter:
    """Return a waiter that is never woken: it waits until its time or the deadline.

    If the deadline comes first, its claim raises, as a client that respects it would.
    """
    until, late = give_up_at(host.clock.now(), strike.seconds)

    def claim() -> None:
        if late:
            raise TimedOut(f"guard {host.name!r}: the deadline passed while Chaos delayed the call")

    return CallbackWaiter(lambda _wake: None, result=claim, until=inf if until is None else until)
