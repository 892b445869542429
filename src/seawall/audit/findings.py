"""The rules of the audit; a finding: place, rule, what is there, what to write; and baselines.

A baseline has the findings that were there before, so that only new ones count. A finding is known
by its rule, its file, the function around it and the code itself. So it stays known when lines
move, and is new when its code changes. Equal findings are counted: a third copy of a known pair is
new.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, NamedTuple, cast

Level = Literal["error", "warning", "note"]


class AuditRule(NamedTuple):
    """One kind of finding."""

    id: str
    name: str
    level: Level
    why: str
    """Why it hurts, in one or two sentences."""


FORMAT: Final = 1  # format of a baseline

_TABLE: Final = """
SW101 no-timeout (error)
    A dependency that hangs keeps the caller, its thread and its connection; when all are kept,
    the service is down too.
SW102 long-default-timeout (warning)
    The library's default is longer than anybody waits for the answer: in an outage every call
    holds its worker for that long.
SW103 unbounded-wait (warning)
    What is waited for may have died: the thread waits for ever, and a stop of the process waits
    for the thread.
SW201 retry-without-stop (error)
    Calls that never give up pile up in an outage, and keep the dependency down when it comes
    back.
SW202 retry-without-jitter (warning)
    Callers that failed together come back together: each wave of retries is a surge of its own.
SW203 retry-without-budget (note)
    In an outage every call is made as often as the attempts allow: the load is multiplied just
    when the dependency can bear least.
SW204 retry-on-everything (warning)
    Mistakes in the code and rejected requests fail again each time; retrying them hides the
    cause and delays the error.
SW205 retry-not-idempotent (error)
    A request that timed out may have been done: sending it again without an idempotency key
    does it twice.
SW206 nested-retries (warning)
    Retries inside retries multiply: three attempts around three are nine calls for each one.
SW301 unbounded-queue (warning)
    When the consumer is slower than the producer the queue grows until memory ends, and
    everything in it is late.
SW302 unbounded-fan-out (warning)
    As many calls run at once as there are items: a long list is a surge on the dependency, and
    on memory and sockets here.
SW303 unbounded-tasks (warning)
    Tasks are made as fast as the loop turns, whether or not earlier ones have ended: nothing
    slows the producer down.
SW304 unbounded-threads (warning)
    The default executor has few threads, an endless queue, and serves DNS look-ups too: one
    slow dependency stops everything that uses it.
SW401 blocking-in-async (error)
    While this call waits, the event loop runs nothing else: every request of the process waits
    with it, and no timeout can fire.
SW501 client-per-request (warning)
    Each call opens new connections, with a TCP and a TLS handshake, and no limit of the pool
    holds for all calls together.
SW601 guard-without-timeout (error)
    A call that hangs is never retried, keeps its slot, and tells the breaker nothing.
SW602 guard-per-call (error)
    A guard made for one call has learnt nothing: its breaker is always closed, its limits are
    never reached, its budget is always full.
SW701 timeout-far-above-latency (warning)
    A call that hangs holds its worker for many times as long as it would normally take.
SW702 danger-in-stack (warning)
    The order or the settings of the policies do not do what they look like.
SW703 guard-never-called (note)
    Either nothing uses it, or what it should guard is called past it.
SW704 budget-never-spent (note)
    A budget that never refuses anything, while many calls are retried, does not limit them.
SW705 limit-never-reached (note)
    A limit far above what is ever used does not protect the dependency on the day when it
    matters.
SW706 hedge-never-wins (warning)
    Second copies are load without a gain: the first one is always faster.
SW707 pools-exceed-server (error)
    When all pods are busy the server refuses connections, for everybody.
SW900 unreadable-file (error)
    What cannot be read cannot be audited.
SW901 suppression-without-reason (error)
    Nobody can tell later whether the exception still holds.
"""

RULES: Final = {
    id_: AuditRule(id_, name, cast("Level", level), " ".join(why.split()))
    for id_, name, level, why in re.findall(
        r"^(SW\d+) (\S+) \((\w+)\)\n((?: {4}.+\n)+)", _TABLE, re.MULTILINE
    )
}
"""All rules by id."""


class Finding(NamedTuple):
    """One finding. In a running process `path` is the name of a guard or pool, and `line` 0."""

    path: str
    line: int
    column: int
    rule: AuditRule
    message: str
    write: str
    end_line: int = 0
    context: str = ""
    """The function and the code, without line numbers: it identifies the finding in a baseline."""

    @property
    def place(self) -> str:
        """Where it is: `path:line:column`, or a name."""
        return f"{self.path}:{self.line}:{self.column}" if self.line else self.path

    @property
    def fingerprint(self) -> str:
        """Identity that survives changes elsewhere in the file."""
        text = "\0".join((self.rule.id, self.path, self.context or self.message))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]


def process_finding(rule: str, place: str, message: str, write: str) -> Finding:
    """Return a finding in a running process. Its numbers differ each time, its words do not."""
    words = " ".join(word for word in message.split() if word.isalpha())
    return Finding(place, 0, 0, RULES[rule], message, write, context=words)


def in_order(finding: Finding) -> tuple[str, int, int, str, str]:
    """Return the sort key of the one order in which findings are shown."""
    return (finding.path, finding.line, finding.column, finding.rule.id, finding.message)


# Baselines


def write_baseline(path: str | Path, findings: Iterable[Finding]) -> int:
    """Write the findings to a file, and return their number."""
    counted = Counter((one.path, one.rule.id, one.fingerprint) for one in findings)
    entries = [
        {"path": place, "rule": rule, "fingerprint": fingerprint, "count": count}
        for (place, rule, fingerprint), count in sorted(counted.items())
    ]
    text = json.dumps({"format": FORMAT, "findings": entries}, indent=1)
    Path(path).write_text(f"{text}\n", "utf-8")
    return counted.total()


def read_baseline(path: str | Path) -> Counter[str]:
    """Return how many findings of each fingerprint are known; raise ValueError for other files."""
    try:
        table = json.loads(Path(path).read_text("utf-8"))
        if table["format"] != FORMAT:
            raise ValueError(f"{path} has format {table['format']}, not {FORMAT}")
        return Counter({one["fingerprint"]: int(one["count"]) for one in table["findings"]})
    except FileNotFoundError:
        raise ValueError(
            f"there is no baseline {path}: write one by --write-baseline {path}"
        ) from None
    except (KeyError, TypeError, UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no baseline of seawall audit ({error!r})") from error


def new_findings(findings: Iterable[Finding], known: Counter[str]) -> list[Finding]:
    """Return the findings that are not in the baseline, in their order."""
    left = known.copy()
    new = []
    for finding in findings:
        if left[finding.fingerprint] > 0:
            left[finding.fingerprint] -= 1
        else:
            new.append(finding)
    return new
