"""Rate limits in the store: what `RateLimit(shared=store)` needs, for every kind of sharing.

The script is `lua/rates.lua`; its questions and answers are in `wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import finalize

from seawall._forks import survives_fork
from seawall.clock import SYSTEM, Clock
from seawall.errors import StoreUnavailable
from seawall.models.rate.rule import RateRule
from seawall.redis.connections import valid_reply
from seawall.redis.keys import key_part
from seawall.redis.limits.wire import (
    SCRIPT,
    LimitTerms,
    ScriptCall,
    ScriptKeys,
    TakeRequest,
    Takings,
    describe,
    numbers,
    read,
    read_verdict,
    script_settings,
)
from seawall.redis.messages import weakly
from seawall.runtime.driver import Steps, wait_async, wait_sync
from seawall.runtime.layers import Kind
from seawall.runtime.store import (
    LimitStanding,
    LimitVerdict,
    Receipt,
    StoreRequest,
    WantedCharge,
)

if TYPE_CHECKING:
    from seawall.redis.store import StoreCore
    from seawall.runtime.store import LimitOwner, StoreQuestion

_serial = count()
"""Number of the next reservation: unique in this process, across policies."""


class SharedLimits:
    """The limits of one policy in the store: the part of `LimitShare` that all kinds share."""

    sharing = "exact"
    spend_path: Any = None

    def __init__(
        self,
        store: StoreCore,
        name: str,
        rules: Sequence[RateRule[Any]],
        *,
        on_store_failure: str,
        owner: LimitOwner,
    ) -> None:
        self.store = store
        self.name = name
        self.failing = on_store_failure
        self.sees = False
        self.asks = 0
        self.owner = owner
        self._usual: tuple[Sequence[WantedCharge] | None, tuple[Takings, frozenset[int]]]
        self._usual = None, ((), frozenset())
        """The charges of a policy whose calls all cost the same: they come as a tuple."""
        self._ready = False
        self._settings = ""
        self._stop_announcing: Callable[[], object] = lambda: None
        finalize(self, store.watch(weakly(self._store_changed)))
        self.configure(rules)
        store.at_close(self._closing)
        survives_fork(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} in {self.store!r}>"

    # Settings

    @property
    def excess(self) -> tuple[int, ...]:
        """Amount that may be taken beyond each limit: none, since the store decides each time."""
        return ()

    def configure(self, rules: Sequence[RateRule[Any]]) -> None:
        """Use other numbers from now on; what was taken under the old ones is not given back."""
        if script_settings(rules) == self._settings:
            return
        self._settings = script_settings(rules)
        self.terms = LimitTerms(self.store, self.name, rules, weakly(self.settle))
        self.terms.sees = self.sees
        self._stop_announcing()
        own, report = describe(rules), self.owner.settings_differ
        handle = self.store.announce("rate", self.name, own, lambda other: report(own, other))
        self._stop_announcing = finalize(self, handle.stop)

    def see(self) -> None:
        """Add the state of the limits to receipts, if the store was asked."""
        self.sees = self.terms.sees = True

    @property
    def mode(self) -> str:
        """What decides now."""
        return self.failing if self.away else "shared"

    @property
    def away(self) -> bool:
        """Whether the store is known to be down."""
        return not self.store.up

    @property
    def times(self) -> int:
        """Number of pods among which the limits are divided while the store is away."""
        return self.store.pods.without_store

    def _prepare(self) -> None:
        """Start the background: it counts the pods, and compares settings."""
        self._ready = True
        self.store.pods.start()

    def _store_changed(self, up: bool, cause: str) -> None:  # noqa: FBT001 - a watcher
        modes = (self.failing, "shared") if up else ("shared", self.failing)
        self.owner.mode_changed(*modes, cause)

    async def _closing(self) -> None:
        """Report that the store is gone, unless that is known."""
        if self.store.health.up:
            self.owner.mode_changed("shared", self.failing, "the store was closed")

    def _after_fork(self) -> None:
        self._ready = False
        self._usual = None, ((), frozenset())

    # Questions

    def spend(self, charges: Sequence[WantedCharge], now: float) -> Receipt | None:
        """Return None: nothing is held in advance, the store makes every decision."""
        return None

    def wanted(self, charges: Sequence[WantedCharge]) -> tuple[Takings, frozenset[int]]:
        """Return what to take, and for which limits the actual cost will follow."""
        if charges is self._usual[0]:
            return self._usual[1]
        if not self._ready:
            self._prepare()
        numbered = list(enumerate(charges, 1))
        takings = tuple((n, c.key, c.cost) for n, c in numbered if c.cost or c.estimated)
        for _, key, _ in takings:
            key_part(key)  # a key that cannot be shared raises here, where the caller sees it
        wanted = takings, frozenset(n for n, c in numbered if c.estimated)
        if type(charges) is tuple:
            self._usual = charges, wanted
        return wanted

    def request(self, charges: Sequence[WantedCharge], *, reserve: bool = False) -> TakeRequest:
        """Return the question for `charges`; under a reservation if an actual cost will follow."""
        takings, estimated = self.wanted(charges)
        reservation = ""
        if reserve or estimated:
            number = f"{self.store.pod}-{next(_serial)}"
            reservation = self.store.key("rate", self.name, "r", number)
        return TakeRequest(self.terms, takings, estimated, reservation)

    def ask(self, kind: Kind, charges: Sequence[WantedCharge], clock: Clock) -> StoreQuestion:
        """Return a waiter for the store's verdict."""
        self.asks += 1
        item = self.request(charges)
        return self.store.ask(kind, item.terms, item, clock)

    async def answer(self, charges: Sequence[WantedCharge], clock: Clock) -> LimitVerdict:
        """Return the store's verdict."""
        verdict: LimitVerdict = await wait_async(self.ask("async", charges, clock), clock)
        return verdict

    def decide(self, charges: Sequence[WantedCharge]) -> Steps[LimitVerdict]:
        """Take by reservation. If the answer is lost, give back what may have been taken.

        The store finds it by its reservation. What comes too late is given back when it comes.
        """
        self.asks += 1
        item = self.request(charges, reserve=True)

        def question(kind: Kind) -> StoreQuestion:
            return self.store.ask(kind, item.terms, item, SYSTEM)

        try:
            verdict: LimitVerdict = yield StoreRequest(
                lambda: wait_sync(question("sync"), SYSTEM),
                lambda: wait_async(question("async"), SYSTEM),
            )
        except StoreUnavailable:
            self.settle(item, [0] * len(item.terms.rules))
            raise
        return verdict

    def take_up_to(self, most: int, charges: Sequence[WantedCharge]) -> Steps[int]:
        """Take up to `most` for the estimated charges."""
        names = self._names()
        asked = ",".join(
            f"[{names.charge(n, c.key, c.cost)},{int(c.estimated)}]"
            for n, c in enumerate(charges, 1)
        )
        reply = yield self._script_request(names.call(f'["u",[{asked}],{most}]'))
        with valid_reply():
            _now, (answer,) = read(reply, 1)
            (number,) = numbers(answer, 1)
            if not 0 <= number <= most:
                raise ValueError(answer)
            return number

    def _script_request(self, call: ScriptCall) -> StoreRequest:
        store = self.store
        return StoreRequest(partial(store.call, SCRIPT, *call), partial(store.acall, SCRIPT, *call))

    def _names(self) -> ScriptKeys:
        """Return the keys of a question that is asked alone."""
        if not self._ready:
            self._prepare()
        self.asks += 1
        return ScriptKeys(self.terms)

    def peek(
        self, charges: Sequence[WantedCharge]
    ) -> Steps[tuple[LimitVerdict, Sequence[LimitStanding]]]:
        """Return the limits' state without taking anything."""
        names = self._names()
        asked = (f"[{names.charge(n, c.key, c.cost)}]" for n, c in enumerate(charges, 1))
        reply = yield self._script_request(names.call(f'["p",[{",".join(asked)}]]'))
        with valid_reply():
            _now, (answer,) = read(reply, 1)
            verdict, rest = read_verdict(answer, len(self.terms.rules))
            return verdict, [LimitStanding(*numbers(part, 2)) for part in rest]

    # Reports

    def count(self, costs: Sequence[tuple[Hashable, int]]) -> None:
        """Count calls that were admitted without the store; in the background, in order."""
        names = ScriptKeys(self.terms)
        changes = []
        for limit, (key, cost) in enumerate(costs, 1):
            if cost:
                place, amount = names.state(limit, key), self.terms.amount(limit, cost)
                changes.append(f"[{limit},{place},0,0,{cost},{amount},{amount},0]")
        self.store.post(SCRIPT, *names.call(f'["b",[{",".join(changes)}]]'))

    def settle(self, receipt: Any, used: Sequence[int | None]) -> None:
        """Report the actual use; in the background, in order."""
        names = ScriptKeys(self.terms)
        self.store.post(SCRIPT, *names.call(receipt.settle(names, used)))

    def lower(self, limit: int, key: Hashable, remaining: int, reset_after: float) -> None:
        """Allow at most `remaining` for `reset_after` microseconds."""
        self.store.post(SCRIPT, *self._lowering(limit, key, remaining, reset_after))

    def confirmed_lower(
        self, limit: int, key: Hashable, remaining: int, reset_after: float
    ) -> Steps[None]:
        """Do what `lower` does, and wait for the store."""
        yield self._script_request(self._lowering(limit, key, remaining, reset_after))

    def _lowering(
        self, limit: int, key: Hashable, remaining: int, reset_after: float
    ) -> ScriptCall:
        names = ScriptKeys(self.terms)
        place = names.state(limit + 1, key)
        return names.call(f'["l",{limit + 1},{place},{remaining},{reset_after:.0f}]')

    def reset(self, places: Sequence[tuple[int, Hashable]]) -> Steps[None]:
        """Forget the usage of these limits and keys."""
        names = ScriptKeys(self.terms)
        asked = ",".join(f"[{n + 1},{names.state(n + 1, key)}]" for n, key in places)
        yield self._script_request(names.call(f'["z",[{asked}]]'))

    def snapshot(self) -> dict[str, Any]:
        """Return how it is shared, what decides now, and how often the store was asked."""
        return {
            "store": self.store.name,
            "sharing": self.sharing,
            "mode": self.mode,
            "asks": self.asks,
        }
