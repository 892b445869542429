"""Fallback policy: give a degraded answer when the real one fails.

Promises:
- Levels are tried in order, each with the call's own arguments.
- The reason is available to the level (`fallback_reason()`), to subscribers and in `Result`.
- If no level answers, the error of the real call is raised.
- Cancellation is never answered by a fallback.
- The value of a fallback is never cached as a real value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from seawall.context import Scope, check_reserve, end_scope, reserve_scope
from seawall.errors import CacheMiss, add_note, matches
from seawall.policies.cache import Cache
from seawall.runtime.call import SubstituteCause, substitute_var
from seawall.runtime.degradation import STALE, Degradation, source_name, unwrapped
from seawall.runtime.functions import with_arguments
from seawall.runtime.layers import Flow, Host, Inline, Next, Outcome
from seawall.runtime.policy import Bound, Policy

if TYPE_CHECKING:
    from seawall.runtime.call import Call


def fallback_reason() -> BaseException | None:
    """Return, inside a fallback, the error that made it necessary; None elsewhere."""
    cause = substitute_var.get()
    return None if cause is None else cause.error


class Static:
    """A level that always answers with the same value. Created by `static(...)`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the value, whatever the call was."""
        return self.value

    def __repr__(self) -> str:
        return f"static({self.value!r})"


def static(value: Any) -> Static:
    """Answer with `value` itself, whatever the call was."""
    return Static(value)


Level = Callable[..., Any]


class Fallback(Policy):
    """A chain of levels below the real call."""

    kind: ClassVar[str] = "fallback"
    _needs_statistics = False

    def __init__(
        self,
        *levels: Level,
        on: type[Exception] | Iterable[type[Exception]] = Exception,
        reserve: float | None = None,
    ) -> None:
        """Try `levels` in order when the call fails with one of `on`.

        A level is a function that takes the call's arguments (or none at all), `static(value)`, or
        `cache.stale`. It answers by returning; if it raises, the next level is tried.

        `reserve` is how many seconds of the caller's deadline are kept back for the levels: by
        default a tenth of the remaining time, at least 10 ms and at most 0.5 s. Everything inside
        has that much less: timeouts, waits at gates, and guards and clients that the function
        calls.
        """
        super().__init__()
        if not levels:
            raise ValueError("Fallback(): give at least one level, such as static('try later')")
        for level in levels:
            if not callable(level):
                raise TypeError(f"Fallback({level!r}): write static({level!r}) to return a value")
            if isinstance(level, type):
                raise TypeError(
                    f"Fallback({level.__name__}): it would be made of the call's arguments; write"
                    f" lambda: {level.__name__}(), or static(...) to return a value"
                )
        types = (on,) if isinstance(on, type) or not isinstance(on, Iterable) else tuple(on)
        if not types or not all(isinstance(t, type) and issubclass(t, Exception) for t in types):
            raise TypeError(f"on={on!r}: write exception types, such as on=ConnectionError")
        self.levels = tuple(map(with_arguments, levels))
        self.names = _names(levels)
        self.on = types
        self.reserve = check_reserve(reserve)

    def __repr__(self) -> str:
        shown = zip(self.levels, self.names, strict=True)
        names = (repr(level) if isinstance(level, Static) else name for level, name in shown)
        return f"Fallback({', '.join(names)})"

    @property
    def catches_everything(self) -> bool:
        """Whether it catches every `Exception`."""
        return Exception in self.on

    def _bind(self, host: Host) -> _FallbackFlow:
        return _FallbackFlow(self, host)


class _FallbackMemory(SubstituteCause):
    """State of one call: why a fallback is needed, and which level is next."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.level = 0


class _FallbackFlow(Flow, Bound):
    """The fallback inside one guard: goes from level to level until one answers."""

    policy: Fallback
    seldom_entered = True

    def __init__(self, policy: Fallback, host: Host) -> None:
        super().__init__(policy, host)
        self.used = [0] * len(policy.levels)
        self.inline = Inline(
            names={},
            enter=("if held_ is not None:", "    {ticket} = held_ = {enter}(now_)"),
            leave=("if {ticket} is not None:", "    {ticket}[3] = None"),
        )

    def snapshot(self, now: float) -> dict[str, Any]:
        return {"levels": dict(zip(self.policy.names, self.used, strict=True))}

    def enter(self, _now: float) -> Scope | None:
        """Keep back some of the caller's time for the levels, if it has a deadline."""
        return reserve_scope(self.policy.reserve)

    def leave(self, ticket: Scope | None, outcome: Outcome, detail: object, now: float) -> None:
        if ticket is not None:
            end_scope(ticket)

    def settle(self, call: Call, ticket: Scope | None) -> Next | None:
        """Pass a value on; on an error try the next level."""
        if ticket is not None:
            end_scope(ticket)  # the levels have all of the caller's time
        memory: _FallbackMemory | None = call.memory.get(self)
        error = call.error
        if memory is None:
            if not isinstance(error, Exception) or not matches(error, self.policy.on):
                return None
            memory = call.memory[self] = _FallbackMemory(error)
        if isinstance(error, Exception) and memory.level < len(self.policy.levels):
            level = self.policy.levels[memory.level]
            memory.level += 1
            memory.age = None
            return Next(instead=level, cause=memory)
        del call.memory[self]
        if error is None:
            self._answered(call, memory)
        elif isinstance(error, Exception):
            self._give_up(call, memory)
        return None

    def _answered(self, call: Call, memory: _FallbackMemory) -> None:
        source = self.policy.names[memory.level - 1]
        less = Degradation(source, memory.level, memory.error, memory.age)
        call.degradation = less
        call.host.stats.degraded += 1
        if less.age is not None:
            call.host.stats.stale += 1
        self.used[memory.level - 1] += 1
        less.report(call.host.name)

    def _give_up(self, call: Call, memory: _FallbackMemory) -> None:
        """Raise the error of the real call, with the last level's own error in its notes."""
        last, call.error = call.error, memory.error
        if last is not call.error and not isinstance(last, CacheMiss):
            add_note(memory.error, f"the last fallback failed too: {last!r}", "the last fallback")


def _names(levels: tuple[Level, ...]) -> tuple[str, ...]:
    """Return the names of the levels, numbered where two are the same."""
    plain = [_source(level) for level in levels]
    return tuple(
        f"{name} ({position})" if plain.count(name) > 1 else name
        for position, name in enumerate(plain, 1)
    )


def _source(level: Any) -> str:
    """Return the name of a level's answers. It never contains the value of a level."""
    level = unwrapped(level)
    if isinstance(level, Static):
        return "static"
    return STALE if getattr(level, "__func__", None) is Cache.stale else source_name(level)
