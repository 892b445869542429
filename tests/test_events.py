from __future__ import annotations

import asyncio
import sys
import threading
from contextvars import Context
from inspect import signature
from pathlib import Path

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    Cache,
    Fallback,
    Guard,
    Retry,
    RetryBudget,
    ThreadBulkhead,
    Timeout,
    deadline,
    static,
    subscribe,
)
from seawall import (
    events as events_module,
)
from seawall.backoff import constant
from seawall.events import (
    BreakerChanged,
    CallDegraded,
    CallRejected,
    CallRetried,
    CallTimedOut,
    Event,
    RetryStopped,
    SettingsChanged,
    ThreadAbandoned,
    bus,
)
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, virtual_time

_BROKEN = ScriptedService(fail(ConnectionError)).call
_FAILED = {"reason": "ConnectionError", "failure": "ConnectionError"}


@pytest.fixture
def events():
    """Return the list of all events from here on, as (type, fields)."""
    heard: list[Event] = []
    unsubscribe = subscribe(heard.append)
    yield heard
    unsubscribe()


def _only(events, kind):
    return [event.fields() for event in events if type(event) is kind]


def test_a_success_makes_no_event(events):
    """Nothing is told of a call that goes well."""
    guard = Guard("vendor", Fallback(static(1)), Retry(on=OSError), Breaker(), Bulkhead(1))
    guard.call(lambda: 1)
    assert events == []


def test_breaker_changed(events):
    """Each change of a breaker's state is told, with its cause."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=1, break_for=5.0)
        guard = Guard("vendor", breaker)
        guard.attempt(_BROKEN)
        clock.advance(5.0)
        guard.call(lambda: 1)
        breaker.isolate()
        breaker.close()
    changes = _only(events, BreakerChanged)
    assert [(c["before"], c["after"], c["cause"]) for c in changes] == [
        ("closed", "open", "tripped"),
        ("open", "half_open", "break over"),
        ("half_open", "closed", "probes passed"),
        ("closed", "isolated", "isolate()"),
        ("isolated", "closed", "close()"),
    ]
    assert {(c["guard"], c["key"]) for c in changes} == {("vendor", None)}
    assert [c["reason"] for c in changes] == ["ConnectionError", "", "", "", ""]


def test_breaker_changed_names_the_key(events):
    """A keyed breaker tells whose state changed."""
    guard = Guard("vendor", Breaker(consecutive=1, key=lambda user: user))
    guard.attempt(_BROKEN, "ann")
    assert [c["key"] for c in _only(events, BreakerChanged)] == ["ann"]


def test_a_shared_breaker_tells_each_guard(events):
    """Both guards that share a breaker are told of its change."""
    breaker = Breaker(consecutive=1)
    kept = Guard("first", breaker), Guard("second", breaker)
    kept[0].attempt(_BROKEN)
    assert sorted(c["guard"] for c in _only(events, BreakerChanged)) == ["first", "second"]


@pytest.mark.parametrize(("mode", "told"), [("enforce", [True]), ("shadow", [False]), ("off", [])])
def test_call_rejected(events, mode, told):
    """A refusal is told, also one that was only counted."""
    guard = Guard("vendor", Bulkhead(1, mode=mode))
    with guard.hold():
        guard.attempt(lambda: 1)
    rejected = _only(events, CallRejected)
    assert [r["enforced"] for r in rejected] == told
    assert all(
        (r["guard"], r["policy"], r["reason"]) == ("vendor", "bulkhead", "bulkhead_full")
        for r in rejected
    )


def test_a_refusal_for_want_of_a_thread_is_told(events):
    """A ThreadBulkhead without room refuses as a Bulkhead does, and so it is told."""
    guard = Guard("vendor", ThreadBulkhead(1, max_queue=0))
    started, go_on = threading.Event(), threading.Event()

    def block():
        started.set()
        go_on.wait(30)

    holder = threading.Thread(target=guard.call, args=(block,))
    holder.start()
    started.wait(30)
    result = guard.attempt(lambda: 1)
    go_on.set()
    holder.join(30)
    assert result.reason == "bulkhead_full"
    assert [(r["policy"], r["reason"]) for r in _only(events, CallRejected)] == [
        ("thread_bulkhead", "bulkhead_full")
    ]


def test_a_passed_deadline_is_told(events):
    """A call that never starts because its time is over is a refusal like any other."""
    guard = Guard("vendor", Bulkhead(1))
    with deadline(0):
        assert guard.attempt(lambda: 1).reason == "deadline_exceeded"
    assert [r["reason"] for r in _only(events, CallRejected)] == ["deadline_exceeded"]


def test_call_retried_and_stopped(events):
    """Each retry is told before its pause, and the end of trying with its cause."""
    with virtual_time():
        guard = Guard("vendor", Retry(on=ConnectionError, attempts=2, backoff=constant(3.0)))
        guard.attempt(_BROKEN)
    assert _only(events, CallRetried) == [
        {"guard": "vendor", "attempt": 1, "delay": 3.0, **_FAILED}
    ]
    assert _only(events, RetryStopped) == [
        {"guard": "vendor", "attempt": 2, "cause": "attempts", **_FAILED}
    ]


class _SaidNo(ConnectionError):
    retry_after = -1.0


@pytest.mark.parametrize(
    ("settings", "cause"),
    [({"idempotent": False}, "not idempotent"), ({"budget": True}, "budget"), ({}, "deadline")],
)
def test_each_cause_of_stopping_is_told(events, settings, cause):
    """What stopped a retry is told by name."""
    with virtual_time():
        budget = RetryBudget() if settings.pop("budget", False) else None
        retry = Retry(on=ConnectionError, attempts=99, backoff=constant(3.0), budget=budget)
        guard = Guard("vendor", retry, **settings)
        with deadline(1.0 if cause == "deadline" else 1000.0):
            guard.attempt(_BROKEN)
    assert [stop["cause"] for stop in _only(events, RetryStopped)] == [cause]


def test_a_server_that_says_no_is_told(events):
    """A negative retry_after stops the retries; that and the error are told."""
    guard = Guard("vendor", Retry(on=ConnectionError))
    guard.attempt(ScriptedService(fail(_SaidNo)).call)
    (stop,) = _only(events, RetryStopped)
    assert (stop["cause"], stop["reason"]) == ("server said no", "_SaidNo")


def test_a_value_that_is_retried_is_told(events):
    """A retry because of a value has the reason `value`."""
    guard = Guard("vendor", Retry(on=lambda _e, value: value == "no", backoff=0.0))
    guard.call(ScriptedService(answer("no"), answer("yes")).call)
    assert [retry["reason"] for retry in _only(events, CallRetried)] == ["value"]


def test_call_timed_out(events):
    """A call that ran out of time is told once."""

    async def main():
        guard = Guard("vendor", Timeout(2.0))
        await guard.aattempt(ScriptedService(hang()).acall)

    run_virtual(main())
    assert _only(events, CallTimedOut) == [{"guard": "vendor", "seconds": 2.0}]


def test_degraded(events):
    """The level that answered is told, and why it was needed."""
    guard = Guard("vendor", Fallback(_BROKEN, static("later")))
    error = LookupError("no such user; password=hunter2")
    guard.call(ScriptedService(fail(error)).call)
    (told,) = _only(events, CallDegraded)
    assert told == {
        "guard": "vendor",
        "source": "static",
        "level": 2,
        "reason": "LookupError",
        "message": "no such user; password=***",
        "age": None,
    }


def test_a_stale_answer_is_told(events):
    """An old answer in place of a failed call is a fallback of level 1."""
    with virtual_time() as clock:
        guard = Guard("vendor", Cache(1.0, stale_if_error=60.0))
        call = ScriptedService(answer("old"), fail(ConnectionError)).call
        guard.call(call)
        clock.advance(2.0)
        assert guard.call(call) == "old"
    (told,) = _only(events, CallDegraded)
    assert (told["source"], told["level"], told["age"]) == ("cache: stale", 1, 2.0)
    assert (told["reason"], told["message"]) == ("ConnectionError", "")


def test_thread_abandoned(events):
    """A thread that nobody waits for any more is told, with how many there are."""
    go_on = threading.Event()
    with virtual_time():
        guard = Guard("vendor", Timeout(1.0, sync="thread"))
        result = guard.attempt(go_on.wait, 30)
        go_on.set()
    assert result.reason == "timed_out"
    assert _only(events, ThreadAbandoned) == [{"guard": "vendor", "running": 1}]
    assert len(_only(events, CallTimedOut)) == 1


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        (lambda: Bulkhead(1), {"limit": 5, "mode": "shadow"}),
        (Breaker, {"failure_ratio": 0.9, "mode": "shadow"}),
        (Breaker, {"mode": "off"}),
        (lambda: Timeout(1.0), {"seconds": 2.0}),
        (lambda: Cache(1.0), {"ttl": 2.0}),
        (lambda: Retry(on=OSError), {"attempts": 5}),
    ],
)
def test_settings_changed(events, policy, changes):
    """New settings are told to each guard of the policy, all of them and as given."""
    policy = policy()
    kept = Guard("vendor", policy)
    policy.update(**changes)
    assert _only(events, SettingsChanged) == [
        {"guard": kept.name, "policy": policy.kind, "changes": changes}
    ]


def test_bad_settings_are_not_told(events):
    """A change that was refused is no event."""
    policy = Bulkhead(1)
    kept = Guard("vendor", policy)
    with pytest.raises(ValueError, match="limit"):
        policy.update(limit=0)
    assert events == []
    assert kept.name == "vendor"


# --- Subscribing ---


def _trip(name="vendor"):
    breaker = Breaker(consecutive=1)
    guard = Guard(name, Retry(on=ConnectionError, attempts=1), breaker)
    guard.attempt(_BROKEN)
    guard.close()


def test_a_listener_hears_only_the_types_it_named():
    """Types named are heard, subclasses included, and no others."""
    some, every = [], []
    ends = [
        subscribe(some.append, BreakerChanged, CallRejected),
        subscribe(every.append, Event),
    ]
    _trip()
    for end in ends:
        end()
    assert [event.name for event in some] == ["breaker_changed"]
    assert [event.name for event in every] == ["retry_stopped", "breaker_changed"]


def test_unsubscribing_ends_that_subscription_alone():
    """The same listener twice is two subscriptions; ending one twice does no harm."""
    heard = []
    first, second = subscribe(heard.append), subscribe(heard.append)
    first()
    first()
    _trip()
    assert len(heard) == 2
    second()
    _trip()
    assert len(heard) == 2


def test_a_listener_that_fails_is_logged_and_harms_nothing(caplog):
    """The call goes on, the other listeners hear, and the log says which event it was."""
    heard = []

    def broken(_event):
        raise RuntimeError("mine")

    ends = [subscribe(broken, BreakerChanged), subscribe(heard.append, BreakerChanged)]
    _trip()
    for end in ends:
        end()
    assert len(heard) == 1
    assert "a listener failed on breaker_changed" in caplog.text
    assert "mine" in caplog.text


def test_a_listener_may_unsubscribe_and_call_guards():
    """A listener runs outside of all locks: it may use guards and end its own subscription."""
    seen = []

    def listen(_event):
        end()
        seen.append(guard.snapshot()["policies"][0]["state"])
        seen.append(guard.attempt(lambda: 1).reason)

    breaker = Breaker(consecutive=1)
    guard = Guard("vendor", breaker)
    end = subscribe(listen, BreakerChanged)
    guard.attempt(_BROKEN)
    assert seen == ["open", "circuit_open"]


def test_nothing_is_built_without_listeners(monkeypatch):
    """An event that nobody wants is never made; the log wants changes and first degradations."""
    built = []
    for kind in kinds_of_events():

        def init(self, guard, real=kind.__init__, **fields):
            built.append(guard)
            real(self, guard, **fields)

        monkeypatch.setattr(kind, "__init__", init)
    monkeypatch.setattr(bus, "_listeners", ())  # of other tests
    go_on = threading.Event()

    async def main():
        guard = Guard("async", Retry(on=TimeoutError, attempts=2), Timeout(1.0))
        await guard.aattempt(ScriptedService(hang()).acall)

    def use():
        _trip()
        run_virtual(main())
        with virtual_time():
            timed = Guard("timed", Fallback(static(1)), Timeout(1.0, sync="thread"))
            timed.call(go_on.wait, 30)
            go_on.set()
            timed.call(_BROKEN)
        bulkhead = Bulkhead(1)
        full = Guard("full", Fallback(static(1)), bulkhead)
        with full.hold():
            full.call(lambda: 1)
        bulkhead.update(limit=5)

    Context().run(use)  # without what other tests may have left in this one, such as a collector
    # A breaker opened, two guards gave their first degraded answer, a limit was changed.
    assert built == ["vendor", "timed", "full", "full"]


def kinds_of_events() -> list[type[Event]]:
    """Return all classes of events, once each: one with slots has replaced another one.

    The one that was replaced lives on in the first releases of Python 3.11.
    """
    return [
        kind
        for kind in Event.__subclasses__()
        if getattr(sys.modules[kind.__module__], kind.__name__, None) is kind
    ]


def test_events_show_themselves():
    """The repr of an event has its fields; its name is stable."""
    event = CallRetried("vendor", attempt=1, delay=0.5, reason="timed_out")
    assert repr(event) == (
        "CallRetried(guard='vendor', attempt=1, delay=0.5, reason='timed_out', failure='')"
    )
    assert event.name == "call_retried"
    assert not hasattr(event, "__dict__")
    names = [kind.name for kind in kinds_of_events()]
    assert len(names) == len(set(names))


def test_events_are_told_in_the_loop_where_they_happen(events):
    """A listener is called at once, in the thread of the call."""
    threads = []
    end = subscribe(lambda _event: threads.append(threading.get_ident()))

    async def main():
        guard = Guard("vendor", Retry(on=ConnectionError, attempts=1))
        service = ScriptedService(fail(ConnectionError))
        await asyncio.gather(*(guard.aattempt(service.acall) for _ in range(2)))

    run_virtual(main())
    end()
    assert threads == [threading.get_ident()] * len(events)


def test_every_event_is_in_the_table_of_its_page():
    """The page of events has each one, with its stable name and its fields as they are."""
    page = (Path(__file__).parents[1] / "docs" / "operate" / "events.md").read_text("utf-8")
    kinds = [getattr(events_module, name) for name in events_module.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Event)]
    for kind in kinds:
        names = [*signature(kind.__init__).parameters][2:]  # without self and guard
        fields = ", ".join(f"`{name}`" for name in names)
        row = f"| `{kind.__name__}` | `{kind.name}` | {fields} |"
        assert row in page or kind is Event
    ours = {kind for kind in kinds_of_events() if kind.__module__.startswith("seawall.")}
    assert ours <= set(kinds)
