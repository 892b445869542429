"""Admission by turns of the event loop: keeps the loop's queue visible and short.

A handler that computes without awaiting starts and finishes in one iteration of the loop. However
many requests wait, no two of them are ever in flight concurrently: the queue forms in the loop's
list of ready tasks and in the sockets, where no limit on concurrent calls can see it. `Turns`
therefore measures only the loop's time. Requests that await something, open streams and work in
threads cost it nothing.

Promises:

- A turn in which requests have computed for longer than `slice` starts no more of them. The others
  wait for the next turn. The loop reads the sockets in between, and the most critical request goes
  first.
- A loop that was idle refuses no request of its first burst before it has waited for `patience`
  seconds. A burst that the loop can serve within that time is served completely.
- A busy loop lets requests wait for `target` seconds, in FIFO order. By chance, more requests
  arrive than it can serve for a moment, and the queue drains again.
- Overload is a queue that has not been empty for two windows of a quarter of a second, while more
  than 1.5 times as many requests arrived as started in the last window. Then the newest request is
  served first, and a request that has waited for longer than one and a half requests compute (or
  `slice`, if that is more) is refused. A new request is refused immediately, before any limit is
  checked, while enough requests of at least its criticality wait for the next two turns. Overload
  ends when hardly more requests arrive than start. If the loop is mostly idle, that must last for a
  second: clients that only paused all come back together.
- Requests that cost less than `cheap` are not refused as overload: refusing them costs as much as
  serving them. They share a turn of up to `CHEAP_SLICE`, without a limit on their number, and wait
  for up to `CHEAP_WAIT`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from seawall import _checks as check
from seawall.models.concurrency.algorithms import vegas
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.runtime.layers import Host
from seawall.runtime.policy import GatePolicy, Mode
from seawall.web.edge.loop_queue import TurnsGate


class Turns(GatePolicy):
    """Policy that starts requests in turns of the event loop; see the module."""

    kind: ClassVar[str] = "turns"

    def __init__(
        self,
        *,
        slice: float = 0.005,  # noqa: A002 - a slice of time, not of a list
        target: float = 0.1,
        cheap: float = 0.001,
        patience: float = 1.0,
        mode: Mode = "enforce",
    ) -> None:
        """Limit a turn to `slice` seconds; see the module for the other settings."""
        super().__init__(mode)
        self.slice = check.seconds("slice", slice)
        self.target = check.seconds("target", target)
        self.cheap = check.seconds("cheap", cheap, zero=True)
        self.patience = check.seconds("patience", patience)

    def __repr__(self) -> str:
        return (
            f"Turns(slice={self.slice:g}, target={self.target:g}, cheap={self.cheap:g},"
            f" patience={self.patience:g})"
        )

    def _bind(self, host: Host) -> TurnsGate:
        return TurnsGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        names = ("slice", "target", "cheap", "patience", "mode")
        self._reject_unknown(changes, names)
        fresh = Turns(**{name: changes.get(name, getattr(self, name)) for name in names})
        for name in names:
            setattr(self, name, getattr(fresh, name))


def default_concurrency() -> AdaptiveLimit:
    """Return the default limit on concurrent requests.

    `Turns` protects the event loop; this limit protects what the app waits for. It adapts to the
    latency of requests. It starts high, so that the first burst at an idle pod is not refused
    before anything was measured, and falls when latency shows a queue. Routes with different
    latencies look like a queue, so the limit stays above 50. Give a route that computes in threads
    (`def`) a limit of its own with `Edge(routes=...)`.
    """
    return AdaptiveLimit(vegas(initial=500, minimum=50, maximum=2000), max_wait=0.25)
