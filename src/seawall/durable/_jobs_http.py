"""HTTP parts of the jobs API: preferences, responses and the status document."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from seawall.durable._jobs_records import JSON, Job
from seawall.errors import SeawallError
from seawall.web.problems import Problem, problem_of
from seawall.wire._text import text_of, whole_of
from seawall.wire.retry_after import write_retry_after

Headers = list[tuple[bytes, bytes]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_PREFERENCE: Final = re.compile(
    r"[ \t]*([!#$%&'*+\-.^_`|~0-9A-Za-z]+)[ \t]*(?:=[ \t]*(?:\"([^\"]*)\"|([^\s\",;]*)))?[ \t]*"
)
_MOST_PREFERENCES: Final = 16
_NO_CONTENT: Final = 204


class Prefer(NamedTuple):
    """The client's preferences (RFC 7240) that concern jobs."""

    wait: int | None = None
    respond_async: bool = False


def read_prefer(headers: Headers) -> Prefer:
    """Return the preferences of the `Prefer` headers; ignore invalid ones, as the RFC asks.

    If a preference is given twice, the first one counts.
    """
    wait: int | None = None
    respond_async = False
    seen = 0
    for name, value in headers:
        if name != b"prefer" or (text := text_of(value)) is None:
            continue
        for part in text.split(",", _MOST_PREFERENCES):
            seen += 1
            match = _PREFERENCE.match(part) if seen <= _MOST_PREFERENCES else None
            if match is None:
                continue
            word = match[1].lower()
            if word == "wait" and wait is None:
                wait = whole_of(match[2] or match[3] or "", 9)
            respond_async = respond_async or word == "respond-async"
    return Prefer(wait, respond_async)


class Reply(NamedTuple):
    """A response: an ASGI app, or a Starlette response by `response()`."""

    status: int
    headers: Headers
    body: bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        """Send the response."""
        headers = list(self.headers)
        if self.status != _NO_CONTENT:  # a 204 has no content-length (RFC 9110, 8.6)
            headers.append((b"content-length", str(len(self.body)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        body = b"" if scope.get("method") == "HEAD" else self.body
        await send({"type": "http.response.body", "body": body})

    def response(self) -> Any:
        """Return the response for a FastAPI or Starlette route."""
        from starlette.responses import Response

        response = Response(self.body, self.status)
        own = [(name, value) for name, value in self.headers if name != b"content-length"]
        length = (b"content-length", str(len(self.body)).encode())
        response.raw_headers = [*own, length]
        return response


def problem(status: int, title: str, detail: str, wait: float | None = None) -> Reply:
    """Return a problem document as response."""
    return _reply_of(Problem(status, title, detail, retry_after=wait))


def refusal(error: SeawallError) -> Reply:
    """Return the response for an error of this library."""
    told = problem_of(error)
    assert told is not None  # noqa: S101 - each of them has a problem document
    return _reply_of(told)


def _reply_of(told: Problem) -> Reply:
    return Reply(told.status, [*told.raw_headers(), (b"cache-control", b"no-store")], told.body())


def not_found() -> Reply:
    """Return the 404 for a foreign or missing job: the same bytes in both cases."""
    return problem(404, "Not found", "There is no such job.")


def document(job: Job, url: str, *, inline: int, show_errors: bool) -> dict[str, Any]:
    """Return the status document of a job."""
    told: dict[str, Any] = {
        "id": job.id,
        "kind": job.kind,
        "state": job.state,
        "status_url": url,
        "progress": job.progress,
        "message": job.message,
        "attempts": job.attempts,
        "created_at": _moment(job.created_at),
        "started_at": _moment(job.started_at),
        "ended_at": _moment(job.ended_at),
        "expires_at": _moment(job.expires_at),
    }
    if job.cancelling and not job.ended:
        told["cancelling"] = True
    if job.state == "succeeded":
        body = job.body
        if body is None:
            told["result"] = None
        elif job.content_type == JSON and len(body) <= inline:
            told["result"] = job.result
        else:
            told["result_url"] = f"{url}/result"
    if job.state == "failed":
        # Exception messages are for the operators of the service.
        told["error"] = job.error if show_errors else "The job failed."
    return told


def json_reply(status: int, told: dict[str, Any], more: Headers) -> Reply:
    """Return a JSON document as a response that must not be cached."""
    headers = [(b"content-type", JSON.encode()), (b"cache-control", b"no-store"), *more]
    return Reply(status, headers, json.dumps(told, allow_nan=False).encode())


def retry_header(seconds: float) -> tuple[bytes, bytes]:
    """Return the `Retry-After` header."""
    return b"retry-after", write_retry_after(seconds).encode()


def _moment(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None  # the stored value may be invalid
