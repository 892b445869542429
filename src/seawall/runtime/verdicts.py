"""One verdict for a call whose attempts run as separate calls.

If a driver (a hedge, a thread, a cache) is between a retry and a gate that counts calls, each
attempt is a separate call to the interpreter. How the whole call counts is then kept outside of the
retry, where all of its attempts find it.

Promises:
- All attempts of a call count as one call, including those that run at the same time.
- An abandoned attempt that ends after its call counts only if no other attempt had a verdict.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Final

from seawall.context import reset
from seawall.models.windows import CallCount
from seawall.runtime.layers import Flow, Host, Layer, Outcome

if TYPE_CHECKING:
    from seawall.runtime.call import Call


class _CallCounts:
    """How one call counts, at each gate."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._by_gate: dict[Layer, CallCount] = {}
        self._over = False

    def at(self, gate: Layer) -> CallCount:
        """Return how the call counts at `gate`; any thread may call this."""
        count = self._by_gate.get(gate)
        if count is None:
            count = self._by_gate.setdefault(gate, CallCount())
            count.over = self._over
        return count

    def end(self) -> None:
        self._over = True
        for count in list(self._by_gate.values()):
            count.over = True


_counts_var: Final[ContextVar[_CallCounts | None]] = ContextVar("seawall_verdicts", default=None)


class VerdictCollector(Flow):
    """A flow outside of the outermost retry: everything inside it is one call."""

    passes_refusals = True

    def __init__(self, host: Host) -> None:
        self._host = host

    def enter(self, _now: float, /) -> tuple[_CallCounts, Token[_CallCounts | None]]:
        """Begin a call."""
        counts = _CallCounts(self._host)
        return counts, _counts_var.set(counts)

    def leave(self, ticket: Any, _outcome: Outcome, _detail: Any, _now: float) -> None:
        """End the call."""
        counts, token = ticket
        reset(_counts_var, token)
        counts.end()

    def settle(self, call: Call, ticket: Any) -> None:
        """End the call on the way up."""
        self.leave(ticket, call.outcome(), None, call.host.clock.now())


class CollectedGate(Layer):
    """A gate that counts calls, inside of a driver that is inside of a retry."""

    def __init__(self, gate: Layer, host: Host) -> None:
        self._gate = gate
        self._host = host
        self.takes_arguments = gate.takes_arguments

    def enter(self, now: float, /, *args: Any, **kwargs: Any) -> Any:
        """Enter the gate with an attempt of the call."""
        gate = self._gate
        assert gate.enter is not None  # noqa: S101 - for the type checker
        assert gate.continued is not None  # noqa: S101 - for the type checker
        ticket = gate.enter(now, *args, **kwargs)
        counts = self._counts()
        if counts is not None:
            gate.continued(ticket, counts.at(gate))
        return ticket

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Leave the gate at the end of an attempt."""
        gate = self._gate
        assert gate.leave is not None  # noqa: S101 - for the type checker
        assert gate.attempted is not None  # noqa: S101 - for the type checker
        counts = self._counts()
        if counts is None:
            gate.leave(ticket, outcome, detail, now)
        else:
            gate.attempted(ticket, outcome, detail, now, counts.at(gate), defer=False)

    def _counts(self) -> _CallCounts | None:
        counts = _counts_var.get()
        return counts if counts is not None and counts.host is self._host else None
