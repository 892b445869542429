"""The resources of a pool: which exist, which are idle, and how one is closed.

Promises:
- Connecting, borrowed, idle and closing resources never outnumber the slots (after a pool was made
  smaller, the former number of slots).
- A resource of one event loop is never handed to another.
- Each is closed once, in the background, within a bounded time.
- A child process forgets the resources of its parent.

A slot is held while a resource is connected, used or closed. A returning borrower first puts the
resource on its stack and then gives the slot back; a borrower with a slot takes an idle resource if
there is one. So the slots bound the resources, and a resource changes hands without a lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final

from seawall._forks import leave_to_parent, survives_fork
from seawall.resources.pool.closing import Closing
from seawall.runtime.mutex import Mutex
from seawall.runtime.process import running_loop
from seawall.runtime.slots import AnonymousSlots

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from types import CodeType


class Stack(deque["Resource"]):
    """Idle resources, with a way to pop the top one that no signal handler can interrupt.

    CPython runs signal handlers after a call of a C function, but not where a `for` takes the next
    item of an iterator. `for resource in stack.takes:` takes the one used last, and raises
    `IndexError` if there is none.
    """

    __slots__ = ("takes",)

    def __init__(self) -> None:
        super().__init__()
        self.takes: Iterator[Resource] = iter(self.pop, _NEVER)


_NEVER: Final[Any] = object()  # a sentinel that equals nothing in a stack


@dataclass(slots=True, eq=False)
class Resource:
    """One resource of a pool and its state."""

    stack: Stack  # where it is while it is idle
    pooled: bool = True  # whether it belongs to the pool; otherwise it is used once
    value: Any = None
    alive: bool = True  # whether its closing has not started
    connected: bool = False  # whether there is something to close
    loop: AbstractEventLoop | None = None  # that it belongs to; None after a plain `connect`
    dies_at: float = -inf
    idle_until: float = -inf
    since: float | None = None  # time at which it was borrowed; None if it is not
    borrower: tuple[CodeType, int] | None = None  # the last one: code object, instruction
    reported: float | None = None  # start time of the borrow that was reported as a leak

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
        """Without `close`, the resource's own method is called."""
        self.name = name
        self.slots = slots
        self.close_timeout = close_timeout
        self.now = now
        self._close = close
        self.causes: Counter[str] = Counter()  # number of closed resources by cause
        self.close_failed = 0
        self._begin()
        survives_fork(self)

    def _begin(self) -> None:
        # Inside a critical section, the garbage collector can only start or end the closing of a
        # resource, which commutes with everything here.
        self.live: set[Resource] = set()  # connecting, borrowed and idle resources
        self.substitutes: set[Resource] = set()  # borrowed resources that do not belong to the pool
        self.closing: dict[Resource, Closing] = {}
        self.lost: deque[Resource] = deque()  # the borrower was collected
        self.anywhere = Stack()
        self.stacks: dict[Any, Stack] = {None: self.anywhere}  # by loop, the one used last on top
        self._emptied: list[Callable[[], bool]] = []

    @property
    def mutex(self) -> Mutex:
        """The lock of the slots; with two, the garbage collector could cause a deadlock."""
        return self.slots.mutex

    @property
    def size(self) -> int:
        """Number of resources that count towards the pool's size."""
        return len(self.live) + sum(resource.pooled for resource in list(self.closing))

    @property
    def idle(self) -> int:
        """Number of idle resources."""
        return sum(len(stack) for stack in list(self.stacks.values()))

    @property
    def empty(self) -> bool:
        """Whether nothing is left."""
        return not (self.live or self.substitutes or self.closing)

    def borrowed(self) -> list[tuple[float, Resource]]:
        """Return the borrowed resources, each with its start time, in any order."""
        known = [*list(self.live), *list(self.substitutes)]
        return [(since, r) for r in known if (since := r.since) is not None]

    def pop(self, loop: AbstractEventLoop | None) -> Resource | None:
        """Pop the most recently used idle resource that may be used in `loop`, if any."""
        for stack in (self.stacks.get(loop), self.anywhere):
            if stack:
                try:
                    return stack.pop()
                except IndexError:
                    pass
        return None

    def lend(self, loop: AbstractEventLoop | None, borrower: Any) -> None:
        """Give `borrower` the most recently used idle resource that `loop` can use, if any."""
        for stack in (self.stacks.get(loop), self.anywhere):
            if stack:
                try:
                    for resource in stack.takes:
                        borrower.resource = resource
                        return
                except IndexError:
                    pass

    def reserve(self, most: int, borrower: Any = None) -> Resource | None:
        """Return a new unconnected resource; None if there are `most` and one can be closed.

        `borrower` gets it before it counts. If none can be closed, the caller's slot alone
        guarantees that there is room.
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
        """Return a resource for one use, beyond the pool's size."""
        resource = Resource(self.anywhere, pooled=False)
        self.substitutes.add(resource)
        return resource

    def belongs_to(self, resource: Resource, loop: AbstractEventLoop) -> None:
        """Record that only `loop` can use `resource`."""
        if loop not in self.stacks:
            self.forget_closed_loops()
        resource.loop = loop
        resource.stack = self.stacks.setdefault(loop, Stack())

    def take_lost(self) -> Resource | None:
        """Take a resource whose borrower is gone, if there is one."""
        try:
            return self.lost.popleft()
        except IndexError:
            return None

    def evict(self, loop: AbstractEventLoop | None) -> tuple[Resource, str] | None:
        """Take out a resource that is useless in `loop`, to be closed; return it and the cause."""
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
        """Give the caller's slot to a closing that has none, as happens after a resize."""
        with self.mutex:
            for closing in self._without_slot():
                closing.adopt()
                return closing
        return None

    def expired(self, now: float) -> Iterator[tuple[Resource, str]]:
        """Yield resources that have been idle or alive for too long, without taking them out."""
        for stack in list(self.stacks.values()):
            for resource in list(stack):
                if now >= resource.idle_until:
                    yield resource, "lifetime" if now >= resource.dies_at else "idle"

    def take_out(self, resource: Resource) -> bool:
        """Remove an idle resource from its stack; return False if another thread was faster."""
        try:
            resource.stack.remove(resource)
        except ValueError:
            return False
        return True

    def take_oldest(self) -> Resource | None:
        """Take out the resource that has been idle longest, if there is one."""
        bottoms = [(stack[0].idle_until, stack) for stack in list(self.stacks.values()) if stack]
        for _, stack in sorted(bottoms, key=lambda pair: pair[0]):
            try:
                return stack.popleft()
            except IndexError:
                pass
        return None

    def forget(self, resource: Resource) -> None:
        """Remove a resource that is closed or was never connected."""
        resource.alive = False
        self.live.discard(resource)
        self.substitutes.discard(resource)
        self._look_whether_empty()

    def forget_closed_loops(self) -> int:
        """Forget resources of closed loops, where nothing can run any more; return how many."""
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
        """Return whether something can only be closed in the loop that runs in this thread."""
        loops = {resource.loop for resource in (*list(self.live), *list(self.substitutes))}
        loops |= {closing.loop for closing in list(self.closing.values())}
        loops.discard(None)
        return bool(loops) and running_loop() in loops

    def retire(
        self, resource: Resource, cause: str, *, slot: bool = True, owned: bool = False
    ) -> Closing | None:
        """Close a resource; return the closing if it takes time.

        With `slot`, the caller's slot goes with it and becomes free at the end. With `owned`, the
        caller wants it back: it still has it, or waits for the returned closing.
        """
        with self.mutex:
            first = resource.alive
            if first:
                closing = Closing(self, resource, slot=slot, owned=owned)
                self.causes[cause] += 1
                # These two lines make no call, so no signal handler can run between them.
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
        """Call the function that closes a resource; return an awaitable if that is async."""
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

    def forget_waiter(self, wake: Callable[[], bool]) -> None:
        """Undo `when_empty`."""
        with self.mutex:
            if wake in self._emptied:
                self._emptied.remove(wake)

    def _look_whether_empty(self) -> None:
        if self._emptied and self.empty:
            self.mutex.do(self._tell_emptied)

    def _tell_emptied(self) -> None:
        while self._emptied and self.empty:
            self._emptied.pop()()

    def closed(self, closing: Closing) -> None:
        """Remove a resource whose closing is over."""
        self.live.discard(closing.resource)  # still there if a signal interrupted its removal
        self.substitutes.discard(closing.resource)
        self.closing.pop(closing.resource, None)
        self._look_whether_empty()

    def _after_fork(self) -> None:
        """Forget all resources in a child process without closing them: the parent uses them."""
        known = [*self.live, *self.substitutes, *self.closing, *self.lost]
        for resource in known:
            resource.alive = False
        leave_to_parent(*known)
        self._begin()
