"""Rules that find problems in the snapshot of a guard or another object.

Pure except for the counters in `Moves`, which add the recent growth of counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from seawall.dashboard import _words as say
from seawall.dashboard._bounds import LONGEST_KEY, MOST_KEYS, number, shown
from seawall.dashboard._lately import (
    Seen,
    budget_spent,
    budget_state,
    degraded_share,
    failing,
    full,
    last_error,
    mapping,
    policies_of,
    refused_by_budget,
    share_lately,
)
from seawall.dashboard._layers import broken_keys, listed
from seawall.dashboard._lines import ill_checks, letters_of, waiting_of, worst_health
from seawall.dashboard._members import TONES as MEMBER_TONES
from seawall.dashboard._members import WORDS as MEMBER_WORDS
from seawall.dashboard._members import members_of, score_of, tone_of
from seawall.dashboard._moves import Moves
from seawall.dashboard._pipelines import (
    COLLECT,
    PIPELINE,
    blocked_by,
    blocked_tone,
    causes_of,
    degrades_all,
    failing_share,
    failing_tone,
    readings_of,
    seen_list,
    too_few,
)
from seawall.dashboard.views import Tone
from seawall.telemetry import _thresholds as limits

OUT_FOR: Final = 60.0
"""Seconds after which a borrowed resource counts as one that is not returned."""


class Found(NamedTuple):
    """A problem, without its time.

    `began` is the key of the event that starts it, `cause` the id of the problem that causes it.
    """

    id: str
    tone: Tone
    where: str
    what: str
    advice: str = ""
    began: str = ""
    cause: str = ""
    degrades: bool = False
    lasted: float = 0.0
    """Minimum number of seconds that it has lasted, if the snapshot has it."""


def kept_of(rule: Iterator[Found]) -> list[Found]:
    """Return what a rule finds before it fails on data of another shape."""
    found: list[Found] = []
    try:
        for one in rule:
            found.append(one)  # noqa: PERF402 - keeps what was found before an exception
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        pass  # a user's own policy may show anything
    return found


Rule = Callable[[str, str, Seen, Moves], Iterator[Found]]


# Guards


def guard_rule(_kind: str, name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    yield from _with_causes(kept_of(_guard(name, seen, moves)))


def _with_causes(found: list[Found]) -> Iterator[Found]:
    """Set the causes among the problems of one guard.

    When a dependency fails, the breaker opens, attempts fail, the retry budget is spent, slots stay
    taken, threads are abandoned, and fallbacks answer. The first of these that is present is the
    cause of the later ones. A limit that refuses explains only the fallbacks.
    """
    ranked = [one for one in found if not one.cause and _kind(one) in _EXPLAINS]
    ranked.sort(key=lambda one: _EXPLAINS.index(_kind(one)))
    for one in found:
        if one.cause:
            yield one
            continue
        earlier = (by for by in ranked if _explains(by, one))
        cause = next(earlier, None)
        yield one if cause is None else one._replace(cause=cause.id)


def _explains(cause: Found, one: Found) -> bool:
    before, after = _kind(cause), _kind(one)
    if after not in _EXPLAINS or _EXPLAINS.index(before) >= _EXPLAINS.index(after):
        return False
    return after == "degraded" or not (before in _LIMITING or after in _LIMITING)


def _kind(one: Found) -> str:
    return one.id.partition(":")[0]


_LIMITING: Final = ("rate_limit", "throttle", "shed", "turns")
_EXPLAINS: Final = (
    "breaker",
    "errors",
    *("bulkhead", "thread_bulkhead", "adaptive_limit"),
    *_LIMITING,
    "budget",
    "abandoned",
    "degraded",
)
"""Kinds of a guard's problems: each may be caused by those before it."""


def _guard(name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    for place, policy in enumerate(policies_of(seen)):
        if policy.get("mode") != "off":
            rule = _POLICIES.get(str(policy.get("policy")))
            if rule is not None:
                yield from kept_of(rule(name, place, policy, moves))
            yield from _without_store(name, place, policy)
    tone = failing(seen, moves)
    if tone is not None:
        what = f"{say.share(seen['error_rate'])} of recent attempts failed"
        last = last_error(seen, when=False)
        what += f"; the last: {last}" if last else ""
        yield Found(f"errors:{name}", tone, name, what, "Look at what it calls")
    degraded = moves.lately(("guard", name, "degraded"))
    if degraded:
        moves.rate(("guard", name, "stale"), seen.get("stale"))
        stale = moves.lately(("guard", name, "stale"))
        share = degraded_share(name, moves)
        answers = "All answers" if share == 1 else f"{say.share(share)} of answers"
        kinds = [say.several(stale, "stale value")] if stale else []
        kinds += [say.several(degraded - stale, "fallback")] if degraded > stale else []
        what = f"{answers} of the last {say.seconds(round(moves.span, 1))} are lesser ones:"
        what += f" {' and '.join(kinds)}"
        advice = "Look at what it calls"
        degrades = share >= limits.DEGRADED
        yield Found(f"degraded:{name}", "warn", name, what, advice, degrades=degrades)
    abandoned = number(seen.get("abandoned"))
    if abandoned > limits.ABANDONED_THREADS:
        threads = say.several(abandoned, "thread runs", "threads run")
        what = f"{threads} on without a caller"
        advice = "Give what they call a timeout of its own"
        yield Found(f"abandoned:{name}", "warn", name, what, advice)


def _without_store(name: str, place: int, seen: Seen) -> Iterator[Found]:
    shared = seen.get("shared")
    mode = shared.get("mode", "shared") if isinstance(shared, Mapping) else "shared"
    if mode != "shared":
        kind = str(seen.get("policy"))
        tone: Tone = "bad" if mode == "closed" else "warn"
        ways = {
            "local": "by what this pod knows",
            "open": "and admits everything",
            "closed": "and refuses everything",
        }
        what = f"The {say.plainly(kind)} goes without its store, {ways.get(str(mode), str(mode))}"
        advice = "See whether the store answers"
        key = f"store_mode:{name}"
        cause = _lost_store(shared)
        yield Found(f"{key}:{place}", tone, name, what, advice, f"{key}:{kind}", cause)


def _lost_store(shared: Any) -> str:
    """Return the id of the problem that makes a policy work without its store."""
    store = mapping(shared).get("store")
    return f"store:{store}" if store else ""


def _breaker(name: str, place: int, seen: Seen, _moves: Moves) -> Iterator[Found]:
    state = seen.get("state")
    if state not in {"open", "half_open", "isolated"}:
        return
    keys = seen.get("keys")
    broken = broken_keys(keys) if isinstance(keys, Mapping) else []
    whose = f" for {say.several(len(broken), 'key')}: {listed(broken)}" if broken else ""
    tone: Tone = "warn" if state == "half_open" else "bad"
    what = f"The breaker is {say.plainly(str(state))}{whose}"
    advice = "Look at what it calls: it failed too often"
    if state == "isolated":
        advice = "Close it when calls may pass again"
    if seen.get("mode") == "shadow":
        tone, what = "warn", f"{what}, in shadow: no call is refused"
    elif state == "isolated" and not whose:
        what += ": all calls are refused until somebody closes it"
    elif state == "half_open" and not whose:
        what += ": a few calls try whether it works again"
    elif not whose:
        what += f", {say.until_probe(seen.get('retry_after'))}"
    yield Found(f"breaker:{name}:{place}", tone, name, what, advice, f"breaker:{name}")


def _retry(name: str, place: int, seen: Seen, moves: Moves) -> Iterator[Found]:
    state = budget_state(name, place, seen, moves)
    key = f"budget:{name}:{place}"
    if state == "refusing":
        refused = say.several(refused_by_budget(name, place, moves), "failed call")
        what = f"The retry budget is spent: {refused} in {say.seconds(moves.span)} not retried"
        yield Found(key, "bad", name, what, "Look at what it calls: too much of it fails")
    elif state == "unfilled":
        what = "The retry budget is not refilled yet: a call that fails now is not retried"
        advice = "Nothing to do while calls succeed: they refill it, time does not"
        yield Found(key, "warn", name, what, advice)
    elif state == "low":
        what = f"{say.share(budget_spent(seen))} of the retry budget are spent"
        yield Found(key, "warn", name, what, "Look at what it calls: much of it is retried")


def _refusing(name: str, place: int, seen: Seen, moves: Moves) -> Iterator[Found]:
    kind = str(seen["policy"])
    what, most, advice = {
        "rate_limit": (
            "The rate limit refuses",
            limits.RATE_LIMITED,
            "Ask less often, or raise it",
        ),
        "throttle": ("The throttle holds back", limits.RATE_LIMITED, "What it calls has too much"),
        "bulkhead": ("The bulkhead refuses", limits.SHED, "Is what it calls slow?"),
        "thread_bulkhead": ("The threads are taken: refused are", limits.SHED, "Is it slow?"),
        "adaptive_limit": ("The limit refuses", limits.SHED, "Is what it calls slow?"),
    }.get(kind, ("Shedding", limits.SHED, "Start more processes, or wait for the surge to pass"))
    share = share_lately(name, place, "rejected", moves)
    if not share or (share <= most and what != "Shedding"):
        return
    tone: Tone = "bad" if share > most and what == "Shedding" else "warn"
    speed = moves.lately_rate(("layer", name, place, "rejected"))
    told = f"{what} {say.share(share)} of calls, {say.rate(speed)}"
    yield Found(f"{kind}:{name}:{place}", tone, name, told, advice)


def _slots(name: str, place: int, seen: Seen, moves: Moves) -> Iterator[Found]:
    slots = seen.get("limit", seen.get("workers"))
    kind = str(seen["policy"])
    if full(seen):
        waiting = say.several(seen.get("waiting"), "call waits", "calls wait")
        what = f"No slot of {say.amount(slots)} is free, {waiting}"
        wait = number(seen.get("queue_wait"))
        tone: Tone = "bad" if wait > limits.SLOT_WAIT_SECONDS else "warn"
        what += f", the first for {say.seconds(wait)}" if wait else ""
        yield Found(f"{kind}:{name}:{place}", tone, name, what, "Is what it calls slow?")
    elif share_lately(name, place, "rejected", moves) > limits.SHED:
        yield from _refusing(name, place, seen, moves)


_POLICIES: Final[dict[str, Callable[[str, int, Seen, Moves], Iterator[Found]]]] = {
    "breaker": _breaker,
    "retry": _retry,
    **dict.fromkeys(("rate_limit", "throttle", "shed", "turns"), _refusing),
    **dict.fromkeys(("bulkhead", "thread_bulkhead", "adaptive_limit"), _slots),
}


# Other objects


def _waiting(kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    known = waiting_of(kind, seen)
    what = say.plainly(kind)
    age = number(known.get("oldest"))
    most = limits.OUTBOX_AGE_SECONDS if kind == "outbox" else limits.QUEUE_AGE_SECONDS
    if age > most:
        waiting = f", {say.amount(known.get('waiting'))} wait"
        told = f"The oldest of the {what} has waited for {say.seconds(age)}{waiting}"
        yield Found(f"age:{kind}:{name}", "bad", name, told, "Does somebody work it off?")
    dead = number(known.get("dead"))
    if dead > limits.DEAD:
        told = f"Given up: {say.amount(dead)} of the {what}"
        advice = "Look at why they failed; do them again, or drop them"
        yield Found(f"dead:{kind}:{name}", "warn", name, told, advice)
    blocked = number(known.get("blocked"))
    if blocked > limits.BLOCKED_AGGREGATES:
        told = f"Events of {say.several(blocked, 'aggregate')} wait behind one that failed"
        yield Found(f"blocked:{name}", "bad", name, told, "Mend the cause, then unblock them")


def _pool(_kind: str, name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    waiting = number(seen.get("waiting"))
    if waiting:
        slow = number(mapping(seen.get("wait")).get("p99"))
        tone: Tone = "bad" if slow > limits.POOL_WAIT_SECONDS else "warn"
        who = say.several(waiting, "borrower waits", "borrowers wait")
        what = f"{who}, there are {say.amount(seen.get('limit'))} in all"
        yield Found(f"pool:{name}", tone, name, what, "Enlarge it, or give back sooner")
    leaks = number(seen.get("leaked"))
    moves.rate(("pool", name, "leaked"), leaks)
    borrowers = seen.get("borrowers")
    oldest = 0.0
    if isinstance(borrowers, (list, tuple)) and borrowers:
        oldest = number(mapping(borrowers[0]).get("seconds"))
    if moves.lately(("pool", name, "leaked")) or (leaks and oldest > OUT_FOR):
        what = f"{say.several(leaks, 'resource was', 'resources were')} not given back in time"
        what += f", the oldest is out for {say.seconds(oldest)}" if oldest else ""
        yield Found(f"leak:{name}", "warn", name, what, "Borrow in a with block")


def _executor(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    if full(seen):
        what = f"No worker of {say.amount(seen.get('workers'))} is free,"
        what += f" {say.several(seen.get('waiting'), 'call waits', 'calls wait')}"
        yield Found(f"executor:{name}", "warn", name, what, "Give it more workers, or less work")


def _store(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    if seen.get("up") is False:
        what = f"The store at {say.address(seen.get('at', ''))} does not answer"
        advice = "What is shared goes on as its on_store_failure says"
        yield Found(f"store:{name}", "bad", name, what, advice, f"store:{name}")


def _health(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    worst = worst_health(seen)
    if worst in {"degraded", "unhealthy"}:
        ill = ill_checks(seen)
        what = f"The service is {worst}" + (f": {listed(ill)}" if ill else "")
        tone: Tone = "bad" if worst == "unhealthy" else "warn"
        key = f"health:{name}"
        yield Found(key, tone, name, what, "", key, degrades=True)


def _lifecycle(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    if seen.get("state") == "draining":
        what = f"The service is draining, {say.several(seen.get('in_flight'), 'request')} in flight"
        yield Found(f"lifecycle:{name}", "warn", name, what, "", f"lifecycle:{name}")


def _service_levels(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    level = str(seen["level"])
    if level != "full":
        pinned = ", since somebody pinned it" if seen.get("pinned") is True else ""
        what = f"The level of service is {say.plainly(level)}{pinned}"
        tone: Tone = "bad" if level == "maintenance" else "warn"
        key = f"service_levels:{name}"
        yield Found(key, tone, name, what, "", key, degrades=True)


def _upstreams(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    hosts = mapping(seen["hosts"])
    out = [say.address(url) for url, one in hosts.items() if mapping(one).get("state") != "serving"]
    if out:
        what = f"Out of service are {len(out)} of {say.several(len(hosts), 'host')}: {listed(out)}"
        tone: Tone = "bad" if len(out) > limits.UNHEALTHY_HOSTS * len(hosts) else "warn"
        yield Found(f"upstreams:{name}", tone, name, what, "", f"upstreams:{name}")


def _watchdog(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    lag = number(seen.get("lag"))
    if lag > limits.LOOP_LAG_SECONDS:
        what = f"The event loop is {say.seconds(lag)} late, and so are all its requests"
        advice = "Move what blocks it to an executor: LoopBlocked tells where it stands"
        yield Found(f"watchdog:{name}", "bad", name, what, advice, f"watchdog:{name}")


def _request_limits(_kind: str, name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    for limit in mapping(seen.get("limits")):
        over = moves.lately(("request_limits", name, "limits", limit))
        if over:
            what = f"The limit {limit} refuses {say.rate(over / moves.span)}"
            yield Found(f"request_limits:{name}:{limit}", "warn", name, what)
    shared = mapping(seen.get("shared"))
    if shared.get("mode", "shared") != "shared":
        what = f"The limits go without their store: {say.plainly(str(shared['mode']))}"
        key = f"store_mode:{name}"
        advice = "See whether the store answers"
        began, cause = f"{key}:rate_limit", _lost_store(shared)
        yield Found(f"{key}:limits", "warn", name, what, advice, began, cause)


def _fifo(kind: str, name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    moves.rate((kind, name, "gaps"), seen["gaps"])
    gaps = moves.lately((kind, name, "gaps"))
    if gaps > limits.FIFO_GAPS:
        what = f"{say.several(gaps, 'message')} did not come for too long"
        yield Found(f"gaps:{name}", "warn", name, what, "Look at its sender")


def _members(_kind: str, name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    for state in MEMBER_WORDS:
        found = [
            one
            for one in members_of(seen)
            if one.get("state") == state and tone_of(one, seen) != "off"
        ]
        if len(found) > MOST_KEYS:
            yield _many_members(name, state, found, seen)
        else:
            yield from (_one_member(name, state, one) for one in found)
    score = seen.get("health_score")
    if number(score) >= limits.HEALTH_SCORE:
        what = f"This pod may be the slow one: health score {score_of(score)}"
        advice = "It gives others more time. Look at its CPU and its event loop"
        yield Found(f"member_health:{name}", "warn", name, what, advice)
    refused = moves.lately_rate(("members", name, "refused"))
    if refused:
        what = f"Messages of members are refused, {say.rate(refused)}"
        yield Found(f"member_messages:{name}", "warn", name, what, "Have all the same keys?")


def _one_member(name: str, state: str, member: Seen) -> Found:
    its_name = shown(member.get("name", ""), LONGEST_KEY)
    reason = f": {member['reason']}" if member.get("reason") else ""
    what = f"{its_name} is {MEMBER_WORDS[state]}{reason}"
    advice = {"suspected": "It may only be slow: it is cleared as soon as it answers"}
    lasted = number(member.get("seconds"))
    return _member_trouble(state, f"{name}:{its_name}", name, what, advice.get(state, ""), lasted)


def _many_members(name: str, state: str, found: list[Seen], seen: Seen) -> Found:
    names = listed([str(member.get("name", "")) for member in found])
    what = f"{len(found)} of {len(members_of(seen))} members are {MEMBER_WORDS[state]}: {names}"
    advice = "If it is most of them, look at the network of the pod that says so"
    lasted = max(number(member.get("seconds")) for member in found)
    return _member_trouble(state, name, name, what, advice, lasted)


def _member_trouble(
    state: str, key: str, group: str, what: str, advice: str, lasted: float
) -> Found:
    """Return a problem; another pod's confirmation explains a suspicion of this pod."""
    cause = f"confirmed:{key}" if state == "suspected" else ""
    return Found(
        f"{state}:{key}", MEMBER_TONES[state], group, what, advice, cause=cause, lasted=lasted
    )


def _pipeline(_kind: str, name: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    if seen.get("running") is not True:
        return
    for source in seen_list(seen, "sources"):
        its_name = str(source.get("name", ""))
        if source.get("error"):
            what = f"Source {shown(its_name, LONGEST_KEY)} cannot be read: {source['error']}"
            advice = "Nothing comes from it until it can"
            yield Found(f"source:{name}:{its_name}", "bad", name, what, advice)
        yield from _missing(its_name, name, source)
    for stage in seen_list(seen, "stages"):
        yield from _stage(name, str(stage.get("name", "")), stage, moves)


def _missing(name: str, where: str, seen: Seen) -> Iterator[Found]:
    """Yield what is missing in a collecting source, in a pipeline or not."""
    missing = [one for one in readings_of(seen) if one["state"] != "ok"]
    if not missing:
        return
    short, cause = too_few(seen), ""
    if short is not None:
        have, needed = map(say.amount, short)
        cause = f"minimum:{name}"
        what = f"Too few sources have a value: {have}, and {needed} are needed"
        advice = "It goes on as its too_few= says until enough of them are back"
        lasted = min(one["seconds"] for one in missing)
        yield Found(cause, "bad", where, what, advice, degrades=True, lasted=lasted)
    if len(missing) > MOST_KEYS:
        names = listed([one["name"] for one in missing])
        what = f"{len(missing)} sources are missing: {names}"
        lasted = max(one["seconds"] for one in missing)
        yield _missing_trouble(name, "", where, what, cause, lasted)
        return
    for one in missing:
        its_name = shown(one["name"], LONGEST_KEY)
        told = "is missing, its last value stands in" if one["state"] == "stale" else "is missing"
        why = f": {one['cause']}" if one["cause"] else ""
        yield _missing_trouble(
            name, its_name, where, f"Source {its_name} {told}{why}", cause, one["seconds"]
        )


def _missing_trouble(
    name: str, source: str, where: str, what: str, cause: str, lasted: float
) -> Found:
    advice = "The others go on without it: it is asked again each time"
    return Found(
        f"missing:{name}:{source}",
        "warn",
        where,
        what,
        advice,
        cause=cause,
        degrades=True,
        lasted=lasted,
    )


def _stage(name: str, stage: str, seen: Seen, moves: Moves) -> Iterator[Found]:
    its_name = shown(stage, LONGEST_KEY)
    guard = seen.get("guard")
    cause = f"{GUARD_OF_STAGE}{guard}" if guard else ""
    tone = blocked_tone(name, seen, moves)
    if tone != "ok":
        waiting = say.several(seen.get("waiting"), "item waits", "items wait")
        what = f"Stage {its_name} waits, {waiting} before it: {blocked_by(seen)}"
        advice = "Look at what it calls: its items wait, none is lost"
        yield Found(f"waits:{name}:{stage}", tone, name, what, advice, cause=cause)
    share = failing_share(name, stage, moves)
    tone = failing_tone(share, seen)
    if tone != "ok":
        causes = [f"{why} ({times})" for why, times in causes_of(seen)]
        why = f": {listed(causes)}" if causes else ""
        do = "are degraded" if degrades_all(seen) else "fail"
        what = f"{say.share(share)} of the items {do} in stage {its_name}{why}"
        yield Found(
            f"errors:{name}:{stage}", tone, name, what, "Look at why they fail", cause=cause
        )
    age = number(seen.get("oldest"))
    if age > limits.QUEUE_AGE_SECONDS:
        waiting = f", {say.amount(seen.get('waiting'))} wait"
        what = f"An item has waited for {say.seconds(age)} for stage {its_name}{waiting}"
        advice = "Is it slow? Give it more workers, or batches"
        cause = f"waits:{name}:{stage}"
        yield Found(f"age:{name}:{stage}", "bad", name, what, advice, cause=cause)
    dead = moves.lately((PIPELINE, name, stage, "dead_letters"))
    if dead > limits.DEAD:
        what = f"Stage {its_name} sets items aside: {say.several(dead, 'dead letter')} just now"
        cause = f"errors:{name}:{stage}"
        yield Found(f"dead:{name}", "warn", name, what, _REPLAY, cause=cause)


def _dead_letters(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    dead = number(letters_of(seen).get("dead"))
    if dead > limits.DEAD:
        what = f"{say.several(dead, 'dead letter waits', 'dead letters wait')} for somebody"
        yield Found(f"dead:{name}", "warn", name, what, _REPLAY)


_REPLAY: Final = "Look at why they failed; replay them, or drop them"


GUARD_OF_STAGE: Final = "guard:"
"""Prefix of a cause that means any problem of the guard of that name."""


def with_guards(found: list[Found]) -> list[Found]:
    """Set the problems of their guards as causes of stages that wait or fail."""
    roots = {one.where: one.id for one in reversed(found) if not one.cause}
    return [
        one._replace(cause=roots.get(one.cause.removeprefix(GUARD_OF_STAGE), ""))
        if one.cause.startswith(GUARD_OF_STAGE)
        else one
        for one in found
    ]


def _collect(_kind: str, name: str, seen: Seen, _moves: Moves) -> Iterator[Found]:
    yield from _missing(name, name, seen)


RULES: Final[dict[str, Rule]] = {
    "guard": guard_rule,
    **dict.fromkeys(("queue", "channel", "outbox", "jobs", "later"), _waiting),
    "pool": _pool,
    "executor": _executor,
    "store": _store,
    "health": _health,
    "lifecycle": _lifecycle,
    "service_levels": _service_levels,
    "members": _members,
    PIPELINE: _pipeline,
    COLLECT: _collect,
    "dead_letters": _dead_letters,
    "upstreams": _upstreams,
    "watchdog": _watchdog,
    "request_limits": _request_limits,
    "fifo_receiver": _fifo,
}
"""The rules by kind."""
