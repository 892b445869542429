"""Groups of up to 300 members on virtual time: crashes are found fast, and seldom wrongly."""

from __future__ import annotations

from math import ceil, log10
from random import Random
from statistics import fmean

import pytest

from seawall.models.detection.gossip import MemberState
from seawall.models.detection.messages import MessageKind, Send
from seawall.models.detection.settings import SwimSettings
from tests.models.detection.network import Conditions, Network

CONFIRMED, SUSPECTED = MemberState.CONFIRMED, MemberState.SUSPECTED

PERIODS = 1.58
"""1 / (1 - 1/e): the mean number of probe periods until some member picks a crashed one."""

OVERLOADED = "m7"

SLOWEST = (19, 28, 36)
"""Seeds of groups in which it takes more than 6 s if each interval has only one probe."""


def group(size: int, seed: int, *, lifeguard: bool = True, loss: float = 0.0) -> Network:
    """Return a group of which all members know each other."""
    network = Network(
        size, seed, settings=SwimSettings(lifeguard=lifeguard), conditions=Conditions(loss=loss)
    )
    network.run(15.0)
    assert network.agree_on(set(network.nodes))
    return network


def periods_until_first_pick(network: Network, crashes: int) -> list[int]:
    """Crash a member, see when some other one first probes it, and let it go on; repeat that.

    The periods are counted from the crash, as the formula does: a probe 0.3 periods after it is in
    the first one, a probe 1.2 periods after it in the second.
    """
    random, settings = Random(network.random.random()), network.settings
    period = settings.interval / settings.probes
    found: list[int] = []
    for _ in range(crashes):
        network.run(random.uniform(1.0, 2.0))
        crashed = random.choice(sorted(network.nodes))
        crashed_at, picks = network.now, []

        def watch(_source: str, send: Send, name: str = crashed, picks: list = picks) -> None:
            if send.message.kind is MessageKind.PING and send.address == name:
                picks.append(network.now)

        network.watch = watch
        network.kill(crashed)
        while not picks:
            network.run(0.25 * period)
        network.resume(crashed)
        found.append(ceil((picks[0] - crashed_at) / period))
    return found


def test_a_crash_is_picked_after_as_many_periods_as_the_formula_says_by_120_crashes():
    """Of one member of 100; a tenth off at most, since the sample is small."""
    assert fmean(periods_until_first_pick(group(100, 1), 120)) == pytest.approx(PERIODS, rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_crash_is_picked_after_as_many_periods_as_the_formula_says():
    """By 2000 crashes of one member of 100, at most 5 % off."""
    found = [n for seed in range(4) for n in periods_until_first_pick(group(100, seed), 500)]
    assert fmean(found) == pytest.approx(PERIODS, rel=0.05)


def spreading_times(network: Network, crashes: int) -> list[float]:
    """Crash members one after the other; return how long each took from one accuser to all."""
    random, times = Random(network.random.random()), []
    for _ in range(crashes):
        crashed = random.choice(sorted(n.name for n in network.nodes.values() if n.is_up))
        network.kill(crashed)
        network.run(30.0)
        heard = [
            next(
                change.at
                for change in node.changes
                if change.name == crashed and change.after in (SUSPECTED, CONFIRMED)
            )
            for node in network.nodes.values()
            if node.is_up
        ]
        times.append(max(heard) - min(heard))
    return times


@pytest.mark.parametrize(
    ("size", "crashes"),
    [
        (30, 5),
        (100, 2),
        pytest.param(100, 40, marks=pytest.mark.slow),
        pytest.param(300, 5, marks=pytest.mark.slow),
    ],
)
def test_all_hear_of_a_crash_within_the_logarithmic_bound(size, crashes):
    """As many gossip intervals as an update is passed on: 4 ceil(log10(n + 1)), so 2.4 s of 100.

    By chance, not by force: in a small group of which half is dead, one crash in twelve takes
    longer, until the next probe.
    """
    network = group(size, size)
    settings = network.settings
    bound = settings.retransmit_multiplier * ceil(log10(size + 1)) * settings.gossip_interval
    times = spreading_times(network, crashes)
    assert max(times) <= bound


def seconds_until_all_know_of_five_crashes(seed: int) -> float:
    """Crash five of 50 members at once."""
    network = group(50, seed)
    crashed, crashed_at = sorted(network.nodes)[:5], network.now
    for name in crashed:
        network.kill(name)
    network.run(15.0)
    return max(
        next(change.at for change in node.changes if change.name == name and change.at > crashed_at)
        - crashed_at
        for node in network.nodes.values()
        if node.is_up
        for name in crashed
    )


@pytest.mark.parametrize(
    "seeds", [SLOWEST, pytest.param(range(200), marks=pytest.mark.slow)], ids=["slowest", "200"]
)
def test_all_of_50_know_of_five_crashes_within_6_s(seeds):
    """Which member is probed when is chance, so each interval has several probes."""
    assert max(map(seconds_until_all_know_of_five_crashes, seeds)) <= 6.0


def overload(network: Network, seed: int, seconds: float, length: tuple[float, float]) -> None:
    """Block what one member sends and receives, now and then, by chance."""
    random, at = Random(seed), network.now
    while at < network.now + seconds:
        blocked = random.uniform(*length)
        network.at(at, lambda blocked=blocked: network.block(OVERLOADED, blocked))
        at += blocked + random.uniform(2.0, 10.0)


def false_confirmations(seed: int, seconds: float, *, lifeguard: bool) -> int:
    """Return how often a healthy member of 100 was confirmed, by the view of each other one."""
    network = group(100, seed, lifeguard=lifeguard)
    overload(network, seed, seconds, (5.0, 20.0))
    network.run(seconds + 30.0)
    return sum(
        change.after is CONFIRMED and change.name != OVERLOADED
        for node in network.nodes.values()
        for change in node.changes
    )


def assert_lifeguard_is_20_times_better(seeds: range, seconds: float) -> None:
    """Assert no wrong confirmation with it, or 20 times as many without."""
    plain = sum(false_confirmations(seed, seconds, lifeguard=False) for seed in seeds)
    guarded = sum(false_confirmations(seed, seconds, lifeguard=True) for seed in seeds)
    assert plain >= 100
    assert guarded * 20 <= plain


def test_one_overloaded_member_makes_others_confirm_20_times_less_with_lifeguard_in_a_minute():
    """Its clock goes on while its messages wait: by its own view all others are silent."""
    assert_lifeguard_is_20_times_better(range(1), 40.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_overloaded_member_makes_others_confirm_20_times_less_with_lifeguard():
    """Ten minutes of virtual time in each of two groups of 100."""
    assert_lifeguard_is_20_times_better(range(2), 600.0)


def detection_times(seed: int, crashes: int, *, lifeguard: bool) -> list[float]:
    """Crash members of 100 while one is overloaded; return the seconds until each is confirmed.

    Without those that the overloaded one confirms, by chance, since it suspected them before.
    """
    network, random = group(100, seed, lifeguard=lifeguard), Random(seed)
    overload(network, seed, crashes * 25.0, (5.0, 20.0))
    times = []
    for _ in range(crashes):
        crashed = random.choice(
            sorted(n.name for n in network.nodes.values() if n.is_up and n.name != OVERLOADED)
        )
        network.kill(crashed)
        crashed_at = network.now
        network.run(25.0)
        confirmed = [
            change.at
            for node in network.nodes.values()
            for change in node.changes
            if change.name == crashed and change.after is CONFIRMED and change.by != OVERLOADED
        ]
        times += [at - crashed_at for at in sorted(confirmed) if at >= crashed_at][:1]
    assert len(times) > crashes / 2
    return times


def assert_lifeguard_is_at_most_a_quarter_slower(seeds: range, crashes: int) -> None:
    """In the mean of all crashes."""
    plain = fmean(t for seed in seeds for t in detection_times(seed, crashes, lifeguard=False))
    guarded = fmean(t for seed in seeds for t in detection_times(seed, crashes, lifeguard=True))
    assert guarded <= 1.25 * plain


def test_a_crash_is_confirmed_hardly_later_with_lifeguard_by_3_crashes():
    """Others share a true suspicion, so it lasts the least time."""
    assert_lifeguard_is_at_most_a_quarter_slower(range(1), 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_crash_is_confirmed_hardly_later_with_lifeguard():
    """By 30 crashes beside an overloaded member."""
    assert_lifeguard_is_at_most_a_quarter_slower(range(3), 10)


def test_30_members_converge_while_a_quarter_of_all_datagrams_is_lost():
    """No wrong confirmation in three minutes; a crash is known to all all the same."""
    network = Network(30, seed=4, conditions=Conditions(loss=0.25))
    network.run(180.0)
    states = {change.after for node in network.nodes.values() for change in node.changes}
    assert MemberState.CONFIRMED not in states
    assert all(len(node.swim.present) == 30 for node in network.nodes.values())
    network.kill("m11")
    network.run(60.0)
    names = {node.name for node in network.nodes.values() if node.is_up}
    for node in network.nodes.values():
        if node.is_up:
            assert {member.name for member in node.swim.present} == names


@pytest.mark.parametrize("size", [12, 30, pytest.param(100, marks=pytest.mark.slow)])
def test_a_partition_of_a_minute_heals_by_itself(size):
    """Both sides take each other for dead; two exchanges later all know all again."""
    network = group(size, seed=5)
    network.groups = {f"m{number}": 1 for number in range(size // 2)}
    network.run(60.0)
    assert network.views()["m0"][f"m{size - 1}"] is CONFIRMED
    assert network.views()[f"m{size - 1}"]["m0"] is CONFIRMED
    network.groups = {}
    network.run(90.0)
    assert network.agree_on(set(network.nodes))
