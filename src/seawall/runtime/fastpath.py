"""The success path, as straight-line code made for each stack of layers.

Calling layers in a loop, with a list of tickets, costs more than the layers themselves. So for
each guard a function is assembled from the fixed lines below, numbered by layer; no name, setting
or other data of the user ever becomes part of the text. It handles one case only: everything is
admitted at once and the function returns. Whatever else happens, it hands its tickets over to the
interpreter, which knows all the rules.

For a gate, a retry that looks at values and a timeout around an `async def` it reads:

    async def guarded(*args, **kwargs):
        now = clock()
        t0 = t2 = ABSENT
        reached = False
        try:
            if deadline() is not None:
                refuse_expired(host)
            t0 = enter0(now)
            t2 = enter2(now)
            reached = True
            value = await function(*args, **kwargs)
        except BaseException as error:
            failure = error
        else:
            if again1(value):
                return await act_on_value(function, args, kwargs, now, (t0, None, t2), value)
            end = clock()
            leave2(t2, OK, value, end)
            leave0(t0, OK, value, end)
            sample(end - now)
            if end >= stats.due:
                stats.fold(end)
            return value
        try:
            return await act_on_error(function, args, kwargs, now, (t0, None, t2), reached, failure)
        finally:
            del failure
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from types import CoroutineType
from typing import Any, Final

from seawall.context import deadline_var
from seawall.runtime.call import Call
from seawall.runtime.interpreter import refuse_expired
from seawall.runtime.layers import OK, Host, Kind, Layer, Wait
from seawall.runtime.runners import refuse_coroutine, run_async, run_sync

ABSENT: Final = object()
"""The ticket of a layer that has not been entered."""

_numbers = count()


_REFUSE_COROUTINE: Final = (
    "            if value.__class__ is CoroutineType:",
    "                refuse_coroutine(value, function)",
)


class FastPath:
    """The compiled success path of one stack of layers, for one kind of function."""

    def __init__(self, host: Host, layers: Sequence[Layer], kind: Kind) -> None:
        """Compile; `names` stays open, so that the clock can be exchanged."""
        self._host = host
        self._layers = tuple(layers)
        self.names: dict[str, Any] = {
            "ABSENT": ABSENT,
            "OK": OK,
            "clock": host.clock.now,
            "CoroutineType": CoroutineType,
            "deadline": deadline_var.get,
            "host": host,
            "refuse_coroutine": refuse_coroutine,
            "refuse_expired": refuse_expired,
            "sample": host.stats.samples.append,
            "stats": host.stats,
            "act_on_error": self._error_async if kind == "async" else self._error_sync,
            "act_on_value": self._value_async if kind == "async" else self._value_sync,
        }
        for number, layer in enumerate(layers):
            self.names[f"enter{number}"] = layer.enter
            self.names[f"leave{number}"] = layer.leave
            self.names[f"passed{number}"] = layer.passed
            self.names[f"again{number}"] = layer.again
        text = source(layers, kind)
        filename = f"<seawall fast path {next(_numbers)}>"
        exec(compile(text, filename, "exec"), self.names)  # noqa: S102 - fixed lines only, see above
        self._show_in_tracebacks(filename, text)
        self.bind: Callable[[Callable[..., Any]], Callable[..., Any]] = self.names["bind"]

    @staticmethod
    def _show_in_tracebacks(filename: str, text: str) -> None:
        import linecache

        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        now: float,
        tickets: tuple[Any, ...],
    ) -> Call:
        call = Call(self._host, self._layers, function, args, kwargs, now)
        for ticket in tickets:
            if ticket is ABSENT:
                break
            call.tickets.append(ticket)
        return call

    def _stopped(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        now: float,
        tickets: tuple[Any, ...],
        reached: bool,  # noqa: FBT001 - called by generated code only
        error: BaseException,
    ) -> tuple[Call, dict[str, Any]]:
        call = self._call(function, args, kwargs, now, tickets)
        if isinstance(error, Wait):
            return call, {"waiter": error.waiter}
        call.error = error
        call.reached = reached
        call.attempts = int(reached)
        return call, {"upwards": True}

    def _error_sync(self, *stopped: Any) -> Any:
        call, state = self._stopped(*stopped)
        del stopped
        return run_sync(call, **state)

    async def _error_async(self, *stopped: Any) -> Any:
        call, state = self._stopped(*stopped)
        del stopped
        return await run_async(call, **state)

    def _returned(self, *returned: Any) -> Call:
        *start, value = returned
        call = self._call(*start)
        call.value = value
        call.reached = True
        call.attempts = 1
        return call

    def _value_sync(self, *returned: Any) -> Any:
        return run_sync(self._returned(*returned), upwards=True)

    async def _value_async(self, *returned: Any) -> Any:
        return await run_async(self._returned(*returned), upwards=True)


def source(layers: Sequence[Layer], kind: Kind) -> str:
    """Return the text of the success path through `layers`."""
    wait = "await " if kind == "async" else ""
    enters = [number for number, layer in enumerate(layers) if layer.enter is not None]
    leaves = [number for number, layer in enumerate(layers) if layer.leave is not None]
    agains = [number for number, layer in enumerate(layers) if layer.again is not None]
    tickets = ", ".join(
        f"t{number}" if layer.enter is not None else "None" for number, layer in enumerate(layers)
    )
    state = f"function, args, kwargs, now, ({tickets}{',' * bool(layers)})"
    lines = [
        "def bind(function):",
        f"    {'async ' if wait else ''}def guarded(*args, **kwargs):",
        "        now = clock()",
        *([f"        {' = '.join(f't{n}' for n in enters)} = ABSENT"] if enters else []),
        "        reached = False",
        "        try:",
        "            if deadline() is not None:",
        "                refuse_expired(host)",
        *(
            f"            t{n} = enter{n}(now{', *args, **kwargs' * layers[n].takes_arguments})"
            for n in enters
        ),
        "            reached = True",
        f"            value = {wait}function(*args, **kwargs)",
        *([] if wait else _REFUSE_COROUTINE),
        "        except BaseException as error:",
        "            failure = error",
        "        else:",
        *(
            line
            for n in agains
            for line in (
                f"            if again{n}(value):",
                f"                return {wait}act_on_value({state}, value)",
            )
        ),
        "            end = clock()",
        *(f"            {_leave(n, layers[n])}" for n in reversed(leaves)),
        "            sample(end - now)",
        "            if end >= stats.due:",
        "                stats.fold(end)",
        "            return value",
        "        try:",
        f"            return {wait}act_on_error({state}, reached, failure)",
        "        finally:",
        "            del failure",
        "    return guarded",
    ]
    return "\n".join(lines) + "\n"


def _leave(number: int, layer: Layer) -> str:
    ticket = f"t{number}" if layer.enter is not None else "None"
    if layer.passed is not None:
        return f"passed{number}({ticket})"
    return f"leave{number}({ticket}, OK, value, end)"
