"""The success path of a breaker: lines that admit and settle a call without the lock.

They repeat, for a calm breaker and a success, what `BreakerGate` does with the model
(`BreakerModel.calm`); `tests/test_fastpath.py` compares them.
"""

from __future__ import annotations

from seawall.models.breaker.state import BreakerModel
from seawall.runtime.layers import Inline


def calm_breaker(model: BreakerModel) -> Inline:
    """Return the lines for a breaker without keys: the ticket is the generation of `model`."""
    return Inline(
        names={"model": model},
        enter=("{ticket} = {model}.generation if {model}.calm else {enter}(now_)",),
        leave=(
            "if {ticket} == {model}.generation:",
            "    {bucket} = {model}.counter.bucket",
            "    if end_ < {bucket}.end:",
            "        {bucket}.calls += 1",
            "    else:",
            "        {model}.success(end_)",
            "else:",
            "    {leave}({ticket}, OK_, value_, end_)",
        ),
    )
