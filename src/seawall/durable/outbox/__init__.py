"""Events that are committed with the rows they describe, and delivered afterwards."""

from seawall.durable.outbox.events import (
    BlockedAggregate,
    DeadEvent,
    FromRow,
    NewEvent,
    OutboxEvent,
)
from seawall.durable.outbox.outbox import Outbox

__all__ = ["BlockedAggregate", "DeadEvent", "FromRow", "NewEvent", "Outbox", "OutboxEvent"]
