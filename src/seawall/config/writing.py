"""The settings of live guards, as the tables that `guards_from_toml` reads.

Promises:
- A guard that is made from what was written behaves like the one that was read.
- Functions, stores and exception types are written by their name, to be passed in `names`. No value
  of the user's own is written, such as that of a static fallback: it may be a secret.
- What cannot be written is named under `unwritten`, and `guards_from_toml` refuses such a table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from inspect import Parameter, signature
from math import isinf
from typing import Any, Final

from seawall import _checks as check
from seawall.config.reading import BUILDERS, KINDS, LISTS, Table
from seawall.errors import ErrorTypes
from seawall.guard import Guard
from seawall.models.backoff import Backoff, PlusMinus
from seawall.models.breaker.probes import Growing, NOfM, Ramp, SlowStart
from seawall.models.budget import InFlightRatio, RequestRatio, SuccessDeposit
from seawall.models.concurrency.limit import ConcurrencyLimit
from seawall.models.shedding.codel import AdaptiveLifo, Codel
from seawall.policies.breaker.policy import NeverRaising
from seawall.policies.hedge.policy import QuantileDelay
from seawall.policies.rate_limit import Limit
from seawall.policies.rate_limit.limit import USUAL
from seawall.policies.retry import RetryBudget
from seawall.policies.retry.policy import AdaptiveAttempts, own_retry_after
from seawall.policies.throttle import REFUSALS
from seawall.policies.timeout.policy import AdaptiveSeconds
from seawall.runtime.policy import Policy

_KINDS_OF: Final[dict[type, str]] = {
    AdaptiveAttempts: "adaptive",
    AdaptiveLifo: "adaptive_lifo",
    AdaptiveSeconds: "adaptive",
    Codel: "codel",
    Growing: "growing",
    InFlightRatio: "in_flight_ratio",
    NOfM: "n_of_m",
    QuantileDelay: "quantile",
    Ramp: "ramp",
    RequestRatio: "request_ratio",
    SlowStart: "slow_start",
    SuccessDeposit: "success_deposit",
}
"""The `kind` of an object in its table."""

_ELSEWHERE: Final = {
    ("adaptive_limit", "limit"): "model",
    ("adaptive_limit", "max_waiting"): "slots.room",
    ("adaptive_limit", "order"): "slots.queue.order",
    ("adaptive_limit", "partitions"): "partitions.shares",
    ("adaptive_limit", "window"): "windows.shortest",
    ("bulkhead", "max_waiting"): "slots.room",
    ("bulkhead", "order"): "slots.queue.order",
    ("fallback", "levels"): "names",
    ("hedge", "workers"): "pool.size",
    ("rate_limit", "limits"): "_given",
    ("thread_bulkhead", "max_queue"): "pool.queue",
    ("thread_bulkhead", "workers"): "pool.size",
    ("throttle", "probe_every"): "_model.probe_every",
    ("timeout", "max_threads"): "pool.size",
}
"""Where a policy keeps an argument, if not under its own name."""

_UNWRITTEN: Final = frozenset({"chaos", "shed"})
"""Policies that are made of functions and values of the user's own."""

_PLAIN: Final = (bool, int, float, str, list, tuple)
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


class Unwritable(Exception):
    """A setting that has no form in TOML."""


def guards_to_toml(guards: Iterable[Guard] | Mapping[str, Table]) -> str:
    """Return live guards, or their tables by name, as TOML that `guards_from_toml` reads."""
    if not isinstance(guards, Mapping):
        listed = check.listed("guards", guards, "seawall.guards()")
        if not all(isinstance(one, Guard) for one in listed):
            raise TypeError(f"guards={guards!r}: write guards, such as seawall.guards()")
        guards = {one.name: table_of(one) for one in listed}
    return "\n".join(line for name, table in guards.items() for line in _lines(name, table))


def table_of(guard: Guard) -> dict[str, Any]:
    """Return the settings of `guard`; what cannot be written is listed under "unwritten"."""
    table: dict[str, Any] = {"idempotent": guard.idempotent}
    if guard.max_wait is not None:
        table["max_wait"] = guard.max_wait
    unwritten: list[str] = []
    table["policies"] = [_policy(policy, unwritten) for policy in guard.policies]
    return {**table, "unwritten": unwritten} if unwritten else table


def _policy(policy: Policy, unwritten: list[str]) -> dict[str, Any]:
    table: dict[str, Any] = {"policy": policy.kind}
    if type(policy) is not KINDS.get(policy.kind) or policy.kind in _UNWRITTEN:
        unwritten.append(policy.kind)
        return table
    for parameter in signature(KINDS[policy.kind]).parameters.values():
        try:
            value = _written(policy.kind, parameter.name, argument_of(policy, parameter.name))
        except Unwritable:
            unwritten.append(f"{policy.kind}: {parameter.name}")
            continue
        if value is None or (
            value == parameter.default and parameter.default is not Parameter.empty
        ):
            continue
        table[parameter.name] = value
    return table


def argument_of(policy: Any, name: str) -> Any:
    """Return an argument of a policy, from wherever it keeps it; None if it has none."""
    kind = policy.kind
    if kind == "breaker" and hasattr(policy.settings, name):
        value = getattr(policy.settings, name)
        return value.function if isinstance(value, NeverRaising) else value
    if name == "on" and kind in ("retry", "throttle"):
        return (*policy._types, *policy._predicates)  # noqa: SLF001 - no public name for both
    if kind == "rate_limit" and name in USUAL:
        return policy._options[name]  # noqa: SLF001 - as above
    value = policy
    for part in _ELSEWHERE.get((kind, name), name).split("."):
        value = getattr(value, part, None)
    return value


def _written(kind: str, name: str, value: Any) -> Any:
    """Return a value as TOML data; None if it is the default."""
    if value is own_retry_after or (kind == "throttle" and value == REFUSALS):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if name == "on" or isinstance(value, ErrorTypes):
        types = value.types if isinstance(value, ErrorTypes) else value
        return [getattr(one, "__name__", type(one).__name__) for one in types]
    if name == LISTS.get(kind):
        return [_item(name, item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _written(kind, "", one) for key, one in value.items()}
    return _built(name, value)


def _item(name: str, item: Any) -> Any:
    """Return a level of a fallback, or a limit of a rate limit."""
    if name == "levels":
        return str(item).partition("(")[0].rpartition("<locals>.")[2]
    if isinstance(item, Limit):
        usual = {**USUAL, "name": item.text}
        given = {key: _written("", key, getattr(item, key)) for key in usual}
        changed = {key: value for key, value in given.items() if value != usual[key]}
        return {"rate": item.text, **changed}
    return item


def _built(name: str, value: Any) -> Any:
    """Return the table of an object that one of the builders makes, or a function's name."""
    if isinstance(value, RetryBudget):
        rule = _built("budget", value.rule)
        return True if rule == {"kind": "success_deposit"} else rule
    if isinstance(value, Backoff):
        return _backoff(value)
    if isinstance(value, ConcurrencyLimit):
        return _table(name, value.name, value.settings())
    kind = _KINDS_OF.get(type(value))
    if kind is not None and name in BUILDERS:
        parameters = signature(BUILDERS[name][kind]).parameters
        if isinstance(value, AdaptiveAttempts) and value.load is not None:
            raise Unwritable(name)
        known = {key: getattr(value, key) for key in parameters if hasattr(value, key)}
        plain = {key: one for key, one in known.items() if isinstance(one, _PLAIN)}
        return _table(name, kind, plain)
    if callable(value) and name not in BUILDERS:
        return str(getattr(value, "__name__", type(value).__name__))
    if name == "shared":
        return str(getattr(value, "name", "store"))
    raise Unwritable(name)


def _backoff(backoff: Backoff) -> Any:
    name, arguments, settings = backoff.described()
    if name == "exponential" and settings == {"cap": 30.0, "factor": 2.0, "jitter": "full"}:
        return arguments[0]
    if name not in BUILDERS["backoff"]:
        if isinstance(arguments[0], tuple):
            return list(arguments[0])  # delays
        raise Unwritable("backoff")
    positional = list(signature(BUILDERS["backoff"][name]).parameters)
    jitter = settings.get("jitter")
    if isinstance(jitter, PlusMinus):
        settings["jitter"] = {"plus_minus": jitter.share}
    return _table("backoff", name, {**dict(zip(positional, arguments, strict=False)), **settings})


def _table(name: str, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of an object, without the arguments that are the builder's defaults."""
    parameters = signature(BUILDERS[name][kind]).parameters
    changed = {key: value for key, value in given.items() if value != parameters[key].default}
    return {"kind": kind, **changed}


# Text


def _lines(name: str, table: Table) -> list[str]:
    key = f"guards.{_key(name)}"
    lines = [f"[{key}]"]
    lines += [
        f"{_key(one)} = {to_toml(value)}"
        for one, value in table.items()
        if one not in ("policies", "standard")
    ]
    if "standard" in table:
        lines += ["", f"[{key}.standard]", *_settings(table["standard"])]
    for policy in table.get("policies", ()):
        lines += ["", f"[[{key}.policies]]", *_settings(policy)]
    return [*lines, ""]


def _settings(table: Table) -> list[str]:
    return [f"{_key(name)} = {to_toml(value)}" for name, value in table.items()]


def to_toml(value: Any) -> str:
    """Return a value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return ("inf" if value > 0 else "-inf") if isinf(value) else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {to_toml(one)}" for key, one in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else to_toml(name)
