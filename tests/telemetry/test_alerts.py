from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.telemetry import alerts as module
from seawall.telemetry import thresholds as threshold
from seawall.telemetry.alerts import alert_rules
from tests.support import falsified
from tests.telemetry.promql import Fault, labels_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate" / "alerts.md"
yaml = pytest.importorskip("yaml")
ADDRESS = "https://wiki.example/alerts"
(GROUP,) = yaml.safe_load(alert_rules(runbooks=ADDRESS))["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}
NAMES = sorted(RULES)


# The file


def test_rule_file_has_what_prometheus_knows_and_nothing_else():
    """Prometheus refuses a file with a field that it does not know."""
    assert set(GROUP) == {"name", "rules"}
    assert len(RULES) == len(GROUP["rules"])
    for rule in RULES.values():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Seawall[A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"[1-9]\d*s", rule.get("for", "1s"))
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}


def test_the_alerts_that_were_asked_for_are_there():
    """Open circuits, spent budgets, and what waits in an outbox or a queue."""
    asked = {"CircuitOpenRate", "RetryBudgetSpent", "OutboxOld", "QueueOld"}
    assert {f"Seawall{name}" for name in asked} <= set(RULES)
    assert "> 0.05" in RULES["SeawallCircuitOpenRate"]["expr"]


@pytest.mark.parametrize("name", NAMES)
def test_rules_ask_only_for_what_there_is(name: str):
    """Every metric and label of a rule is in the table; only counters have rates."""
    rule = RULES[name]
    labels = labels_of(rule["expr"])
    told = re.findall(r"\$labels\.(\w+)", "".join(rule["annotations"].values()))
    assert set(told) <= labels
    assert "job" in labels, "one file serves all services"


@pytest.mark.parametrize(
    "expr",
    [
        "sum by (guard) (seawall_attempts_total) > 0",
        "sum by (guard) (rate(seawall_slots[5m])) > 0",
        "max by (guard) (seawall_nonsense) > 0",
        'max by (guard) (seawall_slots{colour="red"}) > 0',
        "max by (colour) (seawall_slots) > 0",
        "sum by (guard) (rate(seawall_retries_total[5m])) / sum(rate(seawall_attempts_total[5m]))",
        "histogram_quantile(0.9, sum by (pool) (rate(seawall_pool_use_seconds_bucket[5m])))",
        "max by (guard) (seawall_attempt_duration_seconds) > 1",
        "1 + 1",
    ],
)
def test_a_question_without_sense_is_found(expr: str):
    """The check above fails for a metric, a label, a kind or a grouping that is not there."""
    with pytest.raises(Fault):
        labels_of(expr)


def test_templates_are_whole():
    """Each `{{` is closed, so that Prometheus can load it."""
    for rule in RULES.values():
        for text in rule["annotations"].values():
            bare = re.sub(r"\{\{ \$(labels\.\w+|value)( \| humanize\w*)? \}\}", "", text)
            assert "{" not in bare
            assert "}" not in bare


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_has_its_heading(name: str):
    """Whoever is woken finds what it means and what to do."""
    anchor = RULES[name]["annotations"]["runbook_url"]
    assert anchor == f"{ADDRESS}#{name.lower()}"
    assert f"\n### {name}\n" in PAGE.read_text("utf-8")


def test_every_heading_is_of_an_alert():
    """No page for an alert that is not there any more."""
    headings = re.findall(r"^### (Seawall\w+)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert headings == list(RULES)


def test_the_table_of_the_page_is_true():
    """Who is told, and after how long, is on the page as it is in the rules."""
    row = re.compile(r"^\| `(Seawall\w+)` \| .+? \| (.+?) \| (\w+) \|", re.MULTILINE)
    rows = row.findall(PAGE.read_text("utf-8"))
    units = {"s": 1, "min": 60, "h": 3600}
    told = {}
    for name, lasts, who in rows:
        number, _, unit = lasts.partition(" ")
        told[name] = (0 if lasts == "at once" else int(number) * units[unit], who)
    assert told == {alert.name: (alert.lasts, alert.severity) for alert in module.ALERTS}


def test_a_look_is_taken_before_something_is_wrong():
    """Each threshold that is worth a look is below the one that is wrong."""
    warnings = {name for name in vars(threshold) if name.endswith("_WARN")}
    assert warnings
    for name in warnings:
        assert getattr(threshold, name) < getattr(threshold, name.removesuffix("_WARN"))


def test_alerts_have_no_link_unless_an_address_is_given():
    """A relative link leads nowhere from a pager."""
    (group,) = yaml.safe_load(alert_rules())["groups"]
    assert all(set(rule["annotations"]) == {"summary", "description"} for rule in group["rules"])


def test_an_address_with_a_place_for_the_name_is_a_template():
    """Each runbook is a page of its own."""
    address = "https://wiki.example/runbooks/{alert}?from=pager"
    (group,) = yaml.safe_load(alert_rules(runbooks=address))["groups"]
    for rule in group["rules"]:
        wanted = f"https://wiki.example/runbooks/{rule['alert']}?from=pager"
        assert rule["annotations"]["runbook_url"] == wanted


def _read_back(base: str) -> object:
    """Return the address of the runbook of one rule, as it is read out of the file."""
    written = "\n".join(module._written(module.ALERTS[0], base))
    try:
        (rule,) = yaml.safe_load(written)
    except yaml.YAMLError:
        return None
    return rule["annotations"]["runbook_url"]


def _survives(base: str) -> None:
    assert _read_back(base) == module._runbook(module.ALERTS[0], base)


@given(st.text().filter(lambda text: text.isprintable() and " " not in text))
def test_any_address_of_the_runbooks_survives(base: str):
    """What is written into YAML is read out of it, whatever is in it."""
    _survives(base)


def test_without_quotes_an_address_would_not_survive(monkeypatch: pytest.MonkeyPatch):
    """The quotes are needed: plain text is read otherwise, or breaks the file."""
    monkeypatch.setattr(module, "json", SimpleNamespace(dumps=lambda text, **_how: text))
    assert falsified(_survives, st.sampled_from(["a", "[a", "{a}", "&a"]))


@pytest.mark.parametrize(
    "base",
    [
        "two words",
        "two\nlines",
        7,
        "docs/operate/alerts.md",
        "/alerts",
        "//wiki.example/alerts",
        "https://",
        "https:///alerts",
        "https://{alert}/x",
        "ftp://wiki.example/alerts",
    ],
)
def test_an_address_that_is_not_absolute_is_refused(base: Any):
    """The message says what to write instead."""
    with pytest.raises(ValueError, match="write an absolute address"):
        alert_rules(runbooks=base)
