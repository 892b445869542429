"""When a request is begun: in turns of the event loop, so that a queue is seen and kept short.

The trap that this is about: a handler that computes without awaiting begins and ends in one turn
of the loop. However many wait, no two of them are ever in flight at once: the queue stands in the
loop's list of ready tasks and in the sockets, where no limit on calls at once can see it.

So `Turns` looks at the loop's time, and at nothing else: requests that wait for others, open
streams and the work of threads cost it nothing. Promises:

- A turn in which requests have computed for longer than `slice` begins no more of them. Who comes
  later waits for another turn, the sockets are read in between, the most critical goes first.
- While the loop was busy for less than `busy` of the last moments nobody is refused before
  `patience` is over, since the queue will drain.
- Above that it does not drain. Then the newest is served first, and who has waited for longer
  than `scale` requests take (or `slice`, if that is more) is refused. So is, at once and before
  any limit is asked, who comes while enough others who matter as much wait for the next two turns.
- Requests that cost less than `cheap` are not worth refusing: to say no costs as much as to serve
  them. They share a turn of up to `CHEAP_SLICE`, as many at once as come, and wait for `patience`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from seawall import _checks as check
from seawall.models.adaptive import vegas
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.runtime.layers import Host
from seawall.runtime.policy import GatePolicy, Mode
from seawall.web._edge_turns import TurnsGate


class Turns(GatePolicy):
    """Begin requests in turns of the event loop; see above."""

    kind: ClassVar[str] = "turns"

    def __init__(
        self,
        *,
        slice: float = 0.005,  # noqa: A002 - of time, not of a list
        busy: float = 0.7,
        scale: float = 1.5,
        cheap: float = 0.001,
        patience: float = 0.25,
        mode: Mode = "enforce",
    ) -> None:
        """Let a turn last for `slice` seconds; see the module for the others."""
        super().__init__(mode)
        self.slice = check.seconds("slice", slice)
        self.busy = check.ratio("busy", busy)
        self.scale = check.at_least("scale", scale, 0.0)
        self.cheap = check.seconds("cheap", cheap, zero=True)
        self.patience = check.seconds("patience", patience)

    def __repr__(self) -> str:
        return (
            f"Turns(slice={self.slice:g}, busy={self.busy:g}, scale={self.scale:g},"
            f" cheap={self.cheap:g}, patience={self.patience:g})"
        )

    def _bind(self, host: Host) -> TurnsGate:
        return TurnsGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        names = ("slice", "busy", "scale", "cheap", "patience", "mode")
        self._reject_unknown(changes, names)
        fresh = Turns(**{name: changes.get(name, getattr(self, name)) for name in names})
        for name in names:
            setattr(self, name, getattr(fresh, name))


def default_concurrency() -> AdaptiveLimit:
    """Return the limit on requests at once that an app has unless told otherwise.

    `Turns` is what protects the event loop. This one is for what the app waits for. It is learnt
    from how long requests take, and routes that differ look like a queue: so it stays above 50.
    A route that computes in threads (`def`) has its own, by `Edge(routes=...)`.
    """
    return AdaptiveLimit(vegas(initial=100, minimum=50, maximum=2000), max_wait=0.25)
