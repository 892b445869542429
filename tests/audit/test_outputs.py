"""Each format says where, why and what to write, and is safe to read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft7Validator

from seawall.audit import RULES, Finding, audit_source
from seawall.audit.findings import process_finding
from seawall.audit.outputs import AuditReport, as_annotations, as_json, as_sarif, as_text

CODE = "import requests\nrequests.get(url)\nrequests.get(\n    other,\n)\n"


def report(path: str = "app/main.py") -> AuditReport:
    return AuditReport(audit_source(CODE, path), files=1)


def test_text_says_where_why_and_what_to_write():
    """The reason is given once for each rule, the rest for each finding."""
    assert as_text(report()).splitlines() == [
        "app/main.py:2:1: SW101 no-timeout: requests.get(...) has no timeout: it waits for ever",
        f"    why:   {RULES['SW101'].why}",
        "    write: timeout=(3.05, 10)  # seconds to connect, seconds between bytes",
        "app/main.py:3:1: SW101 no-timeout: requests.get(...) has no timeout: it waits for ever",
        "    write: timeout=(3.05, 10)  # seconds to connect, seconds between bytes",
        "2 findings in 1 file: SW101 2",
    ]


def test_text_without_findings():
    """Nothing found is said, with what the baseline holds."""
    assert (
        as_text(AuditReport([], 3, known=2)) == "nothing found in 3 files, 2 more in the baseline\n"
    )


def test_text_cannot_control_the_terminal():
    """A path with an escape sequence is shown as it would be written."""
    assert "\x1b" not in as_text(report("app/\x1b[2Jmain.py"))
    assert "\\x1b[2J" in as_text(report("app/\x1b[2Jmain.py"))


def test_json_has_every_field():
    """Each finding is one object with its fingerprint."""
    (first, second) = json.loads(as_json(report()))["findings"]
    assert first["path"] == "app/main.py"
    assert (first["line"], first["column"], second["line"]) == (2, 1, 3)
    assert (first["rule"], first["name"], first["level"]) == ("SW101", "no-timeout", "error")
    assert first["why"] == RULES["SW101"].why
    assert first["write"].startswith("timeout=")
    assert first["fingerprint"] != second["fingerprint"]


def test_sarif_has_what_the_standard_requires():
    """Version, tool, rules, results that refer to them, and places with lines."""
    table = json.loads(as_sarif(report("app/my main.py")))
    assert table["version"] == "2.1.0"
    (run,) = table["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "seawall audit"
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in {"none", "note", "warning", "error"}
        assert result["message"]["text"]
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert physical["artifactLocation"]["uri"] == "app/my%20main.py"
        assert physical["region"]["startLine"] >= 1
        assert physical["region"]["startColumn"] >= 1
    assert run["results"][1]["locations"][0]["physicalLocation"]["region"]["endLine"] == 5


def test_annotations_are_escaped():
    """A line break or a comma in a path cannot begin another command."""
    finding = Finding("a,b:c\n.py", 1, 2, RULES["SW103"], "50%\nmore", "x")
    (line,) = as_annotations(AuditReport([finding], 1)).splitlines()
    assert line.startswith(
        "::warning file=a%2Cb%3Ac%0A.py,line=1,col=2,title=SW103 unbounded-wait::50%25%0Amore. "
    )


def test_levels_have_annotations():
    """A note is a notice there, an error is an error."""
    findings = [Finding("a.py", 1, 1, RULES[rule], "m", "w") for rule in ("SW101", "SW203")]
    assert [
        line.split(" ")[0] for line in as_annotations(AuditReport(findings, 1)).splitlines()
    ] == [
        "::error",
        "::notice",
    ]


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has no other properties than these."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def many(items: Any, **more: Any) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **more}


TEXT = {"type": "string", "minLength": 1}
URI = {"type": "string", "pattern": r"^[!#-;=?-\[\]_a-z~]+$"}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
NUMBER = {"type": "integer", "minimum": 1}
RULE = closed(
    "id",
    id=TEXT,
    name=TEXT,
    shortDescription=closed("text", text=TEXT),
    fullDescription=closed("text", text=TEXT),
    defaultConfiguration=closed("", level=LEVEL),
)
LOCATION = closed(
    "artifactLocation",
    artifactLocation=closed("", uri=URI),
    region=closed("startLine", startLine=NUMBER, startColumn=NUMBER, endLine=NUMBER),
)
RESULT = closed(
    "message",
    ruleId=TEXT,
    ruleIndex={"type": "integer", "minimum": 0},
    level=LEVEL,
    message=closed("text", text=TEXT),
    locations=many(closed("", physicalLocation=LOCATION)),
    partialFingerprints={"type": "object", "additionalProperties": TEXT},
)
DRIVER = closed("name", name=TEXT, version=TEXT, rules=many(RULE, uniqueItems=True))
RUN = closed(
    "tool results",
    tool=closed("driver", driver=DRIVER),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results=many(RESULT),
)
SARIF = closed(
    "version runs",
    **{"$schema": TEXT, "version": {"const": "2.1.0"}, "runs": many(RUN, minItems=1)},
)
"""What SARIF 2.1.0 requires of the properties that are written, and which ones it knows."""


@pytest.mark.parametrize(
    "reported",
    [
        report(),
        report("app/my main é\n.py"),
        AuditReport([], files=3),
        AuditReport(
            [Finding("a.py", 1, 1, rule, "message", "write") for rule in RULES.values()], 1
        ),
        AuditReport([process_finding("SW101", "guard vendor", "message", "write")], 0),
    ],
    ids=["findings", "odd path", "nothing", "every rule", "a running process"],
)
def test_sarif_is_valid_by_the_rules_of_the_standard(reported: AuditReport):
    """Whatever is reported: required properties, known names, allowed values."""
    table = json.loads(as_sarif(reported))
    Draft7Validator(SARIF).validate(table)
    assert len(table["runs"][0]["results"]) == len(reported.findings)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('"version": "2.1.0"', '"version": "2.0.0"'),
        ('"startLine": 2', '"startLine": 0'),
        ('"level": "error"', '"level": "fatal"'),
        ('"ruleIndex"', '"rule_index"'),
        ('"driver": {', '"drivers": {'),
        ("app/main.py", "app main.py"),
    ],
)
def test_sarif_that_breaks_the_standard_is_noticed(right: str, wrong: str):
    """Ablation: the schema above refuses what viewers would."""
    text = as_sarif(report())
    assert right in text
    assert not Draft7Validator(SARIF).is_valid(json.loads(text.replace(right, wrong)))
