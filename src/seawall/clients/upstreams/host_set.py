"""The hosts of a set, and the rules that decide which are in service and which is chosen.

All state is changed under one lock, which is never held while a request is in progress or a
listener is called. Changes that come from the garbage collector (an abandoned request) wait for the
lock as described in `seawall.runtime.mutex`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from seawall.clients.upstreams.hosts import HostBreaker, UpstreamHost, breaker_layers
from seawall.errors import CircuitOpen
from seawall.events import Event, HostEjected, HostRestored
from seawall.events.bus import emit
from seawall.models.balance import choose
from seawall.models.outliers import ActionBound, OutlierModel, Outliers, share_of
from seawall.policies.breaker import Breaker
from seawall.runtime.layers import FAILED, OK, UNUSED, Outcome
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from seawall.clients.upstreams.checks import HealthCheck
    from seawall.clock import Clock
    from seawall.models.balance import Load

NO_EJECTION = Outliers(consecutive=None, failure_ratio=None, deviations=None)
"""Settings for sets without ejection: they still limit how many hosts may fail their checks at the
same time."""


class RequestInProgress(NamedTuple):
    """A request in progress."""

    host: UpstreamHost
    began: float
    generation: int
    """The host's generation, which shows whether the request was sent before an ejection or
    restoration."""


class HostSet:
    """Several hosts behind one name."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        rng: Random,
        half_life: float,
        outliers: Outliers,
        breaker: Breaker | Callable[[str], Breaker] | None,
        panic: float | None,
    ) -> None:
        """Start without hosts: `replace` sets them. `panic` is that of the checks, if any."""
        self.name = name
        self.clock = clock
        self.rng = rng
        self.half_life = half_life
        self.judge = OutlierModel(outliers)
        self.mutex = Mutex()
        self.hosts: tuple[UpstreamHost, ...] = ()
        self.panic = False
        """Whether more hosts are out than permitted: then all are used."""
        self._breaker = breaker
        self._keyed = None
        if isinstance(breaker, Breaker):
            if breaker.key is None:
                raise TypeError(
                    "breaker: one for all hosts would stop them all; write"
                    " breaker=lambda host: Breaker(...), or Breaker(key=lambda host: host, ...)"
                )
            self._keyed = breaker_layers(breaker, name, clock, rng)
        self._panic = panic
        self._usable: tuple[UpstreamHost, ...] = ()
        self._loads: tuple[Load, ...] = ()
        self._review_at = float("inf")
        self._set_aside: dict[ActionBound, tuple[Sequence[str], str]] = {}
        """Hosts to set aside and why, for each action that requests it."""
        self._pending_events: list[tuple[type[Event], dict[str, Any]]] = []

    def replace(self, urls: list[str]) -> None:
        """Use these hosts from now on; hosts that stay keep their records."""
        now = self.clock.now()
        made: dict[str, UpstreamHost] = {}
        known = {host.url: host for host in self.hosts}
        while True:
            for url in urls:
                if url not in known and url not in made:
                    # Calls the user's function, so not under the lock.
                    gate, outliers = self._gate(url), self.judge.settings
                    made[url] = UpstreamHost(url, self.half_life, outliers, gate, now)
            with self.mutex:
                known = {host.url: host for host in self.hosts}
                if all(url in known or url in made for url in urls):
                    self.hosts = tuple(known.get(url) or made[url] for url in urls)
                    self._review(now)
                    break
        self._emit_pending()

    def _gate(self, url: str) -> HostBreaker | None:
        breaker = self._breaker
        if isinstance(breaker, Breaker) and self._keyed is not None:
            return HostBreaker(breaker, self._keyed, url)
        if breaker is None or isinstance(breaker, Breaker):
            return None
        made = breaker(url)
        if not isinstance(made, Breaker):
            raise TypeError(f"breaker({url!r}) gave {made!r}: return a Breaker")
        layers = breaker_layers(made, f"{self.name} {url}", self.clock, self.rng)
        return HostBreaker(made, layers, url)

    def take(
        self, tried: set[str] | None, refused: Collection[UpstreamHost]
    ) -> RequestInProgress | None:
        """Choose a host and count a request in; return None if all remaining hosts `refused`.

        Hosts in `tried` were used in this call already, and are chosen only when no other is left;
        the chosen host is added to them.
        """
        with self.mutex:
            now = self.clock.now()
            if now >= self._review_at:
                self._review(now)
            hosts, loads = self._usable, self._loads
            if tried or refused:
                hosts = tuple(host for host in hosts if host not in refused)
                if tried:
                    fresh = tuple(host for host in hosts if host.url not in tried)
                    hosts = fresh or hosts
                loads = tuple(host.load for host in hosts)
            if hosts:
                host = hosts[choose(loads, now, self.rng.random())]
                host.load.in_flight += 1
                taken = RequestInProgress(host, now, host.record.generation)
                if tried is not None:
                    tried.add(host.url)
        if self._pending_events:
            self._emit_pending()
        return taken if hosts else None

    def put_back(self, host: UpstreamHost) -> None:
        """Undo a `take`: nothing was sent."""
        self.mutex.do(partial(_count_out, host.load))

    def end(
        self,
        sent: RequestInProgress,
        outcome: Outcome,
        *,
        refused: bool = False,
        head: bool = True,
        body: bool = True,
    ) -> None:
        """Record the end of a request: of the `head` of its response, of the `body`, or of both.

        If only the head is over, and is good, the body determines the outcome. `refused` is a good
        response that may have been faster than a normal one.
        """

        def end() -> None:
            if body:
                _count_out(sent.host.load)
            if outcome is not UNUSED:
                now = self.clock.now()
                if head:
                    self._record_latency(sent, outcome, now, refused=refused)
                if body or outcome is not OK:
                    self._record_outcome(sent, outcome, now)

        self.mutex.do(end)
        if self._pending_events:
            self._emit_pending()

    def _record_latency(
        self, sent: RequestInProgress, outcome: Outcome, now: float, *, refused: bool
    ) -> None:
        """Record the latency until now."""
        host = sent.host
        host.requests += 1
        if sent.generation == host.record.generation:
            seconds = max(0.0, now - sent.began)
            if outcome is not OK:
                host.load.given_up(seconds, now)
            elif refused:
                host.load.refused(seconds, now)
            else:
                host.load.answered(seconds, now)

    def _record_outcome(self, sent: RequestInProgress, outcome: Outcome, now: float) -> None:
        """Record an outcome, and apply its consequences."""
        host = sent.host
        host.failures += outcome is FAILED
        if sent.generation != host.record.generation:
            return
        if outcome is OK:
            host.record.succeeded(now)
        elif outcome is FAILED:
            host.load.failed(0.0, now)  # the latency is recorded already
            host.record.failed(now)
            self._eject_if_outlier(host, now)

    def _eject_if_outlier(self, host: UpstreamHost, now: float) -> None:
        if host.out or host not in self.hosts:
            return
        records = [known.record for known in self.hosts]
        out = sum(known.out for known in self.hosts)
        ejection = self.judge.judge(host.record, records, out, now)
        if ejection is not None:
            self._add_event(HostEjected, host, **ejection._asdict())
            self._review(now)

    def checked(self, host: UpstreamHost, *, passed: bool, settings: HealthCheck) -> None:
        """Record the result of an active check."""
        failures, successes = settings.failures, settings.successes
        with self.mutex:
            was_out = host.out
            turned = host.checked.take(passed=passed, failures=failures, successes=successes)
            if not turned or host not in self.hosts:
                return
            now = self.clock.now()
            if passed:
                host.load.forget()
                host.record.restore(self.judge.settings, now)
                self._add_event(HostRestored, host, cause="checks passed")
            elif not was_out:
                least = settings.every * successes
                self._add_event(HostEjected, host, cause="checks failed", seconds=least)
            self._review(now)
        self._emit_pending()

    def set_aside(self, urls: Sequence[str], cause: str, bound: ActionBound) -> None:
        """Stop using `urls`, as far as `bound` and the set's own limit permit, until the next call.

        Each call replaces the previous one with the same `bound`.
        """
        with self.mutex:
            self._set_aside.pop(bound, None)
            if urls:
                self._set_aside[bound] = urls, cause
            else:
                bound.choose((), len(self.hosts))
            self._review(self.clock.now())
        self._emit_pending()

    def _apply_set_aside(self) -> None:
        """Set hosts aside: as many as may be out in addition to those that have failed."""
        if not self._set_aside and not any(host.set_aside_for for host in self.hosts):
            return
        known = {host.url: host for host in self.hosts}
        room = self.judge.settings.most_out(len(known)) - sum(host.is_bad for host in self.hosts)
        doubts: dict[str, str] = {}
        for bound, (urls, cause) in self._set_aside.items():
            wanted = [
                url for url in urls if url in known and not known[url].is_bad and url not in doubts
            ]
            for url in bound.choose(wanted, len(known), room - len(doubts)):
                doubts[url] = cause
        for url, host in known.items():
            was, host.set_aside_for = host.set_aside_for, doubts.get(url, "")
            if host.set_aside_for and not was:
                self._add_event(HostEjected, host, cause=host.set_aside_for, seconds=0.0)
            elif was and not host.out:
                self._add_event(HostRestored, host, cause=f"no longer {was}")

    def _review(self, now: float) -> None:
        """Restore hosts whose ejection is over, and update the hosts in service."""
        for host in self.hosts:
            until = host.record.until
            if until is not None and now >= until:
                host.load.forget()
                host.record.restore(self.judge.settings, now)
                if not host.out:  # otherwise it still fails its checks
                    self._add_event(HostRestored, host, cause="its time was over")
        self._apply_set_aside()
        serving = tuple(host for host in self.hosts if not host.out)
        out = len(self.hosts) - len(serving)
        self.panic = out > self._most_out(len(self.hosts))
        self._usable = self.hosts if self.panic else serving
        self._loads = tuple(host.load for host in self._usable)
        self._review_at = min(
            (host.record.until for host in self.hosts if host.record.until is not None),
            default=float("inf"),
        )

    def _most_out(self, hosts: int) -> int:
        """Return how many hosts may be out before all are used; checks allow more than ejection."""
        most = self.judge.settings.most_out(hosts)
        if self._panic is None or hosts == 1:
            return most
        return max(most, 1, share_of(self._panic, hosts))

    def all_open(self, refusals: list[CircuitOpen]) -> CircuitOpen:
        """Return the exception for a call that all breakers refused."""
        now = self.clock.now()
        waits = [error.retry_after for error in refusals if error.retry_after is not None]
        with self.mutex:
            waits += [
                max(0.0, h.record.until - now) for h in self.hosts if h.record.until is not None
            ]
            hosts = len(self._usable)
        soonest = min(waits, default=None)
        hint = "" if soonest is None else f", for another {soonest:.3f} s"
        which = "the circuit of its host is" if hosts == 1 else f"the circuits of {hosts} hosts are"
        return CircuitOpen(
            f"upstreams {self.name!r}: {which} open{hint}",
            retry_after=soonest,
            guard=self.name,
            policy="upstreams",
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the set and of each host."""
        with self.mutex:
            now = self.clock.now()
            if now >= self._review_at:
                self._review(now)
            seen = {
                "name": self.name,
                "panic": self.panic,
                "in_flight": sum(host.load.in_flight for host in self.hosts),
                "hosts": {host.url: host.snapshot(now) for host in self.hosts},
            }
        self._emit_pending()
        return seen

    def _add_event(self, kind: type[Event], host: UpstreamHost, **fields: Any) -> None:
        self._pending_events.append((kind, {"host": host.url, **fields}))

    def _emit_pending(self) -> None:
        """Emit pending events, outside of the lock: a listener may ask for a snapshot."""
        with self.mutex:
            events, self._pending_events = self._pending_events, []
        for kind, fields in events:
            emit(kind, self.name, **fields)

    def after_fork(self) -> None:
        """Reset in a child process: the requests and detectors of other threads are gone."""
        self.mutex = Mutex()
        self._set_aside = {}
        self._pending_events = []
        for host in self.hosts:
            host.load.in_flight = 0
            host.set_aside_for = ""
        self._review(self.clock.now())


def _count_out(load: Load) -> None:
    if load.in_flight:  # a child process resets the count
        load.in_flight -= 1
