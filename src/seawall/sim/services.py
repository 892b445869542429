"""Simulated services, networks and stores: what guards protect a program from.

    vendor = world.service("vendor", workers=10, latency=Latency.exponential(0.05))
    await vendor.acall(key)                      # what a guard goes around
    world.at(20, vendor.down(), lasts=10)

A service works on what reached it also after its caller has left, as servers do. It raises
`ServiceFailed`, a `ConnectionError`, whatever the reason is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Final

from seawall import _checks as check
from seawall.clock import VirtualClock
from seawall.context import deadline, seconds_left
from seawall.errors import Rejected
from seawall.redis.fake import FakeStore
from seawall.sim.latency import Latency, LatencyLike
from seawall.sim.records import Change, ServiceRecord, Steps

if TYPE_CHECKING:
    from random import Random

    from seawall.guard import Guard

Handler = Callable[[Any], Awaitable[Any]]
App = Callable[[Any, Any, Any], Awaitable[Any]]
"""An ASGI app: `app(scope, receive, send)`."""

TOO_MANY: Final = 429
SERVER_ERROR: Final = 500


class ServiceFailed(ConnectionError):
    """A simulated service refused a call, lost it, or answered with an error."""


@dataclass(eq=False, slots=True)
class Fault:
    """A failure of a `share` of the calls whose key `when` accepts; a factor of inf hangs them."""

    factor: float = 1.0
    share: float = 1.0
    when: Callable[[Any], bool] | None = None
    error: Callable[[], Exception] | None = None

    def slows(self, rng: Random, key: Any) -> float:
        """Raise the error, or return by what factor the call is slower."""
        if self.when is not None and not self.when(key):
            return 1.0
        if self.share < 1.0 and rng.random() >= self.share:
            return 1.0
        if self.error is not None:
            raise self.error()
        return self.factor


@dataclass(eq=False, slots=True)
class _Request:
    """A call inside a service."""

    answer: asyncio.Future[Any]
    came: float
    key: Any
    seconds_left: float | None
    turn: asyncio.Future[None] | None = None  # set when it is its turn; for requests that are tasks

    def succeed(self, value: Any = None) -> None:
        if not self.answer.done():
            self.answer.set_result(value)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Service:
    """A service with workers and a queue; made by `World.service`."""

    def __init__(
        self,
        name: str,
        rng: Random,
        *,
        latency: LatencyLike = 0.0,
        workers: int | None = None,
        capacity: float | None = None,
        max_queue: int | None = None,
        network: Network | None = None,
        guard: Guard | None = None,
        handler: Handler | None = None,
        deadlines: bool = False,
        failing: float = 0.0,
    ) -> None:
        self.name = name
        self.latency = Latency.of(latency)
        self.workers: float = inf if workers is None else check.count("workers", workers)
        self.handler = handler
        self._rest = 0.0
        if capacity is not None:
            self._set_capacity(check.at_least("capacity", capacity, 0.001))
        self.max_queue: float = (
            inf if max_queue is None else check.count("max_queue", max_queue, minimum=0)
        )
        self.network = network
        self.guard = guard
        self.deadlines = check.flag("deadlines", deadlines)
        self.record = ServiceRecord(name, self.capacity, Steps(1.0, 0))
        self._rng = rng
        self._steps = Steps(1.0, 0)
        self._faults: list[Fault] = []  # what calls meet when they come
        self._slowdowns: list[Fault] = []  # what calls meet when it is their turn
        if check.ratio("failing", failing, zero=True):
            self._faults.append(Fault(share=failing, error=self._error("failed")))
        self._paused = 0
        self._running: dict[_Request, None] = {}
        self._queue: deque[_Request] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._context: Context = copy_context()

    def __repr__(self) -> str:
        return f"<Service {self.name!r}: {self.in_flight} calls>"

    @property
    def capacity(self) -> float | None:
        """Calls a second that all workers can serve; None without a bound, or if others decide."""
        if self.workers == inf or not self.latency.mean or self.handler is not None:
            return None
        return self.workers / self.latency.mean / (1 + self._rest)

    @property
    def in_flight(self) -> int:
        """Number of calls that it works on or that wait in its queue."""
        return len(self._running) + len(self._queue)

    def _set_capacity(self, capacity: float) -> None:
        """Have as many workers as it takes, which rest after each call to make it exact."""
        if self.workers < inf:
            raise ValueError(f"{self.name}: write workers= or capacity=, not both")
        if not self.latency.mean:
            raise ValueError(f"{self.name}: capacity= needs a latency with a mean, such as 0.05")
        self.workers = ceil(capacity * self.latency.mean)
        self._rest = self.workers / (capacity * self.latency.mean) - 1

    # The call

    async def acall(self, key: Any = None) -> Any:
        """Call the service, over its network if it has one."""
        if self.network is None:
            return await self._receive(key)
        await self.network.across()
        try:
            answer = await self._receive(key)
        except ServiceFailed:
            await self.network.across()
            raise
        await self.network.across()
        return answer

    async def _receive(self, key: Any) -> Any:
        loop = asyncio.get_running_loop()
        step = self._steps.now
        self.record.calls[step] += 1
        try:
            hangs = [fault.slows(self._rng, key) == inf for fault in self._faults]
            answer: asyncio.Future[Any] = loop.create_future()
            if not any(hangs):  # otherwise nobody will ever answer
                left = seconds_left() if self.deadlines else None
                self._accept(_Request(answer, loop.time(), key, left), loop)
            return await answer
        except Exception:
            self.record.failed[step] += 1
            raise

    def _accept(self, request: _Request, loop: asyncio.AbstractEventLoop) -> None:
        if self.guard is None and self.handler is None:
            self._enqueue(request)
            return
        # A server knows nothing of its caller's context.
        task = loop.create_task(self._serve(request), context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _enqueue(self, request: _Request) -> None:
        if len(self._running) < self.workers and not self._paused:
            self._start(request)
        elif len(self._queue) < self.max_queue:
            self._queue.append(request)
        else:
            raise ServiceFailed(f"the queue of {self.name} is full")

    def _start(self, request: _Request) -> None:
        self._running[request] = None
        if request.turn is not None:
            if not request.turn.done():
                request.turn.set_result(None)
            return
        seconds = self._seconds(request.key)
        asyncio.get_running_loop().call_later(seconds, self._finish, request, seconds)

    def _seconds(self, key: Any) -> float:
        """Return how long a call takes that begins now."""
        seconds = self.latency.draw(self._rng, self.in_flight)
        for slowdown in self._slowdowns:
            seconds *= slowdown.slows(self._rng, key)
        return seconds

    def _finish(self, request: _Request, seconds: float) -> None:
        if request in self._running:  # otherwise it was lost in a crash
            request.succeed()
            self._release(request, seconds)

    def _release(self, request: _Request, seconds: float) -> None:
        """Free the worker of a request that took `seconds`, after its rest."""
        if self._rest:
            loop = asyncio.get_running_loop()
            loop.call_later(seconds * self._rest, self._free, request)
        else:
            self._free(request)

    def _free(self, request: _Request) -> None:
        self._running.pop(request, None)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._queue and len(self._running) < self.workers and not self._paused:
            self._start(self._queue.popleft())

    async def _serve(self, request: _Request) -> None:
        """Serve a request as a task: inside the service's own guard, or with its handler."""
        work = self._work if self.guard is None else self.guard(self._work)
        try:
            if request.seconds_left is None:
                request.succeed(await work(request))
            else:
                with deadline(request.seconds_left):
                    request.succeed(await work(request))
        except (Rejected, TimeoutError, ConnectionError) as error:
            request.fail(ServiceFailed(f"{self.name}: {type(error).__name__}"))
        except Exception as error:  # noqa: BLE001 - a mistake in the handler is shown to the caller
            request.fail(error)

    async def _work(self, request: _Request) -> Any:
        loop = asyncio.get_running_loop()
        request.turn = loop.create_future()
        seconds = 0.0
        try:
            self._enqueue(request)
            await request.turn
            seconds = self._seconds(request.key)
            await pause(seconds)
            answer = None if self.handler is None else await self.handler(request.key)
            if request not in self._running:
                raise ServiceFailed(f"{self.name} crashed")
            return answer
        finally:
            if request in self._running:
                self._release(request, seconds)
            elif request in self._queue:
                self._queue.remove(request)

    # What can happen to it

    def down(self, *, hangs: bool = False, when: Callable[[Any], bool] | None = None) -> Change:
        """Refuse all calls, or those whose key `when` accepts; with `hangs`, never answer them."""
        of = "" if when is None else " for some keys"
        _check_when(when)
        if hangs:
            return _fault(f"{self.name} hangs{of}", self._faults, Fault(factor=inf, when=when))
        fault = Fault(error=self._error("is down"), when=when)
        return _fault(f"{self.name} is down{of}", self._faults, fault)

    def slow(self, factor: float = 10.0, *, share: float = 1.0) -> Change:
        """Take `factor` times as long for a `share` of the calls."""
        check.at_least("factor", factor, 0.0)
        text = f"{self.name} is {factor:g} times slower{_for_share(share)}"
        fault = Fault(factor=factor, share=check.ratio("share", share))
        return _fault(text, self._slowdowns, fault)

    def errors(
        self,
        share: float = 1.0,
        *,
        when: Callable[[Any], bool] | None = None,
        error: Callable[[], Exception] | None = None,
    ) -> Change:
        """Answer a `share` of the calls with an error; only those whose key `when` accepts."""
        text = f"{self.name} fails{_for_share(share)}{'' if when is None else ' of some keys'}"
        made = self._error("failed") if error is None else check.plain_function("error", error)
        _check_when(when)
        share = check.ratio("share", share)
        return _fault(text, self._faults, Fault(share=share, when=when, error=made))

    def crash(self) -> Change:
        """Lose all calls in progress and in the queue, and be down."""
        fault = Fault(error=self._error("is down"))

        def begin() -> None:
            lost = [*self._running, *self._queue]
            self._running.clear()
            self._queue.clear()
            self._faults.append(fault)
            for request in lost:
                request.fail(ServiceFailed(f"{self.name} crashed"))
                if request.turn is not None:
                    request.turn.cancel()

        return Change(f"{self.name} crashes", begin, lambda: self._faults.remove(fault))

    def stall(self) -> Change:
        """Begin no call: they wait in the queue, and those in progress end as usual."""

        def begin() -> None:
            self._paused += 1

        def end() -> None:
            self._paused -= 1
            self._start_waiting()

        return Change(f"{self.name} stands still", begin, end)

    def resize(self, workers: int) -> Change:
        """Have another number of workers."""
        check.count("workers", workers, minimum=0)
        before = self.workers

        def begin() -> None:
            nonlocal before
            before, self.workers = self.workers, workers
            self._start_waiting()

        def end() -> None:
            self.workers = before
            self._start_waiting()

        return Change(f"{self.name} has {workers} workers", begin, end)

    def _error(self, what: str) -> Callable[[], Exception]:
        return lambda: ServiceFailed(f"{self.name} {what}")

    # The run

    def begin(self, steps: Steps) -> None:
        """Count the calls of a run."""
        self._steps = steps
        self.record = ServiceRecord(self.name, self.capacity, steps)

    def sample(self, now: float) -> None:
        """Write down the calls in progress and the queue."""
        self.record.in_flight.append(len(self._running))
        self.record.queued.append(len(self._queue))
        self.record.queue_age.append(now - self._queue[0].came if self._queue else 0.0)


class Network:
    """The way to a service: each direction takes `delay`; made by `World.network`."""

    def __init__(self, name: str, rng: Random, delay: LatencyLike) -> None:
        self.name = name
        self.delay = Latency.of(delay)
        self._rng = rng
        self._faults: list[Fault] = []

    async def across(self) -> None:
        """Cross the network once."""
        slow = 1.0
        for fault in self._faults:
            slow *= fault.slows(self._rng, None)
        if slow == inf:
            await asyncio.get_running_loop().create_future()
        await pause(self.delay.draw(self._rng, 1) * slow)

    def partition(self, *, refuses: bool = False) -> Change:
        """Lose whatever is sent; or, with `refuses`, report immediately that there is no way."""
        error = (lambda: ServiceFailed(f"no route over {self.name}")) if refuses else None
        return _fault(f"{self.name} is cut", self._faults, Fault(factor=inf, error=error))

    def loss(self, share: float) -> Change:
        """Lose a `share` of what is sent: its caller never hears of it."""
        share = check.ratio("share", share)
        return _fault(
            f"{self.name} loses {100 * share:g} %", self._faults, Fault(factor=inf, share=share)
        )

    def slow(self, factor: float = 10.0) -> Change:
        """Take `factor` times as long."""
        check.at_least("factor", factor, 0.0)
        return _fault(f"{self.name} is {factor:g} times slower", self._faults, Fault(factor=factor))


class SimulatedStore(FakeStore):
    """A store that pods share, which can be lost; made by `World.store`."""

    def __init__(self, name: str, clock: VirtualClock) -> None:
        super().__init__(name=name, clock=clock)

    def lost(self) -> Change:
        """Be unreachable: shared policies follow their `on_store_failure`."""
        return Change(f"{self.name} is lost", self.fail, self.recover)


def asgi(app: App, path: str = "/", *, method: str = "GET") -> Handler:
    """Return a handler that sends each call as a request to an ASGI app, such as an `Edge`.

    A response of 429 or of 500 and more is a failure. The key of the call is the header `key`.
    """
    check.function("app", app)

    async def handle(key: Any) -> int:
        status = 0
        was_read = False

        async def receive() -> dict[str, Any]:
            nonlocal was_read
            if was_read:  # the client says no more, and stays
                await asyncio.get_running_loop().create_future()
            was_read = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"sim"), (b"key", str(key).encode())],
            "client": ("sim", 0),
            "server": ("sim", 80),
        }
        await app(scope, receive, send)
        if status == TOO_MANY or status >= SERVER_ERROR:
            raise ServiceFailed(f"status {status}")
        return status

    return handle


async def pause(seconds: float) -> None:
    """Let virtual time pass."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, _wake, over)
    try:
        await over
    finally:
        timer.cancel()


def _wake(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


def _fault(text: str, faults: list[Fault], fault: Fault) -> Change:
    return Change(text, lambda: faults.append(fault), lambda: faults.remove(fault))


def _for_share(share: float) -> str:
    return "" if share == 1.0 else f" for {100 * share:g} % of the calls"


def _check_when(when: Callable[[Any], bool] | None) -> None:
    if when is not None:
        check.plain_function("when", when)
