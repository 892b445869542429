"""Findings as text, JSON, SARIF 2.1.0 and annotations of GitHub's kind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from seawall._redaction import printable
from seawall.audit.findings import RULES, Finding, process_finding

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
LONGEST_LINE: Final = 10_000
MOST_FINDINGS: Final = 10_000  # maximum number of findings that are read from another process

_ANNOTATIONS: Final = {"error": "error", "warning": "warning", "note": "notice"}


class AuditReport(NamedTuple):
    """What an audit has found."""

    findings: Sequence[Finding]
    files: int | None  # number of files; None for a process
    known: int = 0  # number of findings that the baseline has


class OutputLine(NamedTuple):
    """A line of text with the name of its style."""

    text: str
    style: str = ""


def text_lines(report: AuditReport) -> Iterator[OutputLine]:
    """Yield the report for a terminal."""
    explained: set[str] = set()
    for finding in report.findings:
        rule = finding.rule
        head = f"{finding.place}: {rule.id} {rule.name}: {finding.message}"
        yield OutputLine(printable(head, LONGEST_LINE), rule.level)
        if rule.id not in explained:
            explained.add(rule.id)
            yield OutputLine(f"    why:   {rule.why}")
        yield OutputLine(printable(f"    write: {finding.write}", LONGEST_LINE), "write")
    yield OutputLine(_summary(report), "summary")


def as_text(report: AuditReport) -> str:
    """Return the report as plain text."""
    return "".join(f"{line.text}\n" for line in text_lines(report))


def as_json(report: AuditReport) -> str:
    """Return the report as JSON, with one object for each finding."""
    table = {"files": report.files, "known": report.known, "findings": as_table(report.findings)}
    return json.dumps(table, indent=2) + "\n"


def as_table(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return findings as plain data."""
    return [
        {
            "path": one.path,
            "line": one.line,
            "column": one.column,
            "rule": one.rule.id,
            "name": one.rule.name,
            "level": one.rule.level,
            "message": one.message,
            "why": one.rule.why,
            "write": one.write,
            "fingerprint": one.fingerprint,
        }
        for one in findings
    ]


def read_table(table: object) -> list[Finding]:
    """Return the findings that another process reported; raise ValueError if it reported none."""
    if not isinstance(table, list):
        raise ValueError("it has no list of findings")  # noqa: TRY004 - data, not an argument
    return [_read(one) for one in table[:MOST_FINDINGS]]


def _read(one: object) -> Finding:
    if not isinstance(one, dict) or one.get("rule") not in RULES:
        raise ValueError("it tells a finding of an unknown rule: is it of another version?")
    path, message, write = (str(one.get(key, ""))[:1000] for key in ("path", "message", "write"))
    return process_finding(one["rule"], path, message, write)


def as_sarif(report: AuditReport) -> str:
    """Return the report as SARIF 2.1.0."""
    used = sorted({one.rule.id for one in report.findings})
    rules: list[dict[str, Any]] = [
        {
            "id": rule.id,
            "name": rule.name,
            "shortDescription": {"text": rule.name.replace("-", " ")},
            "fullDescription": {"text": rule.why},
            "defaultConfiguration": {"level": rule.level},
        }
        for rule in (RULES[name] for name in used)
    ]
    results = [
        {
            "ruleId": one.rule.id,
            "ruleIndex": used.index(one.rule.id),
            "level": one.rule.level,
            "message": {"text": f"{one.message}. {one.rule.why} Write: {one.write}"},
            "locations": [{"physicalLocation": _location(one)}] if one.line else [],
            "partialFingerprints": {"seawall/v1": one.fingerprint},
        }
        for one in report.findings
    ]
    driver = {"name": "seawall audit", "version": _version(), "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    table = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(table, indent=2) + "\n"


def as_annotations(report: AuditReport) -> str:
    """Return the report as workflow commands, which GitHub shows beside the code."""
    return "".join(f"{_annotation(finding)}\n" for finding in report.findings)


FORMATS: Final[dict[str, Callable[[AuditReport], str]]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_annotations,
}
"""The formats by their names on the command line."""


def _location(finding: Finding) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column}
    if finding.end_line > finding.line:
        region["endLine"] = finding.end_line
    return {"artifactLocation": {"uri": quote(finding.path)}, "region": region}


def _annotation(finding: Finding) -> str:
    properties = {"title": f"{finding.rule.id} {finding.rule.name}"}
    if finding.line:
        place = {"file": finding.path, "line": str(finding.line), "col": str(finding.column)}
        properties = place | properties
    fields = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties.items())
    message = f"{finding.message}. {finding.rule.why} Write: {finding.write}"
    return f"::{_ANNOTATIONS[finding.rule.level]} {fields}::{_escaped(message)}"


def _escaped(text: str, further: str = "") -> str:
    for character in f"%\r\n{further}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _summary(report: AuditReport) -> str:
    found = len(report.findings)
    counted = Counter(one.rule.id for one in report.findings)
    by_rule = ", ".join(f"{rule} {count}" for rule, count in sorted(counted.items()))
    known = f", {report.known} more in the baseline" if report.known else ""
    where = "the process" if report.files is None else _counted(report.files, "file")
    if not found:
        return f"nothing found in {where}{known}"
    return f"{_counted(found, 'finding')} in {where}{known}: {by_rule}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _version() -> str:
    try:
        return version("seawall")
    except PackageNotFoundError:  # running from a source tree
        return "0"
