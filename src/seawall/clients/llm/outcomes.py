"""The end of a language model call: whether its exception means unused tokens, or nothing sent."""

from __future__ import annotations

from typing import Final

from seawall._failures import attribute_of
from seawall.errors import Rejected

TIMEOUT, CLIENT, SERVER, TOO_MANY, OVERLOADED = 408, 400, 500, 429, 529
_REDIRECT: Final = 300

_UNSENT: Final = frozenset(
    ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol")
)
"""Exceptions of HTTP libraries, by name, which mean that nothing was sent."""

_CAUSES: Final = 5
_MARK: Final = "seawall_unsent"


def status_of(error: object) -> int | None:
    """Return the status of the response that `error` represents, if any."""
    for holder in (error, attribute_of(error, "response")):
        for name in ("status", "status_code"):
            status = attribute_of(holder, name)
            if type(status) is int:
                return status
    return None


def was_refused(status: int | None) -> bool:
    """Return whether a response with that status used no tokens: the vendor did not process it."""
    if status is None or status == TIMEOUT:
        return False
    return _REDIRECT <= status < SERVER or status == OVERLOADED


def mark_unsent(error: Exception, guard: str) -> None:
    """Mark an exception of a request under that `guard` if nothing was sent."""
    kinds = type(error).__mro__
    if isinstance(error, Rejected) or any(kind.__name__ in _UNSENT for kind in kinds):
        setattr(error, _MARK, guard)


def nothing_sent(error: BaseException | None, guard: str) -> bool:
    """Return whether nothing was sent in the call under `guard` that ended with `error`.

    That is known of a marked request, and of a refusal by this very guard. Any other exception may
    come from something else that the guarded function did after it had called a model.
    """
    for _ in range(_CAUSES):
        if error is None:
            return False
        if attribute_of(error, _MARK) == guard:
            return True
        if isinstance(error, Rejected) and error.guard == guard:
            return True
        error = error.__cause__
    return False
