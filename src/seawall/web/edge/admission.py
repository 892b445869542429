"""When a request begins: in turns of the event loop, so that its queue is seen and kept short.

A handler that computes without awaiting begins and ends in one iteration of the loop. However many
requests wait, no two of them are ever in flight at once: the queue stands in the loop's list of
ready tasks and in the sockets, where no limit on concurrent calls can see it.

So `Turns` looks at the loop's time and at nothing else: requests that await something, open
streams and the work of threads cost it nothing. Promises:

- A turn in which requests have computed for longer than `slice` begins no more of them. The others
  wait for the next turn; the sockets are read in between, and the most critical goes first.
- A loop that was idle refuses no request of its first burst before it has waited for `patience`
  seconds: a burst that the loop works off within that time is served whole.
- A loop that is busy lets requests wait for `target` seconds, first come first served. By chance
  more come than it can serve for some moments, and the queue drains again.
- Overload is a queue that has not been empty for two windows of a quarter of a second while half
  as much again came as began in the last of them. Then the newest is served first, and a request
  that has waited for longer than one and a half of them compute (or `slice`, if that is more) is
  refused. So is a newcomer, at once and before any limit is asked, while enough others that are as
  critical wait for the next two turns. It is over when hardly more come than begin; while the loop
  rests, after a second of that: clients that only paused come back all at once.
- Requests that cost less than `cheap` are not refused as overload: to refuse them costs as much as
  to serve them. They share a turn of up to `CHEAP_SLICE`, as many at once as come, and wait for
  `CHEAP_WAIT`.
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
    """Begin requests in turns of the event loop; see the module."""

    kind: ClassVar[str] = "turns"

    def __init__(
        self,
        *,
        slice: float = 0.005,  # noqa: A002 - of time, not of a list
        target: float = 0.1,
        cheap: float = 0.001,
        patience: float = 1.0,
        mode: Mode = "enforce",
    ) -> None:
        """Let a turn last for `slice` seconds; see the module for the other settings."""
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

    `Turns` protects the event loop; this limit protects what the app waits for. It is learnt from
    how long requests take. It starts high, so that the first burst at an idle pod is not refused
    before anything was measured, and falls when latency shows a queue. Routes that differ look
    like a queue, so it stays above 50. A route that computes in threads (`def`) has its own limit,
    by `Edge(routes=...)`.
    """
    return AdaptiveLimit(vegas(initial=500, minimum=50, maximum=2000), max_wait=0.25)
