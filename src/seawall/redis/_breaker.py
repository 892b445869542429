"""The breakers of one policy, each the same in all pods.

Promises:
- A closed or open breaker costs no round trip.
- In half-open, no more probes are out than configured, in all pods together.
- What was counted or probed before a change of state changes nothing after it, in any pod.

One background job reports counts to the store, every 100 ms or sooner when failures mount, and
receives the state; changes are also pushed to all pods.
"""

from __future__ import annotations

import json
from asyncio import CancelledError
from collections.abc import Hashable, Sequence
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall.errors import StoreUnavailable
from seawall.models.breaker.settings import BreakerSettings
from seawall.models.breaker.state import BreakerModel, Refusal, State, Ticket
from seawall.redis._breaker_asking import Admission, Questions
from seawall.redis._breaker_mirror import FULL_FOR, Mirror
from seawall.redis._breaker_presence import Presence
from seawall.redis._breaker_untold import Sent
from seawall.redis._breaker_wire import (
    MOST_CALLS,
    Nonsense,
    Reply,
    Standing,
    answered,
    fingerprint,
    parse_push,
    parse_replies,
    settings_text,
    window_part,
)
from seawall.redis._keys import key_part
from seawall.runtime.breaker_share import BreakerOwner
from seawall.runtime.mutex import survives_fork

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.redis._store import RedisStore
    from seawall.runtime.layers import Kind

SPACING: Final = 0.01
"""Minimum seconds between two reports, however fast failures come."""

POLL: Final = 1.0
"""Interval in seconds for polling the state, if no push has come."""

POLL_IDLE: Final = 10.0
"""The same interval for an unused, closed breaker of one key among others."""

TOGETHER: Final = 32
"""Maximum number of breakers in one script call."""

_numbers = count()


class Parcel(NamedTuple):
    """One message to the store: keys and arguments, and what was sent for each mirror."""

    keys: list[str]
    args: list[str]
    sent: list[tuple[Mirror, Sent]]


class Share:
    """What a policy has in a store; the owner's lock also protects everything here."""

    full_for = FULL_FOR

    def __init__(
        self,
        store: RedisStore,
        name: str,
        settings: BreakerSettings,
        owner: BreakerOwner,
        *,
        on_store_failure: str,
        quorum: int | None,
        keyed: bool,
    ) -> None:
        """Start empty; contact the store on the first call."""
        self.store = store
        self.name = name
        self.on_store_failure = on_store_failure
        self.quorum = quorum
        self._keyed = keyed
        self.owner = owner
        self._mirrors: dict[str, Mirror] = {}
        self._alone = False
        self._questions = Questions(self)
        self._presence = Presence(self)
        self._flushed = float("-inf")
        self._set(settings)
        survives_fork(self)

    def __repr__(self) -> str:
        return f"<Share of breaker {self.name!r} in {self.store!r}>"

    # For the policy

    def model(self, key: Hashable) -> BreakerModel:
        """Return the model of `key`, which is new to this pod."""
        tag = key_part(key) if self._keyed else ""
        mirror = Mirror(self, self._settings, key, tag, self._keys(tag))
        self._mirrors[tag] = mirror
        return mirror

    def forget(self, model: BreakerModel) -> None:
        """Stop following this model; what the store knows of it stays."""
        if isinstance(model, Mirror) and self._mirrors.get(model.tag) is model:
            del self._mirrors[model.tag]

    def begin(self) -> None:
        """Start exchanging state with the store."""
        self._presence.begin()

    def ask(self, kind: Kind, model: BreakerModel, clock: Clock) -> Admission:
        """Return a waiter for the store's answer to a call."""
        assert isinstance(model, Mirror)  # noqa: S101 - it came from here
        id_ = self.new_id()
        asking = self.store.ask(kind, self._questions, (model, id_), clock)
        return Admission(self, model, id_, asking)

    def update(self, settings: BreakerSettings) -> None:
        """Publish other settings from now on."""
        self._set(settings)
        self._presence.announce_anew()

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the sharing."""
        mode = self.on_store_failure if self._alone else "shared"
        return {"name": self.name, "store": self.store.name, "mode": mode, "quorum": self.quorum}

    # For mirrors and admissions

    def new_id(self) -> str:
        """Return an id that is unique in all pods."""
        return f"{self.store.pod}-{next(_numbers)}"

    def soon(self) -> None:
        """Request an exchange with the store now."""
        self._presence.soon()

    def hurry(self, now: float) -> None:
        """Request an exchange now, unless there has just been one."""
        if not 0 <= now - self._flushed < SPACING:
            self.soon()

    def answered(self, mirror: Mirror, standing: Standing, granted: str) -> Ticket | Refusal:
        """Return what the store's answer means for a call."""
        now = self.owner.now()
        with self.owner.mutex:
            if self.store.up:
                mirror.adopt(standing, now)
            answer = mirror.answer(standing, granted, now)
        self._tell([mirror])
        return answer

    def unanswered(self, mirror: Mirror, id_: str, cause: str) -> Ticket | Refusal:
        """Decide about a call for which the store gives no answer."""
        now = self.owner.now()
        with self.owner.mutex:
            mirror.lose(id_)
            refusal = mirror.stay(now) if self.store.up else None
        if refusal is not None:
            return refusal
        self.lost([mirror], cause)
        with self.owner.mutex:
            answer = mirror.admit(now)
        self._tell([mirror])
        return answer

    def abandoned(self, mirror: Mirror, id_: str) -> None:
        """Give back what may have been granted to a caller that no longer waits."""
        self.owner.mutex.do(lambda: mirror.lose(id_))

    def unwanted(self, mirror: Mirror, granted: str) -> None:
        """Give back a permit whose caller no longer waits."""
        if granted:
            self.owner.mutex.do(lambda: mirror.give_back(granted))

    def lost(self, mirrors: Sequence[Mirror] | None, cause: str) -> None:
        """Continue without the store, with these mirrors or all."""
        now = self.owner.now()
        with self.owner.mutex:
            leaving = self._mirrors.values() if mirrors is None else mirrors
            gone = [mirror for mirror in leaving if mirror.away is None]
            first = bool(gone) and not self._alone
            self._alone = self._alone or first
            for mirror in gone:
                mirror.leave_store(now)
        if first:
            self.owner.mode_changed("shared", self.on_store_failure, cause)

    # In the background

    async def exchange(self, mirrors: Sequence[Mirror]) -> None:
        """Report the counts of these mirrors to the store, and adopt their state."""
        parcel = self.pack(mirrors)
        try:
            reply = await self.store.acall("breaker", parcel.keys, parcel.args)
            replies = parse_replies(reply, len(mirrors))
        except CancelledError:
            self._unheard(parcel)
            raise
        except StoreUnavailable as error:
            self._unheard(parcel)
            if not (self.store.up and answered(error)):
                return  # the store's health decides what that means
            if len(mirrors) == 1:
                self._doubt(mirrors[0], str(error))
                return
        else:
            self.take_in(parcel, replies)
            return
        for mirror in mirrors:  # perhaps the store cannot answer for only one of them
            await self.exchange([mirror])

    def pack(self, mirrors: Sequence[Mirror]) -> Parcel:
        """Return the report about these mirrors; pass it to `take_in` later."""
        now = self.owner.now()
        with self.owner.mutex:
            told = [(mirror, *mirror.outgoing(now)) for mirror in mirrors]
            keys, args = self.packed([(mirror, message) for mirror, message, _sent in told])
        return Parcel(keys, args, [(mirror, sent) for mirror, _message, sent in told])

    def take_in(self, parcel: Parcel, replies: Sequence[Reply | Nonsense]) -> None:
        """Process the store's answers to a parcel."""
        now = self.owner.now()
        doubted = []
        for (mirror, sent), reply in zip(parcel.sent, replies, strict=True):
            with self.owner.mutex:
                if self.store.up and isinstance(reply, Reply):
                    mirror.incoming(reply, sent, now)
                    continue
                mirror.unheard(sent)
            if isinstance(reply, Nonsense):
                doubted.append((mirror, reply.why))
        for mirror, why in doubted:
            self._doubt(mirror, why)
        self._tell([mirror for mirror, _sent in parcel.sent])

    async def run(self, time: float) -> None:
        """Do what is due at that time of the loop."""
        if not self.store.up:
            return
        self._flushed = now = self.owner.now()
        due = []
        for mirror in list(self._mirrors.values()):
            with self.owner.mutex:
                mirror.notice(now)
                if self._is_due(mirror, time):
                    due.append(mirror)
                    mirror.polled_at, mirror.used = time, False
        alone = [[mirror] for mirror in due if mirror.suspect]
        for together in [*_batches([mirror for mirror in due if not mirror.suspect]), *alone]:
            await self.exchange(together)
        self._tell(due)

    def _is_due(self, mirror: Mirror, time: float) -> bool:
        idle = self._keyed and mirror.state is State.CLOSED and not (mirror.used or mirror.away)
        waited = time - mirror.polled_at
        return (mirror.dirty and not mirror.suspect) or waited >= (POLL_IDLE if idle else POLL)

    def pushed(self, message: bytes) -> None:
        """Process a pushed change of any pod; an empty message means that much may have changed."""
        known = parse_push(message) if message else None
        if known is None:
            for mirror in list(self._mirrors.values()):
                mirror.polled_at = float("-inf")
            self.soon()
            return
        tag, standing = known
        whose = self._mirrors.get(tag)
        if whose is None:
            return
        with self.owner.mutex:
            heard = whose.heard(standing, self.owner.now())
        if not heard:
            whose.polled_at = float("-inf")
            self.soon()
        self._tell([whose])

    def watched(self, up: bool, cause: str) -> None:  # noqa: FBT001 - the signature of watchers
        """Record that the store went away, or came back."""
        if up:
            self.soon()
        else:
            self.lost(None, cause)

    # Inside

    def _set(self, settings: BreakerSettings) -> None:
        if settings.window_calls is not None and settings.window_calls > MOST_CALLS:
            raise ValueError(
                f"window_calls={settings.window_calls}: pods can share windows of up to"
                f" {MOST_CALLS} calls; write that or less, or a window of seconds"
            )
        self._settings = settings
        self._text = settings_text(settings, self.quorum)
        for tag, mirror in self._mirrors.items():
            mirror.keys = self._keys(tag)

    def _keys(self, tag: str) -> list[str]:
        part = window_part(self._settings)
        names = ("state", "probes", f"window-{part}", f"failed-{part}", f"slow-{part}")
        parts = (tag,) if tag else ()
        every = (*names, "votes", "gone")
        return [self.store.key("breaker", self.name, *parts, name) for name in every]

    def packed(self, told: list[tuple[Mirror, dict[str, Any]]]) -> tuple[list[str], list[str]]:
        keys = [key for mirror, _message in told for key in mirror.keys]
        fresh = {"fresh": f"l{token_hex(8)}", "pod": self.store.pod}
        messages = [json.dumps(message | fresh) for _mirror, message in told]
        return keys, [self._text, self.store.channel("breaker", self.name), *messages]

    def _tell(self, mirrors: Sequence[Mirror]) -> None:
        """Report changes, without the lock."""
        for mirror in mirrors:
            if mirror.changes:
                self.owner.report(mirror, mirror.key)
        if self._alone:
            with self.owner.mutex:
                back = self._alone and all(one.away is None for one in self._mirrors.values())
                self._alone = self._alone and not back
            if back:
                self.owner.mode_changed(self.on_store_failure, "shared", "the store answers")

    def _unheard(self, parcel: Parcel) -> None:
        with self.owner.mutex:
            for mirror, sent in parcel.sent:
                mirror.unheard(sent)

    def _doubt(self, mirror: Mirror, cause: str) -> None:
        """Continue without the store if it answers, but not for this breaker."""
        with self.owner.mutex:
            mirror.suspect = True
        self.lost([mirror], cause)

    # For the background

    def fingerprint(self) -> str:
        """Return the settings as text, for comparing them between pods."""
        return fingerprint(self._settings, self.quorum)

    def differs(self, own: str, other: str) -> None:
        """Report that another pod has other settings."""
        self.owner.settings_differ(own, other)

    async def end(self) -> None:
        """Report to the store what it has not heard, then continue without it."""
        dirty = [mirror for mirror in self._mirrors.values() if mirror.dirty]
        for together in _batches(dirty):
            await self.exchange(together)
        self.lost(None, "the store was closed")

    def _after_fork(self) -> None:
        """Become another pod, which has counted nothing yet."""
        self._presence.after_fork()
        self._alone = False
        for mirror in self._mirrors.values():
            mirror.forked()


def _batches(mirrors: list[Mirror]) -> list[list[Mirror]]:
    return [mirrors[first : first + TOGETHER] for first in range(0, len(mirrors), TOGETHER)]
