"""The breakers of one policy, each the same in all pods.

Promises:
- A closed or open breaker costs no round trip.
- In half-open, no more probes are out than configured, in all pods together.
- What was counted or probed before a change of state changes nothing after it, in any pod.

One background job (`SharedBreakers.run`) reports counts to the store, every 100 ms or sooner when
failures mount, and receives the state; changes are also pushed to all pods. A call that asks for
permission (`BreakerAdmission`) is answered together with all others waiting then.
"""

from __future__ import annotations

import json
from asyncio import CancelledError, get_running_loop
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import finalize, ref

from seawall._forks import survives_fork
from seawall.errors import StoreUnavailable
from seawall.models.breaker.settings import BreakerSettings
from seawall.models.breaker.state import BreakerModel, BreakerRefusal, BreakerState, Ticket
from seawall.redis.breaker.mirror import FULL_FOR, BreakerMirror, SentReports
from seawall.redis.breaker.wire import (
    MOST_CALLS,
    BreakerReply,
    BreakerStanding,
    InvalidReply,
    answered,
    fingerprint,
    parse_push,
    parse_replies,
    settings_text,
    window_part,
)
from seawall.redis.keys import key_part
from seawall.redis.messages import weakly, weakly_awaited
from seawall.runtime.store import BreakerOwner

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.redis.store import StoreCore
    from seawall.runtime.background import Handle
    from seawall.runtime.layers import Kind
    from seawall.runtime.store import StoreQuestion

FLUSH: Final = 0.1
"""Maximum seconds between two reports of counts."""

SPACING: Final = 0.01
"""Minimum seconds between two reports, however fast failures come."""

POLL: Final = 1.0
"""Interval in seconds for polling the state, if no push has come."""

POLL_IDLE: Final = 10.0
"""The same interval for an unused, closed breaker of one key among others."""

TOGETHER: Final = 32
"""Maximum number of breakers in one script call."""

_numbers = count()


class BreakerMessage(NamedTuple):
    """One message to the store: keys and arguments, and what was sent for each mirror."""

    keys: list[str]
    args: list[str]
    sent: list[tuple[BreakerMirror, SentReports]]


class SharedBreakers:
    """What a policy has in a store; the owner's lock also protects everything here."""

    full_for = FULL_FOR

    def __init__(
        self,
        store: StoreCore,
        name: str,
        settings: BreakerSettings,
        owner: BreakerOwner,
        *,
        on_store_failure: str,
        quorum: int | None,
        keyed: bool,
    ) -> None:
        self.store = store
        self.name = name
        self.on_store_failure = on_store_failure
        self.quorum = quorum
        self._keyed = keyed
        self.owner = owner
        self._mirrors: dict[str, BreakerMirror] = {}
        self._alone = False
        self._questions = AdmissionQuestions(self)
        self._idle = [True]
        """Empty once `begin` was called, in this process."""
        self._job: Handle | None = None
        self._stop_announcing: Callable[[], object] = lambda: None
        self._flushed = float("-inf")
        self._set(settings)
        survives_fork(self)

    def __repr__(self) -> str:
        return f"<SharedBreakers of breaker {self.name!r} in {self.store!r}>"

    # For the policy

    def model(self, key: Hashable) -> BreakerModel:
        """Return the model of `key`, which is new to this pod."""
        tag = key_part(key) if self._keyed else ""
        mirror = BreakerMirror(self, self._settings, key, tag, self._keys(tag))
        self._mirrors[tag] = mirror
        return mirror

    def forget(self, model: BreakerModel) -> None:
        """Stop following this model; what the store knows of it stays."""
        if isinstance(model, BreakerMirror) and self._mirrors.get(model.tag) is model:
            del self._mirrors[model.tag]

    def begin(self) -> None:
        """Start exchanging state with the store: once, and once more in a child process.

        No lock is held meanwhile: the garbage collector may run at any moment and need a lock that
        a waiting thread holds. Of concurrent first calls one registers, the others continue.
        """
        if not self._idle:
            return
        try:
            self._idle.pop()  # atomic: only one of two threads gets it
        except IndexError:
            return
        begun = False
        try:
            self.store.start()
            if self._job is None:
                self._register()
            begun = True
        except StoreUnavailable:
            pass  # closed: callers that ask it will notice
        finally:
            if not begun:
                self._idle.append(True)

    def _register(self) -> None:
        """Add the background job and the listeners, for as long as this object lives."""
        store = self.store
        self._announce()
        job = store.every(FLUSH, weakly_awaited(self.run))
        finalize(self, job.stop)
        finalize(self, store.listen(store.channel("breaker", self.name), weakly(self.pushed)))
        finalize(self, store.watch(weakly(self.store_changed)))
        store.at_close(self.end)
        self._job = job

    def _announce(self) -> None:
        """Announce the settings to the other pods."""
        self._stop_announcing()
        own, report = fingerprint(self._settings, self.quorum), self.owner.settings_differ
        handle = self.store.announce("breaker", self.name, own, lambda other: report(own, other))
        self._stop_announcing = finalize(self, handle.stop)

    def ask(
        self, kind: Kind, model: BreakerModel, clock: Clock, result: Callable[[Any], Any]
    ) -> BreakerAdmission:
        """Return a waiter for the store's answer to a call, which `result` turns into its claim."""
        assert isinstance(model, BreakerMirror)  # noqa: S101 - it came from here
        id_ = self.new_id()
        question = self.store.ask(kind, self._questions, (model, id_), clock)
        return BreakerAdmission(self, model, id_, question, result)

    def update(self, settings: BreakerSettings) -> None:
        """Publish other settings from now on."""
        self._set(settings)
        if self._job is not None:
            self._announce()

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
        if self._job is not None:
            self._job.soon()

    def flush_soon(self, now: float) -> None:
        """Request an exchange now, unless there has just been one."""
        if not 0 <= now - self._flushed < SPACING:
            self.soon()

    def answered(
        self, mirror: BreakerMirror, standing: BreakerStanding, granted: str
    ) -> Ticket | BreakerRefusal:
        """Return what the store's answer means for a call."""
        now = self.owner.now()
        with self.owner.mutex:
            if self.store.up:
                mirror.adopt(standing, now)
            answer = mirror.answer(standing, granted, now)
        self._publish([mirror])
        return answer

    def unanswered(self, mirror: BreakerMirror, id_: str, cause: str) -> Ticket | BreakerRefusal:
        """Decide about a call for which the store gives no answer."""
        now = self.owner.now()
        with self.owner.mutex:
            mirror.report_lost(id_)
            refusal = mirror.follow_on(now) if self.store.up else None
        if refusal is not None:
            return refusal
        self.lost([mirror], cause)
        with self.owner.mutex:
            answer = mirror.admit(now)
        self._publish([mirror])
        return answer

    def abandoned(self, mirror: BreakerMirror, id_: str) -> None:
        """Give back what may have been granted to a caller that no longer waits."""
        self.owner.mutex.do(lambda: mirror.report_lost(id_))

    def unwanted(self, mirror: BreakerMirror, granted: str) -> None:
        """Give back a permit whose caller no longer waits."""
        if granted:
            self.owner.mutex.do(lambda: mirror.give_back(granted))

    def lost(self, mirrors: Sequence[BreakerMirror] | None, cause: str) -> None:
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

    async def exchange(self, mirrors: Sequence[BreakerMirror]) -> None:
        """Report the counts of these mirrors to the store, and adopt their state."""
        message = self.pack(mirrors)
        try:
            reply = await self.store.acall("breaker", message.keys, message.args)
            replies = parse_replies(reply, len(mirrors))
        except CancelledError:
            self._not_answered(message)
            raise
        except StoreUnavailable as error:
            self._not_answered(message)
            if not (self.store.up and answered(error)):
                return  # the store's health decides what that means
            if len(mirrors) == 1:
                self._suspect(mirrors[0], str(error))
                return
        else:
            self.process_replies(message, replies)
            return
        for mirror in mirrors:  # perhaps the store cannot answer for only one of them
            await self.exchange([mirror])

    def pack(self, mirrors: Sequence[BreakerMirror]) -> BreakerMessage:
        """Return the report about these mirrors; pass it to `process_replies` later."""
        now = self.owner.now()
        with self.owner.mutex:
            messages = [(mirror, *mirror.outgoing(now)) for mirror in mirrors]
            keys, args = self.packed([(mirror, message) for mirror, message, _sent in messages])
        return BreakerMessage(keys, args, [(mirror, sent) for mirror, _message, sent in messages])

    def process_replies(
        self, message: BreakerMessage, replies: Sequence[BreakerReply | InvalidReply]
    ) -> None:
        """Process the store's answers to a message."""
        now = self.owner.now()
        suspects = []
        for (mirror, sent), reply in zip(message.sent, replies, strict=True):
            with self.owner.mutex:
                if self.store.up and isinstance(reply, BreakerReply):
                    mirror.incoming(reply, sent, now)
                    continue
                mirror.not_answered(sent)
            if isinstance(reply, InvalidReply):
                suspects.append((mirror, reply.why))
        for mirror, why in suspects:
            self._suspect(mirror, why)
        self._publish([mirror for mirror, _sent in message.sent])

    async def run(self) -> None:
        """Exchange what is due: a job of the background."""
        if not self.store.up:
            return
        time = get_running_loop().time()
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
        self._publish(due)

    def _is_due(self, mirror: BreakerMirror, time: float) -> bool:
        idle = (
            self._keyed and mirror.state is BreakerState.CLOSED and not (mirror.used or mirror.away)
        )
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
            adopted = whose.receive_push(standing, self.owner.now())
        if not adopted:
            whose.polled_at = float("-inf")
            self.soon()
        self._publish([whose])

    def store_changed(self, up: bool, cause: str) -> None:  # noqa: FBT001 - the signature of watchers
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

    def packed(
        self, entries: list[tuple[BreakerMirror, dict[str, Any]]]
    ) -> tuple[list[str], list[str]]:
        """Return keys and arguments of the script call for these mirrors."""
        keys = [key for mirror, _message in entries for key in mirror.keys]
        fresh = {"fresh": f"l{token_hex(8)}", "pod": self.store.pod}
        messages = [json.dumps(message | fresh) for _mirror, message in entries]
        return keys, [self._text, self.store.channel("breaker", self.name), *messages]

    def _publish(self, mirrors: Sequence[BreakerMirror]) -> None:
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

    def _not_answered(self, message: BreakerMessage) -> None:
        with self.owner.mutex:
            for mirror, sent in message.sent:
                mirror.not_answered(sent)

    def _suspect(self, mirror: BreakerMirror, cause: str) -> None:
        """Continue without the store if it answers, but not for this breaker."""
        with self.owner.mutex:
            mirror.suspect = True
        self.lost([mirror], cause)

    async def end(self) -> None:
        """Report to the store what it does not know yet, then continue without it."""
        dirty = [mirror for mirror in self._mirrors.values() if mirror.dirty]
        for together in _batches(dirty):
            await self.exchange(together)
        self.lost(None, "the store was closed")

    def _after_fork(self) -> None:
        """Become another pod, which has counted nothing yet."""
        self._idle = [True]  # the background thread is gone, but its jobs are still registered
        self._alone = False
        for mirror in self._mirrors.values():
            mirror.after_fork()


def _batches(mirrors: list[BreakerMirror]) -> list[list[BreakerMirror]]:
    return [mirrors[first : first + TOGETHER] for first in range(0, len(mirrors), TOGETHER)]


class AdmissionQuestions:
    """Calls that ask for permission: all that wait go as one script call.

    An event loop's link keeps this alive for as long as it lives, but not the share.
    """

    script = "breaker"
    most = 64

    def __init__(self, share: SharedBreakers) -> None:
        self._share = ref(share)

    def pack(self, items: Sequence[tuple[BreakerMirror, str]]) -> tuple[list[str], list[str]]:
        """Return keys and arguments of the script call for all `items`."""
        share = self._share()
        if share is None:
            raise StoreUnavailable("the breaker is gone")
        now = share.owner.now()
        with share.owner.mutex:
            asked = {mirror: mirror.question(now) for mirror, _id in items}
            for mirror, id_ in items:
                asked[mirror]["asked"].append(id_)
            return share.packed(list(asked.items()))

    def unpack(
        self, reply: object, items: Sequence[tuple[BreakerMirror, str]]
    ) -> list[tuple[BreakerStanding, str] | InvalidReply]:
        """Return for each of `items` the breaker's state, and the granted probe's id or ""."""
        mirrors = list(dict.fromkeys(mirror for mirror, _id in items))
        replies = dict(zip(mirrors, parse_replies(reply, len(mirrors)), strict=True))
        granted = {
            mirror: iter(one.granted)
            for mirror, one in replies.items()
            if isinstance(one, BreakerReply)
        }
        answers: list[tuple[BreakerStanding, str] | InvalidReply] = []
        for mirror, id_ in items:
            one = replies[mirror]
            if isinstance(one, InvalidReply):
                answers.append(one)
                continue
            said = next(granted[mirror], "nothing")
            answers.append(
                (one.standing, said) if said in ("", id_) else InvalidReply("another probe")
            )
        return answers

    def unwanted(
        self, item: tuple[BreakerMirror, str], answer: tuple[BreakerStanding, str] | InvalidReply
    ) -> None:
        """Give back what was granted to a caller that no longer waits."""
        share = self._share()
        if share is not None and not isinstance(answer, InvalidReply):
            share.unwanted(item[0], answer[1])


class BreakerAdmission:
    """A call that waits for the store's answer."""

    def __init__(
        self,
        share: SharedBreakers,
        mirror: BreakerMirror,
        id_: str,
        question: StoreQuestion,
        result: Callable[[Any], Any],
    ) -> None:
        self._share = share
        self._mirror = mirror
        self._id = id_
        self._question = question
        self._result = result
        self.until: float | None = question.until

    def publish(self, wake: Callable[[], bool]) -> None:
        """Ask the store."""
        self._question.publish(wake)

    def claim(self) -> Any:
        """Return the result for what a model's `admit` would return."""
        return self._result(self._answer())

    def _answer(self) -> Ticket | BreakerRefusal:
        try:
            answer = self._question.claim()
        except StoreUnavailable as error:
            return self._share.unanswered(self._mirror, self._id, str(error))
        if isinstance(answer, InvalidReply):
            return self._share.unanswered(self._mirror, self._id, answer.why)
        return self._share.answered(self._mirror, *answer)

    def abandon(self) -> None:
        """Stop waiting; a probe that was or will be granted is given back."""
        self._question.abandon()
        self._share.abandoned(self._mirror, self._id)
