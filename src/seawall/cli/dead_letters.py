"""`seawall dead-letters`: list, open, replay and drop the dead letters of a pipeline.

Promises:
- Values whose names look like secrets are hidden, and terminal control sequences are not printed.
- Letters that a pipeline is replaying are left alone.
- The password of a database's address appears in no message.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from typing import Any, Final

from seawall._redaction import printable, redacted
from seawall.cli.keys import add_database_arguments, confirmed, opened_database
from seawall.dashboard.actions.work_lists import payload_text
from seawall.jobs import WorkItem
from seawall.pipeline import DatabaseDeadLetters
from seawall.pipeline.dead_letters.letters import STATES

ABOUT: Final = """\
List, open, replay and drop the dead letters of a pipeline.

  seawall dead-letters list --pipeline orders --search timeout
  seawall dead-letters show --pipeline orders orders:17
  seawall dead-letters retry --pipeline orders orders:17 orders:18
  seawall dead-letters drop --pipeline orders --all --search 'no such user'

`retry` marks letters: a process that runs the pipeline takes them within seconds, and sends each
through the stage where it failed. A letter is deleted when its item is in the sink; if it fails
again, it is dead again. A letter whose value could not be stored can only be dropped.
"""

FOUND, NOT_FOUND = 0, 1
"""Exit status: whether the letter was found, and whether all requested actions were done."""
PAGE: Final = 100


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command to `parser`."""
    parser.description, parser.formatter_class = ABOUT, RawDescriptionHelpFormatter
    add = parser.add_argument
    add("act", choices=("list", "show", "retry", "drop"), help="what to do")
    add("ids", nargs="*", metavar="ID", help="with show, retry, drop: the letters that are meant")
    add("--pipeline", required=True, metavar="NAME", help="the pipeline whose letters they are")
    add_database_arguments(parser)
    add("--state", choices=STATES, default="dead", help="with list: in which state (%(default)s)")
    add("--search", default="", metavar="TEXT", help="only those with this text in them")
    add("--limit", type=int, default=50, help="with list: how many at most (%(default)s)")
    add("--all", action="store_true", help="with retry, drop: all dead ones that match --search")
    add("--json", action="store_true", help="with list, show: a line of JSON for each letter")
    add("--yes", action="store_true", help="with drop: do not ask")


def main(args: Namespace) -> int:
    """Run the command, and return the exit status."""
    _check(args)
    with opened_database(args, args.database, "dead letters") as database:
        return _ACTS[args.act](DatabaseDeadLetters(database, args.pipeline), args)


def _check(args: Namespace) -> None:
    if args.act == "list" and (args.ids or args.all):
        raise ValueError("list: write --search instead of ids; it lists all that match")
    if args.act == "show" and (not args.ids or args.all):
        raise ValueError("show: write the ids of the letters")
    if args.act in ("retry", "drop") and bool(args.ids) == args.all:
        raise ValueError(f"{args.act}: write the ids of the letters, or --all")
    if args.limit < 1:
        raise ValueError(f"--limit {args.limit}: write at least 1")


def _list(letters: DatabaseDeadLetters, args: Namespace) -> int:
    number = 0
    for item in _found(letters, args.state, args.search, payloads=args.json):
        if number == args.limit:
            sys.stderr.write(f"There are more than {number}: write --limit or --search.\n")
            break
        number += 1
        if args.json:
            _print(json.dumps(_facts(item)))
        else:
            # One line for each letter, so that it can be processed by other tools.
            _print(f"{item.id}\t{item.kind}\t{item.attempts}\t{_line(item.error)}")
    if not number:
        sys.stderr.write(f"Pipeline {args.pipeline!r} has no such letters.\n")
    return FOUND


def _show(letters: DatabaseDeadLetters, args: Namespace) -> int:
    status = FOUND
    for id_ in args.ids:
        item = letters.inspect(id_)
        if item is None:
            sys.stderr.write(f"There is no letter {id_!r}.\n")
            status = NOT_FOUND
        elif args.json:
            _print(json.dumps(_facts(item)))
        else:
            _print("\n".join(_lines(item)))
    return status


def _retry(letters: DatabaseDeadLetters, args: Namespace) -> int:
    return _do(letters, args, letters.retry, "Marked for replay")


def _drop(letters: DatabaseDeadLetters, args: Namespace) -> int:
    if not args.yes:
        which = "all that match" if args.all else f"{len(args.ids)}"
        if not confirmed(f"Drop {which} for good?"):
            _print("Nothing was done.")
            return NOT_FOUND
    return _do(letters, args, letters.drop, "Dropped")


_ACTS: Final = {"list": _list, "show": _show, "retry": _retry, "drop": _drop}


def _do(
    letters: DatabaseDeadLetters, args: Namespace, act: Callable[[str], bool], done: str
) -> int:
    ids = args.ids
    if args.all:
        found = _found(letters, "dead", args.search, payloads=True)
        ids = [item.id for item in found if args.act in item.acts]
    missed = [id_ for id_ in ids if not act(id_)]
    _print(f"{done}: {len(ids) - len(missed)}")
    for id_ in missed:
        sys.stderr.write(f"{id_!r}: {_why_not(letters.inspect(id_, payload=False))}\n")
    return NOT_FOUND if missed else FOUND


def _why_not(item: WorkItem | None) -> str:
    if item is None:
        return "there is no such letter"
    if item.state == "dead":
        return "its value could not be stored, so it cannot be replayed"
    return "it waits to be replayed" if item.state == "waiting" else "a pipeline replays it now"


def _found(
    letters: DatabaseDeadLetters, state: str, search: str, *, payloads: bool
) -> Iterator[WorkItem]:
    after = None
    while True:
        page = letters.browse(state, search=search, after=after, limit=PAGE, payloads=payloads)
        yield from page.items
        after = page.next
        if after is None:
            return


def _facts(item: WorkItem) -> dict[str, Any]:
    value, is_cut = payload_text(item.payload, item.size)
    return {
        "id": item.id,
        "state": item.state,
        "stage": item.kind,
        "attempts": item.attempts,
        "age_seconds": item.age,
        "since_seconds": item.since,
        "cause": redacted(item.error),
        "traceback": redacted(item.traceback),
        "value": value,
        "value_is_cut": is_cut,
        "acts": list(item.acts),
    }


def _lines(item: WorkItem) -> Iterator[str]:
    value, is_cut = payload_text(item.payload, item.size)
    yield f"letter    {item.id}"
    yield f"state     {item.state}, for {item.since:.0f} s"
    yield f"stage     {item.kind}"
    yield f"attempts  {item.attempts}"
    yield f"cause     {_line(item.error)}"
    yield f"acts      {', '.join(item.acts) or 'none now'}"
    yield f"value     {value}{' (cut)' if is_cut else ''}"
    for line in item.traceback.splitlines():
        yield _line(line)


def _line(text: str) -> str:
    return printable(redacted(text), 200)


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
