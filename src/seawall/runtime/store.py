"""What policies, leases and members ask of a store that all pods share.

`seawall.redis` implements it.

A question to the store is a `StoreQuestion`; those that wait at the same moment are sent together.
Everything else here is a protocol: a policy asks a store once for its share (`LimitShare`,
`BreakerShare`, `BeatShare`), and then talks to that. For limits there is always one charge for each
limit, in the order of the limits; a cost of 0 is never requested, unless it is an estimate.

An operation outside of guards is written once, as steps: it yields a `StoreRequest` for each answer
of the store that it needs, and whoever drives it blocks or awaits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from seawall._failures import log_failure
from seawall.errors import StoreUnavailable
from seawall.runtime.layers import Kind, Waiter

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.models.breaker.settings import BreakerSettings
    from seawall.models.breaker.state import BreakerModel
    from seawall.models.rate.rule import RateRule
    from seawall.runtime.driver import Steps
    from seawall.runtime.mutex import Mutex


class BatchedSubject(Protocol):
    """How to batch questions into one script call; questions about the same object go together."""

    script: str  # the name of the script
    most: int  # maximum number of questions in one call

    def pack(self, items: Sequence[Any]) -> tuple[Sequence[str], Sequence[str | int | float]]:
        """Return keys and arguments of the script call for all `items`."""

    def unpack(self, reply: Any, items: Sequence[Any]) -> Sequence[Any]:
        """Return the answers, one for each of `items`; raise on an invalid reply."""

    def unwanted(self, item: Any, answer: Any) -> None:
        """Handle an answer that came too late: give back what was granted."""


class StoreQuestion:
    """One question, as a `Waiter`. If its caller gives up as it is answered, the first decides."""

    def __init__(
        self,
        about: Any,
        item: Any,
        until: float | None,
        add: Callable[[StoreQuestion], None],
    ) -> None:
        """Ask for `item`, waiting until `until`; the answering side has its own timeout."""
        self.about = about  # has `unwanted`; a `BatchedSubject` if a link answers
        self.item = item
        self.until = until
        self.due = 0.0  # when the answering side gives up, on the clock of its event loop
        self._add = add
        self._open = [True]
        self._wake: Callable[[], bool] | None = None
        self._answer: Any = None
        self._error: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether the answer has come, or the caller no longer waits for it."""
        return not self._open

    def publish(self, wake: Callable[[], bool]) -> None:
        """Ask the store."""
        self._wake = wake
        self.publish_in(self._add)

    def publish_in(self, add: Callable[[StoreQuestion], None]) -> None:
        """Ask the store from the current event loop."""
        try:
            add(self)
        except StoreUnavailable as error:
            self.fail(error)

    def deliver(self, answer: Any) -> None:
        """Deliver the answer; if the caller has given up, it is unwanted."""
        self._answer = answer
        if not (self._end() and self._wake is not None and self._wake()):
            self._unwanted()

    def fail(self, error: Exception) -> None:
        """Report that there is no answer."""
        self._error = error
        if self._end() and self._wake is not None:
            self._wake()

    def claim(self) -> Any:
        """Return the answer, or raise `StoreUnavailable`."""
        if self._end():
            raise StoreUnavailable("the store did not answer in time")
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # break the reference cycle between the error and this frame
        return self._answer

    def abandon(self) -> None:
        """Stop waiting, and give back what was granted."""
        if not self._end() and self._error is None:
            self._unwanted()

    def _unwanted(self) -> None:
        try:
            self.about.unwanted(self.item, self._answer)
        except Exception:  # noqa: BLE001 - logged: the other waiters must still get their answers
            log_failure("what was granted is not given back")

    def _end(self) -> bool:
        """Close the question; return False if it was closed already."""
        try:
            return self._open.pop()  # atomic: only one of two threads gets it
        except IndexError:
            return False


class StoreRequest(NamedTuple):
    """A request of an operation to its store, for a driver that blocks and for one that awaits."""

    run: Callable[[], Any]
    arun: Callable[[], Awaitable[Any]]


class ShareOwner(Protocol):
    """What a share knows of its policy; methods may be called from any thread."""

    def mode_changed(self, before: str, after: str, cause: str) -> None:
        """Report that the policy lost its store, or has it again. Called without a lock."""

    def settings_differ(self, own: str, other: str) -> None:
        """Report that another pod has other settings."""


class NamedStore(Protocol):
    """A store with a name for events and messages."""

    @property
    def name(self) -> str:
        """The name of the store in events and messages."""


class WantedCharge(Protocol):
    """What one call takes from one limit."""

    key: Hashable
    cost: int
    estimated: bool  # whether the actual cost is reported later


class Receipt(Protocol):
    """What was taken, for giving it back; after `see()` perhaps with `standings` by limit."""


class LimitVerdict(NamedTuple):
    """The store's decision about a call."""

    wait: float | None
    """0: taken. Otherwise microseconds until the same call would be admitted; None: never."""
    first: int = 0  # index of the first exceeded limit, if nothing was taken
    longest: int = 0  # index of the limit with the longest wait
    receipt: Receipt | None = None  # the receipt, if it was taken


class LimitStanding(NamedTuple):
    """The current state of one limit."""

    left: int  # how much may be taken now
    rest: float
    """Microseconds until all usage is forgotten; in a receipt, until there is more to take."""


class SpendPath(Protocol):
    """What a gate may spend from in its success path, in uninterruptible steps."""

    open: Any  # the lot to spend from; an empty one if the share must be asked
    cost: float  # cost of a call, set by the policy; infinite if each call must be inspected


class LimitShare(Protocol):
    """The limits of one policy, in a store. Every failure of the store is `StoreUnavailable`."""

    sharing: str  # mode of sharing: "exact", "leased" or "split"

    spend_path: SpendPath | None
    """Fast path for spending, for a single limit without keys; None if there is none."""

    @property
    def excess(self) -> tuple[int, ...]:
        """Maximum amount beyond each limit that may be taken; empty if none."""

    @property
    def mode(self) -> str:
        """What decides: "shared" is the store; otherwise the mode used while the store is away."""

    @property
    def away(self) -> bool:
        """Whether this pod currently has to decide alone."""

    @property
    def times(self) -> int:
        """Number of pods among which the limits are divided when each decides alone."""

    def spend(self, charges: Sequence[WantedCharge], now: float) -> Receipt | None:
        """Pay from what this pod was granted before; None if it has to ask. Never blocks."""

    def ask(self, kind: Kind, charges: Sequence[WantedCharge], clock: Clock) -> Waiter:
        """Return a waiter whose `claim` returns the store's `LimitVerdict`."""

    async def answer(self, charges: Sequence[WantedCharge], clock: Clock) -> LimitVerdict:
        """Return the verdict, in the running event loop. A tuple of charges never changes."""

    def decide(self, charges: Sequence[WantedCharge]) -> Steps[LimitVerdict]:
        """Take by reservation."""

    def take_up_to(self, most: int, charges: Sequence[WantedCharge]) -> Steps[int]:
        """Take up to `most` for the estimated charges, or 0."""

    def peek(
        self, charges: Sequence[WantedCharge]
    ) -> Steps[tuple[LimitVerdict, Sequence[LimitStanding]]]:
        """Return the state of each limit without taking anything."""

    def count(self, costs: Sequence[tuple[Hashable, int]]) -> None:
        """Count calls admitted without the store: a key and a cost for each limit."""

    def settle(self, receipt: Receipt, used: Sequence[int | None]) -> None:
        """Report the actual use for each limit; None leaves it unchanged. Does not block."""

    def lower(self, limit: int, key: Hashable, remaining: int, reset_after: float) -> None:
        """Allow at most `remaining` for `reset_after` microseconds. Does not block."""

    def confirmed_lower(
        self, limit: int, key: Hashable, remaining: int, reset_after: float
    ) -> Steps[None]:
        """Do what `lower` does, and wait until the store has confirmed."""

    def reset(self, places: Sequence[tuple[int, Hashable]]) -> Steps[None]:
        """Forget the usage of these limits and keys."""

    def see(self) -> None:
        """Add the state of the limits to receipts, if the store was asked."""

    def configure(self, rules: Sequence[RateRule[Any]]) -> None:
        """Use other numbers from now on."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the sharing."""


class LimitOwner(ShareOwner, Protocol):
    """What a share knows of its policy with limits."""

    def follow(self, rules: Iterable[RateRule[Any]]) -> None:
        """Let the meters in memory adopt other rules of the same kinds: those of a part."""


class LimitStore(NamedStore, Protocol):
    """A store that can keep rate limits."""

    def _limits(
        self,
        name: str,
        rules: Sequence[RateRule[Any]],
        *,
        sharing: str,
        batch: int | None,
        on_store_failure: str,
        owner: LimitOwner,
    ) -> LimitShare:
        """Return what is shared under `name`."""


class BreakerOwner(ShareOwner, Protocol):
    """What a share knows of its policy with breakers."""

    @property
    def mutex(self) -> Mutex:
        """The lock of its models."""

    def now(self) -> float:
        """Return the time of the policy's clock."""

    def report(self, model: BreakerModel, key: Hashable) -> None:
        """Report the state changes that `model` has recorded. Called without the lock."""


class BreakerShare(Protocol):
    """The models of one policy, each the same in all pods.

    They are used like any model, under the owner's lock. If `admit` answers that the state is
    "unknown", `ask` finds it out.
    """

    def model(self, key: Hashable) -> BreakerModel:
        """Return the model of `key`, which is new to this pod."""

    def forget(self, model: BreakerModel) -> None:
        """Stop following this model; what the store knows of it stays."""

    def begin(self) -> None:
        """Start exchanging state with the store. Called often, without the lock."""

    def ask(
        self, kind: Kind, model: BreakerModel, clock: Clock, result: Callable[[Any], Any]
    ) -> Waiter:
        """Return a waiter that claims `result(answer)`, where the answer is that of `admit`."""

    def update(self, settings: BreakerSettings) -> None:
        """Publish other settings from now on."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the sharing."""


class BreakerStore(NamedStore, Protocol):
    """A store that can keep breakers."""

    def _breaker(
        self,
        name: str,
        settings: BreakerSettings,
        owner: BreakerOwner,
        *,
        on_store_failure: str,
        quorum: int | None,
        keyed: bool,
    ) -> BreakerShare:
        """Return what is shared under `name`."""


MEMORY: Final = 3600.0  # seconds for which a store remembers a member that is silent or has left


class MemberBeat(NamedTuple):
    """The last heartbeat of a member, as stored."""

    member: str
    stamp: float
    """When it was written, by the store's clock; a different stamp means a new heartbeat."""
    age: float  # seconds since then, by the same clock


class Sighting(NamedTuple):
    """What the store knew of a group at one instant."""

    beats: list[MemberBeat]
    left: list[str]  # members that have left


class BeatShare(Protocol):
    """The heartbeats of one group in a store."""

    async def beat(self, member: str, most: int, patience: float) -> Sighting:
        """Write a heartbeat of `member`; return up to `most`. `StoreUnavailable` if late."""

    async def leave(self, member: str, patience: float) -> None:
        """Record that `member` leaves."""


class BeatStore(Protocol):
    """A store that keeps heartbeats."""

    def _heartbeats(self, group: str) -> BeatShare:
        """Return the heartbeats of the group with that name."""


class Store(BreakerStore, LimitStore, Protocol):
    """A store that keeps everything that policies share."""
