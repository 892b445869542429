"""Summary of all pods: a verdict, the problems by cause, and the events by subject.

Pure, and the same for the page, the terminal and readers of the JSON.

Promises:
- A problem of several pods is listed once.
- Consequences are listed below their cause, so that one lost store is one problem however much
  depends on it.
- Everything is bounded, and nothing raises for a valid view, whatever other pods wrote into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast
from urllib.parse import quote

from seawall.dashboard import wording as say
from seawall.dashboard.bounds import LONGEST_TEXT, MOST_TROUBLES, shown
from seawall.dashboard.events import TOGETHER
from seawall.dashboard.presenters.members import GROUP
from seawall.dashboard.presenters.members import TITLE as MEMBERS
from seawall.dashboard.presenters.members import WORDS as MEMBER_WORDS
from seawall.dashboard.views import (
    WORST,
    PodEvent,
    PodTrouble,
    ServiceEvent,
    ServiceTrouble,
    ServiceVerdict,
    Tone,
    View,
)

LATE: Final = 3.0
"""Number of intervals after which a view without an update is stale."""
MOST_CONSEQUENCES: Final = 20
"""Maximum number of consequences below one problem."""
MOST_OCCURRENCES: Final = 60
PODS_UNKNOWN: Final = "dashboard/pods"
"""The id of the problem that the other pods cannot be fetched."""
_MINOR: Final = "tried again"
"""What a breaker does between opening twice: not counted beside other verbs."""


class PageLinks:
    """Addresses of runbooks and traces, made from templates."""

    def __init__(self, runbook: str | None = None, trace: str | None = None) -> None:
        """Set the templates: `{kind}` in `runbook`, `{trace_id}` in `trace`; None: no links."""
        self.runbook = _template("runbook", runbook, "{kind}", "https://wiki.example/{kind}")
        self.trace = _template("trace", trace, "{trace_id}", "https://traces.example/{trace_id}")

    def __repr__(self) -> str:
        return f"Links(runbook={self.runbook!r}, trace={self.trace!r})"

    def of_kind(self, trouble_id: str) -> str | None:
        """Return the address of the runbook for a problem; its kind is the start of its id."""
        kind = trouble_id.replace("/", ":").partition(":")[0]
        return self.runbook and self.runbook.replace("{kind}", quote(kind, safe=""))

    def of_trace(self, trace_id: str | None) -> str | None:
        """Return the address of a trace."""
        if self.trace is None or not trace_id:
            return None
        return self.trace.replace("{trace_id}", quote(trace_id, safe=""))


def _template(name: str, value: Any, field: str, example: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: write an address, such as {name}={example!r}")
    if not value.startswith(("http://", "https://")) or field not in value:
        raise ValueError(
            f"{name}={value!r}: write an absolute address with {field} in it,"
            f" such as {name}={example!r}"
        )
    return value


NO_LINKS: Final = PageLinks()


# Problems


def service_troubles(
    views: Sequence[View], at: float, links: PageLinks = NO_LINKS
) -> list[ServiceTrouble]:
    """Return the problems of these pods at `at`: the worst first, then the oldest."""
    found: dict[tuple[str, str], ServiceTrouble] = {}
    for view in sorted(views, key=lambda view: view["pod"]["name"]):
        for trouble in _troubles_of(view, at):
            _merge(found, trouble, view["pod"]["name"], links)
    _count_accusers(found.values(), views)
    roots: dict[int, ServiceTrouble] = {}
    for problem, root in _with_roots(list(found.values())):
        roots[id(root)] = root
        if problem is not root:
            root["consequences"].append(problem)
    ranked = sorted(roots.values(), key=_rank)
    for root in ranked:
        root["consequences"].sort(key=_rank)
        del root["consequences"][MOST_CONSEQUENCES:]
    return ranked[:MOST_TROUBLES]


def _troubles_of(view: View, at: float) -> Iterator[PodTrouble]:
    """Yield the problems of a pod; if its view is stale, only that."""
    if "gone" in view or not is_late(view, at):
        yield from view["troubles"]
        return
    name = view["pod"]["name"]
    yield PodTrouble(
        id=f"stale/{name}",
        tone="warn",
        where=name,
        what="This pod has not been heard of: what is shown of it is old",
        advice="It may have stopped, or be cut off from the store",
        since=at - _age(view, at),
        cause=PODS_UNKNOWN,
    )


def is_late(view: View, at: float) -> bool:
    """Return whether the update of a view is overdue."""
    return _age(view, at) > LATE * max(view["every"], 0.1)


def _age(view: View, at: float) -> float:
    return view.get("age", max(0.0, at - view["at"]))


def _merge(
    found: dict[tuple[str, str], ServiceTrouble], trouble: PodTrouble, pod: str, links: PageLinks
) -> None:
    key = trouble["id"], trouble["where"]
    known = found.get(key)
    if known is None:
        found[key] = _problem(trouble, pod, links)
        return
    known["pods"].append(pod)
    known["since"] = min(known["since"], trouble["since"])
    if trouble.get("degrades"):
        known["degrades"] = True
    if WORST.index(trouble["tone"]) < WORST.index(known["tone"]):
        known["tone"], known["what"] = trouble["tone"], trouble["what"]
        known["advice"] = trouble["advice"]


def _count_accusers(problems: Iterable[ServiceTrouble], views: Sequence[View]) -> None:
    """Add the number of watching pods that agree that a member is suspected or confirmed.

    Pods of a group see each other separately: one that is cut off suspects healthy ones.
    """
    for problem in problems:
        word = MEMBER_WORDS.get(problem["id"].partition(":")[0])
        if word is not None:
            watching = sum(_watches(view, problem["where"]) for view in views)
            if watching > 1:
                by = f" {word} by {len(problem['pods'])} of {watching} pods"
                problem["what"] = shown(problem["what"].replace(f" {word}", by, 1), LONGEST_TEXT)


def _watches(view: View, group: str) -> bool:
    rows = view["sections"].get(MEMBERS, ())
    return any(row["kind"] == GROUP and row["name"] == group for row in rows)


def _problem(trouble: PodTrouble, pod: str, links: PageLinks) -> ServiceTrouble:
    problem = cast("ServiceTrouble", {**trouble, "pods": [pod], "consequences": []})
    runbook, trace = links.of_kind(trouble["id"]), links.of_trace(trouble.get("trace"))
    if runbook is not None:
        problem["runbook"] = runbook
    if trace is not None:
        problem["trace_link"] = trace
    return problem


def _with_roots(problems: list[ServiceTrouble]) -> Iterator[tuple[ServiceTrouble, ServiceTrouble]]:
    """Yield each problem with its root: the end of its chain of causes.

    If the cause itself is not listed, the first of its consequences represents it.
    """
    by_id = {problem["id"]: problem for problem in reversed(problems)}
    for problem in problems:
        root, passed = problem, {problem["id"]}
        while cause := root.get("cause"):
            known = by_id.setdefault(cause, root)
            if known is root:
                break  # it represents its cause
            if known["id"] in passed:  # a pod sent a cycle: the first by name is the root
                root = by_id[min(passed)]
                break
            passed.add(known["id"])
            root = known
        yield problem, root


def _rank(problem: ServiceTrouble) -> tuple[int, float, str]:
    return WORST.index(tone_of(problem)), problem["since"], problem["id"]


def tone_of(problem: ServiceTrouble) -> Tone:
    """Return how bad a problem is, including its consequences."""
    tones = (problem["tone"], *(one["tone"] for one in problem["consequences"]))
    return min(tones, key=WORST.index)


def service_verdict(views: Sequence[View], problems: Iterable[ServiceTrouble]) -> ServiceVerdict:
    """Return the overall state of these pods in a few words."""
    if not views:
        return ServiceVerdict(tone="off", words="No pod has reported yet")
    listed = list(problems)
    if not listed:
        return ServiceVerdict(tone="ok", words="All is well")
    wrong = sum(tone_of(one) == "bad" for one in listed)
    look = len(listed) - wrong
    parts = [say.several(wrong, "thing is wrong", "things are wrong")] if wrong else []
    if look:
        parts.append(f"{look} to look at" if wrong else f"{say.several(look, 'thing')} to look at")
    words = ", ".join(parts)
    if any(one.get("degrades") for root in listed for one in (root, *root["consequences"])):
        words = f"The service is degraded: {words}"
    return ServiceVerdict(tone="bad" if wrong else "warn", words=words)


# Events


def service_events(views: Iterable[View], links: PageLinks = NO_LINKS) -> list[ServiceEvent]:
    """Return the events of these pods, the latest first; repeats and pods in one sentence."""
    happenings = [(one, view["pod"]["name"]) for view in views for one in view["happenings"]]
    happenings.sort(key=lambda pair: pair[0]["began"])
    groups: list[_Group] = []
    latest: dict[tuple[str, str], _Group] = {}
    for one, pod in happenings:
        key = one["where"], one["about"]
        group = latest.get(key)
        if group is None or one["began"] > group.at + TOGETHER:
            group = latest[key] = _Group(one)
            groups.append(group)
        group.add(one, pod)
    groups.sort(key=lambda group: -group.at)
    return [group.occurrence(links) for group in groups[:MOST_OCCURRENCES]]


class _Group:
    """The events of one subject that follow each other closely, on any pods."""

    def __init__(self, first: PodEvent) -> None:
        self.at = self.began = first["began"]
        self._last = first
        self._counts: dict[str, dict[str, int]] = {}
        """Counts by pod."""

    def add(self, one: PodEvent, pod: str) -> None:
        if one["at"] >= self.at:
            self._last = one
        self.at = max(self.at, one["at"])
        counts = self._counts.setdefault(pod, {})
        for verb, times in one["counts"].items():
            counts[verb] = counts.pop(verb, 0) + times

    def occurrence(self, links: PageLinks) -> ServiceEvent:
        last = self._last
        made = ServiceEvent(
            at=self.at,
            began=self.began,
            tone=last["tone"],
            where=last["where"],
            what=shown(self._sentence(), LONGEST_TEXT),
            pods=sorted(self._counts),
        )
        link = links.of_trace(last.get("trace"))
        if link is not None:
            made["trace_link"] = link
        return made

    def _sentence(self) -> str:
        pods, last = len(self._counts), self._last
        where = f" on {pods} pods" if pods > 1 else ""
        span = self.at - self.began
        lasted = f" in {say.seconds(round(span))}" if span >= 1 else ""
        if "" in last["counts"]:
            times = sum(counts.get("", 0) for counts in self._counts.values())
            if times == 1:
                return last["what"]
            often = f"{times} times{lasted}" if times > pods else ""
            return f"{last['what']} ({(often + where).strip()})"
        verbs = self._verbs(last["counts"])
        if pods == 1 and list(verbs.values()) == [1]:
            return last["what"]
        did = [verb if times == 1 else f"{verb} {times} times" for verb, times in verbs.items()]
        return f"{last['about']} {_joined(did)}{lasted}{where}"

    def _verbs(self, last: Mapping[str, int]) -> dict[str, int]:
        """Return how often the subject did what, by the pod that saw the most of it.

        Pods see the same events: a breaker that three pods share opens once for all of them.
        """
        order = dict.fromkeys(verb for counts in self._counts.values() for verb in counts)
        order = {**{verb: None for verb in order if verb not in last}, **dict.fromkeys(last)}
        all_counts = self._counts.values()
        verbs = {verb: max(counts.get(verb, 0) for counts in all_counts) for verb in order}
        if len(verbs) > 1:
            verbs.pop(_MINOR, None)
        return verbs


def _joined(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1]))) if parts else ""
