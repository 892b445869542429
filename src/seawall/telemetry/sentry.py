"""A `before_send` for Sentry: errors of ours in few groups, and no report of a refusal.

Promises:
- A call that was refused (`Rejected`, also inside an SDK's wrapper or a group) is not reported: it
  is counted by its guard, and what caused it (a dead vendor, too much load) is reported once.
- A timeout is one issue for each guard, wherever it was raised; so is a line of the log about an
  event, such as a job that died. Other errors are grouped as Sentry groups them.
- It needs nothing of sentry-sdk, and never raises.
"""

from __future__ import annotations

from typing import Any

from seawall._failures import WRAPPERS, cause_in
from seawall._redaction import printable
from seawall.errors import Rejected, SeawallError

__all__ = ["sentry_before_send"]

_LONGEST = 200


def sentry_before_send(event: Any, hint: Any) -> Any:
    """Return `event`, grouped and tagged by guard and reason, or None if it reports a refusal.

    Use it as `sentry_sdk.init(before_send=sentry_before_send)`. A `before_send` of your own can
    call it first, and return None if it does.
    """
    record = hint.get("log_record")
    error = (hint.get("exc_info") or (None, None, None))[1]
    if isinstance(error, BaseException):
        if _is_ours(error):
            inner = cause_in(error)
            if isinstance(inner, Rejected):
                return None
            if isinstance(inner, SeawallError):
                _group(event, inner.reason, getattr(inner, "guard", ""))
    elif name := getattr(record, "seawall_event", ""):
        _group(event, name, getattr(record, "seawall_guard", ""))
    return event


def _is_ours(error: BaseException) -> bool:
    """Return whether nobody but an SDK or a task group has wrapped the error.

    An error that the user raised from one of ours says what the user wants to have reported.
    """
    return isinstance(error, (SeawallError, BaseExceptionGroup)) or type(error).__name__ in WRAPPERS


def _group(event: dict[str, Any], reason: str, guard: object) -> None:
    name = printable(str(guard), _LONGEST)
    event["fingerprint"] = ["seawall", reason, name]
    event["tags"] = {**(event.get("tags") or {}), "seawall.reason": reason, "seawall.guard": name}
