"""Rules for the order of a stack: what is refused, and what `explain()` warns about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from seawall.errors import TimedOut
from seawall.policies.breaker import Breaker
from seawall.policies.fallback import Fallback
from seawall.policies.retry import Retry
from seawall.policies.retry.policy import switch
from seawall.policies.timeout import Timeout
from seawall.policies.timeout.policy import AdaptiveSeconds
from seawall.runtime.call import bypass
from seawall.runtime.policy import Policy, bindings_of

if TYPE_CHECKING:
    from seawall.guard import Guard

RECOMMENDED = (
    "Fallback > Cache > Shed > total Timeout > Retry > Hedge > Breaker > Throttle > RateLimit"
    " > Bulkhead or AdaptiveLimit > attempt Timeout > Chaos"
)

# Identify policies by kind where checking a class would load a module that nothing uses.
_SLOTS = ("bulkhead", "thread_bulkhead", "adaptive_limit")
_GATES = ("breaker", "throttle", "rate_limit", *_SLOTS)

_AROUND = (
    (_SLOTS, "retry", "its slot is held during the pauses"),
    (("rate_limit",), "retry", "one token for {attempts} attempts, and the other side counts each"),
    (("throttle",), "retry", "it counts one request for {attempts} attempts"),
    (("hedge",), "retry", "each copy makes up to {attempts} attempts"),
    (("breaker",), "retry", "after it opens, calls go on for up to {attempts} attempts"),
    (_SLOTS, "hedge", "all copies share one slot"),
    (("rate_limit",), "hedge", "one token for all copies"),
    (("breaker",), "hedge", "it sees only the copy that won"),
    (_SLOTS, "breaker", "calls queue for a slot only to be refused"),
)
"""Kinds of an outer policy, the kind of an inner one, and why the outer must not be around it."""

_INSIDE = (
    ("cache", ("hedge",), "a copy waits for the very call that is slow"),
    ("cache", ("retry", *_GATES), "an answer from memory pays for it too"),
    ("shed", ("retry", "hedge", *_GATES), "a call costs work before it is shed; put Shed first"),
)
"""The kind of an inner policy, kinds of outer ones, and why it must not be inside them."""


def check_stack(policies: Sequence[Any]) -> None:
    """Raise if the stack is empty, or holds a policy that could never act."""
    if not policies:
        raise ValueError(
            "a guard needs at least one policy, such as Guard('vendor', Timeout(2.0)); or use"
            " Guard.standard('vendor', on=ConnectionError, timeout=2.0)"
        )
    for position, policy in enumerate(policies):
        if isinstance(policy, type) and issubclass(policy, Policy):
            raise TypeError(f"{policy.__name__} is a class: write {policy.__name__}(...)")
        if not isinstance(policy, Policy):
            raise TypeError(f"{policy!r} is no policy: write Timeout(2.0), Retry(on=...) and so on")
        if any(policy is other for other in policies[:position]):
            raise ValueError(
                f"{policy!r} is in the stack twice, and would wait for itself or count twice:"
                " make a second one if you want two"
            )
    for outer, inner in _pairs(policies):
        if (
            isinstance(inner, Fallback)
            and inner.catches_everything
            and isinstance(outer, (Retry, Breaker))
        ):
            name = type(outer).__name__
            raise ValueError(
                f"Fallback stands inside {name} and answers every error, so {name} never sees one:"
                f" put Fallback before {name}, or give it on=..."
            )


def switches() -> dict[str, str]:
    """Return the test switches that are on, by name; in production there are none."""
    on = {}
    if bypass.on:
        on["policies"] = "off"
    if switch.off or switch.instant:
        on["retries"] = "off" if switch.off else "instant"
    return on


def switched() -> Iterator[str]:
    """Yield a warning for each test switch that is on in this process."""
    on = switches()
    if "policies" in on:
        yield (
            "policies are switched off (SEAWALL_POLICIES=off, or policies_off()): functions are"
            " called without any of them"
        )
    if "retries" in on:
        yield (
            f"retries are switched to {on['retries']!r} (SEAWALL_RETRIES={on['retries']}, or"
            f" retries({on['retries']!r})): they are not as configured"
        )


def dangers(name: str, policies: Sequence[Policy], *, idempotent: bool) -> list[str]:
    """Return the dangers of the stack as text, each with its remedy."""
    found = [warning for pair in _pairs(policies) for warning in _between(*pair)]
    found.extend(_short_totals(policies))
    retries = [policy for policy in policies if isinstance(policy, Retry)]
    if retries and not idempotent:
        found.append(
            "calls are marked idempotent=False: they are retried only with an idempotency key"
        )
    found.extend(_without_timeout(policies))
    for retry in retries:
        found.extend(_of_retry(retry))
    found.extend(_shared(name, policies))
    found.extend(_alone(policies, idempotent=idempotent))
    return found


def nested_retries(guard: Guard, others: Iterable[Guard]) -> Iterator[str]:
    """Yield which other retrying guards run around this one, or inside it."""
    around = sorted(_retrying_around(guard))
    inside = sorted(other.name for other in others if guard.name in _retrying_around(other))
    if around:
        yield (
            f"around it {_named(around)} too: it does not retry while an outer guard does;"
            " retry at one level, directly above what fails"
        )
    if inside:
        yield (
            f"inside it {_named(inside)} too, though not while this guard does; retry at one level,"
            " directly above what fails"
        )


def _retrying_around(guard: Guard) -> set[str]:
    return {name for bound in guard.bounds for name in getattr(bound, "retried_by", ())}


def _named(guards: Sequence[str]) -> str:
    names = ", ".join(map(repr, guards))
    return f"guards {names} retry" if len(guards) > 1 else f"guard {names} retries"


def _without_timeout(policies: Sequence[Policy]) -> Iterator[str]:
    """Warn where a hanging call does harm: in an attempt, in a slot, or unseen by a breaker."""
    timeouts = [at for at, policy in enumerate(policies) if isinstance(policy, Timeout)]
    retries = [at for at, policy in enumerate(policies) if isinstance(policy, Retry)]
    if not timeouts:
        for policy in policies:
            if isinstance(policy, Retry):
                yield "Retry without Timeout: one attempt that hangs is never retried"
            elif isinstance(policy, Breaker) and policy.settings.slow_after is None:
                yield "Breaker without Timeout: it never learns of a call that hangs"
            elif policy.kind in _SLOTS:
                yield f"{type(policy).__name__} without Timeout: a call that hangs keeps its slot"
    elif retries and timeouts[-1] < retries[-1]:
        yield (
            "Timeout stands only around Retry: one attempt that hangs uses up the whole time;"
            " add a shorter Timeout inside Retry"
        )


def _of_retry(retry: Retry) -> Iterator[str]:
    if retry.most_attempts < 2:  # noqa: PLR2004 - one attempt is no retry
        return
    if retry.budget is None:
        yield (
            "Retry without a budget: in an outage every caller adds"
            f" {retry.most_attempts - 1} calls for each one; give it budget=RetryBudget()"
        )
    if not retry.backoff.is_jittered:
        yield (
            f"{retry.backoff!r} has no jitter: callers that failed together come back together;"
            " write backoff=0.1, or jitter='full'"
        )
    if Exception in retry.types:
        yield (
            "on=Exception retries mistakes in the code too, such as a TypeError: name the errors"
            " that pass by themselves, such as on=(ConnectionError, TimeoutError)"
        )


def _alone(policies: Sequence[Policy], *, idempotent: bool) -> Iterator[str]:
    for policy in policies:
        if isinstance(policy, Breaker) and policy.settings.min_calls == 1:
            yield (
                "Breaker with min_calls=1: one failure after a quiet time opens it for everybody;"
                " write min_calls=10 or more"
            )
        if policy.kind == "hedge" and not idempotent:
            yield "calls are marked idempotent=False: they are hedged only with an idempotency key"
        if policy.kind == "chaos" and getattr(policy, "enabled", False):
            yield "Chaos is switched on: some calls fail on purpose; chaos.off() ends that"


def _pairs(policies: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for position, outer in enumerate(policies):
        for inner in policies[position + 1 :]:
            yield outer, inner


def _between(outer: Policy, inner: Policy) -> Iterator[str]:
    outside, inside = type(outer).__name__, type(inner).__name__
    for kinds, kind, why in _AROUND:
        if outer.kind in kinds and inner.kind == kind:
            danger = why.format(attempts=getattr(inner, "most_attempts", 1))
            yield f"{outside} stands around {inside}: {danger}; put it inside {inside}"
    for kind, around, why in _INSIDE:
        if inner.kind == kind and outer.kind in around:
            yield f"{inside} stands inside {outside}: {why}"
    if outer.kind in _SLOTS and inner.kind == "rate_limit" and getattr(inner, "max_wait", False):
        yield (
            f"{outside} stands around a RateLimit that waits: its slot is held meanwhile; put"
            " RateLimit first"
        )
    if outer.kind == "chaos" and inner.kind in ("retry", "breaker", "timeout"):
        yield f"Chaos stands around {inside}, which never sees it: put it last"
    if isinstance(outer, Timeout):
        yield from _inside_timeout(outer, inner)
    if isinstance(outer, Retry):
        yield from _inside_retry(outer, inner)


def _inside_retry(outer: Retry, inner: Policy) -> Iterator[str]:
    if isinstance(inner, Timeout) and not outer.is_retryable(TimedOut(), None):
        yield "an attempt that times out is not retried: add TimeoutError to on=, if it may be"
    if isinstance(inner, Retry):
        most = outer.most_attempts + inner.most_attempts - 1
        yield (
            f"Retry inside Retry: up to {most} attempts for one call, as the inner one stops when"
            " the outer one begins; one Retry is enough"
        )


def _inside_timeout(outer: Timeout, inner: Policy) -> Iterator[str]:
    if isinstance(inner, Timeout) and inner.longest >= outer.longest:
        yield (
            f"the inner Timeout ({inner.longest:g} s) is not below the outer one"
            f" ({outer.longest:g} s): it never acts"
        )
    if isinstance(inner, Retry) and isinstance(outer.seconds, AdaptiveSeconds):
        yield (
            "an adaptive Timeout around Retry follows the latency of one attempt, and leaves no"
            " time for another: give the total a constant"
        )
    wait = getattr(inner, "max_wait", 0.0)
    if wait >= outer.longest:
        yield (
            f"{type(inner).__name__} waits up to {wait:g} s inside a Timeout of"
            f" {outer.longest:g} s: the whole time can pass in the queue; lower max_wait"
        )
    if isinstance(inner, Retry) and (longest := _longest_pauses(inner)) >= outer.longest:
        yield (
            f"the total Timeout of {outer.longest:g} s can be over before the pauses of Retry are"
            f" (up to {longest:g} s): later attempts may never run"
        )


def _short_totals(policies: Sequence[Policy]) -> Iterator[str]:
    for at, retry in enumerate(policies):
        outside = [policy.longest for policy in policies[:at] if isinstance(policy, Timeout)]
        inside = [policy.longest for policy in policies[at:] if isinstance(policy, Timeout)]
        if not isinstance(retry, Retry) or not outside or not inside:
            continue
        total, attempts = min(outside), retry.most_attempts
        if min(inside) < total < attempts * min(inside):
            yield (
                f"the total Timeout of {total:g} s is below {attempts} attempts of"
                f" {min(inside):g} s: if they time out, later ones are cut short or never run"
            )


def _longest_pauses(retry: Retry) -> float:
    delays = retry.backoff.delays(lambda: 1.0)
    return sum(next(delays) for _ in range(min(retry.most_attempts, 100) - 1))


def _shared(name: str, policies: Sequence[Policy]) -> Iterator[str]:
    for policy in policies:
        others = sorted({bound.host.name for bound in bindings_of(policy)} - {name})
        if not others or policy.kind not in _SLOTS or not getattr(policy, "max_wait", 1.0):
            continue
        yield (
            f"{policy!r} is shared with {', '.join(others)}: a call of one made inside a call of"
            " the other waits for a slot that its own caller holds; nested calls need two bulkheads"
        )
