"""From measurements to tables and verdicts."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import imports, pipelines
from bench.cases import BARE, OURS
from bench.measure import median, ratio, spread
from bench.peers import DISTRIBUTIONS, PEERS
from bench.shared import EVALSHA, SHARED_BREAKER, SHARED_LIMIT
from bench.shared import OURS as BREAKER
from bench.targets import IMPORTS, POISSON, TARGETS, THREADS, WEB, WSGI
from bench.telemetry import OFF, TELEMETRY
from bench.web import BARE as BARE_APP
from bench.web import IN_LOOP, IN_THREAD, SEAWALL, Load, Pod
from bench.wsgi import HELLO, WAITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.durable import Rates as DurableRates
    from bench.measure import Samples
    from bench.shared import Rates as SharedRates
    from bench.threads import Rates


class Verdict(NamedTuple):
    """How a number compares with its target."""

    table: str
    line: str
    target: str
    value: float
    met: bool

    def __str__(self) -> str:
        return f"{'met' if self.met else 'MISSED'}: {self.target}"


class Table(NamedTuple):
    """One table; the first column is text, the last the verdict, all between are numbers."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]

    def as_text(self) -> str:
        """Return it for a terminal."""
        widths = [max(map(len, column)) for column in zip(self.columns, *self.lines, strict=True)]
        last = len(widths) - 1
        rows = [
            "  ".join(
                cell.ljust(width) if number in (0, last) else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in (self.columns, ["-" * width for width in widths], *self.lines)
        ]
        return "\n".join([self.title, "", *rows])

    def as_markdown(self) -> str:
        """Return it for a Markdown document."""
        rules = ["---", *["---:"] * (len(self.columns) - 2), "---"]
        rows = ["| " + " | ".join(line) + " |" for line in (self.columns, rules, *self.lines)]
        return "\n".join([f"### {self.title}", "", *rows])


Section = tuple[list[Table], list[Verdict]]


def _judge(table: str, line: str, value: float, verdicts: list[Verdict]) -> str:
    target = TARGETS.get((table, line))
    if target is None:
        return ""
    verdict = Verdict(table, line, str(target), value, target.met_by(value))
    verdicts.append(verdict)
    return str(verdict)


def _times(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def of_calls(samples: Samples) -> Section:
    """Return a table for each row."""
    tables: list[Table] = []
    verdicts: list[Verdict] = []
    for row, cases in samples.items():
        lines = []
        for name, times in cases.items():
            cost = ratio(times, cases[BARE])
            value = cost
            advantage = ""
            if name in PEERS.get(row, ()):
                value = ratio(times, cases[OURS])
                advantage = _times(value)
            lines.append(
                [
                    name,
                    f"{median(times) * 1e9:.0f}",
                    f"{spread(times):.0%}",
                    _times(cost),
                    advantage,
                    _judge(row, name, value, verdicts),
                ]
            )
        bare = "bare await" if row.endswith("async") else "bare call"
        columns = ["case", "ns a call", "spread", f"x {bare}", "seawall is x cheaper", "target"]
        tables.append(Table(row, columns, lines))
    return tables, verdicts


def of_web(measured: dict[str, Any]) -> Section:
    """Return tables of pods under load, of Poisson arrivals, and of what each server costs."""
    verdicts: list[Verdict] = []
    tables = []
    for handler in (IN_LOOP, IN_THREAD):
        pods = {edge: measured["pods"][f"{handler}, {edge}"] for edge in (SEAWALL, BARE_APP)}
        pod = pods[SEAWALL]
        # At capacity it is a matter of chance whether a queue forms; it may last for a moment.
        longest = max(load.p99 for load in pod.loads if load.times > 1)
        judged = {
            "least goodput of its peak": _least_goodput(pod),
            "longest p99 of that without load": longest / pod.unloaded,
            "a refusal of an answer": pod.refusal_cost,
        }
        tables.append(_overload(f"{WEB}, {handler}", pods, judged, verdicts))
    tables.append(_poisson(measured["poisson"], verdicts))
    for server, cost in measured["costs"].items():
        tables.append(_cost(f"{WEB}, {server}", cost, verdicts))
    return tables, verdicts


def of_wsgi(measured: dict[str, Any]) -> Section:
    """Return tables of a pod of threads under load, and of what a request costs."""
    verdicts: list[Verdict] = []
    pods = measured["pods"]
    judged = {"least goodput of its peak": _least_goodput(pods[SEAWALL])}
    tables = [
        _overload(f"{WSGI}, {WAITS}", pods, judged, verdicts),
        _cost(f"{WSGI}, {HELLO}", measured["cost"], verdicts),
    ]
    return tables, verdicts


def _least_goodput(pod: Pod) -> float:
    goodput = [load.goodput for load in pod.loads]
    return min(goodput) / (max(goodput) or 1.0)


def _overload(
    name: str, pods: dict[str, Pod], judged: dict[str, float], verdicts: list[Verdict]
) -> Table:
    """Return the table of pods under each load, with what is judged of ours."""
    lines = []
    for edge, pod in pods.items():
        peak = max(load.goodput for load in pod.loads) or 1.0
        lines += [
            [
                f"{edge}, {load.times} x capacity",
                f"{load.goodput:.0f}",
                f"{load.goodput / peak:.0%}",
                f"{load.p50 * 1e3:.1f}",
                f"{load.p99 * 1e3:.1f}",
                f"{load.p99 / pod.unloaded:.1f}",
                f"{load.refused:.0f}",
                f"{load.late:.0f}",
                "",
            ]
            for load in pod.loads
        ]
    for line, value in judged.items():
        verdict = _judge(name, line, value, verdicts)
        lines.append([line, "", "", "", "", f"{value:.2f}", "", "", verdict])
    columns = [
        "load",
        "good /s",
        "of peak",
        "p50 ms",
        "p99 ms",
        "x unloaded",
        "refused /s",
        "late /s",
        "target",
    ]
    return Table(name, columns, lines)


def _cost(name: str, cost: dict[str, list[float]], verdicts: list[Verdict]) -> Table:
    """Return the table of what a request costs with and without us."""
    lines = [
        [
            case,
            f"{median(own) * 1e6:.1f}",
            f"{spread(own):.0%}",
            _times(ratio(own, cost[BARE_APP])),
            _judge(name, case, ratio(own, cost[BARE_APP]), verdicts),
        ]
        for case, own in cost.items()
    ]
    return Table(name, ["case", "us a request", "spread", "x bare", "target"], lines)


def _poisson(loads: dict[str, Load], verdicts: list[Verdict]) -> Table:
    lines = [
        [
            edge,
            f"{load.goodput:.0f}",
            f"{load.p50 * 1e3:.1f}",
            f"{load.p99 * 1e3:.1f}",
            f"{load.refused:.0f}",
            f"{load.late:.0f}",
            "",
        ]
        for edge, load in loads.items()
    ]
    ours, bare = loads[SEAWALL], loads[BARE_APP]
    for line, value in (
        ("goodput of the bare one's", ours.goodput / (bare.goodput or 1.0)),
        ("p99 in seconds", ours.p99),
    ):
        judged = _judge(POISSON, line, value, verdicts)
        lines.append([line, f"{value:.2f}", "", "", "", "", judged])
    columns = ["pod", "good /s", "p50 ms", "p99 ms", "refused /s", "late /s", "target"]
    return Table(POISSON, columns, lines)


def of_shared(rates: SharedRates) -> Section:
    """Return a table for each thing that pods share: how fast Seawall is, beside the others."""
    verdicts: list[Verdict] = []
    tables = []
    for table, cases in rates.items():
        lines = []
        for name, own in cases.items():
            times, value = "", 0.0
            if table == SHARED_LIMIT and name != EVALSHA:
                value = ratio(own, cases[EVALSHA])
                times = _times(value)
            elif table == SHARED_BREAKER and name != BREAKER:
                value = ratio(cases[BREAKER], own)
                times = _times(value)
            judged = _judge(table, name, value, verdicts)
            lines.append([name, f"{median(own):,.0f}", f"{spread(own):.0%}", times, judged])
        columns = ["case", "a second", "spread", "seawall is x faster", "target"]
        tables.append(Table(table, columns, lines))
    return tables, verdicts


def of_durable(rates: DurableRates) -> Section:
    """Return a table for each comparison: how much is done, beside the same without Seawall."""
    verdicts: list[Verdict] = []
    tables = []
    for table, cases in rates.items():
        lines = []
        base = next(iter(cases.values()))
        for name, own in cases.items():
            # What has nothing to be compared with is judged by itself.
            value = ratio(own, base) if len(cases) > 1 else median(own)
            times = f"{value:.2f}" if len(cases) > 1 else ""
            judged = _judge(table, name, value, verdicts)
            lines.append([name, f"{median(own):,.0f}", f"{spread(own):.0%}", times, judged])
        columns = ["case", "a second", "spread", "of the first", "target"]
        tables.append(Table(table, columns, lines))
    return tables, verdicts


def of_threads(rates: Rates) -> Section:
    """Return the table of the threads' progress, each case relative to itself on one thread."""
    verdicts: list[Verdict] = []
    lines = []
    for name, by_count in rates.items():
        alone = by_count[1]
        relative = {count: ratio(together, alone) for count, together in by_count.items()}
        judged = [_judge(THREADS, f"{name}, {n} threads", r, verdicts) for n, r in relative.items()]
        cells = [f"{value:.2f}" for value in relative.values()]
        rate = f"{median(alone) / 1e6:.2f}"
        lines.append([name, rate, *cells, " ".join(filter(None, judged))])
    counts = next(iter(rates.values()))
    repeats = len(next(iter(counts.values())))
    heads = [f"{count} thread{'s' * (count > 1)}" for count in counts]
    columns = ["stack", "M calls/s on one", *heads, "target"]
    title = f"threads: calls a second of all, relative to one thread ({repeats} repeats, wall time)"
    return [Table(title, columns, lines)], verdicts


def of_telemetry(times: dict[str, list[float]]) -> Section:
    """Return the table of the five-policy stack with telemetry off and on."""
    verdicts: list[Verdict] = []
    lines = []
    for name, taken in times.items():
        cost = ratio(taken, times[OFF])
        cells = [f"{median(taken) * 1e9:.0f}", f"{spread(taken):.0%}", f"{cost:.3f}"]
        lines.append([name, *cells, _judge(TELEMETRY, name, cost, verdicts)])
    columns = ["telemetry", "ns a call", "spread", "x off", "target"]
    title = f"{TELEMETRY}: five policies, asked once a second ({len(times[OFF])} rounds)"
    return [Table(title, columns, lines)], verdicts


def of_pipelines(times: dict[str, dict[str, list[float]]]) -> Section:
    """Return the tables of items through two stages, and of computing in two processes."""
    verdicts: list[Verdict] = []
    one_by_one, in_batches, in_processes = [], [], []
    items = times[pipelines.PIPELINES]
    for name, taken in items.items():
        cost = ratio(taken, items[pipelines.HAND])
        cells = [f"{median(taken) * 1e6:.2f}", f"{spread(taken):.0%}", f"{cost:.2f}"]
        judged = _judge(pipelines.PIPELINES, name, cost, verdicts)
        one_by_one.append([name, *cells, judged])
    for name, taken in times[pipelines.IN_BATCHES].items():
        micros = median(taken) * 1e6
        judged = _judge(pipelines.IN_BATCHES, name, micros, verdicts)
        in_batches.append([name, f"{micros:.2f}", f"{spread(taken):.0%}", judged])
    computed = times[pipelines.IN_PROCESSES]
    for name, taken in computed.items():
        faster = ratio(computed[pipelines.ALONE], taken)
        share = ratio(computed[pipelines.BARE_TWO], taken)
        cells = [f"{median(taken) * 1e3:.2f}", f"{faster:.2f}", f"{share:.2f}"]
        judged = _judge(pipelines.IN_PROCESSES, name, share, verdicts)
        in_processes.append([name, *cells, judged])
    rounds = f"({len(items[pipelines.HAND])} rounds)"
    return [
        Table(
            f"{pipelines.PIPELINES}: two stages, item by item {rounds}",
            ["with", "us an item", "spread", "x by hand", "target"],
            one_by_one,
        ),
        Table(
            f"{pipelines.IN_BATCHES} {rounds}",
            ["with", "us an item", "spread", "target"],
            in_batches,
        ),
        Table(
            f"{pipelines.IN_PROCESSES}: wall time {rounds}",
            ["with", "ms an item", "x one process", "x two bare ones", "target"],
            in_processes,
        ),
    ], verdicts


def of_imports(times: dict[str, list[float]]) -> Section:
    """Return the table of import times, relative to asyncio's."""
    verdicts: list[Verdict] = []
    lines = []
    for name, taken in times.items():
        share = ratio(taken, times[imports.MEASURE])
        cells = [f"{median(taken) * 1e3:.1f}", f"{spread(taken):.0%}", f"{share:.2f}"]
        lines.append([name, *cells, _judge(IMPORTS, name, share, verdicts)])
    columns = ["import", "ms", "spread", "x asyncio", "target"]
    rounds = len(times[imports.MEASURE])
    return [Table(f"imports, in fresh interpreters ({rounds} rounds)", columns, lines)], verdicts


def machine() -> dict[str, object]:
    """Return what of the machine bears on the numbers; nothing that tells which one it is."""
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(usable),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are compared."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
