"""Parts of a frame: glyphs, lines that fit a width, columns, and blocks that fit a height.

Promises:
- A line is never wider than allowed, whatever the text.
- A glyph shows by its shape what it shows by its colour.
- Where only ASCII can be written, nothing else is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from seawall.dashboard.views import WORST, GuardTrack, Tone

STYLES: Final[Mapping[str, str]] = {
    "ok": "green",
    "warn": "yellow",
    "bad": "bold red",
    "off": "dim",
    "closed": "green",
    "half_open": "yellow",
    "open": "red",
    "isolated": "magenta",
}

BAD_SHARE: Final = 0.5
WARN_SHARE: Final = 0.05
"""Shares of failed and refused calls from which a bar is red, or yellow."""


class Glyphs(NamedTuple):
    """The characters used for drawing."""

    bars: str
    tones: Mapping[str, str]
    breaker: Mapping[str, str]
    full: str
    empty: str
    branch: str
    last: str
    dot: str
    cut: str
    ascii: bool


UNICODE: Final = Glyphs(
    bars="▁▂▃▄▅▆▇█",
    tones={"ok": "●", "warn": "▲", "bad": "■", "off": "○"},
    breaker={"closed": "▁", "half_open": "▄", "open": "█", "isolated": "▚"},
    full="█",
    empty="░",
    branch="├",
    last="└",
    dot="·",
    cut="…",
    ascii=False,
)
ASCII: Final = Glyphs(
    bars="_.:-=+*#",
    tones={"ok": "+", "warn": "!", "bad": "X", "off": "o"},
    breaker={"closed": "_", "half_open": "=", "open": "#", "isolated": "%"},
    full="#",
    empty=".",
    branch="|",
    last="`",
    dot="-",
    cut="~",
    ascii=True,
)


def glyphs_for(encoding: str) -> Glyphs:
    """Return the glyphs that can be written in `encoding`."""
    drawn = UNICODE.bars + "".join(UNICODE.tones.values()) + UNICODE.cut + UNICODE.empty
    try:
        drawn.encode(encoding)
    except (UnicodeError, LookupError):
        return ASCII
    return UNICODE if encoding.lower().replace("-", "").startswith("utf") else ASCII


def line(*parts: str | tuple[str, str]) -> Text:
    """Return parts, plain or each with its style, as one line."""
    text = Text(no_wrap=True, overflow="crop", end="\n")
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        else:
            text.append(*part)
    return text


def fit(text: Text, width: int, glyphs: Glyphs, *, pad: bool = False, right: bool = False) -> Text:
    """Return `text` truncated to `width` cells, and padded to it on request."""
    text = text.copy()
    if glyphs.ascii and not text.plain.isascii():
        text.plain = text.plain.encode("ascii", "replace").decode("ascii")
    length = cell_len(text.plain)
    if length > width:
        cut = glyphs.cut if width > 1 else ""
        text.plain = set_cell_size(text.plain, max(width - len(cut), 0)) + cut
        length = cell_len(text.plain)
    if right and length < width:
        text.pad_left(width - length)
    elif pad and length < width:
        text.pad_right(width - length)
    return text


class Column(NamedTuple):
    """A column of a table of lines."""

    name: str
    width: int
    right: bool = False


def joined(columns: Iterable[Column], cells: Mapping[str, Text], glyphs: Glyphs) -> Text:
    """Return the cells of a row, each as wide as its column, separated by a blank."""
    row = line()
    for place, (name, width, right) in enumerate(columns):
        if place:
            row.append(" ")
        row.append_text(fit(cells.get(name) or line(), width, glyphs, pad=True, right=right))
    row.rstrip()
    return row


def bars(values: Sequence[float | None], width: int, glyphs: Glyphs) -> str:
    """Return the last `width` values as bars, the tallest for the largest; None is a gap."""
    last = list(values[-width:])
    top = max((value for value in last if value is not None), default=0.0)
    drawn = "".join(_bar(value, top, glyphs) for value in last)
    return drawn.rjust(width)


def _bar(value: float | None, top: float, glyphs: Glyphs) -> str:
    if value is None:
        return " "
    steps = len(glyphs.bars) - 1
    if value <= 0 or top <= 0:
        return glyphs.bars[0]
    return glyphs.bars[max(1, min(steps, round(steps * (value / top))))]


def outcomes(track: GuardTrack | None, width: int, glyphs: Glyphs) -> Text:
    """Return the number of calls over time, as bars coloured by the share that did not succeed."""
    if track is None:
        return line()
    lost = [a + b for a, b in zip(track["failed"], track["rejected"], strict=True)]
    parts = zip(track["succeeded"], track["degraded"], lost, strict=True)
    total = [call_count(*one) for one in parts]
    drawn = bars(total, width, glyphs)
    text = line(" " * max(width - len(total), 0))
    for bar, all_, bad in zip(drawn[len(text) :], total[-width:], lost[-width:], strict=True):
        share = bad / all_ if all_ > 0 else 0.0
        tone = "bad" if share >= BAD_SHARE else "warn" if share >= WARN_SHARE else "ok"
        text.append(bar, STYLES[tone])
    return text


def call_count(succeeded: float, degraded: float, lost: float) -> float:
    """Return the number of calls; `lost` failed or were refused.

    A degraded call is one of the lost ones: its real attempt failed or was refused. Only callers
    that shared the failure of another call (`Cache`) are degraded without one of their own. The
    page has the same rule (`callRate` in past.js).
    """
    return succeeded + max(degraded, lost)


def breaker_strip(track: GuardTrack | None, width: int, glyphs: Glyphs) -> Text:
    """Return the states of a breaker over time, one block for each sample."""
    states = track["breaker"][-width:] if track else []
    text = line(" " * (width - len(states)))
    for state in states:
        text.append(glyphs.breaker.get(state or "", " "), STYLES.get(state or "", ""))
    return text


def gauge(value: float, width: int, glyphs: Glyphs) -> str:
    """Return a bar that is filled up to `value`, from 0 to 1."""
    filled = min(width, max(round(value * width), 1 if value > 0 else 0))
    return glyphs.full * filled + glyphs.empty * (width - filled)


def span(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{min(int(seconds // size), 99_999)} {unit}"
    return f"{max(int(seconds), 0)} s"


def latency(seconds: float | None) -> str:
    """Return a latency in at most six characters."""
    if seconds is None:
        return "-"
    if seconds < 0.0995:  # noqa: PLR2004 - so that 99.6 ms is not written with four digits
        return f"{1000 * seconds:.1f}ms"
    return f"{1000 * seconds:.0f}ms" if seconds < 1 else f"{min(seconds, 9999):.3g}s"


def rate(value: float) -> str:
    """Return a rate per second in at most six characters."""
    if value < 10:  # noqa: PLR2004 - two digits are enough
        return f"{value:.1f}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{min(value / size, 9999):.4g}{unit}"
    return f"{value:.0f}"


def share(value: float) -> str:
    """Return a share in percent; a small share is not rounded to 0."""
    percent = 100 * value
    return f"{percent:.1f}%" if 0 < percent < 10 else f"{percent:.0f}%"  # noqa: PLR2004 - as above


def moment(at: float, now: float) -> str:
    """Return the time of day, with the date if it is older than hours; "" if it is invalid."""
    try:
        when = datetime.fromtimestamp(at)  # noqa: DTZ006 - in the user's local time
    except (OverflowError, OSError, ValueError):
        return ""
    old = abs(now - at) > 20 * 3600
    return f"{when:%Y-%m-%d %H:%M}" if old else f"{when:%H:%M:%S}"


class Unit(NamedTuple):
    """Lines that stay together, and the tone of their subject."""

    lines: list[Text]
    tone: Tone


class ScreenBlock(NamedTuple):
    """Units under a title. `least` is the number of lines that it gets before others get more."""

    title: Text
    units: list[Unit]
    least: int

    @property
    def height(self) -> int:
        """Return the total number of its lines."""
        return 1 + sum(len(unit.lines) for unit in self.units)

    def cut(self, height: int, glyphs: Glyphs) -> list[Text]:
        """Return at most `height` lines: if not all fit, the worst units and the number omitted."""
        if height >= self.height:
            return [self.title, *(text for unit in self.units for text in unit.lines)]
        if height < 2:  # noqa: PLR2004 - a title alone is useless
            return []
        lines, kept = [self.title], 0
        for unit in sorted(self.units, key=lambda unit: WORST.index(unit.tone)):
            if len(lines) + len(unit.lines) > height - 1:
                break
            lines += unit.lines
            kept += 1
        return [*lines, line((f"  {glyphs.cut} {len(self.units) - kept} more", "dim"))]


def allotted(height: int, blocks: Sequence[ScreenBlock]) -> list[int]:
    """Return how many of `height` lines each block gets; earlier blocks come first."""
    given = [0] * len(blocks)
    for whole in (False, True):
        for place, block in enumerate(blocks):
            wanted = block.height if whole else min(block.least, block.height)
            more = min(wanted - given[place], height)
            if given[place] + more > 1:
                given[place] += more
                height -= more
    return given
