"""Guards from TOML tables."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from typing import Any, Final

from seawall import errors, registry
from seawall.guard import Guard
from seawall.models.backoff import (
    constant,
    decorrelated_jitter,
    exponential,
    full_jitter,
    linear,
    plus_minus,
)
from seawall.models.breaker.probes import growing, n_of_m, ramp, single_probe, slow_start
from seawall.models.budget import InFlightRatio, RequestRatio, SuccessDeposit
from seawall.models.concurrency.algorithms import aimd, gradient2, vegas
from seawall.models.shedding.codel import adaptive_lifo, codel
from seawall.models.shedding.rules import (
    by_chance,
    by_cost,
    by_criticality,
    by_deadline,
    by_fraction,
    by_latency,
    by_queue,
    by_tier,
)
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.breaker import Breaker
from seawall.policies.bulkhead import Bulkhead, ThreadBulkhead
from seawall.policies.cache import Cache
from seawall.policies.chaos import Chaos
from seawall.policies.fallback import Fallback, static
from seawall.policies.hedge import Hedge, quantile
from seawall.policies.rate_limit import Limit, RateLimit
from seawall.policies.retry import Retry, RetryBudget, adaptive_attempts
from seawall.policies.shed import Shed
from seawall.policies.throttle import Throttle
from seawall.policies.timeout import Timeout, adaptive_timeout
from seawall.runtime.policy import Policy

Names = Mapping[str, Any]
Table = Mapping[str, Any]

KINDS: Final[dict[str, Callable[..., Policy]]] = {
    kind.kind: kind
    for kind in (
        AdaptiveLimit,
        Breaker,
        Bulkhead,
        Cache,
        Chaos,
        Fallback,
        Hedge,
        RateLimit,
        Retry,
        Shed,
        ThreadBulkhead,
        Throttle,
        Timeout,
    )
}
POSITIONAL: Final = {
    "bulkhead": "limit",
    "cache": "ttl",
    "chaos": "share",
    "hedge": "delay",
    "thread_bulkhead": "workers",
    "timeout": "seconds",
}
LISTS: Final = {"fallback": "levels", "rate_limit": "limits", "shed": "rules"}
"""The argument whose items are passed positionally."""

_LISTED: Final = (*LISTS.values(), "fallback")
_FUNCTIONS: Final = (
    "dispose",
    "key",
    "load",
    "of",
    "partition",
    "probe",
    "retry_after",
    "settle",
    "shared",
    "tier",
    "when",
)
"""Arguments that are functions (or a store), and so are passed by name in `names`."""


def _by_name(*builders: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {builder.__name__: builder for builder in builders}


BUILDERS: Final[dict[str, dict[str, Callable[..., Any]]]] = {
    "attempts": {"adaptive": adaptive_attempts},
    "backoff": _by_name(constant, decorrelated_jitter, exponential, full_jitter, linear),
    "break_for": _by_name(growing),
    "budget": {
        "in_flight_ratio": InFlightRatio,
        "request_ratio": RequestRatio,
        "success_deposit": SuccessDeposit,
    },
    "delay": _by_name(quantile),
    "limit": _by_name(aimd, gradient2, vegas),
    "probes": {"single": single_probe, **_by_name(n_of_m, ramp, slow_start)},
    "rules": _by_name(
        by_chance, by_cost, by_criticality, by_deadline, by_fraction, by_latency, by_queue, by_tier
    ),
    "seconds": {"adaptive": adaptive_timeout},
    "shed": _by_name(adaptive_lifo, codel),
}
"""Functions that make the value of a setting, by the `kind` in its table."""


def guards_from_toml(
    text: str, *, names: Names | None = None, replace: bool = False
) -> dict[str, Guard]:
    """Make all guards of a TOML text, by name; if one cannot be made, make none.

    `replace=True` closes live guards of these names: all of them, or none if one fails.
    """
    import tomllib

    tables = tomllib.loads(text).get("guards", {})
    if not isinstance(tables, dict) or not tables:
        raise ValueError("no guards: write tables such as [guards.vendor.standard]")
    made: dict[str, Guard] = {}
    before = [guard for guard in registry.guards() if guard.name in tables]
    try:
        for name, table in tables.items():
            made[name] = guard_from_table(name, table, names=names, replace=replace)
    except BaseException:
        for guard in made.values():
            guard.close()
        for guard in before:
            if guard.closed:
                registry.restore(guard)
        raise
    return made


def guard_from_table(
    name: str, table: Table, *, names: Names | None = None, replace: bool = False
) -> Guard:
    """Make the guard that `table` describes; `replace=True` replaces a guard of that name."""
    try:
        return _guard(name, table, names or {}, replace=replace)
    except Exception as error:
        error.add_note(f"in the settings of guard {name!r}")
        raise


def _guard(name: str, table: Table, names: Names, *, replace: bool) -> Guard:
    if not isinstance(table, Mapping):
        raise TypeError(f"[guards.{name}] must be a table, not {table!r}")
    unknown = set(table) - {"idempotent", "max_wait", "policies", "standard", "unwritten"}
    if unknown:
        raise ValueError(
            f"unknown {sorted(unknown)}: there are policies, standard, max_wait, idempotent"
        )
    if "unwritten" in table:
        raise ValueError(
            f"TOML cannot hold these settings: {table['unwritten']}: make this guard in code, or"
            " delete the line 'unwritten' to do without them"
        )
    if ("policies" in table) == ("standard" in table):
        raise ValueError("write either 'standard' or a list of 'policies'")
    given = {"idempotent": table.get("idempotent", True), "replace": replace}
    if "max_wait" in table:
        given["max_wait"] = table["max_wait"]
    if "standard" in table:
        if not isinstance(table["standard"], Mapping):
            raise TypeError(f"standard must be a table: [guards.{name}.standard]")
        return Guard.standard(name, **given, **read_arguments(table["standard"], names))
    if not isinstance(table["policies"], list):
        raise TypeError(f"policies must be a list of tables: [[guards.{name}.policies]]")
    policies = [_policy(entry, names) for entry in table["policies"]]
    return Guard(name, *policies, **given)


def _policy(entry: Table, names: Names) -> Policy:
    kind = entry.get("policy") if isinstance(entry, Mapping) else None
    if kind not in KINDS:
        raise ValueError(f"policy={kind!r}: write one of {', '.join(sorted(KINDS))}")
    arguments = read_arguments({key: entry[key] for key in entry if key != "policy"}, names)
    if kind in LISTS:
        return KINDS[kind](*arguments.pop(LISTS[kind], ()), **arguments)
    if kind in POSITIONAL:
        first = POSITIONAL[kind]
        if first not in arguments:
            raise TypeError(f"policy={kind!r} needs {first} = ...")
        return KINDS[kind](arguments.pop(first), **arguments)
    return KINDS[kind](**arguments)


def read_arguments(table: Table, names: Names) -> dict[str, Any]:
    """Return the arguments that a policy's table stands for."""
    return {key: _argument(key, value, names) for key, value in table.items()}


def _argument(key: str, value: Any, names: Names) -> Any:
    if key in ("is_drop", "is_failure", "on"):
        return _error_rule(key, value, names)
    if key in _FUNCTIONS or (key == "cost" and isinstance(value, str)):
        return _given(key, value, names)
    if key in _LISTED:
        return tuple(_listed_item(key, item, names) for item in _listed(key, value))
    if key == "error":
        return _exception(value, names)
    if key == "budget" and isinstance(value, bool):
        return RetryBudget() if value else None
    return _build(key, value) if key in BUILDERS and isinstance(value, Mapping) else value


def _listed(key: str, value: Any) -> list[Any]:
    if isinstance(value, str | Mapping):
        return [value]
    if not isinstance(value, list):
        what = {"limits": "a rate", "rules": "a rule"}
        what |= dict.fromkeys(("fallback", "levels"), "the name of a function")
        wanted = what.get(key, "the name of an exception")
        raise TypeError(f"{key}={value!r}: write {wanted}, or a list of such")
    return value


def _listed_item(key: str, item: Any, names: Names) -> Any:
    """Return one item of a list: a string is a rate or a name, a table is what it describes."""
    if key in ("levels", "fallback"):
        is_static = isinstance(item, Mapping) and "static" in item
        return static(item["static"]) if is_static else _given(key, item, names)
    if not isinstance(item, Mapping):
        return item
    arguments = read_arguments(item, names)
    if key == "rules":
        return _build(key, arguments)
    if "rate" not in arguments:
        raise TypeError('a limit needs rate = "60/s", or the like')
    return Limit(arguments.pop("rate"), **arguments)


def _build(key: str, value: Table) -> Any:
    builders = BUILDERS[key]
    kind = value.get("kind")
    if kind not in builders:
        raise ValueError(f"{key}: kind={kind!r}: write one of {', '.join(sorted(builders))}")
    arguments = {name: value[name] for name in value if name != "kind"}
    jitter = arguments.get("jitter")
    if isinstance(jitter, Mapping) and set(jitter) == {"plus_minus"}:
        arguments["jitter"] = plus_minus(jitter["plus_minus"])
    built = builders[kind](**arguments)
    return RetryBudget(built) if key == "budget" else built


def _exception(name: Any, names: Names, key: str = "on") -> Any:
    if not isinstance(name, str):
        raise TypeError(f"{key}={name!r}: write the name of an exception, or a list of such names")
    if name in names:
        return names[name]
    known = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        return known
    raise ValueError(
        f"{key}={name!r}: no such exception of Python's or Seawall's; hand it over as"
        f" names={{{str(name)!r}: ...}}"
    )


def _error_rule(key: str, value: Any, names: Names) -> Any:
    """Return the function given under that name, or the named exception types."""
    if isinstance(value, str) and value in names:
        return names[value]
    return tuple(_exception(item, names, key) for item in _listed(key, value))


def _given(key: str, name: Any, names: Names) -> Any:
    if not isinstance(name, str) or name not in names:
        what = "store" if key == "shared" else "function"
        raise ValueError(f"{key}={name!r}: hand the {what} over as names={{{str(name)!r}: ...}}")
    return names[name]
