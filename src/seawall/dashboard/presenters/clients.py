"""Upstream hosts, and language models: requests, tokens and cost."""

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
    listed,
    mapping,
    share_of,
)
from seawall.dashboard.views import Tone
from seawall.telemetry import thresholds as limits


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
    return RowContent(
        say.rate(speed), "ok", [*facts, ("none", say.amount(seen.get("failed")))], None, speed
    )


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
    "upstreams": Presenter(_upstreams_row, _upstreams_troubles),
    "models": Presenter(_models_row),
    "llm": Presenter(_llm_row),
}
