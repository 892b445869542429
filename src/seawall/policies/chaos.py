"""Let a share of calls be slow, fail, answer wrongly or hang, on purpose: to see what then happens.

Promises: nothing is disturbed until it is switched on; the same seed disturbs the same calls, in
the order in which they come; a disturbed call is counted as if the dependency itself had behaved
so; it can be cancelled, and waits no longer than the deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from seawall import _checks as check
from seawall.context import deadline_var
from seawall.errors import TimedOut
from seawall.runtime.call import Call
from seawall.runtime.layers import Driver, Host, Kind
from seawall.runtime.policy import Bound, Policy
from seawall.runtime.runners import run_async, run_sync, wait_async


class _Nothing:
    """Stands for a result that was not given: None is one too."""

    def __repr__(self) -> str:
        return "<nothing>"


_NOTHING: Final = _Nothing()

_SETTINGS: Final = ("share", "latency", "error", "result", "hang", "when", "seed", "enabled")


class Chaos(Policy):
    """Disturb a share of calls, while switched on."""

    kind: ClassVar[str] = "chaos"

    def __init__(
        self,
        share: float,
        *,
        latency: float | tuple[float, float] | None = None,
        error: Callable[[], Exception] | None = None,
        result: Any = _NOTHING,
        hang: bool = False,
        when: Callable[..., bool] | None = None,
        seed: int = 0,
        enabled: bool = False,
    ) -> None:
        """Disturb a `share` of calls (1.0 for all), chosen by `seed`, once it is `enabled`.

        `latency` is added before the call: seconds, or a pair to draw from. `error` (a type, or a
        function that makes an error) is raised, or `result` returned, instead of the call, after
        the latency if both are given. `hang` never answers: a plain function then needs a deadline.
        `when(*args, **kwargs)` picks the calls that may be disturbed by their arguments.
        """
        super().__init__()
        self.share = check.ratio("share", share, zero=True)
        self.latency = None if latency is None else _read_latency(latency)
        if error is not None and (isinstance(error, BaseException) or not callable(error)):
            raise TypeError(
                f"error={error!r}: pass a type, such as error=ConnectionError, or a function that"
                " makes a new error each time"
            )
        self.error = error
        self.result = result
        self.hang = check.flag("hang", hang)
        self.when = None if when is None else check.function("when", when)
        self.seed = check.count("seed", seed, minimum=0)
        self.enabled = check.flag("enabled", enabled)
        self._check_kinds()
        self._begin()

    def _check_kinds(self) -> None:
        ends = [self.error is not None, self.result is not _NOTHING, self.hang]
        if sum(ends) > 1 or (self.hang and self.latency is not None):
            raise ValueError(
                "Chaos does one thing: error=, result= or hang=, and latency= with the first two;"
                " put several Chaos policies into the guard for several things"
            )
        if not any(ends) and self.latency is None:
            raise ValueError("Chaos does nothing so: write latency=, error=, result= or hang=True")

    def _begin(self) -> None:
        from random import Random

        self._rng = Random(self.seed)  # noqa: S311 - to be foreseen is its purpose

    def __repr__(self) -> str:
        latency = self.latency
        shown = latency and (latency[0] if latency[0] == latency[1] else latency)
        parts = [
            *([] if latency is None else [f"latency={shown!r}"]),
            *([] if self.error is None else [f"error={_name(self.error)}"]),
            *([] if self.result is _NOTHING else [f"result={self.result!r}"]),
            *(["hang=True"] if self.hang else []),
        ]
        state = "on" if self.enabled else "off"
        return f"<Chaos({self.share:g}, {', '.join(parts)}), {state}>"

    @property
    def does(self) -> str:
        """What it does to a call, in a word: latency, error, result or hang."""
        if self.error is not None:
            return "error"
        if self.result is not _NOTHING:
            return "result"
        return "hang" if self.hang else "latency"

    def on(self) -> SwitchedOn:
        """Switch on; `with chaos.on():` until the end of the block."""
        before = self.enabled
        self.update(enabled=True)
        return SwitchedOn(self, before=before)

    def off(self) -> None:
        """Switch off; calls that are being disturbed go on."""
        self.update(enabled=False)

    def _bind(self, host: Host) -> _ChaosBound:
        return _ChaosBound(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        """Change settings; with `seed` the sequence begins anew."""
        self._reject_unknown(changes, _SETTINGS)
        settings = {name: getattr(self, name) for name in _SETTINGS} | changes
        fresh = Chaos(settings.pop("share"), **settings)
        for name in changes:
            setattr(self, name, getattr(fresh, name))
        if "seed" in changes:
            self._rng = fresh._rng

    def _draw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Strike | None:
        """Decide on one call: what is to be done to it, or None."""
        if self.when is not None and not self.when(*args, **kwargs):
            return None
        random = self._rng.random
        if random() >= self.share:
            return None
        seconds = 0.0
        if self.latency is not None:
            low, high = self.latency
            seconds = low if low == high else low + (high - low) * random()
        return _Strike(self, self.does, float("inf") if self.hang else seconds)


class SwitchedOn:
    """At the end of a `with` block, Chaos is again as it was."""

    __slots__ = ("_before", "_chaos")

    def __init__(self, chaos: Chaos, *, before: bool) -> None:
        self._chaos = chaos
        self._before = before

    def __enter__(self) -> Chaos:
        return self._chaos

    def __exit__(self, *exc: object) -> None:
        self._chaos.update(enabled=self._before)


class _ChaosBound(Bound):
    """The chaos inside one guard."""

    policy: Chaos

    def __init__(self, policy: Chaos, host: Host) -> None:
        super().__init__(policy, host)
        self.injected: dict[str, int] = {}
        self._driver = _ChaosDriver(self)

    def layer(self, kind: Kind) -> _ChaosDriver:
        return self._driver

    def snapshot(self, now: float) -> dict[str, Any]:
        policy = self.policy
        return {
            "enabled": policy.enabled,
            "share": policy.share,
            "injected": dict(self.injected),
        }


class _Strike(NamedTuple):
    """What is done to one call."""

    policy: Chaos
    does: str
    seconds: float

    def answer(self) -> Any:
        """Raise the error, or return the result."""
        if self.policy.error is not None:
            raise self.policy.error()
        return self.policy.result


class _ChaosDriver(Driver):
    """Runs what is inside, or does something else."""

    def __init__(self, bound: _ChaosBound) -> None:
        self._bound = bound

    def wrap(self, inner: Callable[..., Any], kind: Kind, function: Any) -> Callable[..., Any]:
        """Return a function that runs `inner`, disturbed at times."""
        policy, host = self._bound.policy, self._bound.host
        run: Callable[[Call], Any] = run_async if kind == "async" else run_sync
        disturb = _disturb_async if kind == "async" else _disturb_sync
        policies: Sequence[Any] = getattr(host, "policies", ())
        innermost = bool(policies) and policies[-1] is policy

        def chaotic(*args: Any, **kwargs: Any) -> Any:
            strike = policy._draw(args, kwargs) if policy.enabled else None
            if strike is None:
                return inner(*args, **kwargs)
            injected = self._bound.injected
            injected[strike.does] = injected.get(strike.does, 0) + 1
            # What is counted is the function with the disturbance, as one; if more layers are
            # inside they count the function, and a latency is that of what is around it.
            goes_on = strike.does == "latency"
            real = function if innermost else inner
            disturbed = disturb(strike, real if goes_on else None, host)
            call = Call(host, (), disturbed, args, kwargs, host.clock.now())
            call.counts = innermost or not goes_on
            return run(call)

        return chaotic


def _disturb_sync(strike: _Strike, real: Any, host: Host) -> Callable[..., Any]:
    def disturbed(*args: Any, **kwargs: Any) -> Any:
        pause = _Pause(strike, host)
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


def _disturb_async(strike: _Strike, real: Any, host: Host) -> Callable[..., Any]:
    async def disturbed(*args: Any, **kwargs: Any) -> Any:
        if strike.seconds:
            await wait_async(_Pause(strike, host), host.clock)
        return strike.answer() if real is None else await real(*args, **kwargs)

    return disturbed


class _Pause:
    """Waits for nobody, until its time or the deadline has come."""

    __slots__ = ("_late", "_name", "until")

    def __init__(self, strike: _Strike, host: Host) -> None:
        now = host.clock.now()
        until = now + strike.seconds
        held = deadline_var.get()
        limit = float("inf") if held is None else now + held[0] - held[1].now()
        self._name = host.name
        self._late = limit < until
        until = min(until, limit)
        self.until: float | None = None if until == float("inf") else until

    def publish(self, wake: Callable[[], bool]) -> None:
        """Nobody will wake it."""

    def claim(self) -> None:
        """Go on, or say that the deadline has come first: so does a client that obeys it."""
        if self._late:
            raise TimedOut(
                f"guard {self._name!r}: the deadline passed while Chaos delayed the call"
            )

    def abandon(self) -> None:
        """Have nothing to give back."""


def _read_latency(latency: Any) -> tuple[float, float]:
    pair = latency if isinstance(latency, (tuple, list)) else (latency, latency)
    if len(pair) != 2:  # noqa: PLR2004
        raise ValueError(f"latency={latency!r}: write seconds, or a pair such as (0.1, 0.5)")
    low = check.seconds("latency", pair[0], zero=True)
    high = check.seconds("latency", pair[1])
    if high < low:
        raise ValueError(f"latency={latency!r}: write the lower number first")
    return low, high


def _name(error: Any) -> str:
    return getattr(error, "__name__", repr(error))
