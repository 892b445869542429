"""What is measured of Seawall, in rows; the bare call of each row is what all is measured by.

A case is a way to guard a function: it takes `work` or `async_work` and returns what is called.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from seawall import (
    Breaker,
    Bulkhead,
    Cache,
    Fallback,
    Guard,
    RateLimit,
    Rejected,
    Retry,
    RetryBudget,
    Shed,
    Timeout,
    static,
)
from seawall.resources import Channel, Pool
from seawall.shedding import by_fraction

if TYPE_CHECKING:
    from collections.abc import Callable

    Function = Callable[[Any], Any]
    Make = Callable[[Function], Function]

Kind = Literal["sync", "async"]

BARE = "bare"
OURS = "seawall"

ATTEMPTS = 3
SLOTS = 100
SECONDS = 10.0
TOTAL_SECONDS = 60.0
RATE = 1_000_000
"""Calls a second that a limiter admits."""
SPARE = 1_000_000_000
"""Calls that it admits at once: none is refused while one measures."""

_serials = count()


def work(argument):
    """Return the argument: the least that a call can do."""
    return argument


async def async_work(argument):
    """Return the argument: the least that an awaited call can do."""
    return argument


class Row(NamedTuple):
    """Cases that do the same, for the same kind of function. The one called "seawall" is ours."""

    what: str
    kind: Kind
    cases: dict[str, Make]

    @property
    def name(self) -> str:
        """What the row is called in tables and targets."""
        return f"{self.what}, {self.kind}"

    @property
    def work(self) -> Function:
        """The function that the cases guard."""
        return async_work if self.kind == "async" else work


def _name() -> str:
    return f"bench {next(_serials)}"  # a live guard's name is unique


def bare(function):
    """Guard nothing."""
    return function


def retry(function):
    """Retry alone."""
    return Retry(on=ValueError, attempts=ATTEMPTS)(function)


def breaker(function):
    """Break alone, by the default rule."""
    return Breaker()(function)


def bulkhead(function):
    """Limit concurrency alone."""
    return Bulkhead(SLOTS)(function)


def timeout(function):
    """Time alone; a plain function cooperatively."""
    return Timeout(SECONDS, sync="cooperative")(function)


def rate_limit(function):
    """Limit the rate alone, by a token bucket."""
    return RateLimit(f"{RATE}/s", burst=SPARE)(function)


def fallback(function):
    """Fall back alone."""
    return Fallback(static(None))(function)


def cache_hit(function):
    """Answer from memory: all calls but the first."""
    return Cache(3600.0)(function)


def _four() -> Guard:
    return Guard(
        _name(),
        Bulkhead(SLOTS),
        Breaker(),
        Retry(on=ValueError, attempts=ATTEMPTS),
        Timeout(SECONDS, sync="cooperative"),
    )


def stack(function):
    """Guard by the four policies that other libraries have too."""
    return _four()(function)


def five(function):
    """Guard by five policies that other libraries have too."""
    return Guard(
        _name(),
        Retry(on=ValueError, attempts=ATTEMPTS),
        Breaker(),
        RateLimit(f"{RATE}/s", burst=SPARE),
        Bulkhead(SLOTS),
        Timeout(SECONDS, sync="cooperative"),
    )(function)


def stack_untimed(function):
    """Guard by the same four without the timeout, which few libraries have for plain functions."""
    return Guard(_name(), Bulkhead(SLOTS), Breaker(), Retry(on=ValueError, attempts=ATTEMPTS))(
        function
    )


def stack_in_thread(function):
    """Guard by the same four, with a timeout that gives up on a plain function."""
    return Guard(
        _name(),
        Bulkhead(SLOTS),
        Breaker(),
        Retry(on=ValueError, attempts=ATTEMPTS),
        Timeout(SECONDS, sync="thread"),
    )(function)


def guard_call(function):
    """Guard by the same four, around a function that is named with each call."""
    return partial(_four().call, function)


def guard_acall(function):
    """Guard by the same four, around an async function that is named with each call."""
    return partial(_four().acall, function)


def recommended(function):
    """Guard by six policies, in the recommended order."""
    return Guard(
        _name(),
        Fallback(static(None)),
        Timeout(TOTAL_SECONDS, sync="cooperative"),
        Retry(on=ValueError, attempts=ATTEMPTS, budget=RetryBudget()),
        Breaker(),
        Bulkhead(SLOTS),
        Timeout(SECONDS, sync="cooperative"),
    )(function)


# --- What is lent, and what is passed on ---


def pool(function):
    """Borrow a resource for the call, and give it back."""
    lent = Pool(object, name=_name(), max_size=SLOTS)

    def borrowed(argument):
        with lent.borrow():
            return function(argument)

    return borrowed


def async_pool(function):
    """Borrow a resource for an awaited call, and give it back."""
    lent = Pool(object, name=_name(), max_size=SLOTS)

    async def borrowed(argument):
        async with lent.borrow():
            return await function(argument)

    return borrowed


def channel(function):
    """Put the argument into a channel and take it out."""
    items = Channel(SLOTS)

    def passed(argument):
        items.put(argument)
        return function(items.get())

    return passed


def async_channel(function):
    """Put the argument into a channel and take it out, in a loop."""
    items = Channel(SLOTS)

    async def passed(argument):
        await items.aput(argument)
        return await function(await items.aget())

    return passed


# --- What it costs to say no ---


def _refused(policy, function):
    guarded = Guard(_name(), policy)(function)

    async def ask(argument):
        try:
            await guarded(argument)
        except Rejected:
            return argument
        raise AssertionError("it was to be refused")

    return ask


def refused_by_shed(function):
    """Be shed."""
    return _refused(Shed(by_fraction(1.0)), function)


def refused_by_breaker(function):
    """Meet an open circuit."""
    breaker = Breaker()
    breaker.isolate()
    return _refused(breaker, function)


def refused_by_rate_limit(function):
    """Come too often."""
    limit = RateLimit("1/day")
    limit.reserve()
    return _refused(limit, function)


ROWS = (
    Row("retry", "sync", {BARE: bare, OURS: retry}),
    Row("retry", "async", {BARE: bare, OURS: retry}),
    Row("breaker", "sync", {BARE: bare, OURS: breaker}),
    Row("breaker", "async", {BARE: bare, OURS: breaker}),
    Row("bulkhead", "sync", {BARE: bare, OURS: bulkhead}),
    Row("bulkhead", "async", {BARE: bare, OURS: bulkhead}),
    Row("limiter", "sync", {BARE: bare, OURS: rate_limit}),
    Row("limiter", "async", {BARE: bare, OURS: rate_limit}),
    Row("timeout", "async", {BARE: bare, OURS: timeout}),
    Row("stack", "sync", {BARE: bare, OURS: stack}),
    Row("stack", "async", {BARE: bare, OURS: stack}),
    Row("pool", "sync", {BARE: bare, OURS: pool}),
    Row("pool", "async", {BARE: bare, OURS: async_pool}),
    Row("channel", "sync", {BARE: bare, OURS: channel}),
    Row("channel", "async", {BARE: bare, OURS: async_channel}),
    Row("five", "sync", {BARE: bare, OURS: five}),
    Row("five", "async", {BARE: bare, OURS: five}),
    Row(
        "refusal",
        "async",
        {
            "Shed": refused_by_shed,
            "Breaker, open": refused_by_breaker,
            "RateLimit": refused_by_rate_limit,
        },
    ),
    Row("stack without its timeout", "sync", {BARE: bare, OURS: stack_untimed}),
    Row("stack with a timeout by thread", "sync", {BARE: bare, OURS: stack_in_thread}),
    Row(
        "others",
        "sync",
        {
            BARE: bare,
            "cooperative Timeout": timeout,
            "Fallback, not needed": fallback,
            "Cache, hit": cache_hit,
            "the stack by guard.call": guard_call,
            "recommended six": recommended,
        },
    ),
    Row(
        "others",
        "async",
        {
            BARE: bare,
            "Fallback, not needed": fallback,
            "Cache, hit": cache_hit,
            "the stack by guard.acall": guard_acall,
            "recommended six": recommended,
        },
    ),
)
