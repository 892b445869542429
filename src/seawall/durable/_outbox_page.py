"""The outcome of a dispatcher's round: stored and reported once.

Promises:

- A blocked aggregate or a dead event is reported once, by the dispatcher that caused it.
- It is reported after the commit, even if the database's answer to the commit was lost.
- A dispatcher that was taken over reports nothing: its writes are refused.
"""

from __future__ import annotations

from functools import partial

from seawall._failures import split_report
from seawall.durable._outbox_events import error_text
from seawall.durable._outbox_steps import Settled, settling, written_before
from seawall.durable.outbox import Outbox
from seawall.events import EventDied, OutboxBlocked
from seawall.events.bus import emit
from seawall.events.log import FailureLog
from seawall.runtime.stepping import Steps


class Page:
    """The outcome of one round, to be stored."""

    def __init__(self, outbox: Outbox, owner: str, settled: list[Settled], *, keep: bool) -> None:
        """Write as `owner`; with `keep`, delivered events are kept for a while."""
        self._outbox = outbox
        self._owner = owner
        self._settled = settled
        self._keep = keep
        self._unsure = False
        self._ours: set[int] = set()

    async def write(self, *, held: bool) -> int:
        """Write the outcome; may be repeated after a failure. Return how many were refused.

        Refused are aggregates that were taken over. `held` says whether the leases are certainly
        valid: then no other dispatcher can have written anything.
        """
        unsure, self._unsure = self._unsure, True
        steps = partial(self._writing, unsure=unsure, held=held)
        late, self._ours = await self._outbox.database.arun(steps)
        return late

    def _writing(self, *, unsure: bool, held: bool) -> Steps[tuple[int, set[int]]]:
        dialect, outbox = self._outbox.database.dialect, self._outbox.name
        written = yield from settling(dialect, outbox, self._owner, self._settled, keep=self._keep)
        ours = written.troubled
        if not unsure:
            return written.late, ours
        # An earlier attempt may have been committed although its answer was lost.
        missing = [one for one in self._settled if one.lane.lane not in ours]
        before = yield from written_before(outbox, missing, held=held)
        return written.late - len(before), ours | before

    def tell(self, failures: FailureLog) -> None:
        """Report the stored failures to subscribers and to the log."""
        for one in self._settled:
            if one.has_failed and one.lane.lane in self._ours:
                self._tell_failure(one, failures)

    def _tell_failure(self, one: Settled, failures: FailureLog) -> None:
        event = one.lane.events[one.delivered]
        whose = {"aggregate": event.aggregate, "aggregate_id": event.aggregate_id}
        what = f"event {event.id} of {event.aggregate!r} {event.aggregate_id!r}"
        delay, dead = one.delay / 1e6, one.action != "again"
        failures.failed(what, event.id, one.attempts, one.error, delay=delay, dead=dead)
        if dead:
            kind = OutboxBlocked if one.action == "block" else EventDied
            cause, trace = split_report(error_text(one.error))
            said = {"attempts": one.attempts, "cause": cause, "traceback": trace}
            emit(kind, self._outbox.name, event_id=event.id, **whose, **said)
