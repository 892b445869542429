from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from seawall import Guard
from seawall.sim import Latency, World, simulate
from seawall.sim.files import fill_from_toml, worlds_of

TOML = """
seconds = 60

[networks.lan]
delay = 0.001

[stores.redis]

[services.vendor]
workers = 10
latency = { exponential = 0.05 }
network = "lan"

[guards.vendor.standard]
on = ["ConnectionError", "TimeoutError"]
timeout = 1.0

[clients.people]
calls = "vendor"
guard = "vendor"
rate = [[0, 40], [60, 80]]
patience = 3

[users.clerks]
calls = "vendor"
count = 3
think = { lognormal = { median = 1, p99 = 5 } }

[[changes]]
at = 20
lasts = 10
of = "vendor"
what = "down"

[[changes]]
at = 40
lasts = 5
of = "people"
what = "surge"
factor = 2
"""


def in_python(world: World) -> None:
    from seawall.sim import ramp

    network = world.network("lan", delay=0.001)
    world.store("redis")
    vendor = world.service("vendor", workers=10, latency=Latency.exponential(0.05), network=network)
    guard = Guard.standard("vendor", on=(ConnectionError, TimeoutError), timeout=1.0)
    people = world.clients("people", guard(vendor.acall), rate=ramp((0, 40), (60, 80)), patience=3)
    world.users("clerks", vendor.acall, count=3, think=Latency.lognormal(median=1, p99=5))
    world.at(20, vendor.down(), lasts=10)
    world.at(40, people.surge(2), lasts=5)


def test_toml_and_python_make_the_same_world():
    """The same seed gives the same summary, to the last digit."""
    from_toml = simulate(partial(fill_from_toml, TOML), seed=5, name="same")
    assert from_toml.summary() == simulate(in_python, seed=5, name="same").summary()
    assert from_toml.trouble == (20, 45)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("workers = 10", "wokers = 10", "services.vendor: .*wokers.*it takes latency, workers"),
        ("[users.clerks]", "[user.clerks]", "'user' is no part of a world"),
        ('calls = "vendor"\ncount', 'calls = "seller"\ncount', "users.clerks.calls = 'seller'"),
        ("exponential = 0.05", "pareto = 0.05", "write one of constant, exponential"),
        ('what = "down"', 'what = "explode"', "what = 'down' or the like"),
        ('what = "down"', 'what = "_fault"', "what = 'down' or the like"),
    ],
)
def test_mistakes_in_toml_are_refused_with_what_to_write(before, after, said):
    """The error names the table and what is allowed there."""
    assert before in TOML
    with pytest.raises(ValueError, match=said):
        simulate(partial(fill_from_toml, TOML.replace(before, after, 1)))


def test_a_python_file_has_a_world_for_each_function(tmp_path: Path):
    """In order; other functions are none; a colon chooses one."""
    file = tmp_path / "worlds.py"
    file.write_text(
        "def helper(x): ...\n"
        "def before(world):\n    world.clients('c', world.service('s').acall, rate=5)\n"
        "def after(world):\n    world.seconds = 7\n"
    )
    assert list(worlds_of(str(file))) == ["before", "after"]
    (one,) = worlds_of(f"{file}:after").values()
    assert simulate(one).seconds == 7
    with pytest.raises(ValueError, match=r"def never\(world\)"):
        worlds_of(f"{file}:never")
    with pytest.raises(ValueError, match="file that exists"):
        worlds_of("outages")
