"""Real groups of members: what metrics and the dashboard read of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import seawall
from seawall.clock import VirtualClock
from seawall.members import Cluster, Heartbeats, fixed_timeout, local
from seawall.telemetry import export_prometheus
from seawall.telemetry.readings import readings_of
from tests.dashboard.views_support import Pair, check_view


def _told(group: str) -> dict[tuple[str, ...], float]:
    """Return the readings of one group, by metric and further labels."""
    return {
        (one.metric.name.removeprefix("seawall_member"), *one.labels[1:]): one.value
        for one in readings_of(seawall.snapshot())
        if one.metric.labels[:1] == ("group",) and one.labels[0] == group
    }


def test_a_suspicion_of_heartbeats_is_read_from_its_beginning_to_its_end():
    """Suspected, cleared, suspected again and confirmed: level, counts, rate and detection time."""
    clock = VirtualClock()
    peers = Heartbeats("m-peers", detector=fixed_timeout(2.0), confirm_after=3.0, clock=clock)
    peers.watch("web-1")
    peers.heartbeat("web-1")
    clock.advance(1.0)
    peers.evaluate()
    told = _told("m-peers")
    assert told["s", "alive"] == 1
    assert told["_level_ratio", "web-1"] == pytest.approx(0.5)
    for beats in (True, False):
        clock.advance(2.0)
        peers.evaluate()
        assert _told("m-peers")["s", "suspected"] == 1
        if beats:
            peers.heartbeat("web-1")
    clock.advance(3.0)
    peers.evaluate()
    told = _told("m-peers")
    changes = {key[1]: value for key, value in told.items() if key[0] == "_changes_total"}
    assert changes == {"suspected": 2, "cleared": 1, "confirmed": 1, "left": 0}
    assert told["_false_suspect_ratio",] == 0.5
    assert told["s", "confirmed"] == 1
    assert told["_detection_seconds",] == pytest.approx(5.0)


def test_a_cluster_of_two_is_read():
    """Messages, bytes, health score and both members, in Prometheus's format and on the page."""
    joined = threading.Event()
    first = Cluster("m-cluster", member="a", bind="127.0.0.1:0", preset=local())

    def heard(change: Any) -> None:
        if change.member == "b" and change.after == "alive":
            joined.set()

    first.subscribe(heard)
    with first:
        options: dict[str, Any] = {"bind": "127.0.0.1:0", "preset": local()}
        with Cluster("m-cluster", member="b", seeds=[first.address], **options):
            assert joined.wait(60)
            registry = CollectorRegistry()
            with export_prometheus(registry):
                text = generate_latest(registry).decode()
            view = Pair().later()
    assert 'seawall_member_messages_total{group="m-cluster",result="sent"}' in text
    assert 'seawall_member_bytes_total{group="m-cluster",result="received"}' in text
    assert 'seawall_member_health_score{group="m-cluster"}' in text
    assert 'seawall_member_own_pauses_total{group="m-cluster"} 0.0' in text
    check_view(view)
    rows = [row["name"] for row in view["sections"]["Members"] if row["kind"] == "member"]
    assert {"m-cluster: a", "m-cluster: b"} <= set(rows)
