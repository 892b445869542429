from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import seawall
from seawall import Bulkhead, Guard, registry
from seawall.resources import Channel
from tests.support import new_guard
from tests.telemetry.world import World

SOURCE = Path(seawall.__file__).parent.parent


class Thing:
    """Something that shows what it is told to."""

    def __init__(self, shown: object) -> None:
        self.shown = shown

    def snapshot(self) -> object:
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown


def _named(kind: str, name: str) -> list[dict[str, object]]:
    return [one for one in seawall.snapshot().get(kind, []) if one["name"] == name]


def test_everything_is_listed_by_kind_and_name(world: World):
    """What a service is made of is in one snapshot, which JSON can tell."""
    shown = seawall.snapshot()
    json.dumps(shown, allow_nan=False)
    kinds = """channel deferred_call_worker deferred_calls dispatcher executor fifo_receiver
        guard health idempotency idempotent_requests inbox job_worker jobs lease lifecycle llm
        members models outbox pool queue request_limits serializer service_levels store
        upstreams watchdog worker"""
    assert set(kinds.split()) <= set(shown)
    assert not [one for things in shown.values() for one in things if "snapshot_error" in one]
    (vendor,) = _named("guard", "w-vendor")
    assert vendor == {**world.guard.snapshot(), "p50": vendor["p50"]} | {
        key: vendor[key] for key in ("p95", "p99", "error_rate", "last_error", "policies")
    }


def test_nothing_is_kept_alive():
    """What nobody holds any more is gone from the list."""
    channel = Channel(1, name="entries short-lived")
    known = weakref.ref(channel)
    assert len(_named("channel", "entries short-lived")) == 1
    del channel
    gc.collect()
    assert known() is None
    assert not _named("channel", "entries short-lived")


def test_a_broken_snapshot_hides_no_other():
    """Whoever cannot show itself has the cause there, and the others are seen."""
    broken, well = Thing(RuntimeError("x" * 1000)), Thing({"value": 1})
    registry.enter(broken, "thing", "entries broken")
    registry.enter(well, "thing", "entries well")
    shapeless = Thing([1, 2])
    registry.enter(shapeless, "thing", "entries shapeless")
    assert "snapshot_error" in _named("thing", "entries shapeless")[0]
    (shown,) = _named("thing", "entries broken")
    assert str(shown["snapshot_error"]).startswith("RuntimeError: xxx")
    assert len(str(shown["snapshot_error"])) == 200
    assert _named("thing", "entries well") == [{"value": 1, "name": "entries well"}]


def test_a_snapshot_is_bounded_and_fit_for_json():
    """Many keys, odd values and deep nesting are told in short."""
    deep: list[object] = []
    for _ in range(50):
        deep = [deep]
    odd = {
        "many": dict.fromkeys(range(5000), 0),
        "nan": float("nan"),
        "object": object(),
        "pair": (1, {2}),
        "deep": deep,
        3: seawall.Criticality.CRITICAL,
    }
    thing = Thing(odd)
    registry.enter(thing, "thing", "entries odd")
    (shown,) = _named("thing", "entries odd")
    json.dumps(shown, allow_nan=False)
    assert len(shown["many"]) == 1001  # type: ignore[arg-type]
    assert shown["many"]["(more)"] == 4000  # type: ignore[index]
    assert (shown["nan"], shown["pair"], shown["3"]) == (None, [1, [2]], 2)


def test_what_a_store_knows_is_told_with_its_age_and_never_asked_for():
    """A snapshot asks nobody: it has the last answer, and how old that is."""
    clock = seawall.clock.VirtualClock()
    thing = Thing(AssertionError("it would wait for a store"))
    with seawall.testing.virtual_time(clock):
        registry.enter(thing, "thing", "entries stored", ask="ask", local=False)
    expected = {"name": "entries stored", "stored": None, "stored_age": None}
    assert _named("thing", "entries stored") == [expected]
    registry.answered(thing, {"waiting": 3})
    clock.advance(7)
    expected = {"name": "entries stored", "stored": {"waiting": 3}, "stored_age": 7.0}
    assert _named("thing", "entries stored") == [expected]


def test_two_of_one_name_are_both_listed():
    """Only a guard's name is unique."""
    both = Channel(1, name="entries twin"), Channel(2, name="entries twin")
    capacities = {one["capacity"] for one in _named("channel", "entries twin")}
    assert capacities == {channel.capacity for channel in both}


def test_threads_may_make_and_list_at_once():
    """Things come and go while others look."""
    over = threading.Event()
    errors: list[BaseException] = []

    def make() -> None:
        try:
            while not over.is_set():
                Channel(1, name="entries many")
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    makers = [threading.Thread(target=make) for _ in range(3)]
    for maker in makers:
        maker.start()
    for _ in range(100):
        registry.entered()
    over.set()
    for maker in makers:
        maker.join()
    assert not errors


def test_a_closed_guard_is_not_told():
    """Its name is free for another, which must not be taken for it."""
    guard = Guard("entries closed", Bulkhead(1))
    assert _named("guard", guard.name)
    guard.close()
    assert not _named("guard", guard.name)


def test_a_call_does_nothing_for_the_registry(monkeypatch):
    """It costs nothing where calls are made: nothing of it is reached from there."""
    guard = new_guard(Bulkhead(1))
    guarded = guard(lambda: 1)
    for name in ("enter", "answered", "entered", "snapshot", "plain"):
        monkeypatch.setattr(registry, name, None)
    assert guarded() == 1


def test_a_child_process_lists_though_a_thread_of_its_parent_held_the_lock():
    """After a fork everything can be entered and listed."""
    script = """
import os, threading
from seawall import registry, snapshot
from seawall.resources import Channel

held, over = threading.Event(), threading.Event()
def hold():
    with registry._lock:
        held.set()
        over.wait()
channel = Channel(1, name="before")
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child:
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    print("well")
else:
    after = Channel(1, name="after")
    names = [one["name"] for one in snapshot()["channel"]]
    os._exit(0 if names == ["after", "before"] else 1)
"""
    ran = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ran.stdout == "well\n", ran.stderr
