"""Admission by the time that a request has waited in the server's queue for a thread.

A server with threads queues connections inside itself, out of the app's sight: however many wait,
the app never sees more than a few at once. So a limit on concurrent requests cannot shorten that
queue. But each request can tell how long it has waited (see `queue_wait`), when a thread takes it.

The rule, which is that of `seawall.shedding.codel`:

- A queue that empties now and then is a good one: it absorbs bursts. Every request is served that
  has not waited for longer than its deadline.
- A queue in which every request has waited too long for `patience` seconds is a bad one. From then
  on a request that has waited for longer than `target` (or than a typical request takes, if that
  is longer) is refused at once, which takes a small part of the time of serving it. So the threads
  find those that have not waited for long, whose clients are still there.
- When a queue turns out to be bad, all requests in it have waited too long. So have all requests
  where they come faster than they can be refused. To refuse all would leave the threads idle. So
  while at most three quarters of the threads are busy, a request is served however long it has
  waited. This also serves what is left of a burst.
- A less critical request may wait for less, a more critical one for longer: see `PATIENCE`.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.context import current_criticality
from seawall.errors import Overloaded
from seawall.models.shedding.codel import Codel
from seawall.runtime.layers import Host
from seawall.runtime.policy import GateBound, GatePolicy, Mode
from seawall.runtime.stats import service_time
from seawall.web.lifecycle.server_threads import ServerThreads
from seawall.web.request import Incoming

PATIENCE: Final = (1.0, 2.0, 4.0, 16.0)
"""How long a request may wait in a bad queue, by its criticality, as a multiple of the lowest."""

CRITICAL: Final = PATIENCE[2]
"""The multiple of requests that nobody has ranked, to which `target` applies."""


BUSY: Final = 0.75
"""Share of busy threads up to which no request is refused."""


class QueueAdmission(GatePolicy):
    """Policy that refuses requests which have waited too long for a thread; see the module."""

    kind: ClassVar[str] = "queue_admission"

    def __init__(
        self, *, target: float = 0.1, patience: float = 0.5, mode: Mode = "enforce"
    ) -> None:
        """Refuse requests that have waited for `target`, once the queue has lasted `patience`."""
        super().__init__(mode)
        self.target = check.seconds("target", target)
        self.patience = check.seconds("patience", patience)
        if self.patience <= self.target:
            raise ValueError(f"patience={patience!r}: write more than target={target!r}")

    def __repr__(self) -> str:
        return f"QueueAdmission(target={self.target:g}, patience={self.patience:g})"

    def _bind(self, host: Host) -> QueueAdmissionGate:
        return QueueAdmissionGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        names = ("target", "patience", "mode")
        fresh = self._changed(changes, **{name: getattr(self, name) for name in names})
        for name in names:
            setattr(self, name, getattr(fresh, name))


class QueueAdmissionGate(GateBound):
    """The gate of one edge. It holds nothing."""

    policy: QueueAdmission
    takes_arguments = True

    def __init__(self, policy: QueueAdmission, host: Host) -> None:
        super().__init__(policy, host)
        self.last_wait = 0.0
        """How long the last request has waited."""
        self.threads: ServerThreads | None = None
        """The threads of the server, if they are counted."""
        self._mutex = Lock()
        self._reset()
        survives_fork(self)

    def _reset(self) -> None:
        """Start without a queue, by the settings of the policy."""
        self._settings = target, patience = self.policy.target, self.policy.patience
        self.shortest = target / CRITICAL
        """Requests that have waited for less have found no queue."""
        self.has_queue = False
        """Whether a queue was seen lately: then all requests have to enter."""
        self._queued_at = 0.0
        settings = Codel(self.shortest, patience, 1.0 / CRITICAL)
        self._state = settings.start(service_time(self.host))

    def enter(self, now: float, request: Incoming) -> None:
        """Admit a request, unless it has waited too long in a bad queue.

        The edge asks only while there is a queue: see `has_queue`.
        """
        policy, waited = self.policy, request.waited
        self.last_wait = waited
        with self._mutex:
            if self._settings != (policy.target, policy.patience):
                self._reset()
            state = self._state
            if waited >= self.shortest:
                self.has_queue = True
                self._queued_at = now
            elif now - self._queued_at > policy.patience:
                self._reset()
                return
            patience = PATIENCE[current_criticality()]
            sheds = state.sheds(waited / patience, now, waited)
            if sheds and self._has_idle_threads():
                sheds = False
            if not sheds:
                state.serves(now)
        if sheds:
            error = Overloaded(
                f"guard {self.host.name!r}: the request has waited {waited:.3f} s for a thread",
                retry_after=policy.target,
            )
            error.reason = "shed_by_queue_time"
            try:
                self.refuse(error)
            finally:
                del error

    def _has_idle_threads(self) -> bool:
        """Return whether many threads have nothing to do but to refuse."""
        threads = self.threads
        return threads is not None and threads.busy <= BUSY * threads.max_busy

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return how long the last request has waited, and whether the queue is a bad one."""
        own = {"queue_wait": self.last_wait, "strict": self._state.shedding}
        return {**super().snapshot(now), **own}

    def _after_fork(self) -> None:
        """Start afresh in a child process: it has another queue."""
        self._mutex = Lock()
        self._reset()
