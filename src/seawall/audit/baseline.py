"""A baseline: the findings that were there before, so that only new ones count.

A finding is known by its rule, its file, the function around it and the code itself. So it stays
known when lines move, and is new when its code changes. Equal findings are counted: a third copy
of a known pair is new.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from seawall.audit.findings import Finding

FORMAT: Final = 1


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
