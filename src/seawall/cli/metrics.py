"""`seawall metrics`: the table of metrics, and the Grafana and Prometheus files made from it."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap

from seawall.telemetry.alerts import alert_rules
from seawall.telemetry.grafana.dashboard import grafana_dashboard
from seawall.telemetry.metrics import METRICS


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command to `parser`."""
    which = parser.add_mutually_exclusive_group()
    add = which.add_argument
    add("--json", action="store_true", help="the table as JSON")
    add("--grafana", action="store_true", help="a dashboard to import into Grafana")
    add("--alerts", action="store_true", help="a rule file for Prometheus")
    parser.add_argument(
        "--runbooks",
        metavar="URL",
        help="with --alerts: link each alert to its heading at this address, or to the address"
        " with {alert} replaced by its name (default: no links)",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write to FILE, not to the standard output"
    )


def main(args: Namespace) -> int:
    """Write the requested output; return the exit status."""
    if args.runbooks is not None and not args.alerts:
        raise ValueError("--runbooks goes with --alerts: write both, or neither")
    text = _text(args)
    if args.output is None:
        sys.stdout.write(text)
    else:
        Path(args.output).write_text(text, "utf-8")
    return 0


def _text(args: Namespace) -> str:
    if args.alerts:
        return alert_rules(runbooks=args.runbooks)
    if args.grafana:
        return _json(grafana_dashboard())
    if args.json:
        return _json([{**metric._asdict(), "otel_name": metric.otel_name} for metric in METRICS])
    return "\n".join(_table(get_terminal_size().columns)) + "\n"


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _table(width: int) -> Iterator[str]:
    for metric in METRICS:
        labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
        unit = ", seconds" if metric.unit == "s" else ""
        yield f"{metric.name}{labels}  {metric.kind}{unit}"
        yield from wrap(
            metric.help, max(40, width - 4), initial_indent="    ", subsequent_indent="    "
        )
