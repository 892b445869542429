"""Telemetry of a service: metrics, span events and log records, each enabled by one line.

`export_prometheus()` needs prometheus-client (the extra `prometheus`), `export_opentelemetry()`
opentelemetry-api (the extra `otel`), `log_events()` nothing. Each name is loaded when it is used.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall` itself
if TYPE_CHECKING:
    from seawall.telemetry._names import METRICS, Metric
    from seawall.telemetry._refresh import Refresher, arefresh
    from seawall.telemetry._switch import Switch
    from seawall.telemetry.alerts import alert_rules
    from seawall.telemetry.grafana import grafana_dashboard
    from seawall.telemetry.logs import log_events
    from seawall.telemetry.otel import export_opentelemetry
    from seawall.telemetry.prometheus import export_prometheus

__all__ = [
    "METRICS",
    "Metric",
    "Refresher",
    "Switch",
    "alert_rules",
    "arefresh",
    "export_opentelemetry",
    "export_prometheus",
    "grafana_dashboard",
    "log_events",
]

_HOMES = {
    "telemetry._names": "METRICS Metric",
    "telemetry._refresh": "Refresher arefresh",
    "telemetry._switch": "Switch",
    "telemetry.alerts": "alert_rules",
    "telemetry.grafana": "grafana_dashboard",
    "telemetry.logs": "log_events",
    "telemetry.otel": "export_opentelemetry",
    "telemetry.prometheus": "export_prometheus",
}
"""Public names by the module that defines them."""

if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
