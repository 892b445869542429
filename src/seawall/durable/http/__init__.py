"""Idempotency for HTTP: the ASGI middleware, and completion by the handler."""

from seawall.durable.http.completion import Keyed
from seawall.durable.http.middleware import IdempotentRequests, keyed
from seawall.durable.http.responses import Reply, RequestOutcome

__all__ = ["IdempotentRequests", "Keyed", "Reply", "RequestOutcome", "keyed"]
