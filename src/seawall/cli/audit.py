"""`seawall audit`: what is unguarded in source code, and what the guards of a process show.

Promises:
- The code under audit is read, never imported or run.
- The exit status is 0 if nothing was found, 1 if something was, and 2 for bad usage.
- The same files give the same output, in the same order.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from seawall.audit.engine import audit_files
from seawall.audit.findings import RULES, Finding, new_findings, read_baseline, write_baseline
from seawall.audit.outputs import FORMATS, AuditReport, read_table, text_lines
from seawall.cli import HEADERS

CLEAN, FOUND = 0, 1
"""Exit status; bad usage is a ValueError or an OSError."""

_STYLES: Final = {
    "error": "bold red",
    "warning": "yellow",
    "note": "cyan",
    "write": "green",
    "summary": "bold",
}

EPILOG: Final = """\
exit status: 0 nothing found, 1 findings, 2 bad usage.
A comment '# seawall: ok REASON' on the line, or on the line above, suppresses its findings.
--select and --ignore take ids, their beginnings, or names: SW1, SW204, blocking-in-async.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `seawall audit` to `parser`."""
    parser.epilog = EPILOG
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="files and folders; by default, this folder")
    add("--url", help="audit a running process, by the address of its dashboard")
    add("--header", action="append", metavar="'NAME: VALUE'", help=f"with --url; or set {HEADERS}")
    add("--connections", type=int, metavar="N", help="with --url: what the pools' server accepts")
    add("--pods", type=int, metavar="N", help="with --connections: processes like that one")
    add("--format", choices=sorted(FORMATS), default="text", help="by default, text")
    add("--output", metavar="FILE", help="write to FILE, not to the standard output")
    add("--select", action="append", metavar="RULES", help="only these rules, by commas")
    add("--ignore", action="append", metavar="RULES", help="all but these rules, by commas")
    add("--exclude", action="append", metavar="PATTERN", help="leave out files and folders")
    add("--tests", action="store_true", help="tests too, which are left out by default")
    add("--baseline", metavar="FILE", help="report only what is not in this baseline")
    add("--write-baseline", metavar="FILE", help="write what was found as a baseline, and exit 0")
    add("--rules", action="store_true", help="list the rules, and exit")
    add("--no-color", action="store_true", help="without colours; so does NO_COLOR")


def main(args: Namespace) -> int:
    """Run the command, and return the exit status; a mistake raises ValueError or OSError."""
    if args.rules:
        return _list_rules()
    _check_usage(args)
    wanted = _filter(args.select, args.ignore)
    findings, files = _audited(args, wanted) if args.url is None else (_asked(args, wanted), None)
    if args.write_baseline is not None:
        written = write_baseline(args.write_baseline, findings)
        sys.stderr.write(f"seawall audit: {written} findings written to {args.write_baseline}\n")
        return CLEAN
    shown = findings
    if args.baseline is not None:
        shown = new_findings(findings, read_baseline(args.baseline))
    report = AuditReport(shown, files, known=len(findings) - len(shown))
    _show(report, args)
    return FOUND if report.findings else CLEAN


def _audited(args: Namespace, wanted: Callable[[Finding], bool]) -> tuple[list[Finding], int]:
    findings: list[Finding] = []
    files = 0
    for _, found in audit_files(args.paths or ["."], exclude=args.exclude or (), tests=args.tests):
        files += 1
        findings += filter(wanted, found)
    return findings, files


def _asked(args: Namespace, wanted: Callable[[Finding], bool]) -> list[Finding]:
    """Return what the process at --url finds in itself."""
    from seawall.cli.top.client import client_of

    given = {"connections": args.connections, "pods": args.pods}
    query = urlencode({name: number for name, number in given.items() if number is not None})
    answer = client_of(args).audit(f"?{query}" if query else "")
    return [finding for finding in read_table(answer["findings"]) if wanted(finding)]


def _check_usage(args: Namespace) -> None:
    if args.url is not None and (args.paths or args.tests or args.exclude):
        raise ValueError("--url audits a process: leave out paths, --tests and --exclude")
    if args.url is None and (args.header or args.connections or args.pods):
        raise ValueError("--header, --connections and --pods go with --url")
    if args.pods and not args.connections:
        raise ValueError("--pods goes with --connections: write both, or neither")


def _filter(
    select: Iterable[str] | None, ignore: Iterable[str] | None
) -> Callable[[Finding], bool]:
    """Return which findings are wanted; what cannot be read is, unless it is ignored by name."""
    selected = _rules(select, "--select") or set(RULES)
    wanted = (selected | {"SW900"}) - _rules(ignore, "--ignore")
    return lambda finding: finding.rule.id in wanted


def _rules(given: Iterable[str] | None, option: str) -> set[str]:
    """Return the ids that a list of ids, beginnings of ids and names stands for."""
    chosen: set[str] = set()
    for one in ",".join(given or ()).split(","):
        text = one.strip()
        if not text:
            continue
        found = {
            rule.id for rule in RULES.values() if rule.name == text or rule.id.startswith(text)
        }
        if not found:
            raise ValueError(f"{option} {text}: there is no such rule; --rules lists them")
        chosen |= found
    return chosen


def _list_rules() -> int:
    for rule in RULES.values():
        sys.stdout.write(f"{rule.id} {rule.name} ({rule.level})\n    {rule.why}\n")
    return CLEAN


def _show(report: AuditReport, args: Namespace) -> None:
    if args.output is not None:
        Path(args.output).write_text(FORMATS[args.format](report), "utf-8")
    elif args.format == "text" and _may_color(args):
        _print_colored(report)
    else:
        sys.stdout.write(FORMATS[args.format](report))


def _may_color(args: Namespace) -> bool:
    if args.no_color or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return False
    try:
        import rich  # noqa: F401 - an extra
    except ModuleNotFoundError:
        return False
    return True


def _print_colored(report: AuditReport) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(markup=False, emoji=False, highlight=False)
    for line in text_lines(report):
        console.print(Text(line.text, style=_STYLES.get(line.style, "")))
