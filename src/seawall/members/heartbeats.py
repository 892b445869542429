"""Heartbeats: failure detection for named peers.

A peer sends heartbeats, is asked by a probe, or writes to a store that all pods share. Each peer
has its own detector, so fast and slow peers are each judged by what is usual for them.
`models.detection.peer` has the rules, without clock, lock or loop; `Heartbeats` runs them.

Promises:
- A peer goes from suspected to alive, confirmed or left exactly once, and never to the state that
  it is in.
- A peer is suspected only for its own silence: not while this process was paused or for as long
  afterwards, a probed peer not before it was probed, and a peer in a shared store only while the
  store answers.
- At most one probe of a peer runs at a time, and at most `AT_ONCE` in total. A hanging probe
  affects only its own peer.
- At most `max_peers` are kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from math import inf
from random import Random
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Self

from seawall import _checks as check
from seawall import registry
from seawall._failures import described
from seawall._forks import survives_fork
from seawall.clock import Clock, VirtualClock, check_clock, current_clock, new_random
from seawall.errors import StoreUnavailable
from seawall.members.group import Group, MemberView, Subscriber
from seawall.members.probes import ProbeRunner, checked_text
from seawall.models.detection.detectors import DetectorSettings, phi_accrual
from seawall.models.detection.peer import ALIVE, CONFIRMED, LEFT, SUSPECTED, Peer, PeerChange
from seawall.runtime.abandon import end, is_cancelled
from seawall.runtime.background import Background
from seawall.runtime.driver import sleep_async
from seawall.runtime.mutex import Mutex
from seawall.runtime.store import BeatShare, BeatStore, MemberBeat, Sighting

if TYPE_CHECKING:
    from seawall.resources.executors.executors import IoPool

AT_ONCE: Final = 256
"""Maximum number of concurrent probes."""
THREADS: Final = 32
"""Maximum number of threads for probes that are plain functions."""
JITTER: Final = 0.2
"""Random share of the probe interval, so that pods do not probe at the same instant."""
EXCUSED: Final = 3
"""Evaluations later than this number of steps are postponed."""
GOODBYE: Final = 1.0
"""Timeout in seconds for reporting the end of this process to the store."""
LONGEST_STEP: Final = 1.0
"""Maximum number of seconds between two evaluations."""
LONGEST_NAME: Final = 256
"""Maximum number of characters of a peer's name."""

Probe = Callable[[], Any]
"""`probe()` or `await probe()`: raises or returns False if the peer did not answer."""


class _Watched(Peer):
    """A peer and how it is observed."""

    __slots__ = ("address", "is_shared", "probe", "round_trip", "stamp")

    def __init__(self, name: str, settings: DetectorSettings, now: float) -> None:
        super().__init__(name, settings, now)
        self.address = ""
        self.probe: ProbeRunner | None = None
        self.round_trip: float | None = None
        self.is_shared = False
        """Whether it is observed through the store only."""
        self.stamp = -1.0
        """Stamp of its last heartbeat in the store."""

    def view(self, now: float) -> MemberView:
        """Return its current state."""
        detector = self.detector
        return MemberView(
            self.name,
            self.state,
            self.since,
            address=self.address,
            level=0.0 if self.state is LEFT else detector.level(now),
            threshold=detector.threshold,
            round_trip=self.round_trip,
            reason=self.reason,
        )


class Heartbeats:
    """Failure detector for named peers: alive, suspected, confirmed as failed, or left."""

    def __init__(
        self,
        name: str,
        *,
        detector: DetectorSettings | None = None,
        every: float = 1.0,
        timeout: float | None = None,
        confirm_after: float = 10.0,
        pause_after: float = 5.0,
        max_peers: int = 1000,
        shared: BeatStore | None = None,
        own: str = "",
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """Watch peers whose heartbeats arrive, or whose probes run, about every `every` seconds.

        Each peer has its own `detector`, by default `phi_accrual` fitted to `every`, which
        tolerates one lost heartbeat. A suspicion that lasts for `confirm_after` seconds is
        confirmed. A probe that takes longer than `timeout` (default `every`) has failed.

        If two evaluations are more than `pause_after` seconds apart, this process itself was
        paused, and for the same time again no peer is suspected or confirmed.

        With a `shared` store, such as a `RedisStore`, this process writes a heartbeat under the
        name `own` (random by default) every `every` seconds, and watches all other processes that
        do so in a group of this `name`.
        """
        self.name = checked_text("name", name, "orders")
        self.every = check.seconds("every", every)
        if detector is None:
            detector = phi_accrual(first_interval=self.every, acceptable_pause=self.every)
        self.detector = _settings(detector)
        self.timeout = self.every if timeout is None else check.seconds("timeout", timeout)
        self.confirm_after = check.seconds("confirm_after", confirm_after, zero=True)
        self._step = min(self.every / 4, LONGEST_STEP)
        self.pause_after = check.at_least("pause_after", pause_after, 2 * self._step)
        self.max_peers = check.count("max_peers", max_peers)
        if shared is not None and not callable(getattr(shared, "_heartbeats", None)):
            raise TypeError(f"shared={shared!r}: pass a RedisStore")
        if own != "" and shared is None:
            raise TypeError(f"own={own!r}: only a shared store hears of it; write shared= as well")
        self._is_named = own != ""
        self.own = "" if shared is None else _peer_name("own", token_hex(8) if own == "" else own)
        """The name of this process in the shared store; empty without one."""
        self._share = None if shared is None else shared._heartbeats(self.name)
        self._store_read_at = 0.0
        """Start time of the last query that the store answered."""
        self._has_missed = False
        """Whether a later query of the store failed."""
        self._shared_calm_until = -inf
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._rng = new_random(self.name) if rng is None else check.chance("rng", rng)
        self.group = Group(self.name)
        self._mutex = Mutex()
        self._peers: dict[str, _Watched] = {}
        self._evaluated_at: float | None = None
        self._calm_until = -inf
        self._outbox: deque[Callable[[], None]] = deque()
        self._is_publishing = False
        self._sent = self._received = self._refused = 0
        self._background: Background | None = None
        self._task: asyncio.Task[None] | None = None
        self._threads: IoPool | None = None
        registry.enter(self, "members", self.name)
        survives_fork(self)

    def __repr__(self) -> str:
        return f"<Heartbeats {self.name!r}: {len(self._peers)} peers, {len(self.alive)} present>"

    # Watched peers

    def watch(
        self,
        peer: str,
        probe: Probe | None = None,
        *,
        detector: DetectorSettings | None = None,
        address: str = "",
    ) -> None:
        """Watch `peer`, by the heartbeats that arrive or by calling `probe` periodically.

        `probe` is `http_probe(url)`, `tcp_probe(host, port)`, `grpc_probe(target)`, or your own
        function without arguments, plain or async: the peer is alive unless it raises, returns
        False or takes too long. A peer that is already watched keeps its state and takes on the new
        settings. One that had left is expected again.
        """
        name = _peer_name("peer", peer)
        runner = None if probe is None else ProbeRunner(probe, self._pool)
        settings = self.detector if detector is None else _settings(detector)
        if not isinstance(address, str):
            raise TypeError(f"address={address!r}: write text, such as address='10.0.0.1:8080'")
        with self._mutex:
            now = self._clock.now()
            known = self._peers.get(name)
            if known is None:
                self._make_room(now)
                known = self._peers[name] = _Watched(name, settings, now)
            elif settings is not known.settings or known.is_probed is (runner is None):
                known.settings = settings
                known.begin(now)
            known.probe = runner
            known.is_probed = runner is not None
            known.is_shared = known.is_shared and runner is None
            known.address = address
            self._post(known.rejoin(now))
        self._publish()

    def _make_room(self, now: float) -> None:
        """Evict the peer that has been gone longest if the limit is reached; under the lock."""
        if len(self._peers) < self.max_peers:
            return
        gone = [peer for peer in self._peers.values() if peer.state in (LEFT, CONFIRMED)]
        if not gone:
            raise ValueError(
                f"{self.name!r} watches max_peers={self.max_peers} peers, and all are present:"
                " forget() some, or write a larger max_peers"
            )
        longest = min(gone, key=lambda peer: peer.since)
        del self._peers[longest.name]
        self._post(longest.leave("forgotten", now))

    def forget(self, peer: str) -> bool:
        """Stop watching `peer`; subscribers see that it left.

        Return False if it was not watched.
        """
        with self._mutex:
            known = self._peers.pop(peer, None)
            if known is not None:
                self._post(known.leave("forgotten", self._clock.now()))
        self._publish()
        return known is not None

    def leave(self, peer: str, reason: str = "left") -> bool:
        """Record that `peer` has left; return False if it was not watched or had already left.

        Its heartbeats that arrive later are ignored. `watch` expects it again.
        """
        text = checked_text("reason", reason, "left")
        with self._mutex:
            known = self._peers.get(peer)
            change = None if known is None else known.leave(text, self._clock.now())
            self._post(change)
        self._publish()
        return change is not None

    def heartbeat(self, peer: str) -> bool:
        """Record a heartbeat of `peer`; from any thread.

        Return False if it is not watched or has left. Unknown names are ignored and counted: a
        heartbeat may come from any sender.
        """
        with self._mutex:
            known = self._peers.get(peer)
            if known is None or known.state is LEFT:
                self._refused += 1
                return False
            self._record_heartbeat(known, self._clock.now())
        self._publish()
        return True

    def _record_heartbeat(self, peer: _Watched, now: float) -> None:
        self._received += 1
        self._post(peer.heartbeat(now))

    # Views and subscriptions

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber(change)` for each `MemberChanged`; return a function to unsubscribe.

        It is called in the thread that noticed the change, so it must be quick.
        """
        return self.group.subscribe(subscriber)

    @property
    def members(self) -> dict[str, MemberView]:
        """The watched peers by name, with their current state."""
        with self._mutex:
            now = self._clock.now()
            return {
                name: peer.view(self._judged_at(peer, now)) for name, peer in self._peers.items()
            }

    def get(self, peer: str) -> MemberView | None:
        """Return what is known about `peer`; None if it is not watched."""
        with self._mutex:
            known = self._peers.get(peer)
            if known is None:
                return None
            return known.view(self._judged_at(known, self._clock.now()))

    @property
    def alive(self) -> list[str]:
        """Names of the present peers: alive, or suspected but not confirmed."""
        with self._mutex:
            present = (ALIVE, SUSPECTED)
            return [name for name, peer in self._peers.items() if peer.state in present]

    def snapshot(self) -> dict[str, Any]:
        """Return the peers, worst first, and the counts, as plain data."""
        return {
            "kind": "heartbeats",
            "own": self.own,
            **self.group.snapshot(self.members.values(), self._clock.now()),
            "health_score": None,
            "messages": {"sent": self._sent, "received": self._received, "refused": self._refused},
            "bytes": {"sent": 0, "received": 0},
        }

    # Changes are published in order, one thread at a time, and never under the lock

    def _post(self, change: PeerChange | None) -> None:
        """Queue `change` for publication. Call under the lock."""
        if change is not None:
            fields = change._asdict()
            self._outbox.append(lambda: self.group.publish(**fields))

    def _publish(self) -> None:
        while self._outbox:
            with self._mutex:
                if self._is_publishing:
                    return  # the thread that is publishing continues until the outbox is empty
                self._is_publishing = True
            try:
                while self._outbox:
                    self._outbox.popleft()()
            finally:
                self._is_publishing = False

    # Evaluation

    def evaluate(self) -> None:
        """Evaluate all peers now.

        The background thread does so four times in each interval `every`.
        """
        with self._mutex:
            now = self._clock.now()
            before, self._evaluated_at = self._evaluated_at, now
            gap = 0.0 if before is None else now - before
            if gap > self.pause_after:
                self._calm_until = max(self._calm_until, now + gap)
                self._outbox.append(lambda: self.group.note_own_pause(gap))
            if now >= self._calm_until:
                for peer in self._peers.values():
                    if not peer.is_shared or now >= self._shared_calm_until:
                        self._post(peer.evaluate(self._judged_at(peer, now), self.confirm_after))
        self._publish()

    def _judged_at(self, peer: _Watched, now: float) -> float:
        # A peer in the store may have written since this process last read it.
        return self._store_read_at if peer.is_shared else now

    # Heartbeats in a shared store

    async def _share_forever(self, share: BeatShare) -> None:
        """Write heartbeats to the store and read those of other processes, until cancelled."""
        clock = self._clock
        while True:
            due = clock.now() + self._jittered()
            try:
                await self._exchange(share)
            except StoreUnavailable:
                self._has_missed = True  # reported by the store's own events
            except (Exception, asyncio.CancelledError):
                if is_cancelled():
                    raise
                self._has_missed = True
                logging.getLogger("seawall").exception("reading heartbeats of %r failed", self.name)
            await sleep_async(max(0.0, due - clock.now()))

    async def _exchange(self, share: BeatShare) -> None:
        began_at = self._clock.now()
        sighting = await share.beat(self.own, self.max_peers + 1, self.timeout)
        with self._mutex:
            self._sent += 1
            self._store_read_at = began_at
            if self._has_missed:
                # The other processes could not write either: give them time to notice that the
                # store is back.
                self._shared_calm_until = began_at + max(self.pause_after, 5 * self.every)
                self._has_missed = False
            self._apply_sighting(sighting, began_at)
        self._publish()

    def _apply_sighting(self, sighting: Sighting, now: float) -> None:
        """Process the heartbeats written since the last read; under the lock.

        Their time stamps are only compared, because the store's clock may be changed.
        """
        seen = set(sighting.left)
        for beat in sighting.beats:
            seen.add(beat.member)
            peer = self._shared_peer(beat, now)
            if peer is not None and peer.stamp != beat.stamp:
                peer.stamp = beat.stamp
                self._post(peer.rejoin(now))
                self._record_heartbeat(peer, now)
        for name in sighting.left:
            known = self._peers.get(name)
            if known is not None:
                self._post(known.leave("left", now))
        for peer in list(self._peers.values()):
            if peer.is_shared and peer.state in (CONFIRMED, LEFT) and peer.name not in seen:
                del self._peers[peer.name]  # the store has forgotten it
                self._post(peer.leave("forgotten", now))

    def _shared_peer(self, beat: MemberBeat, now: float) -> _Watched | None:
        """Return the peer that wrote `beat`; None for this process or a peer long gone."""
        if beat.member == self.own:
            return None
        peer = self._peers.get(beat.member)
        if peer is None:
            is_gone = beat.age > self.confirm_after + 3 * self.every
            if is_gone or not 0 < len(beat.member) <= LONGEST_NAME:
                return None
            try:
                self._make_room(now)
            except ValueError:
                self._refused += 1
                return None
            peer = self._peers[beat.member] = _Watched(beat.member, self.detector, now)
        peer.is_shared = peer.probe is None
        return peer

    async def _announce_end(self) -> None:
        if self._share is not None:
            try:
                await self._share.leave(self.own, min(self.timeout, GOODBYE))
            except StoreUnavailable:
                pass  # the other processes will detect it

    def _jittered(self) -> float:
        return self.every * (1 - JITTER + 2 * JITTER * self._rng.random())

    # Start and stop

    def start(self) -> Self:
        """Start evaluating and probing in a background thread; do nothing if already started.

        A virtual clock has no background thread: call `evaluate()`, or use `async with` in a
        virtual loop.
        """
        with self._mutex:
            self._refuse_in_loop()
            if self._background is None:
                self._begin()
                if isinstance(self._clock, VirtualClock):
                    return self
                self._background = Background(self._start_task, self._end_task, "heartbeats")
            self._background.start()
        return self

    def close(self) -> None:
        """Stop evaluating and probing, and end the background thread. The known states are kept."""
        background, self._background = self._background, None
        if background is not None:
            background.stop()()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._refuse_in_loop()
        if self._background is not None:
            raise RuntimeError(f"{self!r} runs in its own thread already: close() it first")
        self._begin()
        self._start_task()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._end_task()

    def _refuse_in_loop(self) -> None:
        if self._background is None and self._task is not None:
            raise RuntimeError(f"{self!r} runs in an event loop already: `async with` it once")

    def _begin(self) -> None:
        """Restart the timeout of each peer: nothing was received or probed until now."""
        with self._mutex:
            now = self._clock.now()
            self._evaluated_at = None
            for peer in self._peers.values():
                peer.begin(now)

    def _start_task(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _end_task(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end([task])
            await self._announce_end()

    async def _run(self) -> None:
        """Evaluate periodically, and keep one task for each probed peer."""
        tasks: dict[str, tuple[ProbeRunner, asyncio.Task[None]]] = {}
        room = asyncio.Semaphore(AT_ONCE)
        loop, share = asyncio.get_running_loop(), self._share
        sharing = [] if share is None else [loop.create_task(self._share_forever(share))]
        clock, is_excused = self._clock, False
        try:
            while True:
                try:
                    self.evaluate()
                    self._match(tasks, room)
                # Nothing is awaited here, so it was raised by a subscriber.
                except (Exception, asyncio.CancelledError):
                    logging.getLogger("seawall").exception("evaluating %r failed", self.name)
                due = clock.now() + self._step
                await sleep_async(self._step)
                # A delayed loop has not yet read what arrived. Judge no peer for the length of the
                # delay, but not twice in a row: a loop that is always late must still judge.
                late = clock.now() - due
                is_excused = late > EXCUSED * self._step and not is_excused
                if is_excused:
                    self._calm_until = max(self._calm_until, clock.now() + late)
        finally:
            threads, self._threads = self._threads, None
            await end([*sharing, *(task for _, task in tasks.values())])
            if threads is not None:
                threads.close(0.0)

    def _match(
        self, tasks: dict[str, tuple[ProbeRunner, asyncio.Task[None]]], room: asyncio.Semaphore
    ) -> None:
        """Start tasks for new probes, and cancel those of peers that are no longer probed."""
        with self._mutex:
            wanted = {
                peer.name: (peer, peer.probe)
                for peer in self._peers.values()
                if peer.probe is not None and peer.state is not LEFT
            }
        for name, (runner, task) in list(tasks.items()):
            if name not in wanted or wanted[name][1] is not runner:
                task.cancel()
                del tasks[name]
        loop = asyncio.get_running_loop()
        for name, (peer, runner) in wanted.items():
            if name not in tasks:
                tasks[name] = runner, loop.create_task(self._probe_forever(peer, runner, room))

    async def _probe_forever(
        self, peer: _Watched, runner: ProbeRunner, room: asyncio.Semaphore
    ) -> None:
        clock = self._clock
        pause = self.every * self._rng.random()  # spreads the first probes over one interval
        while True:
            await sleep_async(pause)
            due = clock.now() + self._jittered()
            async with room:
                await self._probe(peer, runner)
            pause = max(0.0, due - clock.now())

    async def _probe(self, peer: _Watched, runner: ProbeRunner) -> None:
        """Run one probe and record its result."""
        began: float | None = None

        def note_start() -> None:
            nonlocal began
            with self._mutex:
                began = self._clock.now()
                self._sent += 1
                peer.sent(began)

        try:
            async with asyncio.timeout(self.timeout):
                passed = await runner(note_start)
            failure = "the probe returned False" if passed is False else ""
        except TimeoutError as error:
            late = f"no answer within {self.timeout:g} s"
            failure = described(error) if error.args else late
        except (Exception, asyncio.CancelledError) as error:
            if is_cancelled():
                raise
            failure = described(error)  # any exception means that the peer has not answered
        with self._mutex:
            if self._peers.get(peer.name) is not peer or peer.probe is not runner:
                return  # forgotten or given another probe in the meantime
            if failure or began is None:
                peer.failure = failure
            elif peer.state is not LEFT:
                now = self._clock.now()
                peer.round_trip = max(0.0, now - began)
                self.group.round_trips.add(peer.round_trip)
                self._record_heartbeat(peer, now)
        self._publish()

    def _pool(self) -> IoPool:
        """Return the thread pool for probes that are plain functions."""
        if self._threads is None:
            from seawall.resources.executors.executors import IoPool

            self._threads = IoPool(
                f"{self.name} probes", workers=THREADS, max_queue=AT_ONCE, clock=self._clock
            )
        return self._threads

    def _after_fork(self) -> None:
        """Reset in a child process, which has no background thread until it calls `start()`."""
        self._mutex = Mutex()
        self._is_publishing = False
        self._outbox.clear()
        if self._background is not None:
            self._background.after_fork()
        self._background = self._task = self._threads = None
        if self.own and not self._is_named:
            self.own = token_hex(8)


def _peer_name(argument: str, name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        raise TypeError(
            f"{argument}={name!r:.300}: write a name, such as 'orders-1', of at most"
            f" {LONGEST_NAME} characters"
        )
    return name


def _settings(detector: DetectorSettings) -> DetectorSettings:
    if not isinstance(detector, DetectorSettings):
        raise TypeError(
            f"detector={detector!r}: write phi_accrual(), exponential(), quantile_timeout() or"
            " fixed_timeout(3.0)"
        )
    return detector
