"""An edge with all its parts, for the functions that put it around a framework's app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypedDict, Unpack

from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.registry import free_name
from seawall.web.asgi_types import App
from seawall.web.edge.core import DEFAULT, limits_of
from seawall.web.edge.edge import Edge, default_concurrency
from seawall.web.edge.inbound import Classify, Inbound
from seawall.web.edge.loop_admission import LoopAdmission
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import RequestLimit, RequestLimits
from seawall.web.trust import Trust

MOST_WEBSOCKETS: Final = 2000
"""Default maximum number of open websockets; one address may open half of them."""


class EdgeParts(TypedDict, total=False):
    """The settings of `protect(app, ...)`: see `seawall.web.fastapi.protect`."""

    name: str | None
    timeout: float | None
    reserve: float | None
    trust: Trust | None
    classify: Classify | None
    limits: RequestLimits | RequestLimit | Sequence[RequestLimit] | None
    shed: Shed | None
    loop_admission: LoopAdmission | None
    concurrency: AdaptiveLimit | Bulkhead | None
    routes: Mapping[str, AdaptiveLimit | Bulkhead] | None
    websockets: Bulkhead | None
    websockets_per_address: int | None
    stall: float | None
    health: Health | None
    lifecycle: Lifecycle | None
    report_degraded: bool | str


def default_edge(app: App, **parts: Unpack[EdgeParts]) -> Edge:
    """Return an edge around `app`; parts that are not given have their defaults."""
    name = parts.get("name")
    if name is None:
        name = free_name("edge")
    websockets = parts.get("websockets", DEFAULT)
    per_address = parts.get("websockets_per_address", DEFAULT)
    if per_address is DEFAULT:
        per_address = MOST_WEBSOCKETS // 2 if websockets is DEFAULT else None
    admission = parts.get("loop_admission", DEFAULT)
    concurrency = parts.get("concurrency", DEFAULT)
    lifecycle = parts.get("lifecycle", DEFAULT)
    if lifecycle is DEFAULT:
        lifecycle = Lifecycle(name=name)
    health = parts.get("health", DEFAULT)
    return Edge(
        app,
        name=name,
        inbound=Inbound(
            trust=parts.get("trust"),
            timeout=parts.get("timeout", 30.0),
            reserve=parts.get("reserve"),
            classify=parts.get("classify"),
        ),
        shed=parts.get("shed"),
        limits=limits_of(parts.get("limits")),
        loop_admission=LoopAdmission() if admission is DEFAULT else admission,
        concurrency=default_concurrency() if concurrency is DEFAULT else concurrency,
        routes=parts.get("routes"),
        websockets=Bulkhead(MOST_WEBSOCKETS) if websockets is DEFAULT else websockets,
        websockets_per_address=per_address,
        stall=parts.get("stall", 30.0),
        health=Health(name=name, lifecycle=lifecycle) if health is DEFAULT else health,
        lifecycle=lifecycle,
        report_degraded=parts.get("report_degraded", False),
    )
