"""What a type checker makes of telemetry and dashboard: checked by mypy, never run.

Each `type: ignore` marks a use that must be an error; mypy complains about one that is not.
"""

from __future__ import annotations

from typing import Any, assert_type

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

import seawall
from seawall import Guard, RedisStore
from seawall.dashboard import Dashboard, Visit
from seawall.telemetry import (
    METRICS,
    Metric,
    Refresher,
    TelemetrySwitch,
    alert_rules,
    arefresh,
    export_opentelemetry,
    export_prometheus,
    grafana_dashboard,
    log_events,
)


def snapshots(guard: Guard) -> None:
    assert_type(seawall.snapshot(), dict[str, list[dict[str, Any]]])
    assert_type(guard.snapshot(), dict[str, Any])


def metrics() -> None:
    assert_type(METRICS, tuple[Metric, ...])
    assert_type(alert_rules(), str)
    assert_type(grafana_dashboard(title="Shop"), dict[str, Any])
    with export_prometheus(CollectorRegistry(), max_series=100) as switch:
        assert_type(switch, TelemetrySwitch)
    assert_type(export_opentelemetry(), TelemetrySwitch)
    assert_type(log_events(), TelemetrySwitch)
    export_prometheus("registry")  # type: ignore[arg-type]
    export_prometheus(None, 100)  # type: ignore[call-arg]


async def asked() -> None:
    assert_type(await arefresh(timeout=1.0), int)
    async with Refresher(every=5.0) as refresher:
        assert_type(refresher, Refresher)


def may_look(visit: Visit) -> bool:
    return visit.header("authorization") == "Bearer secret"


async def who_acts(visit: Visit) -> str | None:
    return visit.cookies.get("operator")


def pages(app: FastAPI, store: RedisStore) -> None:
    app.mount("/seawall", Dashboard(allow=may_look, operate=who_acts, shared=store))
    app.mount("/local", Dashboard(local=True, every=0.5))
    Dashboard(allow="everybody")  # type: ignore[arg-type]
