"""Messages between an executor and its worker processes, and their execution there.

    pack(item)    in the parent: pickle the function, its arguments, and the caller's context
    serve(pipe)   in the worker: run items one by one; an exception does not stop the next item
    unpack(reply) in the parent: return the value, or raise the error with its remote traceback

Pickle requires that both sides trust each other: here a process and its own children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from seawall import context
from seawall.errors import add_note

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

VALUE, ERROR, UNREAD, UNSENT = b"v", b"e", b"u", b"s"
"""Kinds of replies: a value, an error, an unreadable item, a result that cannot be sent."""

ITEM_LENGTH: Final = 200  # maximum length of an item's description in characters
TRACE_LENGTH: Final = 10_000  # characters of a returned traceback; its end is kept


@dataclass(slots=True, eq=False, repr=False)
class ProcessCall:
    """One call for a worker process; its owner changes under the mutex of its executor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    worker: Any = None
    sent: bool = False  # whether it was given to a process, and so may have started
    given_up: bool = False

    def __str__(self) -> str:
        """Describe it in one short line: values are truncated, control characters escaped."""
        from reprlib import Repr

        short = Repr()
        short.maxother = short.maxstring = 60
        function, args, kwargs = self.function, self.args, self.kwargs
        while isinstance(function, partial):
            args, kwargs = (*function.args, *args), function.keywords | kwargs
            function = function.func
        module = getattr(function, "__module__", None)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        called = name if module in {None, "builtins"} else f"{module}.{name}"
        values = [short.repr(value) for value in args]
        values += [f"{key}={short.repr(value)}" for key, value in kwargs.items()]
        text = f"{called}({', '.join(values)})"
        if not text.isprintable():
            text = text.encode("unicode_escape").decode()
        return text if len(text) <= ITEM_LENGTH else f"{text[: ITEM_LENGTH - 3]}..."


class ContextValues:
    """The user's context variables that are passed with each item."""

    def __init__(self, variables: Iterable[ContextVar[Any]]) -> None:
        """Find the module-level names of the variables, for the worker; raise if one has none."""
        if isinstance(variables, str) or not isinstance(variables, Iterable):
            raise TypeError(
                f"context={variables!r}: list context variables, such as context=[request_id]"
            )
        self._places = [(var, *_address(var)) for var in variables]

    def values(self) -> list[tuple[str, str, Any]]:
        """Return module, name and value of the variables that are set here."""
        unset = object()
        found = [(module, name, var.get(unset)) for var, module, name in self._places]
        return [entry for entry in found if entry[2] is not unset]


def _address(var: ContextVar[Any]) -> tuple[str, str]:
    import sys

    if not isinstance(var, ContextVar):
        raise TypeError(f"context={var!r}: list context variables, such as context=[request_id]")
    for module_name, module in sorted(sys.modules.items()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is var:
                return module_name, name
    raise ValueError(f"context={var!r}: make it a global of a module, where a process can find it")


# --- In the parent ---


def pack(item: ProcessCall, context_values: ContextValues) -> Any:
    """Pickle `item` and its caller's context, or raise TypeError."""
    from multiprocessing.reduction import ForkingPickler

    attempts = context.attempts_from(context.attempt_var.get())
    carried = {
        "attempts": [(one.number, one.guard) for one in attempts],
        "criticality": context.current_criticality(),
        "deadline": context.seconds_left(),  # as seconds, because clocks of two processes differ
        "idempotency_key": context.current_idempotency_key(),
        "tenant": context.current_tenant(),
        "tier": context.current_tier(),
    }
    try:
        return ForkingPickler.dumps(
            (item.function, item.args, item.kwargs, carried, context_values.values())
        )
    except Exception as error:
        raise TypeError(
            f"{item} cannot be sent to a worker process ({error}): pass a function from the top"
            " level of a module, and arguments that can be pickled"
        ) from error


def unpack(item: ProcessCall, reply: bytes, executor: str) -> Any:
    """Return the value or raise the error that `reply` holds."""
    from pickle import loads

    kind = reply[:1]
    if kind == UNREAD:
        raise TypeError(
            f"the worker process could not read {item} ({reply[1:].decode()}): pass what a fresh"
            " process can import and unpickle"
        )
    if kind == UNSENT:
        raise TypeError(
            f"the result of {item} cannot be sent back ({reply[1:].decode()}): return what can be"
            " pickled"
        )
    try:
        answer = loads(memoryview(reply)[1:])  # noqa: S301 - from our own child process
    except Exception as broken:
        raise TypeError(
            f"the result of {item} cannot be read here ({_text(broken)}): return what can be"
            " unpickled"
        ) from broken
    if kind != ERROR:
        return answer
    error, trace = answer
    add_note(error, f"in a worker process of {executor!r}:\n{trace}", "in a worker process")
    try:
        raise error
    finally:
        del error, answer  # break the reference cycle between the exception and this frame


# --- In the worker ---


def serve(connection: Connection[Any, Any]) -> None:
    """Run the items that arrive through the pipe, until its other end is closed."""
    import signal
    import sys
    from threading import Thread

    # Ctrl-C is handled by the parent, which then gives up its calls.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_die_with_the_parent, name="seawall-parent", daemon=True).start()
    try:
        connection.send_bytes(b"")  # reports that this worker is ready
        while True:
            message = connection.recv_bytes()
            reply = answer(message)
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()  # the next item may kill the process
            connection.send_bytes(reply)
            del message, reply
    except (EOFError, OSError):
        pass  # the parent has closed the pipe, or has died


def _die_with_the_parent() -> None:
    """End this process when the parent has died, even in the middle of an item."""
    import os
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def answer(message: bytes) -> Any:
    """Run the item in `message`; return the reply as bytes."""
    from pickle import loads

    try:
        packed = loads(message)  # noqa: S301 - from our own parent process
    except BaseException as error:  # noqa: BLE001 - reported to the caller
        return UNREAD + _text(error).encode()
    try:
        # A separate context: an item must not see what another one set.
        value = Context().run(_call, *packed)
    except BaseException as error:  # noqa: BLE001 - raised again in the caller
        return _error_reply(error)
    try:
        return _reply(VALUE, value)
    except BaseException as error:  # noqa: BLE001 - reported to the caller
        return UNSENT + _text(error).encode()


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    carried: dict[str, Any],
    variables: list[tuple[str, str, Any]],
) -> Any:
    from importlib import import_module

    for module, name, value in variables:
        getattr(import_module(module), name).set(value)
    for number, guard in reversed(carried["attempts"]):
        context.attempt_var.set(context.Attempt(number, guard, context.attempt_var.get()))
    with ExitStack() as scopes:
        scopes.enter_context(context.criticality(carried["criticality"]))
        if carried["deadline"] is not None:
            scopes.enter_context(context.deadline(max(0.0, carried["deadline"])))
        for scope in (context.idempotency_key, context.tenant, context.tier):
            value = carried[scope.__name__]
            if value is not None:
                scopes.enter_context(scope(value))
        return function(*args, **kwargs)


def _reply(kind: bytes, thing: Any) -> Any:
    from io import BytesIO
    from multiprocessing.reduction import ForkingPickler

    buffer = BytesIO()
    buffer.write(kind)
    ForkingPickler(buffer).dump(thing)
    return buffer.getbuffer()


def _error_reply(error: BaseException) -> Any:
    """Reply with the error itself if it can be pickled, otherwise with its text."""
    from pickle import loads
    from traceback import format_exception

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        text = "".join(format_exception(type(error), error, trace))[-TRACE_LENGTH:]
    except Exception:  # noqa: BLE001 - a strange error must not prevent the reply
        text = type(error).__qualname__
    try:
        packed = _reply(ERROR, (error, text))
        # Many errors can be pickled but not unpickled: their __init__ needs other arguments.
        if type(loads(packed[1:])[0]) is type(error):  # noqa: S301 - pickled just above
            return packed
    except BaseException:  # noqa: BLE001, S110 - the text is sent instead
        pass
    return _reply(ERROR, (RuntimeError(_text(error)), text))


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__qualname__}: {error}"
    except Exception:  # noqa: BLE001 - its __str__ is broken
        return type(error).__qualname__
