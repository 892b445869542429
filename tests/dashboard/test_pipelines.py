"""Pipelines on the dashboard: rows, pipes, troubles, of one pod and of several."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seawall import Breaker, Guard
from seawall.cli.top.drawing import frame
from seawall.cli.top.history import TopHistory
from seawall.cli.top.messages import validated
from seawall.dashboard.bounds import (
    LONGEST_TEXT,
    LONGEST_WORD,
    MOST_AT_WORK,
    MOST_BYTES,
    MOST_CAUSES,
    MOST_DRAWN,
    MOST_KEYS,
    MOST_NODES,
    MOST_READINGS,
)
from seawall.dashboard.summary import service_troubles
from seawall.dashboard.view_writer import size_of
from seawall.pipeline import Collect, Pipeline
from seawall.testing import run_virtual
from tests.cli.top_worlds import text_of
from tests.dashboard.views_support import NOW, Pair, check_view

pytestmark = pytest.mark.usefixtures("nobody_else")


def _source(name: str = "orders", **told: Any) -> dict[str, Any]:
    return {
        "name": name, "read": 10, "rate": 2.0, "waits": False, "last_at": 0.5, "error": "", **told,
    }  # fmt: skip


def _stage(name: str, kind: str = "stage", **told: Any) -> dict[str, Any]:
    return {
        "name": name, "kind": kind, "workers": 2, "capacity": 10, "busy": 1, "waiting": 0,
        "oldest": 0.0, "at_work": [], "done": 8, "rate": 2.0, "retries": 0, "failed": 0,
        "degraded": 0, "dropped": 0, "dead_letters": 0, "refused": 0, "deaths": 0, "failures": {},
        "p50": 0.01, "p99": 0.2, "waits_for": "", "guard": "", **told,
    }  # fmt: skip


def _seen(
    *stages: dict[str, Any], sources: list[dict[str, Any]] | None = None, **told: Any
) -> dict[str, Any]:
    """Return the snapshot of a pipeline whose stages follow each other."""
    given_sources = [_source()] if sources is None else sources
    chain = list(stages) or [_stage("parse"), _stage("store", "sink")]
    links = [[one["name"], chain[0]["name"]] for one in given_sources]
    links += [[a["name"], b["name"]] for a, b in pairwise(chain)]
    return {
        "name": "flow", "running": True, "read": 10, "in_flight": 2, "sink": 8, "dead_letter": 0,
        "dropped": 0, "returned": 0, "degraded": 0, "oldest": None, "sources": given_sources,
        "stages": chain, "links": links, "missing": [], **told,
    }  # fmt: skip


def _sensors(*missing: str, state: str = "unavailable", minimum: int = 2) -> dict[str, Any]:
    """Return a source that collects five sensors, of which some are missing."""
    return _source(
        "sensors",
        kind="collect",
        sources=5,
        names=[f"S{number}" for number in range(1, 6)],
        minimum=minimum,
        missing=[
            {"source": name, "state": state, "since": 12.0, "cause": "ConnectionError: no signal"}
            for name in missing
        ],
    )


def _look(seen: dict[str, Any], pair: Pair | None = None) -> Any:
    view = (pair or Pair()).look({"pipeline": [seen]})
    check_view(view)
    return view


def _row(view: Any) -> Any:
    (row,) = view["sections"]["Pipelines"]
    return row


def _nodes(view: Any) -> dict[str, Any]:
    return {node["name"]: node for node in _row(view)["pipes"]["nodes"]}


# What is shown


def test_a_pipeline_has_a_row_with_its_account():
    """What was read, is in flight, stored and set aside, and the oldest item."""
    oldest = {"item": "orders:7", "age": 4.2, "stage": "parse"}
    row = _row(_look(_seen(oldest=oldest, dead_letter=3, returned=0)))
    assert (row["kind"], row["name"], row["tone"]) == ("pipeline", "flow", "ok")
    assert row["state"] == "2 items in flight"
    assert dict(row["facts"]) == {
        "read": "10",
        "in flight": "2",
        "stored": "8",
        "dead letters": "3",
        "oldest item": "4.2 s in parse",
    }
    assert row["pipes"]["oldest"] == oldest
    assert row["track"] == 2.0


def test_pipes_are_links_between_nodes_with_their_rates_and_queues():
    """Sources first; `to` has places in the list, and a link to nowhere is left out."""
    seen = _seen(
        _stage("parse", waiting=4), _stage("store", "sink"), sources=[_source("a"), _source("b")]
    )
    seen["links"] += [["parse", "gone"], ["parse"], "junk"]
    nodes = _row(_look(seen))["pipes"]["nodes"]
    assert [(one["name"], one["kind"], one["to"]) for one in nodes] == [
        ("a", "source", [2]),
        ("b", "source", [2]),
        ("parse", "stage", [3]),
        ("store", "sink", []),
    ]
    assert [(one["rate"], one["waiting"], one["capacity"]) for one in nodes[2:]] == [
        (2.0, 4.0, 10.0),
        (2.0, 0.0, 10.0),
    ]


def test_a_stage_shows_its_workers_its_quantiles_and_its_failures_by_cause():
    """What each worker does now: item, since when, and what it waits for."""
    work = {"item": "orders:7", "items": 3, "since": 1.5, "waits_for": "RateLimited: vendor"}
    stage = _stage(
        "parse", at_work=[work], failures={"ValueError": 2, "KeyError": 5}, failed=7, retries=4
    )
    node = _nodes(_look(_seen(stage, _stage("store", "sink"))))["parse"]
    assert node["at_work"] == [work]
    assert node["failures"] == [("KeyError", 5), ("ValueError", 2)]
    assert (node["p50"], node["p99"]) == (0.01, 0.2)
    assert node["counts"] == {"done": 8.0, "failed": 7.0, "retries": 4.0}
    assert node["state"] == "1 of 2 busy"


def test_a_source_shows_what_it_says_of_itself():
    """Its kind, what was read, the last item, and its own numbers and texts, without secrets."""
    source = _source(kind="redis-stream", lag=7, at="redis://u:secret@h/0", nested={"a": 1})
    node = _nodes(_look(_seen(sources=[source])))["orders"]
    facts = dict(node["facts"])
    assert facts["kind"] == "redis-stream"
    assert facts["lag"] == "7"
    assert facts["last item"] == "0.5 s ago"
    assert "secret" not in str(node)
    assert node["state"] == "reads"


@pytest.mark.parametrize(
    ("told", "state", "tone"),
    [
        ({"waits": True}, "waits for room", "ok"),
        ({"rate": 0.0, "last_at": 61.04}, "last item 61 s ago", "ok"),
        ({"rate": 0.0, "last_at": None}, "nothing yet", "ok"),
        ({"error": "OSError: gone"}, "OSError: gone", "bad"),
    ],
)
def test_a_source_says_what_it_does(told: dict[str, Any], state: str, tone: str):
    """In a few words."""
    node = _nodes(_look(_seen(sources=[_source(**told)])))["orders"]
    assert (node["state"], node["tone"]) == (state, tone)


def test_a_pipeline_that_does_not_run_is_drawn_without_alarm():
    """It has ended, or has not begun: nothing of it is wrong."""
    seen = _seen(
        _stage("parse", waits_for="CircuitOpen: x"), running=False, sources=[_sensors("S1")]
    )
    view = _look(seen)
    assert (_row(view)["state"], _row(view)["tone"]) == ("not running", "off")
    assert {node["tone"] for node in _nodes(view).values()} == {"off"}
    assert view["troubles"] == []


def test_the_slow_stage_is_the_last_one_whose_queue_is_backed_up():
    """Those before it wait for room because of it."""
    full = {"waiting": 10, "oldest": 3.0, "waits_for": "no room in 'score'"}
    stages = [
        _stage("parse", **full),
        _stage("score", waiting=5, oldest=1.0),
        _stage("store", "sink"),
    ]
    view = _look(_seen(*stages))
    pipes = _row(view)["pipes"]
    assert pipes["nodes"][pipes["slow"]]["name"] == "score"
    assert _nodes(view)["parse"]["state"] == "waits for room"
    assert view["troubles"] == [], "a stage that waits for the next one is not in trouble"


def test_a_queue_that_is_emptied_at_once_is_not_slow():
    """However full it is at this moment."""
    assert _row(_look(_seen(_stage("parse", waiting=10, oldest=0.01))))["pipes"]["slow"] is None


# What is wrong


def test_a_missing_source_is_named_with_its_cause_and_since_when():
    """On the pipe and among the troubles."""
    view = _look(_seen(sources=[_sensors("S3")]))
    node = _nodes(view)["sensors"]
    assert (node["tone"], node["state"]) == ("warn", "1 of 5 missing")
    assert [(one["name"], one["state"]) for one in node["readings"]] == [
        ("S1", "ok"),
        ("S2", "ok"),
        ("S3", "unavailable"),
        ("S4", "ok"),
        ("S5", "ok"),
    ]
    assert node["readings"][2]["seconds"] == 12.0
    (trouble,) = view["troubles"]
    assert trouble["id"] == "missing:sensors:S3"
    assert trouble["what"] == "Source S3 is missing: ConnectionError: no signal"
    assert (trouble["tone"], trouble["where"], trouble["degrades"]) == ("warn", "flow", True)
    assert trouble["since"] == NOW + 1.0 - 12.0


def test_a_stale_reading_is_missing_but_its_value_stands_in():
    """It counts towards the minimum."""
    view = _look(_seen(sources=[_sensors("S1", "S2", "S3", "S4", state="stale", minimum=5)]))
    assert "its last value stands in: ConnectionError" in view["troubles"][0]["what"]
    assert _nodes(view)["sensors"]["tone"] == "warn"


def test_too_few_sources_are_one_bad_trouble_with_the_missing_ones_below():
    """The minimum is not reached."""
    view = _look(_seen(sources=[_sensors("S1", "S2", "S3", minimum=3)]))
    assert _nodes(view)["sensors"]["state"] == "too few, 3 of 5 missing"
    assert _row(view)["tone"] == "bad"
    (problem,) = service_troubles([view], NOW + 1.0)
    assert problem["what"] == "Too few sources have a value: 2, and 3 are needed"
    assert problem["tone"] == "bad"
    assert [one["id"] for one in problem["consequences"]] == [
        f"missing:sensors:S{number}" for number in (1, 2, 3)
    ]


def test_many_missing_sources_are_one_trouble():
    """A network that is gone is one trouble, not a thousand."""
    names = [f"S{number}" for number in range(1000)]
    source = _sensors(*names) | {"sources": 1000, "names": names, "minimum": 0}
    view = _look(_seen(sources=[source]))
    (trouble,) = view["troubles"]
    assert trouble["what"].startswith("1000 sources are missing: S0, S1,")
    assert len(_nodes(view)["sensors"]["readings"]) == MOST_READINGS


def test_a_collect_without_a_pipeline_has_a_row_and_the_same_troubles():
    """In a pipeline it is shown once, as its source."""
    collect = _sensors("S3")
    alone = Pair().look({"collect": [collect]})
    check_view(alone)
    (row,) = alone["sections"]["Upstreams"]
    assert (row["kind"], row["name"], row["tone"]) == ("collect", "sensors", "warn")
    assert row["state"] == "1 of 5 sources missing"
    both = Pair().look({"collect": [collect], "pipeline": [_seen(sources=[collect])]})
    check_view(both)
    assert "Upstreams" not in both["sections"]
    assert [one["id"] for one in both["troubles"]] == [one["id"] for one in alone["troubles"]]


@pytest.mark.parametrize(("counters", "tone"), [(True, "warn"), (False, "bad")])
def test_a_stage_that_waits_says_for_what(counters: bool, tone: str):  # noqa: FBT001
    """It is bad if nothing leaves it."""
    pair = Pair()
    for done in (8, 9 if counters else 8):
        stage = _stage("parse", done=done, waiting=4, waits_for="CircuitOpen: guard 'vendor'")
        view = _look(_seen(stage, _stage("store", "sink")), pair)
    assert _nodes(view)["parse"]["tone"] == tone
    assert _nodes(view)["parse"]["state"] == "waits: CircuitOpen"
    assert _row(view)["state"] == "parse: waits: CircuitOpen"
    (trouble,) = view["troubles"]
    assert trouble["id"] == "waits:flow:parse"
    assert trouble["tone"] == tone
    expected = "Stage parse waits, 4 items wait before it: CircuitOpen: guard 'vendor'"
    assert trouble["what"] == expected


def test_a_stage_that_waits_for_its_guard_is_a_consequence_of_the_open_breaker():
    """One dependency that is down is one problem."""
    guard = Guard("vendor", Breaker(consecutive=1))
    try:
        guard.policies[0].isolate()
        stage = _stage("parse", waits_for="CircuitOpen: guard 'vendor'", guard="vendor")
        seen = {"guard": [guard.snapshot()], "pipeline": [_seen(stage, _stage("store", "sink"))]}
        (problem,) = service_troubles([Pair().look(seen)], NOW)
    finally:
        guard.close()
    assert problem["id"] == "breaker:vendor:0"
    assert [one["id"] for one in problem["consequences"]] == ["waits:flow:parse"]


def test_a_stage_that_waits_for_a_guard_that_is_well_stands_by_itself():
    """There is nothing that it follows from."""
    stage = _stage("parse", waits_for="RateLimited: x", guard="vendor")
    (trouble,) = _look(_seen(stage, _stage("store", "sink")))["troubles"]
    assert "cause" not in trouble


def test_failures_are_told_with_their_causes_and_dead_letters_follow_from_them():
    """As a share of the items of the last seconds."""
    pair = Pair()
    for failed in (0, 5):
        stage = _stage(
            "parse",
            done=5 + failed,
            failed=failed,
            dead_letters=failed,
            failures={"ValueError": failed},
        )
        view = _look(_seen(stage, _stage("store", "sink")), pair)
    assert _nodes(view)["parse"]["state"] == "50 % fail"
    (problem,) = service_troubles([view], NOW)
    assert problem["what"] == "50 % of the items fail in stage parse: ValueError (5)"
    assert problem["tone"] == "bad"
    assert [one["what"] for one in problem["consequences"]] == [
        "Stage parse sets items aside: 5 dead letters just now"
    ]


def test_items_that_go_on_as_lesser_ones_are_degraded_not_failing():
    """Worth a look, however many: they arrive. One that does not arrive is a failure."""
    stages = [_stage("parse", done=5)]
    stages += [_stage("parse", done=10, failed=5, degraded=5, failures={"TimedOut": 5})]
    stages += [_stage("parse", done=10, failed=6, degraded=5, failures={"TimedOut": 6})]
    pair = Pair()
    views = [_look(_seen(stage, _stage("store", "sink")), pair) for stage in stages]
    assert _nodes(views[1])["parse"]["state"] == "50 % degraded"
    (problem,) = service_troubles([views[1]], NOW)
    assert problem["what"] == "50 % of the items are degraded in stage parse: TimedOut (5)"
    assert problem["tone"] == "warn"
    (problem,) = service_troubles([views[2]], NOW)
    assert problem["what"].partition(" % ")[2] == "of the items fail in stage parse: TimedOut (6)"
    assert problem["tone"] == "bad"


def test_dead_letters_of_long_ago_are_counted_but_no_trouble():
    """A new viewer is not warned of old dead letters."""
    stage = _stage("parse", dead_letters=7)
    view = _look(_seen(stage, _stage("store", "sink")))
    assert view["troubles"] == []
    assert _nodes(view)["parse"]["counts"]["dead_letters"] == 7.0


def test_an_item_that_has_waited_for_too_long_is_a_trouble():
    """A minute, as in any queue."""
    view = _look(_seen(_stage("parse", waiting=3, oldest=75.0), _stage("store", "sink")))
    (trouble,) = view["troubles"]
    assert trouble["what"] == "An item has waited for 75 s for stage parse, 3 wait"
    assert _nodes(view)["parse"]["tone"] == "bad"


def test_a_source_that_cannot_be_read_is_a_bad_trouble():
    """With its error."""
    (trouble,) = _look(_seen(sources=[_source(error="OSError: gone")]))["troubles"]
    assert trouble["what"] == "Source orders cannot be read: OSError: gone"
    assert trouble["tone"] == "bad"


def test_dead_letters_that_wait_for_somebody_are_one_trouble_of_the_pipeline():
    """Also those of before; with the stage that sets more aside it is the same trouble."""
    letters = {"name": "flow", "dead": 7, "waiting": 2, "claimed": 0}
    pair = Pair()
    for dead in (0, 5):
        stage = _stage("parse", dead_letters=dead)
        seen = _seen(stage, _stage("store", "sink"))
        view = pair.look({"dead_letters": [letters], "pipeline": [seen]})
        check_view(view)
    (trouble,) = view["troubles"]
    assert (trouble["id"], trouble["where"], trouble["tone"]) == ("dead:flow", "flow", "warn")
    assert trouble["what"] == "7 dead letters wait for somebody"
    (row,) = view["sections"]["Outbox and jobs"]
    assert (row["state"], row["tone"], row["track"]) == ("7 dead letters", "warn", 7.0)
    assert dict(row["facts"]) == {"to be replayed": "2"}


def test_dead_letters_in_a_database_count_as_it_last_said():
    """It is asked now and then; each state has its number and the age of the oldest there."""
    stored = {"dead": [3, 70.0], "waiting": [2, 40.0], "claimed": [0, 0.0]}
    view = Pair().look({"dead_letters": [{"name": "flow", "stored": stored, "stored_age": 2.0}]})
    check_view(view)
    assert [one["what"] for one in view["troubles"]] == ["3 dead letters wait for somebody"]
    (row,) = view["sections"]["Outbox and jobs"]
    assert (row["state"], row["tone"]) == ("3 dead letters", "warn")
    assert dict(row["facts"]) == {"to be replayed": "2", "asked": "2 s ago"}


def test_no_dead_letters_are_no_row():
    """Each pipeline has a place for them; that it is empty is nothing to show."""
    view = Pair().look({"dead_letters": [{"name": "flow", "dead": 0, "waiting": 0, "claimed": 0}]})
    assert view["sections"] == {}
    assert view["troubles"] == []


# Bounds


def test_the_past_of_each_stage_is_its_rate():
    """It is drawn when the stage is opened."""
    pair = Pair()
    for rate in (1.0, 3.0):
        _look(_seen(_stage("parse", rate=rate), _stage("store", "sink")), pair)
    rows = pair.watcher.history["rows"]
    assert rows["pipe/flow/parse"] == [1.0, 3.0]
    assert rows["pipeline/flow"] == [2.0, 2.0]


def test_what_users_name_is_cut_and_escaped():
    """Names, causes, items and errors are anybody's text."""
    evil = "\x1b[2J\u202e<script>" + "x" * 5000
    work = {"item": evil, "items": 1, "since": 0.1, "waits_for": evil}
    stage = _stage(evil, at_work=[work], failures={evil: 1}, waits_for=evil, p99=float("nan"))
    source = _sensors("S1") | {"name": evil, "error": evil, "kind": evil, evil: evil}
    source["missing"] = [{"source": evil, "state": evil, "since": "soon", "cause": evil}]
    seen = _seen(stage, sources=[source], name=evil, oldest={"item": evil, "age": 1, "stage": evil})
    view = _look(seen)
    node = _row(view)["pipes"]["nodes"][1]
    assert len(node["name"]) <= LONGEST_WORD
    assert len(node["waits_for"]) <= LONGEST_TEXT
    assert "\x1b" not in str(view)
    assert "\u202e" not in str(view)


def test_a_pipeline_with_too_much_in_it_is_shown_as_far_as_there_is_room():
    """Of workers, causes and stages the first ones; it says how many are left out."""
    work = [{"item": f"i-{n}", "items": 1, "since": 0.1, "waits_for": ""} for n in range(500)]
    causes = {f"Error{n}": n for n in range(50)}
    stages = [_stage(f"stage-{n}", at_work=work, failures=causes) for n in range(60)]
    pipes = _row(_look(_seen(*stages)))["pipes"]
    assert len(pipes["nodes"]) == MOST_NODES
    assert pipes["more"] == 61 - MOST_NODES
    assert len(pipes["nodes"][5]["at_work"]) == MOST_AT_WORK
    assert len(pipes["nodes"][5]["failures"]) == MOST_CAUSES
    assert pipes["nodes"][5]["failures"][0] == ("Error49", 49)
    assert pipes["nodes"][-1]["to"] == []


def test_a_hundred_pipelines_are_told_and_a_few_are_drawn():
    """A view stays small enough to be sent each second."""
    work = [{"item": "i" * 80, "items": 1, "since": 0.1, "waits_for": "w" * 200} for _ in range(9)]
    stages = [_stage(f"{n}" * 40, at_work=work, failures={"c" * 200: 1}) for n in range(8)]
    snapshot = {"pipeline": [_seen(*stages, name=f"flow-{n}") for n in range(100)]}
    view = Pair().look(snapshot)
    check_view(view)
    rows = view["sections"]["Pipelines"]
    drawn = sum(len(row["pipes"]["nodes"]) for row in rows if "pipes" in row)
    assert drawn <= MOST_DRAWN
    assert len(rows) == 100
    assert dict(rows[-1]["facts"])["not drawn"] == "there are too many stages in this process"
    assert size_of(view) < MOST_BYTES


def test_a_process_without_pipelines_has_no_part_for_them():
    """Neither a section nor a track."""
    pair = Pair()
    view = pair.look({})
    assert view["sections"] == {}
    assert pair.watcher.history["rows"] == {}


def test_a_pipeline_that_cannot_be_read_is_a_row_all_the_same():
    """A pipeline whose source raises in its snapshot still has a row."""
    view = Pair().look({"pipeline": [{"name": "flow", "snapshot_error": "OSError"}]})
    check_view(view)
    assert _row(view)["state"] == "unreadable"
    assert view["troubles"][0]["what"] == "The pipeline cannot be read"


# Of a real pipeline


def test_the_snapshot_of_a_real_pipeline_is_understood():
    """Its stages and pipes, the reading that is missing, and the stage that others wait for."""
    pair = Pair()
    views: list[Any] = []

    async def well() -> float:
        return 20.0

    async def dead() -> float:
        raise ConnectionError("no signal")

    async def main() -> None:
        sensors = Collect(
            {"S1": well, "S2": well, "S3": dead}, minimum=2, within=1.0, name="sensors"
        )
        pipeline = Pipeline("analytics")
        go_on = asyncio.Event()

        async def enrich(batch: Any) -> Any:
            return batch

        async def slow(batch: Any) -> Any:
            await go_on.wait()
            return batch

        hot, cold = (
            pipeline.read(sensors.every(0.1))
            .stage(enrich, workers=1, capacity=2)
            .stage(slow, workers=1, capacity=2)
            .branch(bool, name="is_hot")
        )
        hot.sink(print, name="alarm", on_failure="drop")
        cold.sink(print, name="database", on_failure="drop")
        running = asyncio.create_task(pipeline.run())
        await asyncio.sleep(5.0)  # noqa: TID251 - on virtual time
        views.append(pair.look({"pipeline": [pipeline.snapshot() | {"name": "analytics"}]}))
        pipeline.stop(0.0)
        go_on.set()
        await running

    run_virtual(main())
    (view,) = views
    check_view(view)
    pipes = _row(view)["pipes"]
    nodes = pipes["nodes"]
    assert [(one["name"], one["kind"]) for one in nodes] == [
        ("sensors", "source"),
        ("enrich", "stage"),
        ("slow", "stage"),
        ("is_hot", "branch"),
        ("alarm", "sink"),
        ("database", "sink"),
    ]
    assert [one["to"] for one in nodes] == [[1], [2], [3], [4, 5], [], []]
    assert [one["name"] for one in nodes[0]["readings"] if one["state"] != "ok"] == ["S3"]
    assert nodes[pipes["slow"]]["name"] == "slow"
    assert nodes[1]["state"] == "waits for room"
    assert nodes[2]["at_work"][0]["item"].startswith("sensors:")
    assert [one["what"] for one in view["troubles"]] == [
        "Source S3 is missing: ConnectionError: no signal"
    ]


def test_a_pipeline_of_this_process_is_found():
    """It is entered in the registry for as long as it lives."""
    pipeline = Pipeline("found")
    pipeline.read([1]).sink(print, name="out")
    view = Pair().later()
    assert [row["name"] for row in view["sections"]["Pipelines"]] == ["found"]
    assert pipeline


def test_seawall_top_has_a_line_for_each_pipeline():
    """Its state and its account; the stages are on the page."""
    stage = _stage("parse", waits_for="CircuitOpen: x", waiting=4)
    view = _look(_seen(stage, _stage("store", "sink")))
    told = {"title": "t", "at": NOW + 1.0, "operator": None, "views": [view], "history": None}
    read = validated(json.loads(json.dumps(told))).message
    text = text_of(frame(read, TopHistory().take(read), 160, None), 1000)
    (line,) = [one for one in text.split("\n") if "pipeline parse: waits: CircuitOpen" in one]
    assert "flow" in line
    assert "in flight 2" in line


# Anything may be in a snapshot

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
NAMES = (
    *("name", "kind", "source", "state", "since", "cause", "rate", "waiting", "capacity", "busy"),
    *("oldest", "p99", "failures", "at_work", "waits_for", "error", "missing", "names", "sources"),
    *("minimum", "done", "failed", "dead_letters", "item", "items", "guard", "last_at"),
)
INNER = st.recursive(
    LEAVES | st.sampled_from(["sink", "stale", 5e-324]),
    lambda inner: st.lists(
        inner | st.dictionaries(st.sampled_from(["source", "state", "item", "since"]), inner),
        max_size=3,
    ),
    max_leaves=4,
)
SHOWN = st.dictionaries(st.sampled_from(NAMES), INNER)
PIPELINES = st.fixed_dictionaries(
    {},
    optional={
        "name": LEAVES,
        "running": st.booleans() | LEAVES,
        "oldest": SHOWN | LEAVES,
        "sources": st.lists(SHOWN | LEAVES, max_size=4) | LEAVES,
        "stages": st.lists(SHOWN | LEAVES, max_size=6) | LEAVES,
        "links": st.lists(st.lists(LEAVES, max_size=3) | LEAVES, max_size=6) | LEAVES,
    },
)


@settings(deadline=None)
@given(st.lists(PIPELINES, max_size=3), st.lists(SHOWN, max_size=2))
@example([{"stages": [{"kind": []}]}], [])
def test_any_shape_gives_a_view(pipelines: list[Any], collects: list[Any]):
    """Nothing raises, and the view is one."""
    pair = Pair()
    for _ in range(2):
        view = pair.look({"pipeline": pipelines, "collect": collects})
    check_view(view)
    service_troubles([view, view], NOW)


def test_more_missing_than_are_named_one_by_one():
    """`MOST_KEYS` are."""
    names = [f"S{number}" for number in range(MOST_KEYS)]
    view = _look(_seen(sources=[_sensors(*names) | {"sources": 9, "minimum": 0}]))
    assert len(view["troubles"]) == MOST_KEYS
