"""`sharing="exact"`: the store makes every decision; equal concurrent questions are merged.

Calls of one event loop that want the same, and come before the question is sent, join one
`QuestionRound`: one question with a count. It costs each of them little more than the wait itself.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future, get_running_loop
from collections.abc import Sequence
from typing import TYPE_CHECKING

from seawall.clock import Clock
from seawall.errors import StoreUnavailable
from seawall.redis.limits.shared import SharedLimits
from seawall.redis.limits.wire import MOST_QUESTIONS, LimitTerms, ScriptKeys, TakeRequest, Takings
from seawall.runtime.store import LimitVerdict, Receipt, WantedCharge

if TYPE_CHECKING:
    from seawall.runtime.store import StoreQuestion


class ExactLimits(SharedLimits):
    """The limits of one policy in the store, each decision exact: `LimitShare`."""

    def __init__(self, *args: object, **options: object) -> None:
        self._rounds: dict[Takings, QuestionRound] = {}
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def _after_fork(self) -> None:
        super()._after_fork()
        self._rounds.clear()

    async def answer(self, charges: Sequence[WantedCharge], clock: Clock) -> LimitVerdict:
        """Return the store's verdict."""
        takings, estimated = self.wanted(charges)
        if estimated:
            return await super().answer(charges, clock)
        loop = get_running_loop()
        round_ = self._rounds.get(takings)
        if round_ is None or round_.loop is not loop or round_.terms is not self.terms:
            round_ = self._rounds[takings] = QuestionRound(self.terms, takings, loop, self._rounds)
        self.asks += 1
        bell = loop.create_future()
        bells = round_.bells
        number = len(bells)
        bells.append(bell)
        if number == 0:  # ask only now: the answer may come immediately, and wakes the bell
            round_.ask_by(self.store.ask("async", self.terms, round_, clock))
        elif number >= MOST_QUESTIONS:
            self._rounds.pop(takings, None)
        try:
            await bell
        except BaseException:
            round_.leave(number)
            raise
        if round_.error:
            raise StoreUnavailable(round_.error)
        return round_.verdicts[number]


class QuestionRound(TakeRequest):
    """One question for several calls of one event loop."""

    __slots__ = ("_open", "_question", "bells", "error", "loop", "verdicts")

    def __init__(
        self,
        terms: LimitTerms,
        takings: Takings,
        loop: AbstractEventLoop,
        rounds: dict[Takings, QuestionRound],
    ) -> None:
        """Accept further calls that want `takings`, while it is in `rounds`."""
        super().__init__(terms, takings, frozenset(), "")
        self.loop = loop
        self.bells: list[Future[None] | None] = []
        """One for each call, in order; None for a call that no longer waits."""
        self.verdicts: Sequence[LimitVerdict] = ()
        """One for each call, once they have come."""
        self.error = ""
        """Why there are none."""
        self._open = rounds
        self._question: StoreQuestion | None = None

    def ask_by(self, question: StoreQuestion) -> None:
        """Ask the store."""
        self._question = question
        try:
            question.publish(self._answered)
        except BaseException:
            self._close()
            raise

    def ask(self, names: ScriptKeys, times: int = 1) -> str:
        """Return the question for all calls that have joined, and close the round."""
        self._close()
        return super().ask(names, max(times, len(self.bells)))

    def _close(self) -> None:
        """Accept no further calls."""
        if self._open.get(self.takings) is self:
            # This may pop a round that another loop just began: that is closed, but still sent.
            self._open.pop(self.takings, None)

    def read(self, answer: str, now: int) -> LimitVerdict:
        """Parse the verdicts, one for each call."""
        answers = answer.split("|")
        if len(answers) != len(self.bells):
            raise ValueError(answer)
        taken = super().read("0", now)  # shared by all calls with the plain answer
        self.verdicts = [
            taken
            if one == "0"
            else TakeRequest(self.terms, self.takings, frozenset(), "").read(one, now)
            for one in answers
        ]
        return taken

    def _answered(self) -> bool:
        """Wake all waiters; give back what was granted to calls that have gone."""
        assert self._question is not None  # noqa: S101 - for the type checker
        try:
            self._question.claim()
        except StoreUnavailable as error:
            self.error = str(error)
        self._close()  # it may never have been sent
        self._question = None
        for number, bell in enumerate(self.bells):
            if bell is None:
                self._give_back(number)
            elif not bell.done():
                bell.set_result(None)
        return True

    def leave(self, number: int) -> None:
        """Stop a call from waiting; give back, once, what it was or will be granted."""
        self.bells[number] = None
        # Otherwise `granted` does it, if the answer comes too late.
        if self._question is None and not self.error:
            self._give_back(number)

    def _give_back(self, number: int) -> None:
        receipt = self.verdicts[number].receipt if self.verdicts else None
        if receipt is not None:
            self.terms.give_back(receipt)

    def granted(self, answer: LimitVerdict) -> Receipt | None:
        """Give back a late answer, after all calls have seen that the store failed."""
        del answer
        for number in range(len(self.bells)):
            self._give_back(number)
        return None
