"""One breaker as this pod sees it: a model whose state is decided in the store.

While closed it only counts, and reports its counts to the store periodically; while open it
refuses. Neither needs a round trip. What it does not know (whether a probe may be made), it reports
as unknown. Pending reports are repeated until the store confirms them. While the store is away it
is a plain model of this pod's own calls, or follows `on_store_failure`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall.models.breaker.probes import CallVerdict, Countdown, Probe, Ramp
from seawall.models.breaker.report import BreakerReport, ReportEntry, TimeReport, at_once, reported
from seawall.models.breaker.settings import BreakerSettings
from seawall.models.breaker.state import (
    TRANSITIONS,
    BreakerCause,
    BreakerModel,
    BreakerRefusal,
    BreakerState,
    Ticket,
)
from seawall.models.windows import CallCount, TimeWindow, Window, new_window
from seawall.redis.breaker.wire import (
    BreakerReply,
    BreakerStanding,
    BreakLengths,
    microseconds,
    vote_for,
)

if TYPE_CHECKING:
    from seawall.redis.breaker.share import SharedBreakers

LOST: Final = "lost"
"""The result of a probe that was requested but got no answer."""

MOST_SETTLED: Final = 1000
"""Maximum pending probe results for a store that does not take them; it has moved on by then."""

MOST_LOST: Final = 256
"""With this many pending results, no lost probe is added: the earliest were lost first."""


class ManualCommand(NamedTuple):
    """A manual command; the id identifies it in the store."""

    command: str
    id: str


class SentReports(NamedTuple):
    """What was sent with one message."""

    entries: Sequence[ReportEntry] = ()
    settled: Sequence[str] = ()
    command: ManualCommand | None = None
    vote_due: bool = False


class PendingReports:
    """Probe results, a manual command, a wish to trip, a vote: every report other than counts."""

    def __init__(self) -> None:
        self.command: ManualCommand | None = None
        self.trip = False
        self.vote = False
        self.vote_due = False
        """Whether the vote must be sent, or sent again."""
        self._voted_at = float("-inf")
        self._settled: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._settled or self.command or self.trip or self.vote_due)

    def settle(self, id_: str, verdict: str) -> None:
        """Record how a probe ended; the first result wins."""
        if len(self._settled) < (MOST_LOST if verdict == LOST else MOST_SETTLED):
            self._settled.setdefault(id_, verdict)

    def cast_vote(self, bad: bool, now: float, renew_after: float) -> bool:  # noqa: FBT001 - a vote
        """Vote, withdraw the vote, or renew it after a while; return whether it changed."""
        changed = bad is not self.vote
        self.vote = bad
        if changed or (bad and not 0 <= now - self._voted_at < renew_after):
            self.vote_due = True
        return changed

    def withdraw(self) -> bool:
        """Withdraw wishes to trip; return whether there were any."""
        wanted = self.trip or self.vote
        self.vote_due = self.vote_due or self.vote  # the store may know of it
        self.trip = self.vote = False
        return wanted

    def drop(self) -> None:
        """Forget reports about a state that is over; probe results and commands are kept."""
        self.trip = self.vote = self.vote_due = False

    def pack(
        self, message: dict[str, Any], entries: Sequence[ReportEntry], now: float
    ) -> SentReports:
        """Add all pending reports to a message; call `confirm` or `retry` with the result."""
        message["settled"] = list(self._settled.items())
        message["trip"] = self.trip
        if self.command is not None:
            message["command"], message["order"] = self.command
        vote_due, self.vote_due = self.vote_due, False
        if vote_due:
            message["vote"] = self.vote
            self._voted_at = now
        return SentReports(entries, tuple(self._settled), self.command, vote_due)

    def confirm(self, sent: SentReports) -> bool:
        """Record that the store confirmed; return whether that includes the pending command."""
        for id_ in sent.settled:
            self._settled.pop(id_, None)
        includes_command = sent.command is not None and sent.command == self.command
        if includes_command:
            self.command = None
        return includes_command

    def retry(self, sent: SentReports) -> None:
        """Record that there was no answer: idempotent parts are sent again."""
        self.vote_due = self.vote_due or sent.vote_due


UNCOUNTED: Final = 0
"""Ticket of a call that passed while nothing was counted; no generation has this number."""

FULL_FOR: Final = 0.02
"""Seconds for which it is remembered that all probes are out, unless there is news earlier."""

DESCRIBED: Final = 0.1
"""Minimum seconds between two failures that are described for the other pods."""

_UNKNOWN: Final = BreakerRefusal("unknown", None)
_PROBING: Final = BreakerRefusal("probing", None)
_ISOLATED: Final = BreakerRefusal("isolated", None)


class GrantedProbe(Probe):
    """The ticket of a probe that the store has granted."""

    def __init__(self, id_: str, generation: int, now: float, timeout: float) -> None:
        super().__init__(generation, now, timeout, 0)
        self.id = id_


class BreakerMirror(BreakerModel):
    """A breaker of all pods. Everything is under the owner's lock, except what a model allows."""

    def __init__(
        self,
        share: SharedBreakers,
        settings: BreakerSettings,
        key: Hashable,
        tag: str,
        keys: list[str],
    ) -> None:
        self._share = share
        self.key = key
        self.tag = tag
        self.keys = keys
        self.away: str | None = None
        """What is done instead, while the store is away."""
        self.polled_at = float("-inf")
        self.used = False
        """Whether a call has ended since then."""
        self.suspect = False
        """Whether the store answers, but not for this breaker."""
        self._known = False
        self._lineage = ""
        self._epoch = 0
        self._pending = PendingReports()
        self._granted: dict[GrantedProbe, None] = {}  # running probes of this pod
        self._totals = (0, 0, 0)
        self._full_until = float("-inf")
        self._breaks = BreakLengths()
        self._ahead = False  # whether this pod has opened and the store has not confirmed it yet
        self._latest = ""  # failure of this pod, in case it opens the breaker
        self._latest_at = float("-inf")
        super().__init__(settings)

    def __repr__(self) -> str:
        where = self.away or ("shared" if self._known else "not known yet")
        return f"<BreakerMirror {self.state.value}, epoch {self._epoch}: {where}>"

    def admit(self, now: float) -> Ticket | BreakerRefusal:
        """Admit a call, refuse it, or report that the store has to be asked."""
        if self.state is BreakerState.ISOLATED:
            return _ISOLATED
        if self.away is not None:
            return self._admit_alone(now)
        if self.state is BreakerState.OPEN:
            left = self._break.left(now)
            if left > 0:
                return BreakerRefusal("open", left)
        elif self.state is BreakerState.CLOSED and (
            self._known or self._pending.command is not None
        ):
            return super().admit(now)
        return _PROBING if now < self._full_until else _UNKNOWN

    def _admit_alone(self, now: float) -> Ticket | BreakerRefusal:
        if self.away != "local":
            return UNCOUNTED if self.away == "open" else BreakerRefusal("store", None)
        if self.state is BreakerState.HALF_OPEN:
            # Probes that the store granted are this pod's trial too, until they end or hang.
            self._granted = {probe: None for probe in self._granted if probe.hung.left(now) > 0}
            if self._granted:
                return _PROBING
        return super().admit(now)

    def settle(
        self, ticket: Ticket, verdict: CallVerdict, now: float, count: CallCount | None = None
    ) -> None:
        """Record how an admitted call ended; report a probe's end to the store immediately."""
        self.used = True
        if isinstance(ticket, GrantedProbe):
            self._granted.pop(ticket, None)
            self.give_back(ticket.id, verdict)
        else:
            super().settle(ticket, verdict, now, count)

    def give_back(self, id_: str, verdict: CallVerdict = CallVerdict.NONE) -> None:
        """Report a probe's end to the store until it has confirmed; repeats count once."""
        self._pending.settle(id_, verdict.value)
        self._share.soon()

    def report_lost(self, id_: str) -> None:
        """Report to the store that a probe it may have granted will not be made."""
        self._pending.settle(id_, LOST)

    def wants_failure(self, now: float, /) -> bool:
        """Return whether to record a failure now: the store decides which one opens it."""
        return not 0 <= now - self._latest_at < DESCRIBED

    def note_failure(self, failure: str, now: float, /) -> None:
        """Record a failure as text, for the other pods too."""
        self._latest, self._latest_at = failure, now
        super().note_failure(failure, now)

    def trip(self, now: float) -> None:
        """Open, here immediately and in all pods soon."""
        if self.away is not None:
            super().trip(now)
        elif (self.state, BreakerCause.TRIP) in TRANSITIONS:
            self._pending.drop()
            self._open_here(BreakerCause.TRIP, now)
        self._send_command("trip")

    def isolate(self, now: float) -> None:
        """Refuse every call, here immediately and in all pods soon, until `close`."""
        super().isolate(now)
        self._send_command("isolate")

    def close(self, now: float) -> None:
        """Admit calls again, here immediately and in all pods soon; forget the history."""
        super().close(now)
        self._send_command("close")

    def snapshot(self, now: float) -> dict[str, str | float | None]:
        """Return the state: calls of this pod, and of all pods as last reported."""
        calls, failures, slow = self._totals
        return {
            **super().snapshot(now),
            "store_mode": self.away or "shared",
            "shared_calls": calls,
            "shared_failures": failures,
            "shared_slow": slow,
        }

    # With the store

    @property
    def dirty(self) -> bool:
        """Whether an exchange with the store is due."""
        return bool(
            self._pending
            or self.away
            or not self._known
            or (isinstance(self._window, BreakerReport) and self._window.fresh and self._counts)
        )

    def notice(self, now: float) -> None:
        """Detect what time alone has changed: slow calls, and a window that has recovered."""
        self._notice_slow(now)
        if self._pending.vote:
            self._vote(now, renew=False)

    def question(self, now: float) -> dict[str, Any]:
        """Return what the store must know of this breaker to answer a question."""
        left = self.retry_after(now)
        return {
            "tag": self.tag,
            "lineage": self._lineage,
            "epoch": self._epoch,
            "state": self.state.value,
            "left": microseconds(left) if left else 0,
            "opens": self._opens,
            "age": microseconds(self.open_for(now) or 0.0),
            "failure": self._latest or self.failure,
            "breaks": self._breaks.after(self.settings, self._opens - self._ahead),
            "settled": [],
            "report": [],
            "asked": [],
        }

    def outgoing(self, now: float) -> tuple[dict[str, Any], SentReports]:
        """Return everything to report. Counts are sent once: better lost than doubled."""
        entries: list[ReportEntry] = []
        if isinstance(self._window, BreakerReport):
            if self._counts:
                entries = self._window.take()
            else:
                self._window.drop()
        message = self.question(now)
        message["report"] = [entry.as_row() for entry in entries]
        sent = self._pending.pack(message, entries, now)
        if self.away == "local" and self.state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            self._bring_evidence(message, now)
        return message, sent

    def incoming(self, reply: BreakerReply, sent: SentReports, now: float) -> None:
        """Process the answer to `outgoing`."""
        for entry, place in zip(sent.entries, reply.places, strict=False):
            if place is not None:
                entry.counted(place)
        self.suspect = False
        self._totals = reply.totals
        self.adopt(reply.standing, now, own_command=self._pending.confirm(sent))

    def not_answered(self, sent: SentReports) -> None:
        """Record that `outgoing` had no answer: idempotent parts are sent again soon."""
        self._pending.retry(sent)
        if not self.suspect:
            self.polled_at = float("-inf")

    def adopt(self, standing: BreakerStanding, now: float, *, own_command: bool = False) -> None:
        """Adopt the store's state of the breaker, unless that is outdated.

        With `own_command`, the store has just carried out a command of this pod.
        """
        if self._pending.command is not None:
            return  # the pending manual command is newer than this
        same = standing.lineage == self._lineage
        if same and standing.epoch < self._epoch:
            return
        if same and standing.epoch == self._epoch and self._pending.trip:
            return  # sent before the store knew that this pod has opened
        self._pending.trip = self._ahead = False
        self._full_until = float("-inf")
        moved = standing.state is not self.state
        missed = same and standing.epoch > self._epoch and not own_command
        # Probes that this pod allowed itself meanwhile mean nothing to the others.
        missed = missed or (self.away == "local" and self.state is BreakerState.HALF_OPEN)
        self._lineage, self._epoch = standing.lineage, standing.epoch
        came_back, self.away = self.away is not None or not self._known, None
        self._known = True
        self._opens = standing.opens
        if moved or missed:
            self._follow(standing, now)
        elif came_back:
            self._count_in(self._window)
        if standing.state is BreakerState.OPEN and (
            moved or missed or not same or not self._break.left(now)
        ):
            # Counted here: a clock that jumps does not end it.
            self._break = Countdown(standing.left, now)
        if standing.state is BreakerState.CLOSED:
            self._opened_at, self.failure = None, ""
        else:
            self._opened_at, self.failure = now - standing.age, standing.failure

    def receive_push(self, standing: BreakerStanding, now: float) -> bool:
        """Adopt a pushed state; return False if the store should be asked instead."""
        if not self._known or self.away is not None or standing.lineage != self._lineage:
            return False
        self.adopt(standing, now)
        return True

    def answer(
        self, standing: BreakerStanding, granted: str, now: float
    ) -> Ticket | BreakerRefusal:
        """Return the store's answer to a call, after `adopt`."""
        if granted:
            present = (standing.lineage, standing.epoch) == (self._lineage, self._epoch)
            generation = self.generation if present else UNCOUNTED
            probe = GrantedProbe(granted, generation, now, self.settings.probe_timeout)
            self._granted[probe] = None
            return probe
        if self._pending.command is not None:
            return self.admit(now)
        if standing.state is BreakerState.OPEN:
            return BreakerRefusal("open", standing.left)
        if standing.state is BreakerState.HALF_OPEN:
            if not isinstance(self.settings.probes, Ramp):  # a ramp counts refused calls
                self._full_until = now + self._share.full_for
            return _PROBING
        if standing.state is BreakerState.ISOLATED:
            return _ISOLATED
        return self.admit(now)

    def follow_on(self, now: float) -> BreakerRefusal | None:
        """Refuse the call and keep following the store, though one answer did not come; or None.

        Alone, a breaker that is not closed would admit calls which the other pods do not expect:
        that has to wait until the store is known to be away.
        """
        broken = self.state in (BreakerState.OPEN, BreakerState.HALF_OPEN)
        if self._share.on_store_failure != "local" or self.away is not None or not broken:
            return None
        self._full_until = now + self._share.full_for
        return _PROBING

    def leave_store(self, now: float) -> None:
        """Continue without the store, from the current state."""
        self.away = self._share.on_store_failure
        if isinstance(self._window, BreakerReport):
            self._window.drop()
            self._window.mark(now)
        if self.away == "local" and self.state is BreakerState.HALF_OPEN:
            self._trial = self._new_trial(self.generation, now)
        self._count_in(self._window)
        self._pending.trip = self._ahead = False  # this pod is now open on its own

    def after_fork(self) -> None:
        """Become another pod: pending reports and running calls belong to the parent."""
        if isinstance(self._window, BreakerReport):
            self._window.drop()
        self._pending = PendingReports()
        self._running.clear()
        self._granted.clear()
        self.generation += 1
        self.suspect = self._known = False
        self.away = None
        self._count_in(self._window)

    @property
    def _counts(self) -> bool:
        return self.state is BreakerState.CLOSED and self.away is None

    def _follow(self, standing: BreakerStanding, now: float) -> None:
        self._pending.drop()
        self._enter(standing.state, standing.cause, now, standing.opens, self._break)

    def _send_command(self, command: str) -> None:
        if self._pending.withdraw():  # about to be opened by what was counted before
            self._count_afresh()
        self._pending.command = ManualCommand(command, self._share.new_id())
        self._share.soon()

    def _judge(self, now: float) -> None:
        """Alone, trip; otherwise report to the store, the sooner the worse it looks."""
        pending, consecutive = self._pending, self.settings.consecutive
        if self.away is not None:
            if self.away == "local":
                super()._judge(now)
        elif self._share.quorum is not None:
            self._vote(now, renew=True)
        elif consecutive is not None and self._streak >= consecutive:
            # Open here immediately: many calls would get through before the store answers.
            self._open_here(BreakerCause.TRIPPED, now)
            pending.trip = True
            self._share.soon()
        elif isinstance(self._window, BreakerReport) and self._window.bad >= self._urgent:
            self._share.flush_soon(now)

    def _open_here(self, cause: BreakerCause, now: float) -> None:
        """Open in this pod; the store counts the opens, and decides how long the break is."""
        self._open(cause, now)
        self._ahead = True

    def _vote(self, now: float, *, renew: bool) -> None:
        """Vote by what this pod has seen; renew the vote every third of its lifetime."""
        renew_after = vote_for(self.settings) / 3 if renew else float("inf")
        if self._pending.cast_vote(self._is_bad(now), now, renew_after):
            self._share.soon()

    def _move(self, cause: BreakerCause, now: float) -> None:
        super()._move(cause, now)
        self._pending.drop()

    def _bring_evidence(self, message: dict[str, Any], now: float) -> None:
        """Report once why this pod opened while it was alone, like all counts."""
        if isinstance(self._window, BreakerReport):
            seen = self._window.since_mark(now)
            message["report"] = [at_once(seen)] if any(seen) else []
            self._window.mark(now)
        consecutive = self.settings.consecutive
        message["trip"] = consecutive is not None and self._streak >= consecutive
        if self._share.quorum is not None:
            message["vote"] = True

    def _new_window(self) -> Any:
        window = new_window(self.settings.window, self.settings.window_calls)
        if self._share.quorum is not None:
            return window  # judged here: no other pod needs the numbers
        return reported(window) or window

    def _count_in(self, window: Window) -> None:
        s = self.settings
        least = min(s.failure_ratio or 1.0, s.slow_ratio or 1.0) * (s.min_calls or 1)
        self._urgent = max(1, ceil(least / 4))
        super()._count_in(window)

    def _counter_of(self, window: Window) -> TimeWindow:
        return window.window if isinstance(window, TimeReport) else super()._counter_of(window)

    def _is_simple(self) -> bool:
        known = self._known if self.away is None else self.away == "local"
        return known and super()._is_simple()
