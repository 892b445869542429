"""The questions to `lua/rates.lua`, and its answers.

Every number of a reply is checked: a store may answer anything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final

from seawall.models.rate.buckets import Bucket, LeakyBucket, TokenBucket
from seawall.models.rate.rates import EXACT
from seawall.models.rate.rule import RateRule
from seawall.models.rate.windows import FixedWindow, SlidingCounter, SlidingLog
from seawall.redis.keys import key_part
from seawall.runtime.store import LimitStanding, LimitVerdict, Receipt

if TYPE_CHECKING:
    from seawall.redis.store import StoreCore

SCRIPT: Final = "rates"
MOST_QUESTIONS: Final = 128
"""Maximum number of questions in one script call, which blocks the server meanwhile."""

Taking = tuple[int, Hashable, int]
"""The number of a limit (from 1), a key, and a cost."""
Takings = tuple[Taking, ...]
ScriptCall = tuple[Sequence[str], Sequence[str]]
"""Keys and arguments."""


class TakeRequest:
    """What one call asks to take, then took: a question, and its receipt.

    Settled once, by its reservation or its marks.
    """

    __slots__ = ("estimated", "marks", "reservation", "standings", "takings", "terms")

    def __init__(
        self, terms: LimitTerms, takings: Takings, estimated: frozenset[int], reservation: str
    ) -> None:
        """Ask for `takings`; under a `reservation` if it is not ""."""
        self.terms = terms
        self.takings = takings
        self.estimated = estimated
        self.reservation = reservation
        self.marks: Sequence[int] = ()
        """The script's mark of each taking, for giving it back."""
        self.standings: dict[int, LimitStanding] = {}
        """The limits' state afterwards, by their number from 0, if requested."""

    def ask(self, names: ScriptKeys, times: int = 1) -> str:
        """Return the question that takes it, `times` times if it is no reservation."""
        charges = ",".join(
            f"[{names.charge(limit, key, cost)},{int(limit in self.estimated)}]"
            for limit, key, cost in self.takings
        )
        if self.reservation:
            return f'["r",{names.number(self.reservation)},[{charges}]]'
        see = ",1" if self.terms.sees else ""
        return f'["t",[{charges}],{times}{see}]'

    def settle(self, names: ScriptKeys, used: Sequence[int | None]) -> str:
        """Return the question that settles it: what was `used`, of each limit."""
        terms, changes = names.terms, []
        marks: Sequence[tuple[int, ...]] = [(mark,) for mark in self.marks]
        marks = marks or [()] * len(self.takings)
        for (limit, key, cost), mark in zip(self.takings, marks, strict=True):
            actual = used[limit - 1]
            if actual is None:
                continue
            if actual < cost and self.terms.rules[limit - 1] is not terms.rules[limit - 1]:
                actual = cost  # taken under other settings: not given back any more
            beyond = terms.amount(limit, max(0, actual - cost))
            numbers = (actual, terms.amount(limit, actual), beyond, *mark)
            changes.append(f"[{names.charge(limit, key, cost)},{','.join(map(str, numbers))}]")
        if self.reservation:
            return f'["s",{names.number(self.reservation)},[{",".join(changes)}]]'
        return f'["b",[{",".join(changes)}]]'

    def read(self, answer: str, now: int) -> LimitVerdict:
        """Return the store's verdict; keep what is needed to give it back."""
        if self.terms.sees and "/" in answer:
            answer, _, seen = answer.partition("/")
            parts = zip(self.takings, seen.split(";"), strict=True)
            self.standings = {
                taking[0] - 1: LimitStanding(*numbers(part, 2)) for taking, part in parts
            }
        if answer == "0":  # the most common answer
            if not self.reservation:
                self.marks = (now,) * len(self.takings)
            return LimitVerdict(0.0, receipt=self)
        verdict, marks = read_verdict(answer, len(self.terms.rules))
        if verdict.wait != 0:
            return verdict
        if self.reservation or len(marks) != len(self.takings):
            raise ValueError(answer)
        self.marks = [numbers(mark, 1)[0] for mark in marks]
        return LimitVerdict(0.0, receipt=self)

    def granted(self, answer: LimitVerdict) -> Receipt | None:
        """Return what to give back if no caller wants the answer."""
        return answer.receipt


class ScriptKeys:
    """The keys of one script call, each with its number."""

    def __init__(self, terms: LimitTerms) -> None:
        self.terms = terms
        self._numbers = {terms.clock: 1}

    @property
    def keys(self) -> list[str]:
        """All keys, in order."""
        return list(self._numbers)

    def call(self, *questions: str) -> ScriptCall:
        """Return keys and arguments of the script call with these questions."""
        return self.keys, (self.terms.settings, f"[{','.join(questions)}]")

    def charge(self, limit: int, key: Hashable, cost: int) -> str:
        """Return how a question names a limit, its state, and a cost in units and microseconds."""
        return f"{limit},{self.state(limit, key)},{cost},{self.terms.amount(limit, cost)}"

    def number(self, key: str) -> int:
        """Return the number of `key`."""
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def state(self, limit: int, key: Hashable) -> int:
        """Return the number of the state of `key`; for a log, the number of its list follows."""
        name, beside = self.terms.homes[limit - 1]
        part = "" if key is None else f":{key_part(key)}"
        number = self.number(name + part)
        if beside:
            self.number(beside + part)
        return number


class LimitTerms:
    """The numbers of the limits, and how questions about them are asked: `Coalesced`.

    Other numbers are another object, so questions that go in one call use the same numbers.
    """

    script = SCRIPT
    most = MOST_QUESTIONS

    def __init__(
        self,
        store: StoreCore,
        name: str,
        rules: Sequence[RateRule[Any]],
        settle: Callable[[Receipt, Sequence[int | None]], None],
    ) -> None:
        """Ask for what is kept under `name`; `settle` gives back what no caller wants any more."""
        self.rules = tuple(rules)
        self._settle = settle
        self.settings = script_settings(rules)
        self.sees = False
        """Whether receipts contain what is left."""
        self.clock = store.key("rate", name, "clock")
        self.homes = []
        """The keys of each limit's states, and of the list that belongs to one, if any."""
        for number, rule in enumerate(rules, 1):
            home = f"{_code(rule)}{number}"
            if not isinstance(rule, Bucket):
                # Counts of one window size say nothing about longer or shorter windows.
                home += f"-{rule.rate.period}"
            beside = f"{home}-list" if isinstance(rule, SlidingLog) else ""
            self.homes.append(
                (store.key("rate", name, home), beside and store.key("rate", name, beside))
            )

    def amount(self, limit: int, cost: int) -> int:
        """Return a cost in microseconds; 0 where that does not apply."""
        rule = self.rules[limit - 1]
        return int(rule.amount(cost)) if isinstance(rule, Bucket) else 0

    def pack(self, items: Sequence[Any]) -> ScriptCall:
        """Return keys and arguments of one call for all `items`."""
        names = ScriptKeys(self)
        return names.call(*[item.ask(names) for item in items])

    def unpack(self, reply: Any, items: Sequence[Any]) -> Sequence[Any]:
        """Return the verdicts, in the same order."""
        now, answers = read(reply, len(items))
        return [item.read(answer, now) for item, answer in zip(items, answers, strict=True)]

    def unwanted(self, item: Any, answer: Any) -> None:
        """Give back what was granted to a caller that is gone."""
        receipt = item.granted(answer)
        if receipt is not None:
            self.give_back(receipt)

    def give_back(self, receipt: Receipt) -> None:
        """Give all of it back."""
        self._settle(receipt, [0] * len(self.rules))


# Arguments of the script

_CODES: Final[dict[str, type[RateRule[Any]]]] = {
    "t": TokenBucket,
    "l": LeakyBucket,
    "f": FixedWindow,
    "c": SlidingCounter,
    "s": SlidingLog,
}


def _code(rule: RateRule[Any]) -> str:
    return next(code for code, kind in _CODES.items() if isinstance(rule, kind))


def _numbers(rule: RateRule[Any]) -> str:
    bucket = rule if isinstance(rule, Bucket) else None
    tolerance = rule.tolerance if isinstance(rule, TokenBucket) else 0
    numbers = (
        *rule.rate,
        *((bucket._time, bucket._units) if bucket else (0, 0)),
        int(tolerance),
        -1 if rule.capacity is None else rule.capacity,
        int(rule.debt),
    )
    return f'["{_code(rule)}",{",".join(map(str, numbers))}]'


def script_settings(rules: Sequence[RateRule[Any]]) -> str:
    """Return the numbers of all limits, in the script's format."""
    return f"[{','.join(map(_numbers, rules))}]"


def describe(rules: Sequence[RateRule[Any]]) -> str:
    """Return the numbers of all limits as text, for comparing."""
    return "; ".join(
        f"{type(rule).__name__} {rule.rate.limit} in {rule.rate.period / 1e6:g} s"
        + (f", burst {rule.capacity}" if isinstance(rule, TokenBucket) else "")
        + (f", debt {rule.debt / 1e6:g} s" if rule.debt not in {0, rule.rate.period} else "")
        for rule in rules
    )


# Replies of the script

_LONGEST: Final = 4096


def read(reply: Any, expected: int) -> tuple[int, list[str]]:
    """Return the server's time and the `expected` number of answers; or raise ValueError."""
    if not isinstance(reply, bytes) or len(reply) > _LONGEST * (expected + 1):
        raise ValueError(f"a reply of {type(reply).__name__}")
    now, *answers = reply.decode("ascii").split(" ")
    if len(answers) != expected:
        raise ValueError(f"{len(answers)} answers to {expected} questions")
    return numbers(now, 1)[0], answers


def read_verdict(answer: str, limits: int) -> tuple[LimitVerdict, list[str]]:
    """Return a verdict, and the remaining parts of the answer."""
    verdict, *rest = answer.split(";")
    if verdict == "0":
        return LimitVerdict(0.0), rest
    first, longest, wait = numbers(verdict, 3)
    if not (1 <= first <= limits and 1 <= longest <= limits) or wait == 0:
        raise ValueError(answer)
    return LimitVerdict(None if wait < 0 else float(wait), first - 1, longest - 1), rest


def numbers(text: str, expected: int) -> list[int]:
    """Return the `expected` number of integers, none too large to be exact."""
    parts = [int(part) for part in text.split(",")]
    if len(parts) != expected or not all(-1 <= part < 4 * EXACT for part in parts):
        raise ValueError(text)
    return parts
