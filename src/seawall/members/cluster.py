"""A cluster: processes that learn about each other by gossip and detect members that have failed.

The rules are in `models.detection.swim`. This module owns the sockets, one timer, the resolution
of seeds, a thread for programs without an event loop, and a lock for readers in any thread.

Promises:
- A member that closes has left; one that dies or hangs is suspected, then confirmed.
- While it knows no other member, it contacts its seeds repeatedly and resolves their names each
  time, without blocking the loop. Groups that formed apart merge through their seeds.
- Subscribers are called in the order of changes and under no lock; a failing subscriber does not
  affect others.
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
from typing import Any, Final, Self

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock, new_random
from seawall.members.group import Group, MemberView, Subscriber
from seawall.members.keyring import MISSING, Keyring, check_exposure
from seawall.members.transport import (
    PARENT_OBJECTS,
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
    Directive,
    MembershipChange,
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
from seawall.runtime.mutex import Mutex

ALONE: Final = 0.25
"""First interval, in seconds, at which a member that is alone contacts its seeds again."""
RESOLVING: Final = 5.0
"""Timeout in seconds for resolving a seed's name."""
STARTING: Final = 10.0
"""Timeout in seconds for the background thread to open its sockets."""
LEAVING: Final = 1.0
"""Maximum number of seconds that a member stays after it announced that it leaves."""
LONELY: Final = 10.0
"""Number of seconds without an answer from any seed before a warning is logged."""
WARN_AGAIN: Final = 600.0
"""Minimum number of seconds between two warnings on the same subject."""
MISSED_DATAGRAMS: Final = 3
"""Number of answers by connection only before a warning that datagrams do not get through."""
_WHY_REFUSED: Final = {
    "key": "they have another key, or are of another group: write the same name and the same keys"
    " on all members",
    "encryption": f"they are encrypted: {MISSING}",
    "stale": f"the clock there is more than {SKEW:.0f} s away from the one here: keep both in step",
    "version": "they have another format: another program sends them, or another version of"
    " Seawall",
}
"""Log texts for refused messages. Other reasons are not caused by a configuration mistake."""
_LEVELS: Final = {MemberState.SUSPECTED: 1.0, MemberState.CONFIRMED: 2.0}
"""Level by state. That of a suspected member rises from 1 to 2 until its timeout."""


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
        """Describe the member; it joins the group `name` when it is started.

        `member` is its name, which must be unique in the group. By default that is the address at
        which others reach it, with POD_NAME in place of the host if the environment has it.

        `bind` is the IP address and port on which it listens, by UDP and TCP; port 0 lets the
        system choose. `advertise` is the IP address at which others reach it, with a port if that
        differs. `seeds` are addresses of some members, as host names or IP addresses: all addresses
        of a name are contacted. `preset` is `lan()`, `wan()`, `local()` or `SwimSettings`.

        `keyring` holds the keys that members share; without one, a cluster is limited to this
        machine. `metadata` is up to 512 bytes that all other members see. `tcp_only` is for
        networks without UDP.
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
        self._rng = new_random(self.name) if rng is None else check.chance("rng", rng)
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
        """Reset to the state before the start; also used after the end and in a child process."""
        self._swim: Swim | None = None
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._joining: asyncio.Task[None] | None = None
        self._contacted_seeds: list[str] = []

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

    async def __aexit__(self, *_exc: object) -> None:
        await self._leave()

    def start(self) -> Self:
        """Join the group in a background thread; for programs without an event loop."""
        background = Background(lambda: None, self._leave, owner="cluster")
        with self._mutex:
            self._check_stopped()
            self._background = background
        try:
            run_in(background, self._open, STARTING)
        except BaseException:
            background.stop()()  # otherwise its end could interfere with a later start
            self._background = None
            raise
        return self

    def close(self) -> None:
        """Leave the group and wait until the other members were notified. Idempotent."""
        background = self._background
        if background is not None:
            background.stop()()
            if self._background is background:
                self._background = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _check_stopped(self) -> None:
        if self._swim is not None or self._background is not None:
            raise RuntimeError(
                f"cluster {self.name!r} runs already: start it once, or make another Cluster"
            )

    async def _open(self) -> None:
        """Open the sockets and start the protocol in the running loop."""
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

    def _make_transport(self, receive: Receive) -> Transport:
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
        """Announce the departure, wait briefly so that it is delivered, and close the sockets."""
        swim, transport = self._swim, self._transport
        if swim is None or transport is None:
            return
        try:
            if self._joining is not None:
                self._joining.cancel()
            has_others = len(swim.present) > 1
            self._run_step(swim.leave)
            # A seed may know this member already, with its answer still in flight.
            if not has_others:
                self._run_step(swim.join, self._contacted_seeds)
            if has_others or self._contacted_seeds:
                wait = min(LEAVING, 2 * self.settings.gossip_interval)
                await asyncio.sleep(wait)  # noqa: TID251 - uses the loop's own time, virtual or not
        finally:
            if self._timer is not None:
                self._timer.cancel()
            with self._mutex:
                self._reset()
            await transport.close()

    def _after_fork(self) -> None:
        """Stop being a member in a child process; it may start as a new one."""
        transport, background = self._transport, self._background
        if transport is not None:
            transport.abandon()
        if background is not None:
            background.after_fork()
        PARENT_OBJECTS.append((self._timer, self._joining))
        self._mutex = Mutex()
        self._background = None
        self._pauses = 0
        self._reset()

    # In the loop

    def _run_step(self, act: Callable[..., list[Directive]], *args: Any, **options: Any) -> None:
        """Run one step of the model at the current time and carry out its directives."""
        with self._mutex:
            directives = act(*args, now=self._clock.now(), **options)
        self._carry_out(directives)

    def _carry_out(self, directives: list[Directive]) -> None:
        """Send, set the timer, then publish: subscribers may be slow."""
        transport, swim = self._transport, self._swim
        if transport is None or swim is None:
            return
        for one in directives:
            if isinstance(one, Send):
                transport.send(one.address, one.message, reliable=one.reliable)
        self._set_timer(swim)
        for one in directives:
            if isinstance(one, MembershipChange):
                self._publish(one, swim.own.name)
            elif isinstance(one, RoundTrip):
                self.group.round_trips.add(one.seconds)
            elif isinstance(one, Pause):
                self.group.note_own_pause(one.seconds)
            elif isinstance(one, MissedDatagram):
                self._note_missed_datagram(one.name, swim)

    def _publish(self, change: MembershipChange, own: str) -> None:
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
            # A member confirmed on another member's word: the length of its silence is not known.
            silence=change.duration if was_suspected else None,
        )

    def _set_timer(self, swim: Swim) -> None:
        """Schedule a wake-up at the model's next instant, unless a timer fires before that."""
        timer, loop = self._timer, self._loop
        if loop is None:
            return
        at = loop.time() + max(0.0, swim.wake_at - self._clock.now())
        if timer is not None:
            if not timer.cancelled() and self._timer_at <= at:
                return
            timer.cancel()
        self._timer_at = at  # uvloop's handles of what is due do not know it
        self._timer = loop.call_at(at, self._wake, context=Context())

    def _wake(self) -> None:
        """Process arrived messages, which may prevent a suspicion, then run what is due."""
        swim, transport = self._swim, self._transport
        if swim is None or transport is None:
            return
        self._timer = None
        try:
            transport.drain()
            self._run_step(swim.advance)
        except Exception:
            logging.getLogger("seawall").exception("cluster %r failed at a timer", self.name)
            if self._swim is swim and self._timer is None:
                self._set_timer(swim)

    def _receive(self, message: Message, address: str, reliable: bool) -> None:  # noqa: FBT001 - a callback
        swim = self._swim
        if swim is None:
            return
        if message.source == swim.own.name:
            # Happens if one of its seeds is its own address under another name.
            self._check_namesake(message, swim.own)
            return
        try:
            self._run_step(swim.receive, message, address, reliable=reliable)
        except Exception:
            logging.getLogger("seawall").exception("cluster %r failed at a message", self.name)

    def _check_namesake(self, message: Message, own: Member) -> None:
        """Log once that another process has this member's name, and notify that process."""
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
            self._carry_out([Send(others[0], here)])

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
        """Log a warning, at most once in `WARN_AGAIN` seconds for each subject."""
        now = self._clock.now()
        if now - self._warned_at.get(about, -inf) >= WARN_AGAIN:
            self._warned_at[about] = now
            logging.getLogger("seawall").warning("cluster %r: %s", self.name, text)

    # Joining

    async def _join(self) -> None:
        """Contact all seeds while this member is alone; later, periodically one unknown seed."""
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
                self._contacted_seeds = strange
                self._run_step(swim.join, strange)
            wait = pause * (0.5 + self._rng.random() / 2) if is_alone else longest
            pause = min(pause * 2, longest) if is_alone else ALONE
            await asyncio.sleep(wait)  # noqa: TID251 - uses the loop's own time, virtual or not

    def _warn_lonely(self, seeds: list[str], own: Member) -> None:
        self._warn(
            "seeds",
            f"no seed answers ({', '.join(seeds[:3])}): check that they run, that UDP and TCP get"
            f" there and back to {own.address}, and that all members have the same group name and"
            f" keys, and none of them the name {own.name!r} of this one",
        )

    async def _resolved(self) -> list[str]:
        """Return the current addresses of the seeds."""
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
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
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

    # Public view, for any thread

    @property
    def member(self) -> str:
        """The name of this process in the group; empty while it depends on an unknown port."""
        swim = self._swim
        return (self._wanted_member or "") if swim is None else swim.own.name

    @property
    def address(self) -> str:
        """The address at which others reach this member; empty while it does not run."""
        swim = self._swim
        return "" if swim is None else swim.own.address

    @property
    def members(self) -> dict[str, MemberView]:
        """All known members, including this one and those that are gone."""
        with self._mutex:
            swim = self._swim
            if swim is None:
                return {}
            now = self._clock.now()
            everybody = (swim.own, *swim.members.values())
            return {one.name: _view(one, swim.own.name, now) for one in everybody}

    def get(self, name: str) -> MemberView | None:
        """Return what is known about one member; None if there is none of that name."""
        with self._mutex:
            swim = self._swim
            if swim is None:
                return None
            member = swim.own if name == swim.own.name else swim.members.get(name)
            return None if member is None else _view(member, swim.own.name, self._clock.now())

    @property
    def alive(self) -> list[str]:
        """Names of the present members, including this one and suspected ones."""
        with self._mutex:
            return [] if self._swim is None else sorted(one.name for one in self._swim.present)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber(change)` for each `MemberChanged`; return a function to unsubscribe.

        It runs in the thread of the cluster, so it must be quick.
        """
        return self.group.subscribe(subscriber)

    def set_metadata(self, metadata: bytes) -> None:
        """Replace the metadata that the group sees of this member; from any thread."""
        self._metadata = check_metadata(metadata)
        with self._mutex:
            swim, loop = self._swim, self._loop
            if swim is None or loop is None:
                return
            directives = swim.set_metadata(metadata, self._clock.now())
            self._carry_out_soon(loop, directives)

    def _carry_out_soon(self, loop: asyncio.AbstractEventLoop, directives: list[Directive]) -> None:
        """Carry out directives in the loop; from any thread."""
        try:
            loop.call_soon_threadsafe(self._carry_out, directives, context=Context())
        except RuntimeError:
            pass  # the loop has ended, and the membership with it

    @contextmanager
    def pause_suspicion(self) -> Iterator[None]:
        """Suspect and confirm no member inside the block, which does heavy work; from any thread.

        Meanwhile, answers from other members may wait unread in this process.
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
                    self._carry_out_soon(loop, [])  # the next wake-up may have become earlier

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain data; at most 1000 members, the worst first."""
        traffic, swim = self._traffic, self._swim
        full = 0 if swim is None else swim.refused
        refused = traffic.refused + Counter(self._codec.refused) + Counter(full=full)
        return {
            "kind": "cluster",
            "own": self.member,
            **self.group.snapshot(self.members.values(), self._clock.now()),
            "health_score": None if swim is None else swim.health.score,
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
    """Return `value` if its host is an IP address; otherwise raise."""
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
