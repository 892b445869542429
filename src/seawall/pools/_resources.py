"""The resources of a pool: which there are, which lie idle, and how one is closed.

Promises: resources that are connecting, borrowed, idle or being closed are never more than there
are slots (after a pool was made smaller, than there were); a resource of one event loop is never
handed to another; each is closed once, on the side, within a bounded time; a child process forgets
those of its parent.

Whoever connects, uses or closes a resource holds a slot for it. Who gives a resource back lays it
down first and gives the slot back second; who has a slot takes an idle resource if there is one.
So the slots bound the resources, and a resource changes hands without a lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING, Any, Final

from seawall.pools._closing import Closing, running_loop
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.slots import AnonymousSlots

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from types import CodeType


class Stack(deque["Resource"]):
    """Idle resources, and a way to take the top one that lets no signal in after it.

    CPython lets signal handlers in after a call of a C function, and not where a `for` takes the
    next of an iterator. `for resource in stack.takes:` takes the one used last, and raises
    `IndexError` if there is none.
    """

    __slots__ = ("takes",)

    def __init__(self) -> None:
        super().__init__()
        self.takes: Iterator[Resource] = iter(self.pop, _NEVER)


_NEVER: Final[Any] = object()
"""Nothing in a stack is equal to it."""

_inherited: Final[list[Resource]] = []
"""What a parent process left: dropped, it might say goodbye on a connection that is not ours."""


class Resource:
    """One resource of a pool, and what is known of it."""

    __slots__ = (
        "alive",
        "borrower",
        "connected",
        "dies_at",
        "idle_until",
        "loop",
        "pooled",
        "reported",
        "since",
        "stack",
        "value",
    )

    def __init__(self, stack: Stack, *, pooled: bool = True) -> None:
        """Be connected soon; lie in `stack` when idle. Without `pooled`, be used once."""
        self.value: Any = None
        self.stack: Stack = stack
        self.pooled = pooled
        self.alive = True
        """Whether nobody has begun to close it."""
        self.connected = False
        """Whether there is something to close."""
        self.loop: AbstractEventLoop | None = None
        """The loop that it belongs to; None if it was made by a plain function."""
        self.dies_at = -inf
        self.idle_until = -inf
        self.since: float | None = None
        """Since when it is borrowed; None if it is not."""
        self.borrower: tuple[CodeType, int] | None = None
        """The place that borrowed it last: code, and the instruction in it."""
        self.reported: float | None = None
        """The borrow that was reported as a leak, by its beginning."""

    @property
    def place(self) -> str:
        """The line of code that borrowed it last."""
        if self.borrower is None:
            return "unknown"
        code, instruction = self.borrower
        line = 0
        for start, end, number in code.co_lines():
            if start <= instruction < end:
                line = number or 0
        return f"{code.co_filename}:{line} in {code.co_name}"


class Stock:
    """All resources of one pool."""

    def __init__(
        self,
        name: str,
        slots: AnonymousSlots,
        close: Callable[[Any], Any] | None,
        close_timeout: float,
        now: Callable[[], float],
    ) -> None:
        """Have none yet. `close` takes a resource; without it, its own method is called."""
        self.name = name
        self.slots = slots
        self.close_timeout = close_timeout
        self.now = now
        self._close = close
        self.causes: Counter[str] = Counter()
        """Why resources were closed, and how many."""
        self.close_failed = 0
        self._begin()
        survives_fork(self)

    def _begin(self) -> None:
        # What the collector may do inside a section is to begin or end the closing of a resource,
        # and that commutes with everything here.
        self.live: set[Resource] = set()
        """Connecting, borrowed and idle ones."""
        self.substitutes: set[Resource] = set()
        """Borrowed ones that do not belong to the pool."""
        self.closing: dict[Resource, Closing] = {}
        self.lost: deque[Resource] = deque()
        """Those whose borrower is gone without giving them back."""
        self.anywhere = Stack()
        self.stacks: dict[Any, Stack] = {None: self.anywhere}
        """Idle ones by the loop that they belong to, the one used last on top."""
        self._emptied: list[Callable[[], bool]] = []

    @property
    def mutex(self) -> Mutex:
        """That of the slots: with two, a collector that comes inside one may want the other."""
        return self.slots.mutex

    @property
    def size(self) -> int:
        """How many count towards the pool's size."""
        return len(self.live) + sum(resource.pooled for resource in list(self.closing))

    @property
    def idle(self) -> int:
        """How many lie unused."""
        return sum(len(stack) for stack in list(self.stacks.values()))

    @property
    def empty(self) -> bool:
        """Whether nothing is left."""
        return not (self.live or self.substitutes or self.closing)

    def borrowed(self) -> list[tuple[float, Resource]]:
        """Return those that are borrowed now, each with the instant since when, in any order."""
        known = [*list(self.live), *list(self.substitutes)]
        return [(since, r) for r in known if (since := r.since) is not None]

    def has_idle(self, loop: AbstractEventLoop | None) -> bool:
        """Tell whether an idle one lies here that may be used in `loop`."""
        return bool(self.stacks.get(loop) or self.anywhere)

    def pop(self, loop: AbstractEventLoop | None) -> Resource | None:
        """Take the idle one that was used last and may be used in `loop`, if there is one."""
        for stack in (self.stacks.get(loop), self.anywhere):
            if stack:
                try:
                    return stack.pop()
                except IndexError:
                    pass
        return None

    def lend(self, loop: AbstractEventLoop | None, borrower: Any) -> None:
        """Give `borrower` the idle one that was used last and may be used in `loop`, if any is."""
        for stack in (self.stacks.get(loop), self.anywhere):
            if stack:
                try:
                    for resource in stack.takes:
                        borrower.resource = resource
                        return
                except IndexError:
                    pass

    def reserve(self, most: int, borrower: Any = None) -> Resource | None:
        """Return a new one to be connected; None if there are `most` and one of them has to go.

        `borrower` has it before it counts. Where none can go, the caller's slot alone says that
        there is room.
        """
        if self.size >= most:
            self.forget_closed_loops()
        with self.mutex:
            if self.size >= most and (self.idle or self.lost or self._without_slot()):
                return None
            resource = Resource(self.anywhere)
            if borrower is not None:
                borrower.resource = resource
            self.live.add(resource)
            return resource

    def substitute(self) -> Resource:
        """Return one to be used once, beyond the pool's size."""
        resource = Resource(self.anywhere, pooled=False)
        self.substitutes.add(resource)
        return resource

    def belongs_to(self, resource: Resource, loop: AbstractEventLoop) -> None:
        """Learn that only `loop` can use `resource`."""
        if loop not in self.stacks:
            self.forget_closed_loops()
        resource.loop = loop
        resource.stack = self.stacks.setdefault(loop, Stack())

    def take_lost(self) -> Resource | None:
        """Take one whose borrower is gone, if there is one."""
        try:
            return self.lost.popleft()
        except IndexError:
            return None

    def take_lost_substitute(self) -> Resource | None:
        """Take one that does not belong to the pool, and whose borrower is gone."""
        for lost in list(self.lost):
            if not lost.pooled:
                try:
                    self.lost.remove(lost)
                except ValueError:  # somebody was faster
                    continue
                return lost
        return None

    def evict(self, loop: AbstractEventLoop | None) -> tuple[Resource, str] | None:
        """Take out one that is of no use in `loop`, to be closed, and say why."""
        lost = self.take_lost()
        if lost is not None:
            return lost, "leaked"
        for other, stack in list(self.stacks.items()):
            if other is not None and other is not loop:
                try:
                    return stack.popleft(), "evicted"
                except IndexError:
                    pass
        return None

    def _without_slot(self) -> list[Closing]:
        return [c for r, c in list(self.closing.items()) if r.pooled and not c.has_slot]

    def adopt(self) -> Closing | None:
        """Give the caller's slot to a closing that has none, as there are after a resize."""
        with self.mutex:
            for closing in self._without_slot():
                closing.adopt()
                return closing
        return None

    def expired(self, now: float) -> Iterator[tuple[Resource, str]]:
        """Yield those that have been idle, or alive, for too long; each is still where it was."""
        for stack in list(self.stacks.values()):
            for resource in list(stack):
                if now >= resource.idle_until:
                    yield resource, "lifetime" if now >= resource.dies_at else "idle"

    def take_out(self, resource: Resource) -> bool:
        """Take an idle one from where it lies; False if somebody was faster."""
        try:
            resource.stack.remove(resource)
        except ValueError:
            return False
        return True

    def spare(self) -> Resource | None:
        """Take out the idle one that lies longest, if there is one."""
        bottoms = [(stack[0].idle_until, stack) for stack in list(self.stacks.values()) if stack]
        for _, stack in sorted(bottoms, key=lambda pair: pair[0]):
            try:
                return stack.popleft()
            except IndexError:
                pass
        return None

    def forget(self, resource: Resource) -> None:
        """Know of a resource no more: it is closed, or never was."""
        resource.alive = False
        self.live.discard(resource)
        self.substitutes.discard(resource)
        self._look_whether_empty()

    def forget_closed_loops(self) -> int:
        """Forget what belongs to loops in which nothing can be done any more; return how many."""
        for closing in list(self.closing.values()):
            closing.look()
        forgotten = 0
        for loop in [known for known in list(self.stacks) if known and known.is_closed()]:
            self.stacks.pop(loop, None)
        for resource in list(self.live):
            if resource.loop is not None and resource.loop.is_closed():
                self.causes["loop closed"] += 1
                self.forget(resource)
                forgotten += 1
        return forgotten

    def needs_running_loop(self) -> bool:
        """Tell whether something can only be closed in the loop that runs in this thread."""
        loops = {resource.loop for resource in (*list(self.live), *list(self.substitutes))}
        loops |= {closing.loop for closing in list(self.closing.values())}
        loops.discard(None)
        return bool(loops) and running_loop() in loops

    def retire(
        self, resource: Resource, cause: str, *, slot: bool = True, owned: bool = False
    ) -> Closing | None:
        """Close a resource; return the closing if it takes time.

        With `slot`, the caller's slot goes with it and comes free at the end. With `owned`, the
        caller wants it back: it has it still, or waits for the closing that is returned.
        """
        with self.mutex:
            first = resource.alive
            if first:
                closing = Closing(self, resource, slot=slot, owned=owned)
                self.causes[cause] += 1
                # Nothing is called in these two lines: no signal is let in between.
                resource.alive = False
                self.closing[resource] = closing
                self.live.discard(resource)
                self.substitutes.discard(resource)
        if not first:
            if slot and not owned:
                self.slots.give_back()
            return None
        closing.begin()
        return None if closing.done else closing

    def close(self, resource: Resource) -> Any:
        """Call what closes a resource; returns an awaitable if that is async."""
        if self._close is not None:
            return self._close(resource.value)
        names = ("aclose", "close") if resource.loop is not None else ("close",)
        for name in names:
            method = getattr(resource.value, name, None)
            if method is not None:
                return method()
        return None

    def when_empty(self, wake: Callable[[], bool]) -> None:
        """Call `wake()` once, as soon as nothing is left."""
        with self.mutex:
            self._emptied.append(wake)
        self._look_whether_empty()

    def _look_whether_empty(self) -> None:
        if self._emptied and self.empty:
            self.mutex.do(self._tell_emptied)

    def _tell_emptied(self) -> None:
        while self._emptied and self.empty:
            self._emptied.pop()()

    def closed(self, closing: Closing) -> None:
        """Learn that a closing is over."""
        self.live.discard(closing.resource)  # where a signal came as it was taken out
        self.substitutes.discard(closing.resource)
        self.closing.pop(closing.resource, None)
        self._look_whether_empty()

    def _after_fork(self) -> None:
        """Forget all in a child process, and close nothing: the parent goes on using it."""
        known = [*self.live, *self.substitutes, *self.closing, *self.lost]
        for resource in known:
            resource.alive = False
        _inherited.extend(known)
        self._begin()
