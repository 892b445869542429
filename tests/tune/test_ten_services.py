"""Ten services with wrong settings (examples/tuned): tuning makes each better, and none worse."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "tuned" / "ten_services.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ten_services", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ten = load()


@pytest.mark.parametrize("service", ten.SERVICES, ids=lambda one: one.name.replace(" ", "_"))
def test_tuning_helps_each_service_and_harms_none(service: object):
    """More answers or a shorter tail beyond the interval, and no fewer answers when it is down."""
    proof = ten.tune(service)
    assert proof.kept
    assert ten.promise(proof.effects) is not None
    down = proof.effects["down"]
    assert down.difference.goodput.high > -0.05 * down.before.goodput.mean
    assert down.after.load.mean < max(1.1 * ten.RATE, down.before.load.mean)


@pytest.mark.alone
def test_a_tuned_service_is_better_on_real_time():
    """A rate limit that is too low: what the simulation promises comes true with a real loop."""
    service = next(one for one in ten.SERVICES if one.name == "rate limit too low")
    tuned = {"policies": [dict(one) for one in service.policies]}
    tuned["policies"][2]["limits"] = ["79/s"]
    real = asyncio.run(ten.compare_for_real(service, tuned, "normal", part=1.0))
    before, after = real["normal"]
    assert after.goodput > 1.1 * before.goodput
