"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from bench.cases import ROWS
from bench.peers import PEERS
from bench.pipelines import PIPELINES
from bench.served import BASELINES
from bench.targets import DURABLE, IMPORTS, SHARED, THREADS, WEB, WSGI
from bench.telemetry import TELEMETRY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.cases import Row

METHOD = """\
Success path only. Each number is the median over rounds, {rounds} where nothing else is said; each
round runs every case once, in a random order (seed {seed}), and compares within the round. Spread
is the interquartile range. Time is {clock} time, with the garbage collector off and three context
variables set. The machine: {python}, {system}, {cores} cores, a load of {load} when it began.
"""


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description="Measure what guarded calls cost, and compare with others."
    )
    names = ", ".join(repr(row.name) for row in ROWS)
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        help=f"only what has NAME in its name (may be repeated): {names}, {THREADS}, {IMPORTS},"
        f" {TELEMETRY!r}, {PIPELINES}, {SHARED}, {DURABLE}, {WEB}, {WSGI}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--seed", type=int, default=1, help="order of the cases (default: 1)")
    parser.add_argument(
        "--clock",
        choices=sorted(measure.CLOCKS),
        default="cpu",
        help="processor time, which a busy machine disturbs less (default), or wall time; "
        "threads and what is shared or durable are always measured in wall time",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw results there")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    return parser.parse_args(argv)


def _progress(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _rows(wanted: Sequence[str] | None) -> list[Row]:
    return [
        row._replace(cases=BASELINES.get(row.name, {}) | row.cases | PEERS.get(row.name, {}))
        for row in ROWS
        if _is_wanted(row.name, wanted)
    ]


def _is_wanted(name: str, wanted: Sequence[str] | None) -> bool:
    return wanted is None or any(part in name for part in wanted)


def _measured(
    arguments: argparse.Namespace,
) -> Iterator[tuple[str, Any, report.Section]]:
    """Measure what is wanted; yield the name, the raw numbers and the tables of each part."""
    quick, seed, clock = arguments.quick, arguments.seed, arguments.clock
    raw: Any
    rows = _rows(arguments.only)
    if rows:
        plan = measure.Plan(seed=seed, clock=clock)
        plan = plan._replace(rounds=5, seconds=0.008) if quick else plan
        raw = asyncio.run(measure.measure(rows, plan, _progress))
        yield "calls", raw, report.of_calls(raw)
    if _is_wanted(THREADS, arguments.only):
        crew = threads.Plan(seed=seed)
        crew = crew._replace(repeats=3, seconds=0.05) if quick else crew
        raw = threads.measure(crew, _progress)
        yield THREADS, raw, report.of_threads(raw)
    if _is_wanted(TELEMETRY, arguments.only):
        seen = telemetry.Plan(seed=seed, clock=clock)
        seen = seen._replace(rounds=5, seconds=0.02) if quick else seen
        raw = telemetry.measure(seen, _progress)
        yield TELEMETRY, raw, report.of_telemetry(raw)
    if _is_wanted(PIPELINES, arguments.only):
        items = pipelines.Plan(seed=seed, clock=clock)
        items = items._replace(rounds=3, items=2000, computed=20) if quick else items
        raw = pipelines.measure(items, _progress)
        yield PIPELINES, raw, report.of_pipelines(raw)
    if _is_wanted(IMPORTS, arguments.only):
        fresh = imports.Plan(seed=seed, clock=clock)
        fresh = fresh._replace(rounds=5) if quick else fresh
        raw = imports.measure(fresh, _progress)
        yield IMPORTS, raw, report.of_imports(raw)
    if _is_wanted(SHARED, arguments.only):
        pods = shared.Plan(seed=seed)
        pods = pods._replace(rounds=3, seconds=0.05) if quick else pods
        raw = shared.measure(pods, _progress)
        yield SHARED, raw, report.of_shared(raw)
    if _is_wanted(DURABLE, arguments.only):
        rows_written = durable.Plan(seed=seed)
        rows_written = rows_written._replace(rounds=3, seconds=0.1) if quick else rows_written
        raw = durable.measure(rows_written, _progress)
        yield DURABLE, raw, report.of_durable(raw)
    for name, served, tables in ((WEB, web, report.of_web), (WSGI, wsgi, report.of_wsgi)):
        if _is_wanted(name, arguments.only):
            load = web.Plan(seed=seed)
            load = load._replace(seconds=2.0, rounds=5, arrivals=2) if quick else load
            raw = served.measure(load, _progress)
            yield name, raw, tables(raw)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and return the exit status."""
    arguments = _arguments(argv)
    machine, versions = report.machine(), report.versions()
    rounds = 5 if arguments.quick else measure.Plan().rounds
    print(METHOD.format(**machine, rounds=rounds, seed=arguments.seed, clock=arguments.clock))
    print("With", ", ".join(f"{name} {number}" for name, number in versions.items()), end=".\n\n")
    measured: dict[str, Any] = {}
    verdicts: list[report.Verdict] = []
    for name, raw, (tables, judged) in _measured(arguments):
        measured[name] = raw
        verdicts += judged
        for table in tables:
            text = table.as_markdown() if arguments.markdown else table.as_text()
            print(text, end="\n\n", flush=True)
    if not measured:
        raise SystemExit(f"bench: nothing is called {', '.join(arguments.only)}: see --help")
    missed = [verdict for verdict in verdicts if not verdict.met]
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} targets met")
    for verdict in missed:
        print(f"missed: {verdict.table}, {verdict.line}: {verdict.value:.3g}, not {verdict.target}")

    if arguments.json is not None:
        results = {
            "machine": machine,
            "versions": versions,
            "settings": {name: getattr(arguments, name) for name in ("quick", "seed", "clock")},
            "measured": measured,
            "verdicts": [verdict._asdict() for verdict in verdicts],
        }
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return int(arguments.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
