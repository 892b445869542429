"""Decorator that runs any function once for each key.

The rules are one generator for both kinds of function. It yields calls of an `Idempotency` method
(of its async twin in an event loop), pauses in seconds, and the claim, to call the function. The
outcome of the function is always stored completely, even if the caller is cancelled meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from inspect import CORO_CREATED, Signature, getcoroutinestate, iscoroutine, signature, unwrap
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeVar

from seawall import _checks as check
from seawall.context import current_idempotency_key, current_tenant
from seawall.durable.database.json_values import canonical_json
from seawall.durable.idempotency import records
from seawall.durable.idempotency.lease_renewal import LeaseRenewal, uninterrupted
from seawall.durable.idempotency.once import refuse
from seawall.errors import AnswerNotKept, KeyMissing, LeaseLost, RecordedFailure, RecordGarbled
from seawall.models.idempotency import Answer, Fresh, KeyClaim, Replay, check_key, check_name
from seawall.runtime.driver import Steps, adrive, drive, sleep_async
from seawall.runtime.functions import kind_of

if TYPE_CHECKING:
    from seawall.durable.idempotency.idempotency import Idempotency

F = TypeVar("F", bound=Callable[..., Any])
Function = Callable[..., Any]

LONGEST_MESSAGE: Final = 1000
"""Maximum stored characters of an exception's message."""
PAUSES: Final = (0.1, 0.4, 1.6)
"""Seconds between attempts to store a result while the database is unreachable."""
_NOT_KEPT: Final = Answer(200, [], b"", kept=False)


class ResultCodec(Protocol):
    """How results are encoded."""

    def dumps(self, value: Any, /) -> bytes:
        """Return a result as bytes."""
        ...

    def loads(self, data: bytes, /) -> Any:
        """Return the decoded result. The input is untrusted."""
        ...


class FunctionRules(NamedTuple):
    """The settings of one decorated function."""

    function: Function
    shape: Signature
    in_class: bool
    """Whether it is defined in a class, so that its first argument may be the instance or class."""
    operation: str
    key: str | Function | None
    scope: str | Function | None
    fingerprint: Literal["arguments"] | Function | None
    wait: float
    keep: tuple[type[Exception], ...]
    codec: ResultCodec | None


class _MethodCall(NamedTuple):
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Uninterrupted(NamedTuple):
    steps: Steps[Any]
    """Steps that must run to their end, even if the caller is cancelled."""


def idempotent_function(
    idempotency: Idempotency,
    operation: str | None,
    key: str | Function | None,
    scope: str | Function | None,
    fingerprint: Literal["arguments"] | Function | None,
    *,
    wait: float,
    keep: type[Exception] | Sequence[type[Exception]],
    codec: ResultCodec | None,
) -> Callable[[F], F]:
    """Return the decorator."""
    check.seconds("wait", wait, zero=True)
    kept = check.error_types("keep", keep)
    if codec is not None and not (hasattr(codec, "dumps") and hasattr(codec, "loads")):
        raise TypeError(f"codec={codec!r}: pass something with dumps (to bytes) and loads")
    if fingerprint is not None and fingerprint != "arguments":
        check.plain_function("fingerprint", fingerprint)

    def decorate(function: F) -> F:
        how = kind_of(function)
        if how not in {"sync", "async"}:
            raise TypeError(f"{function!r} is a generator: what it gives cannot be given again")
        if how == "sync" and idempotency.database.is_async:
            raise TypeError(
                f"{function!r}: write `async def`, as {idempotency.database!r} is awaited"
            )
        shape = signature(function)
        for name, given in (("key", key), ("scope", scope)):
            if isinstance(given, str) and given not in shape.parameters:
                raise ValueError(f"{name}={given!r}: the function has {[*shape.parameters]}")
            if given is not None and not isinstance(given, str):
                check.plain_function(name, given)
        own = operation if operation is not None else _name_of(function)
        check_name("operation", own)
        around = getattr(function, "__qualname__", "").rpartition(".")[0]
        inside = bool(around) and not around.endswith("<locals>")
        rules = FunctionRules(
            function, shape, inside, own, key, scope, fingerprint, wait, kept, codec
        )
        wrapper = _wrapped_async if how == "async" else _wrapped
        return wrapper(idempotency, rules)  # type: ignore[return-value]

    return decorate


def _name_of(function: Function) -> str:
    try:
        return f"{function.__module__}.{function.__qualname__}"
    except AttributeError:
        raise TypeError(f"{function!r} has no name: write operation='...'") from None


def _wrapped(idempotency: Idempotency, rules: FunctionRules) -> Function:
    @wraps(rules.function)
    def call(*args: Any, **kwargs: Any) -> Any:
        def answer(asked: Any) -> Any:
            match asked:
                case KeyClaim():
                    with idempotency.keeping(asked):
                        return rules.function(*args, **kwargs)
                case float():
                    return idempotency.clock.sleep(asked)
                case _Uninterrupted(steps):
                    return drive(steps, answer)
                case _MethodCall(method, given, options):
                    return getattr(idempotency, method)(*given, **options)

        return drive(_steps(rules, args, kwargs), answer)

    return call


def _wrapped_async(idempotency: Idempotency, rules: FunctionRules) -> Function:
    @wraps(rules.function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        renewal: LeaseRenewal | None = None

        async def answer(asked: Any) -> Any:
            nonlocal renewal
            match asked:
                case KeyClaim():
                    renewal = LeaseRenewal(idempotency.lease, lambda: idempotency.arenew(asked))
                    return await rules.function(*args, **kwargs)
                case float():
                    return await sleep_async(asked)
                case _Uninterrupted(steps):
                    return await uninterrupted(settled(steps))
                case _MethodCall(method, given, options):
                    return await getattr(idempotency, "a" + method)(*given, **options)

        async def settled(steps: Steps[Any]) -> Any:
            # Stopped here and not when the function ends: a caller that is cancelled during this
            # wait still has a result to store.
            if renewal is not None:
                await renewal.stop()
            return await adrive(steps, answer)

        try:
            return await adrive(_steps(rules, args, kwargs), answer)
        finally:
            # However the call ends: a renewal that went on would hold the lease forever.
            if renewal is not None:
                renewal.end()

    return call


def _steps(rules: FunctionRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps[Any]:
    named = _record_name(rules, args, kwargs)
    found = yield _MethodCall("reserve", named, {"wait": rules.wait})
    if isinstance(found, Replay):
        return _replay(rules, found)
    if not isinstance(found, Fresh):
        refuse(found, rules.operation, _count_nothing)  # already counted by `reserve`
    claim = found.claim
    try:
        result = yield claim
    except GeneratorExit:
        raise  # nothing can be awaited any more: the lease expires
    except rules.keep as error:
        outcome = {"error": type(error).__name__, "message": _message(error)}
        accepted = yield _Uninterrupted(_store_steps(claim, outcome, failed=True))
        if not accepted:
            raise _lost(rules) from error
        raise
    except BaseException:
        with suppress(Exception):
            yield _Uninterrupted(_abandon_steps(claim))
        raise
    try:
        answer = _stored_form(rules, result)
    except Exception:
        if iscoroutine(result) and getcoroutinestate(result) == CORO_CREATED:
            result.close()
            with suppress(Exception):
                yield _Uninterrupted(_abandon_steps(claim))
            raise TypeError(
                f"{rules.operation!r} returned a coroutine, which did not run: write `async def`,"
                " and await there what it calls"
            ) from None
        # The function has run, and must not run again because its result cannot be stored.
        yield _Uninterrupted(_store_steps(claim, _NOT_KEPT))
        raise
    accepted = yield _Uninterrupted(_store_steps(claim, answer))
    if not accepted:
        raise _lost(rules)
    return result


def _lost(rules: FunctionRules) -> LeaseLost:
    return LeaseLost(f"{rules.operation!r} took longer than its lease: another one does it now")


def _message(error: Exception) -> str:
    try:
        return str(error)[:LONGEST_MESSAGE]
    except Exception:  # noqa: BLE001 - no message; the type is stored
        return ""


def _store_steps(claim: KeyClaim, answer: object, *, failed: bool = False) -> Steps[bool]:
    """Complete the claim, with retries: completing twice has the effect of once."""
    asked = _MethodCall("complete", (claim, answer), {"failed": failed})
    for pause in PAUSES:
        try:
            return bool((yield asked))
        except Exception:  # noqa: BLE001 - from any driver; the last one is raised
            yield pause
    return bool((yield asked))


def _abandon_steps(claim: KeyClaim) -> Steps[None]:
    yield _MethodCall("abandon", (claim,), {})


def _stored_form(rules: FunctionRules, result: Any) -> Any:
    """Return a result in its stored form, or raise."""
    if rules.codec is not None:
        if iscoroutine(result):
            raise TypeError("a coroutine is no result: await it, and return what it gives")
        return bytes(rules.codec.dumps(result))
    records.check_storable(result)
    return result


def _replay(rules: FunctionRules, found: Replay) -> Any:
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


def _record_name(
    rules: FunctionRules, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str | None, str, str, object]:
    """Return the arguments that name the record of one call."""
    bound = rules.shape.bind(*args, **kwargs)
    bound.apply_defaults()

    def value_from(how: str | Function | None, otherwise: Callable[[], str | None]) -> Any:
        if how is None:
            return otherwise()
        return bound.arguments[how] if isinstance(how, str) else how(*args, **kwargs)

    key = value_from(rules.key, current_idempotency_key)
    if key is None:
        raise KeyMissing(
            f"{rules.operation!r} needs a key: give one, or `with idempotency_key(...)`"
        )
    check_key(key)
    scope = value_from(rules.scope, current_tenant)
    if rules.fingerprint == "arguments":
        payload: object = _arguments_text(rules, dict(bound.arguments))
    else:
        payload = None if rules.fingerprint is None else rules.fingerprint(*args, **kwargs)
    return scope, rules.operation, key, payload


def _arguments_text(rules: FunctionRules, arguments: dict[str, Any]) -> str:
    name, first = next(iter(arguments.items()), ("", None))
    if (
        name == "self"
        or (name == "cls" and isinstance(first, type))
        or (rules.in_class and _is_owner(rules, first))
    ):
        del arguments[name]
    try:
        return canonical_json(arguments)
    except TypeError as error:
        raise TypeError(
            f"the arguments are not JSON ({error}): write fingerprint=, a function of them that"
            " returns bytes, text or what JSON has; or None, to compare nothing"
        ) from error


def _is_owner(rules: FunctionRules, first: Any) -> bool:
    """Return whether `first` is the owner of the method: an instance, or the class.

    The argument's name does not decide: a static method is defined in a class too, but its first
    argument is payload.
    """
    function = unwrap(rules.function)
    name = getattr(function, "__name__", "")
    own = first.__mro__ if isinstance(first, type) else ()
    for each in (*own, *type(first).__mro__):
        found = vars(each).get(name)
        if found is not None and unwrap(found) is function:
            return not isinstance(found, staticmethod)
    return False


def _count_nothing(_what: str) -> None:
    """Count nothing."""
