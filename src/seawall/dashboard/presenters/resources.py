"""What a service uses: pools, executors, stores, leases, upstream hosts and language models."""

from __future__ import annotations

from typing import Final

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import MOST_KEYS, number
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.content import (
    Facts,
    FoundTrouble,
    Presenter,
    RowContent,
    Seen,
    Troubles,
    counted,
    full,
    listed,
    mapping,
    share_of,
)
from seawall.dashboard.views import Tone
from seawall.telemetry import thresholds as limits


def _pool_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    used, size, waiting = (number(seen.get(key)) for key in ("in_flight", "limit", "waiting"))
    facts: Facts = [("idle", say.amount(seen.get("idle"))), ("waiting", say.amount(waiting))]
    for label, key in (("waits (p99)", "wait"), ("uses (p99)", "use")):
        p99 = mapping(seen.get(key)).get("p99")
        if p99 is not None:
            facts.append((label, say.seconds(p99)))
    troubles = ("leaked", "rejected", "timed_out", "connect_failed", "close_failed")
    facts += counted(seen, troubles)
    tone: Tone = "warn" if waiting else "ok"
    return RowContent(say.use(used, size), tone, facts, share_of(used, size), waiting)


OUT_FOR: Final = 60.0
"""Seconds after which a borrowed resource counts as one that is not returned."""


def _pool_troubles(_kind: str, name: str, seen: Seen, counters: Counters) -> Troubles:
    waiting = number(seen.get("waiting"))
    if waiting:
        slow = number(mapping(seen.get("wait")).get("p99"))
        tone: Tone = "bad" if slow > limits.POOL_WAIT_SECONDS else "warn"
        who = say.several(waiting, "borrower waits", "borrowers wait")
        what = f"{who}, there are {say.amount(seen.get('limit'))} in all"
        yield FoundTrouble(f"pool:{name}", tone, name, what, "Enlarge it, or give back sooner")
    leaks = number(seen.get("leaked"))
    counters.rate(("pool", name, "leaked"), leaks)
    borrowers = seen.get("borrowers")
    oldest = 0.0
    if isinstance(borrowers, (list, tuple)) and borrowers:
        oldest = number(mapping(borrowers[0]).get("seconds"))
    if counters.recent(("pool", name, "leaked")) or (leaks and oldest > OUT_FOR):
        what = f"{say.several(leaks, 'resource was', 'resources were')} not given back in time"
        what += f", the oldest is out for {say.seconds(oldest)}" if oldest else ""
        yield FoundTrouble(f"leak:{name}", "warn", name, what, "Borrow in a with block")


def _executor_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    used, size, waiting = (number(seen.get(key)) for key in ("in_flight", "workers", "waiting"))
    facts: Facts = [("waiting", say.amount(waiting))]
    if seen.get("p99") is not None:
        facts.append(("takes (p99)", say.seconds(seen["p99"])))
    troubles = ("failed", "rejected", "timed_out", "replaced", "abandoned")
    facts += counted(seen, troubles)
    tone: Tone = "warn" if full(seen) else "ok"
    return RowContent(say.use(used, size), tone, facts, share_of(used, size), waiting)


def _executor_troubles(_kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    if full(seen):
        what = f"No worker of {say.amount(seen.get('workers'))} is free,"
        what += f" {say.several(seen.get('waiting'), 'call waits', 'calls wait')}"
        advice = "Give it more workers, or less work"
        yield FoundTrouble(f"executor:{name}", "warn", name, what, advice)


def _store_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    up = seen["up"] is True
    facts: Facts = [("at", say.address(seen.get("at", "")))]
    if number(seen.get("dropped")):
        facts.append(("dropped", say.amount(seen["dropped"])))
    return RowContent("up" if up else "down", "ok" if up else "bad", facts, None, float(up))


def _store_troubles(_kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    if seen.get("up") is False:
        what = f"The store at {say.address(seen.get('at', ''))} does not answer"
        advice = "What is shared goes on as its on_store_failure says"
        yield FoundTrouble(f"store:{name}", "bad", name, what, advice, f"store:{name}")


def _lease_row(_kind: str, _name: str, seen: Seen, _counters: Counters) -> RowContent:
    held = seen["held"] is True
    facts: Facts = [("token", say.amount(seen.get("token")))]
    if held:
        facts.append(("left", say.seconds(seen.get("left"))))
    return RowContent(
        "held" if held else "not held", "ok" if held else "off", facts, None, float(held)
    )


def _upstreams_row(_kind: str, name: str, seen: Seen, counters: Counters) -> RowContent:
    hosts = {say.address(url): mapping(host) for url, host in mapping(seen["hosts"]).items()}
    out = [url for url, host in hosts.items() if host.get("state") != "serving"]
    facts: Facts = [("in flight", say.amount(seen.get("in_flight")))]
    if out:
        facts.append(("out of service", listed(out)))
    if seen.get("panic") is True:
        facts.append(("panic", "all are asked, too few are well"))
    total = sum(number(host.get("requests")) for host in hosts.values())
    speed = counters.rate(("upstreams", name, "requests"), total)
    serving = len(hosts) - len(out)
    tone: Tone = "warn" if out else "ok"
    if out and len(out) > limits.UNHEALTHY_HOSTS * len(hosts):
        tone = "bad"
    state = f"{serving} of {len(hosts)} serving"
    return RowContent(state, tone, facts, share_of(serving, len(hosts)), speed)


def _upstreams_troubles(_kind: str, name: str, seen: Seen, _counters: Counters) -> Troubles:
    hosts = mapping(seen["hosts"])
    out = [say.address(url) for url, one in hosts.items() if mapping(one).get("state") != "serving"]
    if out:
        what = f"Out of service are {len(out)} of {say.several(len(hosts), 'host')}: {listed(out)}"
        tone: Tone = "bad" if len(out) > limits.UNHEALTHY_HOSTS * len(hosts) else "warn"
        yield FoundTrouble(f"upstreams:{name}", tone, name, what, "", f"upstreams:{name}")


def _models_row(_kind: str, name: str, seen: Seen, counters: Counters) -> RowContent:
    served = mapping(seen["served"])
    speed = counters.rate(("models", name, "served"), sum(number(one) for one in served.values()))
    facts: Facts = [(str(model), say.amount(times)) for model, times in served.items()]
    facts.append(("none", say.amount(seen.get("failed"))))
    return RowContent(say.rate(speed), "ok", facts, None, speed)


def _llm_row(_kind: str, name: str, seen: Seen, counters: Counters) -> RowContent:
    models: dict[str, dict[str, float]] = {}
    for one in seen["operations"]:
        found = models.setdefault(str(one["request_model"]) or "unnamed", {})
        amounts = {
            "requests": sum(one["durations"]["counts"]),
            "failed": sum(one["durations"]["counts"]) if one["error"] else 0.0,
            "in": one["input"]["sum"],
            "out": one["output"]["sum"],
            "cost": one["cost"],
            "first": one["first_chunks"]["sum"],
            "streams": sum(one["first_chunks"]["counts"]),
        }
        for key, amount in amounts.items():
            found[key] = found.get(key, 0.0) + number(amount)
    facts: Facts = []
    for model, of in list(models.items())[:MOST_KEYS]:
        words = [f"{say.amount(of['requests'])} requests"]
        if of["failed"]:
            words.append(f"{say.amount(of['failed'])} failed")
        words.append(f"{say.amount(of['in'])} tokens in, {say.amount(of['out'])} out")
        if of["streams"]:
            words.append(f"first chunk after {say.seconds(of['first'] / of['streams'])}")
        if seen.get("priced"):
            words.append(f"cost {of['cost']:.4g}")
        facts.append((model, ", ".join(words)))
    if number(seen.get("unpriced")):
        facts.append(("without a price", say.amount(seen["unpriced"])))
    total = sum(of["requests"] for of in models.values())
    speed = counters.rate(("llm", name, "requests"), total)
    return RowContent(say.rate(speed), "ok", facts, None, speed)


PRESENTERS: Final = {
    "pool": Presenter(_pool_row, _pool_troubles),
    "executor": Presenter(_executor_row, _executor_troubles),
    "store": Presenter(_store_row, _store_troubles),
    "lease": Presenter(_lease_row),
    "upstreams": Presenter(_upstreams_row, _upstreams_troubles),
    "models": Presenter(_models_row),
    "llm": Presenter(_llm_row),
}
