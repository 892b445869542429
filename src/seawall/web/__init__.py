"""The server's edge: the checks that a request passes before any work is done, and the responses.

`Edge` is a plain ASGI class around any app, and has parts: `Inbound`, `RequestLimits`,
`LoopAdmission`, `Health`, `Lifecycle`. `seawall.web.fastapi.protect(app)` puts them around a
FastAPI or Starlette app. Checks for `Health` are in `seawall.web.checks`, interceptors for gRPC
servers in `seawall.web.grpc`.
"""

from seawall.runtime.streams import primed
from seawall.web.edge import Edge, default_concurrency
from seawall.web.edge.inbound import Inbound, Rank
from seawall.web.edge.loop_admission import LoopAdmission
from seawall.web.health import CheckFinding, Degraded, Health, Healthy, Unhealthy
from seawall.web.lifecycle import Drained, Lifecycle
from seawall.web.limits import RequestLimit, RequestLimits
from seawall.web.principals import address_and_route, api_key, user
from seawall.web.problems import Problem, problem_of
from seawall.web.request import Incoming
from seawall.web.trust import Trust

__all__ = [
    "CheckFinding",
    "Degraded",
    "Drained",
    "Edge",
    "Health",
    "Healthy",
    "Inbound",
    "Incoming",
    "Lifecycle",
    "LoopAdmission",
    "Problem",
    "Rank",
    "RequestLimit",
    "RequestLimits",
    "Trust",
    "Unhealthy",
    "address_and_route",
    "api_key",
    "default_concurrency",
    "primed",
    "problem_of",
    "user",
]
