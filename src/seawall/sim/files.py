"""Worlds from files: Python functions and TOML tables.

A Python file has functions with one parameter, `world`; each is a world of its own:

    def before(world): ...
    def after(world): ...

A TOML file is one world, with the tables `services`, `guards`, `clients`, `users`, `networks`,
`stores` and `changes`; `docs/operate/simulate.md` has an example. `rate` may be a list of points,
`[[0, 40], [30, 80]]`. In a change, `what` is a method of what `of` names, and further keys are its
arguments. Stores can be named in `shared` of a guard's policies.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from inspect import isfunction, signature
from pathlib import Path
from runpy import run_path
from typing import Any, Final

from seawall.config import guards_from_toml
from seawall.sim.clients import ramp
from seawall.sim.latency import Latency
from seawall.sim.world import Build, World

Table = Mapping[str, Any]

TABLES: Final = (
    "changes",
    "clients",
    "guards",
    "networks",
    "seconds",
    "services",
    "stores",
    "users",
)


def worlds_of(target: str) -> dict[str, Build]:
    """Return the worlds of a file by name; `worlds.py:after` is only that one."""
    name, _, only = target.partition(":")
    path = Path(name)
    if path.suffix not in (".py", ".toml") or not path.is_file():
        raise ValueError(f"{target!r}: write a scenario's name, or a .py or .toml file that exists")
    if path.suffix == ".toml":
        return {path.stem: partial(fill_from_toml, path.read_text("utf-8"))}
    found: dict[str, Build] = {
        key: partial(_fill_from_python, str(path), key)
        for key, value in run_path(str(path)).items()
        if isfunction(value) and list(signature(value).parameters) == ["world"]
    }
    if only:
        found = {key: build for key, build in found.items() if key == only}
    if not found:
        raise ValueError(f"{target!r} has no such function: write `def {only or 'outage'}(world):`")
    return found


def _fill_from_python(path: str, function: str, world: World) -> None:
    """Fill a world by a function of a file, which can be sent to other processes."""
    run_path(path)[function](world)


def fill_from_toml(text: str, world: World) -> None:  # noqa: C901 - one loop for each section
    """Fill a world from TOML text."""
    tables = tomllib.loads(text)
    unknown = sorted(set(tables) - set(TABLES))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no part of a world: write {', '.join(TABLES)}")
    world.seconds = float(tables.get("seconds", world.seconds))
    things: dict[str, Any] = {}
    makers: dict[str, Callable[..., Any]] = {"networks": world.network, "stores": world.store}
    for kind, add in makers.items():
        for name, table in tables.get(kind, {}).items():
            things[name] = _call(f"{kind}.{name}", add, name, _values(table))
    guards = guards_from_toml(text, names=things) if "guards" in tables else {}
    for name, table in tables.get("services", {}).items():
        values = _values(table)
        for key, known in (("network", things), ("guard", guards)):
            if key in values:
                values[key] = _known(known, values[key], f"services.{name}.{key}")
        things[name] = _call(f"services.{name}", world.service, name, values)
    callers: dict[str, Callable[..., Any]] = {"clients": world.clients, "users": world.users}
    for kind, add in callers.items():
        for name, table in tables.get(kind, {}).items():
            values = _values(table)
            call = _known(things, values.pop("calls", None), f"{kind}.{name}.calls").acall
            if "guard" in values:
                call = _known(guards, values.pop("guard"), f"{kind}.{name}.guard")(call)
            things[name] = _call(f"{kind}.{name}", add, name, {"call": call, **values})
    for change in tables.get("changes", []):
        _change(world, things, dict(change))


def _change(world: World, things: dict[str, Any], table: dict[str, Any]) -> None:
    at, lasts = table.pop("at", None), table.pop("lasts", None)
    name, what = table.pop("of", None), table.pop("what", None)
    thing = _known(things, name, "changes.of")
    method = None if not isinstance(what, str) or what[:1] == "_" else getattr(thing, what, None)
    if method is None or at is None:
        raise ValueError(f"changes: write at = 30, of = {name!r} and what = 'down' or the like")
    world.at(at, _call(f"changes: {name} {what}", method, None, table), lasts=lasts)


def _known(known: Mapping[str, Any], name: object, where: str) -> Any:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{where} = {name!r}: write one of {', '.join(known) or 'none there is'}")
    return known[name]


def _call(where: str, function: Any, name: str | None, values: dict[str, Any]) -> Any:
    try:
        return function(**values) if name is None else function(name, **values)
    except TypeError as error:
        allowed = ", ".join(key for key in signature(function).parameters if key != "name")
        raise ValueError(f"{where}: {error}; it takes {allowed}") from error


def _values(table: Table) -> dict[str, Any]:
    """Return a table's values with latencies and rates as objects."""
    values = dict(table)
    for key in ("latency", "delay", "think", "return_after"):
        if isinstance(values.get(key), dict):
            values[key] = _latency(values[key])
    if isinstance(values.get("rate"), list):
        values["rate"] = ramp(*map(tuple, values["rate"]))
    return values


def _latency(table: Table) -> Latency:
    makers: dict[str, Callable[..., Latency]] = {
        "constant": Latency.constant,
        "exponential": Latency.exponential,
        "lognormal": Latency.lognormal,
        "measured": Latency.measured,
        "normal": Latency.normal,
    }
    if len(table) != 1 or next(iter(table)) not in makers:
        raise ValueError(f"latency = {dict(table)!r}: write one of {', '.join(makers)}")
    kind, given = next(iter(table.items()))
    return makers[kind](**given) if isinstance(given, dict) else makers[kind](given)
