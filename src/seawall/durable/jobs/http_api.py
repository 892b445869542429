"""Jobs over HTTP: 202 Accepted, a status URL and the result.

    POST   (your own route)   202, `Location`, `status_url`; 200 if it ended within `Prefer: wait`;
                              503 with `Retry-After` while there is no room for more jobs
    GET    /jobs/{id}         200 with the state; `Retry-After` until it has ended
    GET    /jobs/{id}/result  200 with the result itself, once there is one
    DELETE /jobs/{id}         202: being cancelled; 200: cancelled; 409: it had already ended
    POST   /jobs/{id}/cancel  same as DELETE

Promises:

- A client that may not see a job gets the same bytes as for a job that does not exist: 404.
- An expired job is 410 for as long as the fact that it existed is kept.
- No request waits longer than `max_wait`, and at most `max_waiting` requests wait at once.
- Exception messages are not sent to clients, unless `show_errors` is set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, MutableMapping
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.durable.http.middleware import checked_trust, incoming_of, scope_text
from seawall.durable.http.responses import Reply
from seawall.durable.jobs.jobs import Jobs
from seawall.durable.jobs.records import JSON, Job, payload_of
from seawall.errors import (
    AmbiguousHeader,
    JobExpired,
    KeyMissing,
    KeyReused,
    QueueFull,
    SeawallError,
    TimedOut,
    UnknownJob,
)
from seawall.models.durable_jobs import POLL_LEAST, POLL_MOST, poll_after, poll_of
from seawall.models.idempotency import Headers
from seawall.runtime.mutex import Mutex
from seawall.web.asgi_types import Send
from seawall.web.openapi import answer, describe_key, describing, operations
from seawall.web.principals import plain_function
from seawall.web.problems import Problem, problem_of
from seawall.web.request import Incoming, path_below_root
from seawall.web.trust import Trust
from seawall.wire.idempotency import IDEMPOTENCY_HEADER
from seawall.wire.retries import write_retry_after
from seawall.wire.text import text_of, whole_of

_KEY_HEADER: Final = IDEMPOTENCY_HEADER.lower().encode()
_ALLOWED: Final = {"": "GET, HEAD, DELETE", "result": "GET, HEAD", "cancel": "POST"}

_PREFERENCE: Final = re.compile(
    r"[ \t]*([!#$%&'*+\-.^_`|~0-9A-Za-z]+)[ \t]*(?:=[ \t]*(?:\"([^\"]*)\"|([^\s\",;]*)))?[ \t]*"
)
_MOST_PREFERENCES: Final = 16
MOMENTS: Final = ("created_at", "started_at", "ended_at", "expires_at")


class JobsApi:
    """The status of jobs as an ASGI app, and the responses of the routes that submit jobs."""

    def __init__(
        self,
        jobs: Jobs,
        *,
        scope: Callable[[Incoming], str | tuple[str | None, ...] | None],
        base: str = "/jobs",
        max_wait: float = 10.0,
        max_waiting: int = 100,
        poll: tuple[float, float] = (POLL_LEAST, POLL_MOST),
        inline_result: int = 65_536,
        show_errors: bool = False,
        trust: Trust | None = None,
    ) -> None:
        """Serve `jobs` under the path `base`, where the app is mounted: `app.mount("/jobs", api)`.

        `scope(incoming)` returns whose jobs a request may see. It must be reliable: the
        authenticated tenant or user, or a tuple of both. None or "" means that the request may see
        no job. A client that prefers to wait waits at most `max_wait` seconds, and at most
        `max_waiting` clients wait at once. Other clients are sent a `Retry-After`: a quarter of the
        job's age, within the bounds of `poll`. JSON of up to `inline_result` bytes is part of the
        status; larger results are linked.
        """
        if not isinstance(jobs, Jobs):
            raise TypeError(f"JobsApi({jobs!r}): pass Jobs(database)")
        if not isinstance(base, str) or not base.startswith("/") or base.endswith("/"):
            raise ValueError(f"base={base!r}: write a path without a / at its end, such as '/jobs'")
        self.jobs = jobs
        self.base = base
        self._scope = plain_function("scope", scope)
        self.max_wait = check.seconds("max_wait", max_wait, zero=True)
        self.max_waiting = check.count("max_waiting", max_waiting, minimum=0)
        self.poll = poll_of(poll)
        self.inline_result = check.count("inline_result", inline_result, minimum=0)
        self.show_errors = check.flag("show_errors", show_errors)
        self._trust = checked_trust(trust)
        self._mutex = Mutex()
        survives_fork(self)
        self._waiting = 0
        words = ("accepted", "in_time", "asked", "cancelled", "not_found", "gone", "not_waited")
        self._counts = dict.fromkeys(words, 0)
        registry.enter(self, "jobs_api", jobs.name)

    def __repr__(self) -> str:
        return f"<JobsApi of {self.jobs!r} at {self.base!r}>"

    def _after_fork(self) -> None:
        self._mutex = Mutex()  # another thread may have held it
        self._waiting = 0

    def snapshot(self) -> dict[str, int]:
        """Return the number of waiting requests and the counts of responses."""
        with self._mutex:
            return {"waiting": self._waiting, **self._counts}

    # For routes that submit jobs

    def scope_of(self, request: Any) -> str | None:
        """Return whose jobs a request may see, as `Jobs.submit` takes it; None if no one's."""
        return scope_text(self._scope(self._incoming(request)))

    def accepted(self, job: Job, request: Any = None) -> Reply:
        """Return 202 for a job, or 200 if it has ended. Call it after the commit."""
        root = "" if request is None else _scope_of(request).get("root_path") or ""
        return self._reply(job, self._url(job, root), [])

    async def answer(self, request: Any, job: Job) -> Reply:
        """Return the response of `accepted`, after the wait that the request prefers.

        The wait is at most `max_wait`. Call it after the commit: before that, no worker sees the
        job.
        """
        incoming = self._incoming(request)
        url = self._url(job, incoming.scope.get("root_path") or "")
        job, applied = await self._waited(job, read_prefer(incoming.headers))
        return self._reply(job, url, applied)

    async def submitted(  # noqa: PLR0911 - each is a different response
        self,
        request: Any,
        kind: str,
        payload: Any = None,
        *,
        required: bool = False,
        **options: Any,
    ) -> Reply:
        """Submit a job in its own transaction, and return the response.

        The request's `Idempotency-Key`, if present, is the job's key: a repeated request gets the
        same job, and 422 if its payload differs. With `required`, a request without a key gets 400.
        A payload that is too large or not JSON gets 422, too; without room for more jobs the
        response is 503. Takes the options of `Jobs.asubmit`.
        """
        incoming = self._incoming(request)
        needs = check.flag("required", required)
        try:
            scope = self.scope_of(incoming)
        except AmbiguousHeader as error:
            return refusal(error)
        if scope is None:
            return problem(403, "Forbidden", "Nobody may submit jobs without saying who it is.")
        key = incoming.idempotency_key
        if key is None and _KEY_HEADER in incoming.named:
            detail = "The Idempotency-Key is to be one, of 1 to 255 visible ASCII characters."
            return problem(400, "Bad request", detail)
        if key is None and needs:
            return refusal(KeyMissing())
        try:
            job = await self.jobs.asubmit(None, kind, payload, scope=scope, key=key, **options)
        except (KeyReused, QueueFull) as error:
            return refusal(error)
        except ValueError:
            if _fits(payload, self.jobs.max_payload):
                raise
            return problem(
                422, "Unprocessable content", "This is too large to be done, or no JSON."
            )
        return await self.answer(incoming, job)

    def describe(self, app: Any, *, submits: Iterable[str] = (), required: bool = False) -> None:
        """Add this mounted API to the OpenAPI description of a FastAPI app.

        `submits` are the paths of the app's own routes that answer with `submitted`: they are
        described with the `Idempotency-Key` (`required` or not) and the responses it can cause.
        """
        if not callable(getattr(app, "openapi", None)):
            raise TypeError(f"describe({app!r}): pass a FastAPI app")
        paths = check.listed("submits", submits, "'/orders/{id}/invoice'")
        check.flag("required", required)

        def add(schema: dict[str, Any]) -> None:
            for path, item in _described(self.base).items():
                schema.setdefault("paths", {}).setdefault(path, item)
            for operation in operations(schema, paths, ("POST", "PUT", "PATCH")):
                describe_key(operation, required=required, statuses=(400, 422))

        app.openapi = describing(app.openapi, add)

    # The ASGI app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        """Serve a request about jobs."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"JobsApi serves no {scope['type']}")
        await (await self._served(scope))(scope, receive, send)

    async def _served(self, scope: MutableMapping[str, Any]) -> Reply:
        incoming = self._incoming(scope)
        below = path_below_root(scope)
        below = below.removeprefix(self.base) if below.startswith(f"{self.base}/") else below
        id_, _, verb = below.removeprefix("/").partition("/")
        allowed = _ALLOWED.get(verb)
        try:
            owner = self.scope_of(incoming)
            if allowed is None or owner is None:
                raise UnknownJob("there is nothing here, or nobody asks")  # noqa: TRY301 - as below
            if incoming.method not in allowed.split(", "):
                refused = problem(405, "Method not allowed", f"Allowed here: {allowed}.")
                return refused._replace(headers=[*refused.headers, (b"allow", allowed.encode())])
            if incoming.method in ("DELETE", "POST"):
                return await self._cancel(incoming, id_, owner)
            return await self._asked(incoming, id_, owner, verb)
        except AmbiguousHeader as error:
            return refusal(error)
        except JobExpired:
            self._count("gone")
            return problem(410, "Gone", "What came out of this job is not kept any more.")
        except UnknownJob:
            self._count("not_found")
            # The same bytes for a foreign job and for a missing one:
            return problem(404, "Not found", "There is no such job.")

    async def _asked(self, incoming: Incoming, id_: str, owner: str, verb: str) -> Reply:
        job = await self.jobs.aget(id_, scope=owner)
        if verb == "result":
            return self._result(job)
        self._count("asked")
        url = self._url(job, incoming.scope.get("root_path") or "")
        job, applied = await self._waited(job, read_prefer(incoming.headers))
        return self._status(job, url, 200, applied)

    async def _cancel(self, incoming: Incoming, id_: str, owner: str) -> Reply:
        job = await self.jobs.acancel(id_, scope=owner)
        url = self._url(job, incoming.scope.get("root_path") or "")
        if job.state in ("succeeded", "failed"):
            return problem(409, "Conflict", f"The job has {job.state} already.")
        self._count("cancelled")
        return self._status(job, url, 200 if job.ended else 202, [])

    def _result(self, job: Job) -> Reply:
        if not job.ended:
            wait = self._poll_after(job)
            return problem(409, "Conflict", f"The job is {job.state}: no result yet.", wait)
        if job.state != "succeeded":
            return problem(409, "Conflict", f"The job is {job.state}: there is no result.")
        # A result is data: a browser must not guess its type.
        safe = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
        if job.body is None:
            return Reply(204, safe, b"")
        kind = (job.content_type or "application/octet-stream").encode()
        return Reply(200, [(b"content-type", kind), *safe], job.body)

    # Implementation

    def _incoming(self, request: Any) -> Incoming:
        if isinstance(request, Incoming):
            return request
        return incoming_of(_scope_of(request), self._trust)

    def _url(self, job: Job, root: str) -> str:
        root = root.rstrip("/")
        return f"{root if root.endswith(self.base) else root + self.base}/{job.id}"

    def _poll_after(self, job: Job) -> float:
        return poll_after(job.age, *self.poll)

    def _reply(self, job: Job, url: str, applied: Headers) -> Reply:
        """Return the response to a submission."""
        if job.ended:
            self._count("in_time")
            return self._status(job, url, 200, [(b"content-location", url.encode()), *applied])
        self._count("accepted")
        more = [(b"location", url.encode()), retry_header(self._poll_after(job)), *applied]
        return json_reply(202, {"id": job.id, "state": job.state, "status_url": url}, more)

    def _status(self, job: Job, url: str, status: int, more: Headers) -> Reply:
        body = document(job, url, inline=self.inline_result, show_errors=self.show_errors)
        if not job.ended:
            more = [retry_header(self._poll_after(job)), *more]
        return json_reply(status, body, more)

    async def _waited(self, job: Job, prefer: Prefer) -> tuple[Job, Headers]:
        """Wait for a job as preferred and allowed; return it with its `Preference-Applied`."""
        asynchronous = [(b"preference-applied", b"respond-async")] if prefer.respond_async else []
        wait = int(min(prefer.wait or 0, self.max_wait))
        if job.ended or wait <= 0:
            return job, [] if job.ended else asynchronous
        with self._mutex:
            room = self._waiting < self.max_waiting
            self._counts["not_waited"] += not room
            self._waiting += room
        if not room:
            return job, asynchronous
        try:
            job = await self.jobs.ajoin(job.id, scope=job.scope, timeout=float(wait))
        except TimedOut:
            job = await self.jobs.aget(job.id, scope=job.scope)
        finally:
            with self._mutex:
                self._waiting -= 1
        return job, [(b"preference-applied", f"wait={wait}".encode())]

    def _count(self, word: str) -> None:
        with self._mutex:
            self._counts[word] += 1


def _described(base: str) -> dict[str, Any]:
    """Return the paths of the API for OpenAPI."""
    job = {"description": "How the job is", "content": {"application/json": {}}}
    cancelling = {**job, "description": "It is being cancelled; Retry-After says when to ask"}
    result = {"description": "What came out of it", "content": {"*/*": {}}}
    gone = {
        "404": answer(404, "There is no such job, or it is somebody else's"),
        "410": answer(410, "What came out of this job is not kept any more"),
    }
    ended = {"409": answer(409, "The job has ended already")}
    early = {"409": answer(409, "There is no result; or not yet, with Retry-After")}
    cancel = {
        "summary": "Cancel a job",
        "responses": {"200": job, "202": cancelling, **gone, **ended},
    }
    asked = {"summary": "Ask how a job is", "responses": {"200": job, **gone}}
    fetched = {
        "summary": "Fetch the result of a job",
        "responses": {"200": result, "204": {"description": "It has none"}, **gone, **early},
    }
    id_ = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    paths = {
        f"{base}/{{id}}": {"parameters": id_, "get": asked, "delete": cancel},
        f"{base}/{{id}}/result": {"parameters": id_, "get": fetched},
        f"{base}/{{id}}/cancel": {"parameters": id_, "post": cancel},
    }
    return {path: deepcopy(item) for path, item in paths.items()}


def _scope_of(request: Any) -> MutableMapping[str, Any]:
    scope = getattr(request, "scope", request)
    if not isinstance(scope, MutableMapping):
        raise TypeError(f"request={request!r}: pass the request, or its ASGI scope")
    return scope


def _fits(payload: Any, limit: int) -> bool:
    try:
        payload_of(payload, limit)
    except ValueError:
        return False
    return True


async def _lifespan(receive: Any, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


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


def problem(status: int, title: str, detail: str, wait: float | None = None) -> Reply:
    """Return a problem document as response."""
    return _reply_of(Problem(status, title, detail, retry_after=wait))


def refusal(error: SeawallError) -> Reply:
    """Return the response for an error of this library."""
    found = problem_of(error)
    assert found is not None  # noqa: S101 - each of them has a problem document
    return _reply_of(found)


def _reply_of(found: Problem) -> Reply:
    return Reply(
        found.status, [*found.raw_headers(), (b"cache-control", b"no-store")], found.body()
    )


def document(job: Job, url: str, *, inline: int, show_errors: bool) -> dict[str, Any]:
    """Return the status document of a job."""
    answer: dict[str, Any] = {
        "id": job.id,
        "kind": job.kind,
        "state": job.state,
        "status_url": url,
        "progress": job.progress,
        "message": job.message,
        "attempts": job.attempts,
        **{name: _moment(getattr(job, name)) for name in MOMENTS},
    }
    if job.cancelling and not job.ended:
        answer["cancelling"] = True
    if job.state == "succeeded":
        body = job.body
        if body is None:
            answer["result"] = None
        elif job.content_type == JSON and len(body) <= inline:
            answer["result"] = job.result
        else:
            answer["result_url"] = f"{url}/result"
    if job.state == "failed":
        # Exception messages are for the operators of the service.
        answer["error"] = job.error if show_errors else "The job failed."
    return answer


def json_reply(status: int, body: dict[str, Any], more: Headers) -> Reply:
    """Return a JSON document as a response that must not be cached."""
    headers = [(b"content-type", JSON.encode()), (b"cache-control", b"no-store"), *more]
    return Reply(status, headers, json.dumps(body, allow_nan=False).encode())


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
