"""Responses of the dashboard: the headers of every response, and JSON that is safe to embed.

Promises:
- No response may be framed, sniffed, cached, or read by a page of another origin.
- Our page runs only scripts and styles that this app serves.
- A JSON document contains no `<`, `>`, `&`, and nothing but ASCII, whatever its texts.
"""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, Final, NamedTuple

from seawall.web.asgi_types import Headers, Send
from seawall.web.problems import Problem

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'"
)
"""The Content-Security-Policy of every response."""

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


class RequestRefused(Exception):
    """The request is refused; the response is a problem with this status and text."""

    def __init__(
        self, status: int, title: str, detail: str, *, retry_after: float | None = None
    ) -> None:
        """Set the status and the text, which is shown to the client."""
        super().__init__(f"{status} {title}: {detail}")
        self.problem = Problem(status, title, detail, retry_after=retry_after)
        self.headers: Headers = []


def forbidden(detail: str) -> RequestRefused:
    """Return the refusal of a client without permission."""
    return RequestRefused(403, "Forbidden", detail)


def unprocessable(detail: str) -> RequestRefused:
    """Return the refusal of a request that says something invalid."""
    return RequestRefused(422, "Unprocessable content", detail)


def unavailable(detail: str) -> RequestRefused:
    """Return the refusal of a client that may retry soon."""
    return RequestRefused(503, "Service unavailable", detail, retry_after=5.0)


def expect(method: str, *methods: str) -> None:
    """Return if `method` is one of `methods`; otherwise raise `RequestRefused`."""
    if method not in methods:
        refusal = RequestRefused(405, "Method not allowed", f"Write {' or '.join(methods)}.")
        refusal.headers = [(b"allow", ", ".join(methods).encode())]
        raise refusal


def to_json(value: Any) -> bytes:
    """Return `value` as JSON; raise ValueError or TypeError for what JSON cannot represent."""
    text = _WRITER.encode(value)
    # Outside strings, JSON has none of the characters that are escaped.
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
    """Send a whole response; with `head`, all of it but its body."""
    headers = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        *SAFE,
        *(more or ()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if head else body})


async def send_refusal(send: Send, refusal: RequestRefused, *, head: bool = False) -> None:
    """Send a refusal as problem+json."""
    problem = refusal.problem
    (_, kind), *more = problem.raw_headers()
    body = to_json(json.loads(problem.body()))
    more = [*more, *refusal.headers]
    await send_answer(send, problem.status, kind, body, more=more, head=head)


INDEX: Final = "index.html"
SCRIPTS: Final = re.compile(rb"<!-- (?:extra )?scripts -->")
"""The place in the index for the scripts and styles of a derived page."""

KINDS: Final = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
"""Content types of the files, by the extension of their names."""


class Asset(NamedTuple):
    """One file: its content type and its content."""

    kind: bytes
    body: bytes


@cache
def assets(package: str = "seawall.dashboard", folder: str = "page") -> dict[str, Asset]:
    """Return the files in `folder` of `package` by name."""
    found: dict[str, Asset] = {}
    place = files(package).joinpath(folder)
    if place.is_dir():
        for file in place.iterdir():
            kind = KINDS.get(file.name.rpartition(".")[2])
            if kind is not None and file.is_file():
                found[file.name] = Asset(kind, file.read_bytes())
    return found


def index(page: bytes, more: tuple[str, ...]) -> bytes:
    """Return the index with tags for `more` scripts and styles, which are served like its own."""
    tags = "\n".join(_tag(name) for name in more).encode()
    return SCRIPTS.sub(lambda _: tags, page, count=1)


def _tag(name: str) -> str:
    place = escape(f"page/{name}", quote=True)
    if name.endswith(".css"):
        return f'<link rel="stylesheet" href="{place}">'
    return f'<script type="module" src="{place}"></script>'
