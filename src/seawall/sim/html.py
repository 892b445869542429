"""A report as one HTML page: text and inline SVG charts, without scripts and other files.

The worlds of a report are columns, and each kind of chart is a row with one scale, so that before
and after can be compared by eye. Charts show the first seed; the table shows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import chain, groupby
from math import ceil, floor, inf, log10
from typing import Final, NamedTuple

from seawall.sim.records import OUTCOMES
from seawall.sim.report import SimulationReport, queues_of, write
from seawall.sim.result import SimulationResult

WIDTH: Final = 560
HEIGHT: Final = 150
LEFT: Final = 46
BOTTOM: Final = 20
TOP: Final = 8
BAND: Final = 22  # height of the band of one breaker
MOST_POINTS: Final = 600  # points of a line; of more, the mean of several is drawn
NEAR: Final = 3  # draw a capacity up to this multiple of the highest load
Values = Sequence[float | None]


class ChartLine(NamedTuple):
    """One line of a chart; `style` is a class of the style sheet."""

    label: str
    style: str
    values: Values


class Chart(NamedTuple):
    """Lines over time with one scale."""

    title: str
    unit: str
    lines: list[ChartLine]
    limit: float | None = None  # A level to mark, such as a capacity

    @property
    def highest(self) -> float:
        """The largest value."""
        known = [value for line in self.lines for value in line.values if value is not None]
        return max([*known, self.limit or 0.0], default=0.0)


def page(report: SimulationReport) -> str:
    """Return the report as an HTML page."""
    results = [runs.results[0] for runs in report.worlds]
    title = escape(f"{report.name}: {report.about}")
    return "".join(
        [
            "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{title}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(report.name)}</h1><p class='about'>{escape(report.about)}</p>",
            _history(results[0]),
            "<div class='worlds'>",
            *(
                f"<section><h2>{escape(runs.name)}</h2>"
                f"<p class='verdict {runs.results[0].verdict.kind.replace(' ', '-')}'>"
                f"{escape(runs.verdict)}</p></section>"
                for runs in report.worlds
            ),
            "</div>",
            _table(report),
            *_rows(results),
            f"<footer>Charts show seed {results[0].seed}; shaded is the disturbance. Made by",
            " <code>seawall simulate</code>.</footer></body></html>",
        ]
    )


def _history(result: SimulationResult) -> str:
    items = "".join(
        f"<li>{one.at:g} s {'to the end' if one.until == inf else f'to {one.until:g} s'}: "
        f"{escape(one.text)}</li>"
        for one in result.disturbances
    )
    return f"<ul class='history'>{items}</ul>" if items else ""


def _table(report: SimulationReport) -> str:
    head = "".join(f"<th>{escape(runs.name)}</th>" for runs in report.worlds)
    lines = []
    for row in report.rows():
        written = (write(runs.estimate(row.measure), row.unit) for runs in report.worlds)
        cells = "".join(f"<td>{escape(one)}</td>" for one in written)
        inner = " class='inner'" if row.label.startswith(" ") else ""
        lines.append(f"<tr><th{inner}>{escape(row.label.strip())}</th>{cells}</tr>")
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _rows(results: Sequence[SimulationResult]) -> Iterator[str]:
    """Yield each kind of chart, of all worlds side by side."""
    charts = [_charts(result) for result in results]
    for title in dict.fromkeys(chain.from_iterable(charts)):
        same = [own.get(title) for own in charts]
        highest = max(chart.highest for chart in same if chart is not None)
        drawn = "".join(
            f"<section>{'' if chart is None else _draw(chart, highest, result)}</section>"
            for chart, result in zip(same, results, strict=True)
        )
        yield f"<h3>{escape(title)}</h3><div class='worlds'>{drawn}</div>"
    if any(guard.breaker for result in results for guard in result.guards.values()):
        drawn = "".join(f"<section>{_breakers(result)}</section>" for result in results)
        yield f"<h3>Breakers</h3><div class='worlds'>{drawn}</div>"


def _charts(result: SimulationResult) -> dict[str, Chart]:
    steps, step = result.steps, result.step
    charts = []
    for name, clients in result.clients.items():
        lines = [ChartLine("calls", "came", [n / step for n in clients.came[:steps]])]
        lines += [
            ChartLine(outcome.replace("_", " "), outcome, [n / step for n in counts[:steps]])
            for outcome, counts in ((one, clients.ended[one]) for one in OUTCOMES)
            if any(counts)
        ]
        charts.append(Chart(f"Goodput of {name}", "/s", lines))
        series = result.series()["clients"][name]
        lines = [ChartLine(key, key, series[key]) for key in ("p99", "p95", "p50")]
        charts.append(Chart(f"Latency of answers to {name}", "s", lines))
    for name, service in result.services.items():
        lines = [
            ChartLine("calls", "came", [n / step for n in service.calls[:steps]]),
            ChartLine("failed", "failed", [n / step for n in service.failed[:steps]]),
        ]
        highest = max(service.calls[:steps], default=0) / step
        near = service.capacity is not None and service.capacity <= NEAR * highest
        limit = service.capacity if near else None
        charts.append(Chart(f"Load on {name}", "/s", lines, limit))
    ages = [
        ChartLine(record.name, f"line{index % 4}", record.queue_age)
        for index, record in enumerate(queues_of(result))
        if any(record.queue_age)
    ]
    if ages:
        charts.append(Chart("Age of the oldest in a queue", "s", ages))
    return {chart.title: chart for chart in charts}


def _draw(chart: Chart, highest: float, result: SimulationResult) -> str:
    top = _nice(highest)
    bottom = HEIGHT - BOTTOM

    def y(value: float) -> float:
        return round(bottom - value / top * (bottom - TOP), 1)

    parts = [_shade(result, TOP, bottom)]
    for share in (0.0, 0.5, 1.0):
        level = y(top * share)
        parts.append(
            f"<line class='grid' x1='{LEFT}' x2='{WIDTH}' y1='{level}' y2='{level}'/>"
            f"<text x='{LEFT - 5}' y='{level + 3.5}' text-anchor='end'>{top * share:g}</text>"
        )
    parts.append(_axis(result, bottom))
    if chart.limit is not None:
        level = y(chart.limit)
        parts.append(
            f"<line class='limit' x1='{LEFT}' x2='{WIDTH}' y1='{level}' y2='{level}'>"
            f"<title>capacity {chart.limit:g}/s</title></line>"
        )
    parts.extend(_path(line, result, y) for line in chart.lines)
    legend = "".join(f"<span class='{one.style}'>{escape(one.label)}</span>" for one in chart.lines)
    limit = "" if chart.limit is None else f"<span class='limit'>capacity {chart.limit:g}</span>"
    return (
        f"<figure><svg viewBox='0 0 {WIDTH + 8} {HEIGHT}' role='img'"
        f" aria-label='{escape(chart.title)}'>{''.join(parts)}</svg>"
        f"<figcaption>{chart.unit} {legend}{limit}</figcaption></figure>"
    )


def _path(line: ChartLine, result: SimulationResult, y: Callable[[float], float]) -> str:
    width = max(1, ceil(len(line.values) / MOST_POINTS))
    points: list[str] = []
    move = "M"
    for first in range(0, len(line.values), width):
        known = [value for value in line.values[first : first + width] if value is not None]
        if not known:
            move = "M"  # a gap
            continue
        x = _x((first + 0.5 * width) * result.step, result)
        points.append(f"{move}{x} {y(sum(known) / len(known))}")
        move = "L"
    title = f"<title>{escape(line.label)}</title>"
    return f"<path class='{line.style}' d='{''.join(points)}'>{title}</path>"


def _breakers(result: SimulationResult) -> str:
    shown = [guard for guard in result.guards.values() if guard.breaker]
    height = BAND * len(shown) + BOTTOM
    parts = []
    for index, guard in enumerate(shown):
        top = index * BAND
        at = 0
        for state, same in groupby(guard.breaker):
            count = len(list(same))
            left, right = _x(at * result.step, result), _x((at + count) * result.step, result)
            parts.append(
                f"<rect class='{escape(state)}' x='{left}' y='{top + 2}'"
                f" width='{round(right - left, 1)}' height='{BAND - 4}'>"
                f"<title>{escape(guard.name)}: {escape(state)} from {at * result.step:g} s</title>"
                "</rect>"
            )
            at += count
        parts += [f"<text class='name' x='{LEFT + 6}' y='{top + 15}'>{escape(guard.name)}</text>"]
    parts.append(_axis(result, height - BOTTOM))
    states = ("closed", "open", "half_open")
    legend = "".join(f"<span class='{one}'>{one.replace('_', ' ')}</span>" for one in states)
    return (
        f"<figure><svg viewBox='0 0 {WIDTH + 8} {height}' role='img' aria-label='Breakers'>"
        f"{''.join(parts)}</svg><figcaption>{legend}</figcaption></figure>"
    )


def _shade(result: SimulationResult, top: float, bottom: float) -> str:
    parts = []
    for one in result.disturbances:
        left = _x(one.at, result)
        width = max(1.0, round(_x(min(one.until, result.seconds), result) - left, 1))
        parts.append(
            f"<rect class='trouble' x='{left}' y='{top}' width='{width}' height='{bottom - top}'>"
            f"<title>{escape(one.text)}</title></rect>"
        )
    return "".join(parts)


def _axis(result: SimulationResult, bottom: float) -> str:
    return "".join(
        f"<text x='{_x(at, result)}' y='{bottom + 14}' text-anchor='middle'>{at:g} s</text>"
        for at in (result.seconds * part / 4 for part in range(5))
    )


def _x(at: float, result: SimulationResult) -> float:
    return round(LEFT + at / result.seconds * (WIDTH - LEFT - 12), 1)


def _nice(value: float) -> float:
    """Return the next number from `value` on that is easy to read."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** floor(log10(value))
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next(float(f"{step * unit:.6g}") for step in steps if step * unit >= value * 0.999)


STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #667085; --line: #e3e7ee; --paper: #fff;
  --good: #14866d; --bad: #c8372d; --warn: #c77700; --blue: #2f6fdb;
  --grey: #8a94a6; --shade: #f4c95d40; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ecf3; --soft: #9aa4b5; --line: #2b3342;
  --paper: #12161e; --good: #3cc4a0; --bad: #f0766b; --warn: #f0ac4a; --blue: #79a8ff;
  --grey: #8a94a6;  --shade: #f4c95d26; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1240px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.1rem; margin: 0; }
h3 { font-size: .95rem; margin: 1.6rem 0 .3rem; }
.about, .history, footer, figcaption { color: var(--soft); } .about { margin: .2rem 0 .6rem; }
.history { padding-left: 1.1rem; margin: 0 0 1rem; font-size: .9rem; }
.worlds { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr); gap: 1.4rem; }
@media (max-width: 760px) { .worlds { grid-auto-flow: row; } }
.verdict { margin: .2rem 0 0; padding: .4rem .7rem; border-left: 4px solid var(--warn);
  background: color-mix(in srgb, var(--warn) 9%, transparent); }
.verdict.unaffected, .verdict.recovers, .verdict.holds { border-color: var(--good);
  background: color-mix(in srgb, var(--good) 9%, transparent); }
.verdict.stays-down, .verdict.collapses { border-color: var(--bad);
  background: color-mix(in srgb, var(--bad) 9%, transparent); }
table { border-collapse: collapse; margin: 1.4rem 0 0; width: 100%;
  font-variant-numeric: tabular-nums; }
td, thead th { text-align: right; } th { text-align: left; font-weight: 500; }
th.inner { padding-left: 1.6rem; color: var(--soft); } thead th { font-weight: 600; }
td, th { padding: .22rem .5rem; border-bottom: 1px solid var(--line); }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 10.5px; fill: var(--soft); } svg text.name { fill: #fff; font-weight: 600; }
path { fill: none; stroke-width: 1.6; stroke-linejoin: round; stroke: var(--blue); }
.grid { stroke: var(--line); } line.limit { stroke: var(--grey); stroke-dasharray: 5 4; }
.trouble { fill: var(--shade); }
path.came { stroke: var(--grey); } path.ok, path.p50 { stroke: var(--good); }
path.failed, path.p99 { stroke: var(--bad); } path.refused, path.p95 { stroke: var(--warn); }
path.gave_up { stroke: #9b5de5; } path.degraded { stroke: var(--blue); }
path.line0 { stroke: var(--blue); } path.line1 { stroke: var(--warn); }
path.line2 { stroke: var(--good); } path.line3 { stroke: #9b5de5; }
rect.closed { fill: var(--good); } rect.open { fill: var(--bad); }
rect.half_open { fill: var(--warn); }
figcaption { font-size: .82rem; } figcaption span { margin-left: .8rem; }
figcaption span::before { content: ""; display: inline-block; width: .8em; height: .25em;
  margin-right: .35em; vertical-align: middle; background: var(--blue); }
span.came::before, span.limit::before { background: var(--grey); }
span.ok::before, span.p50::before, span.closed::before, span.line2::before {
  background: var(--good); }
span.failed::before, span.p99::before, span.open::before { background: var(--bad); }
span.refused::before, span.p95::before, span.half_open::before, span.line1::before {
  background: var(--warn); }
span.gave_up::before, span.line3::before { background: #9b5de5; }
footer { margin: 2rem 0; font-size: .85rem; }
"""
