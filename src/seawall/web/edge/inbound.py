"""Propagated values of a request: deadline, criticality, tenant and attempt, set in the context.

The attempt number is trusted from any caller: above 1 it makes this service retry less, and has no
other effect. The other headers are trusted from the callers that `Trust` names. From other callers
they are removed from the request, so that no inner layer can pass them on. A trusted caller can ask
for less, not for more: a shorter timeout than the server's own, a lower criticality than the
server's maximum.

The first service of a chain ranks its requests itself: `classify(incoming)` gives each request a
criticality, a tier or both, before any other part looks at it. The headers of a trusted caller can
only lower that criticality.

Values that the context holds when a request arrives do not belong to the request. A server may call
the app in the context of an earlier request on the same connection: if that request's task resumed
reading after a pause for a large body, the connection continues in that context, for all later
requests too. So the outermost edge clears the context first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token, copy_context
from typing import Any, Final, NamedTuple

from seawall import _checks as check
from seawall.clock import Clock
from seawall.context import (
    Attempt,
    Criticality,
    attempt_var,
    check_reserve,
    criticality_var,
    deadline_scope,
    deadline_var,
    end_attempt,
    idempotency_key_var,
    reset,
    seconds_left,
    tenant_var,
    tier_var,
)
from seawall.errors import AmbiguousHeader, DeadlineExceeded
from seawall.web.principals import plain_function
from seawall.web.request import INCOMING, Incoming
from seawall.web.trust import Trust
from seawall.wire.criticality import (
    BAGGAGE_HEADER,
    baggage_without_ours,
    read_baggage,
    read_criticality,
    read_tenant,
)
from seawall.wire.deadlines import TIMEOUT_HEADERS, least_timeout
from seawall.wire.retries import ATTEMPT_HEADER, read_attempt
from seawall.wire.text import LONGEST

_BAGGAGE: Final = BAGGAGE_HEADER.encode()
_ATTEMPT: Final = ATTEMPT_HEADER.lower().encode()
_TIMEOUTS: Final = frozenset(name.encode() for name in TIMEOUT_HEADERS)
KNOWN: Final = _TIMEOUTS | {_BAGGAGE, _ATTEMPT}
"""Headers that this module reads."""
_MOST_LINES: Final = 64
_UNSET: Final[dict[ContextVar[Any], Any]] = {
    deadline_var: None,
    criticality_var: Criticality.CRITICAL,
    tenant_var: None,
    tier_var: None,
    idempotency_key_var: None,
    attempt_var: None,
}
_CLEARED: Final = frozenset(_UNSET)

Tokens = list[Token[Any]]
"""State for `undo`: variables to reset."""


class Rank(NamedTuple):
    """Criticality and tier of a request; None keeps the value that the request has otherwise."""

    criticality: Criticality | None = None
    tier: str | None = None


Classify = Callable[[Incoming], Rank | Criticality | str | None]
"""Function that ranks a request: by its criticality, its tier (as text), or both."""

LOG_EVERY: Final = 1.0
"""Minimum number of seconds between two log records of a failing `classify`."""


class _CallerValues(NamedTuple):
    """Values that a trusted caller sends; None for those it does not send."""

    timeout: float | None
    criticality: Criticality | None = None
    tenant: str | None = None


class Inbound:
    """The part of the edge that gives each request its deadline, criticality, tenant and attempt.

    `timeout` is both the default and the maximum time of a request; None leaves requests without a
    deadline, unless a trusted caller sends one.
    """

    def __init__(
        self,
        *,
        trust: Trust | None = None,
        timeout: float | None = 30.0,
        reserve: float | None = None,
        max_criticality: Criticality = Criticality.CRITICAL,
        classify: Classify | None = None,
    ) -> None:
        """Trust the callers that `trust` names (by default none), within these bounds.

        `reserve` is the part of its time that a request does not pass on to its handler's calls, so
        that the handler can still answer when they run out of time: seconds, or by default a tenth
        of the time, at least 10 ms and at most 0.5 s. The handler itself is cancelled at the end of
        the whole time.

        `classify(incoming)` ranks a request: it returns a `Criticality`, a tier (as text), a `Rank`
        with both, or None to keep the default. It is a plain function. If it raises, or returns
        anything else, that is logged and the request keeps the rank that it has without `classify`.
        """
        if trust is not None and not isinstance(trust, Trust):
            raise TypeError(f"trust={trust!r}: pass a Trust, such as Trust(callers=['10.0.0.0/8'])")
        if not isinstance(max_criticality, Criticality):
            raise TypeError(
                f"max_criticality={max_criticality!r}: write a Criticality, such as"
                " Criticality.CRITICAL"
            )
        self.trust = trust or Trust()
        self.reserve = check_reserve(reserve)
        self._max_criticality = max_criticality
        self._defaults = _CallerValues(
            None if timeout is None else check.seconds("timeout", timeout)
        )
        self._default_criticality = (
            None if max_criticality >= Criticality.CRITICAL else max_criticality
        )
        """Criticality of unranked requests; None: that of the context."""
        self._classify = None if classify is None else plain_function("classify", classify)
        self._sets_rank = self._default_criticality is not None or classify is not None
        self._expired = 0
        self._stripped = 0
        self._unclassified = 0
        self._quiet_until = float("-inf")

    def __repr__(self) -> str:
        classify = ", classify=..." if self._classify else ""
        return (
            f"Inbound(trust={self.trust!r}, timeout={self._defaults.timeout!r},"
            f" max_criticality={self._max_criticality.name}{classify})"
        )

    def snapshot(self) -> dict[str, int]:
        """Return the numbers of expired, of stripped and of unclassified requests."""
        return {
            "expired": self._expired,
            "dropped": self._stripped,
            "unclassified": self._unclassified,
        }

    def dangers(self) -> list[str]:
        """Return configuration problems, as seen in the requests so far."""
        if not self._stripped or self.trust.believes_callers:
            return []
        danger = (
            f"{self._stripped} requests carried a deadline or criticality, and nobody is trusted:"
            " they get the full time and rank here, whatever their caller has left; name your"
            " services, as in trust=Trust(callers=['10.0.0.0/8'])"
        )
        return [danger]

    def read(self, incoming: Incoming, clock: Clock, *, no_headers: bool = False) -> Tokens:
        """Set the values of the request in the context, and return the state for `undo`.

        Raise `DeadlineExceeded`, and set nothing, if no time is left. `no_headers` says that the
        request is known to have none of the headers in `KNOWN`.
        """
        scope = incoming.scope
        seconds, level, tenant = self._defaults
        attempt: int | None = None
        if not no_headers and not KNOWN.isdisjoint(incoming.named):
            found = [pair for pair in incoming.headers if pair[0] in KNOWN]
            attempt = _attempt_in(found)
            if self.trust.believes(incoming.peer, incoming.headers):
                seconds, level, tenant = self._trusted_values(found)
            else:
                self._strip(incoming, KNOWN if attempt is None else KNOWN - {_ATTEMPT})
        if seconds is not None:
            seconds -= incoming.waited
            if seconds <= 0:
                self._refuse()
        # Inside another edge the context already belongs to the request. The same holds in a gRPC
        # server, where the deadline of the gRPC call already applies.
        if INCOMING in scope or scope["type"] == "grpc":
            tokens: Tokens = []
            seconds = self._within_deadline(seconds)
            outer = deadline_scope()
        else:
            tokens = [] if _CLEARED.isdisjoint(copy_context()) else _clear_context()
            outer = None
        if seconds is not None:
            incoming._deadline = deadline = [clock.now() + seconds, clock, outer, True]
            tokens.append(deadline_var.set(deadline))
        if tenant is not None:
            tokens.append(tenant_var.set(tenant))
        if attempt is not None:
            tokens.append(attempt_var.set(Attempt(attempt, None, attempt_var.get())))
        if level is not None or self._sets_rank:
            self._set_rank(tokens, incoming, level, clock)
        return tokens

    def undo(self, incoming: Incoming, tokens: Tokens) -> None:
        """Restore the context as it was before `read`.

        This also ends deadline and attempt for tasks that the handler left running.
        """
        if incoming._deadline is not None:
            incoming._deadline[3] = None  # inlined copy of `end_scope()`
        while tokens:
            token = tokens.pop()
            if token.var is attempt_var:
                end_attempt(token)
            else:
                reset(token.var, token)

    def _trusted_values(self, found: list[tuple[bytes, bytes]]) -> _CallerValues:
        """Return the values of a trusted caller in these headers, within the server's bounds."""
        seconds = self._defaults.timeout
        sent = least_timeout(found)
        if sent is not None and (seconds is None or sent < seconds):
            seconds = sent
        baggage = read_baggage(b",".join(v for name, v in found if name == _BAGGAGE))
        level = read_criticality(baggage)
        if level is not None:
            level = min(level, self._max_criticality)
        return _CallerValues(seconds, level, read_tenant(baggage))

    def _set_rank(
        self, tokens: Tokens, incoming: Incoming, sent: Criticality | None, clock: Clock
    ) -> None:
        """Set criticality and tier; `classify` sees everything that was set before it."""
        level = sent
        if self._classify is not None:
            try:
                level, tier = self._classified(incoming, sent, clock)
            except BaseException:
                self.undo(incoming, tokens)
                raise
            if tier is not None:
                tokens.append(tier_var.set(tier))
        if level is None:
            level = self._default_criticality
        if level is not None:
            if INCOMING in incoming.scope:  # the outer edge has ranked it already
                level = min(level, criticality_var.get())
            tokens.append(criticality_var.set(level))

    def _classified(self, incoming: Incoming, sent: Criticality | None, clock: Clock) -> Rank:
        """Call `classify`; the criticality that a trusted caller sent can only lower the result."""
        assert self._classify is not None  # noqa: S101 - the caller checks this
        try:
            level, tier = _rank_of(self._classify(incoming))
        except AmbiguousHeader:
            raise  # answered with 400: a duplicate header must not raise the rank
        except Exception:
            self._unclassified += 1
            now = clock.now()
            if now >= self._quiet_until:
                import logging

                self._quiet_until = now + LOG_EVERY
                logging.getLogger("seawall").exception(
                    "classify failed: the request is ranked as it would be without it"
                )
            return Rank(sent)
        if level is None or (sent is not None and sent < level):
            level = sent
        return Rank(level, tier)

    def _within_deadline(self, seconds: float | None) -> float | None:
        """Return the timeout to set; None if the deadline that already applies is earlier."""
        left = seconds_left()
        if left is None:
            return seconds
        if left <= 0:
            self._refuse()
        return None if seconds is None or left <= seconds else seconds

    def _refuse(self) -> None:
        self._expired += 1
        raise DeadlineExceeded(
            "the caller's deadline had passed when the request came", policy="deadline"
        )

    def _strip(self, incoming: Incoming, names: frozenset[bytes]) -> None:
        """Remove the headers with these `names` from the request: its sender is not trusted.

        Other baggage stays, unless it exceeds the length that a receiver must accept.
        """
        headers = incoming.headers
        lines = [value for name, value in headers if name == _BAGGAGE]
        rest_of_baggage, is_changed = b"", True
        # Check the length before joining, and join before parsing, so that many lines cost no more.
        if len(lines) <= _MOST_LINES and sum(map(len, lines)) + len(lines) <= LONGEST:
            given = b",".join(lines)
            rest_of_baggage = baggage_without_ours(given.decode("latin-1")).encode("latin-1")
            is_changed = rest_of_baggage != given
        rest = [pair for pair in headers if pair[0] not in names]
        if not is_changed and len(rest) + len(lines) == len(headers):
            return  # the request contained nothing to remove
        if rest_of_baggage:
            rest.append((_BAGGAGE, rest_of_baggage))
        self._stripped += 1
        incoming.replace_headers(rest)


def _rank_of(found: object) -> Rank:
    """Return the result of `classify` as a rank, or raise `TypeError`."""
    if found is None:
        return Rank()
    if isinstance(found, Criticality):
        return Rank(found)
    if isinstance(found, str) and found:
        return Rank(None, found)
    if isinstance(found, Rank):
        level, tier = found
        if (level is None or isinstance(level, Criticality)) and (
            tier is None or (isinstance(tier, str) and tier)
        ):
            return found
    raise TypeError(
        f"classify returned {found!r}: return a Criticality, a tier as text, Rank(criticality,"
        " tier), or None"
    )


def _attempt_in(found: list[tuple[bytes, bytes]]) -> int | None:
    """Return the attempt in these headers; None if there is none, or several differ."""
    attempts = {value for name, value in found if name == _ATTEMPT}
    return read_attempt(attempts.pop()) if len(attempts) == 1 else None


def _clear_context() -> Tokens:
    """Clear the values that an earlier request left in the context."""
    return [var.set(clean) for var, clean in _UNSET.items() if var.get() != clean]
