"""CSRF protection: only our own page can make an operator's browser act.

Promises:
- A request that changes something is accepted only if all of this holds, and each part alone would
  stop a page of another origin: it is sent by a page of this origin (`Origin`, and `Sec-Fetch-Site`
  where the browser has it), it is JSON, it has the cookie of a session, and the token of that
  session and operator, which only our own page can read.
- Another site can make a browser load only the page itself, in its own tab. Nothing else can be
  timed, counted, or embedded (`Sec-Fetch-*`).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from hashlib import sha256
from secrets import token_bytes, token_urlsafe
from typing import Final

from seawall import _checks as check
from seawall.dashboard.responses import RequestRefused, forbidden
from seawall.dashboard.visit import Visit
from seawall.web.asgi_types import Headers

COOKIE: Final = "seawall_session"
SECURE_COOKIE: Final = f"__Host-{COOKIE}"
"""Cookie of a page over TLS: no other site, such as a sibling domain, can set it."""
TOKEN: Final = "x-seawall-token"  # noqa: S105 - the name of a header
SHORTEST_SECRET: Final = 16
_SESSION: Final = re.compile(r"[A-Za-z0-9_\-]{43}")
_HOST: Final = re.compile(r"(?:[A-Za-z0-9.\-_]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


class Sessions:
    """Creates sessions and their tokens, and checks requests by them. Stateless."""

    def __init__(self, secret: str | bytes | None, origins: Sequence[str] | None) -> None:
        """Sign with `secret` (random by default); accept pages of `origins`, or only our own."""
        if secret is None:
            secret = token_bytes(32)
        elif isinstance(secret, str):
            secret = secret.encode()
        if not isinstance(secret, bytes):
            raise TypeError("secret: write text or bytes that nobody can guess, or leave it out")
        if len(secret) < SHORTEST_SECRET:
            raise ValueError(
                f"secret: {len(secret)} bytes can be guessed; write {SHORTEST_SECRET} or more, such"
                " as what secrets.token_hex() returns"
            )
        self._secret = secret
        self._origins = None
        if origins is not None:
            listed = check.listed("origins", origins, "'https://ops.example.com'")
            self._origins = frozenset(_checked_origin(origin) for origin in listed)

    def open(self, visit: Visit, operator: str) -> tuple[str, Headers]:
        """Return the token of the visit's session, and the headers that set a new session."""
        session = self._session(visit)
        if session is not None:
            return self._token(session, operator), []
        session = token_urlsafe(32)
        # Path=/ because only a proxy in front knows the path that a browser sees. Dashboards of one
        # host may share the cookie: a session is worth nothing without its token.
        end = "; Secure" if self._is_secure(visit) else ""
        cookie = f"{self._cookie(visit)}={session}; Path=/; HttpOnly; SameSite=Strict{end}"
        return self._token(session, operator), [(b"set-cookie", cookie.encode())]

    def check(self, visit: Visit, operator: str) -> None:
        """Raise `RequestRefused` unless our own page sent the request for this operator."""
        self._check_origin(visit)
        session = self._session(visit)
        if session is None:
            raise forbidden(
                "The request has no session: load the page again, and let the browser keep its"
                f" cookie, {self._cookie(visit)}."
            )
        token = visit.header(TOKEN) or ""
        if not hmac.compare_digest(token.encode(), self._token(session, operator).encode()):
            raise forbidden("The request has not the token of its session: load the page again.")
        kind = (visit.header("content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestRefused(415, "Unsupported media type", "Write application/json.")

    def _check_origin(self, visit: Visit) -> None:
        origin = visit.header("origin")
        if origin is None or not self._is_ours(origin, visit):
            raise forbidden(
                "The request was not made by this page. Behind a proxy, tell the dashboard its"
                " address: Dashboard(origins=['https://...'])."
            )
        sites = _sites(visit)
        if sites and sites != [b"same-origin"]:
            raise forbidden("The request was not made by this page.")

    def _is_ours(self, origin: str, visit: Visit) -> bool:
        if self._origins is not None:
            return origin.lower() in self._origins
        host = visit.header("host")
        if host is None or not _HOST.fullmatch(host):
            return False
        return origin.lower() == f"{visit.scope.get('scheme', 'http')}://{host}".lower()

    def _is_secure(self, visit: Visit) -> bool:
        if self._origins:
            return all(origin.startswith("https:") for origin in self._origins)
        return bool(visit.scope.get("scheme") == "https")

    def _cookie(self, visit: Visit) -> str:
        return SECURE_COOKIE if self._is_secure(visit) else COOKIE

    def _session(self, visit: Visit) -> str | None:
        session = visit.cookies.get(self._cookie(visit))
        return session if session is not None and _SESSION.fullmatch(session) else None

    def _token(self, session: str, operator: str) -> str:
        # Includes the operator, so that a session planted by an attacker has the attacker's token.
        signed = f"{session}\n{operator}".encode(errors="backslashreplace")
        return hmac.new(self._secret, signed, sha256).hexdigest()


def check_site(visit: Visit, *, page: bool) -> None:
    """Refuse requests caused by pages of other sites; these may only navigate to our `page`."""
    if all(site in (b"same-origin", b"none") for site in _sites(visit)):
        return
    leads = visit.method in ("GET", "HEAD") and visit.header("sec-fetch-mode") == "navigate"
    if not (page and leads):
        raise forbidden("Another site asks for this: open the page itself.")


def _sites(visit: Visit) -> list[bytes]:
    # If a header occurs twice, it is unknown which one the browser sent.
    return [value for name, value in visit.headers if name == b"sec-fetch-site"]


def _checked_origin(origin: object) -> str:
    if isinstance(origin, str):
        scheme, _, host = origin.partition("://")
        if scheme in ("http", "https") and _HOST.fullmatch(host):
            return origin.lower()
    raise ValueError(
        f"origins: {origin!r} is none; write a scheme and a host as browsers show them, without a"
        " path, such as 'https://ops.example.com'"
    )
