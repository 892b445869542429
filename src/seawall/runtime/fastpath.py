"""The success path, as straight-line code generated for each stack of layers.

Calling layers in a loop, with a list of tickets, costs more than the layers themselves. So for
each guard a function is assembled from fixed lines, those below and each layer's own (`Inline`),
numbered by layer. No name, setting or other data of the user becomes part of the text, except the
names of the function's parameters. These are checked to be identifiers; all other names end in an
underscore, and so cannot clash with them. The generated function handles one case only: every layer
admits the call without waiting, and the function returns. In every other case it passes its tickets
to the interpreter, which implements all the rules.

For a gate, a retry that checks values, and another gate around an `async def`, it is:

    async def guarded_(prompt, size=defaults_[0]):
        now_ = clock_()
        t0_ = t2_ = ABSENT_
        reached_ = False
        try:
            held_ = deadline_()
            while held_ is not None and held_[3] is None:
                held_ = held_[2]
            if held_ is not None and (held_[1] is not own_clock_ or held_[0] <= now_):
                refuse_expired_(host_)
            t0_ = enter0_(now_)
            t2_ = enter2_(now_)
            reached_ = True
            value_ = await function_(prompt, size)
        except BaseException_ as error_:
            failure_ = error_
        else:
            if again1_(value_):
                return await on_value_(
                    function_, (prompt, size), {}, now_, (t0_, None, t2_), value_
                )
            try:
                end_ = clock_()
                left_ = t2_
                t2_ = ABSENT_
                leave2_(left_, OK_, value_, end_)
                left_ = t0_
                t0_ = ABSENT_
                leave0_(left_, OK_, value_, end_)
                sample_(end_ - now_)
                if end_ >= stats_.due:
                    stats_.fold_in_call(end_)
                return value_
            except BaseException_ as error_:
                cut_short_((t0_, None, t2_), error_)
                raise
        try:
            return await on_error_(
                function_, (prompt, size), {}, now_, (t0_, None, t2_), reached_, failure_
            )
        finally:
            del failure_
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from threading import RLock
from types import CodeType, CoroutineType, FrameType, SimpleNamespace
from typing import Any, Final, NoReturn
from weakref import WeakSet

from seawall.context import deadline_scope, deadline_var, live_scope
from seawall.errors import Rejected
from seawall.runtime.call import Call, bare, bypass, given_up
from seawall.runtime.interpreter import refuse_coroutine, refuse_expired, run_async, run_sync
from seawall.runtime.layers import CANCELLED, OK, UNUSED, Flow, Host, Kind, Layer, Wait
from seawall.runtime.parameters import ANY, Parameters

ABSENT: Final = object()
"""The ticket of a layer that has not been entered."""

Binder = Callable[[Callable[..., Any], tuple[Any, ...]], Callable[..., Any]]

_numbers = count()

_switching = RLock()
_paths: Final[WeakSet[FastPath]] = WeakSet()
"""All live success paths, for `switch_policies`."""


_COUNT: Final = (
    "sample_(end_ - now_)",
    "if end_ >= stats_.due:",
    "    stats_.fold_in_call(end_)",
)


def hosts_around(own: Host) -> list[Host]:
    """Return the guards whose calls this one runs in, other than `own`.

    They are read from the frames of this thread or task, and from the deadlines that timeouts of
    async calls have set, which reach child tasks and threads too. A context variable would cost
    every call, while only an adaptive retry needs this, after a failure. Other blocks are not seen.
    """
    hosts: list[Host | None] = []
    innermost = True
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack of the caller
    while frame is not None:
        if frame.f_code in _RUNNERS:
            # The innermost one belongs to `own`. It may be handling an error; reading its
            # `f_locals` would keep that error alive in a reference cycle.
            if not innermost:
                hosts.append(frame.f_locals["call"].host)
            innermost = False
        elif isinstance(getattr(frame.f_globals.get("__spec__"), "loader", None), _Text):
            hosts.append(frame.f_globals["host_"])
            innermost = False
        frame = frame.f_back
    scope = deadline_scope()
    while scope is not None:
        hosts.append(getattr(scope[-1], "host", None))
        scope = live_scope(scope[2])
    # A marked copy of a guard shares its statistics: it is the same guard.
    found = {id(host.stats): host for host in hosts if host is not None}
    found.pop(id(own.stats), None)
    return list(found.values())


_RUNNERS: Final = (run_sync.__code__, run_async.__code__)


class _Text:
    """Shows generated source text in tracebacks."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, _name: str) -> str:
        return self._text


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    """Return the code of a success path; guards with the same stack, as in a family, share it."""
    return compile(text, f"seawall fast path {next(_numbers)}", "exec")


class FastPath:
    """The compiled success path of one stack of layers, for one kind of function."""

    def __init__(
        self, host: Host, layers: Sequence[Layer], kind: Kind, *, counts: bool, in_thread: bool
    ) -> None:
        """Prepare to compile, once the function's parameters are known.

        Calls are counted if the function is the user's own (`counts`), and in a worker thread only
        while the caller still waits for them.
        """
        self._counts = counts
        self._host = host
        self._layers = tuple(layers)
        self._kind = kind
        self._names: dict[str, Any] = {
            "ABSENT_": ABSENT,
            "BaseException_": BaseException,
            "CoroutineType_": CoroutineType,
            "IndexError_": IndexError,
            "KeyError_": KeyError,
            "RuntimeError_": RuntimeError,
            "OK_": OK,
            "clock_": host.clock.now,
            "cut_short_": self._cut_short,
            "deadline_": _no_policies if bypass.on else deadline_var.get,
            "host_": host,
            "own_clock_": host.clock,
            "on_error_": self._error_async if kind == "async" else self._error_sync,
            "on_value_": self._value_async if kind == "async" else self._value_sync,
            "refuse_coroutine_": refuse_coroutine,
            "refuse_expired_": refuse_expired,
            "sample_": self._sample_wanted if in_thread else host.stats.samples.append,
            "stats_": host.stats,
            "type_": type,
        }
        for number, layer in enumerate(layers):
            self._names[f"enter{number}_"] = layer.enter
            self._names[f"leave{number}_"] = layer.leave
            self._names[f"again{number}_"] = layer.again
            if layer.inline is not None:
                for name, value in layer.inline.names.items():
                    self._names[f"{name}{number}_"] = value
        self._binders: dict[str, Binder] = {}
        self._namespaces = [self._names]
        _paths.add(self)

    def switch(self, *, off: bool) -> None:
        """Switch policies off or on again; see `switch_policies`."""
        for names in self._namespaces:
            names["deadline_"] = _no_policies if off else deadline_var.get

    def interpreted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with the layers around it, always run by the interpreter.

        This is slower, but records each attempt, for callers that want a report.
        """

        def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
            call = Call(self._host, self._layers, function, args, kwargs, self._host.clock.now())
            call.counts = self._counts or bypass.on
            return call

        async def run_in_task(*args: Any, **kwargs: Any) -> Any:
            return await run_async(start(args, kwargs))

        def run_in_thread(*args: Any, **kwargs: Any) -> Any:
            return run_sync(start(args, kwargs))

        return run_in_task if self._kind == "async" else run_in_thread

    def _sample_wanted(self, elapsed: float) -> None:
        if not given_up(self._host.name):
            self._host.stats.samples.append(elapsed)

    def bind(
        self, function: Callable[..., Any], parameters: Parameters = ANY
    ) -> Callable[..., Any]:
        """Return `function` with the layers around it, taking `parameters`."""
        return self.binder(parameters)(function, parameters.defaults)

    def binder(self, parameters: Parameters) -> Binder:
        """Return the factory of guarded functions that take `parameters`."""
        binder = self._binders.get(parameters.declared)
        if binder is None:
            binder = self._binders[parameters.declared] = self._compile(parameters)
        return binder

    def _compile(self, parameters: Parameters) -> Binder:
        counts = self._counts and self._host.keeps_statistics
        text = source(self._layers, self._kind, parameters, counts=counts)
        code = _compiled(text)
        filename = code.co_filename
        # A traceback finds the text through the loader, without a cache of texts that only grows.
        spec = SimpleNamespace(name=filename, loader=_Text(text))
        names = {**self._names, "__name__": filename, "__spec__": spec}
        self._namespaces.append(names)
        exec(code, names)  # noqa: S102 - fixed lines, see above
        binder: Binder = names["bind_"]
        return binder

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        now: float,
        tickets: tuple[Any, ...],
    ) -> Call:
        call = Call(self._host, self._layers, function, args, kwargs, now)
        # The call is already inside the layers, even if policies are switched off meanwhile.
        call.layers, call.function = self._layers, function
        call.counts = self._counts
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
        if isinstance(error, _Bypassed):
            call = Call(self._host, (), bare(function), args, kwargs, now)
            return call, {}
        call = self._call(function, args, kwargs, now, tickets)
        if isinstance(error, Wait):
            return call, {"waiter": error.waiter}
        call.error = error
        call.reached = reached
        call.attempts = int(reached)
        return call, {"upwards": True}

    def _refused(self, tickets: tuple[Any, ...], error: BaseException) -> bool:
        """Leave what was entered before a refusal, unless an outer flow must see the refusal.

        Refusals come in floods, when there is least time for them, so they take this shortcut.
        """
        if not isinstance(error, Rejected):
            return False
        entered = []
        for layer, ticket in zip(self._layers, tickets, strict=True):
            if ticket is ABSENT:
                break
            if isinstance(layer, Flow) and not layer.passes_refusals:
                return False
            if layer.leave is not None:
                entered.append((layer.leave, ticket))
        if entered:
            now = self._host.clock.now()
            for leave, ticket in reversed(entered):
                leave(ticket, UNUSED, error, now)
        return True

    def _cut_short(self, tickets: tuple[Any, ...], error: BaseException) -> None:
        """Leave the remaining layers of a call that a signal interrupted on its way out.

        The ticket that was being left at that moment is absent, so it is not left twice.
        """
        now = self._host.clock.now()
        for layer, ticket in zip(reversed(self._layers), reversed(tickets), strict=True):
            if ticket is not ABSENT and layer.enter is not None and layer.leave is not None:
                layer.leave(ticket, CANCELLED, error, now)

    def _error_sync(self, *stopped: Any) -> Any:
        *_, tickets, reached, error = stopped
        try:
            if not reached and self._refused(tickets, error):
                raise error
            call, state = self._stopped(*stopped)
        finally:
            del stopped, error  # Break the reference cycle between the error and this frame.
        return run_sync(call, **state)

    async def _error_async(self, *stopped: Any) -> Any:
        *_, tickets, reached, error = stopped
        try:
            if not reached and self._refused(tickets, error):
                raise error
            call, state = self._stopped(*stopped)
        finally:
            del stopped, error
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


class _Bypassed(BaseException):
    """Redirects a call from its success path to the path without policies."""


def _no_policies() -> NoReturn:
    """Replace the success path's deadline lookup: while off, the switch costs nothing."""
    raise _Bypassed


def switch_policies(*, off: bool) -> None:
    """Make all guards of the process call their functions without policies, or with them again."""
    with _switching:
        bypass.on = off
        for path in list(_paths):
            path.switch(off=off)


def source(layers: Sequence[Layer], kind: Kind, parameters: Parameters, *, counts: bool) -> str:
    """Return the source text of the success path through `layers`."""
    wait = "await " if kind == "async" else ""
    pieces = [_Piece(number, layer, parameters) for number, layer in enumerate(layers)]
    tickets = "".join(f"{piece.ticket}, " for piece in pieces)
    state = f"function_, {parameters.args}, {parameters.kwargs}, now_, ({tickets})"
    absent = "".join(f"{piece.ticket} = " for piece in pieces if piece.absent == "ABSENT_")
    skipped = "".join(f"{piece.ticket} = " for piece in pieces if piece.absent == "None")
    ending = [line for piece in reversed(pieces) for line in piece.leave]
    ending += _COUNT if counts else ()
    lines = [
        "def bind_(function_, defaults_):",
        f"    {'async ' if wait else ''}def guarded_({parameters.declared}):",
        "        now_ = clock_()",
        *([f"        {absent}ABSENT_"] if absent else []),
        *([f"        {skipped}None"] if skipped else []),
        "        reached_ = False",
        "        try:",
        "            held_ = deadline_()",
        "            while held_ is not None and held_[3] is None:",
        "                held_ = held_[2]",
        "            if held_ is not None and (held_[1] is not own_clock_ or held_[0] <= now_):",
        "                refuse_expired_(host_)",
        *(f"            {line}" for piece in pieces for line in piece.enter),
        "            reached_ = True",
        f"            value_ = {wait}function_({parameters.passed})",
        *([] if wait else ["            if type_(value_) is CoroutineType_:"]),
        *([] if wait else ["                refuse_coroutine_(value_, function_)"]),
        "        except BaseException_ as error_:",
        "            failure_ = error_",
        "        else:",
        *(
            line
            for number, layer in enumerate(layers)
            if layer.again is not None
            for line in (
                f"            if again{number}_(value_):",
                f"                return {wait}on_value_({state}, value_)",
            )
        ),
        *_left_all(ending, tickets),
        "        try:",
        f"            return {wait}on_error_({state}, reached_, failure_)",
        "        finally:",
        "            del failure_",
        "    return guarded_",
    ]
    return "\n".join(lines) + "\n"


def _left_all(ending: list[str], tickets: str) -> list[str]:
    """Return the lines that leave all layers, whatever a signal handler raises in between."""
    if not ending:
        return ["            return value_"]
    return [
        "            try:",
        *(["                end_ = clock_()"] if any("end_" in line for line in ending) else []),
        *(f"                {line}" for line in ending),
        "                return value_",
        "            except BaseException_ as error_:",
        f"                cut_short_(({tickets}), error_)",
        "                raise",
    ]


class _Piece:
    """The lines of one layer."""

    def __init__(self, number: int, layer: Layer, parameters: Parameters) -> None:
        self._number = number
        self._arguments = parameters.passed
        self.ticket = self._left = f"t{number}_" if layer.enter is not None else "None"
        enter: tuple[str, ...] = ()
        leave: tuple[str, ...] = ()
        if layer.inline is not None:
            enter, leave = layer.inline.enter, layer.inline.leave
        else:
            if layer.enter is not None:
                arguments = f", {parameters.passed}" if layer.takes_arguments else ""
                enter = (f"{{ticket}} = {{enter}}(now_{arguments})",)
            if layer.leave is not None:
                leave = ("{leave}({left}, OK_, value_, end_)",)
        self.enter = [line.format_map(self) for line in enter]
        self.absent = ("None" if layer.seldom_entered else "ABSENT_") if enter else ""
        self.leave = []
        if layer.enter is not None and any("{left}" in line for line in leave):
            # Mark it absent first: if leaving is interrupted, the layer is not left twice.
            self.leave = [f"left_ = {self.ticket}", f"{self.ticket} = ABSENT_"]
            self._left = "left_"
        self.leave += [line.format_map(self) for line in leave]

    def __getitem__(self, name: str) -> str:
        if name == "arguments":
            return self._arguments
        if name == "left":
            return self._left
        return self.ticket if name == "ticket" else f"{name}{self._number}_"
