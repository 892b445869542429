"""Group membership by gossip: SWIM with Lifeguard, as a pure state machine of one member.

Every input (a message, the passing of time, a request to leave) returns directives: messages to
`Send`, and events to publish: a `MembershipChange`, a `RoundTrip`, a `Pause`, a `MissedDatagram`.
The driver only sends, publishes, and calls `advance` at `wake_at`, which every input may move. The
state machine has no clock, random source or socket of its own.

Promises:
- Completeness: while the network delivers, each of n members whose health score is 0 confirms a
  crashed one within 2 n probe intervals and the longest suspicion, even if no gossip reaches it.
  Gossip makes that faster: some member probes the crashed one after 1.58 probes of each member on
  average.
- A suspicion ends exactly once: the accused refutes it, is confirmed, or has left.
- A member that answers is never confirmed for good: it hears of the verdict and refutes it.
- The two sides of a partition find each other again without help, even if each side had confirmed
  the other: at each exchange every member contacts the next one that it considers dead.
- Incarnations never fall, and only a member itself raises its own.
- A process that was stopped, or that runs late, accuses and confirms no member until the others
  have had as much time to be heard as it missed.
- The view holds at most `max_members`. Everything kept about them, including timers, is bounded by
  it.

With `lifeguard=False` it is plain SWIM: a suspicion always lasts its minimum time, and the member
trusts its own view, however late its process runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import ceil, inf, log2
from typing import Final, NamedTuple, TypeVar

from seawall.models.detection.gossip import (
    ENVELOPE,
    MOST_ADDRESS,
    MOST_NAME,
    GossipQueue,
    GossipUpdate,
    LocalHealth,
    Member,
    MemberState,
    Suspicion,
)
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
    check_text,
)
from seawall.models.detection.settings import SwimSettings

ALIVE, SUSPECTED = MemberState.ALIVE, MemberState.SUSPECTED
CONFIRMED, LEFT = MemberState.CONFIRMED, MemberState.LEFT

NACK_AFTER: Final = 0.8
"""Fraction of its time after which a helper reports that it has heard nothing either.

Its time is the probe timeout, or what the asking member has left of its interval if that is less.
"""
MANY: Final = 32
"""Above this number of members, full exchanges become rarer to keep their total cost constant."""
Rng = Callable[[], float]
T = TypeVar("T")


@dataclass(slots=True)
class _Probe:
    """A running probe of this member's own."""

    number: int
    target: str
    sent_at: float
    ends_at: float  # the time until which it may be answered, directly or through others
    is_direct: bool = True
    helpers: set[str] = field(default_factory=set)  # asked to help, and have not replied yet
    answered: bool = False
    is_reliable_only: bool = False  # answered over a connection, but not by datagram


class _Relay(NamedTuple):
    """A probe made on behalf of another member."""

    address: str
    number: int
    target: str


class Swim:
    """One member's view of its group. Callers must serialise access."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        settings: SwimSettings | None = None,
        metadata: bytes = b"",
        rng: Rng,
        now: float,
    ) -> None:
        """Start as a group of one; `join` makes others known."""
        self.settings = settings or SwimSettings()
        self.own = Member(
            check_text("name", name, MOST_NAME),
            check_text("address", address, MOST_ADDRESS),
            0,
            ALIVE,
            now,
            check_metadata(metadata),
            by=name,
        )
        self.members: dict[str, Member] = {}  # all known members except this one, by name
        self.health = LocalHealth()
        self.refused = 0  # updates about more members than the view may hold
        self._rng = rng
        self._gossip = GossipQueue(self.settings.retransmit_multiplier)
        self._timers: list[tuple[float, int, Callable[[float], Iterator[Directive]]]] = []
        self._serial = count()
        # Start at a random number: an answer to another process's probe must not match.
        self._numbers = count(int(rng() * 2**32))
        self._others = 0  # number of present members except this one
        self._suspects: dict[str, Member] = {}
        self._verdict_at = inf  # earliest end of a suspicion
        self._order: list[str] = []  # names to probe next, from the end; all present, each once
        self._probe: _Probe | None = None
        self._relays: dict[int, _Relay] = {}
        self._evaluated_at = now
        self._calm_until = now
        self._is_paused = False
        self._is_gossiping = False
        self._spread(self.own.update, now)
        self._at(now, self._exchange_tick)
        self._at(now + self.settings.interval * rng(), self._probe_tick)
        self._beat(now)

    # Interface for the driver

    @property
    def wake_at(self) -> float:
        """The latest time for the next call of `advance`."""
        return min(self._timers[0][0], self._verdict_at)

    def advance(self, now: float) -> list[Directive]:
        """Process everything that is due at `now`."""
        done = list(self._check_pace(now))
        while self._timers[0][0] <= now:
            _at, _serial, act = heappop(self._timers)
            done += act(now)
        if self._verdict_at <= now:
            done += self._confirm_overdue(now)
        return done

    def receive(
        self, message: Message, address: str, now: float, *, reliable: bool = False
    ) -> list[Directive]:
        """Process a message from `address`. A reply goes back the way the message came."""
        done = list(self._check_pace(now))
        whole = message.kind in (MessageKind.PUSH, MessageKind.PULL)
        for update in message.updates:
            done += self._apply(update, now, whole=whole)
        sender = self.members.get(message.source)
        if sender is not None and not sender.is_present:
            # It does not know that it is considered dead, or it would have refuted that.
            done.append(self._send(MessageKind.GOSSIP, sender.address, first=[sender.update]))
        done += self._answer(message, address, now, reliable=reliable)
        return done

    def join(self, addresses: Iterable[str], now: float) -> list[Directive]:
        """Exchange views with the members at `addresses`."""
        done = list(self._check_pace(now))
        done += [Send(one, self._state(MessageKind.PUSH), reliable=True) for one in addresses]
        return done

    def set_metadata(self, metadata: bytes, now: float) -> list[Directive]:
        """Publish new metadata of this member to the group."""
        self.own.metadata = check_metadata(metadata)
        self.own.incarnation += 1
        self._spread(self.own.update, now)
        return list(self._check_pace(now))

    def leave(self, now: float) -> list[Directive]:
        """Announce to several members that this one leaves voluntarily."""
        self.own.state, self.own.since = LEFT, now
        self._schedule_verdict()
        self._spread(self.own.update, now)
        receivers = self._sample(self._present_others(), 2 * self.settings.gossip_nodes)
        return [self._send(MessageKind.GOSSIP, member.address) for member in receivers]

    def pause_suspicion(self) -> None:
        """Accuse and confirm no member while this process does heavy work."""
        self._is_paused = True
        self._schedule_verdict()

    def resume_suspicion(self, now: float) -> None:
        """Accuse and confirm again, once the answers that arrived meanwhile were received."""
        self._is_paused = False
        self._probe = None
        self._calm_until = max(self._calm_until, now + self.settings.interval)
        self._schedule_verdict()

    @property
    def present(self) -> list[Member]:
        """All members that are not confirmed and have not left, including this one."""
        return [self.own, *self._present_others()]

    # Time

    def _at(self, at: float, act: Callable[[float], Iterator[Directive]]) -> None:
        heappush(self._timers, (at, next(self._serial), act))

    def _beat(self, now: float) -> Iterator[Directive]:
        """Keep the gaps between evaluations short, so that a long one means a pause."""
        self._at(now + self.settings.pause / 5, self._beat)
        return iter(())

    def _check_pace(self, now: float) -> Iterator[Directive]:
        """Detect that this process was stopped or is late, so its view is less reliable.

        Messages that the others sent meanwhile may not have been read yet. If indirect probes had
        no time to be answered, accuse and confirm no member for as long as this process was late.
        After a pause, do so for the length of the pause, and announce that this member is alive
        before it is asked.
        """
        settings = self.settings
        late, gap = now - self.wake_at, now - self._evaluated_at
        self._evaluated_at = now
        if not settings.lifeguard:
            return
        if late > settings.interval - settings.timeout:
            self._calm_until = max(self._calm_until, now + min(gap, late))
        if gap <= settings.pause or self.own.state is LEFT:
            return
        yield Pause(gap)
        self._calm_until = max(self._calm_until, now + gap)
        self._probe = None
        self._relays.clear()
        self._refute(self.own.incarnation, now)
        for member in self._sample(self._present_others(), settings.gossip_nodes):
            yield self._send(MessageKind.GOSSIP, member.address, first=[self.own.update])

    @property
    def _is_calm(self) -> bool:
        """Whether this member currently accuses and confirms no other."""
        return self._is_paused or self._evaluated_at < self._calm_until or self.own.state is LEFT

    # Probes

    def _probe_tick(self, now: float) -> Iterator[Directive]:
        settings, scale, last = self.settings, self._scale, self._probe
        if last is not None and not last.answered and last.ends_at > now + 0.01:
            self._at(last.ends_at, self._probe_tick)
            return
        yield from self._end_probe(now)
        self._at(now + scale(settings.interval / settings.probes), self._probe_tick)
        target = self._next_target()
        if target is None or self.own.state is LEFT:
            return
        ends_at = now + scale(settings.interval)
        probe = self._probe = _Probe(next(self._numbers), target.name, now, ends_at)
        rest = scale(settings.interval - settings.timeout)
        self._at(now + scale(settings.timeout), lambda then: self._ask_others(probe, rest, then))
        # Send the suspicion to the suspect with the ping, so that it can refute immediately.
        first = [target.update] if target.state is SUSPECTED and settings.lifeguard else []
        yield self._send(
            MessageKind.PING, target.address, number=probe.number, target=target.name, first=first
        )

    def _ask_others(self, probe: _Probe, rest: float, now: float) -> Iterator[Directive]:
        """Ask others to probe a silent member within `rest` seconds, and try a connection."""
        target = self.members.get(probe.target)
        if probe is not self._probe or probe.answered or target is None:
            return
        probe.is_direct = False
        if self.settings.lifeguard:
            probe.ends_at = now + rest
        others = [one for one in self._present_others() if one is not target and one.state is ALIVE]
        for helper in self._sample(others, self.settings.indirect_probes):
            probe.helpers.add(helper.name)
            yield self._send(
                MessageKind.PING_REQUEST,
                helper.address,
                number=probe.number,
                target=target.name,
                about=target.address,
            )
        ping = self._send(MessageKind.PING, target.address, number=probe.number, target=target.name)
        yield ping._replace(reliable=True)

    def _end_probe(self, now: float) -> Iterator[Directive]:
        probe, self._probe = self._probe, None
        if probe is None:
            return
        if probe.answered:
            if probe.is_reliable_only:
                yield MissedDatagram(probe.target)
            return
        self.health.change(1 + len(probe.helpers))
        target = self.members.get(probe.target)
        if target is not None and not self._is_calm:
            accusation = GossipUpdate(SUSPECTED, target.name, target.incarnation, by=self.own.name)
            yield from self._apply(accusation, now, reason="no answer to a probe")

    def _next_target(self) -> Member | None:
        """Return the member to probe: all in turn, in an order that is shuffled for each round."""
        if not self._order:
            names = [one.name for one in self._present_others()]
            self._order = self._sample(names, len(names))
        return self.members[self._order.pop()] if self._order else None

    def _enqueue(self, name: str) -> None:
        """Insert a new member at a random place of this round of probes."""
        self._order.insert(int(self._rng() * (len(self._order) + 1)), name)

    def _answer(
        self, message: Message, address: str, now: float, *, reliable: bool
    ) -> Iterator[Directive]:
        kind, number = message.kind, message.number
        if kind == MessageKind.PING:
            if message.target == self.own.name and self.own.state is not LEFT:
                answer = self._send(MessageKind.ACK, address, number=number)
                yield answer._replace(reliable=reliable)
        elif kind == MessageKind.ACK:
            yield from self._acknowledged(message, now, reliable=reliable)
        elif kind == MessageKind.NACK:
            if self._probe is not None and self._probe.number == number:
                self._probe.helpers.discard(message.source)
        elif kind == MessageKind.PING_REQUEST:
            yield from self._relay(message, address, now)
        # Only over a connection: the source address of a datagram may be forged.
        elif kind == MessageKind.PUSH and reliable:
            yield Send(address, self._state(MessageKind.PULL), reliable=True)

    def _acknowledged(self, message: Message, now: float, *, reliable: bool) -> Iterator[Directive]:
        relay = self._relays.get(message.number)
        if relay is not None and relay.target == message.source:
            del self._relays[message.number]
            yield self._send(
                MessageKind.ACK, relay.address, number=relay.number, target=relay.target
            )
            return
        probe = self._probe
        if probe is None or probe.number != message.number:
            return
        if probe.target not in (message.source, message.target):
            return
        if probe.answered:
            probe.is_reliable_only &= reliable
            return
        probe.answered = True
        probe.is_reliable_only = reliable and not probe.is_direct
        self.health.change(-1)
        member = self.members.get(probe.target)
        if member is not None and probe.is_direct:
            member.round_trip = now - probe.sent_at
            yield RoundTrip(member.name, member.round_trip)

    def _relay(self, message: Message, address: str, now: float) -> Iterator[Send]:
        if len(self._relays) >= self.settings.max_members:
            return
        number = next(self._numbers)
        relay = self._relays[number] = _Relay(address, message.number, message.target)
        settings = self.settings
        patience = min(settings.timeout, settings.interval - settings.timeout)

        def give_up(_then: float) -> Iterator[Directive]:
            self._relays.pop(number, None)
            return iter(())

        def report_silence(then: float) -> Iterator[Directive]:
            if number in self._relays:
                self._at(then + patience, give_up)
                yield self._send(MessageKind.NACK, relay.address, number=relay.number)

        self._at(now + NACK_AFTER * patience, report_silence)
        yield self._send(MessageKind.PING, message.address, number=number, target=message.target)

    # Gossip

    def _spread(self, update: GossipUpdate, now: float) -> None:
        """Pass `update` on to others, with all messages and from the next gossip on."""
        self._gossip.add(update)
        if not self._is_gossiping:
            self._is_gossiping = True
            self._at(now + self.settings.gossip_interval * self._rng(), self._gossip_tick)

    def _gossip_tick(self, now: float) -> Iterator[Directive]:
        settings = self.settings
        self._is_gossiping = bool(self._gossip)
        if not self._is_gossiping:
            return
        self._at(now + settings.gossip_interval, self._gossip_tick)
        near = [
            member
            for member in self.members.values()
            if member.is_present or now - member.since < settings.gossip_to_dead
        ]
        for member in self._sample(near, settings.gossip_nodes):
            sent = self._send(MessageKind.GOSSIP, member.address)
            if sent.message.updates:
                yield sent

    def _exchange_tick(self, now: float) -> Iterator[Directive]:
        """Exchange the whole view with one member, and contact one that is considered dead."""
        settings = self.settings
        self._forget(now)
        rarely = max(1, ceil(log2(max(1, self._others) / MANY)) + 1)
        pause = settings.exchange_interval * rarely if self._others else settings.interval
        self._at(now + pause * (0.75 + 0.25 * self._rng()), self._exchange_tick)
        if self.own.state is LEFT:
            return
        addresses = [one.address for one in self._sample(self._present_others(), 1)]
        # The other side of a partition considers this one dead too: one side has to begin.
        gone = [one for one in self.members.values() if one.state is CONFIRMED]
        if gone:
            next_one = min(gone, key=lambda one: one.reminded_at)
            next_one.reminded_at = now
            addresses.append(next_one.address)
        for address in dict.fromkeys(addresses):
            yield Send(address, self._state(MessageKind.PUSH), reliable=True)

    def _state(self, kind: MessageKind) -> Message:
        """Return a message with the whole view."""
        updates = []
        for member in (self.own, *self.members.values()):
            if member.state is SUSPECTED:
                updates.append(member.introduction)  # for members that do not know it yet
            updates.append(member.update)
        return Message(kind, self.own.name, tuple(updates))

    def _forget(self, now: float) -> None:
        after = self.settings.forget_after
        for member in list(self.members.values()):
            if not member.is_present and now - member.since >= after:
                self._drop(member)

    def _drop(self, member: Member) -> None:
        """Forget a member that is gone."""
        del self.members[member.name]
        self._gossip.discard(member.name)

    # Updates

    def _apply(
        self, update: GossipUpdate, now: float, *, whole: bool = False, reason: str = "gossip"
    ) -> Iterator[Directive]:
        """Adopt a statement about a member, if it is news.

        `whole` means that it comes from a whole view. A member that is dead in such a view becomes
        only suspected here, so that it has a chance to refute.
        """
        if update.name == self.own.name:
            self._apply_own(update, now)
            return
        member = self.members.get(update.name)
        if update.state is ALIVE:
            yield from self._apply_alive(member, update, now)
            return
        if member is None or update.incarnation < member.incarnation or not member.is_present:
            return
        if update.state is LEFT:
            yield from self._move(member, update, now, "it left")
        elif update.state is CONFIRMED and not whole:
            yield from self._move(member, update, now, reason)
        else:
            yield from self._apply_suspicion(member, update._replace(state=SUSPECTED), now, reason)

    def _apply_own(self, update: GossipUpdate, now: float) -> None:
        """Refute what is said about this member, unless it is true."""
        own = self.own
        if own.state is LEFT:
            return
        if update.state is not ALIVE:
            if update.incarnation >= own.incarnation:
                self._refute(update.incarnation, now)
            else:
                self._spread(own.update, now)  # another member did not receive the refutation
        elif update.incarnation > own.incarnation or (
            update.incarnation == own.incarnation
            and (update.address, update.metadata) != (own.address, own.metadata)
        ):
            self._refute(update.incarnation, now)  # from an earlier process with the same name

    def _refute(self, incarnation: int, now: float) -> None:
        """Announce that this member is alive. The need to do so lowers its own health."""
        self.own.incarnation = max(self.own.incarnation, incarnation) + 1
        self.health.change(1)
        self._spread(self.own.update, now)

    def _apply_alive(
        self, member: Member | None, update: GossipUpdate, now: float
    ) -> Iterator[Directive]:
        if member is None:
            if not self._has_room():
                self.refused += 1
                return
            member = Member(update.name, update.address, update.incarnation, ALIVE, now)
            member.metadata = update.metadata
            member.reason, member.by = "it joined", update.name
            self.members[update.name] = member
            self._others += 1
            self._enqueue(update.name)
            self._spread(update, now)
            yield MembershipChange(update.name, None, ALIVE, member.reason, update.name, now, 0.0)
            return
        if update.incarnation <= member.incarnation:
            return
        member.address, member.metadata = update.address, update.metadata
        if member.state is ALIVE:
            member.incarnation = update.incarnation
            self._spread(update, now)
        else:
            reason = "it refuted" if member.state is SUSPECTED else "it came back"
            yield from self._move(member, update, now, reason)

    def _has_room(self) -> bool:
        """Return whether one more member fits. If necessary, drop the one gone for longest."""
        if len(self.members) + 1 < self.settings.max_members:
            return True
        if len(self.members) == self._others:
            return False
        gone = [one for one in self.members.values() if not one.is_present]
        self._drop(min(gone, key=lambda one: one.since))
        return True

    def _apply_suspicion(
        self, member: Member, update: GossipUpdate, now: float, reason: str
    ) -> Iterator[Directive]:
        settings = self.settings
        known = member.suspicion
        if known is not None and update.incarnation == member.incarnation:
            if settings.lifeguard and known.add_accuser(update.by):
                self._spread(update, now)
                self._schedule_verdict()
            return
        if known is not None:
            # It has refuted the suspicion known here, and is suspected again.
            refuted = member.introduction._replace(incarnation=update.incarnation)
            yield from self._move(member, refuted, now, "it refuted")
        suspicion = Suspicion(update.by, now, self._others + 1, settings)
        yield from self._move(member, update, now, reason)
        member.suspicion = suspicion
        self._schedule_verdict()

    def _schedule_verdict(self) -> None:
        """Wake when the first suspicion ends, if this member may confirm it then."""
        if self._is_paused or self.own.state is LEFT:
            self._verdict_at = inf
            return
        ends = (one.suspicion.ends_at for one in self._suspects.values() if one.suspicion)
        self._verdict_at = max(min(ends, default=inf), self._calm_until)

    def _confirm_overdue(self, now: float) -> Iterator[Directive]:
        """Confirm the members whose suspicion has lasted long enough."""
        if not self._is_calm:
            for member in list(self._suspects.values()):
                if member.suspicion is not None and member.suspicion.ends_at <= now:
                    verdict = member.update._replace(state=CONFIRMED, by=self.own.name)
                    yield from self._move(member, verdict, now, "it did not refute in time")
        self._schedule_verdict()

    def _move(
        self, member: Member, update: GossipUpdate, now: float, reason: str
    ) -> Iterator[Directive]:
        """Set `member` to the state in `update`, pass it on, and publish the change."""
        before, since, was_present = member.state, member.since, member.is_present
        after = member.state = update.state
        member.since, member.suspicion = now, None
        member.reason, member.by = reason, update.by or update.name
        member.incarnation = max(member.incarnation, update.incarnation)
        if before is SUSPECTED:
            del self._suspects[member.name]
            self._schedule_verdict()
        if after is SUSPECTED:
            self._suspects[member.name] = member
        if was_present and not member.is_present:
            self._others -= 1
            if member.name in self._order:
                self._order.remove(member.name)
        elif member.is_present and not was_present:
            self._others += 1
            self._enqueue(member.name)
        self._spread(update, now)
        yield MembershipChange(member.name, before, after, reason, member.by, now, now - since)

    # Helpers

    def _scale(self, seconds: float) -> float:
        return self.health.scale(seconds) if self.settings.lifeguard else seconds

    def _present_others(self) -> list[Member]:
        return [member for member in self.members.values() if member.is_present]

    def _send(
        self,
        kind: MessageKind,
        address: str,
        *,
        number: int = 0,
        target: str = "",
        about: str = "",
        first: Iterable[GossipUpdate] = (),
    ) -> Send:
        """Return a message with as much gossip as fits into its packet."""
        texts = len(self.own.name.encode()) + len(target.encode()) + len(about.encode())
        room = self.settings.packet - ENVELOPE - texts
        updates = self._gossip.take(room, self._others + 1, first)
        return Send(address, Message(kind, self.own.name, tuple(updates), number, target, about))

    def _sample(self, items: list[T], most: int) -> list[T]:
        """Return up to `most` of `items`, randomly chosen and in random order."""
        most = min(most, len(items))
        for place in range(most):
            other = place + int(self._rng() * (len(items) - place))
            items[place], items[other] = items[other], items[place]
        return items[:most]
