"""How a call of a language model ended: what its error says of tokens, and of having been sent."""

from __future__ import annotations

from typing import Final

from seawall._failures import attribute_of
from seawall.errors import Rejected

TIMEOUT, CLIENT, SERVER, TOO_MANY, OVERLOADED = 408, 400, 500, 429, 529
_REDIRECT: Final = 300

_UNSENT: Final = frozenset(
    ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol")
)
"""Errors of HTTP libraries, by name, after which nothing was sent."""

_CAUSES: Final = 5
_MARK: Final = "seawall_unsent"


def status_of(error: object) -> int | None:
    """Return the status of the answer that `error` stands for, if it does."""
    for holder in (error, attribute_of(error, "response")):
        for name in ("status", "status_code"):
            status = attribute_of(holder, name)
            if type(status) is int:
                return status
    return None


def was_refused(status: int | None) -> bool:
    """Tell whether an answer of that status used no tokens: the request was not worked on there."""
    if status is None or status == TIMEOUT:
        return False
    return _REDIRECT <= status < SERVER or status == OVERLOADED


def mark_unsent(error: Exception, guard: str) -> None:
    """Note at an error of one request under that `guard` whether nothing of it was sent."""
    kinds = type(error).__mro__
    if isinstance(error, Rejected) or any(kind.__name__ in _UNSENT for kind in kinds):
        setattr(error, _MARK, guard)


def nothing_sent(error: BaseException | None, guard: str) -> bool:
    """Tell whether nothing was sent of the call under `guard` that ended so.

    Known is that of a request which is marked, and of a refusal by this very guard. Any other error
    may be about something else that the guarded function did after it had asked a model.
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
