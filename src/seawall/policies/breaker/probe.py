"""A breaker's own probes: a user's function that runs while it is open and there are no calls.

Promises:
- A probe needs a permit like any call, also from the store: while half-open, no more probes run
  than configured, and of pods that share a breaker only those probe that the store allows to.
- A probe that does not end in time has failed. A plain function runs in a daemon thread, and is
  then abandoned.
- One thread serves all breakers of the process. It probes only while a breaker is open whose guards
  are not closed, and in a child process starts with the first call that is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from seawall._forks import survives_fork
from seawall.clock import SYSTEM, Clock, VirtualClock
from seawall.models.breaker.probes import CallVerdict, Probe
from seawall.models.breaker.state import BreakerModel, BreakerRefusal, BreakerState, Ticket
from seawall.runtime.background import Background, Handle
from seawall.runtime.driver import CallbackWaiter, wait_async
from seawall.runtime.functions import is_async
from seawall.runtime.layers import FAILED
from seawall.runtime.mutex import Mutex
from seawall.runtime.policy import bindings_of
from seawall.runtime.workers import ThreadJob, WorkerPool

if TYPE_CHECKING:
    from seawall.policies.breaker.gate import BreakerGate
    from seawall.policies.breaker.policy import Breaker

AT_ONCE: Final = 16  # maximum number of concurrent probes of one breaker


class _ProbeThread:
    """The thread that runs the probes of all breakers."""

    def __init__(self) -> None:
        self.background = Background(owner="probes")
        self.pool = WorkerPool(AT_ONCE, 0, "probes")
        survives_fork(self)

    def _after_fork(self) -> None:
        self.background.after_fork()


_thread = _ProbeThread()


class Prober:
    """The probes of one breaker, which it does not keep alive."""

    def __init__(self, policy: Breaker, probe: Callable[..., Any], every: float) -> None:
        self._policy = ref(policy)
        self._probe = probe
        self._every = every
        self._mutex = Mutex()
        self._handle: Handle | None = None
        survives_fork(self)

    def begin(self) -> None:
        """Ensure that probes run while the breaker is open. Called often."""
        if self._handle is not None and _thread.background.loop is not None:
            return
        gate = self._gate()
        if gate is None or isinstance(gate.host.clock, VirtualClock):
            return  # there is no background work in virtual time
        with self._mutex:
            if self._handle is None:
                self._handle = _thread.background.every(self._every, self._run)
        _thread.background.start()

    async def _run(self) -> None:
        """Probe open breakers. If there are none, stop until `begin`."""
        if await self.probe_all():
            return
        with self._mutex:
            handle, self._handle = self._handle, None
        if handle is not None:
            handle.stop()
        policy = self._policy()
        if policy is not None and self._open(policy):
            self.begin()  # it has opened meanwhile

    async def probe_all(self) -> bool:
        """Probe each key that may be probed now.

        Return False if none is open, or no guard is left.
        """
        policy, gate = self._policy(), self._gate()
        if policy is None or gate is None:
            return False
        room = asyncio.Semaphore(AT_ONCE)
        broken = self._open(policy)

        async def one(key: Hashable, model: BreakerModel) -> None:
            async with room:
                await self._probe_one(gate, key, model)

        await asyncio.gather(*(one(key, model) for key, model in broken.items()))
        return bool(self._open(policy))

    @staticmethod
    def _open(policy: Breaker) -> dict[Hashable, BreakerModel]:
        broken = (BreakerState.OPEN, BreakerState.HALF_OPEN)
        return {key: model for key, model in policy.models().items() if model.state in broken}

    def _gate(self) -> BreakerGate | None:
        """Return the breaker in one of its guards that is not closed."""
        policy = self._policy()
        bindings: list[Any] = [] if policy is None else bindings_of(policy)
        living = (one for one in bindings if not getattr(one.host, "closed", False))
        return next(living, None)

    async def _probe_one(self, gate: BreakerGate, key: Hashable, model: BreakerModel) -> None:
        clock = gate.host.clock
        ticket = await self._permit(gate, key, model, clock)
        if isinstance(ticket, BreakerRefusal):
            return
        error: Exception | None = None
        verdict = CallVerdict.NONE
        try:
            if isinstance(ticket, Probe):  # otherwise it was closed meanwhile
                verdict = CallVerdict.SUCCESS
                await self._ask(gate, key)
        except Exception as failed:  # noqa: BLE001 - reported as the breaker's failure
            error, verdict = failed, CallVerdict.FAILURE
        except BaseException:
            verdict = CallVerdict.NONE
            raise
        finally:
            gate.settle(model, key, ticket, verdict, (FAILED, error), clock.now())
            del error

    async def _permit(
        self, gate: BreakerGate, key: Hashable, model: BreakerModel, clock: Clock
    ) -> Ticket | BreakerRefusal:
        answer = gate.admit(model, key, clock.now())
        share = gate.policy._share
        if share is None or not isinstance(answer, BreakerRefusal) or answer.reason != "unknown":
            return answer
        share.begin()
        # Ask like a thread: then the store needs no connection in this loop, which never ends.
        waiter = share.ask("sync", model, clock, lambda permit: permit)
        permit: Ticket | BreakerRefusal = await wait_async(waiter, clock)
        return permit

    async def _ask(self, gate: BreakerGate, key: Hashable) -> None:
        """Call the user's function. Raise if it fails or takes too long."""
        args = () if gate.policy.key is None else (key,)
        limit = min(self._every, gate.policy.settings.probe_timeout)
        async with asyncio.timeout(limit):
            if is_async(self._probe):
                passed = await self._probe(*args)
            else:
                passed = await _in_thread(self._probe, args)
                # For example from a lambda around an async function.
                if hasattr(passed, "__await__"):
                    passed = await passed
        if passed is False:
            raise ProbeFailedError("the probe returned False")

    def _after_fork(self) -> None:
        self._mutex = Mutex()


class ProbeFailedError(Exception):
    """The user's probe reported that calls would fail."""


async def _in_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a plain function in a thread. If cancelled, abandon the thread."""
    jobs: list[ThreadJob] = []

    def start(wake: Callable[[], bool]) -> None:
        job = ThreadJob(function, args, {}, wake)
        if not _thread.pool.submit(job):
            raise ProbeFailedError("all threads are taken by probes that do not end")
        jobs.append(job)

    def give_up(_wake: Callable[[], bool]) -> None:
        for job in jobs:
            _thread.pool.give_up(job)  # does nothing if it has ended

    await wait_async(CallbackWaiter(start, leave=give_up), SYSTEM)
    return jobs[0].result()
