from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Guard, Retry
from seawall.runtime.functions import kind_of
from seawall.runtime.parameters import ANY, parameters_of
from seawall.testing import retries


def everything(a, b=2, /, c=3, *rest, d, e=5, **more):
    return (a, b, c, rest, d, e, more)


def nothing():
    return ()


def underscored(a_, b):
    return (a_, b)


def shadowing(now, value, clock, function, t0, host):
    return (now, value, clock, function, t0, host)


FUNCTIONS = [everything, nothing, underscored, shadowing, lambda x, *, y=1: (x, y)]
ARGUMENTS = st.tuples(
    st.lists(st.integers(), max_size=6),
    st.dictionaries(st.sampled_from("abcdexy") | st.just("now"), st.integers(), max_size=4),
)


@pytest.fixture(scope="module")
def guarded():
    guard = Guard("parameters", Retry(on=ValueError))
    yield {function: guard(function) for function in FUNCTIONS}
    guard.close()


@given(function=st.sampled_from(FUNCTIONS), arguments=ARGUMENTS)
def test_a_guarded_function_takes_what_the_function_takes(guarded, function, arguments):
    """Every call either gives the same as the function itself, or is refused as by itself."""
    args, kwargs = arguments
    try:
        expected = function(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            guarded[function](*args, **kwargs)
    else:
        assert guarded[function](*args, **kwargs) == expected


def test_retries_pass_the_same_arguments_again():
    """What goes through the fast path's parameters comes out of the interpreter unchanged."""
    guard = Guard("parameters again", Retry(on=ValueError))
    seen = []

    @guard
    def flaky(a, *rest, b=2, **more):
        seen.append((a, rest, b, more))
        if len(seen) < 3:
            raise ValueError
        return len(seen)

    with retries("instant"):
        assert flaky(1, 5, 6, c=7) == 3
    assert seen == [(1, (5, 6), 2, {"c": 7})] * 3


@pytest.mark.parametrize("function", [functools.partial(nothing), len, underscored, "".join])
def test_what_cannot_be_told_takes_anything(function):
    """Builtins, partials and names of our own form fall back to *args, **kwargs."""
    assert parameters_of(function) is ANY


def test_only_names_become_part_of_the_text():
    """A code object with a crafted variable name does not get it into generated source."""
    code = nothing.__code__.replace(co_argcount=1, co_varnames=("x): import os  #",), co_nlocals=1)
    crafted = type(nothing)(code, {})
    assert parameters_of(crafted) is ANY


class Callables:
    def method(self):
        return 1

    async def coroutine(self):
        return 1

    def __call__(self):
        return 1


class AsyncCallable:
    async def __call__(self):
        return 1


def generator():
    yield 1


async def async_generator():
    yield 1


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (nothing, "sync"),
        (len, "sync"),
        (Callables(), "sync"),
        (Callables().method, "sync"),
        (Callables().coroutine, "async"),
        (AsyncCallable(), "async"),
        (functools.partial(Callables().coroutine), "async"),
        (generator, "generator"),
        (async_generator, "async generator"),
    ],
)
def test_the_kind_of_a_function_is_told(function, kind):
    """Functions, methods, partials and callable objects are told apart by how they run."""
    assert kind_of(function) == kind


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [(staticmethod(nothing), "below @staticmethod"), (Callables, "a class"), (3, "not its result")],
)
def test_what_cannot_be_guarded_says_why(wrong, advice):
    """Classes, descriptors and values are refused with what to do instead."""
    with pytest.raises(TypeError, match=advice):
        kind_of(wrong)
