"""Seawall in a FastAPI or Starlette app: one line for the whole app, dependencies for a route.

    edge = protect(app)

puts the edge around the app: deadlines, shedding, limits, health and draining, with every refusal
as problem+json, and tells about those answers in the app's OpenAPI description. A route's own limit or
guard is a dependency: `Depends(limited("10/min"))`, `Depends(guarded(vendor))`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

try:
    from starlette.applications import Starlette
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import Response
except ImportError as error:
    raise ImportError("seawall.web.fastapi needs Starlette: pip install 'seawall[web]'") from error

from seawall.errors import SeawallError
from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.web import _openapi
from seawall.web.admission import default_concurrency, default_shed
from seawall.web.edge import Edge
from seawall.web.health import Health
from seawall.web.inbound import Inbound
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import RequestLimit, RequestLimits
from seawall.web.problems import problem_of
from seawall.web.request import Incoming
from seawall.web.trust import Trust

__all__ = ["guarded", "limited", "protect"]

A = TypeVar("A", bound=Starlette)
Dependency = Callable[..., Any]

_SAME: Final = Trust()
