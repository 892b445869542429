"""Naming and description of errors: for logs, events, metrics, dead letters and the page.

Promises:
- `reason_of` returns a stable word with few values, fit for a metric's label: an HTTP status
  ("503"), a gRPC code ("UNAVAILABLE"), the `reason` of a Seawall error, otherwise the type's name.
- `described` returns a line for people: "503 from vendor.example", "ConnectTimeout: ...".
- An SDK's wrapper is named after the error inside: `APIConnectionError -> CircuitOpen: ...`.
- `report_of` returns that line and the traceback, as dead letters keep them; `split_report` splits
  them again.
- All text is redacted, printable and bounded (`_redaction`). Nothing raises, or keeps the error.
"""

from __future__ import annotations

from typing import Any, Final

from seawall._redaction import LONGEST, printable, redacted, safe_line
from seawall.errors import SeawallError

LONGEST_NAME: Final = 80  # maximum length of a reason and of a host, in characters

WRAPPERS: Final = frozenset(
    {
        "APIConnectionError",
        "APITimeoutError",
        "ModelConnectionError",
        "ModelTimeoutError",
        "OpenAIConnectionError",
        "OpenAITimeoutError",
    }
)
"""Errors by which SDKs (openai, anthropic, stripe...) report that their HTTP client failed.

Their own text is only "Connection error.". The later ones are those of pydantic-ai and LangChain.
"""

LONGEST_TRACEBACK: Final = 2_000  # characters of a traceback; the innermost frames are kept

_OURS: Final = (__file__.rpartition("_failures")[0], "seawall fast path")
"""How the file names of Seawall's own frames begin."""
_MOST_CAUSES: Final = 8
_LONGEST_LINE: Final = 200
_TRACEBACK: Final = "Traceback (most recent call last):"
_LEFT_OUT: Final = "  ..."
_STATUS_ERRORS: Final = frozenset(
    {"BadStatus", "KeyInProgress", "HTTPStatusError", "HTTPError", "ClientResponseError"}
)
"""Errors whose text contains only the status and the URL."""


def reason_of(error: BaseException) -> str:
    """Return the stable word for `error`; see the promises above."""
    inner = cause_in(error)
    if isinstance(inner, SeawallError):
        return inner.reason
    word = answer_of(inner)[0] or grpc_code(inner)[0]
    return word or printable(type(inner).__name__, LONGEST_NAME)


def described(error: BaseException, longest: int = LONGEST) -> str:
    """Return the name of `error` and the first line of its message, redacted."""
    inner = cause_in(error)
    said = said_by(inner, longest)
    kind = printable(type(inner).__name__, longest)
    if answer_of(inner)[0] or grpc_code(inner)[0]:
        text = said
    else:
        text = f"{kind}: {said}" if said else kind
    if inner is not error:
        outside = type(error).__name__
        if outside not in WRAPPERS and not isinstance(error, BaseExceptionGroup):
            own = _text_of(error, longest)
            outside = f"{outside}: {own}" if own else outside
        text = f"{outside} -> {text}"
    return printable(text, longest)


def said_by(error: BaseException, longest: int = LONGEST) -> str:
    """Return the first line of the message of `error`, redacted; empty if it has none."""
    inner = cause_in(error)
    status, answer = answer_of(inner)
    if status:
        host = _host_of(inner, answer)
        text = f"{status} from {host}" if host else status
        kind = type(inner).__name__
        own = "" if kind in _STATUS_ERRORS else _text_of(inner, longest)
        return printable(f"{text} ({kind}: {own})" if own else text, longest)
    code, details = grpc_code(inner)
    if code:
        return safe_line(f"{code}: {details}" if details else code, longest)
    return _text_of(inner, longest)


def traceback_of(error: BaseException) -> str:
    """Return the redacted, innermost frames of the traceback; empty if `error` was not raised."""
    from traceback import StackSummary, walk_tb

    try:
        frames = StackSummary.extract(walk_tb(error.__traceback__))
        if not frames:
            return ""
        outside = 0
        while outside < len(frames) - 1 and frames[outside].filename.startswith(_OURS):
            outside += 1
        lines = "".join(StackSummary.from_list(frames[outside:]).format()).splitlines()
    except Exception:  # noqa: BLE001 - source files may be anything
        return ""
    kept = [printable(redacted(line[:_LONGEST_LINE]), _LONGEST_LINE) for line in lines]
    kept.append(described(error))
    size = len(_TRACEBACK) + sum(len(line) + 1 for line in kept)
    cut = 0
    while size > LONGEST_TRACEBACK - len(_LEFT_OUT) and cut < len(kept) - 1:
        size -= len(kept[cut]) + 1
        cut += 1
    return "\n".join([_TRACEBACK, *([_LEFT_OUT] if cut else []), *kept[cut:]])


def report_of(error: BaseException, longest: int = LONGEST) -> str:
    """Return how `error` is stored: `described` on the first line, the traceback below it."""
    trace = traceback_of(error)
    said = described(error, longest)
    return f"{said}\n{trace}" if trace else said


def split_report(stored: str) -> tuple[str, str]:
    """Split the text of `report_of` into the line and the traceback; safe for any stored text."""
    said, _, trace = stored.partition("\n")
    lines = trace[:LONGEST_TRACEBACK].splitlines()
    return said, "\n".join(printable(line, LONGEST_TRACEBACK) for line in lines)


def log_failure(message: str, *args: object, error: BaseException | None = None) -> None:
    """Log `error`, or the exception that is being handled, as an error of a user's function."""
    from logging import getLogger

    getLogger("seawall").error(message, *args, exc_info=error or True, stacklevel=2)


def attribute_of(error: object, name: str, default: Any = None) -> Any:
    """Return an attribute of a foreign error, or `default` whatever reading it raises."""
    try:
        return getattr(error, name, default)
    except Exception:  # noqa: BLE001 - a property or a `__getattr__` of a foreign error
        return default


def cause_in(error: BaseException) -> BaseException:
    """Return the error inside a wrapper: an SDK's, a group of one, or any around one of ours."""
    for _ in range(_MOST_CAUSES):
        if isinstance(error, SeawallError):
            break
        inner: BaseException | None = error.__cause__
        if isinstance(error, BaseExceptionGroup):
            inner = error.exceptions[0] if len(error.exceptions) == 1 else None
        elif not isinstance(inner, SeawallError) and type(error).__name__ not in WRAPPERS:
            inner = None
        if inner is None:
            break
        error = inner
    return error


def answer_of(error: BaseException) -> tuple[str, Any]:
    """Return the status of the HTTP response that `error` reports, and the response; "" if none."""
    try:
        answer: Any = getattr(error, "response", None)
        if answer is None:  # aiohttp; urllib, where the error is the response
            answer = getattr(error, "request_info", None)
            if answer is None and hasattr(error, "geturl"):
                answer = error
        if answer is None:
            return "", None
        candidates = (
            getattr(error, "status", None),
            getattr(error, "status_code", None),
            getattr(answer, "status_code", None),
            getattr(error, "code", None),
        )
        statuses = [one for one in candidates if type(one) is int and 400 <= one <= 599]  # noqa: PLR2004
    except Exception:  # noqa: BLE001 - properties of a foreign error
        return "", None
    return (str(statuses[0]), answer) if statuses else ("", None)


def _host_of(error: Any, answer: Any) -> str:
    from operator import attrgetter
    from urllib.parse import urlsplit

    for whose, name in ((answer, "url"), (error, "request.url")):
        try:
            url = attrgetter(name)(whose)
            host = getattr(url, "host", None) or urlsplit(str(url)).hostname
        except Exception:  # noqa: BLE001, S112 - httpx raises where a response has no request
            continue
        if host and isinstance(host, str):
            return printable(host, LONGEST_NAME)
    return ""


def grpc_code(error: BaseException) -> tuple[str, str]:
    """Return the code of the gRPC call that `error` reports, and its details; or empty strings."""
    code = attribute_of(error, "code")
    details = attribute_of(error, "details")
    if not (callable(code) and callable(details)):
        return "", ""
    try:
        name = getattr(code(), "name", "")
        return printable(name, LONGEST_NAME), str(details() or "")
    except Exception:  # noqa: BLE001 - foreign methods
        return "", ""


def _text_of(error: BaseException, longest: int) -> str:
    """Return the first line of the error's own text, redacted; empty if `str` fails."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's error whose `str` fails
        return ""
    return safe_line(text, longest)
