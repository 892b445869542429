"""The configuration of one limit: rate, key and cost."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, Literal

from seawall import _checks as check
from seawall.models.rate.buckets import LeakyBucket, TokenBucket
from seawall.models.rate.rates import Rate, whole_microseconds
from seawall.models.rate.rule import RateRule
from seawall.models.rate.windows import FixedWindow, SlidingCounter, SlidingLog
from seawall.runtime.functions import with_arguments

Algorithm = Literal[
    "token_bucket", "leaky_bucket", "fixed_window", "sliding_counter", "sliding_log"
]
Key = Callable[..., Hashable]
Cost = int | Callable[..., int]
Settle = Callable[[Any], int]

_WINDOWS: Final[dict[str, Callable[[Rate], RateRule[Any]]]] = {
    "fixed_window": FixedWindow,
    "sliding_counter": SlidingCounter,
    "sliding_log": SlidingLog,
}

USUAL: Final[dict[str, Any]] = {
    "burst": None,
    "algorithm": "token_bucket",
    "key": None,
    "cost": 1,
    "settle": None,
    "max_debt": None,
}
"""Settings that `RateLimit` has for all of its limits, with their defaults."""

BELIEVED: Final = 60.0
"""Seconds for which a vendor's report may apply at least, however short the limit's period."""


class Limit:
    """One limit of several: a rate, a key and a cost."""

    def __init__(
        self,
        rate: str,
        *,
        burst: int | None = None,
        algorithm: Algorithm = "token_bucket",
        key: Key | None = None,
        cost: Cost = 1,
        settle: Settle | None = None,
        max_debt: float | None = None,
        name: str | None = None,
    ) -> None:
        """Admit `rate`, such as "60/s", "1000/min" or "10k/day"; a token bucket `burst` at once.

        `burst` defaults to the number in the rate. `key` and `cost` are functions of the call's
        arguments (or without arguments, such as `current_tenant`): each key has a limit of its own,
        and a call takes `cost` of it. `settle` maps the call's return value to its actual cost. An
        actual cost above the estimate keeps the limit closed for at most `max_debt` seconds, by
        default one period of the rate; the same bound applies to a vendor's report of what is left,
        by default at least a minute. `name` identifies the limit in refusals; by default the rate.
        """
        self.rate = Rate.parse(rate)
        self.text = rate.strip()
        known = ("token_bucket", "leaky_bucket", *_WINDOWS)
        self.algorithm = check.choice("algorithm", algorithm, known)
        if burst is not None and algorithm != "token_bucket":
            raise ValueError(f"burst={burst!r}: only a token bucket has one; {algorithm} does not")
        self.burst = None if burst is None else check.count("burst", burst)
        self.key = None if key is None else check.plain_function("key", key)
        if max_debt is not None:
            max_debt = check.seconds("max_debt", max_debt, zero=True)
        self.max_debt = max_debt
        self._longest = max(BELIEVED, self.rate.period / 1e6) if max_debt is None else max_debt
        """Maximum number of seconds for which a vendor's report applies."""
        rule = self._rule()
        self._most, self._capacity = rule.most, rule.capacity
        self.cost = check.plain_function("cost", cost) if callable(cost) else cost
        self._ask_key = None if key is None else with_arguments(key)
        self._ask_cost = with_arguments(cost) if callable(cost) else lambda *_, **__: cost
        self.settle = None if settle is None else check.plain_function("settle", settle)
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name={name!r}: write text, such as name='user'")
        self.name = name or self.text
        if callable(cost):
            return
        most = self._capacity
        if most is not None and check.count("cost", cost) > most:
            raise ValueError(f"cost={cost!r}: {self.text} never admits more than {most} at once")
        check.count("cost", cost, maximum=self._most)

    def __repr__(self) -> str:
        usual = {**USUAL, "name": self.text}
        given = {name: getattr(self, name) for name in usual}
        changed = (f", {name}={given[name]!r}" for name in given if given[name] != usual[name])
        return f"Limit({self.text!r}{''.join(changed)})"

    def _rule(self) -> RateRule[Any]:
        debt = None if self.max_debt is None else whole_microseconds(self.max_debt)
        if self.algorithm == "token_bucket":
            return TokenBucket(self.rate, self.burst or self.rate.limit, debt)
        if self.algorithm == "leaky_bucket":
            return LeakyBucket(self.rate, debt)
        return _WINDOWS[self.algorithm](self.rate)

    @property
    def _estimates(self) -> bool:
        """Whether the actual cost of a call may differ from the one taken."""
        return callable(self.cost) or self.settle is not None

    def _key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Return the key of a call; None if the limit has no keys."""
        return None if self._ask_key is None else self._check_key(self._ask_key(*args, **kwargs))

    def _check_key(self, key: Hashable) -> Hashable:
        """Return `key` if it is valid, or raise. A plain subclass of str is converted to str."""
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"the key of limit {self.name!r}: {error}; return text, a number or a tuple"
            ) from None
        kind = type(key)
        if isinstance(key, str) and kind is not str:
            # Only if it compares and hashes like the text itself.
            same = kind.__eq__ is str.__eq__ and kind.__hash__ is str.__hash__
            return str.__str__(key) if same else key
        return key

    def _cost_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if isinstance(self.cost, int):
            return self.cost
        return self._checked_cost(self._ask_cost(*args, **kwargs))

    def _checked_cost(self, cost: int) -> int:
        """Return a valid cost, or raise. One that is too large to count never fits."""
        if type(cost) is int and 0 <= cost <= self._most:
            return cost
        if type(cost) is int and cost > 0 and self._capacity is not None:
            return self._most
        return check.count(f"cost of limit {self.name!r}", cost, minimum=0, maximum=self._most)

    def _same_but_for_numbers(self, other: Limit) -> bool:
        """Return whether `other` counts the same things for the same keys by the same algorithm."""
        functions = [f if callable(f) else None for f in (self.cost, other.cost)]
        return (
            self.algorithm == other.algorithm
            and self.key is other.key
            and self.settle is other.settle
            and functions[0] is functions[1]
        )
