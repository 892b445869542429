"""Members in processes of their own: one is stopped and goes on, some are killed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from bench.cluster import Process, campaign, started
from seawall.clock import SystemClock
from tests.members.cluster.network import LOOK_AGAIN, PATIENCE

pytestmark = pytest.mark.alone

Looks = list[dict[str, Any]]


def until(members: list[Process], condition: Callable[[Looks], bool]) -> Looks:
    """Ask the members again and again, until what they say is so."""
    pause = threading.Event()
    for _ in range(round(PATIENCE / LOOK_AGAIN)):
        looks = [member.look() for member in members]
        if condition(looks):
            return looks
        pause.wait(LOOK_AGAIN)
    raise TimeoutError(f"it does not come true: {looks}")


def has(look: dict[str, Any], member: str, state: str) -> bool:
    return any(change[:2] == [member, state] for change in look["changes"])


def stop_for(seconds: float, settings: dict[str, Any]) -> None:
    """Stop one of four processes, and let it go on: the others suspect it and clear it."""
    with ExitStack() as stack:
        *others, paused = everybody = started(stack, 4, settings=settings)
        until(everybody, lambda looks: all(len(look["alive"]) == 4 for look in looks))
        paused.signal(signal.SIGSTOP)
        threading.Event().wait(seconds)  # it does not run for at least as long
        until(others, lambda looks: all(has(look, paused.name, "suspected") for look in looks))
        woken = SystemClock().now()
        paused.signal(signal.SIGCONT)

        def is_cleared(looks: Looks) -> bool:
            return all(
                [change[1] for change in look["changes"] if change[0] == paused.name][-1] == "alive"
                for look in looks
            )

        looks = until(others, is_cleared)
        for look in looks:
            assert look["counts"]["suspicions"] >= 1
            assert look["counts"]["cleared"] >= 1
            assert look["counts"]["confirmed"] == 0
            assert len(look["alive"]) == 4
        own = paused.look()
        assert own["counts"]["own_pauses"] >= 1
        assert own["counts"]["paused_seconds"] >= seconds
        assert own["counts"]["confirmed"] == 0
        # For as long as it was stopped it accuses nobody; later somebody may really be slow.
        accusations = [at for _, after, by, at in own["changes"] if after != "alive" and not by]
        assert [at for at in accusations if woken <= at <= woken + 0.6 * seconds] == []


def test_a_stopped_process_accuses_nobody_and_the_others_clear_it():
    """It reports its pause; the others count a suspicion that was wrong."""
    # Nobody is confirmed within 100 s, however busy the machine is.
    stop_for(1.5, {"interval": 0.5, "timeout": 0.2, "suspicion_multiplier": 200, "pause": 1.0})


@pytest.mark.slow
def test_a_process_that_was_stopped_for_6_s_accuses_nobody():
    """As many seconds as a long collection or a frozen disk may take."""
    stop_for(6.0, {"suspicion_multiplier": 60})


def test_a_killed_process_is_confirmed_by_the_others():
    """It said nothing, so it has not left."""
    quick = {"interval": 0.5, "timeout": 0.2, "suspicion_multiplier": 3, "gossip_interval": 0.1}
    with ExitStack() as stack:
        *others, killed = everybody = started(stack, 4, settings=quick)
        until(everybody, lambda looks: all(len(look["alive"]) == 4 for look in looks))
        killed.signal(signal.SIGKILL)
        until(others, lambda looks: all(has(look, killed.name, "confirmed") for look in looks))
        assert not any(has(other.look(), killed.name, "left") for other in others)


@pytest.mark.slow
def test_fifty_processes_cost_little_and_know_of_five_crashes():
    """One minute of them; `python -m bench.cluster` runs ten."""
    assert campaign(50, 1.0, "lan")
