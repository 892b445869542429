"""Operator actions on idempotency keys: look one up, or forget it.

Promises:
- No stored answer and no payload is shown.
- A key that is in flight is never forgotten.
- A forgotten key is logged with the operator, and with a digest in place of the key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from seawall import registry
from seawall.dashboard.responses import RequestRefused, unavailable, unprocessable
from seawall.errors import KeyInFlight

log: Final = logging.getLogger("seawall.dashboard")

WITHIN: Final = 10.0
"""Timeout in seconds for the database."""
LONGEST: Final = 600
_ACTS: Final = ("list", "show", "forget")


async def answer_about_keys(
    body: Any, operator: str, client: str, report: Callable[..., None]
) -> dict[str, Any]:
    """Answer a request's JSON; raise `RequestRefused` if it is invalid."""
    act = body.get("act") if isinstance(body, dict) else None
    if act not in _ACTS:
        raise unprocessable(f"act: write one of {', '.join(_ACTS)}.")
    if act == "list":
        return {"records": sorted({entry.name for _, entry in _entered()})}
    records, named = _asked(body)
    try:
        async with asyncio.timeout(WITHIN):
            if act == "show":
                record = await records.alookup(*named)
                if record is None:
                    return {"record": None}
                events = [event._asdict() for event in record.events]
                return {"record": {**record._asdict(), "events": events}}
            found = await records.aforget(*named)
    except KeyInFlight:
        raise RequestRefused(
            409, "Conflict", "It is in flight: ask again when it has ended."
        ) from None
    except (TypeError, ValueError) as error:
        raise unprocessable(str(error)[:LONGEST]) from error
    except Exception as error:
        report("keys", logging.WARNING, "a key could not be looked up: %r", error)
        raise unavailable("The database could not be asked.") from error
    if found:
        _log(operator, client, *named)
    return {"done": "Forgotten." if found else "There is no record of this key."}


def _asked(body: dict[str, Any]) -> tuple[Any, tuple[str | None, str, str]]:
    """Return the requested records object, and the parts that identify one key."""
    from seawall.durable.http.middleware import read_scope

    for name in ("records", "operation", "key", "scope"):
        said = body.get(name)
        given = isinstance(said, str) and 0 < len(said) <= LONGEST
        if not given and not (name == "scope" and said is None):
            raise unprocessable(f"{name}: write text.")
    records = next((it for it, entry in _entered() if entry.name == body["records"]), None)
    if records is None:
        raise unprocessable("records: this process has none of that name.")
    try:
        scope = None if body.get("scope") is None else read_scope(body["scope"])
    except (TypeError, ValueError):
        raise unprocessable('scope: write text, or a JSON list such as ["acme", 7].') from None
    return records, (scope, body["operation"], body["key"])


def _entered() -> list[tuple[Any, registry.RegistryEntry]]:
    return [(it, entry) for it, entry in registry.entered() if entry.kind == "idempotency"]


def _log(operator: str, client: str, scope: str | None, operation: str, key: str) -> None:
    from seawall.models.idempotency import key_digest

    # repr: a name with a line break in it must not look like a separate record.
    log.warning(
        "dashboard: operator %r (%s) forgot a key of %r, scope %r, digest %s",
        operator, client, operation, scope, key_digest(scope or "", operation, key).hex()[:16],
        extra={"seawall_operator": operator, "seawall_act": "forget"}
    )  # fmt: skip
