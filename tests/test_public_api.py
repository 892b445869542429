"""The public names and their signatures are what `public_api.txt` says, and docs/reference.

A change of the API is a change of these: `./dev pin` writes them.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

import pytest

import seawall
import seawall.audit
import seawall.backoff
import seawall.clients.aiohttp
import seawall.clients.boto3
import seawall.clients.grpc
import seawall.clients.httpx
import seawall.clients.httpx2
import seawall.clients.llm
import seawall.clients.requests
import seawall.clients.sqlalchemy
import seawall.clients.upstreams
import seawall.clock
import seawall.config
import seawall.context
import seawall.dashboard
import seawall.durable
import seawall.errors
import seawall.events
import seawall.jobs
import seawall.leases
import seawall.limits
import seawall.load
import seawall.load.signals
import seawall.members
import seawall.pipeline
import seawall.policies.breaker
import seawall.policies.hedge
import seawall.policies.retry
import seawall.policies.timeout
import seawall.redis
import seawall.resources
import seawall.shedding
import seawall.sim
import seawall.tasks.celery
import seawall.tasks.dramatiq
import seawall.telemetry
import seawall.testing
import seawall.tune
import seawall.web
import seawall.web.aiohttp
import seawall.web.checks
import seawall.web.django
import seawall.web.fastapi
import seawall.web.flask
import seawall.web.grpc
import seawall.web.litestar
import seawall.web.quart
import seawall.web.wsgi

sys.path.append(str(Path(__file__).parents[1]))  # where this is run as a program
reference = importlib.import_module("tests.docs.reference")

PINNED = Path(__file__).with_name("public_api.txt")
MODULES = (
    seawall,
    seawall.audit,
    seawall.backoff,
    seawall.clock,
    seawall.config,
    seawall.context,
    seawall.errors,
    seawall.events,
    seawall.jobs,
    seawall.leases,
    seawall.limits,
    seawall.load,
    seawall.policies.breaker,
    seawall.policies.hedge,
    seawall.policies.retry,
    seawall.policies.timeout,
    seawall.redis,
    seawall.resources,
    seawall.shedding,
    seawall.clients.aiohttp,
    seawall.clients.boto3,
    seawall.clients.grpc,
    seawall.clients.httpx,
    seawall.clients.httpx2,
    seawall.clients.llm,
    seawall.clients.requests,
    seawall.clients.sqlalchemy,
    seawall.clients.upstreams,
    seawall.dashboard,
    seawall.durable,
    seawall.members,
    seawall.pipeline,
    seawall.load.signals,
    seawall.sim,
    seawall.tasks.celery,
    seawall.tasks.dramatiq,
    seawall.telemetry,
    seawall.testing,
    seawall.tune,
    seawall.web,
    seawall.web.aiohttp,
    seawall.web.checks,
    seawall.web.django,
    seawall.web.fastapi,
    seawall.web.flask,
    seawall.web.grpc,
    seawall.web.litestar,
    seawall.web.quart,
    seawall.web.wsgi,
)
SPECIAL = ("__init__", "__call__", "__len__")


class _Shown(str):
    """A default as it is shown: by its name, or in an order that does not change."""

    __slots__ = ()
    __repr__ = str.__str__


def _default(value: Any) -> Any:
    if inspect.isfunction(value):
        return _Shown(value.__name__)
    if isinstance(value, frozenset):
        *first, last = map(repr, sorted(value))
        return _Shown(f"{{{', '.join(first[:3])}{', ...' * (len(first) > 3)}, {last}}}")
    return value


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    given = [
        parameter.replace(default=_default(parameter.default))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=given))


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("seawall")


def _members(kind: type) -> Iterator[str]:
    """Yield a line for each public member, inherited ones of Seawall's own classes included."""
    found: dict[str, Any] = {}
    for base in reversed([base for base in kind.__mro__ if _is_ours(base)]):
        found |= vars(base)
    for name in sorted(found):
        if name.startswith("_") and name not in SPECIAL:
            continue
        member = found[name]
        if isinstance(member, property):
            yield f"    {name}: property"
        elif isinstance(member, (classmethod, staticmethod)):
            prefix = type(member).__name__
            # A builtin behind a staticmethod has the signature of its Python version.
            ours = inspect.isfunction(member.__func__)
            yield f"    {prefix} {name}{_signature(member.__func__) if ours else '(...)'}"
        elif inspect.isfunction(member):
            # Protocols get an __init__ from typing, of a kind that differs between versions.
            if member.__module__.startswith("seawall"):
                yield f"    {name}{_signature(member)}"
        elif inspect.ismemberdescriptor(member):
            yield f"    {name}: slot"
        else:
            yield f"    {name} = {member!r}" if isinstance(member, str) else f"    {name}"


def _describe(name: str, thing: Any) -> Iterator[str]:
    if get_origin(thing) is not None:
        yield f"type {name} = {thing}"
    elif isinstance(thing, type) and issubclass(thing, enum.Enum):
        yield f"enum {name}: {', '.join(f'{m.name}={m.value!r}' for m in thing)}"
    elif isinstance(thing, type):
        bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
        yield f"class {name}({bases})"
        yield from _members(thing)
    elif callable(thing):
        yield f"def {name}{_signature(thing)}"
    else:
        yield f"{name}: {type(thing).__name__}"


def describe() -> str:
    """Return the public API as text, one line for each name, argument list and member."""
    for name in seawall.__all__:
        getattr(seawall, name)  # loaded when first used, and one may complete another
    lines: list[str] = []
    for module in MODULES:
        lines += [f"# {module.__name__}", ""]
        for name in module.__all__:
            lines += [*_describe(name, getattr(module, name)), ""]
    return "\n".join(lines).rstrip() + "\n"


def test_the_public_api_is_what_was_written_down():
    """Names, signatures and members are those of the checked-in file."""
    pinned, now = PINNED.read_text().splitlines(), describe().splitlines()
    changes = "\n".join(unified_diff(pinned, now, lineterm="", n=0))
    assert not changes, f"the public API has changed: if that is meant, run ./dev pin\n{changes}"


def test_the_reference_is_what_the_code_says():
    """The pages of docs/reference are those that the code makes now."""
    assert reference.stale() == [], "the reference is stale: run ./dev pin"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_is_sorted_and_complete(module: ModuleType):
    """`__all__` is sorted (constants first), and all its names can be had and are listed."""
    assert sorted(set(module.__all__), key=lambda name: (not name.isupper(), name)) == list(
        module.__all__
    )
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_says_what_it_promises(module: ModuleType):
    """Each public function and class, and each method of them, has a docstring."""
    silent = []
    for name in module.__all__:
        thing = getattr(module, name)
        if not (isinstance(thing, type) or inspect.isfunction(thing)):
            continue
        if not thing.__doc__:
            silent.append(name)
        for key, member in vars(thing).items() if isinstance(thing, type) else ():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not key.startswith("_") and not function.__doc__:
                silent.append(f"{name}.{key}")
    assert silent == []


def test_nothing_public_is_left_out():
    """What some module of a package lists can be had from one of the modules in this list."""
    listed = {name for module in MODULES for name in module.__all__}
    listed.add("LimitGrant")  # what a part returns
    for package in (seawall.clients, seawall.durable, seawall.web):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not found.name.rpartition(".")[2].startswith("_"):
                module = importlib.import_module(found.name)
                assert set(getattr(module, "__all__", ())) <= listed, found.name


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: python {sys.argv[0]} --write")
    PINNED.write_text(describe())
    reference.write()
