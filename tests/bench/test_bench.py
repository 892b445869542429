from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar, copy_context
from itertools import pairwise
from typing import Any

import pytest

from bench import __main__ as command
from bench import (
    durable,
    imports,
    measure,
    pipelines,
    report,
    shared,
    telemetry,
    threads,
    web,
    wsgi,
)
from bench.cases import BARE, OURS, ROWS, Row, bare, retry, work
from bench.peers import PEERS, PYRESILIENCE
from bench.served import BASELINES
from bench.targets import IMPORTS, TARGETS, THREADS, at_least, at_most
from seawall.events.bus import listening
from seawall.testing import retries
from tests.bench.found import written

pytestmark = pytest.mark.alone

CASES = [(row, name) for row in ROWS for name in row.cases]
TINY = measure.Plan(rounds=3, seconds=1e-5)


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """Keep what other tests have imported out of the collector, which each round calls."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def quiet(_text: str) -> None:
    """Report no progress."""


def call(row: Row, function):
    """Call a case's function once, as its kind wants it."""

    async def awaited():
        return await function(measure.ARGUMENT)

    return asyncio.run(awaited()) if row.kind == "async" else function(measure.ARGUMENT)


# --- Statistics ---


def test_median_is_not_moved_by_an_outlier():
    """One round that another process disturbed does not change the median."""
    assert measure.median([3.0, 1.0, 2.0, 2.0, 900.0]) == 2.0


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([5.0], 0.0), ([4.0, 4.0, 4.0], 0.0), ([1.0, 2.0, 3.0, 4.0, 5.0], 2 / 3)],
)
def test_spread_is_the_middle_half_by_the_median(samples: list[float], expected: float):
    """The spread of 1 to 5 is from 2 to 4, by 3."""
    assert measure.spread(samples) == pytest.approx(expected)


def test_ratio_compares_within_rounds():
    """A machine that halves its speed in some rounds changes no ratio, though it moves medians."""
    slowdown = [1.0, 1.0, 2.0, 2.0, 2.0]
    cheap = [10.0 * factor for factor in slowdown]
    dear = [30.0 * factor for factor in slowdown]
    assert measure.ratio(dear, cheap) == pytest.approx(3.0)
    assert measure.ratio([9.0, 1.0, 3.0], [3.0, 9.0, 1.0]) == 3.0  # both medians are 3


def test_ratio_needs_a_partner_for_each_round():
    """Cases with different numbers of rounds cannot be compared."""
    with pytest.raises(ValueError, match="shorter"):
        measure.ratio([1.0, 2.0], [1.0])


# --- Method ---


def test_each_round_has_every_case_once_and_rows_together():
    """A round is a permutation of all cases in which no row is torn apart."""
    rows = [[("a", n) for n in range(3)], [("b", n) for n in range(4)], [("c", 0)]]
    rounds = list(measure.orders(rows, 20, seed=1))
    assert len(rounds) == 20
    for order in rounds:
        assert sorted(order) == sorted(case for row in rows for case in row)
        assert sum(one[0] != other[0] for one, other in pairwise(order)) == 2
    assert {order[0][0] for order in rounds} == {"a", "b", "c"}
    assert {next(case for case in order if case[0] == "a") for order in rounds} == set(rows[0])


def test_order_follows_the_seed():
    """The same seed gives the same orders, another one gives others, and rounds differ."""
    rows = [list("abc"), list("defg")]
    first = list(measure.orders(rows, 10, seed=1))
    assert first == list(measure.orders(rows, 10, seed=1))
    assert first != list(measure.orders(rows, 10, seed=2))
    assert len(set(map(tuple, first))) > 1


def test_calibration_chooses_calls_for_the_wanted_time(monkeypatch: pytest.MonkeyPatch):
    """Calls that take a microsecond each are made 25 000 times for 25 milliseconds."""
    now = 0.0

    def slow(_argument):
        nonlocal now
        now += 1e-6

    monkeypatch.setitem(measure.CLOCKS, "cpu", lambda: now)
    contestant = measure.Contestant("slow", "sync", slow, "cpu")
    asyncio.run(contestant.calibrate(0.025))
    assert contestant.calls == pytest.approx(25_000, rel=0.01)
    asyncio.run(contestant.measure())
    assert contestant.samples == [pytest.approx(1e-6)]


def test_a_case_that_does_something_else_is_not_measured():
    """A wrapper that loses the value fails the check instead of winning the comparison."""
    contestant = measure.Contestant("wrong", "sync", lambda _argument: None, "cpu")
    with pytest.raises(AssertionError, match="wrong returned None"):
        asyncio.run(contestant.check())


def test_own_copy_shares_no_code():
    """Each case's loop has code of its own to be adapted by the interpreter."""
    copy = measure.own_copy(work)
    assert copy(3) == 3
    assert copy.__code__ is not work.__code__


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_case_leaves_in_its_context_burdens_no_other(kind: str):
    """Each measurement begins with the same context variables, whatever was set before."""
    left_over = ContextVar("left over")
    seen = []

    def careless(argument):
        seen.append(len(copy_context()))
        left_over.set(argument)

    async def async_careless(argument):
        careless(argument)

    function = async_careless if kind == "async" else careless
    contestant = measure.Contestant("careless", kind, function, "cpu")
    for _ in range(3):
        asyncio.run(contestant.measure())
    assert seen == [len(measure.VARIABLES)] * 3


def test_all_cases_of_seawall_are_measured_in_all_rounds():
    """Each case gets one positive sample for each round, in one event loop."""
    samples = asyncio.run(measure.measure(ROWS, TINY, quiet))
    assert {(row, name) for row, cases in samples.items() for name in cases} == {
        (row.name, name) for row, name in CASES
    }
    for cases in samples.values():
        for times in cases.values():
            assert len(times) == TINY.rounds
            assert min(times) > 0.0


# --- Cases ---


@pytest.mark.parametrize(("row", "name"), CASES, ids=lambda part: getattr(part, "name", part))
def test_case_returns_what_the_function_returns(row: Row, name: str):
    """What is measured gives the right answer, again and again."""
    function = row.cases[name](row.work)
    assert [call(row, function) for _ in range(3)] == [measure.ARGUMENT] * 3


@pytest.mark.parametrize("row", [row for row in ROWS if "retry" in row.name or "stack" in row.name])
def test_case_guards_what_it_is_said_to_guard(row: Row):
    """The cases with a retry really retry: two failures are not seen by the caller."""
    errors = [ValueError(), ValueError()]

    def flaky(argument):
        if errors:
            raise errors.pop()
        return argument

    async def async_flaky(argument):
        return flaky(argument)

    guarded = row.cases[OURS](async_flaky if row.kind == "async" else flaky)
    with retries("instant"):
        assert call(row, guarded) == measure.ARGUMENT
    assert errors == []


def test_each_row_begins_with_the_bare_call():
    """What all is measured by is measured in every row."""
    assert all(next(iter(BASELINES.get(row.name) or row.cases)) == BARE for row in ROWS)


def test_peers_belong_to_rows_with_a_case_of_ours():
    """Each other library stands beside a case of Seawall, under a name of its own."""
    rows = {row.name: row for row in ROWS}
    for name, peers in PEERS.items():
        assert OURS in rows[name].cases
        assert not peers.keys() & rows[name].cases.keys()


def test_targets_are_about_lines_that_exist():
    """No target is kept by being about nothing."""
    lines = {(row.name, case) for row in ROWS for case in row.cases}
    lines |= {(row, case) for row, peers in PEERS.items() for case in peers}
    lines |= {(IMPORTS, name) for name in imports.STATEMENTS}
    lines.add((telemetry.TELEMETRY, telemetry.ON))
    lines |= {(pipelines.PIPELINES, name) for name in pipelines.CASES}
    lines |= {(pipelines.IN_BATCHES, name) for name in pipelines.BATCHES}
    lines |= {(pipelines.IN_PROCESSES, name) for name in pipelines.PROCESSES}
    counts = threads.Plan().counts
    lines |= {(THREADS, f"{name}, {count} threads") for name in threads.CASES for count in counts}
    lines |= {(table, name) for table, cases in shared.CASES.items() for name in cases}
    lines |= {(verdict.table, verdict.line) for verdict in report.of_web(pods())[1]}
    lines |= {(verdict.table, verdict.line) for verdict in report.of_wsgi(thread_pods())[1]}
    lines |= {(table, name) for table, cases in written().items() for name in cases}
    assert set(TARGETS) <= lines


# --- Threads and imports ---


def test_threads_make_all_calls():
    """The calls are divided among the threads, and each is made."""
    seen: Counter[str] = Counter()
    rate = threads.rate(lambda argument: seen.update([argument]), threads._loop, 100, 4)
    assert seen == {measure.ARGUMENT: 100}
    assert rate > 0.0


def test_threads_are_measured_for_each_number():
    """Each case has a rate for each number of threads and repeat."""
    plan = threads.Plan(repeats=2, seconds=1e-4, counts=(1, 2))
    rates = threads.measure(plan, quiet, {BARE: bare, OURS: retry})
    assert {name: {n: len(found) for n, found in by.items()} for name, by in rates.items()} == {
        BARE: {1: 2, 2: 2},
        OURS: {1: 2, 2: 2},
    }


@pytest.mark.parametrize("clock", sorted(measure.CLOCKS))
def test_import_is_timed_in_a_fresh_interpreter(clock: str):
    """The import takes time although this process has done it already."""
    statements = {name: imports.STATEMENTS[name] for name in (OURS, imports.IN_USE)}
    plan = imports.Plan(rounds=1, clock=clock)
    times = imports.measure(plan, quiet, statements)
    assert all(len(taken) == 1 and taken[0] > 0.0 for taken in times.values())


# --- Report ---


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (at_most(15.0), 15.0, True),
        (at_most(15.0), 15.1, False),
        (at_least(8.0), 8.0, True),
        (at_least(8.0), 7.9, False),
    ],
)
def test_target_is_met_up_to_its_limit(target, value: float, met: bool):  # noqa: FBT001
    """The limit itself is good enough."""
    assert target.met_by(value) is met


def test_calls_are_judged_by_cost_and_by_advantage():
    """Our line is judged by its multiple of the bare call, another's by its multiple of ours."""
    samples = {"stack, sync": {BARE: [1.0] * 3, OURS: [30.0] * 3, PYRESILIENCE: [150.0] * 3}}
    (table,), verdicts = report.of_calls(samples)
    assert [(verdict.line, verdict.value, verdict.met) for verdict in verdicts] == [
        (OURS, 30.0, True),
        (PYRESILIENCE, 5.0, False),
    ]
    assert [line[3:] for line in table.lines] == [
        ["1", "", ""],
        ["30", "", "met: at most 32"],
        ["150", "5", "MISSED: at least 8"],
    ]


def test_threads_are_judged_relative_to_one():
    """Half of one thread's progress is too little on eight threads."""
    rates = {OURS: {1: [2e6, 2e6], 8: [1e6, 1e6]}}
    (table,), (verdict,) = report.of_threads(rates)
    assert table.lines == [[OURS, "2.00", "1.00", "0.50", "MISSED: at least 0.8"]]
    assert (verdict.value, verdict.met) == (0.5, False)


def test_telemetry_is_judged_relative_to_none():
    """A tenth more than without is what it may cost."""
    times = {telemetry.OFF: [1.0] * 3, telemetry.ON: [1.2] * 3}
    (table,), (verdict,) = report.of_telemetry(times)
    assert table.lines[1] == [telemetry.ON, "1200000000", "0%", "1.200", "MISSED: at most 1.1"]
    assert (verdict.line, verdict.met) == (telemetry.ON, False)


def test_telemetry_is_switched_off_again_after_each_measurement():
    """What is measured with it leaves none of it behind."""
    plan = telemetry.Plan(rounds=2, seconds=1e-4)
    times = telemetry.measure(plan, quiet)
    assert {name: len(taken) for name, taken in times.items()} == {"off": 2, "on": 2}
    assert not listening()


OURS_IN_PIPELINES = [
    pipelines.HAND,
    pipelines.UNGUARDED,
    pipelines.RETRIED,
    pipelines.GUARDED,
    pipelines.BATCHED,
]


@pytest.mark.parametrize("name", OURS_IN_PIPELINES)
def test_every_pipeline_of_the_benchmark_stores_all_items(name: str):
    """What is timed has done its work; those of other libraries are checked where they are."""
    case = (pipelines.CASES | pipelines.BATCHES)[name]
    assert pipelines.cost(name, case, 300, "cpu") > 0.0


def test_pipelines_are_judged_by_queues_by_hand_and_by_two_bare_processes():
    """Batches have a number of their own, in microseconds."""
    times = {
        pipelines.PIPELINES: {pipelines.HAND: [2e-6] * 3, pipelines.RETRIED: [3e-6] * 3},
        pipelines.IN_BATCHES: {pipelines.BATCHED: [1.5e-6] * 3},
        pipelines.IN_PROCESSES: {
            pipelines.ALONE: [4e-3] * 3,
            pipelines.BARE_TWO: [2e-3] * 3,
            pipelines.POOLED: [2.5e-3] * 3,
        },
    }
    (items, batches, processes), verdicts = report.of_pipelines(times)
    assert items.lines[1] == [pipelines.RETRIED, "3.00", "0%", "1.50", "MISSED: at most 1"]
    assert batches.lines[0] == [pipelines.BATCHED, "1.50", "0%", "met: at most 2"]
    assert processes.lines[2] == [pipelines.POOLED, "2.50", "1.60", "0.80", "MISSED: at least 0.85"]
    assert [verdict.met for verdict in verdicts] == [False, True, False]


def test_imports_are_judged_relative_to_asyncio():
    """A quarter of asyncio's time is good."""
    (table,), (verdict,) = report.of_imports({imports.MEASURE: [0.04], OURS: [0.01]})
    assert table.lines[1] == [OURS, "10.0", "0%", "0.25", "met: at most 0.333"]
    assert verdict.met


def test_what_is_shared_is_judged_by_how_much_faster_it_is():
    """A limiter is compared with one script call a decision, others' breakers with ours."""
    rates = {
        shared.SHARED_LIMIT: {shared.EVALSHA: [10.0], shared.EXACT: [60.0], shared.LEASED: [90.0]},
        shared.SHARED_BREAKER: {shared.OURS: [3000.0], shared.PYBREAKER: [3.0]},
    }
    (limits, breakers), verdicts = report.of_shared(rates)
    assert [line[3:] for line in limits.lines] == [
        ["", ""],
        ["6", "met: at least 5"],
        ["9", "MISSED: at least 10"],
    ]
    assert [line[3:] for line in breakers.lines] == [["", ""], ["1000", "met: at least 100"]]
    assert [verdict.met for verdict in verdicts] == [True, False, True]


def test_what_happens_once_is_judged_by_what_is_left_of_the_bare_rate():
    """And the outbox by how many events a second leave it."""
    tables, verdicts = report.of_durable(written())
    assert [verdict.met for verdict in verdicts] == [True] * 5
    assert tables[0].lines[1] == [durable.SINGLE, "85", "0%", "0.85", "met: at least 0.8"]
    assert tables[3].lines == [[durable.DRAIN, "60,001", "0%", "", "met: at least 6e+04"]]
    _, verdicts = report.of_durable(written(single=75.0))
    assert [verdict.met for verdict in verdicts] == [False, *[True] * 4]


def pods(p99: float = 0.02, refusal: float = 0.05, good: float = 95.0) -> dict[str, Any]:
    """Return what a measurement of pods might have found: ours lose a tenth under ten times."""
    one = web.Load(times=1, goodput=100.0, p50=0.01, p99=0.1, refused=0, refusal_p99=0, late=0)
    ten = one._replace(times=10, goodput=90.0, p99=p99, refused=900.0)
    pod = web.Pod(100.0, 0.01, [one, ten], refusal)
    names = [(handler, edge) for handler in (web.IN_LOOP, web.IN_THREAD) for edge in EDGES]
    return {
        "pods": {f"{handler}, {edge}": pod for handler, edge in names},
        "poisson": {web.SEAWALL: one._replace(goodput=good), web.BARE: one},
        "costs": {
            f"hello, {server}": {web.BARE: [1e-4], web.SEAWALL: [1.2e-4]} for server in web.SERVERS
        },
    }


EDGES = (web.SEAWALL, web.BARE)


def test_pods_are_judged_by_goodput_and_latency_under_overload():
    """Goodput by its peak, p99 by that without load; with Poisson arrivals by the bare pod."""
    tables, verdicts = report.of_web(pods())
    assert [verdict.met for verdict in verdicts] == [True] * 11
    assert [line[-1] for line in tables[0].lines[-3:]] == [
        "met: at least 0.8",
        "met: at most 3",
        "met: at most 0.1",
    ]
    assert [line[-1] for line in tables[2].lines[-2:]] == ["met: at least 0.9", "met: at most 0.15"]
    assert tables[3].lines[1][3:] == ["1.2", "met: at most 1.35"]
    _, verdicts = report.of_web(pods(p99=0.04, refusal=0.2, good=80.0))
    assert [verdict.met for verdict in verdicts[:3]] == [True, False, False]
    assert [verdict.met for verdict in verdicts[6:8]] == [False, True]


def thread_pods(good: float = 90.0, cost: float = 1.1e-4) -> dict[str, Any]:
    """Return what a measurement of pods of threads might have found."""
    one = web.Load(times=1, goodput=100.0, p50=0.01, p99=0.1, refused=0, refusal_p99=0, late=0)
    pod = web.Pod(100.0, 0.01, [one, one._replace(times=10, goodput=good)], 0.0)
    return {
        "pods": {web.SEAWALL: pod, web.BARE: pod},
        "cost": {web.BARE: [1e-4], web.SEAWALL: [cost]},
    }


def test_pods_of_threads_are_judged_by_goodput_and_cost():
    """Goodput under ten times the capacity by its peak, a request by the bare one's."""
    tables, verdicts = report.of_wsgi(thread_pods())
    assert [verdict.met for verdict in verdicts] == [True, True]
    assert tables[0].lines[-1][-1] == "met: at least 0.8"
    assert tables[1].lines[1][3:] == ["1.1", "met: at most 1.15"]
    _, verdicts = report.of_wsgi(thread_pods(good=79.0, cost=1.2e-4))
    assert [verdict.met for verdict in verdicts] == [False, False]


@pytest.mark.alone
def test_threads_of_gunicorn_are_measured_too():
    """Both Flask apps answer, and tell what of the processor they took."""
    plan = web.Plan(rounds=1, requests=64)
    with wsgi.served(web.BARE) as bare, wsgi.served(web.SEAWALL) as ours:
        cost = asyncio.run(web.hello_cost({web.BARE: bare, web.SEAWALL: ours}, plan, 8))
    assert all(len(own) == 1 and 0 < own[0] < 1 for own in cost.values())


@pytest.mark.alone
def test_what_a_request_costs_is_asked_of_real_servers():
    """Both apps answer, and tell what of the processor they took."""
    plan = web.Plan(rounds=1, requests=64)
    with web.served(web.BARE) as bare, web.served(web.SEAWALL) as ours:
        cost = asyncio.run(web.hello_cost({web.BARE: bare, web.SEAWALL: ours}, plan, 8))
    assert all(len(own) == 1 and 0 < own[0] < 1 for own in cost.values())


def test_shared_cases_of_seawall_run_on_a_real_server(monkeypatch):
    """Every case of ours makes its calls; the other libraries are not installed here."""
    ours = {
        table: {name: make for name, make in cases.items() if "Redis" not in name}
        for table, cases in shared.CASES.items()
    }
    monkeypatch.setattr(shared, "CASES", ours)
    rates = shared.measure(shared.Plan(rounds=2, seconds=0.001), quiet)
    assert all(len(rounds) == 2 for cases in rates.values() for rounds in cases.values())


def test_table_is_written_for_terminal_and_document():
    """Both forms have all cells, aligned on the terminal."""
    table = report.Table("title", ["case", "ns", "target"], [["bare", "28", ""], ["x", "7", "met"]])
    assert table.as_text().splitlines() == [
        "title",
        "",
        "case  ns  target",
        "----  --  ------",
        "bare  28",
        "x      7  met",
    ]
    assert table.as_markdown().splitlines() == [
        "### title",
        "",
        "| case | ns | target |",
        "| --- | ---: | --- |",
        "| bare | 28 |  |",
        "| x | 7 | met |",
    ]


def test_machine_is_described_but_not_named():
    """The description of the machine contains nothing that identifies it."""
    assert set(report.machine()) == {"python", "gil", "system", "cores", "load"}


# --- Command line ---


@pytest.fixture
def one_sample(monkeypatch: pytest.MonkeyPatch):
    """Measure nothing: the stack costs 40 bare calls, which is too much."""

    async def measured(rows, _plan, _progress):
        return {row.name: {BARE: [1.0], OURS: [40.0], PYRESILIENCE: [400.0]} for row in rows}

    monkeypatch.setattr(measure, "measure", measured)


@pytest.mark.usefixtures("one_sample")
@pytest.mark.parametrize(("options", "status"), [([], 0), (["--check"], 1)])
def test_a_missed_target_fails_only_where_asked(options: list[str], status: int, capsys):
    """The exit status is 0 unless --check is given."""
    assert command.main(["--only", "stack, sync", *options]) == status
    printed = capsys.readouterr().out
    assert "1 of 2 targets met" in printed
    assert "missed: stack, sync, seawall: 40, not at most 32" in printed


@pytest.mark.usefixtures("one_sample")
def test_raw_results_are_written(tmp_path, capsys):
    """--json keeps every sample, and --markdown prints a document's tables."""
    file = tmp_path / "results.json"
    command.main(["--only", "stack, sync", "--markdown", "--json", str(file)])
    results = json.loads(file.read_text("utf-8"))
    assert results["measured"]["calls"]["stack, sync"][OURS] == [40.0]
    assert [verdict["met"] for verdict in results["verdicts"]] == [False, True]
    assert "| seawall | 40000000000 |" in capsys.readouterr().out


def test_a_name_that_matches_nothing_is_refused():
    """A misspelt --only does not pass for a run without misses."""
    with pytest.raises(SystemExit, match="nothing is called dance"):
        command.main(["--only", "dance"])


def test_only_measures_what_was_asked_for(capsys):
    """A real run of two rows, which have no other library in them, from end to end."""
    assert command.main(["--quick", "--only", "others"]) == 0
    printed = capsys.readouterr().out
    assert "recommended six" in printed
    assert "retry, sync" not in printed
