"""`seawall tune`: better settings from what a service measures, proven in the simulator.

Promises:
- Nothing is changed in the service: proposals are printed, and written to a file if asked.
- The exit status is 0 if something could be judged, 1 if too little was measured of everything, and
  2 for bad usage.
- The same input and seeds give the same output.
"""

from __future__ import annotations

import json
import sys
import tomllib
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any, Final

from seawall._redaction import printable
from seawall.cli import HEADERS
from seawall.tune.exports import read_export
from seawall.tune.measurements import Measurement, measurements_of
from seawall.tune.proof import prove
from seawall.tune.proposals import propose
from seawall.tune.report import TuningResult, as_json, as_text, as_toml, policies_of

JUDGED, TOO_FEW = 0, 1
"""Exit status; bad usage is a ValueError or an OSError."""
EPILOG: Final = """\
FILE is a snapshot (curl http://127.0.0.1:8000/seawall/snapshot > snapshot.json), or a Prometheus
text export. That has no settings: pass them by --settings, and the seconds that its counts cover by
--span.
exit status: 0 judged, 1 too few samples everywhere, 2 bad usage.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `seawall tune` to `parser`."""
    parser.epilog = EPILOG
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="a snapshot, or a Prometheus text export")
    add("--url", help="tune a running process, by the address of its dashboard")
    add("--header", action="append", metavar="'NAME: VALUE'", help=f"with --url; or set {HEADERS}")
    add("--guard", action="append", metavar="NAME", help="only this guard or pool")
    add("--settings", metavar="FILE", help="today's settings, as TOML for guards_from_toml")
    add("--span", type=float, metavar="SECONDS", help="how long the counts of an export cover")
    add("--capacity", type=float, metavar="N", help="calls a second that the dependency bears")
    add("--patience", type=float, metavar="SECONDS", help="how long callers wait for an answer")
    add("--seeds", type=int, default=5, metavar="N", help="runs of each world (5)")
    add("--seconds", type=float, default=60.0, metavar="S", help="simulated time of a run (60)")
    add("--processes", type=int, default=1, metavar="N", help="processes that simulate (1)")
    add("--no-proof", action="store_true", help="do not simulate: proposals are not proven")
    add("--json", action="store_true", help="print JSON")
    add("--write", metavar="FILE", help="write the settings with all proposals, as TOML")


def main(args: Namespace) -> int:
    """Run the command, and return the exit status; a mistake raises ValueError or OSError."""
    chosen = _chosen(measurements_of(_snapshot(args)), args.guard)
    tuned = [_tuned(one, args) for one in chosen]
    if args.write is not None:
        Path(args.write).write_text(as_toml(tuned), "utf-8")
    text = json.dumps(as_json(tuned), indent=2) + "\n" if args.json else as_text(tuned)
    sys.stdout.write(text)
    return JUDGED if any(one.is_judged for one in tuned) else TOO_FEW


def _tuned(measured: Measurement, args: Namespace) -> TuningResult:
    advice = propose(measured)
    if args.no_proof or not advice.proposals:
        return TuningResult(measured, advice, None)
    proof = prove(
        measured,
        advice.proposals,
        capacity=args.capacity,
        patience=args.patience,
        seeds=args.seeds,
        seconds=args.seconds,
        processes=args.processes,
        progress=_progress if sys.stderr.isatty() else None,
    )
    return TuningResult(measured, advice, proof)


def _progress(text: str) -> None:
    sys.stderr.write(f"seawall tune: simulating {printable(text, 100)}\n")


def _snapshot(args: Namespace) -> dict[str, Any]:
    """Return the snapshot that the arguments name, with the settings of --settings."""
    if (args.file is None) == (args.url is None):
        raise ValueError("write a file or --url, and not both")
    if args.header and args.url is None:
        raise ValueError("--header goes with --url")
    if args.file is None:
        from seawall.cli.top.client import client_of

        shown = client_of(args).snapshot()
    else:
        shown = _read(args)
    if args.settings is not None:
        settings = Path(args.settings).read_text("utf-8")
        tomllib.loads(settings)
        shown["settings"] = policies_of(settings)
    return shown


def _read(args: Namespace) -> dict[str, Any]:
    text = Path(args.file).read_text("utf-8")
    if not text.lstrip().startswith("{"):
        return read_export(text, seconds=args.span or 0.0)
    try:
        shown = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{args.file} is no snapshot: {error}") from error
    if "guards" not in shown:
        raise ValueError(f"{args.file} is no snapshot: read it at /snapshot of a dashboard")
    return dict(shown)


def _chosen(measured: list[Measurement], names: list[str] | None) -> list[Measurement]:
    known = [one.name for one in measured]
    for name in names or ():
        if name not in known:
            there = printable(", ".join(known) or "none", 1000)
            raise ValueError(f"--guard {name}: there is none; there are {there}")
    return [one for one in measured if not names or one.name in names]
