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
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple
from weakref import WeakMethod, finalize

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
    """The latest entries. `process_recorded` and `latest` are not safe for concurrent use."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._recorded: deque[RecordedEvent] = deque(maxlen=MOST_HAPPENINGS)
        self._known: dict[tuple[str, str], PodEvent] = {}
        """The latest entry of each subject, in order of their start."""
        self._past: deque[PodEvent] = deque(maxlen=MOST_HAPPENINGS)
        self.began: dict[str, float] = {}
        """Start times of lasting states, by name: "breaker:vendor"."""
        self.traces: dict[str, str] = {}
        """The traces in which they started, by the same key, if there was one."""
        self.differing: dict[tuple[str, str], float] = {}
        """By guard and policy, when pods were reported to disagree on its settings."""
        self.changed_guards: set[str] = set()
        """The guards with events between the last two calls of `process_recorded`."""
        self._end = subscribe_weakly(self, self._record, *_SENTENCES)

    def close(self) -> None:
        """Stop listening."""
        self._end()

    def forget(self) -> None:
        """Forget everything so far: in a child process, it happened to the parent."""
        self._recorded = deque(maxlen=MOST_HAPPENINGS)
        self._past = deque(maxlen=MOST_HAPPENINGS)
        self._known, self.began, self.traces, self.differing = {}, {}, {}, {}

    def _record(self, event: Event) -> None:
        """Record an event, from any thread: it may hold any lock, so this must not block."""
        self._recorded.append(RecordedEvent(self._wall(), event, _current_trace()))

    def note(self, where: str, tone: Tone, what: str) -> None:
        """Add an entry for which there is no event."""
        self._add(self._wall(), where, Sentence(tone, what), "")

    def process_recorded(self) -> None:
        """Turn the events recorded since the last call into entries."""
        self.changed_guards = set()
        while self._recorded:
            at, event, trace = self._recorded.popleft()
            say_it = _SENTENCES.get(type(event))
            if say_it is None:
                continue
            where = event.guard
            self.changed_guards.add(where)
            try:
                said = say_it(event)
                if isinstance(event, events.StoreModeChanged):
                    where = event.store  # a lost store is one entry, whatever shares it
            except Exception:  # noqa: BLE001 - an event may hold a key whose repr raises
                said = Sentence("warn", f"{say.plainly(event.name)}, which cannot be shown")
            self._add(at, where, said, trace)
            self._remember(at, event, trace)
        wall = self._wall()
        for key in [key for key, at in self.differing.items() if wall - at > DIFFER_FOR]:
            del self.differing[key]

    def _add(self, at: float, where: str, said: Sentence, trace: str) -> None:
        tone, where, what = (
            said.tone,
            shown(where, LONGEST_NAME),
            shown(said.what, LONGEST_TEXT - 40),
        )
        about = shown(said.about or said.what, LONGEST_TEXT - 40)
        verb = shown(said.verb, LONGEST_WORD)
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
            self.differing.pop((event.guard, event.policy), None)
        for what, lasts in _lasting(event):
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


def subscribe_weakly(
    owner: object, listener: Callable[[Any], object], *types: type[Event]
) -> finalize[..., Any]:
    """Pass these events to a method of `owner` without keeping that alive; return what ends it.

    The method is called in any thread, which may hold any lock.
    """
    method = WeakMethod(listener)

    def call(event: Event) -> None:
        listener = method()
        if listener is not None:
            listener(event)

    end = finalize(owner, subscribe(call, *types))
    end.atexit = False
    return end


_LASTING: Final[dict[type[Event], tuple[str, Callable[[Any], bool]]]] = {
    events.BreakerChanged: ("breaker", lambda event: event.after != "closed"),
    events.LevelChanged: ("service_levels", lambda event: event.after != "full"),
    events.LoopBlocked: ("watchdog", lambda event: not event.over),
    events.LifecycleChanged: ("lifecycle", lambda event: event.after == "draining"),
    events.HealthChanged: ("health", lambda event: event.after in {"degraded", "unhealthy"}),
    events.HostEjected: ("upstreams", lambda _event: True),
    events.HostRestored: ("upstreams", lambda _event: False),
}
"""Events that start or end a lasting state, its name, and whether it lasts after the event."""


def _lasting(event: Event) -> Iterator[tuple[str, bool]]:
    if isinstance(event, events.StoreModeChanged):
        for name in (f"store_mode:{event.guard}:{event.policy}", f"store:{event.store}"):
            yield name, event.after != _SHARED
    elif type(event) in _LASTING:
        name, lasts = _LASTING[type(event)]
        yield f"{name}:{event.guard}", lasts(event)


class Sentence(NamedTuple):
    """What an event says.

    If its subject has states, `about` is the subject and `verb` what it did: such events are
    grouped and counted. Other events are grouped by the sentence.
    """

    tone: Tone
    what: str
    about: str = ""
    verb: str = ""


def _word(value: object) -> str:
    return say.plainly(shown(value, LONGEST_WORD))


def _key(value: object) -> str:
    return shown(value, LONGEST_KEY)


_BREAKER_VERBS: Final = {
    "open": "opened",
    "half_open": "tried again",
    "closed": "closed",
    "isolated": "was isolated",
}


def _breaker(event: events.BreakerChanged) -> Sentence:
    tones: dict[str, Tone] = {"open": "bad", "isolated": "bad", "half_open": "warn"}
    about = "the breaker" if event.key is None else f"the breaker for {_key(event.key)}"
    what = f"{about} is {_word(event.after)}, it was {_word(event.before)} ({_word(event.cause)})"
    verb = _BREAKER_VERBS.get(event.after, _word(event.after))
    return Sentence(tones.get(event.after, "ok"), what, about, verb)


def _store_mode(event: events.StoreModeChanged) -> Sentence:
    about = "the store"
    if event.after == _SHARED:
        what = "the store is back: what shares it decides together again"
        return Sentence("ok", what, about, "came back")
    return Sentence(
        "bad", "the store was lost: what shares it decides without it", about, "was lost"
    )


def _settings(event: events.SettingsChanged) -> Sentence:
    changes = [
        f"{_word(name)} {say.amount(value)}"
        if type(value) in {int, float}
        else f"{_word(name)} {_key(value)}"
        if name in {"limits", "mode", "level"} and isinstance(value, str)
        else _word(name)
        for name, value in event.changes.items()
    ]
    what = f"settings of the {_word(event.policy)} were changed: {', '.join(changes)}"
    return Sentence("ok", what)


def _implausible(event: events.ImplausibleReport) -> Sentence:
    limit, reported = _key(event.limit), say.amount(event.reported)
    what = f"the limit {limit} was given a {_word(event.what)} of {reported}"
    return Sentence("warn", f"{what}, which cannot be true; {say.amount(event.counted)} counts")


def _level(event: events.LevelChanged) -> Sentence:
    tone: Tone = "ok" if event.after == "full" else "warn"
    about = "the level of service"
    what = f"{about} is {_word(event.after)}, it was {_word(event.before)}"
    return Sentence(tone, what, about, f"went to {_word(event.after)}")


def _loop(event: events.LoopBlocked) -> Sentence:
    about, lasted = "the event loop", say.seconds(event.seconds)
    if event.over:
        return Sentence(
            "ok", f"{about} comes round again, after {lasted}", about, "came round again"
        )
    return Sentence("bad", f"{about} has been blocked for {lasted}", about, "was blocked")


def _lease(event: events.LeaseChanged) -> Sentence:
    about = "the lease"
    if event.held:
        return Sentence("ok", f"{about} is held here, with token {event.token}", about, "was won")
    what = f"{about} is not held here any more ({_word(event.cause)})"
    return Sentence("warn", what, about, "was lost")


def _health(event: events.HealthChanged) -> Sentence:
    tones: dict[str, Tone] = {"healthy": "ok", "unhealthy": "bad"}
    about, after = f"the check {_key(event.check)}", _word(event.after)
    what = f"{about} is {after}, it was {_word(event.before)}"
    return Sentence(tones.get(event.after, "warn"), what, about, f"became {after}")


def _lifecycle(event: events.LifecycleChanged) -> Sentence:
    tone: Tone = "ok" if event.after == "ready" else "warn"
    about, after = "the service", _word(event.after)
    what = f"{about} is {after}, {event.in_flight} requests in flight"
    return Sentence(tone, what, about, f"became {after}")


def _overload(event: events.OverloadChanged) -> Sentence:
    if event.overloaded:
        what = "the event loop is overloaded: requests are shed"
        return Sentence("warn", what, "the edge", "became overloaded")
    what = "the event loop is not overloaded any more"
    return Sentence("ok", what, "the edge", "recovered from overload")


def _ejected(event: events.HostEjected) -> Sentence:
    host = say.address(event.host)
    until = f"for {say.seconds(event.seconds)}" if event.seconds else f"while {event.cause}"
    return Sentence("warn", f"{host} gets no requests {until}", host, "was ejected")


def _restored(event: events.HostRestored) -> Sentence:
    host = say.address(event.host)
    return Sentence("ok", f"{host} gets requests again", host, "came back")


def _gap(event: events.FifoGap) -> Sentence:
    goes_on = "" if event.skipped_to is None else f"; it goes on with {event.skipped_to}"
    return Sentence("warn", f"a message is missing for {say.seconds(event.age)}{goes_on}")


def _member(event: events.MemberChanged) -> Sentence:
    about = _key(event.member)
    if event.after == "suspected":
        what = f"{event.member} is suspected: {event.reason}"
        return Sentence("warn", what, about, "was suspected")
    if event.after == "confirmed":
        what = f"{event.member} is confirmed as failed: {event.reason}"
        return Sentence("bad", what, about, "was confirmed as failed")
    if event.after == "alive":
        state, verb = {
            "suspected": ("is cleared of suspicion", "was cleared"),
            "unknown": ("is alive", "joined"),
        }.get(event.before, ("is back", "came back"))
        return Sentence("ok", f"{event.member} {state}", about, verb)
    verb = "left" if event.after == "left" else f"became {_word(event.after)}"
    return Sentence("ok", f"{event.member} is {event.after}", about, verb)


def _source(event: events.SourceChanged) -> Sentence:
    about = f"source {_key(event.source)}"
    if event.after == "ok":
        what = f"{about} is back after {say.seconds(event.duration)}"
        return Sentence("ok", what, about, "came back")
    if event.after == "missing":
        return Sentence("warn", f"{about} is missing", about, "went missing")
    return Sentence("bad", f"{about} cannot be read", about, "failed")


def _stage(event: events.StageChanged) -> Sentence:
    about = f"stage {_key(event.stage)}"
    if event.after == "flows":
        return Sentence("ok", f"{about} flows again", about, "flowed again")
    what = f"{about} is blocked: a dead letter cannot be stored"
    return Sentence("bad", what, about, "was blocked")


def _collection(event: events.CollectionChanged) -> Sentence:
    about = "the collection"
    if event.after == "enough":
        return Sentence("ok", "enough sources have a value again", about, "had enough again")
    what = f"{event.values} sources have a value, {event.minimum} are needed"
    return Sentence("bad", what, about, "had too few values")


def _ended(event: events.PipelineEnded) -> Sentence:
    words = {"over": "its sources are over", "stopped": "it was stopped", "failed": "it failed"}
    tone: Tone = "bad" if event.result == "failed" else "ok"
    returned = f", {event.returned} returned" if event.returned else ""
    what = f"the pipeline ended: {words.get(event.result, _word(event.result))}"
    return Sentence(tone, f"{what}; {event.read} read, {event.stored} stored{returned}")


_SENTENCES: Final[dict[type[Event], Callable[[Any], Sentence]]] = {
    events.BreakerChanged: _breaker,
    events.StoreModeChanged: _store_mode,
    events.SettingsChanged: _settings,
    events.SettingsDiffer: lambda event: Sentence(
        "warn", f"pods do not agree on the settings of the {_word(event.policy)}"
    ),
    events.ImplausibleReport: _implausible,
    events.LevelChanged: _level,
    events.LoopBlocked: _loop,
    events.LeaseChanged: _lease,
    events.ResourceLeaked: lambda event: Sentence(
        "warn", f"a resource has been out for {say.seconds(event.seconds)}: {event.borrowed_at}"
    ),
    events.WorkerReplaced: lambda event: Sentence(
        "warn", f"a worker process died (exit code {event.exit_code}) and was replaced"
    ),
    events.JobDied: lambda event: Sentence(
        "bad", f"a job was given up after {say.several(event.attempts, 'attempt')}"
    ),
    events.DeadLetterDropped: lambda _event: Sentence(
        "bad", "a dead letter was dropped: there are too many"
    ),
    events.HealthChanged: _health,
    events.LifecycleChanged: _lifecycle,
    events.OverloadChanged: _overload,
    events.HostEjected: _ejected,
    events.HostRestored: _restored,
    events.OutboxBlocked: lambda event: Sentence(
        "bad", f"events of an aggregate wait: one failed {say.several(event.attempts, 'time')}"
    ),
    events.EventDied: lambda event: Sentence(
        "bad", f"an event was put aside after {say.several(event.attempts, 'attempt')}"
    ),
    events.FifoGap: _gap,
    events.MemberChanged: _member,
    events.ItemDied: lambda event: Sentence(
        "bad", f"an item became a dead letter of stage {_key(event.stage)}"
    ),
    events.SourceChanged: _source,
    events.StageChanged: _stage,
    events.CollectionChanged: _collection,
    events.PipelineEnded: _ended,
    events.OwnPause: lambda event: Sentence(
        "warn", f"this process was stopped for {say.seconds(event.seconds)}, and accuses nobody"
    ),
}
"""The subscribed events, and how each becomes a sentence."""
