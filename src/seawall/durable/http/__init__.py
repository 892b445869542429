"""Idempotency for HTTP: the ASGI middleware, and completion by the handler."""

from seawall.durable.http.completion import IdempotentRequest
from seawall.durable.http.middleware import IdempotentRequests, idempotent_request
from seawall.durable.http.responses import Reply, RequestOutcome

__all__ = [
    "IdempotentRequest",
    "IdempotentRequests",
    "Reply",
    "RequestOutcome",
    "idempotent_request",
]
