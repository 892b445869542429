"""Proposals and their proof, as text for people, as JSON, and as TOML that guards are made from."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from seawall import registry
from seawall._redaction import printable
from seawall.config import guard_from_table, guards_to_toml
from seawall.config.writing import table_of, to_toml
from seawall.sim import CONDITIONS, Estimate
from seawall.tune.measurements import Measurement
from seawall.tune.proof import Effect, Proof, simulated
from seawall.tune.proposals import Proposal, TuningAdvice, apply, number, seconds

LONGEST_LINE: Final = 2000
FIGURES: Final = ("goodput", "tail", "load")
_TITLES: Final = ("answers a second", "p99", "load a second")
_UNIT: Final = {"tail": " s"}


class TuningResult(NamedTuple):
    """One guard or pool: what was measured, what is proposed, and what the simulator says."""

    measured: Measurement
    advice: TuningAdvice
    proof: Proof | None  # None if nothing was simulated

    @property
    def kept(self) -> list[Proposal]:
        """The proposals that are left."""
        return self.advice.proposals if self.proof is None else self.proof.kept

    @property
    def is_judged(self) -> bool:
        """Whether enough was measured to say something."""
        return not any(not refusal.policy for refusal in self.advice.refusals)


def as_text(tuned: Sequence[TuningResult]) -> str:
    """Return all proposals for people."""
    lines = (line for one in tuned for line in (*_lines(one), ""))
    return "\n".join(printable(line, LONGEST_LINE) for line in lines) or "no guards\n"


def _lines(one: TuningResult) -> Iterator[str]:
    measured = one.measured
    span = f" over {seconds(measured.seconds)}" if measured.seconds else ""
    yield (
        f"{measured.kind} {measured.name!r}: {measured.rate:.3g} calls a second{span},"
        f" {number(measured.samples)} latencies, {measured.failing:.1%} failing"
    )
    if measured.table is None:
        yield "  its settings are not known: there is no today to compare with (--settings FILE)"
    for proposal in one.kept:
        yield f"  {proposal.policy:<12} {proposal.words}"
        yield f"  {'':<12} {proposal.reason}"
    for refusal in one.advice.refusals:
        yield f"  {refusal.policy or 'refused':<12} {refusal.reason}"
    if not one.kept and one.is_judged:
        yield "  nothing to change"
    if one.proof is None:
        if one.kept:
            yield "  not proven: nothing was simulated"
        return
    for proposal, why in one.proof.dropped:
        yield f"  dropped      {proposal.policy} {proposal.words}: {why}"
    if one.kept:
        yield f"  simulated: {one.proof.world}"
        yield from _effects(one.proof.effects)


def _effects(effects: Mapping[str, Effect]) -> list[str]:
    rows = [["", *_TITLES]]
    rows += [[name, *(_cell(effects[name], figure) for figure in FIGURES)] for name in CONDITIONS]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _cell(effect: Effect, figure: str) -> str:
    unit = _UNIT.get(figure, "")
    after: Estimate = getattr(effect.after, figure)
    if effect.before is None or effect.difference is None:
        return f"{after}{unit}"
    before: Estimate = getattr(effect.before, figure)
    difference: Estimate = getattr(effect.difference, figure)
    changed = "" if difference.low <= 0 <= difference.high else f" ({_signed(difference)})"
    return f"{before.mean:.3g} -> {after.mean:.3g}{unit}{changed}"


def _signed(difference: Estimate) -> str:
    sign = "+" if difference.mean > 0 else ""
    return f"{sign}{difference.mean:.2g} ± {difference.high - difference.mean:.1g}"


def as_json(tuned: Sequence[TuningResult]) -> dict[str, Any]:
    """Return all proposals for programs, with the TOML of `as_toml`."""
    return {"tuned": [_document(one) for one in tuned], "toml": as_toml(tuned)}


def _document(one: TuningResult) -> dict[str, Any]:
    measured, proof = one.measured, one.proof
    found: dict[str, Any] = {
        "kind": measured.kind,
        "name": measured.name,
        "rate": measured.rate,
        "samples": measured.samples,
        "seconds": measured.seconds,
        "settings_known": measured.table is not None,
        "proven": proof is not None,
        "proposals": [proposal._asdict() for proposal in one.kept],
        "refusals": [refusal._asdict() for refusal in one.advice.refusals],
    }
    if proof is not None:
        found["dropped"] = [{**dropped._asdict(), "why": why} for dropped, why in proof.dropped]
        found["world"] = proof.world
        found["effects"] = {name: _figures(effect) for name, effect in proof.effects.items()}
    return found


def _figures(effect: Effect) -> dict[str, Any]:
    return {
        figure: {
            name: None if one is None else getattr(one, figure)._asdict()
            for name, one in effect._asdict().items()
        }
        for figure in FIGURES
    }


def as_toml(tuned: Sequence[TuningResult]) -> str:
    """Return all settings with the proposals that are left, for `guards_from_toml` and updates."""
    guards = [one for one in tuned if one.measured.kind == "guard"]
    tables = {
        one.measured.name: apply(one.measured.table or {"policies": []}, one.kept)
        for one in guards
        if one.measured.table is not None or one.kept
    }
    lines = ["# Functions, stores and exceptions of your own are passed by name, in names=.", ""]
    lines.append(guards_to_toml(tables))
    for one in tuned:
        for proposal in one.kept if one.measured.kind == "pool" else ():
            name = to_toml(one.measured.name)
            lines += [f"[pools.{name}]", f"max_size = {proposal.after['max_size']}", ""]
    return "\n".join(lines)


def policies_of(text: str) -> str:
    """Return settings with the policies of each guard, where they are written as `standard`."""
    tables = tomllib.loads(text).get("guards", {})
    return guards_to_toml({name: _with_policies(name, table) for name, table in tables.items()})


def _with_policies(name: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
    if "standard" not in table:
        return table
    given = dict(table["standard"])
    on = given.get("on", [])
    known = {key: given[key] for key in given if key not in ("fallback", "breaker", "shared")}
    known["on"] = simulated({"policies": [{"policy": "retry", "on": on}]})["policies"][0]["on"]
    with registry.emptied():
        made = table_of(guard_from_table(name, {**table, "standard": known}))
    for policy in made["policies"]:
        if "on" in policy:
            policy["on"] = on
    return made
