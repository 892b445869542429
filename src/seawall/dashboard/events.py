"""Events of this process for the page: rare events as sentences, grouped by their subject.

Only events that are rare by nature are subscribed to (a breaker that opens, a store that is lost):
an event of each call would slow calls down. Users' data in an event (payloads, ids, the text of
errors) is not shown.

Promises:
- Memory is bounded.
- The thread of an event only records it.
- A listener that is never closed leaves no subscription behind.
- A flapping breaker is one entry with counts, for up to `LONGEST` seconds. `summary` merges the
  entries of all pods.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol
from weakref import finalize, ref

from seawall import events
from seawall.dashboard import wording as say
from seawall.dashboard.bounds import (
    LONGEST_KEY,
    LONGEST_NAME,
    LONGEST_TEXT,
    LONGEST_WORD,
    MOST_HAPPENINGS,
    MOST_VERBS,
    shown,
)
from seawall.dashboard.views import PodEvent, Tone
from seawall.events import Event, subscribe

MOST_BEGINNINGS: Final = 1000
"""Maximum number of problems whose start is remembered."""

DIFFER_FOR: Final = 600.0
"""Seconds for which disagreeing pods are a problem: they report it when they notice it."""

TOGETHER: Final = 120.0
"""Maximum number of seconds between two events of one subject in one entry."""

LONGEST: Final = 600.0
"""Seconds after which a continuing entry is followed by a new one."""

_SHARED: Final = "shared"


class RecordedEvent(NamedTuple):
    """An event, its time, and the trace in which it happened ("" if there is none)."""

    at: float
    event: Event
    trace: str


class EventHistory:
    """The latest entries. `take_in` and `latest` are not safe for concurrent use."""

    def __init__(self, wall: Callable[[], float]) -> None:
        """Start listening; `wall` returns unix seconds."""
        self._wall = wall
        self._heard: deque[RecordedEvent] = deque(maxlen=MOST_HAPPENINGS)
        self._known: dict[tuple[str, str], PodEvent] = {}
        """The latest entry of each subject, in order of their start."""
        self._past: deque[PodEvent] = deque(maxlen=MOST_HAPPENINGS)
        self.began: dict[str, float] = {}
        """Start times of lasting states, by name: "breaker:vendor"."""
        self.traces: dict[str, str] = {}
        """The traces in which they started, by the same key, if there was one."""
        self.differing: dict[tuple[str, str], float] = {}
        """By guard and policy, when pods were reported to disagree on its settings."""
        self.touched: set[str] = set()
        """The guards with events between the last two calls of `take_in`."""
        self.changes = 0
        """Number of observed changes of settings."""
        self._end = listen(self, *_SENTENCES)

    def close(self) -> None:
        """Stop listening."""
        self._end()

    def forget(self) -> None:
        """Forget everything so far: in a child process, it happened to the parent."""
        self._heard = deque(maxlen=MOST_HAPPENINGS)
        self._past = deque(maxlen=MOST_HAPPENINGS)
        self._known, self.began, self.traces, self.differing = {}, {}, {}, {}

    def hear(self, event: Event) -> None:
        """Record an event, from any thread: it may hold any lock, so this must not block."""
        self._heard.append(RecordedEvent(self._wall(), event, _current_trace()))

    def note(self, where: str, tone: Tone, what: str) -> None:
        """Add an entry for which there is no event."""
        self._add(self._wall(), where, tone, what, (what, ""), "")

    def take_in(self) -> None:
        """Turn the events recorded since the last call into entries."""
        self.touched = set()
        while self._heard:
            at, event, trace = self._heard.popleft()
            say_it = _SENTENCES.get(type(event))
            if say_it is None:
                continue
            where = event.guard
            self.touched.add(where)
            try:
                tone, what = say_it(event)
                subject = _SUBJECTS.get(type(event))
                did = (what, "") if subject is None else subject(event)
                if isinstance(event, events.StoreModeChanged):
                    where = event.store  # a lost store is one entry, whatever shares it
            except Exception:  # noqa: BLE001 - an event may hold a key whose repr raises
                tone, what = "warn", f"{say.plainly(event.name)}, which cannot be shown"
                did = what, ""
            self._add(at, where, tone, what, did, trace)
            self._remember(at, event, trace)
        wall = self._wall()
        for key in [key for key, at in self.differing.items() if wall - at > DIFFER_FOR]:
            del self.differing[key]

    def _add(
        self, at: float, where: str, tone: Tone, what: str, did: tuple[str, str], trace: str
    ) -> None:
        where, what = shown(where, LONGEST_NAME), shown(what, LONGEST_TEXT - 40)
        about, verb = shown(did[0], LONGEST_TEXT - 40), shown(did[1], LONGEST_WORD)
        known = self._known.get((where, about))
        if known is None or at - known["at"] > TOGETHER or at - known["began"] > LONGEST:
            known = PodEvent(
                at=at, began=at, tone=tone, where=where, what=what, about=about, counts={}
            )
            if len(self._past) == MOST_HAPPENINGS:
                oldest = self._past.popleft()
                if self._known.get(subject := (oldest["where"], oldest["about"])) is oldest:
                    del self._known[subject]
            self._past.append(known)
            self._known[where, about] = known
        _count(known["counts"], verb)
        known["at"], known["tone"], known["what"] = max(at, known["at"]), tone, what
        if trace:
            known["trace"] = trace

    def _remember(self, at: float, event: Event, trace: str) -> None:
        if isinstance(event, events.SettingsDiffer) and len(self.differing) < MOST_BEGINNINGS:
            self.differing[event.guard, event.policy] = at
        elif isinstance(event, events.SettingsChanged):
            self.changes += 1
            self.differing.pop((event.guard, event.policy), None)
        for what, lasts in _LASTING.get(type(event), _no_time)(event):
            if not lasts:
                self.began.pop(what, None)
                self.traces.pop(what, None)
            elif what not in self.began and len(self.began) < MOST_BEGINNINGS:
                self.began[what] = at
                if trace:
                    self.traces[what] = trace

    def latest(self) -> list[PodEvent]:
        """Return the entries, the latest last."""
        copies = [PodEvent(**{**one, "counts": dict(one["counts"])}) for one in self._past]
        return sorted(copies, key=lambda one: one["at"])


def _count(counts: dict[str, int], verb: str) -> None:
    """Count what a subject did; its last verb comes last.

    A subject with states cannot do the same twice in a row, so repeats are one event: several
    policies lose one store, several keys have one limit.
    """
    if verb and next(reversed(counts), None) == verb:
        return
    if verb in counts or len(counts) < MOST_VERBS:
        counts[verb] = counts.pop(verb, 0) + 1


def _current_trace() -> str:
    """Return the id of this thread's current OpenTelemetry trace; "" if there is none."""
    tracing: Any = sys.modules.get("opentelemetry.trace")
    if tracing is None:
        return ""
    try:
        span = tracing.get_current_span().get_span_context()
        known = f"{span.trace_id:032x}" if span.is_valid else ""
    except Exception:  # noqa: BLE001 - a user's own tracer may raise anything
        return ""
    return known


class Hears(Protocol):
    """A listener: it is called in any thread, which may hold any lock."""

    def hear(self, event: Event, /) -> None:
        """Handle one event."""


def listen(hears: Hears, *types: type[Event]) -> finalize[..., Any]:
    """Pass these events to `hears` without keeping it alive; return a function that ends it."""
    me = ref(hears)

    def heard(event: Event) -> None:
        alive = me()
        if alive is not None:
            alive.hear(event)

    end = finalize(hears, subscribe(heard, *types))
    end.atexit = False
    return end


# Lasting states, with their start and end


def _no_time(_event: Any) -> tuple[tuple[str, bool], ...]:
    return ()


_LASTING: Final[dict[type[Event], Callable[[Any], tuple[tuple[str, bool], ...]]]] = {
    events.BreakerChanged: lambda event: ((f"breaker:{event.guard}", event.after != "closed"),),
    events.StoreModeChanged: lambda event: (
        (f"store_mode:{event.guard}:{event.policy}", event.after != _SHARED),
        (f"store:{event.store}", event.after != _SHARED),
    ),
    events.LevelChanged: lambda event: ((f"service_levels:{event.guard}", event.after != "full"),),
    events.LoopBlocked: lambda event: ((f"watchdog:{event.guard}", not event.over),),
    events.LifecycleChanged: lambda event: (
        (f"lifecycle:{event.guard}", event.after == "draining"),
    ),
    events.HealthChanged: lambda event: (
        (f"health:{event.guard}", event.after in {"degraded", "unhealthy"}),
    ),
    events.HostEjected: lambda event: ((f"upstreams:{event.guard}", True),),
    events.HostRestored: lambda event: ((f"upstreams:{event.guard}", False),),
}


# Sentences

Sentence = tuple[Tone, str]


def _word(value: object) -> str:
    return say.plainly(shown(value, LONGEST_WORD))


def _breaker(event: events.BreakerChanged) -> Sentence:
    tones: dict[str, Tone] = {"open": "bad", "isolated": "bad", "half_open": "warn"}
    key = "" if event.key is None else f" for {shown(event.key, LONGEST_KEY)}"
    what = f"the breaker{key} is {_word(event.after)}, it was {_word(event.before)}"
    return tones.get(event.after, "ok"), f"{what} ({_word(event.cause)})"


def _store_mode(event: events.StoreModeChanged) -> Sentence:
    if event.after == _SHARED:
        return "ok", "the store is back: what shares it decides together again"
    return "bad", "the store was lost: what shares it decides without it"


def _settings(event: events.SettingsChanged) -> Sentence:
    changes = [
        f"{_word(name)} {say.amount(value)}"
        if type(value) in {int, float}
        else f"{_word(name)} {shown(value, LONGEST_KEY)}"
        if name in {"limits", "mode", "level"} and isinstance(value, str)
        else _word(name)
        for name, value in event.changes.items()
    ]
    return "ok", f"settings of the {_word(event.policy)} were changed: {', '.join(changes)}"


def _differ(event: events.SettingsDiffer) -> Sentence:
    return "warn", f"pods do not agree on the settings of the {_word(event.policy)}"


def _implausible(event: events.ImplausibleReport) -> Sentence:
    limit, reported = shown(event.limit, LONGEST_KEY), say.amount(event.reported)
    what = f"the limit {limit} was given a {_word(event.what)} of {reported}"
    return "warn", f"{what}, which cannot be true; {say.amount(event.counted)} counts"


def _level(event: events.LevelChanged) -> Sentence:
    tone: Tone = "ok" if event.after == "full" else "warn"
    return tone, f"the level of service is {_word(event.after)}, it was {_word(event.before)}"


def _loop(event: events.LoopBlocked) -> Sentence:
    if event.over:
        return "ok", f"the event loop comes round again, after {say.seconds(event.seconds)}"
    return "bad", f"the event loop has been blocked for {say.seconds(event.seconds)}"


def _lease(event: events.LeaseChanged) -> Sentence:
    if event.held:
        return "ok", f"the lease is held here, with token {event.token}"
    return "warn", f"the lease is not held here any more ({_word(event.cause)})"


def _health(event: events.HealthChanged) -> Sentence:
    tones: dict[str, Tone] = {"healthy": "ok", "unhealthy": "bad"}
    what = f"the check {shown(event.check, LONGEST_KEY)} is {_word(event.after)}"
    return tones.get(event.after, "warn"), f"{what}, it was {_word(event.before)}"


def _lifecycle(event: events.LifecycleChanged) -> Sentence:
    tone: Tone = "ok" if event.after == "ready" else "warn"
    return tone, f"the service is {_word(event.after)}, {event.in_flight} requests in flight"


def _ejected(event: events.HostEjected) -> Sentence:
    until = f"for {say.seconds(event.seconds)}" if event.seconds else f"while {event.cause}"
    return "warn", f"{say.address(event.host)} gets no requests {until}"


def _gap(event: events.FifoGap) -> Sentence:
    goes_on = "" if event.skipped_to is None else f"; it goes on with {event.skipped_to}"
    return "warn", f"a message is missing for {say.seconds(event.age)}{goes_on}"


def _member(event: events.MemberChanged) -> Sentence:
    if event.after == "suspected":
        return "warn", f"{event.member} is suspected: {event.reason}"
    if event.after == "confirmed":
        return "bad", f"{event.member} is confirmed as failed: {event.reason}"
    if event.after == "alive":
        was = {"suspected": "is cleared of suspicion", "unknown": "is alive"}
        return "ok", f"{event.member} {was.get(event.before, 'is back')}"
    return "ok", f"{event.member} is {event.after}"


def _member_verb(event: events.MemberChanged) -> str:
    if event.after == "alive":
        return {"suspected": "was cleared", "unknown": "joined"}.get(event.before, "came back")
    verbs = {"suspected": "was suspected", "confirmed": "was confirmed as failed", "left": "left"}
    return verbs.get(event.after, f"became {_word(event.after)}")


def _source(event: events.SourceChanged) -> Sentence:
    name = shown(event.source, LONGEST_KEY)
    if event.after == "ok":
        return "ok", f"source {name} is back after {say.seconds(event.duration)}"
    if event.after == "missing":
        return "warn", f"source {name} is missing"
    return "bad", f"source {name} cannot be read"


def _ended(event: events.PipelineEnded) -> Sentence:
    words = {"over": "its sources are over", "stopped": "it was stopped", "failed": "it failed"}
    tone: Tone = "bad" if event.result == "failed" else "ok"
    returned = f", {event.returned} returned" if event.returned else ""
    what = f"the pipeline ended: {words.get(event.result, _word(event.result))}"
    return tone, f"{what}; {event.read} read, {event.stored} stored{returned}"


_BREAKER_VERBS: Final = {
    "open": "opened",
    "half_open": "tried again",
    "closed": "closed",
    "isolated": "was isolated",
}

_SUBJECTS: Final[dict[type[Event], Callable[[Any], tuple[str, str]]]] = {
    events.BreakerChanged: lambda event: (
        "the breaker" if event.key is None else f"the breaker for {shown(event.key, LONGEST_KEY)}",
        _BREAKER_VERBS.get(event.after, _word(event.after)),
    ),
    events.StoreModeChanged: lambda event: (
        "the store",
        "came back" if event.after == _SHARED else "was lost",
    ),
    events.LevelChanged: lambda event: (
        "the level of service",
        f"went to {_word(event.after)}",
    ),
    events.LoopBlocked: lambda event: (
        "the event loop",
        "came round again" if event.over else "was blocked",
    ),
    events.LeaseChanged: lambda event: ("the lease", "was won" if event.held else "was lost"),
    events.HealthChanged: lambda event: (
        f"the check {shown(event.check, LONGEST_KEY)}",
        f"became {_word(event.after)}",
    ),
    events.LifecycleChanged: lambda event: ("the service", f"became {_word(event.after)}"),
    events.OverloadChanged: lambda event: (
        "the edge",
        "became overloaded" if event.overloaded else "recovered from overload",
    ),
    events.HostEjected: lambda event: (say.address(event.host), "was ejected"),
    events.HostRestored: lambda event: (say.address(event.host), "came back"),
    events.MemberChanged: lambda event: (shown(event.member, LONGEST_KEY), _member_verb(event)),
    events.SourceChanged: lambda event: (
        f"source {shown(event.source, LONGEST_KEY)}",
        {"ok": "came back", "missing": "went missing"}.get(event.after, "failed"),
    ),
    events.StageChanged: lambda event: (
        f"stage {shown(event.stage, LONGEST_KEY)}",
        "flowed again" if event.after == "flows" else "was blocked",
    ),
    events.CollectionChanged: lambda event: (
        "the collection",
        "had enough again" if event.after == "enough" else "had too few values",
    ),
}
"""Subjects that have states, and what they did. Other events are grouped by their sentence."""

_SENTENCES: Final[dict[type[Event], Callable[[Any], Sentence]]] = {
    events.BreakerChanged: _breaker,
    events.StoreModeChanged: _store_mode,
    events.SettingsChanged: _settings,
    events.SettingsDiffer: _differ,
    events.ImplausibleReport: _implausible,
    events.LevelChanged: _level,
    events.LoopBlocked: _loop,
    events.LeaseChanged: _lease,
    events.ResourceLeaked: lambda event: (
        "warn",
        f"a resource has been out for {say.seconds(event.seconds)}: {event.borrowed_at}",
    ),
    events.WorkerReplaced: lambda event: (
        "warn",
        f"a worker process died (exit code {event.exit_code}) and was replaced",
    ),
    events.JobDied: lambda event: (
        "bad",
        f"a job was given up after {say.several(event.attempts, 'attempt')}",
    ),
    events.DeadLetterDropped: lambda _event: (
        "bad",
        "a dead letter was dropped: there are too many",
    ),
    events.HealthChanged: _health,
    events.LifecycleChanged: _lifecycle,
    events.OverloadChanged: lambda event: (
        ("warn", "the event loop is overloaded: requests are shed")
        if event.overloaded
        else ("ok", "the event loop is not overloaded any more")
    ),
    events.HostEjected: _ejected,
    events.HostRestored: lambda event: ("ok", f"{say.address(event.host)} gets requests again"),
    events.OutboxBlocked: lambda event: (
        "bad",
        f"events of an aggregate wait: one failed {say.several(event.attempts, 'time')}",
    ),
    events.EventDied: lambda event: (
        "bad",
        f"an event was put aside after {say.several(event.attempts, 'attempt')}",
    ),
    events.FifoGap: _gap,
    events.MemberChanged: _member,
    events.ItemDied: lambda event: (
        "bad",
        f"an item became a dead letter of stage {shown(event.stage, LONGEST_KEY)}",
    ),
    events.SourceChanged: _source,
    events.StageChanged: lambda event: (
        ("ok", f"stage {shown(event.stage, LONGEST_KEY)} flows again")
        if event.after == "flows"
        else (
            "bad",
            f"stage {shown(event.stage, LONGEST_KEY)} is blocked: a dead letter cannot be stored",
        )
    ),
    events.CollectionChanged: lambda event: (
        ("ok", "enough sources have a value again")
        if event.after == "enough"
        else ("bad", f"{event.values} sources have a value, {event.minimum} are needed")
    ),
    events.PipelineEnded: _ended,
    events.OwnPause: lambda event: (
        "warn",
        f"this process was stopped for {say.seconds(event.seconds)}, and accuses nobody",
    ),
}
"""The subscribed events, and how each becomes a sentence."""
