"""Client-side throttle: do not send what the server will most likely refuse.

Promises:
- If the server accepted `accepts` of the `requests` in the window, the next is rejected with
  probability `max(0, (requests - k * accepts) / (requests + 1))`.
- While accepts keep up, there is no random draw and no rejection, and the success path takes no
  lock.
- A call that is cancelled, or refused by an inner layer, does not count.
- However bad it is, one call in each `probe_every` is sent.

The rule is in `seawall.models.throttle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall._failures import log_failure
from seawall._forks import survives_fork
from seawall.context import Criticality, current_criticality
from seawall.errors import Overloaded, Rejected, TimedOut, matches
from seawall.models.throttle import ThrottleModel, Ticket, reject_share
from seawall.policies.retry.conditions import On, read_on
from seawall.runtime.call import STREAMED
from seawall.runtime.layers import FAILED, OK, Host, Inline, Outcome
from seawall.runtime.mutex import LOCK_FREE, Mutex
from seawall.runtime.policy import GateBound, GatePolicy, Mode

K: Final = 2.0

REFUSALS: Final = (ConnectionError, TimeoutError, Rejected)
"""Default errors that mean that the server did not accept the request."""


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
        k = self.k
        return k if isinstance(k, float) else k.get(current_criticality(), K)

    def _bind(self, host: Host) -> _ThrottleGate:
        return _ThrottleGate(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        fresh = Throttle._changed(
            changes,
            k=self.k,
            window=self.window,
            probe_every=self._model.probe_every,
            mode=self.mode,
        )
        window = None if fresh.window == self.window else fresh.window
        with self._mutex:
            self._model.update(window, fresh._least_k, fresh._model.probe_every)
            self.k, self.window, self.mode = fresh.k, fresh.window, fresh.mode

    def _after_fork(self) -> None:
        self._mutex = Mutex()


class _ThrottleGate(GateBound):
    """The throttle inside one guard."""

    policy: Throttle

    def __init__(self, policy: Throttle, host: Host) -> None:
        super().__init__(policy, host)
        self._model = policy._model
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
                leave=("{leave}({left}, OK_, value_, end_)",) if policy._predicates else (),
            )

    def enter(self, now: float, /) -> Ticket:
        """Count the call and admit it, or reject it."""
        policy, model = self.policy, self._model
        k = policy._k_now()
        with policy._mutex:
            requests, accepts = model.recent(now)
            share = reject_share(requests, accepts, k)
            mode = policy.mode
            bad = share > 0 and mode != "off" and model.may_reject(now)
            unwanted = bad and self.host.rng.random() < share
            ticket = model.count(now, sent=not unwanted)
            if unwanted and mode == "enforce":
                model.refused(ticket)  # by us, instead of the server
        if unwanted:
            what = f"throttled: of the last {requests} calls the server took {accepts}"
            self.refuse(Overloaded(f"guard {self.host.name!r}: {what}"))
        return ticket

    def leave(self, ticket: Ticket, outcome: Outcome, detail: Any, now: float) -> None:
        """Record how the call ended. It already counts as accepted."""
        model, mutex = self._model, self.policy._mutex
        if outcome is not OK and outcome is not FAILED:
            mutex.do(lambda: model.give_back(ticket))
        elif self._was_refused(outcome, detail):
            mutex.do(lambda: model.refused(ticket))

    def _was_refused(self, outcome: Outcome, detail: Any) -> bool:
        """Return whether the server refused a call that ended this way."""
        if detail is STREAMED:
            return False
        error, value = None, detail
        if outcome is FAILED:
            # A call ended by our own timeout sees a cancellation, but it did run out of time.
            error, value = detail if isinstance(detail, Exception) else TimedOut(), None
        try:
            known = error is not None and matches(error, self.policy._types)
            return known or any(wants(error, value) for wants in self.policy._predicates)
        except Exception:  # noqa: BLE001 - logged
            name = self.host.name
            log_failure("on= of the throttle of guard %r failed; the call counts as refused", name)
            return True

    def snapshot(self, now: float) -> dict[str, Any]:
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
