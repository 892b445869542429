"""`seawall simulate`: run a service through its worst hour, before production.

seawall simulate outage                       a ready scenario, with and without protection
seawall simulate my_worlds.py                 each `def name(world)` of a file
seawall simulate before.toml after.toml       two worlds side by side
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Final

from seawall.sim.files import worlds_of
from seawall.sim.html import page
from seawall.sim.report import SimulationReport
from seawall.sim.scenarios import SCENARIOS
from seawall.sim.seeds import Runs, run_seeds
from seawall.sim.world import Build, simulate

ABOUT: Final = "Run a service through its worst hour, with the real policies, on virtual time."


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command to `parser`."""
    parser.description = ABOUT
    add = parser.add_argument
    add(
        "worlds",
        nargs="*",
        metavar="WORLD",
        help="a scenario, or a .py or .toml file (file.py:function is one of its worlds); several"
        " are compared. Without any, the scenarios are listed",
    )
    add("--seed", type=int, default=1, help="the seed (default: 1)")
    add("--seeds", type=int, metavar="N", help="run N seeds from --seed on, with intervals")
    add("--seconds", type=float, help="how long, instead of what the world says")
    add("--processes", type=int, help="processes for several seeds (default: one for each core)")
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--html", metavar="FILE", help="write a page with charts, too")
    add("--quiet", action="store_true", help="show no progress")


def main(args: Namespace) -> int:
    """Run the worlds and print the report; return the exit status."""
    if not args.worlds:
        for name, scenario in SCENARIOS.items():
            print(f"{name:<16} {scenario.about}")  # noqa: T201 - the output of the command
        return 0
    name, about, builds = _chosen(args.worlds)
    worlds = [_run(label, build, args) for label, build in builds.items()]
    report = SimulationReport(name, about, worlds)
    if args.html is not None:
        Path(args.html).write_text(page(report), "utf-8")
    text = json.dumps(report.data(), indent=1) if args.json else report.table()
    print(text)  # noqa: T201 - the output of the command
    return 0


def _chosen(targets: list[str]) -> tuple[str, str, dict[str, Build]]:
    """Return a name, a description and the worlds to compare."""
    builds: dict[str, Build] = {}
    about = []
    for target in targets:
        scenario = SCENARIOS.get(target)
        found = worlds_of(target) if scenario is None else scenario.variants
        about.append(Path(target).name if scenario is None else scenario.about)
        for label, build in found.items():
            taken = label in builds
            builds[f"{label} ({Path(target).stem})" if taken else label] = build
    return Path(targets[0]).stem, " ".join(about), builds


def _run(label: str, build: Build, args: Namespace) -> Runs:
    progress = _Progress(label, shown=not args.quiet and sys.stderr.isatty())
    try:
        if args.seeds is None:
            result = simulate(
                build, seed=args.seed, seconds=args.seconds, name=label, progress=progress.seconds
            )
            return Runs(label, [result])
        return run_seeds(
            build,
            seeds=range(args.seed, args.seed + args.seeds),
            seconds=args.seconds,
            name=label,
            processes=args.processes or os.cpu_count() or 1,
            progress=progress.seeds,
        )
    finally:
        progress.clear()


class _Progress:
    """One line on the standard error, written over and over."""

    def __init__(self, label: str, *, shown: bool) -> None:
        self._label = label
        self._write: Callable[[str], object] = sys.stderr.write if shown else len
        self._percent = -1

    def seconds(self, now: float, total: float) -> None:
        percent = int(100 * now / total)
        if percent > self._percent:
            self._percent = percent
            self._write(f"\r\033[K{self._label}: {now:.0f} s of {total:.0f} s, {percent} %")
            sys.stderr.flush()

    def seeds(self, done: int, total: int) -> None:
        self._write(f"\r\033[K{self._label}: {done} of {total} seeds")
        sys.stderr.flush()

    def clear(self) -> None:
        self._write("\r\033[K")
