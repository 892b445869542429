"""What a request brings along, into the context of its handler: deadline, criticality, and so on.

Who is not believed (see `Trust`) sets nothing, and what it sent is taken out of the request, so
that nothing further in can pass it on. Who is believed can ask for less, not for more: a shorter
time than the server's own, a lower criticality than the server's highest.

What the context holds when a request comes in is not the request's. A server may call the app from
the context of an earlier request on the same connection: reading that was paused for a large body
and taken up again by that request's task goes on in its context, with all that comes after. So the
outermost edge starts clean.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, Final, NamedTuple

from seawall import _checks as check
from seawall.clock import Clock
from seawall.context import (
    Criticality,
    attempt_var,
    criticality_var,
    deadline_var,
    idempotency_key_var,
    received_attempt_var,
    reset,
    tenant_var,
    tier_var,
)
from seawall.errors import DeadlineExceeded
from seawall.web.request import INCOMING, Incoming
from seawall.web.trust import Trust
from seawall.wire._text import LONGEST
from seawall.wire.attempts import ATTEMPT_HEADER, read_attempt
from seawall.wire.criticality import (
    BAGGAGE_HEADER,
    baggage_without_ours,
    read_baggage,
    read_criticality,
    read_tenant,
)
from seawall.wire.deadlines import TIMEOUT_HEADERS, least_timeout

_BAGGAGE: Final = BAGGAGE_HEADER.encode()
_ATTEMPT: Final = ATTEMPT_HEADER.lower().encode()
_TIMEOUTS: Final = frozenset(name.encode() for name in TIMEOUT_HEADERS)
KNOWN: Final = _TIMEOUTS | {_BAGGAGE, _ATTEMPT}
"""The headers that are read here."""
_MOST_LINES: Final = 64
_UNSET: Final[dict[ContextVar[Any], Any]] = {
    deadline_var: None,
    criticality_var: Criticality.CRITICAL,
    tenant_var: None,
    tier_var: None,
    idempotency_key_var: None,
    received_attempt_var: 0,
    attempt_var: 1,
}
CLEAN: Final = frozenset(_UNSET)
"""The variables of which a context has none, unless an earlier request left them."""

Tokens = list[Token[Any]]
"""What `undo` needs."""


class _Said(NamedTuple):
    """What counts of a request; None leaves the context as it is."""

    seconds: float | None
    level: Criticality | None
    tenant: str | None = None
    attempt: int | None = None


class Inbound:
    """Give each request its deadline, criticality, tenant and attempt.

    `timeout` is both what a request gets that asks for no time, and the most that it can get; None
    leaves requests without a deadline, unless a believed caller gives one.
    """

    __slots__ = ("_dropped", "_expired", "_most", "_unsaid", "trust", "usual")

    def __init__(
        self,
        *,
        trust: Trust | None = None,
        timeout: float | None = 30.0,
        max_criticality: Criticality = Criticality.CRITICAL,
    ) -> None:
        """Believe whom `trust` names (nobody, without it), up to these bounds."""
        if trust is not None and not isinstance(trust, Trust):
            raise TypeError(f"trust={trust!r}: pass a Trust, such as Trust(callers=['10.0.0.0/8'])")
        if not isinstance(max_criticality, Criticality):
            raise TypeError(
                f"max_criticality={max_criticality!r}: write a Criticality, such as"
                " Criticality.CRITICAL"
            )
        self.trust = trust or Trust()
        self._most = max_criticality
        self._unsaid = _Said(
            None if timeout is None else check.seconds("timeout", timeout),
            None if max_criticality >= Criticality.CRITICAL else max_criticality,
        )
        self.usual = self._unsaid.seconds if self._unsaid.level is None else None
        """The time of a request that says nothing, where that is all that is set for it."""
        self._expired = 0
        self._dropped = 0

    def __repr__(self) -> str:
        return (
            f"Inbound(trust={self.trust!r}, timeout={self._unsaid.seconds!r},"
            f" max_criticality={self._most.name})"
        )

    def snapshot(self) -> dict[str, int]:
        """Return how many requests came too late, and how many said what they may not."""
        return {"expired": self._expired, "dropped": self._dropped}

    def read(self, incoming: Incoming, clock: Clock) -> Tokens:
        """Set what the request brings in the context, and return what `undo` needs.

        No time left raises `DeadlineExceeded`, and sets nothing.
        """
        scope = incoming.scope
        seconds, level, tenant, attempt = self._unsaid
        if not KNOWN.isdisjoint(incoming.named):
            if self.trust.believes(incoming.peer, incoming.headers):
                found = [pair for pair in incoming.headers if pair[0] in KNOWN]
                seconds, level, tenant, attempt = self._heard(found)
            else:
                self._drop(incoming)
        if seconds is not None and seconds <= 0:
            self._refuse()
        # Inside another edge the context is the request's own. So it is in a gRPC server, where
        # what applies already is the time that gRPC gives the call.
        if INCOMING in scope or scope["type"] == "grpc":
            tokens = []
            seconds = self._at_most_held(seconds)
        else:
            tokens = _start_clean()
        if seconds is not None:
            tokens.append(deadline_var.set((clock.now() + seconds, clock)))
        if level is not None:
            tokens.append(criticality_var.set(level))
        if tenant is not None:
            tokens.append(tenant_var.set(tenant))
        if attempt is not None:
            tokens.append(received_attempt_var.set(attempt))
        return tokens

    def undo(self, tokens: Tokens) -> None:
        """Leave the context as it was before `read`."""
        for token in reversed(tokens):
            reset(token.var, token)

    def _heard(self, found: list[tuple[bytes, bytes]]) -> _Said:
        """Return what a believed caller says in these headers, within the server's bounds."""
        seconds, level, _, _ = self._unsaid
        said = least_timeout(found)
        if said is not None and (seconds is None or said < seconds):
            seconds = said
        baggage = read_baggage(b",".join(v for name, v in found if name == _BAGGAGE))
        wanted = read_criticality(baggage)
        attempts = {value for name, value in found if name == _ATTEMPT}
        return _Said(
            seconds,
            level if wanted is None else min(wanted, self._most),
            read_tenant(baggage),
            read_attempt(attempts.pop()) if len(attempts) == 1 else None,
        )

    def _at_most_held(self, seconds: float | None) -> float | None:
        """Return the time to set; None if the deadline that applies already is the nearer."""
        held = deadline_var.get()
        if held is None:
            return seconds
        left = held[0] - held[1].now()
        if left <= 0:
            self._refuse()
        return None if seconds is None or left <= seconds else seconds

    def _refuse(self) -> None:
        self._expired += 1
        raise DeadlineExceeded("the caller's time was over before the request was looked at")

    def _drop(self, incoming: Incoming) -> None:
        """Take out of the request what its sender may not say.

        Other baggage stays, unless it is longer than anybody has to take.
        """
        headers = incoming.headers
        lines = [value for name, value in headers if name == _BAGGAGE]
        kept, touched = b"", True
        # Measured before it is joined, and joined before it is read: many lines cost no more.
        if len(lines) <= _MOST_LINES and sum(map(len, lines)) + len(lines) <= LONGEST:
            given = b",".join(lines)
            kept = baggage_without_ours(given.decode("latin-1")).encode("latin-1")
            touched = kept != given
        rest = [pair for pair in headers if pair[0] not in KNOWN]
        if not touched and len(rest) + len(lines) == len(headers):
            return  # nothing was said that may not be
        if kept:
            rest.append((_BAGGAGE, kept))
        self._dropped += 1
        incoming.replace_headers(rest)


def _start_clean() -> Tokens:
    """Take what an earlier request left out of the context."""
    return [var.set(clean) for var, clean in _UNSET.items() if var.get() != clean]
