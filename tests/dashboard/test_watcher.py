from __future__ import annotations

import gc
import json
import os
import threading
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, settings

from seawall import Breaker, Guard, events
from seawall.dashboard import bounds
from seawall.dashboard import events as events_module
from seawall.dashboard import watcher as watcher_module
from seawall.dashboard.bounds import MOST_BYTES, MOST_GUARDS
from seawall.dashboard.summary import service_troubles
from seawall.dashboard.view_writer import ViewWriter, fit_view, keep_worst, size_of
from seawall.dashboard.views import WORST, Tone
from seawall.dashboard.watcher import AT_ONCE, Watcher
from seawall.events import BreakerChanged, bus
from seawall.events.bus import emit
from tests.dashboard.views_support import (
    NOW,
    Pair,
    check_view,
    many_guards,
)

pytestmark = pytest.mark.usefixtures("nobody_else")
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


# Too much to show


def test_a_view_is_small_enough() -> None:
    """Two hundred guards of seven policies fit in 256 KiB; unhealthy ones are complete."""
    crowd = many_guards(MOST_GUARDS, ill=150)
    pair = Pair()
    view = pair.look(crowd)
    check_view(view)
    assert len(json.dumps(view)) < 256 * 1024
    assert len(view["guards"]) == MOST_GUARDS
    assert view["guards"][150]["stack"][3]["facts"]
    assert "too much to show" in view["happenings"][-1]["what"]
    later = pair.look(crowd)
    assert len(later["happenings"]) == len(view["happenings"]), "it is told once"


def test_without_fitting_a_view_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the fitting that makes it so."""
    monkeypatch.setattr(watcher_module, "fit_view", lambda view, **_: (view, 0))
    assert size_of(Pair().look(many_guards(MOST_GUARDS, ill=0))) > MOST_BYTES


def test_names_without_end_fit() -> None:
    """So does a process whose names and facts are all as long as may be."""
    name = "\u202e" * 120
    things = [
        {"name": f"{place}{name}", **{f"{name}{n}": n for n in range(17)}} for place in range(900)
    ]
    guards = [
        {"name": f"{n}{name}", "policies": [{"policy": name, name: 1}] * 40} for n in range(220)
    ]
    view = Pair().look({"guard": guards, name: things, "store": things})
    check_view(view)
    assert size_of(view) <= MOST_BYTES + 2000
    assert "left out" in view["happenings"][-1]["what"]


def test_guards_beyond_the_most_are_left_out() -> None:
    """Of more guards than are shown, the rest is counted in a happening."""
    view = Pair().look({"guard": [{"name": f"g{place:04}"} for place in range(MOST_GUARDS + 7)]})
    assert len(view["guards"]) == MOST_GUARDS
    assert "7 guards or rows" in view["happenings"][-1]["what"]


def test_what_is_ill_is_shown_before_what_is_well() -> None:
    """Of more guards than are shown, the last by name is shown if it is broken, with its past."""

    def crowd(state: str) -> dict[str, Any]:
        guards: list[dict[str, Any]] = [{"name": f"g{n:04}"} for n in range(MOST_GUARDS + 7)]
        guards[-1]["policies"] = [{"policy": "breaker", "state": state}]
        return {"guard": guards}

    pair = Pair()
    before = pair.look(crowd("closed"))
    assert [one["name"] for one in before["guards"]] == [f"g{n:04}" for n in range(MOST_GUARDS)]
    view = pair.look(crowd("open"))
    check_view(view)
    names = [one["name"] for one in view["guards"]]
    assert names == [*(f"g{n:04}" for n in range(MOST_GUARDS - 1)), "g0206"]
    assert view["guards"][-1]["tone"] == "bad"
    assert view["all_guards"] == MOST_GUARDS + 7
    assert pair.watcher.history["guards"]["g0206"]["breaker"] == [None, "open"]


def test_what_is_broken_goes_before_what_is_worth_a_look() -> None:
    """Whichever is chosen, it is by how bad it is, then by place; and they stay in their order."""
    things = [{"tone": tone, "place": place} for place, tone in enumerate(["ok", "warn", "bad"])]
    things += [{"tone": "off", "place": 3}, {"tone": "warn", "place": 4}]
    chosen = [[one["place"] for one in keep_worst(things, most)] for most in range(6)]
    assert chosen == [[], [2], [1, 2], [1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4]]


def test_how_many_guards_there_are_is_told_only_if_some_are_not_shown() -> None:
    """A view with all its guards does not count them again; one that was cut to fit does."""
    view = Pair().look({"guard": [{"name": f"g{place}"} for place in range(9)]})
    assert "all_guards" not in view
    smaller, _ = fit_view(view, 2000)
    assert len(smaller["guards"]) < 9
    assert smaller["all_guards"] == 9


# Many guards


def _crowd(number: int) -> list[Guard]:
    return [Guard(f"g{place:02}", Breaker(consecutive=3)) for place in range(number)]


def test_of_many_guards_some_are_looked_at_in_turn() -> None:
    """Each is looked at after a while, and its rates are those since its last look."""
    pair, crowd = Pair(), _crowd(60)
    pair.later()
    looked: list[set[str]] = []
    before: dict[str, Any] = {}
    for _ in range(6):
        for guard in crowd:
            guard.call(int)
        view = pair.later()
        seen = {one["name"]: one for one in view["guards"]}
        looked.append({name for name, one in seen.items() if before.get(name) is not one})
        before = seen
    assert {len(names) for names in looked[1:]} == {AT_ONCE}
    assert set.union(*looked[1:5]) == {guard.name for guard in crowd}
    assert {one["rates"]["succeeded"] for one in before.values()} == {1.0}


def test_a_guard_to_which_something_happens_is_looked_at_at_once() -> None:
    """An opened breaker is sampled next, out of turn, until it is well."""
    pair, crowd = Pair(), _crowd(60)
    pair.later()
    for place in (5, 55):
        for _ in range(3):
            crowd[place].attempt(lambda: 1 / 0)
        states = {one["name"]: one["state"] for one in pair.later()["guards"]}
        assert states[crowd[place].name] == "open"
    for _ in range(4):
        facts = [one["stack"][0]["facts"] for one in pair.later()["guards"] if one["tone"] == "bad"]
        assert len(facts) == 2


def test_an_outage_of_all_guards_is_looked_at_in_turn() -> None:
    """It costs as much as a calm, and guards that are well have half of the places."""
    pair, crowd = Pair(), _crowd(60)
    pair.later()
    for guard in crowd:
        for _ in range(3):
            guard.attempt(lambda: 1 / 0)
    for _ in range(8):
        view = pair.later()
    assert {one["state"] for one in view["guards"]} == {"open"}
    assert len(service_troubles([view], view["at"])) == 60


def test_what_is_written_again_is_what_changed() -> None:
    """A writer gives what JSON gives, and keeps nothing of what is not shown any more."""
    pair, _crowd_of = Pair(), _crowd(30)
    writer = ViewWriter()
    for _ in range(3):
        view = pair.later()
        writer.begin()
        assert json.loads(writer.write(view)) == json.loads(json.dumps(view))
    assert len(writer._next) == 30 + 2
    writer.begin()
    writer.begin()
    assert writer._next == {}


# The watcher


def test_a_watcher_says_what_it_wants() -> None:
    """Arguments are checked where they are given."""
    with pytest.raises(TypeError, match="pod='web-1'"):
        Watcher(pod="")
    with pytest.raises(ValueError, match="every"):
        Watcher(every=0)
    with pytest.raises(ValueError, match="keep"):
        Watcher(keep=0)
    with pytest.raises(TypeError, match="wall"):
        Watcher(wall=3.0)  # type: ignore[arg-type]
    watcher = Watcher()
    assert watcher.pod.endswith(f"-{os.getpid()}")
    assert watcher.view is None
    assert repr(watcher).startswith(f"<Watcher of '{watcher.pod}'")
    assert watcher.sample() is watcher.view
    assert watcher.view["pod"]["up_seconds"] >= 0
    watcher.close()


def test_a_watcher_listens_until_it_is_closed_or_forgotten() -> None:
    """No subscription is left behind, and none of the events that come with calls is heard."""
    watcher, forgotten = Watcher(), Watcher()
    heard = {kind for _, kinds in bus._listeners for kind in kinds}
    assert heard
    assert not heard & {
        events.Event,
        events.CallRejected,
        events.CallRetried,
        events.RetryStopped,
        events.CallTimedOut,
        events.CallDegraded,
        events.CallHedged,
        events.ThreadAbandoned,
    }
    watcher.close()
    watcher.close()
    assert len(bus._listeners) == 1
    del forgotten
    gc.collect()
    assert bus._listeners == ()


def test_events_become_sentences() -> None:
    """A happening has its time, its place and its tone; repeated events are one, counted."""
    pair = Pair()
    emit(BreakerChanged, "g\x1b[2J", before="closed", after="open", cause="failures", key="k" * 99)
    pair.wall.now += 5
    for _ in range(3):
        emit(events.JobDied, "jobs", job="secret-id", attempts=3, cause="hunter2")
    first, second = pair.later()["happenings"]
    assert first["at"] == NOW
    assert (first["tone"], first["where"]) == ("bad", "g\\x1b[2J")
    assert first["what"].startswith("the breaker for kkk")
    assert second["what"] == "a job was given up after 3 attempts"
    assert second["counts"] == {"": 3}
    for _ in range(10):
        for place in range(50):
            emit(events.LeaseChanged, f"lease-{place}", token=1, held=True, cause="acquired")
        pair.later(200.0)
    view = pair.later()
    assert len(view["happenings"]) == 100
    assert [one["at"] for one in view["happenings"]] == sorted(o["at"] for o in view["happenings"])
    check_view(view)


def test_a_subject_that_flaps_is_one_happening_until_it_is_quiet() -> None:
    """Its changes are counted and the last one is shown; after a quiet time a new group begins."""
    pair = Pair()
    for _ in range(7):
        emit(BreakerChanged, "g", before="closed", after="open", cause="tripped", key=None)
        emit(BreakerChanged, "g", before="open", after="closed", cause="probes passed", key=None)
        pair.later(10.0)
    (one,) = pair.later()["happenings"]
    assert one["counts"] == {"opened": 7, "closed": 7}
    assert (one["began"] - NOW, one["at"] - NOW, one["tone"]) == (0.0, 60.0, "ok")
    assert one["what"] == "the breaker is closed, it was open (probes passed)"
    pair.later(events_module.TOGETHER)
    emit(BreakerChanged, "g", before="closed", after="open", cause="tripped", key=None)
    assert [one["counts"]["opened"] for one in pair.later()["happenings"]] == [7, 1]


def test_a_flap_without_end_is_cut_into_happenings() -> None:
    """Endless flapping starts a new entry after a while."""
    pair = Pair()
    for _ in range(100):
        emit(events.JobDied, "jobs", job="1", attempts=3, cause="c")
        pair.later(60.0)
    told = pair.later()["happenings"]
    assert len(told) == 10  # 600 s and the one event after it
    assert sum(one["counts"][""] for one in told) == 100


def test_what_one_store_does_to_many_policies_is_one_happening() -> None:
    """A store that is lost and comes back is reported once, under its own name."""
    pair = Pair()
    for before, after in (("shared", "local"), ("local", "shared")):
        for place in range(3):
            fields = {"policy": "breaker", "store": "redis", "before": before, "after": after}
            emit(events.StoreModeChanged, f"guard-{place}", cause="away", **fields)
        pair.later()
    (one,) = pair.later()["happenings"]
    assert (one["where"], one["counts"]) == ("redis", {"was lost": 1, "came back": 1})


def test_a_happening_has_the_trace_in_which_it_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where OpenTelemetry is loaded, the trace of the thread is kept; a broken tracer is not."""
    from opentelemetry import trace as tracing

    pair = Pair()
    context = tracing.SpanContext(0xABC, 0xDEF, is_remote=False)
    with tracing.use_span(tracing.NonRecordingSpan(context)):
        emit(BreakerChanged, "g", before="closed", after="open", cause="tripped", key=None)
    snapshot = {"guard": [{"name": "g", "policies": [{"policy": "breaker", "state": "open"}]}]}
    view = pair.look(snapshot)
    check_view(view)
    assert view["happenings"][0]["trace"] == view["troubles"][0]["trace"] == f"{0xABC:032x}"
    monkeypatch.setattr(tracing, "get_current_span", lambda: 1 / 0)
    emit(BreakerChanged, "h", before="closed", after="open", cause="tripped", key=None)
    assert "trace" not in pair.later()["happenings"][-1]


class _Talkative:
    kind = "talkative"

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_each_event_has_its_sentence() -> None:
    """Each kind of event has a text, also one that cannot be shown."""
    pair = Pair()
    values: dict[str, Any] = {
        "attempts": 2, "seconds": 0.5, "age": 3.0, "token": 1, "held": True, "over": False,
        "exit_code": -9, "in_flight": 3, "changes": {"limit": 3, "key": len, "mode": "off"},
        "skipped_to": 3, "expected": 1, "epoch": 1, "reported": 1e12, "counted": 600.0,
    }  # fmt: skip
    kinds = sorted({kind for _, kinds in bus._listeners for kind in kinds}, key=str)
    for kind in kinds:
        code = kind.__init__.__code__
        names = code.co_varnames[2 : code.co_argcount + code.co_kwonlyargcount]
        emit(kind, "g", **{name: values.get(name, name) for name in names})
    emit(BreakerChanged, "g", before="closed", after="open", cause="failures", key=_Talkative())
    view = pair.later()
    # A host that is ejected and restored is one happening; the breaker that cannot be told another.
    assert sum(len(one["counts"]) for one in view["happenings"]) == len(kinds) + 1 == 28
    untold = [one["what"] for one in view["happenings"] if "cannot be shown" in one["what"]]
    assert untold == ["breaker changed, which cannot be shown"]
    assert view["happenings"][-1]["what"] == untold[0]
    assert "limit 3, key, mode off" in json.dumps(view)


def test_an_event_in_the_middle_of_a_sample_waits_for_nothing() -> None:
    """The emitter may hold a lock that the sample needs: the listener must not wait."""
    pair = Pair()
    lock, inside, heard = threading.Lock(), threading.Event(), threading.Event()

    class Slow:
        def snapshot(self) -> dict[str, Any]:
            inside.set()
            with lock:
                return {"waiting": 1}

    from seawall import registry

    slow = Slow()
    registry.enter(slow, "queue", "slow")

    def emits() -> None:
        with lock:
            sampling.start()
            assert inside.wait(10)
            emit(BreakerChanged, "g", before="closed", after="open", cause="failures", key=None)
            heard.set()

    sampling = threading.Thread(target=pair.later)
    emitting = threading.Thread(target=emits)
    emitting.start()
    assert heard.wait(10)
    emitting.join(10)
    sampling.join(10)
    assert pair.later()["happenings"]


def test_samples_from_several_threads() -> None:
    """Samples at once are one after another: the past has a point for each."""
    pair = Pair()
    threads = [threading.Thread(target=pair.later) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    history = pair.watcher.history
    assert len(history["at"]) == 8


@pytest.mark.alone
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_process_is_another_pod() -> None:
    """After a fork the watcher works, also if its lock was held, and is that of the child."""
    watcher = Watcher()
    emit(BreakerChanged, "g", before="closed", after="open", cause="failures", key=None)
    watcher.sample()
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with watcher._mutex:
            held.set()
            go_on.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    child = os.fork()
    if child == 0:
        view = watcher.sample()
        alone = view["pod"]["pid"] == os.getpid() and not view["happenings"]
        os._exit(0 if alone and str(os.getpid()) in view["pod"]["name"] else 1)
    go_on.set()
    thread.join(10)
    assert os.waitpid(child, 0)[1] == 0
    assert watcher.sample()["happenings"]
    watcher.close()


def test_bounds_agree() -> None:
    """What a watcher makes of too much is within what a reader accepts."""
    assert bounds.MOST_BYTES < 256 * 1024
    assert set(WORST) == set(get_args(Tone))
