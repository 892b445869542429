"""`seawall dead-letters`: what an operator lists, opens, replays and drops in a shell."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seawall.cli import main
from seawall.durable import Database, Sqlite, migrate
from seawall.pipeline import DatabaseDeadLetters, DeadLetter
from tests.durable.conftest import postgres
from tests.durable.postgres import Postgres

__all__ = ["postgres"]

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def letters(tmp_path: Path) -> Iterator[DatabaseDeadLetters]:
    """Return letters of a pipeline in a file."""
    source = Sqlite(tmp_path / "letters.db")
    database = Database(source, name="cli letters")
    migrate(database)
    found = DatabaseDeadLetters(database, "orders")
    values = [{"user": "ann", "password": "hunter2"}, {"user": "bob"}, {1, 2}]
    for number, value in enumerate(values):
        cause = f"TimeoutError: \x1b[31mno {number}"
        letter = DeadLetter(f"s:{number}", value, "enrich", cause, 3, 100.0 + number)
        asyncio.run(found.aadd(letter))
    yield found
    database.close()
    source.close()


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return what runs the command, and what it has printed."""

    def command(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        path = str(tmp_path / "letters.db")
        status = main(["dead-letters", *words, "--pipeline", "orders", "--database", path])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return command


@pytest.mark.usefixtures("letters")
def test_letters_are_listed_one_line_each(run: Command) -> None:
    """With their stage, attempts and cause; nothing steers the terminal."""
    status, out, _ = run("list")
    assert status == 0
    lines = [line.split("\t") for line in out.splitlines()]
    assert sorted(line[0] for line in lines) == ["s:0", "s:1", "s:2"]
    assert {tuple(line[1:3]) for line in lines} == {("enrich", "3")}
    assert "\x1b" not in out
    assert len(run("list", "--search", "no 1")[1].splitlines()) == 1
    status, out, err = run("list", "--limit", "1")
    assert (len(out.splitlines()), "more than 1" in err) == (1, True)
    assert "no such letters" in run("list", "--state", "waiting")[2]


@pytest.mark.usefixtures("letters")
def test_a_letter_is_shown_without_secrets(run: Command) -> None:
    """As text and as JSON."""
    status, out, _ = run("show", "s:0")
    assert status == 0
    assert "stage     enrich" in out
    assert '"user": "ann"' in out
    assert "hunter2" not in out
    status, out, _ = run("show", "s:1", "s:2", "s:9", "--json")
    assert status == 1
    first, second = map(json.loads, out.splitlines())
    assert json.loads(first["value"]) == {"user": "bob"}
    assert (first["acts"], second["acts"]) == (["retry", "drop"], ["drop"])


def test_letters_are_marked_for_replay(run: Command, letters: DatabaseDeadLetters) -> None:
    """By id or by search; what cannot be replayed is named, with why."""
    status, out, err = run("retry", "s:0", "s:2", "s:9")
    assert (status, out) == (1, "Marked for replay: 1\n")
    assert "'s:2': its value could not be stored" in err
    assert "'s:9': there is no such letter" in err
    assert "'s:0': it waits to be replayed" in run("retry", "s:0")[2]
    assert run("retry", "--all", "--search", "bob")[:2] == (0, "Marked for replay: 1\n")
    assert letters.counts()["waiting"][0] == 2


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("act", ["show", "retry", "drop"])
def test_ids_may_stand_behind_options(
    act: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the examples of its help and of the documentation."""
    path = str(tmp_path / "letters.db")
    words = ["--pipeline", "orders", "--yes", "s:0", "--database", path, "s:1"]
    assert main(["dead-letters", act, *words]) == 0
    printed = capsys.readouterr().out
    expected = {"show": "ann", "retry": "Marked for replay: 2", "drop": "Dropped: 2"}
    assert expected[act] in printed


def test_letters_are_dropped_when_somebody_agrees(
    run: Command, letters: DatabaseDeadLetters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--yes` does not ask."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\ny\n"))
    assert run("drop", "s:0")[:2] == (1, "Nothing was done.\n")
    assert run("drop", "s:0")[:2] == (0, "Dropped: 1\n")
    assert run("drop", "--all", "--yes")[:2] == (0, "Dropped: 2\n")
    assert letters.counts()["dead"][0] == 0


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("retry",), "write the ids of the letters, or --all"),
        (("drop", "s:1", "--all"), "write the ids of the letters, or --all"),
        (("show",), "write the ids"),
        (("list", "s:1"), "write --search"),
        (("list", "--limit", "0"), "write at least 1"),
    ],
)
@pytest.mark.usefixtures("letters")
def test_mistakes_are_told_in_a_line(run: Command, words: tuple[str, ...], advice: str) -> None:
    """With what to write instead."""
    status, _, err = run(*words)
    assert status == 2
    assert advice in err
    assert err.startswith("seawall dead-letters: ")


def test_a_password_is_in_no_message(
    capsys: pytest.CaptureFixture[str], postgres: Postgres
) -> None:
    """Also where the table is missing, or the server is not there."""
    asked = ["dead-letters", "list", "--pipeline", "orders", "--schema", "nothing", "--database"]
    assert main([*asked, postgres.url]) == 2
    assert "run migrate" in capsys.readouterr().err
    assert main([*asked, "mysql://ann:hunter2@127.0.0.1/x"]) == 2
    assert "hunter2" not in capsys.readouterr().err
