"""What happened: the rare events, each as a sentence, and since when a trouble lasts.

Only events that are rare by nature are heard (a breaker that opens, a store that is lost): one that
comes with each call would make calls pay for being watched. What an event quotes of users' data
(payloads, ids, the text of errors) is not told.

Promises: bounded; nothing is done in the thread where something happens but to write it down; and
whoever forgets to `close` leaves no subscription behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol
from weakref import finalize, ref

from seawall.dashboard import _words as say
from seawall.dashboard._bounds import (
    LONGEST_KEY,
    LONGEST_NAME,
    LONGEST_TEXT,
    LONGEST_WORD,
    MOST_HAPPENINGS,
    shown,
)
from seawall.dashboard.views import Happening, Tone
from seawall.runtime import durable_events as durable
from seawall.runtime import edge_events as edge
from seawall.runtime import events
from seawall.runtime.events import Event, subscribe

MOST_BEGINNINGS: Final = 1000
"""Troubles whose beginning was heard, and is remembered."""

DIFFER_FOR: Final = 600.0
"""Seconds for which pods that disagree are told of: they announce it when they notice."""

_SHARED: Final = "shared"


class Happenings:
    """The latest of what happened. `take_in` and `latest` are for one thread at a time."""

    def __init__(self, wall: Callable[[], float]) -> None:
        """Listen from now on; `wall` returns unix seconds."""
        self._wall = wall
        self._heard: deque[tuple[float, Event]] = deque(maxlen=MOST_HAPPENINGS)
        self._told: deque[tuple[Happening, int]] = deque(maxlen=MOST_HAPPENINGS)
        self.began: dict[str, float] = {}
        """When what lasts began, by what it is: "breaker:vendor"."""
        self.differing: dict[tuple[str, str], float] = {}
        """By guard and policy, when it was heard that pods disagree on its settings."""
        self.changes = 0
        """How often settings were changed, as far as was heard."""
        self._end = listen(self, *_SENTENCES)

    def __repr__(self) -> str:
        state = "listening" if self._end.alive else "closed"
        return f"<Happenings: {len(self._told)} told, {state}>"

    def close(self) -> None:
        """Listen no more."""
        self._end()

    def forget(self) -> None:
        """Know of nothing that happened so far: in a child process it happened to another."""
        self._heard = deque(maxlen=MOST_HAPPENINGS)
        self._told = deque(maxlen=MOST_HAPPENINGS)
        self.began, self.differing = {}, {}

    def hear(self, event: Event) -> None:
        """Write an event down, from any thread: it may hold any lock, so nothing is waited for."""
        self._heard.append((self._wall(), event))

    def note(self, where: str, tone: Tone, what: str) -> None:
        """Tell of something that no event has told."""
        self._tell(self._wall(), where, tone, what)

    def take_in(self) -> None:
        """Make sentences of what was heard since the last time."""
        while self._heard:
            at, event = self._heard.popleft()
            say_it = _SENTENCES.get(type(event))
            if say_it is None:
                continue
            try:
                tone, what = say_it(event)
            except Exception:  # noqa: BLE001 - an event may hold a key whose repr raises
                tone, what = "warn", f"{say.plainly(event.name)}, which cannot be told"
            self._tell(at, event.guard, tone, what)
            self._remember(at, event)
        wall = self._wall()
        for key in [key for key, at in self.differing.items() if wall - at > DIFFER_FOR]:
            del self.differing[key]

    def _tell(self, at: float, where: str, tone: Tone, what: str) -> None:
        where, what = shown(where, LONGEST_NAME), shown(what, LONGEST_TEXT - 20)
        times = 1
        if self._told:
            last, before = self._told[-1]
            if (last["where"], last["what"]) == (where, what):
                self._told.pop()
                times = before + 1
        self._told.append((Happening(at=at, tone=tone, where=where, what=what), times))

    def _remember(self, at: float, event: Event) -> None:
        if isinstance(event, events.SettingsDiffer) and len(self.differing) < MOST_BEGINNINGS:
            self.differing[event.guard, event.policy] = at
        elif isinstance(event, events.SettingsChanged):
            self.changes += 1
            self.differing.pop((event.guard, event.policy), None)
        for what, lasts in _LASTING.get(type(event), _no_time)(event):
            if not lasts:
                self.began.pop(what, None)
            elif len(self.began) < MOST_BEGINNINGS:
                self.began.setdefault(what, at)

    def latest(self) -> list[Happening]:
        """Return what happened, the latest last."""
        return [
            told if times == 1 else Happening(**{**told, "what": f"{told['what']} ({times} times)"})
            for told, times in self._told
        ]


class Hears(Protocol):
    """Whoever is told of events; in any thread, which may hold any lock."""

    def hear(self, event: Event, /) -> None:
        """Be told of one."""


def listen(hears: Hears, *types: type[Event]) -> finalize[..., Any]:
    """Tell it of these events without keeping it alive; what is returned ends it when called."""
    me = ref(hears)

    def heard(event: Event) -> None:
        alive = me()
        if alive is not None:
            alive.hear(event)

    end = finalize(hears, subscribe(heard, *types))
    end.atexit = False
    return end


# What lasts, and from when to when


def _no_time(_event: Any) -> tuple[tuple[str, bool], ...]:
    return ()


_LASTING: Final[dict[type[Event], Callable[[Any], tuple[tuple[str, bool], ...]]]] = {
    events.BreakerChanged: lambda event: ((f"breaker:{event.guard}", event.after != "closed"),),
    events.StoreModeChanged: lambda event: (
        (f"store_mode:{event.guard}:{event.policy}", event.after != _SHARED),
        (f"store:{event.store}", event.after != _SHARED),
    ),
    events.LevelChanged: lambda event: ((f"ladder:{event.guard}", event.after != "full"),),
    events.LoopBlocked: lambda event: ((f"watchdog:{event.guard}", not event.over),),
    edge.LifecycleChanged: lambda event: ((f"lifecycle:{event.guard}", event.after == "draining"),),
    edge.HealthChanged: lambda event: (
        (f"health:{event.guard}", event.after in {"degraded", "unhealthy"}),
    ),
    edge.HostEjected: lambda event: ((f"upstreams:{event.guard}", True),),
    edge.HostRestored: lambda event: ((f"upstreams:{event.guard}", False),),
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
    what = f"the {_word(event.policy)}"
    if event.after == _SHARED:
        return "ok", f"{what} goes with the store {event.store} again"
    return "warn", f"{what} goes without the store {event.store}: {_word(event.after)}"


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
    limit, told = shown(event.limit, LONGEST_KEY), say.amount(event.reported)
    what = f"the limit {limit} was told of a {_word(event.what)} of {told}"
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


def _health(event: edge.HealthChanged) -> Sentence:
    tones: dict[str, Tone] = {"healthy": "ok", "unhealthy": "bad"}
    what = f"the check {shown(event.check, LONGEST_KEY)} is {_word(event.after)}"
    return tones.get(event.after, "warn"), f"{what}, it was {_word(event.before)}"


def _lifecycle(event: edge.LifecycleChanged) -> Sentence:
    tone: Tone = "ok" if event.after == "ready" else "warn"
    return tone, f"the service is {_word(event.after)}, {event.in_flight} requests in flight"


def _ejected(event: edge.HostEjected) -> Sentence:
    where = say.address(event.host)
    return "warn", f"{where} gets no requests for {say.seconds(event.seconds)}"


def _gap(event: durable.FifoGap) -> Sentence:
    goes_on = "" if event.skipped_to is None else f"; it goes on with {event.skipped_to}"
    return "warn", f"a message is missing for {say.seconds(event.age)}{goes_on}"


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
    edge.HealthChanged: _health,
    edge.LifecycleChanged: _lifecycle,
    edge.HostEjected: _ejected,
    edge.HostRestored: lambda event: ("ok", f"{say.address(event.host)} gets requests again"),
    durable.OutboxBlocked: lambda event: (
        "bad",
        f"events of an aggregate wait: one failed {say.several(event.attempts, 'time')}",
    ),
    durable.EventDied: lambda event: (
        "bad",
        f"an event was put aside after {say.several(event.attempts, 'attempt')}",
    ),
    durable.FifoGap: _gap,
}
"""What is heard, and how it is told."""
