"""A dashboard for Grafana 10 and later, made from the table of metrics.

Promises:
- It contains every metric.
- It can be imported or provisioned as it is: the data source is chosen on the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from string import ascii_uppercase
from typing import Any, Final

from seawall.telemetry.grafana.panels import ROWS, Panel, Query, mentions
from seawall.telemetry.metrics import METRICS

__all__ = ["grafana_dashboard"]

SCHEMA: Final = 38
"""The version of the classic model that Grafana 10 writes; later versions read it."""
COLUMNS: Final = 24
WIDTH: Final = 8
HEIGHT: Final = 8
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def grafana_dashboard(*, title: str = "Seawall", uid: str = "seawall") -> dict[str, Any]:
    """Return the dashboard as plain data, to be written as JSON.

    Import a changed copy under another `uid`: Grafana identifies dashboards by it.
    """
    if not isinstance(title, str) or not title.strip():
        raise ValueError(f"title={title!r}: write what the dashboard is to be called")
    if not isinstance(uid, str) or not 1 <= len(uid) <= 40 or not uid.replace("-", "").isalnum():  # noqa: PLR2004 - Grafana's limit
        raise ValueError(f"uid={uid!r}: write up to 40 letters, digits and dashes")
    return {
        "uid": uid,
        "title": title,
        "description": "Guards, queues and all else that Seawall protects a service with.",
        "tags": ["seawall", "resilience"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "id": None,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [],
        "annotations": {"list": [_openings()]},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "refresh": 1}
    choice = {"hide": 0, "includeAll": False, "multi": False, "options": [], "current": {}}
    yield {**source, "query": "prometheus", **choice}
    of = "seawall_autoscale_load"  # every process exports it
    yield _variable("job", "Service", f"label_values({of}, job)")
    yield _variable("instance", "Process", f'label_values({of}{{job=~"$job"}}, instance)')
    yield _variable("guard", "Guard", 'label_values(seawall_attempts_total{job=~"$job"}, guard)')


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"{name}-values"},
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "options": [],
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _openings() -> dict[str, Any]:
    scope = '{to="open",job=~"$job",instance=~"$instance",guard=~"$guard"}'
    return {
        "name": "Breakers open",
        "datasource": _SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": f"sum by (guard) (increase(seawall_breaker_transitions_total{scope}[1m])) > 0",
        "step": "60s",
        "titleFormat": "opened",
        "textFormat": "{{guard}}",
    }


def _panels() -> Iterator[dict[str, Any]]:
    number = 0
    top = 0
    for title, panels in ROWS.items():
        number += 1
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        row = {"type": "row", "title": title, "collapsed": False, "panels": []}
        yield {"id": number, "gridPos": place, **row}
        top += 1
        left = 0
        for panel in panels:
            if left + WIDTH > COLUMNS:
                left, top = 0, top + HEIGHT
            number += 1
            place = {"x": left, "y": top, "w": WIDTH, "h": HEIGHT}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            left += WIDTH
        top += HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    kinds = {"states": "state-timeline", "firing": "table"}
    instant = panel.shape == "firing"
    return {
        "type": kinds.get(panel.shape, "timeseries"),
        "title": panel.title,
        "description": _description(panel.queries),
        "datasource": _SOURCE,
        "targets": [
            _target(query, letter, instant=instant)
            for query, letter in zip(panel.queries, ascii_uppercase, strict=False)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        **_looks(panel),
    }


def _description(queries: Iterable[Query]) -> str:
    paragraphs = [
        f"{metric.name}: {metric.help}."
        for metric in METRICS
        if any(mentions(query.expr, metric) for query in queries)
    ]
    return (
        "\n\n".join(paragraphs)
        or "Alerts of `seawall metrics --alerts`, where Prometheus has them."
    )


def _target(query: Query, letter: str, *, instant: bool) -> dict[str, Any]:
    return {
        "refId": letter,
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend,
        "instant": instant,
        "range": not instant,
        "format": "table" if instant else "time_series",
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    colors = (("yellow", panel.warn), ("red", panel.bad))
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": value} for color, value in colors if value is not None]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": [],
        "color": {"mode": "palette-classic"},
    }
    if panel.shape in {"lines", "stack"}:
        defaults["min"] = 0
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.shape == "stack" else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.shape == "stack" else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if len(steps) > 1 else "off"},
        }
    if panel.shape == "states":
        defaults["color"] = {"mode": "thresholds"}
        defaults["custom"] = {"fillOpacity": 80, "lineWidth": 0}
        words = {
            str(value): {"text": text, "color": color, "index": value}
            for value, (text, color) in enumerate(panel.values)
        }
        defaults["mappings"] = [{"type": "value", "options": words}]
    if panel.shape == "firing":
        defaults["noValue"] = "Nothing fires"
    return defaults


def _looks(panel: Panel) -> dict[str, Any]:
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    if panel.shape == "states":
        return {"options": {"mergeValues": True, "showValue": "never", "legend": legend}}
    if panel.shape == "firing":
        hidden = dict.fromkeys(("Time", "Value", "__name__", "alertstate"), True)
        organize = {"id": "organize", "options": {"excludeByName": hidden}}
        return {"options": {"showHeader": True}, "transformations": [organize]}
    return {"options": {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}}
