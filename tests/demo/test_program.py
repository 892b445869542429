"""The demo as a whole, on real processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from seawall.clock import SYSTEM
from tests.demo.support import Program, gone

pytestmark = pytest.mark.alone

ALL = {"keeper", "valkey", "vendor", "load", "pod-1", "pod-2", "pod-3", "unprotected"}
ROW = re.compile(
    r"^\s*(?P<phase>[a-z ]*?)\s+(?P<side>protected|unprotected)\s+(?P<requests>\d+)\s+"
    r"(?P<good>[\d.]+)%\s+(?P<degraded>[\d.]+)%\s+(?P<limited>[\d.]+)%\s+(?P<errors>[\d.]+)%\s+"
    r"(?P<p50>[\d.]+ m?s)\s+(?P<p99>[\d.]+ m?s)$",
    re.MULTILINE,
)


def test_a_run_without_a_page_shows_the_outage_contained_and_leaves_nothing(tmp_path: Path):
    """It exits 0 with a table in which the protected side has few errors, and no process stays."""
    with Program(tmp_path / "said", "--headless", "--seconds", "10") as demo:
        status = demo.ends(50)
    assert status == 0, demo.said
    rows = [match.groupdict() for match in ROW.finditer(demo.said)]
    assert len(rows) == 10, demo.said
    assert all(int(row["requests"]) > 0 for row in rows)
    (broken,) = [number for number, row in enumerate(rows) if row["phase"] == "vendor broken"]
    protected, unprotected = rows[broken], rows[broken + 1]
    assert float(protected["errors"]) < 0.25 * float(unprotected["errors"]), demo.said
    assert float(protected["degraded"]) > 50
    assert "The outage was contained: errors" in demo.said
    assert set(demo.pids) == ALL
    assert gone(demo.pids, 1.0) == []
    assert not demo.folder.exists()


def test_ctrl_c_ends_everything_within_three_seconds(tmp_path: Path):
    """Without Valkey it says so and runs one pod; Ctrl-C leaves no process and no folder."""
    with Program(tmp_path / "said", "--memory", "--port", "18800") as demo:
        demo.says("Ctrl-C ends it")
        assert "No Valkey: --memory was given. So there is ONE protected pod" in demo.said
        assert set(demo.pids) == ALL - {"valkey", "pod-2", "pod-3"}
        assert re.search(r"http://127\.0\.0\.1:188\d\d/", demo.said)
        began = SYSTEM.now()
        demo.process.send_signal(signal.SIGINT)
        status = demo.ends(10)
    assert SYSTEM.now() - began < 3.0
    assert status == 0, demo.said
    assert gone(demo.pids, 0.5) == []
    assert not demo.folder.exists()


def test_a_paused_pod_ends_with_a_supervisor_that_is_killed(tmp_path: Path):
    """It stands still and sees nothing of the end: the keeper lets it go on."""
    with Program(tmp_path / "said", "--memory", "--port", "18860") as demo:
        demo.says("Ctrl-C ends it")
        (origin,) = re.findall(r"http://127\.0\.0\.1:188\d\d", demo.said)
        with httpx.Client(base_url=origin, trust_env=False, timeout=20.0) as client:
            token = client.get("/session").json()["token"]
            headers = {"origin": origin, "x-seawall-token": token}
            body = {"switch": "pause", "on": True}
            client.post("/control", json=body, headers=headers).raise_for_status()
        os.kill(demo.process.pid, signal.SIGKILL)
        demo.ends(10)
    left = gone(demo.pids, 30.0)
    for name in left:
        os.kill(demo.pids[name], signal.SIGKILL)  # it could not end by itself
    assert left == []
    assert not demo.folder.exists()


def test_when_the_supervisor_is_killed_all_others_end(tmp_path: Path):
    """SIGKILL of the parent, which can do nothing then: within seconds nothing is left."""
    with Program(tmp_path / "said", "--headless", "--seconds", "30") as demo:
        demo.says("calm, for")
        assert set(demo.pids) == ALL
        os.kill(demo.process.pid, signal.SIGKILL)
        demo.ends(10)
    assert gone(demo.pids, 4.0) == []
    assert not demo.folder.exists()
