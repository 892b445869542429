"""Drawing of `seawall top`: turns a message and its history into lines for a terminal.

It is pure: the same message, history and size give the same lines. Its input is the result of
`messages.validated`, in which every text is safe to show.

Promises:
- No line is wider than `width`, and there are at most `height` lines.
- No text of a message is interpreted as markup.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from seawall.cli.top.layout import (
    STYLES,
    UNICODE,
    Column,
    Glyphs,
    ScreenBlock,
    Unit,
    allotted,
    bars,
    breaker_strip,
    call_count,
    fit,
    gauge,
    joined,
    latency,
    line,
    moment,
    outcomes,
    rate,
    share,
    span,
)
from seawall.cli.top.messages import verdict, worst
from seawall.dashboard import wording as say
from seawall.dashboard.presenters.members import MEMBER
from seawall.dashboard.summary import tone_of
from seawall.dashboard.views import (
    WORST,
    DashboardMessage,
    GuardView,
    History,
    LayerView,
    RowView,
    ServiceEvent,
    ServiceTrouble,
    Tone,
    View,
)

SPACIOUS: Final = 36
"""Number of lines from which blocks are separated by an empty line."""
NARROWEST: Final = 20
"""Minimum width for which lines are made; narrower terminals truncate them."""
OLD: Final = 3.0
LATE: Final = 1.5
"""A view's age is shown beyond this many seconds, and this many times the update interval."""
MOST_HAPPENINGS: Final = 12
_MOST_WRAPPED: Final = 4
_GAUGE: Final = 8
_STATE: Final = 10
_LONGEST_NAME: Final = 32
_LONGEST_PAST: Final = 60


def frame(
    message: DashboardMessage,
    history: Mapping[str, History],
    width: int,
    height: int | None,
    *,
    stacks: bool = False,
    status: Text | str = "",
    glyphs: Glyphs = UNICODE,
) -> Group:
    """Return the frame for `width` columns and `height` lines (None: as many as needed).

    With `stacks` each guard's policies are drawn below it; `status` is the last line, if any.
    """
    drawing = _Drawing(message, history, max(width, NARROWEST), glyphs, stacks=stacks)
    top = [drawing.header(), drawing.verdict_line()]
    end = [line((status, "dim")) if isinstance(status, str) else status] if status else []
    blocks = list(drawing.blocks())
    if height is None:
        lengths, spaced = [block.height for block in blocks], True
    else:
        spaced = height >= SPACIOUS
        room = height - len(top) - len(end) - (len(blocks) + 1 if spaced else 0)
        lengths = allotted(max(room, 0), blocks)
    lines = top
    for block, length in zip(blocks, lengths, strict=True):
        cut = block.cut(length, glyphs)
        lines += [line()] * bool(cut and spaced) + cut
    lines = lines if height is None else lines[: max(height - len(end), 0)]
    lines += [line()] * bool(end and spaced) + end
    return Group(*(fit(text, max(width, 1), glyphs) for text in lines[:height]))


class _Drawing:
    """One message at one width."""

    def __init__(
        self,
        message: DashboardMessage,
        history: Mapping[str, History],
        width: int,
        glyphs: Glyphs,
        *,
        stacks: bool,
    ) -> None:
        self._message = message
        self._views = sorted(message["views"], key=lambda view: view["pod"]["name"])
        self._history = history
        self._width = width
        self._glyphs = glyphs
        self._stacks = stacks
        self._many = len(self._views) > 1
        names = [cell_len(view["pod"]["name"]) for view in self._views]
        self._pod_width = min(max(names, default=0), 10 if width < 120 else 20)  # noqa: PLR2004

    # Header

    def header(self) -> Text:
        guards = sum(len(view["guards"]) for view in self._views)
        there = sum(view.get("all_guards", len(view["guards"])) for view in self._views)
        of_all = f"{guards} of " if there > guards else ""
        load = max((view["load"] for view in self._views), default=0.0)
        names = [view["pod"]["name"] for view in self._views]
        pods = names[0] if len(names) == 1 else f"{len(names)} pods"
        dot = f" {self._glyphs.dot} "
        shown = of_all + say.several(max(guards, there), "guard")
        summary = dot.join([pods, shown, f"load {load:.2f}"])
        now = self._message["at"]
        return line((self._message["title"], "bold"), dot, moment(now, now), dot, (summary, "dim"))

    def verdict_line(self) -> Text:
        tone, verdict_now = verdict(self._message), self._message["verdict"]
        quiet = verdict_now["tone"] == "ok" and tone != "ok"
        words = "Worth a look" if quiet else verdict_now["words"]
        return line((f"{self._glyphs.tones[tone]} {words}.", STYLES[tone]))

    # Blocks

    def blocks(self) -> Iterator[ScreenBlock]:
        """Yield the blocks to show, the most important first."""
        troubles = [self._problem(problem) for problem in self._message["troubles"]]
        if troubles:
            yield ScreenBlock(line(("TROUBLES", "bold")), troubles, 7)
        old = [unit for unit in map(self._stale_view, self._views) if unit is not None]
        if old:
            yield ScreenBlock(line(("NOT SEEN NOW", "bold")), old, 3)
        if any(view["guards"] for view in self._views):
            yield self._guards()
        titles = dict.fromkeys(title for view in self._views for title in view["sections"])
        for title in titles:
            rows = [
                (view, row)
                for view in self._views
                for row in view["sections"].get(title, ())
                if row["kind"] != MEMBER or row["tone"] not in {"ok", "off"}  # they may be many
            ]
            if rows:
                yield self._section(title, rows)
        latest = map(self._event_line, self._message["happened"][:MOST_HAPPENINGS])
        happenings = [Unit([text], "ok") for text in latest]  # one tone, which keeps their order
        if happenings:
            yield ScreenBlock(line(("LATELY", "bold")), happenings, 4)

    def _problem(self, problem: ServiceTrouble) -> Unit:
        lines = self._trouble(problem, f"{self._glyphs.tones[problem['tone']]} ", problem["advice"])
        follows = problem["consequences"]
        for one, end in zip(follows, self._branches(len(follows)), strict=False):
            lines += self._trouble(one, f"  {end} ")
        return Unit(lines, tone_of(problem))

    def _trouble(self, problem: ServiceTrouble, mark: str, advice: str = "") -> list[Text]:
        now = self._message["at"]
        style = STYLES[problem["tone"]]
        pods = f" ({_listed(problem['pods'])})" if self._many else ""
        text = f"{mark}{problem['where']}{pods}: {problem['what']}"
        since = f"since {moment(problem['since'], now)}, {span(now - problem['since'])}"
        beside = self._width - len(since) - 1
        if cell_len(text) <= beside:
            first = fit(line((text, style)), beside, self._glyphs, pad=True)
            lines = [first.append(f" {since}", "dim")]
        else:
            lines = [line((part, style)) for part in self._wrapped(text)]
            advice = f"{since}. {advice}" if advice else since
        lines += [line((part, "dim")) for part in self._wrapped(f"  {advice}") if advice]
        return lines

    def _stale_view(self, view: View) -> Unit | None:
        """Return the age of a pod's view, if it is not current."""
        now, age = self._message["at"], view.get("age", 0.0)
        tone: Tone = "warn"
        if "gone" in view:
            tone, since = "off", view["gone"]
            age_text = f"gone since {moment(since, now)}, {span(now - since)}"
        elif age > max(OLD, LATE * view["every"]):
            age_text = f"as of {span(age)} ago"
        else:
            return None
        text = f"{self._glyphs.tones[tone]} {view['pod']['name']}: {age_text}"
        return Unit([line((text, STYLES[tone]))], tone)

    def _wrapped(self, text: str) -> list[str]:
        return textwrap.wrap(
            text,
            self._width,
            subsequent_indent="  ",
            max_lines=_MOST_WRAPPED,
            placeholder=self._glyphs.cut,
        )

    # Guards

    def _guards(self) -> ScreenBlock:
        pairs = [(view, guard) for view in self._views for guard in view["guards"]]
        groups: dict[str, list[Tone]] = {}
        for _view, guard in pairs:
            groups.setdefault(guard["name"], []).append(guard["tone"])
        pairs.sort(key=lambda p: (WORST.index(worst(groups[p[1]["name"]])), p[1]["name"]))
        columns = self._columns(
            max(cell_len(guard["name"]) for _view, guard in pairs),
            min(max(cell_len(guard["state"]) for _view, guard in pairs), 16),
        )
        titles = {
            "name": "GUARDS",
            "pod": "POD",
            "state": "STATE",
            "breaker": "BREAKER",
            "calls": "CALLS",
            "rate": "CALL/S",
            "err": "ERR",
            "p50": "P50",
            "p95": "P95",
            "p99": "P99",
            "slow": "P99 PAST",
        }
        title = joined(columns, {k: line((v, "bold")) for k, v in titles.items()}, self._glyphs)
        units = [
            Unit([self._guard(view, guard, columns), *self._below(guard)], guard["tone"])
            for view, guard in pairs
        ]
        return ScreenBlock(title, units, 8)

    def _columns(self, longest: int, longest_state: int) -> list[Column]:
        """Return the columns that fit; the most important ones are chosen first."""
        names = max(6, min(longest, 10 if self._width < 50 else 16))  # noqa: PLR2004 - a narrow terminal
        chosen = {"tone": 1, "name": names, "state": _STATE, "err": 5}
        left = self._width - sum(chosen.values()) - len(chosen) + 1
        wished = {"pod": self._pod_width if self._many else 0, "p99": 6, "rate": 6}
        wished |= {"breaker": 8, "p50": 6, "p95": 6, "calls": 12, "slow": 12}
        for name, width in wished.items():
            if width and left > width:
                chosen[name] = width
                left -= width + 1
        for name, most in (("name", min(longest, _LONGEST_NAME)), ("state", longest_state)):
            more = min(left, max(most - chosen[name], 0))
            chosen[name] += more
            left -= more
        wide = [name for name in ("breaker", "calls", "slow") if name in chosen]
        for name in wide:
            chosen[name] += min(left // len(wide), _LONGEST_PAST - chosen[name])
        order = ["tone", "name", "pod", "state", "breaker", "calls", "rate", "err"]
        order += ["p50", "p95", "p99", "slow"]
        numbers = {"rate", "err", "p50", "p95", "p99"}
        return [Column(name, chosen[name], name in numbers) for name in order if name in chosen]

    def _guard(self, view: View, guard: GuardView, columns: list[Column]) -> Text:
        widths = {column.name: column.width for column in columns}
        history = self._history.get(view["pod"]["name"])
        track = history["guards"].get(guard["name"]) if history else None
        rates = guard["rates"]
        style = STYLES[guard["tone"]]
        refused = rates["failed"] + rates["rejected"]
        total = call_count(rates["succeeded"], rates["degraded"], refused)
        lost = guard["error_ratio"]
        cells = {
            "tone": line((self._glyphs.tones[guard["tone"]], style)),
            "name": line((guard["name"], "bold" if guard["edge"] else "")),
            "pod": line((view["pod"]["name"], "dim")),
            "state": line((guard["state"], style)),
            "rate": line(rate(total)),
            "err": line((share(lost), STYLES["bad"] if lost >= 0.5 else "")),  # noqa: PLR2004
            "p50": line(latency(guard["p50"])),
            "p95": line(latency(guard["p95"])),
            "p99": line(latency(guard["p99"])),
        }
        if "breaker" in widths:
            cells["breaker"] = breaker_strip(track, widths["breaker"], self._glyphs)
        if "calls" in widths:
            cells["calls"] = outcomes(track, widths["calls"], self._glyphs)
        if "slow" in widths and track:
            cells["slow"] = line((bars(track["p99"], widths["slow"], self._glyphs), "cyan"))
        return joined(columns, cells, self._glyphs)

    def _below(self, guard: GuardView) -> list[Text]:
        """Return the lines below a guard: its last error where that matters, and its stack."""
        last = guard.get("last_error", "")
        shows_error = last and (self._stacks or guard["tone"] in ("bad", "warn"))
        lines = [line((f"    last error: {last}", "dim"))] if shows_error else []
        layers = guard["stack"] if self._stacks else []
        return lines + list(map(self._layer, layers, self._branches(len(layers))))

    def _branches(self, count: int) -> list[str]:
        """Return the glyphs that connect `count` lines to the one above them."""
        return [self._glyphs.branch] * (count - 1) + [self._glyphs.last]

    def _layer(self, layer: LayerView, end: str) -> Text:
        dot = f" {self._glyphs.dot} "
        text = line((f"    {end} ", "dim"), layer["title"])
        if layer["state"]:
            text.append(f" {layer['state']}", STYLES[layer["tone"]])
        texts = [layer["settings"], layer["sharing"], *(f"{k} {v}" for k, v in layer["facts"])]
        for one in texts:
            if one:
                text.append(dot + one, "dim")
        return text

    # Sections and events

    def _section(self, title: str, rows: list[tuple[View, RowView]]) -> ScreenBlock:
        longest = max(cell_len(row["name"]) for _view, row in rows)
        columns = [Column("tone", 1), Column("name", max(min(longest, self._width // 3), 8))]
        if self._many:
            columns.append(Column("pod", self._pod_width))
        if any(row["gauge"] is not None for _view, row in rows):
            columns.append(Column("gauge", _GAUGE))
        tracked = any(row["track"] is not None for _view, row in rows)
        if tracked and self._width >= 80:  # noqa: PLR2004 - the present comes before the past
            columns.append(Column("past", 12 if self._width < 120 else 24))  # noqa: PLR2004
        rest = self._width - sum(column.width + 1 for column in columns)
        columns.append(Column("text", max(rest, 1)))
        units = [Unit([self._row(view, row, columns)], row["tone"]) for view, row in rows]
        return ScreenBlock(line((title.upper(), "bold")), units, 3)

    def _row(self, view: View, row: RowView, columns: list[Column]) -> Text:
        widths = {column.name: column.width for column in columns}
        style = STYLES[row["tone"]]
        text = line((f"{row['kind'].replace('_', ' ')} ", "dim"), (row["state"], style))
        for label, value in row["facts"]:
            text.append(f" {self._glyphs.dot} {label} {value}", "dim")
        cells = {
            "tone": line((self._glyphs.tones[row["tone"]], style)),
            "name": line(row["name"]),
            "pod": line((view["pod"]["name"], "dim")),
            "text": text,
        }
        if row["gauge"] is not None:
            cells["gauge"] = line((gauge(row["gauge"], _GAUGE, self._glyphs), style))
        history = self._history.get(view["pod"]["name"])
        points = history["rows"].get(f"{row['kind']}/{row['name']}") if history else None
        if "past" in widths and points:
            cells["past"] = line((bars(points, widths["past"], self._glyphs), "cyan"))
        return joined(columns, cells, self._glyphs)

    def _event_line(self, one: ServiceEvent) -> Text:
        pods = f" ({_listed(one['pods'])})" if self._many else ""
        return line(
            (moment(one["at"], self._message["at"]), "dim"),
            (f" {self._glyphs.tones[one['tone']]} ", STYLES[one["tone"]]),
            f"{one['where']}{pods}: {one['what']}",
        )


def _listed(names: list[str]) -> str:
    shown = 3
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
