"""Short descriptions of a policy's settings, and the settings that an operator may change.

Only known fields are read, and users' functions and values are only checked for presence: a `repr`
may contain a password. Unreadable settings are omitted, and nothing raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any, Final, NamedTuple

from seawall.dashboard.bounds import HUGE, LONGEST_TEXT, LONGEST_WORD, MOST_CHANGES, shown
from seawall.dashboard.views import SettingChange
from seawall.dashboard.wording import amount, seconds, several, share


class PolicySettings(NamedTuple):
    """The shown settings of a policy."""

    title: str
    words: str
    changes: list[SettingChange]


def settings_of(kind: str, policy: Any) -> PolicySettings:
    """Return the settings of `policy`, whose kind is given by the guard's snapshot."""
    title = kind.replace("_", " ").title().replace(" ", "") if policy is None else _title(policy)
    words, changes = "", list[SettingChange]()
    if policy is not None:
        describe, names = _KNOWN.get(kind, (lambda _policy: "", ""))
        words = _read(describe, policy, "")
        changes = _read(lambda one: list(_changes(one, kind, names.split())), policy, [])
    title = shown(title or "Policy", LONGEST_WORD)
    return PolicySettings(title, shown(words, LONGEST_TEXT), changes[:MOST_CHANGES])


def _title(policy: Any) -> str:
    return str(getattr(type(policy), "__name__", ""))


def _read(read: Callable[[Any], Any], policy: Any, default: Any) -> Any:
    try:
        return read(policy)
    except Exception:  # noqa: BLE001 - a subclass may lack anything, and raise anything
        return default


def _breaker(policy: Any) -> str:
    settings = policy.settings
    rules = []
    over = "" if settings.window is None else f" in {seconds(settings.window)}"
    if settings.window_calls is not None:
        over = f" of the last {amount(settings.window_calls)}"
    if settings.consecutive is not None:
        rules.append(f"{several(settings.consecutive, 'failure')} in a row")
    if settings.failure_ratio is not None:
        calls = several(settings.min_calls, "call")
        rules.append(f"{share(settings.failure_ratio)} of {calls}{over}")
    if settings.slow_ratio is not None:
        rules.append(f"{share(settings.slow_ratio)} slower than {seconds(settings.slow_after)}")
    fixed = not callable(settings.break_for)
    pause = f"for {seconds(settings.break_for)}" if fixed else "longer each time"
    keyed = "" if policy.key is None else ", by key"
    return f"opens at {' or '.join(rules)}, {pause}{keyed}"


def _retry(policy: Any) -> str:
    most = several(policy.most_attempts, "attempt")
    adaptive = "" if isinstance(policy.attempts, int) else "up to "
    parts = [adaptive + most]
    base = _first_pause(policy.backoff)
    if base is not None:
        parts.append(f"backoff from {seconds(base)}" if base else "no pause")
    rule = getattr(policy.budget, "rule", None)
    if rule is not None:
        ratio = getattr(rule, "ratio", None)
        parts.append("budget" if ratio is None else f"budget {share(ratio)}")
    return ", ".join(parts)


def _first_pause(backoff: Any) -> float | None:
    # Not by calling it: the function may be a user's.
    arguments = getattr(backoff, "_arguments", ())
    first = arguments[0] if arguments else None
    known = isinstance(first, (int, float)) and not isinstance(first, bool)
    return float(first) if known and first is not None else None


def _timeout(policy: Any) -> str:
    limit = policy.seconds
    thread = ", in a thread" if policy.sync == "thread" else ""
    if isinstance(limit, (int, float)):
        return seconds(limit) + thread
    return f"from {seconds(limit.floor)} to {seconds(limit.cap)}, by what calls take{thread}"


def _waits(policy: Any) -> str:
    wait = policy.max_wait
    return f", waits up to {seconds(wait)}" if wait else ", nobody waits"


def _adaptive_limit(policy: Any) -> str:
    model = policy.model
    bounds = f"{amount(model.minimum)} to {amount(model.maximum)} at once"
    return f"{bounds}, as {model.name} learns{_waits(policy)}"


def _rate_limit(policy: Any) -> str:
    parts = []
    for limit in policy.limits:
        burst = "" if limit.burst is None else f", burst {amount(limit.burst)}"
        keyed = "" if limit.key is None else " for each key"
        parts.append(f"{limit.text}{keyed}{burst}")
    waits = _waits(policy) if policy.max_wait else ""
    return "; ".join(parts) + waits


def _cache(policy: Any) -> str:
    stale = policy.stale_if_error
    more = f", {seconds(stale)} more if the call fails" if stale else ""
    return f"for {seconds(policy.ttl)}{more}"


def level_name(name: Any) -> str:
    """Return the name of a fallback's level, without the value that it returns."""
    bare = str(name).partition("(")[0].rpartition("<locals>.")[2].strip()
    return shown(bare or "a level", LONGEST_WORD)


def _hedge(policy: Any) -> str:
    delay = policy.delay
    known = isinstance(delay, (int, float))
    after = seconds(delay) if known else "what calls usually take"
    return f"a second call after {after}, for at most {share(policy.cap)}"


def _throttle(policy: Any) -> str:
    k = f"{policy.k:g} times" if isinstance(policy.k, float) else "somewhat more than"
    return f"sends {k} what was accepted in {seconds(policy.window)}"


_GATE: Final = "max_wait max_waiting mode"

_KNOWN: Final[dict[str, tuple[Callable[[Any], str], str]]] = {
    "breaker": (
        _breaker,
        (
            "failure_ratio window window_calls min_calls consecutive slow_after slow_ratio"
            " break_for probe_timeout mode"
        ),
    ),
    "retry": (_retry, "attempts max_retry_after"),
    "timeout": (_timeout, "seconds"),
    "bulkhead": (lambda one: f"{amount(one.limit)} at once{_waits(one)}", f"limit {_GATE}"),
    "adaptive_limit": (_adaptive_limit, f"minimum maximum {_GATE}"),
    "rate_limit": (_rate_limit, _GATE),
    "shed": (lambda one: "by " + ", ".join(rule.name for rule in one.rules), "mode"),
    "cache": (_cache, "ttl stale_if_error max_entries"),
    "fallback": (lambda one: ", then ".join(map(level_name, one.names)), ""),
    "hedge": (_hedge, "delay most cap burst"),
    "throttle": (_throttle, "k window mode"),
    "thread_bulkhead": (
        lambda one: f"{several(one.pool.size, 'thread')}, {amount(one.pool.queue)} may wait",
        "",
    ),
    "loop_admission": (
        lambda one: f"turns of {seconds(one.slice)}, waits of {seconds(one.target)}",
        "slice target cheap patience mode",
    ),
    "chaos": (lambda one: f"disturbs {share(one.share)} of calls", ""),
    "service_levels": (lambda one: f"needs the level {one.level.label}", "mode"),
}
"""The description of each kind's settings, and which of them `update` takes."""


def _changes(policy: Any, kind: str, names: list[str]) -> Iterator[SettingChange]:
    if kind == "rate_limit":
        yield from _rates(policy)
    for name in names:
        holder = policy
        if kind == "breaker" and name != "mode":
            holder = policy.settings
        elif name in {"minimum", "maximum"}:
            holder = policy.model
        yield from _change(name, getattr(holder, name, None))


def _rates(policy: Any) -> Iterator[SettingChange]:
    given: Any = getattr(policy, "_given", ())
    if _title(policy) == "TokenLimits":
        for limit in policy.limits:  # by name: each is a separate argument
            yield from _change(limit.name, limit.text)
    elif len(given) == 1 and isinstance(given[0], str):
        # Several limits, or limits with functions, cannot be typed as text.
        yield from _change("limits", given[0])


def _change(name: str, value: Any) -> Iterator[SettingChange]:
    if isinstance(value, str) and len(value) <= LONGEST_WORD:
        yield SettingChange(
            name=shown(name, LONGEST_WORD), value=shown(value, LONGEST_WORD), kind="text"
        )
    elif type(value) in {int, float} and isfinite(value) and abs(value) <= HUGE:
        yield SettingChange(name=shown(name, LONGEST_WORD), value=value, kind="number")
