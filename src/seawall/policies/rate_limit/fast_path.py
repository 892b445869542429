"""The success paths of rate limits: source lines that run without the lock.

A guard assembles its success path from the lines of its policies (`runtime.fastpath`); the edge of
a service has a function for several limits at once. The lines are fixed and numbered by limit: no
name, setting or other user data becomes part of the text. Each repeats, for an admitted call, what
`Meter` does under the lock; `tests/policies/rate_limit/test_invariants.py` and
`tests/redis/limits/test_agreement.py` compare them.

Promises:
- Between reading a state and writing it there is no call and no loop, so no other thread can
  interfere (see `LOCK_FREE`).
- A holder of the lock closes these paths with a slack that no call fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seawall.models.rate.rates import ROUND
from seawall.policies.rate_limit.meters import Meter
from seawall.runtime.interpreter import refuse_expired
from seawall.runtime.layers import Inline
from seawall.runtime.mutex import LOCK_FREE
from seawall.runtime.store import SpendPath

Taken = tuple[tuple[str, ...], tuple[float, ...]]
"""The keys of the buckets that have keys, and the states of all buckets."""
Quick = Callable[[float, Any], Taken | None]
Reader = Callable[[Any], str | None]
"""Returns the key of a call as text, or None for a call that must take the lock."""


def unkeyed_buckets(meters: Sequence[Meter]) -> Inline:
    """Return the lines for buckets without keys: check all, then take from all."""
    numbers = range(len(meters))
    ask, take = [], []
    for n in numbers:
        ask += [
            f"{{tat_{n}}} = {{meter_{n}}}.tat",
            f"if {{tat_{n}}} < {{us}}:",
            f"    {{tat_{n}}} = {{us}}",
            f"{{tat_{n}}} += {{meter_{n}}}.step",
        ]
        take.append(f"    {{meter_{n}}}.tat = {{tat_{n}}}")
    fits = " and ".join(f"{{tat_{n}}} - {{us}} <= {{meter_{n}}}.slack" for n in numbers)
    return Inline(
        names={f"meter_{n}": meters[n] for n in numbers},
        enter=(
            f"{{us}} = now_ * 1e6 + {ROUND!r} - {ROUND!r}",
            *ask,
            f"if {fits}:",
            *take,
            "    {ticket} = {us}",
            "else:",
            "    {ticket} = {enter}(now_)",
        ),
        leave=(),
    )


def keyed_bucket(meter: Meter, slowly: Callable[..., object], *, takes_arguments: bool) -> Inline:
    """Return the lines for one bucket with keys; `slowly(key, now)` takes under the lock."""
    key: Any = meter.limit._ask_key
    names = {"key": key, "meter": meter, "states": meter.states, "slowly": slowly, "str": str}
    arguments = "{arguments}" if takes_arguments else ""
    return Inline(
        names=names,
        enter=(
            f"{{own}} = {{key}}({arguments})",
            "if type_({own}) is {str}:",
            f"    {{us}} = now_ * 1e6 + {ROUND!r} - {ROUND!r}",
            "    try:",
            "        {tat} = {states}[{own}]",
            "        if {tat} < {us}:",
            "            {tat} = {us}",
            "        {tat} += {meter}.step",
            "        if {tat} - {us} <= {meter}.slack:",
            "            {states}[{own}] = {tat}",
            "            {ticket} = {own}, {us}",
            "    except KeyError_:",
            "        pass",
            "if {ticket} is ABSENT_:",
            "    {ticket} = {slowly}({own}, now_)",
        ),
        leave=(),
    )


def awaited_store(
    enter_async: Callable[..., object], *, takes_arguments: bool, settles: bool
) -> Inline:
    """Return the lines that ask the store in an event loop."""
    arguments = ", {arguments}" if takes_arguments else ""
    return Inline(
        names={"enter_async": enter_async, "refuse_expired": refuse_expired},
        enter=(
            f"{{ticket}} = await {{enter_async}}(now_{arguments})",
            # As after every wait: time has passed, and the call has not begun.
            "now_ = clock_()",
            "if held_ is not None:",
            "    {refuse_expired}(host_)",
        ),
        leave=("{leave}({left}, OK_, value_, end_)",) if settles else (),
    )


def granted_batch(door: SpendPath, otherwise: Inline | None) -> Inline:
    """Return the lines that spend from a batch granted to this pod, or else do `otherwise`."""
    slowly = otherwise or Inline({}, ("{ticket} = {enter}(now_)",), ())
    return Inline(
        names={**slowly.names, "door": door},
        enter=(
            "{lot}, {cost} = {door}.open, {door}.cost",
            "{rest} = {lot}.left - {cost}",
            "if {rest} >= {lot}.floor and now_ < {lot}.until:",
            "    {lot}.left = {rest}",
            "    {ticket} = {lot}, {cost}",
            "else:",
            *(f"    {line}" for line in slowly.enter),
        ),
        leave=slowly.leave,
    )


def quick_taking(meters: Sequence[Meter], readers: Sequence[Reader]) -> Quick | None:
    """Return a function that takes from all of these meters or from none.

    It is called with a time in whole microseconds and the call, and returns the keys and the
    states, or None if the limits have to be checked under the lock. `readers` are for the meters
    that have keys, in their order. The result is None if the meters are not suitable. For a bucket
    with keys and one without the function is:

        def taken(us, call):
            key_0 = read_0(call)
            try:
                tat_0 = states_0[key_0]
                tat_1 = meter_1.tat
            except KeyError:
                return None
            if tat_0 < us:
                tat_0 = us
            tat_0 += meter_0.step
            if tat_1 < us:
                tat_1 = us
            tat_1 += meter_1.step
            if tat_0 - us <= meter_0.slack and tat_1 - us <= meter_1.slack:
                states_0[key_0] = tat_0
                meter_1.tat = tat_1
                return (key_0, ), (tat_0, tat_1, )
    """
    if not LOCK_FREE or not meters or not all(meter.plain for meter in meters):
        return None
    names: dict[str, Any] = {"KeyError": KeyError, "__builtins__": {}}
    read, find, add, take, keys = [], [], [], [], []
    keyed = iter(readers)
    for n, meter in enumerate(meters):
        names[f"meter_{n}"] = meter
        place = f"meter_{n}.tat"
        if meter.limit.key is not None:
            names |= {f"states_{n}": meter.states, f"read_{n}": next(keyed)}
            read.append(f"    key_{n} = read_{n}(call)")
            keys.append(f"key_{n}, ")
            place = f"states_{n}[key_{n}]"
        find.append(f"        tat_{n} = {place}")
        add += [f"    if tat_{n} < us:", f"        tat_{n} = us", f"    tat_{n} += meter_{n}.step"]
        take.append(f"        {place} = tat_{n}")
    numbers = range(len(meters))
    fits = " and ".join(f"tat_{n} - us <= meter_{n}.slack" for n in numbers)
    states = "".join(f"tat_{n}, " for n in numbers)
    lines = [
        "def taken(us, call):",
        *read,
        "    try:",
        *find,
        "    except KeyError:",
        "        return None",
        *add,
        f"    if {fits}:",
        *take,
        f"        return ({''.join(keys)}), ({states})",
    ]
    exec(compile("\n".join(lines), "seawall quick limits", "exec"), names)  # noqa: S102 - fixed text, no user data
    taken: Quick = names["taken"]
    return taken
