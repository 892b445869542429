"""A call that asks the store for permission, together with all others waiting then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import ref

from seawall.errors import StoreUnavailable
from seawall.models.breaker.probes import Probe
from seawall.models.breaker.state import Refusal, Ticket
from seawall.redis._breaker_wire import Nonsense, Reply, Standing, parse_replies

if TYPE_CHECKING:
    from seawall.redis._breaker import Share
    from seawall.redis._breaker_mirror import Mirror
    from seawall.runtime.asking import Asking


class Questions:
    """Calls that ask for permission: all that wait go as one script call.

    An event loop's link keeps this alive for as long as it lives, but not the share.
    """

    script = "breaker"
    most = 64

    def __init__(self, share: Share) -> None:
        self._share = ref(share)

    def pack(self, items: Sequence[tuple[Mirror, str]]) -> tuple[list[str], list[str]]:
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
        self, reply: object, items: Sequence[tuple[Mirror, str]]
    ) -> list[tuple[Standing, str] | Nonsense]:
        """Return for each of `items` the breaker's state, and the granted probe's id or ""."""
        mirrors = list(dict.fromkeys(mirror for mirror, _id in items))
        replies = dict(zip(mirrors, parse_replies(reply, len(mirrors)), strict=True))
        granted = {
            mirror: iter(one.granted) for mirror, one in replies.items() if isinstance(one, Reply)
        }
        answers: list[tuple[Standing, str] | Nonsense] = []
        for mirror, id_ in items:
            one = replies[mirror]
            if isinstance(one, Nonsense):
                answers.append(one)
                continue
            said = next(granted[mirror], "nothing")
            answers.append((one.standing, said) if said in ("", id_) else Nonsense("another probe"))
        return answers

    def unwanted(self, item: tuple[Mirror, str], answer: tuple[Standing, str] | Nonsense) -> None:
        """Give back what was granted to a caller that no longer waits."""
        share = self._share()
        if share is not None and not isinstance(answer, Nonsense):
            share.unwanted(item[0], answer[1])


class Leased(Probe):
    """The ticket of a probe that the store has granted."""

    __slots__ = ("id",)

    def __init__(self, id_: str, generation: int, now: float, timeout: float) -> None:
        """Remember its id, by which it is settled."""
        super().__init__(generation, now, timeout, 0)
        self.id = id_


class Admission:
    """A call that waits for the store's answer."""

    __slots__ = ("_asking", "_id", "_mirror", "_share", "until")

    def __init__(self, share: Share, mirror: Mirror, id_: str, asking: Asking) -> None:
        self._share = share
        self._mirror = mirror
        self._id = id_
        self._asking = asking
        self.until: float | None = asking.until

    def publish(self, wake: Callable[[], bool]) -> None:
        """Ask the store."""
        self._asking.publish(wake)

    def claim(self) -> Ticket | Refusal:
        """Return what a model's `admit` would."""
        try:
            answer = self._asking.claim()
        except StoreUnavailable as error:
            return self._share.unanswered(self._mirror, self._id, str(error))
        if isinstance(answer, Nonsense):
            return self._share.unanswered(self._mirror, self._id, answer.why)
        return self._share.answered(self._mirror, *answer)

    def abandon(self) -> None:
        """Stop waiting; a probe that was or will be granted is given back."""
        self._asking.abandon()
        self._share.abandoned(self._mirror, self._id)
