"""Description of each kind of object other than guards: its state, some facts, a gauge.

Pure except for the counters in `Moves`. Values that are missing or have another shape are omitted,
and nothing raises. An unknown kind is described by its plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from seawall.dashboard import _words as say
from seawall.dashboard._bounds import MOST_KEYS, number
from seawall.dashboard._lately import Seen, full, mapping, policies_of
from seawall.dashboard._layers import Facts, listed, plain_facts
from seawall.dashboard._moves import Moves
from seawall.dashboard.views import Pipes, Tone
from seawall.models.rate.rates import Rate
from seawall.telemetry import _thresholds as limits


class Line(NamedTuple):
    """Description of an object."""

    state: str = ""
    tone: Tone = "ok"
    facts: Facts = []  # noqa: RUF012 - never changed in place
    gauge: float | None = None
    track: float | None = None
    figures: dict[str, float] | None = None
    pipes: Pipes | None = None


def line_of(kind: str, name: str, seen: Seen, moves: Moves) -> Line:
    """Describe an object of that kind."""
    if "snapshot_error" in seen:
        return Line("unreadable", "warn")
    try:
        line = _READERS.get(kind, _unknown)(kind, name, seen, moves)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        line = _unknown(kind, name, seen, moves)
    if "stored_error" in seen:
        return line._replace(state="cannot be asked", tone="warn")
    if "stored_age" in seen:
        age = seen["stored_age"]
        known = "never" if age is None else f"{say.seconds(age)} ago"
        line = line._replace(facts=[*line.facts, ("asked", known)])
        if age is None:
            return line._replace(state=line.state or "not asked yet")
    return line


def share_of(used: Any, of: Any) -> float | None:
    """Return the used share of something, from 0 on; None if it has no size."""
    most = number(of)
    return number(used) / most if most > 0 else None


# Limits

_GUARD_LIMITS: Final = ("rate_limit", "bulkhead", "adaptive_limit", "thread_bulkhead")


def guard_limits(guard: Seen, moves: Moves) -> Iterator[tuple[str, str, Line]]:
    """Yield the limits in a guard's stack, whose counters are recorded already."""
    name = str(guard.get("name", ""))
    for place, seen in enumerate(policies_of(guard)):
        kind = seen.get("policy")
        if seen.get("mode") == "off" or kind not in _GUARD_LIMITS:
            continue
        refused = moves.lately_rate(("layer", name, place, "rejected"))
        facts: Facts = [("refused", say.rate(refused))]
        if kind == "rate_limit":
            try:
                yield "rate_limit", name, _rate_limit(seen, refused, facts)
            except (TypeError, ValueError):  # the known kind, but another shape
                yield "rate_limit", name, Line(facts=facts, track=refused)
        else:
            slots = seen.get("limit", seen.get("workers"))
            used = number(seen.get("in_flight"))
            line = Line(
                say.use(used, slots),
                "warn" if full(seen) else "ok",
                [("waiting", say.amount(seen.get("waiting"))), *facts],
                share_of(used, slots),
                used,
            )
            yield str(kind), name, line


def _rate_limit(seen: Seen, refused: float, facts: Facts) -> Line:
    texts: list[str] = []
    used: list[float] = []
    for limit in mapping(seen.get("limits")).values():
        one = mapping(limit)
        texts.append(str(one.get("limit", "")))
        if "left" in one:
            left = share_of(one["left"], Rate.parse(texts[-1]).limit)
            used.append(1 - min(1.0, left or 0.0))
    named = ", ".join(texts[:MOST_KEYS])
    state = "limiting" if refused else named
    told = [("limit", named), *facts]
    return Line(state, "warn" if refused else "ok", told, max(used, default=None), refused)


def request_limits(name: str, seen: Seen, moves: Moves) -> Iterator[tuple[str, Line]]:
    for group, soft in (("limits", False), ("soft", True)):
        for limit, told in mapping(seen.get(group)).items():
            one = mapping(told)
            over = moves.rate(("request_limits", name, group, limit), one.get("over"))
            facts: Facts = [
                ("rate", str(one.get("rate", ""))),
                ("keys", say.amount(one.get("keys"))),
                ("over in all", say.amount(one.get("over"))),
            ]
            shared = seen.get("shared")
            if isinstance(shared, Mapping) and "mode" in shared:
                facts.append(("sharing", str(shared["mode"])))
            what = "would refuse" if soft else "refuses"
            state = f"{what} {say.rate(over)}" if over else "well"
            yield f"{name}: {limit}", Line(state, "warn" if over else "ok", facts, None, over)


# Queues


def _queue(kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    known = waiting_of(kind, seen)
    if not known:
        return Line(facts=plain_facts(seen, ("stored_age",)))
    age = number(known.get("oldest"))
    most = limits.OUTBOX_AGE_SECONDS if kind == "outbox" else limits.QUEUE_AGE_SECONDS
    dead, blocked = number(known.get("dead")), number(known.get("blocked"))
    tone: Tone = "bad" if age > most or blocked > limits.BLOCKED_AGGREGATES else "ok"
    if tone == "ok" and dead > limits.DEAD:
        tone = "warn"
    facts: Facts = [("oldest", say.seconds(age))]
    facts += [
        (label, say.amount(known[label])) for label in _QUEUE_FACTS if number(known.get(label))
    ]
    waiting = number(known.get("waiting"))
    room = known.get("max_size", known.get("max_waiting", known.get("capacity")))
    return Line(f"{say.amount(waiting)} waiting", tone, facts, share_of(waiting, room), waiting)


def letters_of(seen: Seen) -> Seen:
    """Return the numbers of dead letters by state."""
    return {**seen, **mapping(seen.get("stored"))}


def has_no_letters(seen: Seen) -> bool:
    """Return whether a pipeline has no known dead letters, and so needs no row."""
    counts = (letters_of(seen).get(state) for state in ("dead", "waiting", "claimed"))
    return "stored_error" not in seen and not any(map(number, counts))


def _dead_letters(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    known = letters_of(seen)
    dead = number(known.get("dead"))
    facts: Facts = [
        (label, say.amount(known[key]))
        for key, label in (("waiting", "to be replayed"), ("claimed", "being replayed"))
        if number(known.get(key))
    ]
    state = say.several(dead, "dead letter") if dead else "no dead letters"
    return Line(state, "warn" if dead > limits.DEAD else "ok", facts, None, dead)


_QUEUE_FACTS: Final = (
    "dead",
    "blocked",
    "claimed",
    "running",
    "delayed",
    "dropped",
    "rejected",
    "refused",
    "expired",
    "lost",
)


def waiting_of(kind: str, seen: Seen) -> dict[str, Any]:
    """Return the state of something in which items wait, with the same names for all kinds."""
    stored = mapping(seen.get("stored"))
    if kind == "jobs":
        known: dict[str, Any] = {}
        for key, value in stored.items():
            if isinstance(value, (list, tuple)) and len(value) > 1:
                known[str(key)] = value[0]
        queued = stored.get("queued")
        oldest = queued[1] if isinstance(queued, (list, tuple)) and len(queued) > 1 else 0.0
        if not stored:
            return {}
        return {
            **known,
            "waiting": known.get("queued", 0),
            "dead": known.get("failed", 0),
            "oldest": oldest,
        }
    names = {"depth": "waiting", "pending": "waiting", "oldest_age": "oldest"}
    told = {names.get(key, key): value for key, value in {**seen, **stored}.items()}
    return told if "waiting" in told else {}


def _worker(kind: str, name: str, seen: Seen, moves: Moves) -> Line:
    slots, busy = number(seen.get("concurrency")), number(seen.get("at_work"))
    done = sum(number(seen.get(key)) for key in ("done", "succeeded", "delivered"))
    speed = moves.rate((kind, name, "done"), done)
    facts: Facts = [("done", say.rate(speed))]
    left = ("concurrency", "at_work", "running", "paused", "listening", "rounds")
    facts += [one for one in plain_facts(seen, left) if one[1] != "0"]
    if seen.get("running") is False:
        return Line("not running", "off", facts, None, speed)
    if seen.get("paused") is True:
        return Line("paused", "warn", facts, None, speed)
    state = f"{say.amount(busy)} of {say.amount(slots)} at work" if slots else "running"
    return Line(state, "ok", facts, share_of(busy, slots), speed)


def _serializer(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    waiting = number(seen["waiting"])
    facts: Facts = [
        ("in turn", say.amount(seen.get("in_flight"))),
        ("longest line", say.amount(seen.get("longest_line"))),
        ("refused", say.amount(seen.get("rejected"))),
    ]
    return Line(f"{say.amount(waiting)} waiting", "ok", facts, None, waiting)


# Pools


def _pool(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    used, size, waiting = (number(seen.get(key)) for key in ("in_flight", "limit", "waiting"))
    facts: Facts = [("idle", say.amount(seen.get("idle"))), ("waiting", say.amount(waiting))]
    for label, key in (("waits (p99)", "wait"), ("uses (p99)", "use")):
        p99 = mapping(seen.get(key)).get("p99")
        if p99 is not None:
            facts.append((label, say.seconds(p99)))
    troubles = ("leaked", "rejected", "timed_out", "connect_failed", "close_failed")
    facts += [
        (say.plainly(key), say.amount(seen[key])) for key in troubles if number(seen.get(key))
    ]
    return Line(
        say.use(used, size), "warn" if waiting else "ok", facts, share_of(used, size), waiting
    )


def _executor(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    used, size, waiting = (number(seen.get(key)) for key in ("in_flight", "workers", "waiting"))
    facts: Facts = [("waiting", say.amount(waiting))]
    if seen.get("p99") is not None:
        facts.append(("takes (p99)", say.seconds(seen["p99"])))
    troubles = ("failed", "rejected", "timed_out", "replaced", "abandoned")
    facts += [
        (say.plainly(key), say.amount(seen[key])) for key in troubles if number(seen.get(key))
    ]
    tone: Tone = "warn" if full(seen) else "ok"
    return Line(say.use(used, size), tone, facts, share_of(used, size), waiting)


# Surroundings of the service


def _store(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    up = seen["up"] is True
    facts: Facts = [("at", say.address(seen.get("at", "")))]
    if number(seen.get("dropped")):
        facts.append(("dropped", say.amount(seen["dropped"])))
    return Line("up" if up else "down", "ok" if up else "bad", facts, None, float(up))


def _lease(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    held = seen["held"] is True
    facts: Facts = [("token", say.amount(seen.get("token")))]
    if held:
        facts.append(("left", say.seconds(seen.get("left"))))
    return Line("held" if held else "not held", "ok" if held else "off", facts, None, float(held))


_HEALTH: Final[dict[str, Tone]] = {"healthy": "ok", "degraded": "warn", "unhealthy": "bad"}
_WORST: Final = ("unhealthy", "degraded", "healthy")


def _health(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    levels = mapping(seen["levels"])
    worst = worst_health(seen)
    facts: Facts = [(say.plainly(str(level)), str(state)) for level, state in levels.items()]
    ill = ill_checks(seen)
    if ill:
        facts.append(("failing checks", listed(ill)))
    return Line(worst, _HEALTH.get(worst, "off"), facts)


def worst_health(seen: Seen) -> str:
    """Return the worst of the levels of a service's health."""
    states = {str(state) for state in mapping(seen.get("levels")).values()}
    return next((state for state in _WORST if state in states), "unknown")


def ill_checks(seen: Seen) -> list[str]:
    """Return the names of the failing checks."""
    checks = mapping(seen.get("checks")).items()
    return [
        str(name)
        for name, check in checks
        if mapping(check).get("state") in {"degraded", "unhealthy"}
    ]


def _lifecycle(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    state = str(seen["state"])
    in_flight = number(seen.get("in_flight"))
    facts: Facts = [("in flight", say.amount(in_flight))]
    waits = seen.get("warming_up")
    if isinstance(waits, (list, tuple)) and waits:
        facts.append(("warming up", listed([str(one) for one in waits])))
    facts += [(key, say.amount(seen[key])) for key in ("refused", "cut") if number(seen.get(key))]
    tone: Tone = "ok" if state == "ready" else "off" if state == "stopped" else "warn"
    return Line(state, tone, facts, None, in_flight)


def _service_levels(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    level = str(seen["level"])
    facts: Facts = [("for", say.seconds(seen.get("seconds")))]
    if seen.get("pinned") is True:
        facts.append(("pinned", "yes"))
    load = mapping(seen.get("load"))
    if "value" in load:
        facts.append(("load", say.share(load["value"])))
    needs = mapping(seen.get("depends_on")).items()
    ill = [str(name) for name, one in needs if mapping(one).get("in_trouble")]
    if ill:
        facts.append(("in trouble", listed(ill)))
    return Line(level, "ok" if level == "full" else "warn", facts)


def _watchdog(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    lag = number(seen["lag"])
    facts: Facts = [
        ("loops", say.amount(seen.get("loops"))),
        ("blocks", say.amount(seen.get("blocks"))),
        ("longest", say.seconds(seen.get("longest"))),
    ]
    late = lag > limits.LOOP_LAG_SECONDS
    return Line(f"{say.seconds(lag)} late", "bad" if late else "ok", facts, None, lag)


def _upstreams(_kind: str, name: str, seen: Seen, moves: Moves) -> Line:
    hosts = {say.address(url): mapping(host) for url, host in mapping(seen["hosts"]).items()}
    out = [url for url, host in hosts.items() if host.get("state") != "serving"]
    facts: Facts = [("in flight", say.amount(seen.get("in_flight")))]
    if out:
        facts.append(("out of service", listed(out)))
    if seen.get("panic") is True:
        facts.append(("panic", "all are asked, too few are well"))
    total = sum(number(host.get("requests")) for host in hosts.values())
    speed = moves.rate(("upstreams", name, "requests"), total)
    serving = len(hosts) - len(out)
    tone: Tone = "warn" if out else "ok"
    if out and len(out) > limits.UNHEALTHY_HOSTS * len(hosts):
        tone = "bad"
    state = f"{serving} of {len(hosts)} serving"
    return Line(state, tone, facts, share_of(serving, len(hosts)), speed)


def _models(_kind: str, name: str, seen: Seen, moves: Moves) -> Line:
    served = mapping(seen["served"])
    speed = moves.rate(("models", name, "served"), sum(number(one) for one in served.values()))
    facts: Facts = [(str(model), say.amount(times)) for model, times in served.items()]
    return Line(
        say.rate(speed), "ok", [*facts, ("none", say.amount(seen.get("failed")))], None, speed
    )


def _llm(_kind: str, name: str, seen: Seen, moves: Moves) -> Line:
    """Describe requests, tokens and cost by the requested model."""
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
    speed = moves.rate(("llm", name, "requests"), total)
    return Line(say.rate(speed), "ok", facts, None, speed)


def _counts(kind: str, name: str, seen: Seen, moves: Moves) -> Line:
    """Describe counters other than 0; the history is the rate of all together."""
    total = sum(number(value) for value in seen.values() if type(value) is int)
    speed = moves.rate((kind, name, "all"), total)
    facts = [one for one in plain_facts(seen, ("window", "in_flight")) if one[1] != "0"]
    return Line(say.rate(speed), "ok", facts, None, speed)


def _unknown(_kind: str, _name: str, seen: Seen, _moves: Moves) -> Line:
    return Line(facts=plain_facts(seen, ("stored_age",)))


_READERS: Final[dict[str, Callable[[str, str, Seen, Moves], Line]]] = {
    **dict.fromkeys(("queue", "channel", "outbox", "jobs", "later"), _queue),
    **dict.fromkeys(("worker", "job_worker", "later_worker", "dispatcher"), _worker),
    **dict.fromkeys(
        ("idempotency", "idempotent_requests", "inbox", "fifo_sender", "fifo_receiver", "jobs_api"),
        _counts,
    ),
    "dead_letters": _dead_letters,
    "serializer": _serializer,
    "pool": _pool,
    "executor": _executor,
    "store": _store,
    "lease": _lease,
    "health": _health,
    "lifecycle": _lifecycle,
    "service_levels": _service_levels,
    "watchdog": _watchdog,
    "upstreams": _upstreams,
    "models": _models,
    "llm": _llm,
}
