"""A cluster: processes that know of each other by gossip, and find out who of them is gone.

The rules are in `models.detection.swim`. Here is what they need to live in a process: sockets, one
timer, seeds that are resolved and asked, a thread for programs without an event loop, and a lock so
that every thread may look.

Promises:
- A member that closes is known to have left; one that dies or hangs is suspected, then confirmed.
- While it knows nobody else, it asks its seeds again and again; their names are resolved anew each
  time, without blocking the loop. Groups that formed apart become one through their seeds.
- Subscribers are called in the order of changes and under no lock; one that fails harms nobody.
- A child process is not a member: its copies of the sockets are closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from math import inf
from os import environ
from random import Random
from types import TracebackType
from typing import Any, Final, Protocol, Self

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock, check_clock, current_clock
from seawall.members.group import Group, MemberView, Subscriber, snapshot_of
from seawall.members.keyring import MISSING, Keyring, check_exposure
from seawall.members.transport import (
    Receive,
    Traffic,
    Transport,
    is_numeric,
    join_address,
    split_address,
)
from seawall.members.wire import SKEW, Codec
from seawall.models.detection.gossip import MOST_NAME, Member, MemberState
from seawall.models.detection.messages import (
    Change,
    Directive,
    Message,
    MessageKind,
    MissedDatagram,
    Pause,
    RoundTrip,
    Send,
    check_metadata,
)
from seawall.models.detection.settings import SwimSettings, lan
from seawall.models.detection.swim import Swim
from seawall.runtime.background import Background, run_in
from seawall.runtime.mutex import Mutex, survives_fork

ALONE: Final = 0.25
"""Seconds after which a member that is alone asks its seeds again, at first."""

RESOLVING: Final = 5.0
"""Seconds in which a seed's name must be resolved."""

STARTING: Final = 10.0
"""Seconds in which the background thread must have opened its sockets."""

LEAVING: Final = 1.0
"""Seconds that a member stays at most after it has said that it leaves."""

LONELY: Final = 10.0
"""Seconds for which no seed answers before the log says so."""

WARN_AGAIN: Final = 600.0
"""Seconds between two warnings about the same."""

MISSED_DATAGRAMS: Final = 3
"""Answers that came by connection alone before the log says that datagrams do not get through."""

MOST_SHOWN: Final = 1000
"""Members in a snapshot."""

CONFIRMED_LEVEL: Final = 2.0
"""The level of a confirmed member; a suspected one rises from 1 to it while its time runs out."""

_WHY_REFUSED: Final = {
    "key": "they have another key, or are of another group: write the same name and the same keys"
    " on all members",
    "encryption": f"they are encrypted: {MISSING}",
    "stale": f"the clock there is more than {SKEW:.0f} s away from the one here: keep both in step",
    "version": "they have another format: another program sends them, or another version of"
    " Seawall",
}
"""What the log says about refused messages. Other reasons are no mistake of a person."""

_LEVELS: Final = {MemberState.SUSPECTED: 1.0, MemberState.CONFIRMED: CONFIRMED_LEVEL}
_WORST_FIRST: Final = (
    MemberState.SUSPECTED,
    MemberState.CONFIRMED,
    MemberState.LEFT,
    MemberState.ALIVE,
)


class Wire(Protocol):
    """What a cluster needs of a transport."""

    address: str
    family: socket.AddressFamily

    def open(self) -> None:
        """Listen, in the running loop."""

    def send(self, address: str, message: Message, *, reliable: bool) -> None:
        """Send a message; never blocks or raises."""

    def drain(self) -> None:
        """Receive what has arrived."""

    async def close(self) -> None:
        """Close all sockets."""

    def abandon(self) -> None:
        """Close them in a child process."""


class Cluster:
    """The membership of this process in a group: `async with Cluster("workers", seeds=[...]):`.

    A program without an event loop writes `with Cluster(...)`, or `start()` and `close()`: then a
    background thread does the work.
    """

    def __init__(
        self,
        name: str,
        *,
        member: str | None = None,
        bind: str = "127.0.0.1:7946",
        advertise: str | None = None,
        seeds: Iterable[str] = (),
        preset: SwimSettings | None = None,
        keyring: Keyring | None = None,
        metadata: bytes = b"",
        tcp_only: bool = False,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """Describe the member; it joins the group `name` once it is started.

        `member` is its name, which no other member may have. By default that is the address at
        which others reach it, with POD_NAME in place of the host if the environment has it.

        `bind` is where it listens, by UDP and TCP: an IP address and a port, 0 for one that the
        system chooses. `advertise` is the IP address, and port if that is another one, at which the
        others reach it. `seeds` are addresses of some members, by name or number: all addresses
        that a name has are asked. `preset` is `lan()`, `wan()`, `local()` or `SwimSettings`.

        `keyring` holds the keys that members share; without one, a cluster stays on the machine.
        `metadata` is up to 512 bytes that all others see. `tcp_only` is for networks without UDP.
        """
        self.name = _text("name", name)
        self._wanted_member = None if member is None else _text("member", member)
        self._bind = _numeric_address("bind", bind)
        self._advertise = None if advertise is None else _numeric_address("advertise", advertise)
        self._seeds = [
            split_address(_text("seeds", seed))
            for seed in check.listed("seeds", seeds, "'10.0.0.5:7946'")
        ]
        if preset is not None and not isinstance(preset, SwimSettings):
            raise TypeError(f"preset={preset!r}: pass lan(), wan(), local() or SwimSettings(...)")
        self.settings = lan() if preset is None else preset
        if keyring is not None and not isinstance(keyring, Keyring):
            raise TypeError(f"keyring={type(keyring).__name__}: pass Keyring(secret)")
        check_exposure(split_address(self._bind)[0], keyring)
        self._keyring = keyring
        self._metadata = check_metadata(metadata)
        self._tcp_only = check.flag("tcp_only", tcp_only)
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._rng = Random() if rng is None else check.chance("rng", rng)  # noqa: S311 - spreads load, guards nothing
        self.group = Group(name)
        self._codec = Codec(keyring, group=name, clock=self._clock)
        self._traffic = Traffic()
        self._reliable_only = 0
        self._unresolved: set[str] = set()
        self._has_namesake = False
        self._warned_at: dict[str, float] = {}
        self._pauses = 0
        self._mutex = Mutex()
        self._background: Background | None = None
        self._reset()
        survives_fork(self)
        registry.enter(self, "members", name)

    def _reset(self) -> None:
        """Be no member, as before the start, after the end, and in a child process."""
        self._swim: Swim | None = None
        self._transport: Wire | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._joining: asyncio.Task[None] | None = None
        self._asked: list[str] = []

    def __repr__(self) -> str:
        count = len(self.alive)
        where = f"{count} member{'s' * (count != 1)}" if self.is_running else "not running"
        return f"<Cluster {self.name!r}: {where}>"

    # Starting and closing

    @property
    def is_running(self) -> bool:
        """Whether this process is a member now."""
        return self._swim is not None

    async def __aenter__(self) -> Self:
        self._check_stopped()
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave()

    def start(self) -> Self:
        """Join the group, in a background thread; for programs without an event loop."""
        background = Background(lambda: None, self._leave, owner="cluster")
        with self._mutex:
            self._check_stopped()
            self._background = background
        try:
            run_in(background, self._open, STARTING)
        except BaseException:
            background.stop()()  # or its end could fall into a later start
            self._background = None
            raise
        return self

    def close(self) -> None:
        """Leave the group, and wait until the others have been told. Once is as good as twice."""
        background = self._background
        if background is not None:
            background.stop()()
            if self._background is background:
                self._background = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_stopped(self) -> None:
        if self._swim is not None or self._background is not None:
            raise RuntimeError(
                f"cluster {self.name!r} runs already: start it once, or make another Cluster"
            )

    async def _open(self) -> None:
        """Open the sockets and begin, in the running loop."""
        loop = asyncio.get_running_loop()
        transport = self._make_transport(self._receive)
        try:
            transport.open()
            swim = Swim(
                self._wanted_member or _default_member(transport.address),
                transport.address,
                settings=self.settings,
                metadata=self._metadata,
                rng=self._rng.random,
                now=self._clock.now(),
            )
        except BaseException:
            await transport.close()
            raise
        with self._mutex:
            self._transport, self._loop, self._swim = transport, loop, swim
            if self._pauses:
                swim.pause_suspicion()
        self._wake()
        self._joining = loop.create_task(self._join(), context=Context())

    def _make_transport(self, receive: Receive) -> Wire:
        return Transport(
            bind=self._bind,
            advertise=self._advertise,
            codec=self._codec,
            receive=receive,
            note_refused=self._note_refused,
            traffic=self._traffic,
            tcp_only=self._tcp_only,
        )

    async def _leave(self) -> None:
        """Tell the others, stay for a moment so that they hear it, and close the sockets."""
        swim, transport = self._swim, self._transport
        if swim is None or transport is None:
            return
        try:
            if self._joining is not None:
                self._joining.cancel()
            has_others = len(swim.present) > 1
            self._step(swim.leave)
            if not has_others:  # a seed may know this member, and its answer is on the way
                self._step(swim.join, self._asked)
            if has_others or self._asked:
                wait = min(LEAVING, 2 * self.settings.gossip_interval)
                await asyncio.sleep(wait)  # noqa: TID251 - the loop's own time, virtual or not
        finally:
            if self._timer is not None:
                self._timer.cancel()
            with self._mutex:
                self._reset()
            await transport.close()

    def _after_fork(self) -> None:
        """Be no member in a child process; it may start as another one."""
        transport, background = self._transport, self._background
        if transport is not None:
            transport.abandon()
        if background is not None:
            background.after_fork()
        _of_parent.append((self._timer, self._joining))
        self._mutex = Mutex()
        self._background = None
        self._pauses = 0
        self._reset()

    # In the loop

    def _step(self, act: Callable[..., list[Directive]], *args: Any, **options: Any) -> None:
        """Let the model act now, and do what it says."""
        with self._mutex:
            directives = act(*args, now=self._clock.now(), **options)
        self._follow(directives)

    def _follow(self, directives: list[Directive]) -> None:
        """Send and publish, and set the timer. Sending comes first: subscribers may take long."""
        transport, swim = self._transport, self._swim
        if transport is None or swim is None:
            return
        for one in directives:
            if isinstance(one, Send):
                transport.send(one.address, one.message, reliable=one.reliable)
        self._set_timer(swim)
        for one in directives:
            if isinstance(one, Change):
                self._publish(one, swim.own.name)
            elif isinstance(one, RoundTrip):
                self.group.round_trips.add(one.seconds)
            elif isinstance(one, Pause):
                self.group.note_own_pause(one.seconds)
            elif isinstance(one, MissedDatagram):
                self._note_missed_datagram(one.name, swim)

    def _publish(self, change: Change, own: str) -> None:
        before = change.before or MemberState.UNKNOWN
        was_suspected = before is MemberState.SUSPECTED
        self.group.publish(
            member=change.name,
            before=before,
            after=change.after,
            reason=change.reason,
            level=_LEVELS.get(change.after) or _LEVELS.get(before, 0.0),
            duration=change.duration,
            by="" if change.by == own else change.by,
            # Who confirms a member on another's word does not know for how long it was silent.
            silence=change.duration if was_suspected else None,
        )

    def _set_timer(self, swim: Swim) -> None:
        """Wake at the model's next instant; a timer that is earlier is as good."""
        timer, loop = self._timer, self._loop
        if loop is None:
            return
        at = loop.time() + max(0.0, swim.wake_at - self._clock.now())
        if timer is not None:
            if not timer.cancelled() and timer.when() <= at:
                return
            timer.cancel()
        self._timer = loop.call_at(at, self._wake, context=Context())

    def _wake(self) -> None:
        """Do what is due. What has arrived counts first: an answer may be among it."""
        swim, transport = self._swim, self._transport
        if swim is None or transport is None:
            return
        self._timer = None
        try:
            transport.drain()
            self._step(swim.advance)
        except Exception:
            logging.getLogger("seawall").exception("cluster %r failed at a timer", self.name)
            if self._swim is swim and self._timer is None:
                self._set_timer(swim)

    def _receive(self, message: Message, address: str, reliable: bool) -> None:  # noqa: FBT001 - a callback
        swim = self._swim
        if swim is None:
            return
        if message.source == swim.own.name:
            # From itself, if one of its seeds is its own address under another name.
            self._check_namesake(message, swim.own)
            return
        try:
            self._step(swim.receive, message, address, reliable=reliable)
        except Exception:
            logging.getLogger("seawall").exception("cluster %r failed at a message", self.name)

    def _check_namesake(self, message: Message, own: Member) -> None:
        """Log once that another process has this member's name, and let it know too."""
        others = [
            update.address
            for update in message.updates
            if update.name == own.name and update.address not in ("", own.address)
        ]
        if others and not self._has_namesake:
            self._has_namesake = True
            logging.getLogger("seawall").error(
                "cluster %r: the member at %s is called %r as this one is, and both ignore each"
                " other: write another member= for one of them",
                self.name,
                others[0],
                own.name,
            )
            here = Message(MessageKind.GOSSIP, own.name, (own.introduction,))
            self._follow([Send(others[0], here)])

    def _note_missed_datagram(self, member: str, swim: Swim) -> None:
        if self._tcp_only:
            return
        self._reliable_only += 1
        if self._reliable_only == MISSED_DATAGRAMS:
            logging.getLogger("seawall").warning(
                "cluster %r: members such as %r answer by TCP but not by UDP. Allow UDP between"
                " all members on the port of %s, or write tcp_only=True on all of them",
                self.name,
                member,
                swim.own.address,
            )

    def _note_refused(self, reason: str, address: str) -> None:
        why = _WHY_REFUSED.get(reason)
        if why is not None:
            self._warn(reason, f"messages such as from {address} are refused: {why}")

    def _warn(self, about: str, text: str) -> None:
        """Log a warning, but not the same one again and again."""
        now = self._clock.now()
        if now - self._warned_at.get(about, -inf) >= WARN_AGAIN:
            self._warned_at[about] = now
            logging.getLogger("seawall").warning("cluster %r: %s", self.name, text)

    # Joining

    async def _join(self) -> None:
        """Ask the seeds while this member is alone; later, now and then, one that is not known."""
        pause = ALONE
        longest = self.settings.exchange_interval
        alone_since = self._clock.now()
        while self._seeds:
            addresses = await self._resolved()
            swim = self._swim
            if swim is None:
                return
            known = {member.address for member in swim.present}
            strange = [one for one in addresses if one not in known]
            is_alone = len(known) == 1
            if not is_alone:
                alone_since = self._clock.now()
                self._rng.shuffle(strange)
                del strange[1:]
            if strange:
                if self._clock.now() - alone_since > LONELY:
                    self._warn_lonely(strange, swim.own)
                self._asked = strange
                self._step(swim.join, strange)
            wait = pause * (0.5 + self._rng.random() / 2) if is_alone else longest
            pause = min(pause * 2, longest) if is_alone else ALONE
            await asyncio.sleep(wait)  # noqa: TID251 - the loop's own time, virtual or not

    def _warn_lonely(self, seeds: list[str], own: Member) -> None:
        self._warn(
            "seeds",
            f"no seed answers ({', '.join(seeds[:3])}): check that they run, that UDP and TCP get"
            f" there and back to {own.address}, and that all members have the same group name and"
            f" keys, and none of them the name {own.name!r} of this one",
        )

    async def _resolved(self) -> list[str]:
        """Return the addresses that the seeds have now."""
        found = await asyncio.gather(*(self._resolve(host, port) for host, port in self._seeds))
        return list(dict.fromkeys(address for addresses in found for address in addresses))

    async def _resolve(self, host: str, port: int) -> list[str]:
        if is_numeric(host):
            return [join_address(host, port)]
        transport = self._transport
        family = socket.AF_UNSPEC if transport is None else transport.family
        try:
            async with asyncio.timeout(RESOLVING):
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # a timeout is one too
            if host not in self._unresolved:
                self._unresolved.add(host)
                logging.getLogger("seawall").warning(
                    "cluster %r: the seed %r has no address yet (%s); it is asked again",
                    self.name,
                    host,
                    str(error) or "no answer in time",
                )
            return []
        self._unresolved.discard(host)
        return [join_address(str(place[4][0]), port) for place in found]

    # For everybody

    @property
    def member(self) -> str:
        """The name of this process in the group; empty while that depends on the port to come."""
        swim = self._swim
        return (self._wanted_member or "") if swim is None else swim.own.name

    @property
    def address(self) -> str:
        """Where the others reach this member; empty while it does not run."""
        swim = self._swim
        return "" if swim is None else swim.own.address

    @property
    def members(self) -> dict[str, MemberView]:
        """All members that are known, this one among them, also those that are gone."""
        with self._mutex:
            swim = self._swim
            if swim is None:
                return {}
            now = self._clock.now()
            everybody = (swim.own, *swim.members.values())
            return {one.name: _view(one, swim.own.name, now) for one in everybody}

    def get(self, name: str) -> MemberView | None:
        """Return what is known of one member; None if there is none of that name."""
        with self._mutex:
            swim = self._swim
            if swim is None:
                return None
            member = swim.own if name == swim.own.name else swim.members.get(name)
            return None if member is None else _view(member, swim.own.name, self._clock.now())

    @property
    def alive(self) -> list[str]:
        """The names of the members that are there, this one among them; suspected ones are too."""
        with self._mutex:
            return [] if self._swim is None else sorted(one.name for one in self._swim.present)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber(change)` for each `MemberChanged`; return a function that ends that.

        It runs in the thread of the cluster, so it must be quick.
        """
        return self.group.subscribe(subscriber)

    def set_metadata(self, metadata: bytes) -> None:
        """Tell the group something else about this member; from any thread."""
        self._metadata = check_metadata(metadata)
        with self._mutex:
            swim, loop = self._swim, self._loop
            if swim is None or loop is None:
                return
            directives = swim.set_metadata(metadata, self._clock.now())
            self._follow_soon(loop, directives)

    def _follow_soon(self, loop: asyncio.AbstractEventLoop, directives: list[Directive]) -> None:
        """Follow directives in the loop; from any thread."""
        try:
            loop.call_soon_threadsafe(self._follow, directives, context=Context())
        except RuntimeError:
            pass  # the loop has ended, and the member with it

    @contextmanager
    def pause_suspicion(self) -> Iterator[None]:
        """Accuse and confirm nobody inside the block, which does heavy work; from any thread.

        Answers of the others may wait meanwhile until this process comes to read them.
        """
        with self._mutex:
            self._pauses += 1
            if self._swim is not None:
                self._swim.pause_suspicion()
        try:
            yield
        finally:
            with self._mutex:
                self._pauses = max(0, self._pauses - 1)
                swim, loop = self._swim, self._loop
                if swim is not None and loop is not None and not self._pauses:
                    swim.resume_suspicion(self._clock.now())
                    self._follow_soon(loop, [])  # it may have to wake earlier

    def snapshot(self) -> dict[str, Any]:
        """Return what there is to see, as plain data; at most 1000 members, the worst first."""
        views = sorted(
            self.members.values(), key=lambda one: (_WORST_FIRST.index(one.state), one.name)
        )
        now = self._clock.now()
        traffic, swim = self._traffic, self._swim
        refused = traffic.refused + Counter(self._codec.refused)
        trips = self.group.round_trips
        shares = (0.5, 0.95, 0.99)
        quantiles = zip(("p50", "p95", "p99"), trips.quantiles(shares), strict=True)
        return {
            "kind": "cluster",
            "own": self.member,
            "members": [snapshot_of(view, now) for view in views[:MOST_SHOWN]],
            "counts": self.group.counts(),
            "health_score": None if swim is None else swim.health.score,
            "round_trip": dict(quantiles) if trips.count else None,
            "messages": {
                "sent": traffic.sent,
                "received": traffic.received,
                "refused": refused.total(),
            },
            "bytes": {"sent": traffic.bytes_sent, "received": traffic.bytes_received},
            "refused": dict(refused),
            "dropped": dict(traffic.dropped),
            "reliable_only": self._reliable_only,
        }


_of_parent: list[object] = []
"""Tasks and timers of a parent process."""


def _view(member: Member, own: str, now: float) -> MemberView:
    suspicion = member.suspicion
    level = _LEVELS.get(member.state, 0.0)
    if suspicion is not None:
        lasts = max(suspicion.ends_at - suspicion.began_at, 1e-9)
        level += min(1.0, max(0.0, now - suspicion.began_at) / lasts)
    return MemberView(
        name=member.name,
        state=member.state,
        since=member.since,
        address=member.address,
        level=level,
        threshold=1.0,
        round_trip=member.round_trip,
        metadata=member.metadata,
        reason=member.reason,
        by="" if member.by == own else member.by,
    )


def _default_member(address: str) -> str:
    host, port = split_address(address)
    pod = environ.get("POD_NAME", "")
    return f"{pod}:{port}" if pod else join_address(host, port)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: write text")
    if not value or not value.isprintable() or len(value.encode()) > MOST_NAME:
        raise ValueError(f"{name}={value!r}: write 1 to {MOST_NAME} bytes of printable text")
    return value


def _numeric_address(name: str, value: object) -> str:
    """Return an address whose host is an IP address, or raise."""
    text = _text(name, value)
    host, _port = split_address(text)
    if host == "localhost":
        return text.replace("localhost", "127.0.0.1")
    if not is_numeric(host):
        raise ValueError(
            f"{name}={value!r}: write an IP address and a port, such as {name}='10.0.0.5:7946'; a"
            " name may lead to somewhere else tomorrow"
        )
    return text
