"""One file under audit: its names, its comments, and how a finding in it is made."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Final

from seawall.audit.findings import RULES, Finding
from seawall.audit.libraries import Libraries, libraries
from seawall.audit.names import FunctionNode, Names, Scope

_MARK: Final = re.compile(r"#\s*seawall:\s*ok\b[\s:,-]*(.*)")
LONGEST_CONTEXT: Final = 400


class Unreadable(Exception):
    """The file is not Python that this interpreter can parse."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


class SourceFile:
    """A parsed file."""

    def __init__(self, path: str, text: str) -> None:
        """Parse `text`, or raise `Unreadable`."""
        self.path = path
        self.text = text
        self.lines = text.splitlines()
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise Unreadable(error.lineno or 1, f"syntax error: {error.msg}") from error
        except ValueError as error:  # null bytes, before Python 3.11.4
            raise Unreadable(1, f"syntax error: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise Unreadable(1, f"it cannot be parsed ({type(error).__name__})") from error
        self.names = Names(self.tree)
        self.libraries: Libraries = libraries()

    def path_of(self, node: ast.expr, scope: Scope | None = None) -> str:
        """Return the usual path of what `node` stands for, empty if it is unknown."""
        return self.libraries.canonical(self.names.path(node, scope))

    def called(self, call: ast.Call) -> str:
        """Return the usual path of what `call` calls, empty if it is unknown."""
        return self.path_of(call.func, self.names.scope_of(call))

    def function_of(self, node: ast.AST) -> FunctionNode | None:
        """Return the `def` in whose body `node` runs; a lambda is taken as a part of it."""
        function = self.names.function_of(node)
        while isinstance(function, ast.Lambda):
            function = self.names.function_of(function)
        return function

    def finding(self, rule: str, node: ast.AST, message: str, write: str) -> Finding:
        """Return a finding at `node`."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        end = getattr(node, "end_lineno", None) or line
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            end = line  # about its first line, not about the whole block
        code = " ".join(" ".join(self.lines[line - 1 : end]).split())[:LONGEST_CONTEXT]
        context = f"{self.names.qualified_name(node)}\0{code}"
        return Finding(self.path, line, column + 1, RULES[rule], message, write, end, context)

    def suppressions(self) -> dict[int, str]:
        """Return the reason of each `# seawall: ok reason` by line; empty if there is none."""
        if "seawall:" not in self.text:
            return {}
        return dict(self._marks())

    def _marks(self) -> Iterator[tuple[int, str]]:
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                match = token.type == tokenize.COMMENT and _MARK.search(token.string)
                if match:
                    alone = not token.line[: token.start[1]].strip()
                    # A comment on a line of its own is about the next line.
                    yield token.start[0] + alone, match[1].strip()
        except (tokenize.TokenError, SyntaxError):
            return
