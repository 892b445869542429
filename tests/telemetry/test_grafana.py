from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from seawall.telemetry import METRICS, Metric, export_prometheus
from seawall.telemetry.grafana.dashboard import grafana_dashboard
from seawall.telemetry.promql import PromqlQueries
from tests.telemetry.promql import EVERY, Prometheus, labels_of

DASHBOARD = grafana_dashboard()
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]
ASKED = [pair for pair in TARGETS if not pair[1]["expr"].startswith("ALERTS")]


def _filled(expr: str) -> str:
    """Return the question as Grafana asks it, with everything chosen."""
    expr = expr.replace("$__rate_interval", "5m")
    return re.sub(r"\$(job|instance|guard)", ".*", expr)


# What Grafana wants


def test_dashboard_has_what_grafana_reads():
    """It is plain JSON, with all that the model asks for, and no number that a database gives."""
    assert json.loads(json.dumps(DASHBOARD)) == DASHBOARD
    assert DASHBOARD["id"] is None
    assert DASHBOARD["schemaVersion"] >= 36
    assert {"uid", "title", "panels", "templating", "annotations", "time"} <= set(DASHBOARD)
    for panel in PANELS:
        assert panel["type"] in {"timeseries", "state-timeline", "table"}
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        defaults = panel["fieldConfig"]["defaults"]
        steps = [step["value"] for step in defaults["thresholds"]["steps"]]
        assert steps[0] is None
        assert steps[1:] == sorted(steps[1:])
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)


def test_nothing_has_to_be_edited():
    """Where the data come from is chosen on the page: no panel names a source of its own."""
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance", "guard"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    for variable in list(variables.values())[1:]:
        assert variable["datasource"] == source
        assert variable["allValue"] == ".*"
    for panel, target in TARGETS:
        assert panel["datasource"] == target["datasource"] == source
    assert "__inputs" not in DASHBOARD


def test_panels_have_their_places():
    """None lies upon another, none leaves the page, and each has a number of its own."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_rows_are_in_order():
    """What is wrong comes first, then the guards."""
    titles = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert titles[:2] == ["Overview", "Guards"]


# What is asked


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_shown(metric: Metric):
    """Each metric of the table is in some panel, and that panel's description explains it."""
    found = [
        panel
        for panel, target in TARGETS
        if re.search(rf"\b{metric.name}(_bucket|_sum)?\b", target["expr"])
        and metric.help in panel["description"]
    ]
    assert found, (
        f"no panel shows {metric.name} and its help text: add one to ROWS in"
        " seawall/telemetry/grafana/panels.py"
    )


@pytest.mark.parametrize("asked", ASKED, ids=lambda pair: pair[0]["title"])
def test_panels_ask_only_for_what_there_is(asked: Any):
    """Every metric and label is in the table, only counters have rates, legends name labels."""
    panel, target = asked
    labels = labels_of(_filled(target["expr"]))
    named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert named <= labels
    # Two lines of the same name could not be told apart.
    assert labels - {"job", "instance"} <= named or panel["type"] == "table"


def test_every_question_follows_what_is_chosen():
    """Service and process hold everywhere, the guard where there is one."""
    for _, target in ASKED:
        for name, conditions in re.findall(r"((?:seawall|gen_ai)_\w+)\{([^}]*)\}", target["expr"]):
            assert 'job=~"$job"' in conditions
            assert 'instance=~"$instance"' in conditions
            bare = re.sub("_(bucket|sum)$", "", name)
            (metric,) = [one for one in METRICS if one.name == bare]
            assert ('guard=~"$guard"' in conditions) == ("guard" in metric.labels)
        named = re.findall(r"(?:seawall_|gen_ai_client)\w+", target["expr"])
        assert len(named) == target["expr"].count('"$job"')


def test_variables_and_marks_ask_for_what_there_is():
    """What can be chosen, and what is marked, comes from metrics of the table too."""
    (mark,) = DASHBOARD["annotations"]["list"]
    assert labels_of(_filled(mark["expr"])) == {"guard"}
    for variable in DASHBOARD["templating"]["list"][1:]:
        series, label = re.fullmatch(
            r"label_values\((.+), (\w+)\)", variable["definition"]
        ).groups()
        name = series.split("{")[0]
        assert label in {"job", "instance", *next(m.labels for m in METRICS if m.name == name)}


@pytest.mark.usefixtures("world")
def test_every_panel_has_something_to_show_of_a_real_process():
    """Each value of a label that a panel asks for is one that a real process tells."""
    registry, prometheus = CollectorRegistry(), Prometheus()
    with export_prometheus(registry):
        for step in range(4):
            prometheus.scrape(step * EVERY, generate_latest(registry).decode())
    empty = {
        panel["title"]
        for panel, target in ASKED
        if not prometheus.ask(_filled(target["expr"]), 3 * EVERY)
    }
    # Everything can be read, and nothing is called by data.
    assert empty == {"Cannot be read", "Combined series"}, (
        "these panels are empty: the objects in tests/telemetry/world.py need something that they"
        " show, or a query names a label's value that no object has"
    )


@given(st.lists(st.sampled_from(["closed", "half_open", "open", "isolated"]), min_size=1))
def test_breakers_are_drawn_by_the_worst_of_a_guard(states: list[str]):
    """A guard with several breakers is as its worst one is."""
    prometheus = Prometheus()
    order = ["closed", "half_open", "open", "isolated"]
    for state in order:
        prometheus.tell(0.0, "seawall_breaker_state", states.count(state), guard="v", state=state)
    ((drawn, target),) = [pair for pair in TARGETS if pair[0]["title"] == "Breakers"]
    (value,) = prometheus.ask(_filled(target["expr"]), 1.0).values()
    (mapping,) = drawn["fieldConfig"]["defaults"]["mappings"]
    shown = mapping["options"][f"{value:g}"]["text"].replace("-", "_")
    assert shown == max(states, key=order.index)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (lambda ask: ask.rate("slots"), "no counter 'slots'"),
        (lambda ask: ask.increase("nonsense"), "no counter 'nonsense'"),
        (lambda ask: ask.gauge("max", "attempts_total"), "no gauge 'attempts_total'"),
        (lambda ask: ask.rate("attempts", "colour"), "has no label 'colour'"),
        (lambda ask: ask.rate("attempts", "le"), "has no label 'le'"),
        (lambda ask: ask.quantile(0.5, "slots"), "no histogram 'slots'"),
    ],
)
def test_what_is_not_in_the_table_cannot_be_asked_for(question: Any, message: str):
    """A panel or rule about a metric that is not there fails when it is made."""
    with pytest.raises(ValueError, match=message):
        question(PromqlQueries("5m"))


@pytest.mark.parametrize(
    "arguments",
    [{"title": " "}, {"title": None}, {"uid": ""}, {"uid": "a b"}, {"uid": "x" * 41}, {"uid": 7}],
)
def test_names_that_grafana_refuses_are_refused(arguments: Any):
    """The message says what to write instead."""
    with pytest.raises(ValueError, match="write"):
        grafana_dashboard(**arguments)
