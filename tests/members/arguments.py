"""Bad arguments of failure detection: what is called, the bad values, and a word of the advice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import inf, nan
from random import Random
from typing import Any

from seawall import RateLimit, RedisStore
from seawall.clients.upstreams import Upstreams
from seawall.clock import SystemClock
from seawall.leases import Lease
from seawall.limits import Limit
from seawall.members import (
    ActionBound,
    Cluster,
    Heartbeats,
    Keyring,
    Leader,
    MembersPresent,
    SwimSettings,
    eject_suspected,
    exponential,
    fixed_timeout,
    grpc_probe,
    hand_over,
    http_probe,
    phi_accrual,
    quantile_timeout,
    split_limit,
    tcp_probe,
)
from seawall.testing import FakeStore
from tests.members.support import Candidate

HUGE = 10**400

_SECONDS = [(-1.0, ValueError), (nan, ValueError), ("2", TypeError), (True, TypeError)]
_FINITE = [*_SECONDS, (inf, ValueError), (HUGE, ValueError)]
_POSITIVE = [*_FINITE, (0, ValueError)]
_COUNTS = [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("3", TypeError), (True, TypeError)]
_SHARES = [(-0.1, ValueError), (0, ValueError), (1.1, ValueError), (nan, ValueError)]
_SHARES += [("0.5", TypeError), (True, TypeError)]
_TEXTS = [("", TypeError), (5, TypeError), (None, TypeError)]
_PEERS = [*_TEXTS, ("x" * 257, TypeError)]
_CLOCKS = [(5, TypeError), (SystemClock, TypeError)]
_RNGS = [(5, TypeError), (Random, TypeError)]
_KEYS = [(5, TypeError), (b"short", ValueError)]
_DETECTORS = [(8.0, TypeError), ("phi", TypeError), (phi_accrual, TypeError)]
_PROBES = [(5, TypeError), ("http://10.0.0.1", TypeError), (str, TypeError)]
_URLS = [("", ValueError), *_TEXTS[1:], ("ftp://host/", ValueError), ("10.0.0.1:80", ValueError)]
_URLS += [("http://host:0/", ValueError), ("http://host:99999/", ValueError)]
_URLS += [("http://user:word@host/", ValueError), ("http://host/a b", TypeError)]
_URLS += [("http://h\u00f6st/", TypeError), ("http://host/\r\nHost: x", TypeError)]


_MOST = [case for case in _SHARES if case[0] != 0]
_WATCHED = [(5, TypeError), ("orders", TypeError), (Heartbeats, TypeError), (None, TypeError)]
UPSTREAMS = Upstreams("bad members", ["http://127.0.0.1:1"])


def _limited(algorithm: Any = "token_bucket", **settings: Any) -> Any:
    return split_limit(_beats(), RateLimit("1/s", algorithm=algorithm), **settings)


_NAMES = [("", ValueError), (5, TypeError), (None, TypeError), ("x" * 129, ValueError)]
_ADDRESSES = [*_NAMES, ("host:port", ValueError), ("10.0.0.1:70000", ValueError)]
_ADDRESSES += [("pod-1.internal:7946", ValueError)]
_SEEDS = [
    ("10.0.0.1:7946", TypeError),
    (5, TypeError),
    ([5], TypeError),
    (["h:x"], ValueError),
    (["http://h:1"], ValueError),
]
_METADATA = [("zone", TypeError), (b"x" * 513, ValueError)]


def _cluster(**settings: Any) -> Cluster:
    return Cluster(**{"name": "bad", "bind": "127.0.0.1:0", **settings})


def _beats(**settings: Any) -> Heartbeats:
    return Heartbeats(**{"name": "bad", **settings})


LEASE = Lease(RedisStore("redis://127.0.0.1:1"), "bad", ttl=10.0, renew_every=2.5)


async def _work(_term: Any) -> None:
    """Never called."""


MEMBERS: list[tuple[Any, ...]] = [
    (
        "members.Leader(lease)",
        Leader,
        [(5, TypeError), ("x", TypeError), (Lease, TypeError)],
        "pass",
    ),
    (
        "members.Leader(margin)",
        lambda x: Leader(LEASE, margin=x),
        [*_POSITIVE, (7.0, ValueError)],
        "seconds|write less",
    ),
    ("members.Leader.lead(timeout)", lambda x: Leader(LEASE).lead(x), _SECONDS, "seconds"),
    (
        "members.Leader.run(work)",
        lambda x: Leader(LEASE).run(x),
        [(5, TypeError), (_work, TypeError)],
        "pass",
    ),
    (
        "members.Leader.arun(work)",
        lambda x: asyncio.run(Leader(LEASE).arun(x)),
        [(5, TypeError), (print, TypeError)],
        "pass",
    ),
    ("members.phi_accrual(threshold)", phi_accrual, [*_FINITE, (0.01, ValueError)], "number"),
    ("members.phi_accrual(window)", lambda x: phi_accrual(window=x), _COUNTS, "write"),
    (
        "members.phi_accrual(min_deviation)",
        lambda x: phi_accrual(min_deviation=x),
        _POSITIVE,
        "sec",
    ),
    (
        "members.phi_accrual(acceptable_pause)",
        lambda x: phi_accrual(acceptable_pause=x),
        _FINITE,
        "seconds",
    ),
    (
        "members.phi_accrual(first_interval)",
        lambda x: phi_accrual(first_interval=x),
        _POSITIVE,
        "seconds",
    ),
    ("members.exponential(threshold)", exponential, [*_FINITE, (0.01, ValueError)], "number"),
    ("members.exponential(window)", lambda x: exponential(window=x), _COUNTS, "write"),
    (
        "members.exponential(acceptable_pause)",
        lambda x: exponential(acceptable_pause=x),
        _FINITE,
        "seconds",
    ),
    (
        "members.exponential(first_interval)",
        lambda x: exponential(first_interval=x),
        _POSITIVE,
        "seconds",
    ),
    ("members.quantile_timeout(quantile)", quantile_timeout, _SHARES, "share"),
    (
        "members.quantile_timeout(factor)",
        lambda x: quantile_timeout(factor=x),
        [(0.5, ValueError), (nan, ValueError), ("2", TypeError)],
        "number",
    ),
    ("members.quantile_timeout(floor)", lambda x: quantile_timeout(floor=x), _POSITIVE, "seconds"),
    ("members.quantile_timeout(first)", lambda x: quantile_timeout(first=x), _POSITIVE, "seconds"),
    ("members.quantile_timeout(window)", lambda x: quantile_timeout(window=x), _COUNTS, "write"),
    ("members.fixed_timeout(seconds)", fixed_timeout, _POSITIVE, "seconds"),
    ("members.http_probe(url)", http_probe, _URLS, "url"),
    ("members.http_probe(ssl)", lambda x: http_probe("https://h/", ssl=x), [(5, TypeError)], "SSL"),
    ("members.tcp_probe(host)", lambda x: tcp_probe(x, 80), _TEXTS, "10.0.0.1"),
    (
        "members.tcp_probe(port)",
        lambda x: tcp_probe("10.0.0.1", x),
        [*_COUNTS, (65_536, ValueError)],
        "write",
    ),
    ("members.grpc_probe(target)", grpc_probe, _TEXTS, "10.0.0.1:50051"),
    (
        "members.grpc_probe(service)",
        lambda x: grpc_probe("10.0.0.1:1", service=x),
        [(5, TypeError), ("x" * 128, TypeError)],
        "name of a service",
    ),
    (
        "members.grpc_probe(credentials)",
        lambda x: grpc_probe("10.0.0.1:1", credentials=x),
        [(5, TypeError), ("secret", TypeError)],
        "ssl_channel_credentials",
    ),
    ("members.Keyring(keys)", Keyring, _KEYS, "key"),
    ("members.Keyring(encrypt)", lambda x: Keyring(b"k" * 32, encrypt=x), [(5, TypeError)], "True"),
    ("members.Keyring.add(key)", lambda x: Keyring(b"k" * 32).add(x), _KEYS, "key"),
    ("members.Keyring.use(key)", lambda x: Keyring(b"k" * 32).use(x), _KEYS, "key"),
    ("members.Keyring.remove(key)", lambda x: Keyring(b"k" * 32).remove(x), _KEYS, "key"),
    ("members.Cluster(name)", Cluster, _NAMES, "write"),
    ("members.Cluster(member)", lambda x: _cluster(member=x), [*_NAMES[:2], _NAMES[3]], "write"),
    (
        "members.Cluster(bind)",
        lambda x: _cluster(bind=x),
        [*_ADDRESSES, ("0.0.0.0:7946", ValueError)],
        "write|keyring",
    ),
    (
        "members.Cluster(advertise)",
        lambda x: _cluster(advertise=x),
        [case for case in _ADDRESSES if case[0] is not None],
        "write",
    ),
    ("members.Cluster(seeds)", lambda x: _cluster(seeds=x), _SEEDS, "write"),
    ("members.Cluster(preset)", lambda x: _cluster(preset=x), [("lan", TypeError)], "lan"),
    ("members.Cluster(keyring)", lambda x: _cluster(keyring=x), [("key", TypeError)], "Keyring"),
    ("members.Cluster(metadata)", lambda x: _cluster(metadata=x), _METADATA, "write"),
    ("members.Cluster(tcp_only)", lambda x: _cluster(tcp_only=x), [(5, TypeError)], "True"),
    ("members.Cluster(clock)", lambda x: _cluster(clock=x), _CLOCKS, "clock"),
    ("members.Cluster(rng)", lambda x: _cluster(rng=x), _RNGS, "Random"),
    (
        "members.Cluster.set_metadata(metadata)",
        lambda x: _cluster().set_metadata(x),
        _METADATA,
        "write",
    ),
    (
        "members.Cluster.subscribe(subscriber)",
        lambda x: _cluster().subscribe(x),
        [(5, TypeError)],
        "plain function",
    ),
    *(
        (f"members.SwimSettings({name})", lambda x, n=name: SwimSettings(**{n: x}), bad, "write")
        for names, bad in (
            (
                ("interval", "timeout", "gossip_interval", "exchange_interval", "pause"),
                _POSITIVE,
            ),
            (("gossip_to_dead", "forget_after"), _FINITE),
            (
                ("probes", "retransmit_multiplier", "gossip_nodes", "max_members"),
                _COUNTS,
            ),
            (("suspicion_multiplier",), [*_COUNTS, (1, ValueError)]),
            (("indirect_probes",), _COUNTS[1:]),
            (("packet",), [*_COUNTS, (1199, ValueError)]),
            (("lifeguard",), [(5, TypeError), ("yes", TypeError)]),
        )
        for name in names
    ),
    ("members.Heartbeats(name)", Heartbeats, _TEXTS, "text"),
    ("members.Heartbeats(detector)", lambda x: _beats(detector=x), _DETECTORS, "phi_accrual()"),
    ("members.Heartbeats(every)", lambda x: _beats(every=x), _POSITIVE, "seconds"),
    ("members.Heartbeats(timeout)", lambda x: _beats(timeout=x), _POSITIVE, "seconds"),
    ("members.Heartbeats(confirm_after)", lambda x: _beats(confirm_after=x), _FINITE, "seconds"),
    (
        "members.Heartbeats(pause_after)",
        lambda x: _beats(pause_after=x),
        [*_POSITIVE, (0.4, ValueError)],
        "at least 0.5",
    ),
    ("members.Heartbeats(max_peers)", lambda x: _beats(max_peers=x), _COUNTS, "write"),
    (
        "members.Heartbeats(shared)",
        lambda x: _beats(shared=x),
        [(5, TypeError), ("redis://127.0.0.1", TypeError)],
        "RedisStore",
    ),
    (
        "members.Heartbeats(own)",
        lambda x: _beats(own=x, shared=FakeStore()),
        [(5, TypeError), (None, TypeError), ("x" * 257, TypeError)],
        "orders-1",
    ),
    ("members.Heartbeats(own alone)", lambda x: _beats(own=x), [("pod-1", TypeError)], "shared="),
    ("members.Heartbeats(clock)", lambda x: _beats(clock=x), _CLOCKS, "clock"),
    ("members.Heartbeats(rng)", lambda x: _beats(rng=x), _RNGS, "Random"),
    ("members.Heartbeats.watch(peer)", lambda x: _beats().watch(x), _PEERS, "orders-1"),
    ("members.Heartbeats.watch(probe)", lambda x: _beats().watch("a", x), _PROBES, "http_probe"),
    (
        "members.Heartbeats.watch(detector)",
        lambda x: _beats().watch("a", detector=x),
        _DETECTORS,
        "phi_accrual()",
    ),
    (
        "members.Heartbeats.watch(address)",
        lambda x: _beats().watch("a", address=x),
        [(5, TypeError), (b"10.0.0.1", TypeError)],
        "text",
    ),
    ("members.Heartbeats.leave(reason)", lambda x: _beats().leave("a", x), _TEXTS, "text"),
    (
        "members.Heartbeats.subscribe(subscriber)",
        lambda x: _beats().subscribe(x),
        [(5, TypeError), ("f", TypeError)],
        "plain function",
    ),
    ("members.ActionBound(most)", ActionBound, _MOST, "share"),
    (
        "members.eject_suspected(members)",
        lambda x: eject_suspected(x, UPSTREAMS),
        _WATCHED,
        "Heartbeats or a Cluster",
    ),
    (
        "members.eject_suspected(upstreams)",
        lambda x: eject_suspected(_beats(), x),
        [(["http://h"], TypeError), (Upstreams, TypeError), (None, TypeError)],
        "pass an Upstreams",
    ),
    (
        "members.eject_suspected(most)",
        lambda x: eject_suspected(_beats(), UPSTREAMS, most=x),
        _MOST,
        "share",
    ),
    (
        "members.eject_suspected(host)",
        lambda x: eject_suspected(_beats(), UPSTREAMS, host=x),
        [(5, TypeError), ("http://h", TypeError)],
        "function",
    ),
    (
        "members.split_limit(members)",
        lambda x: split_limit(x, RateLimit("1/s")),
        _WATCHED,
        "Heartbeats or a Cluster",
    ),
    (
        "members.split_limit(limit)",
        lambda x: split_limit(_beats(), x),
        [("1/s", TypeError), (Limit("1/s"), TypeError), (RateLimit, TypeError)],
        "pass a RateLimit",
    ),
    (
        "members.split_limit(limit) that cannot be divided",
        _limited,
        [("leaky_bucket", ValueError)],
        "token_bucket",
    ),
    (
        "members.split_limit(expected_pods)",
        lambda x: _limited(expected_pods=x),
        _COUNTS,
        "write",
    ),
    ("members.split_limit(most)", lambda x: _limited(most=x), _MOST, "share"),
    (
        "members.hand_over(members)",
        lambda x: hand_over(x, Candidate()),
        _WATCHED,
        "Heartbeats or a Cluster",
    ),
    (
        "members.hand_over(leader)",
        lambda x: hand_over(_beats(), x),
        [(5, TypeError), ("leader", TypeError), (Candidate, TypeError)],
        "pass a Leader",
    ),
    (
        "members.hand_over(missing)",
        lambda x: hand_over(_beats(), Candidate(), missing=x),
        _SHARES,
        "share",
    ),
    (
        "members.hand_over(every)",
        lambda x: hand_over(_beats(), Candidate(), every=x),
        _POSITIVE,
        "seconds",
    ),
    ("members.MembersPresent(members)", MembersPresent, _WATCHED, "Heartbeats or a Cluster"),
    (
        "members.MembersPresent(degraded)",
        lambda x: MembersPresent(_beats(), degraded=x),
        _SHARES,
        "share",
    ),
]


def _given(name: str, *arguments: str) -> Iterable[str]:
    return (f"members.{name}({argument})" for argument in arguments)


UNCHECKED_BY_MEMBERS = frozenset(
    [
        # names that are not known are answered with False or None
        *_given("Cluster.get", "name"),
        *_given("Heartbeats.forget", "peer"),
        *_given("Heartbeats.get", "peer"),
        *_given("Heartbeats.heartbeat", "peer"),
        *_given("Heartbeats.leave", "peer"),
        # made by Seawall
        *_given("Action", "members", "kind", "bound", "apply"),
        *_given("ActionBound.choose", "wanted", "total", "room"),
        *_given("Keyring.for_group", "group"),
        *_given("Term", "lease", "margin"),
        *_given("MemberView", "name", "state", "since", "address", "level", "threshold"),
        *_given("MemberView", "round_trip", "metadata", "reason", "by"),
    ]
)
"""What may be anything, or what Seawall itself makes."""
