"""The public names and their signatures are what `public_api.txt` says.

A change of the API is a change of that file: `python tests/test_public_api.py --write`.
"""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import seawall
import seawall.clients.grpc
import seawall.clients.httpx
import seawall.clients.httpx2
import seawall.clients.llm
import seawall.clients.requests
import seawall.clients.upstreams
import seawall.signals
import seawall.testing
import seawall.web
import seawall.web.checks
import seawall.web.fastapi
import seawall.web.grpc

PINNED = Path(__file__).with_name("public_api.txt")
MODULES = (
    seawall,
    seawall.clients,
    seawall.clients.grpc,
    seawall.clients.httpx,
    seawall.clients.httpx2,
    seawall.clients.llm,
    seawall.clients.requests,
    seawall.clients.upstreams,
    seawall.signals,
    seawall.testing,
    seawall.web,
    seawall.web.checks,
    seawall.web.fastapi,
    seawall.web.grpc,
)
SPECIAL = ("__init__", "__call__", "__len__")


def _signature(function: Any) -> str:
    return str(inspect.signature(function))


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
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        yield f"enum {name}: {', '.join(f'{m.name}={m.value!r}' for m in thing)}"
    elif isinstance(thing, type):
        bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
        yield f"class {name}({bases})"
        yield from _members(thing)
    elif callable(thing):
        yield f"def {name}{_signature(thing)}"
    else:
        yield f"{name}: {type(thing).__name__}"


def _public(module: Any) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    return sorted(
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
    )


def describe() -> str:
    """Return the public API as text, one line for each name, argument list and member."""
    for name in seawall.__all__:
        getattr(seawall, name)  # loaded when first used, and one may complete another
    lines: list[str] = []
    for module in MODULES:
        lines += [f"# {module.__name__}", ""]
        for name in _public(module):
            lines += [*_describe(name, getattr(module, name)), ""]
    return "\n".join(lines).rstrip() + "\n"


def test_the_public_api_is_what_was_written_down():
    """Names, signatures and members are those of the checked-in file."""
    assert describe().splitlines() == PINNED.read_text().splitlines(), (
        "the public API has changed: if that is meant, run python tests/test_public_api.py --write"
    )


def test_all_is_sorted_and_complete():
    """`__all__` is sorted, without doubles, and all its names can be had and are listed."""
    assert sorted(set(seawall.__all__)) == list(seawall.__all__)
    for name in seawall.__all__:
        assert getattr(seawall, name) is not None
    assert set(seawall.__all__) <= set(dir(seawall))


def test_every_public_name_says_what_it_promises():
    """Each public function and class, and each method of them, has a docstring."""
    silent = []
    for name in seawall.__all__:
        thing = getattr(seawall, name)
        if not (isinstance(thing, type) or inspect.isfunction(thing)):
            continue
        if not thing.__doc__:
            silent.append(name)
        for key, member in vars(thing).items() if isinstance(thing, type) else ():
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and not key.startswith("_") and not function.__doc__:
                silent.append(f"{name}.{key}")
    assert silent == []


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: python {sys.argv[0]} --write")
    PINNED.write_text(describe())
