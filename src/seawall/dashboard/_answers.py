"""How the dashboard answers: the headers of every answer, and JSON that breaks out of nothing.

Promises: no answer may be framed, sniffed, kept, or read by a page of another origin; a page of
ours runs only scripts and styles that this app serves; whatever text is in a JSON document, there
is no `<`, `>`, `&`, and nothing but ASCII in it.
"""

from __future__ import annotations

import json
from typing import Any, Final

from seawall.web.asgi_types import Send
from seawall.web.edge.sending import Headers
from seawall.web.problems import Problem

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'"
)
"""The Content-Security-Policy of every answer."""

SAFE: Final[Headers] = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
]

JSON: Final = b"application/json"

_ESCAPED: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_WRITER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class Refusal(Exception):
    """What is asked for is not done; the answer is a problem with this status and these words."""

    def __init__(
        self, status: int, title: str, detail: str, *, retry_after: float | None = None
    ) -> None:
        """Answer so; the words are shown to whoever asked."""
        super().__init__(f"{status} {title}: {detail}")
        self.problem = Problem(status, title, detail, retry_after=retry_after)
        self.headers: Headers = []


def forbidden(detail: str) -> Refusal:
    """Return the refusal of somebody who may not do this."""
    return Refusal(403, "Forbidden", detail)


def unavailable(detail: str) -> Refusal:
    """Return the refusal of somebody who may come again soon."""
    return Refusal(503, "Service unavailable", detail, retry_after=5.0)


def expect(method: str, *methods: str) -> None:
    """Return if `method` is one of `methods`; else `Refusal`."""
    if method not in methods:
        refusal = Refusal(405, "Method not allowed", f"Write {' or '.join(methods)}.")
        refusal.headers = [(b"allow", ", ".join(methods).encode())]
        raise refusal


def to_json(value: Any) -> bytes:
    """Return `value` as JSON; raises ValueError or TypeError for what JSON has no word for."""
    text = _WRITER.encode(value)
    # Outside of its texts, JSON has none of the characters that are escaped.
    for character, escaped in _ESCAPED.items():
        if character in text:
            text = text.replace(character, escaped)
    return text.encode()


async def send_answer(
    send: Send,
    status: int,
    kind: bytes,
    body: bytes,
    *,
    more: Headers | None = None,
    head: bool = False,
) -> None:
    """Send a whole answer; with `head`, all of it but its body."""
    headers = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        *SAFE,
        *(more or ()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if head else body})


async def send_refusal(send: Send, refusal: Refusal, *, head: bool = False) -> None:
    """Send what a refusal says, as problem+json."""
    problem = refusal.problem
    (_, kind), *more = problem.raw_headers()
    body = to_json(json.loads(problem.body()))
    more = [*more, *refusal.headers]
    await send_answer(send, problem.status, kind, body, more=more, head=head)
