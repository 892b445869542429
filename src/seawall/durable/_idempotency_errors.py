"""What goes wrong with keys."""

from __future__ import annotations

from seawall.errors import Rejected, SeawallError


class KeyMissing(SeawallError):
    """A key is needed here, and there is none (or none that can be one). A server answers 400."""

    reason = "key_missing"


class KeyReused(SeawallError):
    """The key was used before, with another payload. A server answers 422."""

    reason = "key_reused"


class KeyInFlight(Rejected):
    """The first with this key is still at work. A server answers 409, with Retry-After."""

    reason = "key_in_flight"


class RecordedFailure(SeawallError):
    """The first with this key failed, and that was kept: `kind` and `message` are of its error."""

    reason = "recorded_failure"

    def __init__(self, kind: str, message: str) -> None:
        """Say what the first one raised."""
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message


class AnswerNotKept(SeawallError):
    """It was done before, and its answer was too large to be kept: it is not done again."""

    reason = "answer_not_kept"


class RecordGarbled(SeawallError):
    """The stored record makes no sense: it is not done again, and somebody has to look."""

    reason = "record_garbled"
