"""Retry conditions: which errors and values are worth another attempt, as given by `on=`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from errno import EHOSTUNREACH, ENETDOWN, ENETUNREACH
from typing import Any, Final

from seawall import _checks as check
from seawall._failures import answer_of, cause_in, grpc_code
from seawall.errors import Rejected

Predicate = Callable[[Exception | None, Any], bool]
"""`on(error, value)`: whether to retry a call that raised `error`, or returned `value`."""
On = type[Exception] | Predicate | Iterable["type[Exception] | Predicate"]


def read_on(on: Any) -> tuple[tuple[type[Exception], ...], tuple[Predicate, ...]]:
    """Return the types and the predicates in `on`, or raise."""
    items = [on] if isinstance(on, type) or callable(on) else on
    advice = "write exception types, such as on=ConnectionError, or a function of (error, value)"
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise TypeError(f"on={on!r}: {advice}")
    items = tuple(items)
    if not items:
        raise ValueError(f"on={on!r}: {advice}")
    types: list[type[Exception]] = []
    predicates: list[Predicate] = []
    for item in items:
        if isinstance(item, type):
            if not issubclass(item, Exception):
                raise TypeError(
                    f"on={item.__name__}: cancellation and exits are never retried; {advice}"
                )
            types.append(item)
        elif callable(item):
            predicates.append(check.plain_function("on", item))
        else:
            raise TypeError(f"on={item!r}: {advice}")
    return tuple(types), tuple(predicates)


_STATUSES: Final = frozenset({"408", "425", "429", "502", "503", "504", "529"})
_GRPC_CODES: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
_GRPC_EXHAUSTED: Final = "RESOURCE_EXHAUSTED"
"""Transient only with a retry time: it is also the code of a message that is too large."""
_SQL_STATES: Final = ("08", "40", "53", "55P03", "57P01", "57P02", "57P03")
"""SQLSTATE prefixes: connections, rollbacks by conflict, resources, locks, restarts."""
_NETWORK: Final = frozenset({EHOSTUNREACH, ENETDOWN, ENETUNREACH})
_WRAPPED: Final = ("orig", "reason")
"""Attributes in which SQLAlchemy and urllib keep the error that they report."""

_HTTPX: Final = frozenset({"NetworkError", "TimeoutException", "RemoteProtocolError", "ProxyError"})
_SDK: Final = frozenset({"APIConnectionError"})
_PASSING: Final = {
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    "httpcore": _HTTPX,
    "requests": frozenset({"ConnectionError", "Timeout", "ChunkedEncodingError"}),
    "urllib3": frozenset({"TimeoutError", "NewConnectionError", "ProtocolError"}),
    "aiohttp": frozenset({"ClientConnectionError", "ClientPayloadError"}),
    "botocore": frozenset({"ConnectionError", "ConnectionClosedError", "ReadTimeoutError"}),
    "redis": frozenset({"ConnectionError", "TimeoutError"}),
    "valkey": frozenset({"ConnectionError", "TimeoutError"}),
    "psycopg": frozenset({"OperationalError"}),
    "psycopg_pool": frozenset({"PoolTimeout"}),
    "openai": _SDK,
    "anthropic": _SDK,
}
"""Classes of transient errors by package, including their subclasses."""

_LASTING: Final = frozenset(
    {
        "AuthenticationError", "AuthorizationError",  # of redis, where they are ConnectionErrors
        "SSLError", "InvalidProxyURL",  # of requests
        "ClientConnectorCertificateError", "ClientConnectorSSLError",  # of aiohttp
    }
)  # fmt: skip
"""Subclasses of those that are not transient: another attempt ends in the same way."""


def transient(error: Exception | None, _value: object = None) -> bool:
    """Return whether `error` is transient: for `on=transient`, whichever client raised it.

    Transient errors are: lost connections and timeouts of Python itself, httpx, requests, urllib3,
    aiohttp, botocore, redis, psycopg, asyncpg, SQLAlchemy, openai and anthropic; responses with
    408, 425, 429, 502, 503, 504 and 529; in a guarded HTTP client, the responses that its
    `statuses` name; the gRPC codes UNAVAILABLE and DEADLINE_EXCEEDED, and RESOURCE_EXHAUSTED if the
    server says when to retry; conflicts of database transactions. An error class of your own can
    have an attribute `transient`, True or False. Refusals (`Rejected`) and errors of certificates
    and passwords are not transient. None of these libraries is imported: their errors are
    recognised by module and name.

    Returned values are ignored.
    """
    if error is None:
        return False
    inner = cause_in(error)
    if isinstance(inner, Rejected):
        return False
    try:
        return _passes(inner) or (inner is not error and _passes(error))
    except Exception:  # noqa: BLE001 - properties of a foreign error
        return False


def _passes(error: BaseException) -> bool:
    """Check the error's own attribute, the code it reports, and its classes, in that order."""
    said = getattr(error, "transient", None)
    if isinstance(said, bool):
        return said
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    if any(name in _LASTING for _, name in names):
        return False
    reported = _reported(error)
    if reported is not None:
        return reported
    known = isinstance(error, (ConnectionError, TimeoutError)) or (
        isinstance(error, OSError) and error.errno in _NETWORK
    )
    if known or any(name in _PASSING.get(package, ()) for package, name in names):
        return True
    inside = (getattr(error, name, None) for name in _WRAPPED)
    return any(isinstance(one, Exception) and _passes(one) for one in inside)


def _reported(error: BaseException) -> bool | None:
    """Decide by the database's state, the HTTP status or the gRPC code; None if there is none."""
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str):
        return state.startswith(_SQL_STATES)
    status, code = answer_of(error)[0], grpc_code(error)[0]
    if status:
        return status in _STATUSES
    if code == _GRPC_EXHAUSTED:
        return getattr(error, "retry_after", None) is not None
    return code in _GRPC_CODES if code else None
