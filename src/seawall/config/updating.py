"""Settings from TOML for guards and pools that are alive, by `policy.update`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from seawall import registry
from seawall.config.reading import Names, Table, read_arguments
from seawall.config.writing import argument_of, table_of


class SettingsUpdate(NamedTuple):
    """Changed settings of one policy or pool, and how to make and undo the change."""

    where: str
    update: Callable[..., None]
    changes: dict[str, Any]
    before: dict[str, Any]


def update_from_toml(text: str, *, names: Names | None = None) -> list[str]:
    """Update the live guards and pools that `text` names; return what was changed, in words.

    Policies are matched by their place, so a stack must have the policies that it has. Settings
    that `update` does not take raise, and then nothing is changed.
    """
    import tomllib

    tables = tomllib.loads(text)
    if not tables.get("guards") and not tables.get("pools"):
        raise ValueError("nothing to update: write [[guards.vendor.policies]] or [pools.database]")
    guards, pools = _tables(tables, "guards"), _tables(tables, "pools")
    planned = [*_guards(guards, names or {}), *_pools(pools)]
    done: list[SettingsUpdate] = []
    try:
        for one in planned:
            one.update(**one.changes)
            done.append(one)
    except Exception as error:
        error.add_note(f"in the settings of {one.where}; nothing was changed")
        for one in reversed(done):
            one.update(**one.before)
        raise
    return [f"{one.where}: {', '.join(one.changes)}" for one in done]


def _tables(given: Table, kind: str) -> dict[str, dict[str, Any]]:
    tables = given.get(kind, {})
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise TypeError(f"{kind} must be tables: [[guards.vendor.policies]] or [pools.database]")
    return tables


_ANEW: Final = "make it anew, by guards_from_toml(text, replace=True)"


def _guards(tables: Table, names: Names) -> Iterator[SettingsUpdate]:
    for name, table in tables.items():
        guard = registry.get_guard(name)
        written = table_of(guard)
        today, wanted = written["policies"], table.get("policies", [])
        if not isinstance(wanted, list) or not all(isinstance(one, dict) for one in wanted):
            raise TypeError(f"policies must be a list of tables: [[guards.{name}.policies]]")
        if [one["policy"] for one in today] != [one.get("policy") for one in wanted]:
            raise ValueError(f"guard {name!r} has other policies than the text: {_ANEW}")
        for key in table:
            if key != "policies" and table[key] != written.get(key):
                raise ValueError(f"guard {name!r}: {key} is fixed while it lives: {_ANEW}")
        for policy, old, new in zip(guard.policies, today, wanted, strict=True):
            where = f"guard {name!r}, {policy.kind}"
            changed = [key for key in new if new[key] != old.get(key)]
            gone = sorted(set(old) - set(new))
            if gone:
                raise ValueError(f"{where}: the text has no {gone[0]}; write it too")
            if changed:
                read = read_arguments({key: new[key] for key in changed}, names)
                before = {key: argument_of(policy, key) for key in changed}
                yield SettingsUpdate(where, policy.update, read, before)


def _pools(tables: Table) -> Iterator[SettingsUpdate]:
    pools = {entry.name: thing for thing, entry in registry.entered() if entry.kind == "pool"}
    for name, table in tables.items():
        if name not in pools:
            raise KeyError(f"no live pool is named {name!r}")
        before = vars(pools[name].settings)
        changed = {key: value for key, value in table.items() if before.get(key) != value}
        if changed:
            undo = {key: before.get(key) for key in changed}
            yield SettingsUpdate(f"pool {name!r}", pools[name].update, changed, undo)
