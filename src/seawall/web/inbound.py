"""What a request brings along, into the context of its handler: deadline, criticality, and so on.

Who is not believed (see `Trust`) sets nothing, and what it sent is taken out of the request, so
that nothing further in can pass it on. Who is believed can ask for less, not for more: a shorter
time than the server's own, a lower criticality than the server's highest.
"""

from __future__ import annotations

from contextvars import Token
from typing import Any, Final

from seawall import _checks as check
from seawall.clock import Clock
from seawall.context import (
    Criticality,
    criticality_var,
    deadline_var,
    received_attempt_var,
    reset,
    tenant_var,
)
from seawall.errors import DeadlineExceeded
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from seawall.wire._text import LONGEST
from seawall.wire.attempts import ATTEMPT_HEADER, read_attempt
from seawall.wire.criticality import (
    BAGGAGE_HEADER,
    read_baggage,
    read_criticality,
    read_tenant,
    write_baggage,
)
from seawall.wire.deadlines import TIMEOUT_HEADERS, least_timeout

_BAGGAGE: Final = BAGGAGE_HEADER.encode()
_ATTEMPT: Final = ATTEMPT_HEADER.lower().encode()
_TIMEOUTS: Final = frozenset(name.encode() for name in TIMEOUT_HEADERS)
_KNOWN: Final = _TIMEOUTS | {_BAGGAGE, _ATTEMPT}

Tokens = list[Token[Any]]
"""What `undo` needs."""


class Inbound:
    """Give each request its deadline, criticality, tenant and attempt.

    `timeout` is both what a request gets that asks for no time, and the most that it can get; None
    leaves requests without a deadline, unless a believed caller gives one.
    """

    __slots__ = ("_default", "_dropped", "_expired", "_most", "_timeout", "trust")

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
        self._timeout = None if timeout is None else check.seconds("timeout", timeout)
        self._most = max_criticality
        self._default = None if max_criticality >= Criticality.CRITICAL else max_criticality
        self._expired = 0
        self._dropped = 0

    def __repr__(self) -> str:
        return (
            f"Inbound(trust={self.trust!r}, timeout={self._timeout!r},"
            f" max_criticality={self._most.name})"
        )

    def snapshot(self) -> dict[str, int]:
        """Return how many requests came too late, and how many said what they may not."""
        return {"expired": self._expired, "dropped": self._dropped}

    def read(self, incoming: Incoming, clock: Clock) -> Tokens:
        """Set what the request brings in the context, and return what `undo` needs.

        No time left raises `DeadlineExceeded`, and sets nothing.
        """
        found = [pair for pair in incoming.headers if pair[0] in _KNOWN]
        if not found:
            return self._start(self._timeout, self._default, clock)
        if not self.trust.believes(incoming.peer, incoming.headers):
            self._drop(incoming)
            return self._start(self._timeout, self._default, clock)
        said = least_timeout(found)
        seconds = self._timeout
        if said is not None and (seconds is None or said < seconds):
            seconds = said
        baggage = read_baggage(b",".join(v for name, v in found if name == _BAGGAGE))
        level = read_criticality(baggage)
        tokens = self._start(
            seconds, self._default if level is None else min(level, self._most), clock
        )
        tenant = read_tenant(baggage)
        if tenant is not None:
            tokens.append(tenant_var.set(tenant))
        attempts = {value for name, value in found if name == _ATTEMPT}
        attempt = read_attempt(attempts.pop()) if len(attempts) == 1 else None
        if attempt is not None:
            tokens.append(received_attempt_var.set(attempt))
        return tokens

    def undo(self, tokens: Tokens) -> None:
        """Leave the context as it was before `read`."""
        for token in tokens:
            reset(token.var, token)

    def _start(self, seconds: float | None, level: Criticality | None, clock: Clock) -> Tokens:
        """Set the deadline and the criticality; an earlier deadline stays as it is."""
        tokens: Tokens = []
        held = deadline_var.get()
        if held is not None:
            left = held[0] - held[1].now()
            if left <= 0:
                self._refuse()
            if seconds is not None and left <= seconds:
                seconds = None
        if seconds is not None:
            if seconds <= 0:
                self._refuse()
            tokens.append(deadline_var.set((clock.now() + seconds, clock)))
        if level is not None:
            tokens.append(criticality_var.set(level))
        return tokens

    def _refuse(self) -> None:
        self._expired += 1
        raise DeadlineExceeded("the caller's time was over before the request was looked at")

    def _drop(self, incoming: Incoming) -> None:
        """Take out of the request what its sender may not say.

        Other baggage stays, unless it is longer than anybody has to take.
        """
        kept = []
        for name, value in incoming.headers:
            if name not in _KNOWN:
                kept.append((name, value))
            elif name == _BAGGAGE and len(value) <= LONGEST:
                rest = write_baggage(value.decode("latin-1"), None, None).encode("latin-1")
                if rest:
                    kept.append((name, rest))
        if kept != incoming.headers:
            self._dropped += 1
            incoming.headers = kept
            incoming.scope["headers"] = kept
