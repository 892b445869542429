"""Client-side throttle: do not send what the server will most likely refuse.

Promises:
- If the server accepted `accepts` of the `requests` in the window, the next is rejected with
  probability `max(0, (requests - k * accepts) / (requests + 1))`.
- While accepts keep up, there is no random draw, no lock and no rejection.
- A call that is cancelled, or refused by an inner layer, does not count.
- However bad it is, one call in each `probe_every` is sent.

The rule is in `seawall.models.throttle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.context import Criticality, current_criticality
from seawall.errors import Overloaded, Rejected, TimedOut, matches
from seawall.models.throttle import ThrottleModel, Ticket, reject_share
from seawall.policies.retry.conditions import On, read_on
from seawall.runtime.call import STREAMED
from seawall.runtime.layers import FAILED, OK, Host, Inline, Outcome
from seawall.runtime.mutex import LOCK_FREE, Mutex
from seawall.runtime.policy import MODES, GateBound, GatePolicy, Mode

K: Final = 2.0

REFUSALS: Final = (ConnectionError, TimeoutError, Rejected)
"""Default errors that mean that the server did not accept the request."""

_SETTINGS: Final = ("k", "window", "probe_every", "mode")


class Throttle(GatePolicy):
    """Reject calls locally, in proportion to how many the server refuses."""

    kind: ClassVar[str] = "throttle"
    _needs_statistics = False

    def __init__(
        self,
        *,
        k: float | Mapping[Criticality, float] = K,
        window: float = 120.0,
        on: On = REFUSALS,
        probe_every: float | None = 10.0,
        mode: Mode = "enforce",
    ) -> None:
        """Send about `k` times as much as the server accepted in the last `window` seconds.

        `on` defines what counts as a refusal by the server: exception types, or a predicate over
        (error, value). A mapping as `k` gives classes of calls their own value, 2.0 for the others.
        If no call was sent for `probe_every` seconds, the next one is sent; None leaves that to
        chance.
        """
        super().__init__(mode)
        self._types, self._predicates = read_on(on)
        self.k = _read_k(k)
        self.window = check.seconds("window", window)
        every = None if probe_every is None else check.seconds("probe_every", probe_every)
        self._model = ThrottleModel(self.window, self._least_k, every)
        self._mutex = Mutex()
        survives_fork(self)

    def __repr__(self) -> str:
        names = [getattr(item, "__name__", repr(item)) for item in self._types + self._predicates]
        k = self.k if isinstance(self.k, float) else dict(self.k)
        return f"Throttle(k={k!r}, window={self.window:g}, on=({', '.join(names)}))"

    @property
    def _least_k(self) -> float:
        return self.k if isinstance(self.k, float) else min(K, *self.k.values())

    def _k_now(self) -> float:
        """Return the k of the current call."""
        if isinstance(self.k, float):
            return self.k
        return self.k.get(current_criticality(), K)

    def _refused(self, error: BaseException | None, value: Any) -> bool:
        """Return whether the server refused a call that ended this way."""
        if error is not None:
            # A call ended by our own timeout sees a cancellation, but it did run out of time.
            error = error if isinstance(error, Exception) else TimedOut()
            if matches(error, self._types):
                return True
        elif value is STREAMED:
            return False
        return any(predicate(error, value) for predicate in self._predicates)

    def _bind(self, host: Host) -> _ThrottleGate:
        return _ThrottleGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        self._reject_unknown(changes, _SETTINGS)
        every = self._model.probe_every
        fresh = Throttle(
            k=changes.get("k", self.k),
            window=changes.get("window", self.window),
            probe_every=changes.get("probe_every", every),
            mode=check.choice("mode", changes.get("mode", self.mode), MODES),
        )
        with self._mutex:
            window = None if fresh.window == self.window else fresh.window
            self._model.update(window, fresh._least_k, fresh._model.probe_every)
            self.k, self.window, self.mode = fresh.k, fresh.window, fresh.mode

    def _after_fork(self) -> None:
        """Reset in a child process."""
        self._mutex = Mutex()


class _ThrottleGate(GateBound):
    """The throttle inside one guard."""

    policy: Throttle

    def __init__(self, policy: Throttle, host: Host) -> None:
        super().__init__(policy, host)
        self._model = policy._model
        tell = ("{leave}({left}, OK_, value_, end_)",) if policy._predicates else ()
        if LOCK_FREE:
            self.inline = Inline(
                names={"model": policy._model},
                enter=(
                    "if {model}.calm and now_ < {model}.bucket.end:",
                    "    {ticket} = {model}.bucket",
                    "    {ticket}.calls += 1",
                    "else:",
                    "    {ticket} = {enter}(now_)",
                ),
                leave=tell,
            )

    def enter(self, now: float, /) -> object:
        """Count the call and admit it, or reject it; without the lock while calm."""
        model = self._model
        if LOCK_FREE and model.calm and now < model.bucket.end:
            bucket = model.bucket
            bucket.calls += 1
            return bucket
        return self._ask(now)

    def leave(self, ticket: Any, outcome: Outcome, detail: Any, now: float) -> None:
        """Record how the call ended. It already counts as accepted."""
        if outcome is OK and not self.policy._predicates:
            return
        if outcome is OK or outcome is FAILED:
            failed = outcome is FAILED
            if self._refused(detail if failed else None, None if failed else detail):
                self.policy._mutex.do(lambda: self._model.refused(ticket))
        else:
            self.policy._mutex.do(lambda: self._model.give_back(ticket))

    def _ask(self, now: float) -> Ticket:
        policy, model = self.policy, self._model
        k = policy._k_now()
        with policy._mutex:
            requests, accepts = model.recent(now)
            share = reject_share(requests, accepts, k)
            mode = policy.mode
            unwanted = (
                share > 0
                and mode != "off"
                and model.may_reject(now)
                and self.host.rng.random() < share
            )
            ticket = model.count(now, sent=not unwanted)
            if unwanted and mode == "enforce":
                model.refused(ticket)  # by us, instead of the server
        if unwanted:
            self.refuse(
                Overloaded(
                    f"guard {self.host.name!r}: throttled: of the last {requests} calls"
                    f" the server took {accepts}"
                )
            )
        return ticket

    def _refused(self, error: BaseException | None, value: Any) -> bool:
        try:
            return self.policy._refused(error, value)
        except Exception:
            import logging

            logging.getLogger("seawall").exception(
                "on= of the throttle of guard %r failed; the call counts as refused",
                self.host.name,
            )
            return True

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the contents of the window, and the current share of rejections."""
        with self.policy._mutex:
            requests, accepts = self._model.recent(now)
        k = self.policy._k_now()
        return {
            **super().snapshot(now),
            "requests": requests,
            "accepts": accepts,
            "k": k,
            "reject_share": reject_share(requests, accepts, k),
        }


def _read_k(k: Any) -> float | dict[Criticality, float]:
    if not isinstance(k, Mapping):
        return check.at_least("k", k, 1.0)
    if not k:
        raise ValueError("k={}: write a number, or one for some class: {Criticality.CRITICAL: 3.0}")
    for level in k:
        if not isinstance(level, Criticality):
            raise TypeError(
                f"k={{{level!r}: ...}}: write a Criticality, such as Criticality.CRITICAL"
            )
    return {level: check.at_least(f"k[{level.name}]", value, 1.0) for level, value in k.items()}
