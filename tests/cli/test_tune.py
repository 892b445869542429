"""`seawall tune`: sources, refusals, proofs, and the settings that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    Guard,
    Policy,
    Retry,
    RetryBudget,
    Timeout,
    guards_from_toml,
    registry,
)
from seawall.cli import main
from seawall.config import guards_to_toml, update_from_toml
from seawall.sim import CONDITIONS
from seawall.tune.report import policies_of
from tests.cli.top_worlds import served, state
from tests.tune.support import tally_of

QUICK = ["--seeds", "2", "--seconds", "9"]


def limits() -> tuple[Policy, Policy]:
    """Return limits that are far too large."""
    return Bulkhead(4000), Timeout(30.0)


def snapshot(samples: int = 20_000) -> dict[str, Any]:
    """Return a service with twenty calls a second and settings that are far from them."""
    tally = tally_of(samples=samples)
    with registry.emptied():
        guard = Guard("vendor", Retry(on=ConnectionError), *limits())
        settings = guards_to_toml([guard])
    seen = {
        "name": "vendor",
        "seconds": samples / 20,
        "succeeded": samples,
        "failed": 100,
        "histogram": {"counts": tally.counts, "sum": tally.sum},
        "policies": [{"policy": one.kind} for one in guard.policies],
    }
    return {"guards": [seen], "pools": [], "settings": settings}


EXPORT = """\
# HELP seawall_attempts_total Attempts
seawall_attempts_total{guard="vendor",outcome="succeeded"} 20000
seawall_attempts_total{guard="vendor",outcome="failed"} 100
"""


def export() -> str:
    """Return the same service as a Prometheus export."""
    tally = tally_of()
    lines, below = [EXPORT], 0.0
    for bound, count in zip((*tally.bounds, "+Inf"), tally.counts, strict=True):
        below += count
        name = "seawall_attempt_duration_seconds_bucket"
        lines.append(f'{name}{{guard="vendor",le="{bound}"}} {below}\n')
    lines.append(f'seawall_attempt_duration_seconds_sum{{guard="vendor"}} {tally.sum}\n')
    return "".join(lines)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(snapshot()))
    return path


def test_a_snapshot_is_tuned(file: Path, capsys: pytest.CaptureFixture[str]):
    """Each proposal has its reason, what was simulated and the result."""
    assert main(["tune", str(file), *QUICK]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("guard 'vendor': 20.1 calls a second over 1000 s, 20 000 latencies")
    assert "  retry        budget none -> on\n" in printed
    assert "0.5% of 20 100 attempts fail; without a budget" in printed
    assert "timeout seconds 30 -> 0.67: it helps under none" in printed
    assert "callers wait 1.3 s; 2 seeds" in printed
    assert all(f"\n  {name}  " in printed for name in CONDITIONS)


def test_guards_are_made_and_updated_from_what_is_written(file: Path, tmp_path: Path):
    """The text has all policies of today, with the proposals in them."""
    today = (Retry(on=ConnectionError, budget=RetryBudget()), Breaker(), *limits())
    shown = snapshot()
    with registry.emptied():
        shown["settings"] = guards_to_toml([Guard("vendor", *today)])
    file.write_text(json.dumps(shown))
    written = tmp_path / "tuned.toml"
    assert main(["tune", str(file), "--no-proof", "--write", str(written)]) == 0
    with registry.emptied():
        (made,) = guards_from_toml(written.read_text()).values()
        assert repr(made.policies[-1]) == "Timeout(0.67)"
    with registry.emptied():
        live = Guard("vendor", *today)
        changed = update_from_toml(written.read_text())
        assert changed == ["guard 'vendor', bulkhead: limit", "guard 'vendor', timeout: seconds"]
        assert repr(live.policies) == repr(made.policies)


def test_a_process_is_asked_at_its_dashboard(capsys: pytest.CaptureFixture[str]):
    """Its snapshot is read with the headers that are given."""
    with served(snapshot=state(snapshot())) as (url, asked):
        arguments = ["--url", url, "--header", "X-Key: secret", "--no-proof"]
        assert main(["tune", *arguments]) == 0
    assert "not proven: nothing was simulated" in capsys.readouterr().out
    assert [one["x-key"] for one in asked] == ["secret"]


def test_an_export_has_no_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It says so, and asks how long its counts cover; settings can be passed."""
    path = tmp_path / "metrics.txt"
    path.write_text(export())
    assert main(["tune", str(path), "--no-proof"]) == 1
    assert "pass --span SECONDS" in capsys.readouterr().out
    assert main(["tune", str(path), "--span", "1000", "--no-proof"]) == 0
    printed = capsys.readouterr().out
    assert "its settings are not known" in printed
    assert "add it: seconds 0.67" in printed
    settings = tmp_path / "guards.toml"
    settings.write_text("[guards.vendor.standard]\non = ['VendorError']\ntimeout = 30.0\n")
    arguments = ["--span", "1000", "--settings", str(settings), "--no-proof"]
    assert main(["tune", str(path), *arguments]) == 0
    assert "seconds 30 -> 0.67" in capsys.readouterr().out


def test_few_samples_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It says how many there are and how many are needed, with a status of its own."""
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(snapshot(312)))
    assert main(["tune", str(path)]) == 1
    assert "312 calls were measured, 1000 are needed" in capsys.readouterr().out


def test_json(file: Path, capsys: pytest.CaptureFixture[str]):
    """Programs get the same, with intervals and the TOML."""
    assert main(["tune", str(file), *QUICK, "--json", "--capacity", "60", "--patience", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    (vendor,) = found["tuned"]
    assert vendor["proven"]
    kept = {one["policy"]: one for one in vendor["proposals"]}
    dropped = {one["policy"]: one["why"] for one in vendor["dropped"]}
    assert {*kept, *dropped} >= {"timeout", "retry", "bulkhead"}
    assert "bears 60 calls a second, callers wait 2 s" in vendor["world"]
    goodput = vendor["effects"]["normal"]["goodput"]
    assert goodput["before"]["low"] <= goodput["before"]["mean"] <= goodput["before"]["high"]
    assert list(guards_from_toml(found["toml"], replace=True)) == ["vendor"]


def test_standard_stacks_are_written_out():
    """`standard` becomes its policies; names of the user's errors stay."""
    text = "[guards.a.standard]\non = ['VendorError']\ntimeout = 1.0\n"
    with registry.emptied():
        written = policies_of(text)
        (made,) = guards_from_toml(written, names={"VendorError": OSError}).values()
    assert [one.kind for one in made.policies] == ["timeout", "retry", "breaker", "timeout"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "write a file or --url"),
        (["a.json", "--url", "http://127.0.0.1:1"], "write a file or --url"),
        (["{file}", "--header", "A: b"], "--header goes with --url"),
        (["{file}", "--guard", "nobody"], "there are vendor"),
        (["missing.json"], "missing.json"),
        (["--url", "http://127.0.0.1:1/seawall"], "nothing listens there"),
        (["{file}", "--settings", "{file}"], "Invalid"),
    ],
)
def test_bad_usage(
    file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    """A mistake is one line and status 2."""
    assert main(["tune", *(one.replace("{file}", str(file)) for one in arguments)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("seawall tune: ")
    assert message in told


@pytest.mark.parametrize("text", ["{}", "{", "[1]", "up 1"])
def test_other_files_are_no_snapshots(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """What is neither a snapshot nor an export says so."""
    path = tmp_path / "other"
    path.write_text(text)
    assert main(["tune", str(path)]) == 2
    assert "is no snapshot" in (told := capsys.readouterr().err) or "no metrics" in told


BAD_POLICIES = "[[guards.vendor.policies]]\nseconds = 3"


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": float("nan")},
        {"seconds": -5},
        {"succeeded": float("inf")},
        {"succeeded": 10**400},
        {"error_rate": float("nan")},
        {"failed": "many"},
        {"histogram": {"counts": [float("inf")] * 36, "sum": 1.0}},
        {"histogram": {"counts": [-1.0] * 36, "sum": 1.0}},
        {"policies": 5},
        {"policies": ["timeout"]},
        {"name": None},
        {"settings": "guards = 3"},
        {"settings": "[guards.vendor]"},
        {"settings": BAD_POLICIES},
    ],
    ids=str,
)
def test_broken_snapshots_are_refused(
    wrong: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A number that no process counts, or another shape, is one line and status 2."""
    given = snapshot()
    given["guards"][0] |= wrong
    given["settings"] = wrong.get("settings", given["settings"])
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(given))
    assert main(["tune", str(path), "--no-proof"]) == 2
    told = capsys.readouterr().err
    assert "no snapshot" in told or "settings of guard" in told


def test_nothing_in_a_snapshot_moves_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Control characters in names and settings are escaped."""
    given = snapshot()
    given["guards"][0]["name"] = "\x1b[2J"
    given["settings"] = (
        '[[guards."\\u001b[2J".policies]]\npolicy = "retry"\non = ["OSError"]\n'
        'budget = { kind = "request_ratio", ratio = 0.9, note = "\\u001b[2J" }\n'
    )
    path = tmp_path / "hostile.json"
    path.write_text(json.dumps(given))
    assert main(["tune", str(path), "--no-proof"]) == 0
    assert "note=\\x1b[2J" in (shown := capsys.readouterr().out)
    assert "\x1b" not in shown
    assert main(["tune", str(path), "--guard", "nobody"]) == 2
    assert "\x1b" not in capsys.readouterr().err
