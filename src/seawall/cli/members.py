"""`seawall members`: which members are alive or suspected, and by which pods of a service.

Promises:
- It only reads.
- The exit status is 0 if all members are alive, 1 if some are suspected or confirmed as failed, or
  2 if nothing could be read.
- It needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from seawall.cli.top.client import DashboardClient, add_header_argument, client_of
from seawall.cli.top.messages import validated
from seawall.dashboard import wording as say
from seawall.dashboard.presenters.members import GROUP, TITLE, member_of
from seawall.dashboard.summary import is_late
from seawall.dashboard.views import WORST, RowView, View

WELL, SUSPECTED, UNREADABLE = 0, 1, 2
"""Exit status."""
EPILOG: Final = f"""\
exit status: {WELL} all are alive, {SUSPECTED} some are suspected or confirmed as failed,\
 {UNREADABLE} not to be seen.
"""


_CLEAR: Final = "\x1b[H\x1b[2J"


class Sighting(NamedTuple):
    """The state of a member as one pod sees it."""

    pod: str
    row: RowView

    @property
    def facts(self) -> dict[str, str]:
        """Its facts by label: "for", "level", "round trip", "reason", "by"."""
        return dict(self.row["facts"])


class MemberSummary(NamedTuple):
    """A member of a group, as all pods that watch it see it."""

    group: str
    name: str
    sights: list[Sighting]

    @property
    def worst(self) -> Sighting:
        """The worst state that any pod sees."""
        return min(self.sights, key=_severity)

    @property
    def state(self) -> str:
        """The worst state, and the number of pods that report it."""
        state, watching = self.worst.row["state"], len(self.sights)
        agreeing = sum(one.row["state"] == state for one in self.sights)
        if watching == 1 or (agreeing == watching and state == "alive"):
            return state
        return f"{state} by {agreeing} of {watching} pods"


def _severity(sight: Sighting) -> tuple[int, float]:
    return WORST.index(sight.row["tone"]), -(sight.row["track"] or 0.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `seawall members` to `parser`."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("url", help="where the dashboard is mounted, such as http://127.0.0.1:8000/seawall")
    add("--watch", action="store_true", help="go on, and show each change until Ctrl-C")
    add("--json", action="store_true", help="print one line of JSON instead of a table")
    add("--group", action="append", metavar="NAME", help="only this group; may be repeated")
    add_header_argument(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command, and return the exit status; a mistake raises ValueError or OSError."""
    source = client_of(args)
    if args.watch:
        return _watch(source, args)
    everybody = _read(source.once())
    members = _only(everybody, args.group)
    if not members:
        raise ValueError(_no_members(everybody))
    return _show(members, as_json=args.json)


def _watch(source: DashboardClient, args: argparse.Namespace) -> int:
    """Show each message; a restarting service has no members for a while."""
    status = UNREADABLE
    with suppress(KeyboardInterrupt):  # the usual way to quit
        for raw in source.messages(_report):
            members = _only(_read(raw), args.group)
            sys.stdout.write(_CLEAR if sys.stdout.isatty() else "")
            status = _show(members, as_json=args.json)
    return status


def _report(why: str) -> None:
    sys.stderr.write(f"seawall members: {why}\n")


def _no_members(everybody: Iterable[MemberSummary]) -> str:
    known = sorted({one.group for one in everybody})
    if known:
        return f"no such group: there are {', '.join(known)}"
    return "no pod watches members: make a Heartbeats or a Cluster in them"


def _read(raw: dict[str, Any]) -> list[MemberSummary]:
    message = validated(raw).message
    return members_of(message["views"], message["at"])


def _only(members: list[MemberSummary], groups: Sequence[str] | None) -> list[MemberSummary]:
    return [one for one in members if groups is None or one.group in groups]


def members_of(views: Sequence[View], at: float) -> list[MemberSummary]:
    """Return all members by group, the worst first; stale views count only if there are no others.

    A pod that is gone, or cut off, has an outdated view of the others.
    """
    fresh = [view for view in views if "gone" not in view and not is_late(view, at)]
    found: dict[tuple[str, str], MemberSummary] = {}
    for view in fresh or views:
        rows = view["sections"].get(TITLE, [])
        groups = [row["name"] for row in rows if row["kind"] == GROUP]
        for row in rows:
            for group in sorted(groups, key=len, reverse=True):
                name = member_of(row, group)
                if name is not None:
                    member = found.setdefault((group, name), MemberSummary(group, name, []))
                    member.sights.append(Sighting(view["pod"]["name"], row))
                    break
    return sorted(found.values(), key=_rank)


def _rank(member: MemberSummary) -> tuple[str, int, str]:
    return member.group, WORST.index(member.worst.row["tone"]), member.name


def _show(members: list[MemberSummary], *, as_json: bool) -> int:
    """Print all members, as JSON on one line in ASCII, in which terminal control is escaped."""
    if as_json:
        sys.stdout.write(json.dumps([_document(one) for one in members], ensure_ascii=True) + "\n")
    else:
        sys.stdout.write("\n".join(table(members)) + "\n")
    sys.stdout.flush()
    return SUSPECTED if any(one.worst.row["tone"] in {"warn", "bad"} for one in members) else WELL


def _document(one: MemberSummary) -> dict[str, Any]:
    return {
        "group": one.group,
        "member": one.name,
        "state": one.worst.row["state"],
        "level_ratio": one.worst.row["track"],
        "pods": {sight.pod: _plain(sight) for sight in one.sights},
    }


def _plain(sight: Sighting) -> dict[str, Any]:
    """Return what a pod sees in a form for programs: numbers, and text where there are none."""
    words = {key: text for key, text in sight.facts.items() if key in {"reason", "by"}}
    return {"state": sight.row["state"], **sight.row.get("figures", {}), **words}


_COLUMNS: Final = ("MEMBER", "STATE", "LEVEL", "SINCE", "ROUND TRIP", "REASON")


def table(members: list[MemberSummary]) -> Iterator[str]:
    """Yield the lines of the table; each group has its own, below its name."""
    for group in dict.fromkeys(one.group for one in members):
        rows = [_COLUMNS, *(_cells(one) for one in members if one.group == group)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(_COLUMNS))]
        yield f"{group}: {say.several(len(rows) - 1, 'member')}"
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield f"  {'  '.join(cells)}".rstrip()


def _cells(member: MemberSummary) -> tuple[str, ...]:
    facts = member.worst.facts
    reason = facts.get("reason", "")
    if facts.get("by"):
        reason = f"{reason} (by {facts['by']})".strip()
    words = (facts.get(label, "-") for label in ("level", "for", "round trip"))
    return (member.name, member.state, *words, reason)
