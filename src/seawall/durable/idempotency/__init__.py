"""Effects that happen once for each key: reserve and complete, in a transaction, in a statement."""

from seawall.durable.idempotency.idempotency import Idempotency
from seawall.durable.idempotency.once import Once
from seawall.durable.idempotency.records import KeyEvent, KeyRecord
from seawall.durable.idempotency.single_statement import Single

__all__ = ["Idempotency", "KeyEvent", "KeyRecord", "Once", "Single"]
