"""The audit of a running process: its guards and pools against the resilience checklist.

A finding here has numbers: what the guard was set to, and what its calls were like. What is
dangerous in a stack is asked of the guards themselves (`Guard.dangers`). Rules about calls need
enough of them, and say nothing before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from seawall import _checks as check
from seawall import registry
from seawall.audit.findings import Finding, in_order, process_finding
from seawall.family import Family
from seawall.guard import Guard
from seawall.models.pooling import timeout_for
from seawall.rules import RECOMMENDED

FEW: Final = 100
"""Calls of a guard from which its counts tell something."""
ENOUGH: Final = 1000
"""Calls from which a p99, or a limit never reached, tells something."""
FAR_ABOVE: Final = 10
"""How many times the p99 a timeout may be."""
SHORT: Final = 0.5
"""Seconds up to which a timeout is no harm, however fast the calls are."""
MUCH: Final = 0.1
"""Share of the calls that may be retries before a budget should have refused some."""
RARE: Final = 0.01
"""Share of the hedges that must win for them to be worth their load."""
_COUNTS: Final = ("succeeded", "failed", "cancelled", "rejected")
_VERBS: Final = ("add ", "put ", "give ", "write ", "make ", "lower ", "name ", "retry ")
"""How a remedy begins."""

_LIMITS: Final = frozenset({"bulkhead", "thread_bulkhead", "rate_limit"})


def audit_process(*, connections: int | None = None, pods: int = 1) -> list[Finding]:
    """Return what the guards and pools of this process show, in order.

    `connections` is the number that the server behind the pools accepts, and `pods` the number of
    processes like this one; without `connections`, pools are not added up.
    """
    if connections is not None:
        check.count("connections", connections)
    check.count("pods", pods)
    found = [*_dangers(), *_of_snapshot(registry.snapshot(), connections, pods)]
    return sorted(set(found), key=in_order)


def _dangers() -> Iterator[Finding]:
    """Yield what guards and other objects say about themselves in `explain()`."""
    everyone: list[Guard | Family] = [*registry.guards(), *registry.families()]
    for guard in everyone:
        for danger in guard.dangers():
            yield process_finding("SW702", f"guard {guard.name!r}", *_with_remedy(danger))
    for danger in registry.process_dangers():
        yield process_finding("SW702", "process", *_with_remedy(danger))


def _of_snapshot(
    shown: Mapping[str, list[dict[str, Any]]], connections: int | None, pods: int
) -> Iterator[Finding]:
    guards = shown.get(registry.GUARD, [])
    busy = sum(map(_calls, guards)) >= FEW
    for guard in guards:
        place = f"guard {guard['name']!r}"
        if busy and _calls(guard) == 0:
            yield process_finding(
                "SW703",
                place,
                f"no call, while other guards had {sum(map(_calls, guards))}",
                "@guard on the function that calls the dependency; or remove the guard",
            )
        yield from _timeout(place, guard)
        for policy in guard.get("policies", ()):
            if policy["policy"] == "retry":
                yield from _budget(place, policy)
            elif policy["policy"] == "hedge":
                yield from _hedge(place, policy)
            elif policy["policy"] in _LIMITS:
                yield from _limit(place, policy, _calls(guard))
    if connections is not None:
        yield from _pools(shown.get("pool", []), connections, pods)


def _timeout(place: str, guard: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare the innermost timeout with the latency of attempts."""
    seconds = [
        policy["seconds"]
        for policy in guard.get("policies", ())
        if policy["policy"] == "timeout" and isinstance(policy.get("seconds"), (int, float))
    ]
    p99 = guard.get("p99")
    if not seconds or not p99 or _calls(guard) < ENOUGH or seconds[-1] <= SHORT:
        return
    if seconds[-1] > FAR_ABOVE * p99:
        yield process_finding(
            "SW701",
            place,
            f"Timeout({seconds[-1]:g}) is {seconds[-1] / p99:.0f} times the p99 of {p99:.3g} s,"
            f" over {_calls(guard)} calls",
            f"Timeout({max(timeout_for(p99), 0.01):.2g}), which is timeout_for(p99)",
        )


def _budget(place: str, policy: Mapping[str, Any]) -> Iterator[Finding]:
    retries = policy.get("retries", 0)
    calls = sum(policy.get("outcomes", {}).values())
    refused = policy.get("stopped", {}).get("budget", 0)
    if policy.get("budget") is None or retries < FEW or refused or retries < MUCH * calls:
        return
    yield process_finding(
        "SW704",
        place,
        f"{retries} retries for {calls} calls, and the budget refused none",
        "RetryBudget(), with which ten successes pay for one retry",
    )


def _hedge(place: str, policy: Mapping[str, Any]) -> Iterator[Finding]:
    hedges, wins = policy.get("hedges", 0), policy.get("wins", 0)
    if hedges < FEW or wins >= RARE * hedges:
        return
    yield process_finding(
        "SW706",
        place,
        f"{wins} of {hedges} hedges were faster than the first call",
        "Hedge(quantile(0.95)), which waits for what is slow for this dependency; or no Hedge",
    )


def _limit(place: str, policy: Mapping[str, Any], calls: int) -> Iterator[Finding]:
    refused = policy.get("rejected", 0) + policy.get("would_reject", 0)
    waited = policy.get("waiting", 0) or policy.get("queue_wait", 0.0)
    if calls < ENOUGH or refused or waited:
        return
    kind = policy["policy"]
    limits = policy.get("limits")
    limit = ", ".join(limits) if isinstance(limits, dict) else policy.get("limit")
    yield process_finding(
        "SW705",
        place,
        f"the {kind} of {limit} never made any of {calls} calls wait, and refused none",
        "a limit near what the dependency bears: pool_size(rate, latency) for slots, its quota for"
        " rates; or AdaptiveLimit, which finds it",
    )


def _pools(pools: list[dict[str, Any]], connections: int, pods: int) -> Iterator[Finding]:
    sizes = {str(pool["name"]): int(pool.get("limit") or 0) for pool in pools}
    total = pods * sum(sizes.values())
    if total <= connections:
        return
    listed = ", ".join(f"{name} {size}" for name, size in sorted(sizes.items()))
    yield process_finding(
        "SW707",
        "pools",
        f"{listed}, in {pods} pods: up to {total} connections, and the server has {connections}",
        f"max_size so that all pools of a pod have at most {connections // pods} together",
    )


def _calls(guard: Mapping[str, Any]) -> int:
    return sum(int(guard.get(count) or 0) for count in _COUNTS)


def _with_remedy(danger: str) -> tuple[str, str]:
    """Return a danger and what to write instead, which most of them end with."""
    if "without Timeout" in danger:
        return danger, "Timeout(2.0) as the last policy, around each attempt"
    message, separator, remedy = danger.rpartition("; ")
    if not separator:
        message, _, remedy = danger.rpartition(": ")
        if not remedy.startswith(_VERBS):
            return danger, f"the policies in this order: {RECOMMENDED}"
    return message, remedy
