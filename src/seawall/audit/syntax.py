"""Questions about syntax trees that several rules ask."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
Kinds: TypeAlias = type[ast.AST] | tuple[type[ast.AST], ...]

LONGEST: Final = 60
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_LATER: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def is_none(node: ast.AST | None) -> bool:
    """Return whether `node` is the constant None."""
    return isinstance(node, ast.Constant) and node.value is None


def names_in(node: ast.AST) -> set[str]:
    """Return the plain names in an expression."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def texts_in(node: ast.AST) -> set[str]:
    """Return the constant texts in an expression."""
    constants = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def words_in(node: ast.AST) -> str:
    """Return every name, attribute, keyword and text below `node`, in lower case."""
    words = []
    for one in ast.walk(node):
        match one:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.keyword(arg=str(word)):
                words.append(word)
            case ast.Constant(value=str(word)):
                words.append(word)
    return " ".join(words).lower()


def code_of(node: ast.expr) -> str:
    """Return `node` as code, cut if it is long."""
    try:
        text = ast.unparse(node)
    except RecursionError:
        return "..."
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def own(statements: Sequence[ast.AST], kinds: Kinds) -> Iterator[ast.AST]:
    """Yield the nodes of such kinds that run as a part of `statements`, in order.

    Functions inside of them run at another time. The `break` of a further loop ends that one.
    """
    todo: list[tuple[ast.AST, bool]] = [(statement, False) for statement in reversed(statements)]
    while todo:
        node, looped = todo.pop()
        if isinstance(node, kinds) and not (looped and isinstance(node, ast.Break)):
            yield node
        if isinstance(node, _LATER):
            continue
        inside = looped or isinstance(node, _LOOPS)
        todo.extend((child, inside) for child in reversed(list(ast.iter_child_nodes(node))))


def own_calls(statements: Sequence[ast.AST]) -> Iterator[ast.Call]:
    """Yield the calls that run as a part of `statements`, in order."""
    for node in own(statements, ast.Call):
        if isinstance(node, ast.Call):
            yield node


def keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return the named arguments of a call, without `**`."""
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def has_unpacking(call: ast.Call) -> bool:
    """Return whether some arguments come from `*` or `**`."""
    return any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(argument, ast.Starred) for argument in call.args
    )
