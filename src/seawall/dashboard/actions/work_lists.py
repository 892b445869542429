"""Jobs, dead letters and events that an operator lists, opens, retries and drops on the page.

It shows the queues, jobs, outboxes and dead letters of pipelines of this process, as long as they
exist. Retrying a dead letter replays it at the stage where it failed.

Promises:
- Payloads are read and searched only for operators, truncated, and with values hidden whose names
  look like secrets. Other viewers see ids, states and errors.
- One request lists at most 100 items and acts on at most 100. Each item is acted on once, even if
  it is named twice.
- Each action is logged with the operator, even if the rest failed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from seawall import registry
from seawall._redaction import printable, redacted
from seawall.dashboard.bounds import LONGEST_NAME, LONGEST_TEXT, shown
from seawall.dashboard.responses import RequestRefused, unavailable, unprocessable
from seawall.errors import QueueFull, UnknownJob

log: Final = logging.getLogger("seawall.dashboard")

WITHIN: Final = 10.0
"""Timeout in seconds for a store or a database."""
KINDS: Final = ("queue", "jobs", "outbox", "dead_letters")
MOST_LISTS: Final = 50
MOST_AT_ONCE: Final = 100
"""Maximum number of items in one action."""
PAGE: Final = 50
"""Number of items on a page."""
LOOKS: Final = 10
"""Maximum number of queries to fill one page of a search."""
LONGEST_ID: Final = 500
LONGEST_PREVIEW: Final = 160
LONGEST_PAYLOAD: Final = 20_000
LONGEST_ERROR: Final = 2_000
LONGEST_TRACEBACK: Final = 10_000
DEEPEST: Final = 40
"""Maximum depth of a payload; deeper values are hidden."""
_HIDDEN: Final = "***"
_DONE: Final = {"retry": "Retried", "drop": "Dropped"}
_COUNTED: Final = {"pending": "waiting"}
"""States that a survey calls by another name."""

Report = Callable[..., None]


class WorkListEntry(NamedTuple):
    """A list of work: its kind, name and object."""

    kind: str
    name: str
    things: Any
    entry: registry.RegistryEntry


def work_lists() -> list[WorkListEntry]:
    """Return the lists of this process; of several that are the same, the first."""
    found: dict[tuple[str, str], WorkListEntry] = {}
    places: dict[tuple[str, str], list[Any]] = {}
    for things, entry in registry.entered():
        if entry.kind not in KINDS or not hasattr(things, "abrowse"):
            continue
        place = getattr(things, "database", None) or getattr(things, "store", None)
        known = places.setdefault((entry.kind, entry.name), [])
        if place is not None and any(place is other for other in known):
            continue
        known.append(place)
        name = entry.name if len(known) == 1 else f"{entry.name} ({len(known)})"
        if len(name) <= LONGEST_NAME:
            found.setdefault((entry.kind, name), WorkListEntry(entry.kind, name, things, entry))
    ordered = sorted(found.values(), key=lambda one: (KINDS.index(one.kind), one.name))
    return ordered[:MOST_LISTS]


async def read_lists(
    _query: Mapping[str, str], *, payloads: bool, report: Report
) -> dict[str, Any]:
    """Return the lists, with the counts that are known without a query."""
    del payloads, report
    return {
        "lists": [
            {
                "kind": one.kind,
                "name": one.name,
                "states": list(one.things.WORK_STATES),
                "counts": _counts(one),
            }
            for one in work_lists()
        ]
    }


async def read_list(query: Mapping[str, str], *, payloads: bool, report: Report) -> dict[str, Any]:
    """Return a page of a list."""
    listed = _named(query)
    state = query.get("state", listed.things.WORK_STATES[0])
    search, after = query.get("search", ""), query.get("after") or None

    async def read() -> dict[str, Any]:
        items: list[Any] = []
        place = after
        for _ in range(LOOKS):
            page = await listed.things.abrowse(
                state, search=search, after=place, limit=PAGE - len(items), payloads=payloads
            )
            items += page.items
            place = page.next
            if place is None or len(items) >= PAGE:
                break
        return {"items": [_row(item, payloads=payloads) for item in items], "next": place}

    return await _asked(read, report)


async def read_item(query: Mapping[str, str], *, payloads: bool, report: Report) -> dict[str, Any]:
    """Return one item, with its payload and its traceback."""
    listed, id_ = _named(query), _id(query.get("id"))

    async def read() -> dict[str, Any]:
        item = await listed.things.ainspect(id_, payload=payloads)
        if item is None:
            raise RequestRefused(404, "Not found", "It is not there any more.")
        row = _row(item, payloads=payloads)
        text, cut = payload_text(item.payload, item.size) if payloads else (None, False)
        return {
            "item": {
                **row,
                "error": _lines(_redacted_lines(item.error), LONGEST_ERROR),
                "payload": text,
                "cut": cut,
                "traceback": _lines(_redacted_lines(item.traceback), LONGEST_TRACEBACK),
            }
        }

    return await _asked(read, report)


READS: Final = {"lists": read_lists, "list": read_list, "item": read_item}
"""The read functions by path."""


async def act_on_work(body: Any, operator: str, client: str, report: Report) -> dict[str, Any]:
    """Retry or drop some items by id, or those that match a search, one page at a time.

    Return the number of items done, and for a search the position to continue from.
    """
    if not isinstance(body, dict):
        raise unprocessable("Write an object.")
    act = body.get("act")
    if not isinstance(act, str) or act not in _DONE:
        raise unprocessable(f"act: write one of {', '.join(_DONE)}.")
    listed = _named(body)
    ids, search = _chosen(body)
    do = listed.things.aretry if act == "retry" else listed.things.adrop
    done: list[str] = []
    following: str | None = None
    problem = ""
    try:
        async with asyncio.timeout(WITHIN):
            if search is not None:
                page = await listed.things.abrowse(**search, limit=MOST_AT_ONCE)
                ids = [item.id for item in page.items if act in item.acts]
                following = page.next
            await _do_each(do, ids, done)
    except (TypeError, ValueError) as error:
        raise unprocessable(shown(str(error), LONGEST_TEXT)) from error
    except QueueFull:
        problem = "There is no room for more in the queue."
    except Exception as error:
        problem = "The store or database could not be asked."
        report("work", logging.WARNING, "a list could not be acted on: %r", error)
        if not done:
            raise unavailable(problem) from error
    finally:
        if done:
            _log(operator, client, act, listed, done)
    following = None if problem else following
    return {"done": len(done), "of": len(ids), "next": following, "problem": problem}


async def _do_each(do: Callable[[str], Any], ids: list[str], done: list[str]) -> None:
    for id_ in ids:
        with suppress(UnknownJob):
            if await do(id_):
                done.append(id_)


def _chosen(body: dict[str, Any]) -> tuple[list[str], dict[str, Any] | None]:
    """Return the ids in a request, or the search that selects items."""
    ids, state = body.get("ids"), body.get("state")
    if (ids is None) == (state is None):
        raise unprocessable("ids, state: write one of them.")
    if ids is not None:
        if not isinstance(ids, list) or not 0 < len(ids) <= MOST_AT_ONCE:
            raise unprocessable(f"ids: write a list of 1 to {MOST_AT_ONCE}.")
        return list(dict.fromkeys(_id(one) for one in ids)), None
    return [], {"state": state, "search": body.get("search", ""), "after": body.get("after")}


def _log(operator: str, client: str, act: str, listed: WorkListEntry, ids: list[str]) -> None:
    # repr: a name with a line break in it must not look like a separate record.
    log.warning(
        "dashboard: operator %r (%s) did %s to %d of %s %r: %r",
        operator, client, act, len(ids), listed.kind, listed.name, ids,
        extra={"seawall_operator": operator, "seawall_act": act}
    )  # fmt: skip


def _named(asked: Mapping[str, Any]) -> WorkListEntry:
    kind, name = asked.get("kind"), asked.get("name")
    for one in work_lists():
        if (one.kind, one.name) == (kind, name):
            return one
    raise RequestRefused(404, "Not found", "This process has no such list.")


def _id(value: object) -> str:
    if isinstance(value, str) and 0 < len(value) <= LONGEST_ID and value.isprintable():
        return value
    raise unprocessable(f"id: write text of 1 to {LONGEST_ID} characters.")


async def _asked(read: Callable[[], Any], report: Report) -> dict[str, Any]:
    try:
        async with asyncio.timeout(WITHIN):
            answer: dict[str, Any] = await read()
    except RequestRefused:
        raise
    except (TypeError, ValueError) as error:
        raise unprocessable(shown(str(error), LONGEST_TEXT)) from error
    except Exception as error:
        report("work", logging.WARNING, "a list could not be read: %r", error)
        raise unavailable("The store or database could not be asked.") from error
    return answer


def _row(item: Any, *, payloads: bool) -> dict[str, Any]:
    preview = None
    if payloads:
        whole = len(item.payload) >= item.size
        preview = shown(_safe(item.payload, whole=whole, indent=None), LONGEST_PREVIEW)
    return {
        "id": item.id,
        "state": item.state,
        "kind": shown(item.kind),
        "owner": shown(item.owner),
        "priority": item.priority,
        "attempts": item.attempts,
        "age": item.age,
        "since": item.since,
        "error": shown(redacted(item.error[:LONGEST_ERROR]), LONGEST_TEXT),
        "size": item.size,
        "preview": preview,
        "acts": list(item.acts),
    }


def payload_text(payload: bytes, size: int) -> tuple[str, bool]:
    """Return a payload as several lines without secrets, and whether it was truncated."""
    whole = len(payload) >= size
    text = _safe(payload, whole=whole, indent=2)
    return _lines(text, LONGEST_PAYLOAD), not whole or len(text) > LONGEST_PAYLOAD


def _safe(payload: bytes, *, whole: bool, indent: int | None) -> str:
    """Return a payload as text: JSON without the values of secrets, or lines without them."""
    text = payload.decode("utf-8", "replace")
    if whole:
        try:
            value = _without_secrets(json.loads(text))
            return json.dumps(value, ensure_ascii=False, indent=indent)
        except (ValueError, RecursionError):
            pass
    return _redacted_lines(text)


def _redacted_lines(text: str) -> str:
    return "\n".join(redacted(line) for line in text.split("\n"))


def _without_secrets(value: Any, depth: int = 0) -> Any:
    """Return a JSON value without secrets: by the names of members, and in texts."""
    if depth >= DEEPEST:
        return _HIDDEN
    if isinstance(value, dict):
        return {
            name: _HIDDEN if _is_secret(name) else _without_secrets(one, depth + 1)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(one, depth + 1) for one in value]
    return redacted(value) if isinstance(value, str) else value


def _is_secret(name: str) -> bool:
    return redacted(f"{name}: x") != f"{name}: x"


def _lines(text: str, longest: int) -> str:
    return "\n".join(printable(line, longest) for line in text[:longest].split("\n"))


def _counts(listed: WorkListEntry) -> dict[str, int]:
    """Return the number of items in each state, as far as known."""
    answer = listed.entry.answer
    if listed.entry.ask is None:
        try:
            answer = listed.things.snapshot()
        except Exception:  # noqa: BLE001 - a count is not worth an error
            return {}
    counts: dict[str, int] = {}
    for word, count in (answer or {}).items():
        state = _COUNTED.get(word, word)
        number = count[0] if isinstance(count, tuple) else count
        if state in listed.things.WORK_STATES and isinstance(number, int):
            counts[state] = number
    return counts
