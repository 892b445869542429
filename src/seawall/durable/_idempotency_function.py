"""Any function as one that is done once for each key.

The rules are one generator for both kinds of function. What it asks for is a method of the
`Idempotency` (the awaited twin of it in an event loop), or to call the function.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeVar

from seawall import _checks as check
from seawall.context import current_idempotency_key, current_tenant
from seawall.durable import _idempotency_records as records
from seawall.durable._idempotency_errors import (
    AnswerNotKept,
    KeyMissing,
    RecordedFailure,
    RecordGarbled,
)
from seawall.durable._idempotency_once import refuse
from seawall.errors import LeaseLost
from seawall.models.idempotency import Answer, Claim, Fresh, Replay, check_key, check_name
from seawall.runtime.functions import kind_of
from seawall.runtime.stepping import Steps, adrive, drive

if TYPE_CHECKING:
    from seawall.durable.idempotency import Idempotency

F = TypeVar("F", bound=Callable[..., Any])
Function = Callable[..., Any]

LONGEST_MESSAGE: Final = 1000
"""Characters that are kept of an error's text."""
_NOT_KEPT: Final = Answer(200, [], b"", kept=False)


class Codec(Protocol):
    """How results are written down."""

    def dumps(self, value: Any, /) -> bytes:
        """Return a result as bytes."""
        ...

    def loads(self, data: bytes, /) -> Any:
        """Return it again; what is read is not to be trusted."""
        ...


class Rules(NamedTuple):
    """How one function is done once."""

    function: Function
    shape: Signature
    operation: str
    key: str | Function | None
    scope: str | Function | None
    fingerprint: Literal["arguments"] | Function | None
    wait: float
    keep: tuple[type[Exception], ...]
    codec: Codec | None


class _Do(NamedTuple):
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Run(NamedTuple):
    claim: Claim


def idempotent_function(
    idempotency: Idempotency,
    operation: str | None,
    key: str | Function | None,
    scope: str | Function | None,
    fingerprint: Literal["arguments"] | Function | None,
    *,
    wait: float,
    keep: type[Exception] | Sequence[type[Exception]],
    codec: Codec | None,
) -> Callable[[F], F]:
    """Return the decorator."""
    check.seconds("wait", wait, zero=True)
    kept = (keep,) if isinstance(keep, type) else tuple(keep)
    for kind in kept:
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            raise TypeError(f"keep={kind!r}: write classes of errors, such as keep=Declined")
    if fingerprint not in {"arguments", None}:
        check.function("fingerprint", fingerprint)  # type: ignore[arg-type]

    def decorate(function: F) -> F:
        how = kind_of(function)
        if how not in {"sync", "async"}:
            raise TypeError(f"{function!r} is a generator: what it gives cannot be given again")
        shape = signature(function)
        for name, given in (("key", key), ("scope", scope)):
            if isinstance(given, str) and given not in shape.parameters:
                raise ValueError(f"{name}={given!r}: the function has {[*shape.parameters]}")
            if given is not None and not isinstance(given, str):
                check.function(name, given)
        own = f"{function.__module__}.{function.__qualname__}" if operation is None else operation
        check_name("operation", own)
        rules = Rules(function, shape, own, key, scope, fingerprint, wait, kept, codec)
        wrapper = _wrapped_async if how == "async" else _wrapped
        return wrapper(idempotency, rules)  # type: ignore[return-value]

    return decorate


def _wrapped(idempotency: Idempotency, rules: Rules) -> Function:
    @wraps(rules.function)
    def call(*args: Any, **kwargs: Any) -> Any:
        def answer(asked: _Do | _Run) -> Any:
            if isinstance(asked, _Do):
                return getattr(idempotency, asked.method)(*asked.args, **asked.kwargs)
            with idempotency.keeping(asked.claim):
                return rules.function(*args, **kwargs)

        return drive(_steps(rules, args, kwargs), answer)

    return call


def _wrapped_async(idempotency: Idempotency, rules: Rules) -> Function:
    @wraps(rules.function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        async def answer(asked: _Do | _Run) -> Any:
            if isinstance(asked, _Run):
                async with idempotency.akeeping(asked.claim):
                    return await rules.function(*args, **kwargs)
            done = getattr(idempotency, "a" + asked.method)(*asked.args, **asked.kwargs)
            if asked.method == "reserve":
                return await done
            return await _to_the_end(done)

        return await adrive(_steps(rules, args, kwargs), answer)

    return call


async def _to_the_end(work: Any) -> Any:
    """Await `work`, also if cancelled meanwhile: what was done is written down first."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


def _steps(rules: Rules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps[Any]:
    named = _named(rules, args, kwargs)
    found = yield _Do("reserve", named, {"wait": rules.wait})
    if isinstance(found, Replay):
        return _replayed(rules, found)
    if not isinstance(found, Fresh):
        refuse(found, rules.operation, _ignored)  # counted where it was reserved
    claim = found.claim
    try:
        result = yield _Run(claim)
    except GeneratorExit:
        raise  # nothing can be awaited any more: the lease will be over
    except rules.keep as error:
        told = {"error": type(error).__name__, "message": str(error)[:LONGEST_MESSAGE]}
        yield _Do("complete", (claim, told), {"failed": True})
        raise
    except BaseException:
        with suppress(Exception):
            yield _Do("abandon", (claim,), {})
        raise
    try:
        answer = _written(rules, result)
    except Exception:
        # It is done, and must not be done again for want of a way to write it down.
        yield _Do("complete", (claim, _NOT_KEPT), {})
        raise
    good = yield _Do("complete", (claim, answer), {})
    if not good:
        raise LeaseLost(f"{rules.operation!r} took longer than its lease: another one does it now")
    return result


def _written(rules: Rules, result: Any) -> Any:
    """Return a result as it is stored, or raise."""
    if rules.codec is not None:
        return bytes(rules.codec.dumps(result))
    records.check_storable(result)
    return result


def _replayed(rules: Rules, found: Replay) -> Any:
    if not found.answer.kept:
        raise AnswerNotKept(f"what {rules.operation!r} returned could not be kept")
    value = records.value_of(found)
    if not found.failed:
        return value if rules.codec is None else rules.codec.loads(found.answer.body)
    match value:
        case {"error": str(kind), "message": str(message)}:
            raise RecordedFailure(kind, message)
        case _:
            raise RecordGarbled("the stored record makes no sense: a failure without its error")


def _named(
    rules: Rules, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str | None, str, str, bytes | str | None]:
    """Return what names the record of one call."""
    bound = rules.shape.bind(*args, **kwargs)
    bound.apply_defaults()

    def said(how: str | Function | None, otherwise: Callable[[], str | None]) -> Any:
        if how is None:
            return otherwise()
        return bound.arguments[how] if isinstance(how, str) else how(*args, **kwargs)

    key = said(rules.key, current_idempotency_key)
    if key is None:
        raise KeyMissing(
            f"{rules.operation!r} needs a key: give one, or `with idempotency_key(...)`"
        )
    check_key(key)
    scope = said(rules.scope, current_tenant)
    if rules.fingerprint == "arguments":
        payload: bytes | str | None = _arguments_text(dict(bound.arguments))
    else:
        payload = None if rules.fingerprint is None else rules.fingerprint(*args, **kwargs)
    return scope, rules.operation, key, payload


def _arguments_text(arguments: dict[str, Any]) -> str:
    arguments.pop("self", None)
    try:
        return json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the arguments are not JSON ({error}): write fingerprint=, a function of them that"
            " returns bytes or text; or None, to compare nothing"
        ) from error


def _ignored(_what: str) -> None:
    """Count nothing."""
