from __future__ import annotations

import asyncio
from functools import partial

import pytest

from seawall import (
    Bulkhead,
    CircuitOpen,
    Fallback,
    Guard,
    Rejected,
    Retry,
    TimedOut,
    static,
)
from seawall.policies.fallback import fallback_reason
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, slow
from tests.support import new_guard

_BROKEN = ScriptedService(fail(ConnectionError)).call


def _raise(error):
    def level(*_args, **_kwargs):
        raise error

    return level


def test_the_real_answer_is_passed_on():
    """A success never meets a fallback."""
    level = ScriptedService(answer("level"))
    result = Guard("vendor", Fallback(level.call)).attempt(lambda: None)
    assert (result.value, result.level, level.calls) == (None, 0, 0)


def test_levels_are_tried_in_order():
    """The first level that returns answers, whatever it returns; later ones are not asked."""
    last = ScriptedService(answer("last"))
    policy = Fallback(_raise(LookupError()), static(None), last.call)
    result = Guard("vendor", policy).attempt(_BROKEN)
    assert (result.ok, result.value, result.level, last.calls) == (True, None, 2, 0)


def test_a_level_gets_the_arguments_of_the_call():
    """A level takes the call's arguments, or none at all."""

    class Levels:
        def with_self(self, user, *, lang):
            return f"method {user} {lang}"

        def only_self(self):
            return "only self"

        @classmethod
        def only_class(cls):
            return "only class"

    levels = {
        "both": lambda user, lang: f"{user} {lang}",
        "none": lambda: "none",
        "any": lambda *args, **kwargs: f"{args} {kwargs}",
        "keyword": lambda *_, lang: lang,
        "method": Levels().with_self,
        "only self": Levels().only_self,
        "only class": Levels.only_class,
    }
    answers = {
        name: Guard(name, Fallback(level)).call(_BROKEN, "ann", lang="de")
        for name, level in levels.items()
    }
    assert answers == {
        "both": "ann de",
        "none": "none",
        "any": "('ann',) {'lang': 'de'}",
        "keyword": "de",
        "method": "method ann de",
        "only self": "only self",
        "only class": "only class",
    }


def test_a_level_that_takes_nothing_may_be_guarded_itself():
    """A decorated function without parameters is a level like the bare one."""
    backup = Guard("backup", Bulkhead(1))

    @backup
    def copy():
        return "copy"

    assert Guard("vendor", Fallback(copy)).call(_BROKEN, "ann") == "copy"


def test_if_no_level_answers_the_real_error_is_raised():
    """The error of the real call comes out itself; the last level's is in its notes."""
    error = ConnectionError("real")
    guard = Guard("vendor", Fallback(_raise(LookupError("level"))))
    for _ in range(3):
        with pytest.raises(ConnectionError) as raised:
            guard.call(_raise(error))
        assert raised.value is error
    notes = error.__notes__
    assert notes == ["seawall: the last fallback failed too: LookupError('level')"]


def test_only_the_named_errors_are_answered():
    """With on=..., other errors pass, also those of a level."""
    guard = Guard("vendor", Fallback(static("later"), on=(LookupError, Rejected)))
    assert guard.call(_raise(KeyError())) == "later"
    assert guard.call(_raise(CircuitOpen())) == "later"
    with pytest.raises(ConnectionError):
        guard.call(_BROKEN)


def test_the_reason_is_told_to_the_level():
    """fallback_reason() is the real call's error inside each level, and None outside."""
    seen = []

    def first():
        seen.append(fallback_reason())
        raise LookupError

    async def second():
        seen.append(fallback_reason())
        await ScriptedService(answer()).acall()
        seen.append(fallback_reason())
        return "later"

    async def main():
        guard = Guard("vendor", Fallback(first, second))
        answered = await guard.acall(ScriptedService(fail(ConnectionError)).acall)
        return answered, fallback_reason()

    assert run_virtual(main()) == ("later", None)
    assert [type(reason) for reason in seen] == [ConnectionError] * 3


def test_an_async_level_cannot_answer_a_plain_call():
    """The plain call's error says so in a note; nothing is left unawaited."""

    async def level():
        return "never"

    with pytest.raises(ConnectionError) as raised:
        Guard("vendor", Fallback(level)).call(_raise(ConnectionError()))
    assert "pass a plain function" in raised.value.__notes__[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_exits_are_not_answered(error):
    """Neither the real call's exit nor a level's is answered."""
    guard = Guard("vendor", Fallback(static("later")))
    with pytest.raises(error):
        guard.call(_raise(error()))
    nested = Guard("nested", Fallback(_raise(error()), static("later")))
    with pytest.raises(error):
        nested.call(_BROKEN)


def test_cancellation_is_not_answered():
    """A cancelled call stays cancelled, in the real call and in a level."""

    async def main():
        level = ScriptedService(hang())
        last = ScriptedService(answer())
        guard = Guard("vendor", Fallback(level.acall, last.acall))
        tasks = [
            asyncio.ensure_future(guard.acall(ScriptedService(step).acall))
            for step in (hang(), fail(ConnectionError))
        ]
        await asyncio.wait(tasks, timeout=1.0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return [task.cancelled() for task in tasks], level.calls, last.calls

    assert run_virtual(main()) == ([True, True], 1, 0)


def test_levels_are_counted():
    """The snapshot tells how often each level answered."""
    guard = Guard("vendor", Fallback(_raise(LookupError()), static("later")))
    guard.call(_BROKEN)
    guard.call(lambda: 1)
    snapshot = guard.snapshot()
    assert list(snapshot["policies"][0]["levels"].values()) == [0, 1]
    assert "static" in snapshot["policies"][0]["levels"]
    assert (snapshot["degraded"], snapshot["failed"], snapshot["succeeded"]) == (1, 1, 1)


def test_levels_of_one_name_are_counted_apart():
    """Two levels that look alike are two in the snapshot."""
    guard = Guard("vendor", Fallback(_raise(KeyError()), _raise(ValueError()), static(1)))
    guard.call(_BROKEN)
    assert sum(guard.snapshot()["policies"][0]["levels"].values()) == 1
    assert len(guard.snapshot()["policies"][0]["levels"]) == 3


# --- Inside a Retry ---


def _inside_retry(*levels, attempts=2):
    retry = Retry(on=ConnectionError, attempts=attempts, backoff=0.0)
    return Guard("vendor", retry, Fallback(*levels, on=ConnectionError))


def test_every_attempt_asks_all_levels():
    """When no level answers, the error goes on to Retry, attempt after attempt."""
    level = ScriptedService(fail(LookupError))
    service = ScriptedService(fail(ConnectionError))
    result = _inside_retry(level.call).attempt(service.call)
    assert isinstance(result.error, ConnectionError)
    assert (service.calls, level.calls) == (2, 2)


def test_a_later_real_answer_is_real():
    """A success after an attempt that no level could answer has level 0."""
    guard = _inside_retry(_raise(LookupError()))
    result = guard.attempt(ScriptedService(fail(ConnectionError), answer("real")).call)
    assert (result.value, result.level, result.reason) == ("real", 0, None)
    assert guard.snapshot()["degraded"] == 0


def test_a_level_may_answer_a_later_attempt():
    """A level that failed for one attempt may answer for the next."""
    level = ScriptedService(fail(LookupError), answer("level"))
    result = _inside_retry(level.call).attempt(_BROKEN)
    assert (result.value, result.level, result.attempts) == ("level", 1, 2)


def test_a_timed_out_call_is_answered():
    """Our own timeout is an error like others: the fallback answers it."""

    async def main():
        from seawall import Timeout

        guard = Guard("vendor", Fallback(static("later"), on=TimedOut), Timeout(1.0))
        return await guard.aattempt(ScriptedService(slow(5.0)).acall)

    result = run_virtual(main())
    assert (result.value, result.reason, result.elapsed) == ("later", "timed_out", 1.0)


def test_the_repr_names_the_levels():
    """The repr of a fallback reads as it was written."""

    def cached_answer():
        return None

    assert repr(Fallback(cached_answer, static("try later"))).endswith(
        "cached_answer, static('try later'))"
    )


@pytest.mark.parametrize("level", [list, dict, str])
def test_a_class_is_no_level(level):
    """It would answer with what it makes of the call's own arguments."""
    with pytest.raises(TypeError, match=r"write lambda: \w+\(\), or static"):
        Fallback(level)


class _Less:
    def __call__(self):
        return "less"


@pytest.mark.parametrize(
    "level", [partial(lambda word: word, "less"), _Less(), partial(_Less()), _Less().__call__]
)
def test_whatever_takes_no_arguments_is_given_none(level):
    """A partial and an object that can be called, as a function."""

    def recommend(user):
        raise ConnectionError(user)

    assert new_guard(Fallback(level)).call(recommend, "ada") == "less"


def test_a_static_method_is_given_the_arguments():
    """Inside its class it is an object with a `__func__`, as a method is, but without a `self`."""

    def recommend(user):
        raise ConnectionError(user)

    level = staticmethod(lambda user: f"less for {user}")
    assert new_guard(Fallback(level)).call(recommend, "ada") == "less for ada"
