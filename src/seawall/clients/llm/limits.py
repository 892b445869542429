"""Limits on requests and tokens per minute, as the vendors of language models count them.

Promises:

- Before a call, everything that it may use is taken, all or none. Afterwards its actual usage is
  settled, once.
- A call that was never sent gives everything back. If the outcome of a call is unknown, the
  estimate stays.
- A vendor's report of what remains lowers the budget and never raises it. It holds for one period
  of the limit or `max_pushback` at most, whichever is longer: a wrong vendor, or a wrong clock,
  does not stop a service.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import floor
from typing import Any, Final, Literal

from seawall import _checks as check
from seawall.clients.http.terms import wall_time
from seawall.clients.llm.estimate import (
    Count,
    TextEncoding,
    TokenEstimate,
    body_of,
    counter_of,
    estimate,
    parsed_request,
)
from seawall.clients.llm.outcomes import TOO_MANY, nothing_sent, status_of, was_refused
from seawall.clients.llm.usage import NONE_USED, UNKNOWN, PendingUsage, usage_of
from seawall.context import reset
from seawall.models.rate.rates import whole_microseconds
from seawall.policies.rate_limit import Limit, RateLimit, Reservation
from seawall.policies.rate_limit.gate import RateGate
from seawall.policies.rate_limit.reservation import Charge
from seawall.policies.rate_limit.shared_gate import SharedRateGate
from seawall.policies.rate_limit.sharing import OnStoreFailure, SharingKind
from seawall.runtime.call import STREAMED
from seawall.runtime.layers import FAILED, OK, UNUSED, Host, Outcome
from seawall.runtime.policy import Mode
from seawall.runtime.store import LimitStore
from seawall.wire.vendors import KINDS, NOTHING, VendorLimit, read_vendor_limits

Refill = Literal["steady", "at_once"]

USAGE: Final = "seawall.llm.usage"
"""Extension of a response that holds its usage, once its body has been read."""

_STEPS: Final = (0.125, 0.25, 0.5, 1.0)
"""Fractions of the time until a vendor's limit is full again, at which its budget may grow."""

_AHEAD: Final = 1 / 32
"""Fraction of a vendor's limit by which its report and our count may differ: it rounds, and is
late."""

_MOST_REPORTED: Final = 1024

_estimate: Final[ContextVar[TokenEstimate]] = ContextVar("seawall_llm_guess")


# With parameters, so that the gate passes the call's arguments: see `_with_estimate`.
def _input(*_args: Any, **_kwargs: Any) -> int:
    return _estimate.get().input


def _output(*_args: Any, **_kwargs: Any) -> int:
    return _estimate.get().output


def _total(*_args: Any, **_kwargs: Any) -> int:
    guess = _estimate.get()
    return guess.input + guess.output


def _model(*_args: Any, **_kwargs: Any) -> str:
    return _estimate.get().model


def _settled(_answer: object) -> int:
    """Raise: as `settle=` this only marks a limit as one that the gate settles later."""
    raise NotImplementedError


_COSTS: Final = {"tokens": _total, "input_tokens": _input, "output_tokens": _output}
_FIELDS: Final = {"tokens": "total", "input_tokens": "input", "output_tokens": "output"}


class TokenLimits(RateLimit):
    """Limit on the rate of requests and of tokens to a language model."""

    def __init__(
        self,
        *,
        requests: str | None = None,
        tokens: str | None = None,
        input_tokens: str | None = None,
        output_tokens: str | None = None,
        count: Count | TextEncoding | None = None,
        output: int = 1024,
        cached: bool = False,
        per_model: bool = False,
        refill: Refill = "steady",
        max_pushback: float = 60.0,
        max_debt: float | None = None,
        max_wait: float = 0.0,
        max_waiting: int = 1024,
        mode: Mode = "enforce",
        shared: LimitStore | None = None,
        name: str | None = None,
        sharing: SharingKind = "exact",
        batch: int | None = None,
        on_store_failure: OnStoreFailure = "local",
    ) -> None:
        """Limit `requests`, `tokens`, `input_tokens` and `output_tokens`, such as "200k/min".

        The usage of a call is estimated: its input by `count`, a function of the request's body or
        an encoding of tiktoken, or a token for every four characters; its output by the maximum
        that the request allows, or `output` if it sets none.
        Tokens that are read from a cache and reported separately count with `cached` only.

        With `per_model` each model has its own limits. A vendor's limit is assumed to `refill`
        steadily, or "at_once" at the time that it reports. A 429 holds all calls back for the time
        that it asks for, up to `max_pushback` seconds; other reports hold for one period of the
        limit, if that is longer. The rest is as in `RateLimit`.
        """
        given = {
            "requests": requests,
            "tokens": tokens,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
        }
        if not any(given.values()):
            raise TypeError("TokenLimits(): give it a rate, such as TokenLimits(tokens='200k/min')")
        self.per_model = check.flag("per_model", per_model)
        self.count = counter_of(count)
        self.output = check.count("output", output, minimum=0)
        self.cached = check.flag("cached", cached)
        self.refill = check.choice("refill", refill, ("steady", "at_once"))
        self.max_pushback = check.seconds("max_pushback", max_pushback, zero=True)
        self.max_debt = max_debt
        self._reported: dict[tuple[str, str], tuple[int, float]] = {}
        super().__init__(
            *(self._limit(kind, rate) for kind, rate in given.items() if rate is not None),
            max_wait=max_wait,
            max_waiting=max_waiting,
            mode=mode,
            shared=shared,
            name=name,
            sharing=sharing,
            batch=batch,
            on_store_failure=on_store_failure,
        )

    def _limit(self, kind: str, rate: str) -> Limit:
        key = _model if self.per_model else None
        if kind == "requests":
            limit = Limit(rate, key=key, max_debt=self.max_debt, name=kind)
        else:
            cost = _COSTS[kind]
            limit = Limit(
                rate, key=key, cost=cost, settle=_settled, max_debt=self.max_debt, name=kind
            )
        limit._longest = max(limit._longest, self.max_pushback)
        return limit

    def __repr__(self) -> str:
        limits = ", ".join(f"{limit.name}={limit.text!r}" for limit in self.limits)
        shared = "" if self._sharing is None else f", {self._sharing!r}"
        return f"TokenLimits({limits}, max_wait={self.max_wait:g}{shared})"

    def settle(self, taken: Reservation, answer: object) -> None:
        """Settle a `reserve(...)` by the usage that `answer` reports; unknown amounts stay.

        `answer` is an SDK's response, its JSON as a mapping, or a `Usage`.
        """
        if not isinstance(taken, Reservation):
            raise TypeError(f"settle({taken!r}, ...): pass what reserve(...) gave, then the answer")
        usage = usage_of(answer)
        if self.cached and usage.input is not None:
            usage = usage._replace(input=usage.input + usage.cached)
        settled = []
        for charge in taken._end() or ():
            if charge.estimated:
                actual = getattr(usage, _FIELDS[charge.meter.limit.name])
                settled.append((charge, charge.asked if actual is None else actual))
        self._settle(settled)

    def apply_headers(
        self,
        headers: Mapping[str, str] | Iterable[tuple[str | bytes, str | bytes]],
        status: int = 200,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Apply a vendor's report from the headers of a response: it can only lower the budget.

        With `per_model`, the call's arguments determine the model.
        """
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        report = read_vendor_limits(pairs, wall_time())
        if report is NOTHING:
            return
        estimated = self._estimate_of(args, kwargs) if self.per_model else TokenEstimate(0, 0)
        with _with_estimate(estimated):
            for kind in KINDS:
                reported: VendorLimit | None = getattr(report, kind)
                if reported is not None:
                    self._apply_report(kind, reported)
            if status == TOO_MANY and report.retry_after:
                first = self.limits[0].name
                self.lower(0, min(report.retry_after, self.max_pushback), limit=first)

    def _apply_report(self, kind: str, reported: VendorLimit) -> None:
        names = [limit.name for limit in self.limits]
        if kind not in names:
            return
        remaining, after, whole = reported
        number = names.index(kind)
        if self._sharing is not None and not self._is_news(kind, reported):
            return
        rate, own = self.limits[number].rate, self._own_left(number)
        period = rate.period / 1e6
        longest = max(period, self.max_pushback)
        refilled = rate.limit * after / period  # by the limit itself, meanwhile
        if whole is None or self.refill == "at_once":
            held = min(after, longest)
            self._lower_to(kind, remaining, held, own + rate.limit * held / period)
            return
        grown = whole - remaining  # by the vendor
        ahead = own - remaining
        if ahead <= max(1, whole * _AHEAD) and refilled <= grown * (1 + _AHEAD):
            return  # it already matches the vendor's level: steps would only add pauses
        reached = 0.0
        for step in _STEPS:
            left, held = remaining + floor(grown * reached), min(after * step, longest)
            self._lower_to(kind, left, held, own + rate.limit * held / period)
            if held == longest:
                return
            reached = step

    def _lower_to(self, kind: str, left: int, seconds: float, otherwise: float) -> None:
        """Lower the limit, unless it would not admit more `otherwise`."""
        if left < otherwise:
            self.lower(left, seconds, limit=kind)

    def _is_news(self, kind: str, reported: VendorLimit) -> bool:
        """Return whether to notify all pods: markedly less than the last report, or it is old.

        Every response of a vendor contains such a report, and each one would cost a store
        operation.
        """
        key = kind, _estimate.get().model
        now = self._now()
        before = self._reported.get(key)
        if before is not None:
            remaining, at = before
            slack = max(1, (reported.limit or remaining) // 20)
            if now - at < reported.reset_after / 8 and reported.remaining >= remaining - slack:
                return False
        if len(self._reported) >= _MOST_REPORTED:
            self._reported.clear()
        self._reported[key] = reported.remaining, now
        return True

    def _own_left(self, number: int) -> int:
        """Return the maximum that the limit's own rule admits now, ignoring vendors' reports."""
        meter = self._meters.all[number]
        if self._sharing is not None:
            return meter.limit.burst or meter.limit.rate.limit  # only the store knows better
        now = whole_microseconds(self._now())
        with self._meters.mutex, self._meters:
            key = meter.limit._key_of((), {})
            place = key if meter.limit.key is None else meter.place(key, now)
            rule, state = meter.at(place, now)
            return rule.left(state, now)

    def _charges(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cost: int | None = None,
        *,
        by_hand: bool = False,
    ) -> list[Charge]:
        with _with_estimate(self._estimate_of(args, kwargs)):
            return super()._charges(args, kwargs, cost, by_hand=by_hand)

    def _lower(
        self,
        remaining: int,
        reset_after: float,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None,
    ) -> tuple[int, Hashable, float]:
        known = _estimate.get(None)  # the model of a vendor's response, if known
        with _with_estimate(self._estimate_of(args, kwargs) if known is None else known):
            return super()._lower(remaining, reset_after, args, kwargs, name)

    def _estimate_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenEstimate:
        parsed = parsed_request(args)
        if parsed is None:
            return estimate(body_of(args, kwargs), self.count, self.output)
        known = parsed.estimates.get(self)
        if known is None:
            known = estimate(parsed.body, self.count, self.output)
            if parsed.free:
                known = TokenEstimate(0, 0, known.model)
            parsed.estimates[self] = known
        return known

    def _bind(self, host: Host) -> RateGate:
        if self._sharing is not None:
            return _SharedTokenGate(self, host, self._sharing)
        return _TokenGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        known = (*KINDS, "max_wait", "max_waiting", "mode")
        self._reject_unknown(changes, known)
        rates = {limit.name: limit.text for limit in self.limits}
        for kind in KINDS:
            if kind in changes and kind not in rates:
                raise ValueError(
                    f"update({kind}=...): there is no such limit; make new TokenLimits"
                )
        limits = [self._limit(kind, changes.get(kind, rate)) for kind, rate in rates.items()]
        others = {name: value for name, value in changes.items() if name not in KINDS}
        super()._update({**others, "limits": limits})


@contextmanager
def _with_estimate(guess: TokenEstimate) -> Iterator[None]:
    """Set the estimate of a call, for the functions of its limits."""
    token = _estimate.set(guess)
    try:
        yield
    finally:
        reset(_estimate, token)


class _TokenGate(RateGate):
    """Gate of the limits in one guard: settles when the usage is known, which may be later."""

    policy: TokenLimits

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Give back what was not sent, settle what is known; an unknown usage stays."""
        if not _settles(self.policy, ticket, outcome, detail):
            unsent = outcome is FAILED and nothing_sent(detail, self.host.name)
            super().leave(ticket, UNUSED if unsent else outcome, STREAMED, now)


class _SharedTokenGate(_TokenGate, SharedRateGate):
    """Gate of limits in a store, with the same settlement."""


def _settles(policy: TokenLimits, ticket: Any, outcome: Outcome, detail: Any) -> bool:
    """Settle by the call's end, now or when its body was read; return whether it settles."""
    if not isinstance(ticket, Reservation):
        return False
    if outcome is OK:
        extensions = getattr(detail, "extensions", None)
        late = extensions.get(USAGE) if isinstance(extensions, dict) else None
        if isinstance(late, PendingUsage):
            late.then(partial(policy.settle, ticket))
            return True
        usage = UNKNOWN if detail is STREAMED else usage_of(detail)
        if usage.known:
            policy.settle(ticket, usage)
        return usage.known
    if outcome is FAILED and was_refused(status_of(detail)):
        policy.settle(ticket, NONE_USED)
        return True
    return False
