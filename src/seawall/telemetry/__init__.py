"""Telemetry of a service: metrics, span events and log records, each enabled by one line.

`export_prometheus()` needs prometheus-client (the extra `prometheus`), `export_opentelemetry()`
opentelemetry-api (the extra `otel`), `log_events()` nothing. Each name is loaded when it is used.
"""

from __future__ import annotations

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall` itself
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from seawall.telemetry.alerts import alert_rules
    from seawall.telemetry.grafana.dashboard import grafana_dashboard
    from seawall.telemetry.logs import log_events
    from seawall.telemetry.metrics import METRICS, Metric
    from seawall.telemetry.otel import export_opentelemetry
    from seawall.telemetry.prometheus import export_prometheus
    from seawall.telemetry.refresh import Refresher, arefresh
    from seawall.telemetry.sentry import sentry_before_send

__all__ = [
    "METRICS",
    "Metric",
    "Refresher",
    "TelemetrySwitch",
    "alert_rules",
    "arefresh",
    "export_opentelemetry",
    "export_prometheus",
    "grafana_dashboard",
    "log_events",
    "sentry_before_send",
]


class TelemetrySwitch:
    """Something that is on; `close()`, or the end of a `with` block, switches it off."""

    def __init__(self, what: str, off: Callable[[], None]) -> None:
        """Call `off` once, when closed; `what` is its name."""
        self._what = what
        self._off: list[Callable[[], None]] = [off]

    def __repr__(self) -> str:
        return f"<{self._what}: {'on' if self._off else 'off'}>"

    def close(self) -> None:
        """Switch it off. Idempotent, and callable from any thread."""
        try:
            off = self._off.pop()
        except IndexError:
            return
        off()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


_HOMES = {
    "telemetry.metrics": "METRICS Metric",
    "telemetry.refresh": "Refresher arefresh",
    "telemetry.alerts": "alert_rules",
    "telemetry.grafana.dashboard": "grafana_dashboard",
    "telemetry.logs": "log_events",
    "telemetry.otel": "export_opentelemetry",
    "telemetry.prometheus": "export_prometheus",
    "telemetry.sentry": "sentry_before_send",
}
"""Public names by the module that defines them."""

if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
