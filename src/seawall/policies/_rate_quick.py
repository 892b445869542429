"""Several buckets taken together in a hurry, each by its own key: for the edge of a service.

What `_rate_gates` does for one bucket with keys, or for several without, for any of both. The
function is assembled from fixed lines, numbered by limit; no name, setting or other data of the
user becomes part of the text. For a bucket with keys and one without it reads:

    def taken(us, call):
        key_0 = read_0(call)
        try:
            tat_0 = states_0[key_0]
        except KeyError:
            return None
        tat_1 = meter_1.tat
        if tat_0 < us:
            tat_0 = us
        tat_0 += meter_0.step
        if tat_1 < us:
            tat_1 = us
        tat_1 += meter_1.step
        if tat_0 - us <= meter_0.slack and tat_1 - us <= meter_1.slack:
            states_0[key_0] = tat_0
            meter_1.tat = tat_1
            return (key_0,), (tat_0, tat_1)
        return None
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seawall.policies._rate_meters import Meter
from seawall.runtime.gil import LOCK_FREE

Taken = tuple[tuple[str, ...], tuple[float, ...]]
"""The keys of the buckets that have some, and the states of all."""
Quick = Callable[[float, Any], Taken | None]
Reader = Callable[[Any], str | None]
"""What tells the key of a call, as text; None, which no bucket has, is left to the slow way."""


def quick_taking(meters: Sequence[Meter], readers: Sequence[Reader]) -> Quick | None:
    """Return what takes from all of these or from none; None if they are not fit for it.

    `readers` are for those meters that have keys, in their order. It is asked with an instant in
    whole microseconds and the call, and returns the keys and the states, or None where it has to be
    asked slowly. From the first look to the last writing there is no call and no loop, so nothing
    can interrupt it: see `seawall.runtime.gil`. Whoever holds the lock has shut this way, by a
    slack that nothing fits.
    """
    if not LOCK_FREE or not meters or not all(meter.plain for meter in meters):
        return None
    names: dict[str, Any] = {"KeyError": KeyError, "__builtins__": {}}
    read, find, alone, add, take = [], [], [], [], []
    keyed = iter(readers)
    for n, meter in enumerate(meters):
        names[f"meter_{n}"] = meter
        if meter.limit.key is None:
            alone.append(f"    tat_{n} = meter_{n}.tat")
            take.append(f"        meter_{n}.tat = tat_{n}")
        else:
            names[f"states_{n}"] = meter.states
            names[f"read_{n}"] = next(keyed)
            read.append(f"    key_{n} = read_{n}(call)")
            find.append(f"        tat_{n} = states_{n}[key_{n}]")
            take.append(f"        states_{n}[key_{n}] = tat_{n}")
        add += [
            f"    if tat_{n} < us:",
            f"        tat_{n} = us",
            f"    tat_{n} += meter_{n}.step",
        ]
    keys = "".join(f"key_{n}, " for n, meter in enumerate(meters) if meter.limit.key is not None)
    fits = " and ".join(f"tat_{n} - us <= meter_{n}.slack" for n in range(len(meters)))
    found = ["    try:", *find, "    except KeyError:", "        return None"] if find else []
    states = "".join(f"tat_{n}, " for n in range(len(meters)))
    lines = [
        "def taken(us, call):",
        *read,
        *found,
        *alone,
        *add,
        f"    if {fits}:",
        *take,
        f"        return ({keys}), ({states})",
        "    return None",
    ]
    exec(compile("\n".join(lines), "seawall quick limits", "exec"), names)  # noqa: S102 - see above
    taken: Quick = names["taken"]
    return taken
