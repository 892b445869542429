"""ASGI middleware for the header Idempotency-Key: each request runs once.

Promises:

- Of all requests with one key (of one caller, method and route), one runs.
- A repeat gets the same status, headers and body, byte for byte, with `Idempotent-Replayed: true`;
  with another payload 422; while the first is running 409 with `Retry-After`. A missing required
  key or a malformed one gets 400.
- A request does not run if it cannot be recorded, and no response is complete at the client before
  its record is on disk.
- Every response that may follow an effect is stored, including a 500 after an exception. Not stored
  are statuses which mean that nothing was done (400, 401, 403, 404, 409, 422, 429, 503...), raised
  refusals (`Rejected`), and failures of a handler whose own transaction was rolled back: then the
  next request runs. `keep=` overrides this.
- A worker that dies leaves its record until the lease expires. Then another one takes over, and
  late writes of the first are refused.

A handler that writes to the same database can complete the request in the same transaction. Then a
crash after the commit does no harm either: see `IdempotentRequest.complete`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from hashlib import blake2b
from typing import Any, Final, Literal, Self, overload
from uuid import UUID

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.durable.database.cleanup import cleaning
from seawall.durable.database.json_values import canonical_document
from seawall.durable.http import responses as answers
from seawall.durable.http.completion import IdempotentRequest, RequestName
from seawall.durable.http.request import SCOPE_KEY, RequestExecution, Scope
from seawall.durable.http.responses import Keep
from seawall.durable.idempotency.idempotency import Idempotency
from seawall.durable.idempotency.records import payload_of
from seawall.errors import AmbiguousHeader, KeyMissing
from seawall.models.idempotency import fingerprint_of
from seawall.runtime.mutex import Mutex
from seawall.web.asgi_types import Message, Send
from seawall.web.edge.inbound import LOG_EVERY
from seawall.web.openapi import describe_key, describing, operations
from seawall.web.principals import plain_function
from seawall.web.problems import Problem, problem_of, send_problem
from seawall.web.request import INCOMING, Incoming, path_below_root
from seawall.web.routes import OTHER, Routes, dispatch_of
from seawall.web.trust import Trust
from seawall.wire.idempotency import IDEMPOTENCY_HEADER

Receive = Callable[[], Awaitable[Message]]
Part = str | int | UUID | None
Who = Callable[[Incoming], Part | tuple[Part, ...]]
"""Returns the owner of a request. None, also within a tuple, means unknown."""

MOST_REQUEST: Final = 1024 * 1024
"""Default maximum bytes of a request's body."""

_HEADER: Final = IDEMPOTENCY_HEADER.lower().encode()
_LONGEST_SCOPE: Final = 200
_LONGEST_ROUTE: Final = 200
_COUNTS: Final = (
    "executed",
    "replays",
    "in_flight",
    "reused",
    "missing",
    "malformed",
    "unknown",
    "too_large",
    "taken_over",
    "refused_late",
    "abandoned",
    "failed",
    "dropped_bodies",
    "differed",
    "unreadable",
    "store_away",
)


@overload
def idempotent_request(request: Any, *, required: Literal[True]) -> IdempotentRequest: ...


@overload
def idempotent_request(request: Any, *, required: bool = False) -> IdempotentRequest | None: ...


def idempotent_request(request: Any, *, required: bool = False) -> IdempotentRequest | None:
    """Return the `IdempotentRequest` of a Starlette request or an ASGI scope; None if it has none.

    With `required`, raise `KeyMissing` instead, which an edge answers with 400.
    """
    check.flag("required", required)
    scope = getattr(request, "scope", request)
    if not isinstance(scope, Mapping):
        raise TypeError(f"request={request!r}: pass the request, or its ASGI scope")
    found = scope.get(SCOPE_KEY)
    if isinstance(found, IdempotentRequest):
        return found
    if required:
        raise KeyMissing("this request needs an Idempotency-Key")
    return None


class IdempotentRequests:
    """Runs requests to some routes of an ASGI app once for each Idempotency-Key."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        idempotency: Idempotency,
        *,
        routes: Iterable[str],
        scope: Who | None = None,
        unscoped: bool = False,
        methods: Sequence[str] = ("POST", "PATCH"),
        keep: Iterable[int] | Keep | None = None,
        fingerprint: Callable[[Incoming, bytes], object] | None = None,
        required: bool = True,
        wait: float = 0.0,
        retry_after: float = 2.0,
        max_request_body: int = MOST_REQUEST,
        never_store: Iterable[str] = (),
        clean_every: float | None = 60.0,
        trust: Trust | None = None,
    ) -> None:
        """Wrap `app`; store records with `idempotency` for these `routes` and `methods`.

        `routes` are templates such as "/orders" or "/orders/{id}/pay". `scope(incoming)` returns
        the owner of a request: an authenticated identity as text, whole number or UUID, or a tuple
        of these such as (tenant, user). It is mandatory, because one caller must not get another
        caller's responses; if it returns None, the request gets 403. Only an app with a single
        caller may use `unscoped=True` instead.

        `keep` decides which responses are stored: a list of statuses (all others free the key), or
        a function of the `RequestOutcome` (True, False, or None for the default). An exception of
        the app counts with the status that is sent for it. What the app has committed by
        `IdempotentRequest.complete` is always stored, and a refusal (`Rejected`) never.

        A repeat must have the same path, query and body. Bodies of a JSON type are compared by
        meaning, all others by bytes. `fingerprint(incoming, body)` returns what is compared instead
        of the body, as `Idempotency.reserve` accepts it: for instance a part of it, or None for
        nothing. If it raises, the bytes are compared.

        With `required=False`, requests without a key pass unchanged. A repeat of a running request
        waits up to `wait` seconds for the response, and then gets a `Retry-After` of `retry_after`
        (or of the rest of the first one's lease, if that is shorter). A body of more than
        `max_request_body` bytes gets 413. `never_store` names headers that are not stored, in
        addition to the built-in ones. During the ASGI lifespan, expired records are removed every
        `clean_every` seconds; with None, that is up to you. `trust` is used for `Incoming.client`
        if there is no edge outside.
        """
        self.app = check.function("app", app)
        self._dispatch = dispatch_of(app)
        if not isinstance(idempotency, Idempotency):
            raise TypeError(
                f"idempotency={idempotency!r}: pass an Idempotency, such as Idempotency(database)"
            )
        self.idempotency = idempotency
        self._who = _checked_scope(scope, check.flag("unscoped", unscoped))
        if unscoped and not idempotency.unscoped:
            raise ValueError("unscoped=True: say so to Idempotency(..., unscoped=True), too")
        self._routes = Routes(check.listed("routes", routes, "'/orders'"))
        if not self._routes.templates:
            raise ValueError("routes=[]: write which, such as routes=['/orders']")
        if any(len(route.encode()) > _LONGEST_ROUTE for route in self._routes.templates):
            raise ValueError(f"routes: write at most {_LONGEST_ROUTE} bytes for each")
        self._methods = _checked_methods(methods)
        self.keep = _checked_keep(keep)
        self._fingerprint = (
            _meaning if fingerprint is None else plain_function("fingerprint", fingerprint)
        )
        self._quiet_until = float("-inf")
        self.required = check.flag("required", required)
        self.wait = check.seconds("wait", wait, zero=True)
        self.retry_after = check.seconds("retry_after", retry_after)
        self.max_request_body = check.count("max_request_body", max_request_body)
        self.never = _checked_names(never_store)
        self.clean_every = (
            None if clean_every is None else check.seconds("clean_every", clean_every)
        )
        self._trust = checked_trust(trust)
        self._counts = dict.fromkeys(_COUNTS, 0)
        registry.enter(self, "idempotent_requests", idempotency.name)
        self._mutex = Mutex()
        survives_fork(self)

    @classmethod
    def add_to(cls, app: Any, idempotency: Idempotency, **options: Any) -> Self:
        """Add the middleware to a FastAPI or Starlette app, and return it.

        `options` are those of the class. `app.add_middleware(...)` would create it at the first
        request, and report a mistake only then.
        """
        if not callable(getattr(app, "add_middleware", None)):
            raise TypeError(
                f"add_to({app!r}): pass a FastAPI or Starlette app; others are put inside:"
                f" {cls.__name__}(app, idempotency, ...)"
            )
        made = cls(_not_started, idempotency, **options)
        made._dispatch = dispatch_of(app)

        def around(inner: Callable[..., Awaitable[None]]) -> IdempotentRequests:
            made.app = inner
            return made

        app.add_middleware(around)
        openapi = getattr(app, "openapi", None)
        if openapi is not None:
            app.openapi = describing(openapi, made._described)
        return made

    def _described(self, schema: dict[str, Any]) -> None:
        """Add the key and the middleware's responses to the app's OpenAPI description."""
        for operation in operations(schema, self._routes.templates, self._methods):
            describe_key(operation, required=self.required)

    def __repr__(self) -> str:
        listed = ", ".join(self._routes.templates)
        return f"<IdempotentRequests {'|'.join(sorted(self._methods))} {listed}>"

    def snapshot(self) -> dict[str, int]:
        """Return the counts of requests executed, replayed, refused and so on."""
        with self._mutex:
            return dict(self._counts)

    def forget(self, scope: Part | tuple[Part, ...], operation: str, key: str) -> bool:
        """Remove the record of a key, as `Idempotency.forget` does.

        `scope` is a return value of the scope function; `operation` is for instance "POST /orders".
        """
        return self.idempotency.forget(scope_text(scope), operation, key)

    async def aforget(self, scope: Part | tuple[Part, ...], operation: str, key: str) -> bool:
        """Async twin of `forget`."""
        return await self.idempotency.aforget(scope_text(scope), operation, key)

    def _after_fork(self) -> None:
        self._mutex = Mutex()

    def _count(self, what: str) -> None:
        """Increment a counter."""
        with self._mutex:
            self._counts[what] += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http" or scope["method"] not in self._methods:
            living = scope["type"] == "lifespan" and self.clean_every is not None
            await (self._live if living else self.app)(scope, receive, send)
            return
        template = self._routes.of(scope, self._dispatch)
        refused = self._dispatch is not None and self._dispatch.ask(scope).refuses_method
        if template == OTHER or refused:  # the app itself responds with 404 or 405
            await self.app(scope, receive, send)
            return
        incoming = incoming_of(scope, self._trust)
        if _HEADER not in incoming.named and not self.required:
            await self.app(scope, receive, send)
            return
        name = self._name(incoming, f"{scope['method']} {template}")
        if isinstance(name, Problem):
            await send_problem(send, name, [])
            return
        body = await self._read(incoming, receive)
        if body is None:  # the client disconnected before the request was complete
            return
        if isinstance(body, Problem):
            await send_problem(send, body, [])
            return
        path = path_below_root(scope)
        root, query = scope.get("root_path") or "", scope.get("query_string") or b""
        payload = self._compared(incoming, body, name)
        name = name._replace(fingerprint=fingerprint_of(root, path, query, payload))
        await RequestExecution(self, name, send).serve(scope, body)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Clean up periodically, from the app's start to its end."""
        assert self.clean_every is not None  # noqa: S101 - checked by the caller
        stack = AsyncExitStack()

        async def heard() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await stack.aclose()  # before the app closes its database
            return message

        async with stack:
            await stack.enter_async_context(cleaning(self.idempotency, every=self.clean_every))
            await self.app(scope, heard, send)

    def _name(self, incoming: Incoming, operation: str) -> RequestName | Problem:
        """Return the identity of the request, or the problem to respond with."""
        if _HEADER not in incoming.named:
            self._count("missing")
            return answers.KEY_MISSING
        key = incoming.idempotency_key
        if key is None:
            self._count("malformed")
            return answers.KEY_MALFORMED
        whose = None
        if self._who is not None:
            try:
                whose = scope_text(self._who(incoming))
            except AmbiguousHeader as error:
                self._count("unknown")
                return problem_of(error)
            if whose is None:
                self._count("unknown")
                return answers.NOBODY
        return RequestName(whose, operation, key, b"")

    def _compared(self, incoming: Incoming, body: bytes, name: RequestName) -> bytes | str:
        """Return the part of the body that a repeat must have in common with the first request."""
        try:
            said = self._fingerprint(incoming, body)
            return b"" if said is None else payload_of(said)
        except Exception as error:  # noqa: BLE001 - the user's function may meet any body
            now = self.idempotency.clock.now()
            if now >= self._quiet_until:  # callers choose the body, and must not flood the log
                self._quiet_until = now + LOG_EVERY
                log = logging.getLogger("seawall")
                log.warning("%s: fingerprint= raised %s", name.operation, type(error).__name__)
            return body

    async def _read(self, incoming: Incoming, receive: Receive) -> bytes | Problem | None:
        """Read the whole body; return None if the client disconnects."""
        declared = incoming.named.get(b"content-length", b"")
        size = int(declared) if declared.isdigit() and len(declared) < 20 else 0  # noqa: PLR2004 - digits of 2**63
        body = bytearray()  # not a list: many small parts would need many times the memory
        more = True
        while more and max(size, len(body)) <= self.max_request_body:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if max(size, len(body)) > self.max_request_body:
            self._count("too_large")
            return answers.TOO_LARGE
        return bytes(body)


async def _not_started(_scope: Any, _receive: Any, _send: Any) -> None:
    raise RuntimeError("the app that this was added to has not been called yet")


def _meaning(incoming: Incoming, body: bytes) -> bytes:
    """Return a JSON body in its canonical form, and any other unchanged."""
    kind = incoming.named.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        return body
    canonical = canonical_document(body)
    return body if canonical is None else canonical


def checked_trust(trust: Trust | None) -> Trust:
    """Return whom to believe, nobody by default; or raise."""
    if trust is not None and not isinstance(trust, Trust):
        raise TypeError(f"trust={trust!r}: pass a Trust, such as Trust(proxies=['10.0.0.0/8'])")
    return trust or Trust()


def incoming_of(scope: Scope, trust: Trust) -> Incoming:
    """Return the request in its current state, with the trust settings of the edge outside.

    Not the `Incoming` of the edge: an authentication layer in between may have changed the scope or
    the headers. A header from outside must not count as authenticated.
    """
    seen = scope.get(INCOMING)
    return Incoming(scope, seen.trust if isinstance(seen, Incoming) else trust)


def scope_text(said: object) -> str | None:
    """Return the result of a scope function as one text, different for each caller.

    Returns None if a part is missing: then the caller is unknown.
    """
    parts = [_part(part) for part in (said if isinstance(said, tuple) else (said,))]
    if not parts or any(part is None or part == "" for part in parts):
        return None
    first = parts[0]
    plain = isinstance(first, str) and first[0] not in "[#" and first.isprintable()
    text = str(first) if plain and len(parts) == 1 else json.dumps(parts)
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= _LONGEST_SCOPE:
        return text
    return "#" + blake2b(data, digest_size=32, person=b"seawall scope").hexdigest()


def read_scope(text: str) -> str | None:
    """Return the scope that an operator has written, in its stored form.

    It is text, or a JSON list for a tuple such as ["acme", 7]; text that starts with # is a stored
    digest.
    """
    if text.startswith("#"):
        return text
    if text.startswith("["):
        return scope_text(tuple(json.loads(text)))
    return scope_text(text)


def _part(part: object) -> str | int | None:
    if isinstance(part, UUID):
        return str(part)
    if isinstance(part, bool) or not (part is None or isinstance(part, (str, int))):
        raise TypeError(
            f"scope: the function returned {type(part).__name__}; return text, a whole number, a"
            " UUID, a tuple of these such as (tenant, user), or None for somebody unknown"
        )
    return part


def _checked_scope(scope: Who | None, unscoped: bool) -> Who | None:  # noqa: FBT001 - as given
    if unscoped:
        if scope is not None:
            raise ValueError("unscoped=True: leave it out, or leave out scope=")
        return None
    if scope is None:
        raise TypeError(
            "scope=None: pass a function that says whose a request is, such as"
            " scope=lambda incoming: incoming.scope['user'].id; else one caller would be answered"
            " with the response to another. Only where all callers are one, write unscoped=True"
        )
    return plain_function("scope", scope)


def _checked_keep(keep: Iterable[int] | Keep | None) -> Keep | None:
    if keep is None:
        return None
    if callable(keep):
        return plain_function("keep", keep)
    listed = check.listed("keep", keep, "201")
    statuses = frozenset(check.count("keep", each, minimum=200, maximum=599) for each in listed)
    return lambda outcome: outcome.status in statuses


def _checked_methods(methods: Sequence[str]) -> frozenset[str]:
    listed = check.listed("methods", methods, "'POST'")
    if not listed:
        raise ValueError("methods=[]: write which, such as methods=['POST']")
    for method in listed:
        if not isinstance(method, str) or not method.isalpha() or not method.isupper():
            raise ValueError(f"methods={methods!r}: write them as 'POST' or 'PATCH'")
        if method in {"GET", "HEAD", "OPTIONS", "TRACE"}:
            raise ValueError(f"methods={methods!r}: {method} has no effect that could happen twice")
    return frozenset(listed)


def _checked_names(names: Iterable[str]) -> frozenset[bytes]:
    listed = check.listed("never_store", names, "'x-session'")
    if not all(isinstance(name, str) and name for name in listed):
        raise TypeError(f"never_store={names!r}: write a list of headers, such as ['x-session']")
    return frozenset(name.lower().encode("latin-1") for name in listed)
