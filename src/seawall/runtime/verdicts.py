"""One verdict for a call whose attempts do not run in one piece.

Where a driver (a hedge, a thread, a cache) stands between a retry and a gate that counts calls,
each attempt is a call of its own to the interpreter. What those gates have to say is then collected
outside of the retry, and counted once, when the call is over.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Final

from seawall.context import reset
from seawall.runtime.layers import Flow, Host, Layer, Outcome, PendingVerdict

if TYPE_CHECKING:
    from seawall.runtime.call import Call


class _Collected:
    """The latest verdicts of one call."""

    __slots__ = ("_over", "_pending", "host")

    def __init__(self, host: Host) -> None:
        self.host = host
        self._pending: dict[Layer, PendingVerdict] = {}
        self._over = False

    def add(self, layer: Layer, verdict: PendingVerdict, now: float) -> None:
        if self._over:  # of work that ran on after its caller gave up
            verdict.count(now)
        else:
            self._pending[layer] = verdict

    def count(self, now: float) -> None:
        self._over = True
        pending, self._pending = self._pending, {}
        for verdict in pending.values():
            verdict.count(now)


_collected_var: Final[ContextVar[_Collected | None]] = ContextVar("seawall_verdicts", default=None)


class VerdictCollector(Flow):
    """Stands outside of the outermost retry, and counts what the last attempt has said."""

    passes_refusals = True

    def __init__(self, host: Host) -> None:
        """Collect for calls of `host`."""
        self._host = host

    def enter(self, _now: float, /) -> tuple[_Collected, Token[_Collected | None]]:
        """Begin to collect."""
        collected = _Collected(self._host)
        return collected, _collected_var.set(collected)

    def leave(self, ticket: Any, _outcome: Outcome, _detail: Any, now: float) -> None:
        """Count what was collected."""
        collected, token = ticket
        reset(_collected_var, token)
        collected.count(now)

    def settle(self, call: Call, ticket: Any) -> None:
        """Do the same, on the way up."""
        self.leave(ticket, call.outcome(), None, call.host.clock.now())


class CollectedGate(Layer):
    """A gate that counts calls, inside of a driver that is inside of a retry."""

    def __init__(self, gate: Layer, host: Host) -> None:
        """Let the collector of `host` have what `gate` has to say."""
        self._gate = gate
        self._host = host
        self.enter = gate.enter
        self.takes_arguments = gate.takes_arguments

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Take in how an attempt ended."""
        gate = self._gate
        verdict = None if gate.attempted is None else gate.attempted(ticket, outcome, detail, now)
        if verdict is None:
            return
        collected = _collected_var.get()
        if collected is None or collected.host is not self._host:
            verdict.count(now)
        else:
            collected.add(gate, verdict, now)
