"""The table of SECURITY.md names tests that exist; and what can be read off the source itself."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "seawall"
MODULES = sorted(SOURCE.rglob("*.py"))
ROW = re.compile(r"\| (\d+) \| (.+) \| (.+) \|")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PROMISES = 22


# --- The table ---


def promises() -> dict[int, list[tuple[str, str]]]:
    """Return the tests that SECURITY.md names for each promise."""
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    rows = (ROW.fullmatch(line) for line in text.splitlines())
    return {int(row[1]): NAMED.findall(row[3]) for row in rows if row is not None}


@cache
def functions_in(file: str) -> frozenset[str]:
    """Return the names of the functions in a file."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


def test_every_promise_has_a_test() -> None:
    """The table has all promises in order, and each names at least one test."""
    table = promises()
    assert list(table) == list(range(1, PROMISES + 1))
    assert [number for number, named in table.items() if not named] == []


@pytest.mark.parametrize("number", range(1, PROMISES + 1))
def test_the_tests_of_a_promise_exist(number: int) -> None:
    """A test that is renamed or removed takes its line of the table along."""
    for file, name in promises()[number]:
        assert (ROOT / file).is_file(), file
        assert name.startswith("test_"), name
        assert name in functions_in(file), f"{file}::{name}"


# --- Scripts and statements ---

LUA = sorted((SOURCE / "redis" / "lua").glob("*.lua"))
SQL = sorted((SOURCE / "durable" / "sql").rglob("*.sql"))
COMMENT = re.compile(r"--[^\n]*")


def calls_in(module: Path) -> list[tuple[str, ast.Call]]:
    """Return all calls in a module, by the last part of the name of what is called."""
    calls = []
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute):
                calls.append((called.attr, node))
            elif isinstance(called, ast.Name):
                calls.append((called.id, node))
    return calls


@pytest.mark.parametrize("script", LUA, ids=lambda path: path.stem)
def test_a_script_runs_no_text_and_names_its_commands(script: Path) -> None:
    """No script makes code of data, and each command that it calls is written out."""
    text = COMMENT.sub("", script.read_text("utf-8"))
    assert not re.search(r"\b(?:loadstring|loadfile|dofile|setfenv)\s*\(", text)
    commands = re.findall(r"redis\.p?call\(\s*(.)", text)
    assert all(first in "'\"" for first in commands)


def test_scripts_are_files_of_the_package() -> None:
    """One place sends scripts, and what it sends is put together of files, never of data."""
    senders = {
        (module.name, name)
        for module in MODULES
        for name, call in calls_in(module)
        if name in ("eval", "evalsha", "script_load", "register_script")
        and isinstance(call.func, ast.Attribute)
    }
    assert senders == {("connections.py", "eval"), ("connections.py", "evalsha")}
    composed = [
        ast.unparse(call) for m in MODULES for name, call in calls_in(m) if name == "compose"
    ]
    assert composed == ["compose(self._clock, lua(name))"]


@pytest.mark.parametrize("file", SQL, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_statement_takes_data_as_parameters_only(file: Path) -> None:
    """What is put into the text of a statement is a table of ours, or the time; see `_sql.py`."""
    text = COMMENT.sub("", file.read_text("utf-8"))
    kinds = (
        "idempotency|outbox|inbox|fifo|deferred_calls|jobs|leases|fences|events|tables|schema"
        "|dead_letters|checkpoints"
    )
    rest = re.sub(rf"\{{(?:now|\w*(?:{kinds})\w*)\}}", "", text)
    assert not re.search(r"[{}]", rest), re.findall(r"\{[^}]*\}", rest)


def test_no_other_statement_is_made_of_text() -> None:
    """The linter finds statements that are put together; the exceptions quote and check names."""
    excepted = {
        str(module.relative_to(SOURCE))
        for module in MODULES
        if "noqa: S608" in module.read_text("utf-8")
    }
    assert excepted == {
        "durable/database/table_reader.py",
        "durable/outbox/with_clause.py",
        "web/checks.py",
    }


# --- Code out of data ---

FORBIDDEN = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "jsonpickle"}
OWN_PROCESSES = {"resources/executors/messages.py"}
"""Pickles between a process and its own children: nobody else writes to those pipes."""
GENERATED = {"runtime/fastpath.py", "policies/rate_limit/fast_path.py"}
"""Compile fixed lines of their own."""


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_data_becomes_code(module: Path) -> None:
    """Nothing is unpickled, evaluated or read as YAML; two modules compile lines of their own."""
    where = str(module.relative_to(SOURCE))
    imported: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert not imported & FORBIDDEN or where in OWN_PROCESSES
    built_in = {
        name
        for name, call in calls_in(module)
        if isinstance(call.func, ast.Name) and name in ("eval", "exec", "compile", "__import__")
    }
    assert not built_in or where in GENERATED
