"""The hosts of a set and the rules between them: who is in service, who is asked, who is out.

All state is changed under one lock, which is never held while a request is under way or a listener
is told. What may come from the garbage collector (a request that nobody finished) waits for it in
the lock's own way, see `seawall.runtime.mutex`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from seawall.clients.upstreams.hosts import Host, HostGate, Seat, bind
from seawall.errors import CircuitOpen
from seawall.models.balance import choose
from seawall.models.outliers import ActionBound, OutlierModel, Outliers, share_of
from seawall.policies.breaker import Breaker
from seawall.runtime.edge_events import HostEjected, HostRestored
from seawall.runtime.events import Event, emit
from seawall.runtime.layers import FAILED, OK, UNUSED, Outcome
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from seawall.clients.upstreams.checks import HealthCheck
    from seawall.clock import Clock
    from seawall.models.balance import Load

NO_EJECTION = Outliers(consecutive=None, failure_ratio=None, deviations=None)
"""For sets that eject nobody: what is left is how many may fail their checks at once."""


class Sent(NamedTuple):
    """A request on its way."""

    host: Host
    began: float
    generation: int
    """The host's, by which is known what was sent before it was ejected or restored."""


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
        """Have no host yet: `replace` gives them. `panic` is that of the active checks, if any."""
        self.name = name
        self.clock = clock
        self.rng = rng
        self.half_life = half_life
        self.judge = OutlierModel(outliers)
        self.mutex = Mutex()
        self.hosts: tuple[Host, ...] = ()
        self.panic = False
        """Whether more hosts are out than may be: then all are asked."""
        self.gated = breaker is not None
        self._breaker = breaker
        self._keyed = None
        if isinstance(breaker, Breaker):
            if breaker.key is None:
                raise TypeError(
                    "breaker: one for all hosts would stop them all; write"
                    " breaker=lambda host: Breaker(...), or Breaker(key=lambda host: host, ...)"
                )
            self._keyed = bind(breaker, Seat(name, clock, rng))
        self._panic = panic
        self._usable: tuple[Host, ...] = ()
        self._loads: tuple[Load, ...] = ()
        self._review_at = float("inf")
        self._doubts: dict[ActionBound, tuple[Sequence[str], str]] = {}
        """Hosts that are to be set aside and why, for each action that asks for it."""
        self._untold: list[tuple[type[Event], dict[str, Any]]] = []

    def replace(self, urls: list[str]) -> None:
        """Have these hosts from now on; who was there before keeps all that is known of it."""
        now = self.clock.now()
        made: dict[str, Host] = {}
        known = {host.url: host for host in self.hosts}
        while True:
            for url in urls:
                if url not in known and url not in made:
                    made[url] = self._new(url, now)  # asks the user's function: not in the lock
            with self.mutex:
                known = {host.url: host for host in self.hosts}
                if all(url in known or url in made for url in urls):
                    self.hosts = tuple(known.get(url) or made[url] for url in urls)
                    self._review(now)
                    break
        self._tell()

    def _new(self, url: str, now: float) -> Host:
        return Host(url, self.half_life, self.judge.settings, self._gate(url), now)

    def _gate(self, url: str) -> HostGate | None:
        breaker = self._breaker
        if isinstance(breaker, Breaker) and self._keyed is not None:
            return HostGate(breaker, self._keyed, url)
        if breaker is None or isinstance(breaker, Breaker):
            return None
        made = breaker(url)
        if not isinstance(made, Breaker):
            raise TypeError(f"breaker({url!r}) gave {made!r}: return a Breaker")
        return HostGate(made, bind(made, Seat(f"{self.name} {url}", self.clock, self.rng)), url)

    def take(self, tried: set[str] | None, refused: Collection[Host]) -> Sent | None:
        """Choose a host and count a request in; None if all that are left have `refused`.

        Those `tried` in this call already are taken only when no other is left; the host is added
        to them.
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
                taken = Sent(host, now, host.record.generation)
                if tried is not None:
                    tried.add(host.url)
        if self._untold:
            self._tell()
        return taken if hosts else None

    def put_back(self, host: Host) -> None:
        """Take back a `take`: nothing was sent."""
        self.mutex.do(partial(_count_out, host.load))

    def end(self, sent: Sent, outcome: Outcome, *, refused: bool) -> None:
        """Take in how a request ended, all of it.

        `refused` is a good answer that may have come sooner than another would have.
        """
        self._do(partial(self._end, sent, outcome, refused=refused))

    def end_head(self, sent: Sent, outcome: Outcome, *, refused: bool) -> None:
        """Take in the head of an answer. Of a good one the body will tell how the host did."""
        self._do(partial(self._end_head, sent, outcome, refused=refused))

    def end_body(self, sent: Sent, outcome: Outcome) -> None:
        """Take in how the body ended whose head was there; the request is over."""
        self._do(partial(self._end_body, sent, outcome))

    def _do(self, work: Callable[[], None]) -> None:
        self.mutex.do(work)
        if self._untold:
            self._tell()

    def _end(self, sent: Sent, outcome: Outcome, *, refused: bool) -> None:
        _count_out(sent.host.load)
        if outcome is not UNUSED:
            now = self._hear(sent, outcome, refused=refused)
            self._conclude(sent, outcome, now)

    def _end_head(self, sent: Sent, outcome: Outcome, *, refused: bool) -> None:
        now = self._hear(sent, outcome, refused=refused)
        if outcome is not OK:
            self._conclude(sent, outcome, now)

    def _end_body(self, sent: Sent, outcome: Outcome) -> None:
        _count_out(sent.host.load)
        self._conclude(sent, outcome, self.clock.now())

    def _hear(self, sent: Sent, outcome: Outcome, *, refused: bool) -> float:
        """Take in how long it took until now, which is returned."""
        now = self.clock.now()
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
        return now

    def _conclude(self, sent: Sent, outcome: Outcome, now: float) -> None:
        """Take in a verdict, and whatever it leads to."""
        host = sent.host
        host.failures += outcome is FAILED
        if sent.generation != host.record.generation:
            return
        if outcome is OK:
            host.record.succeeded(now)
        elif outcome is FAILED:
            host.load.failed(0.0, now)  # how long it took is known already
            host.record.failed(now)
            self._judge(host, now)

    def _judge(self, host: Host, now: float) -> None:
        if host.out or host not in self.hosts:
            return
        records = [known.record for known in self.hosts]
        out = sum(known.out for known in self.hosts)
        ejection = self.judge.judge(host.record, records, out, now)
        if ejection is not None:
            self._untold.append((HostEjected, {"host": host.url, **ejection._asdict()}))
            self._review(now)

    def checked(self, host: Host, *, passed: bool, settings: HealthCheck) -> None:
        """Take in the result of an active check."""
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
                self._untold.append((HostRestored, {"host": host.url, "cause": "checks passed"}))
            elif not was_out:
                seconds = settings.every * successes  # it cannot be back sooner
                fields = {"host": host.url, "cause": "checks failed", "seconds": seconds}
                self._untold.append((HostEjected, fields))
            self._review(now)
        self._tell()

    def set_aside(self, urls: Sequence[str], cause: str, bound: ActionBound) -> None:
        """Ask `urls` no more as far as `bound` and the set's own bound allow, until the next call.

        Each call replaces what the one before with the same `bound` asked for.
        """
        with self.mutex:
            self._doubts.pop(bound, None)
            if urls:
                self._doubts[bound] = urls, cause
            else:
                bound.choose((), len(self.hosts))
            self._review(self.clock.now())
        self._tell()

    def _doubt(self) -> None:
        """Set hosts aside: as many as may be out beside those that have failed by themselves."""
        if not self._doubts and not any(host.doubt for host in self.hosts):
            return
        known = {host.url: host for host in self.hosts}
        room = self.judge.settings.most_out(len(known)) - sum(host.is_bad for host in self.hosts)
        doubts: dict[str, str] = {}
        for bound, (urls, cause) in self._doubts.items():
            wanted = [
                url for url in urls if url in known and not known[url].is_bad and url not in doubts
            ]
            for url in bound.choose(wanted, len(known), room - len(doubts)):
                doubts[url] = cause
        for url, host in known.items():
            was, host.doubt = host.doubt, doubts.get(url, "")
            if host.doubt and not was:
                fields = {"host": url, "cause": host.doubt, "seconds": 0.0}
                self._untold.append((HostEjected, fields))
            elif was and not host.out:
                self._untold.append((HostRestored, {"host": url, "cause": f"no longer {was}"}))

    def _review(self, now: float) -> None:
        """Restore whose time is over, and see anew who is in service."""
        for host in self.hosts:
            until = host.record.until
            if until is not None and now >= until:
                host.load.forget()
                host.record.restore(self.judge.settings, now)
                if not host.out:  # or it fails its checks still
                    fields = {"host": host.url, "cause": "its time was over"}
                    self._untold.append((HostRestored, fields))
        self._doubt()
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
        """Return how many may be out before all are asked: more than are ejected, by checks."""
        most = self.judge.settings.most_out(hosts)
        if self._panic is None or hosts == 1:
            return most
        return max(most, 1, share_of(self._panic, hosts))

    def all_open(self, refusals: list[CircuitOpen]) -> CircuitOpen:
        """Return the error for a call that no host's breaker let through."""
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
        """Return what there is to see of the set and of each host."""
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
        self._tell()
        return seen

    def _tell(self) -> None:
        """Tell what happened, outside of the lock: a listener may ask for a snapshot."""
        with self.mutex:
            untold, self._untold = self._untold, []
        for kind, fields in untold:
            emit(kind, self.name, **fields)

    def after_fork(self) -> None:
        """Begin in a child process without the requests and detectors of threads that are gone."""
        self.mutex = Mutex()
        self._doubts = {}
        self._untold = []
        for host in self.hosts:
            host.load.in_flight = 0
            host.doubt = ""
        self._review(self.clock.now())


def _count_out(load: Load) -> None:
    if load.in_flight:  # none are left of those that a child process inherited
        load.in_flight -= 1
