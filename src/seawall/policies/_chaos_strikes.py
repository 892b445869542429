"""What Chaos does to one call, drawn beforehand: it waits, and then goes on, fails or answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from seawall.context import seconds_left
from seawall.errors import TimedOut
from seawall.runtime.layers import Host
from seawall.runtime.runners import wait_async


class _Nothing:
    """Stands for a result that was not given: None is one too."""

    def __repr__(self) -> str:
        return "<nothing>"


NOTHING: Final = _Nothing()


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
    """Return what runs instead of a call; `real` is what follows, None if nothing does."""

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


def disturb_async(strike: Strike, real: Any, host: Host) -> Callable[..., Any]:
    """Do the same for an async call."""

    async def disturbed(*args: Any, **kwargs: Any) -> Any:
        if strike.seconds:
            await wait_async(_Pause(strike, host), host.clock)
        return strike.answer() if real is None else await real(*args, **kwargs)

    return disturbed


class _Pause:
    """Waits for nobody, until its time or the deadline has come."""

    __slots__ = ("_late", "_name", "until")

    def __init__(self, strike: Strike, host: Host) -> None:
        now = host.clock.now()
        until = now + strike.seconds
        left = seconds_left()
        limit = float("inf") if left is None else now + left
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
