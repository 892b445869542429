"""Reports of simulated worlds: a table for the terminal, and plain data for JSON.

report = SimulationReport("outage", "A vendor is down for 30 s.", [Runs(...), Runs(...)])
print(report.table())
json.dumps(report.data())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from seawall.sim.records import GuardRecord, ServiceRecord
from seawall.sim.result import SimulationResult
from seawall.sim.seeds import Estimate, Runs

Measure = Callable[[SimulationResult], float]


class Row(NamedTuple):
    """One number of a result: what it is called, how it is measured and written."""

    key: str
    label: str
    measure: Measure
    unit: str = ""  # `%` for shares, or what follows the number


class SimulationReport:
    """Worlds that belong together, each run from one seed or more, side by side."""

    def __init__(self, name: str, about: str, worlds: Sequence[Runs]) -> None:
        """Compare `worlds`; the first is the one the others are compared with."""
        self.name = name
        self.about = about
        self.worlds = tuple(worlds)

    def rows(self) -> list[Row]:
        """Return what is measured of these worlds."""
        result = self.worlds[0].results[0]
        rows = [Row("share", "served", SimulationResult.share, "%")]
        if result.trouble is not None:
            begin, end = result.trouble
            rows += list(_phases(begin, end, result.seconds, result.step))
        for group in result.clients if len(result.clients) > 1 else ():
            share = partial(SimulationResult.share, of=group)
            rows.append(Row(f"share of {group}", f"  {group}", share, "%"))
        rows += [
            Row("goodput", "goodput", SimulationResult.goodput, "/s"),
            Row("p50", "p50", lambda one: one.quantile(0.5), "s"),
            Row("p99", "p99", lambda one: one.quantile(0.99), "s"),
        ]
        for service in result.services:
            load = partial(SimulationResult.load, service=service)
            rows.append(Row(f"load on {service}", f"load on {service}", load, "/s"))
            if result.trouble is not None:
                begin, end = result.trouble
                measure = partial(load, since=begin, until=end)
                rows.append(Row(f"load on {service} during", "  during", measure, "/s"))
        for outcome in ("degraded", "refused", "failed", "gave_up"):
            ended = partial(SimulationResult.ended, outcome=outcome)
            rows.append(Row(outcome, outcome.replace("_", " "), ended))
        rows.append(Row("queue_age", "oldest in a queue", oldest_in_queue, "s"))
        return rows

    def data(self) -> dict[str, Any]:
        """Return everything as plain data: estimates, each run, and the series of the first."""
        rows = self.rows()
        return {
            "name": self.name,
            "about": self.about,
            "worlds": [
                {
                    "name": runs.name,
                    "verdict": runs.verdict,
                    "verdicts": runs.verdicts,
                    "estimates": {row.key: _finite(runs.estimate(row.measure)) for row in rows},
                    "runs": [result.summary() for result in runs.results],
                    "series": runs.results[0].series(),
                }
                for runs in self.worlds
            ],
        }

    def table(self) -> str:
        """Return the report as text for a terminal."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        first = self.worlds[0].results[0]
        seeds = len(self.worlds[0].results)
        yield f"{self.name}: {self.about}"
        chosen = f"{seeds} seeds, means with 95 % intervals" if seeds > 1 else f"seed {first.seed}"
        yield f"{first.seconds:g} s, {chosen}"
        for one in first.disturbances:
            until = "to the end" if one.until == inf else f"to {one.until:g} s"
            yield f"  {one.at:g} s {until}: {one.text}"
        yield ""
        cells = [["", *(runs.name for runs in self.worlds)]]
        for row in self.rows():
            written = [write(runs.estimate(row.measure), row.unit) for runs in self.worlds]
            cells.append([row.label, *written])
        yield from columns(cells)
        yield ""
        width = max(len(runs.name) for runs in self.worlds)
        for runs in self.worlds:
            yield f"{runs.name:<{width}}  {runs.verdict}"


def columns(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        first, *others = line
        padded = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        yield "   ".join([f"{first:<{widths[0]}}", *padded]).rstrip()


def write(estimate: Estimate, unit: str) -> str:
    """Return an estimate as text, with its interval if there are several seeds."""
    if estimate.mean == inf:
        return "never"
    scale, digits = (100.0, 1) if unit == "%" else (1.0, _digits(estimate.mean, unit))
    text = f"{estimate.mean * scale:,.{digits}f}".replace(",", " ")
    if estimate.high > estimate.low:
        text += f" ± {(estimate.high - estimate.mean) * scale:.{digits}f}"
    return f"{text} {unit}".rstrip() if unit != "/s" else f"{text}{unit}"


def oldest_in_queue(result: SimulationResult) -> float:
    """Return for how long the oldest call has waited in any queue, in the worst step."""
    return max((age for record in queues_of(result) for age in record.queue_age), default=0.0)


def queues_of(result: SimulationResult) -> list[ServiceRecord | GuardRecord]:
    """Return the records that have queues."""
    return [*result.services.values(), *result.guards.values()]


def _digits(value: float, unit: str) -> int:
    """Return how many digits follow the point: three significant ones, and none for counts."""
    if not value or (not unit and value == int(value)):
        return 0
    return next((digits for digits, least in ((0, 1000.0), (1, 10.0)) if value >= least), 3)


def _finite(estimate: Estimate) -> dict[str, float | None]:
    return {key: None if one == inf else round(one, 6) for key, one in estimate._asdict().items()}


def _phases(begin: float, end: float, seconds: float, step: float) -> Iterator[Row]:
    spans = {"before": (0.0, begin), "during": (begin, end), "after": (end, seconds)}
    for name, (since, until) in spans.items():
        if round(until / step) > round(since / step):
            share = partial(SimulationResult.share, since=since, until=until)
            yield Row(name, f"  {name}", share, "%")
