from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from seawall import Guard, RateLimited, RedisStore, guards_from_toml
from seawall.policies.breaker import Breaker
from seawall.policies.rate_limit import RateLimit

TOML = """
[guards.shop]
[[guards.shop.policies]]
policy = "breaker"
shared = "main"
name = "vendor"
on_store_failure = "open"

[[guards.shop.policies]]
policy = "rate_limit"
limits = "2/min"
shared = "main"
name = "vendor"
"""


async def work() -> str:
    return "done"


def test_the_standard_stack_can_be_shared(new_store: Callable[..., RedisStore]):
    """With a store, the rate of `Guard.standard` holds for all pods together."""
    one, two = (
        Guard.standard(name, on=OSError, timeout=1.0, rate="3/min", shared=new_store())
        for name in ("vendor", "vendor 2")
    )
    assert isinstance(one.policies[2], Breaker)
    assert one.policies[2].name == "vendor"
    assert two.policies[3].name == "vendor 2"  # another name is another limit

    async def main() -> None:
        for _ in range(3):
            assert await one.acall(work) == "done"
        with pytest.raises(RateLimited):
            await one.acall(work)
        assert await two.acall(work) == "done"

    asyncio.run(main())


def test_pods_of_one_name_share_one_rate(new_store: Callable[..., RedisStore]):
    """Two guards that share a name in the store share what is left."""
    limits = [RateLimit("3/min", shared=new_store(), name="vendor") for _ in range(2)]
    one, two = (limit(work) for limit in limits)

    async def main() -> list[str]:
        answers = []
        for call in (one, two, one, two):
            try:
                answers.append(await call())
            except RateLimited:
                answers.append("refused")
        return answers

    assert asyncio.run(main()) == ["done", "done", "done", "refused"]


def test_a_store_is_handed_over_to_toml_by_name(store: RedisStore):
    """A file of settings names the store; the service has made it."""
    made = guards_from_toml(TOML, names={"main": store})
    breaker, limit = made["shop"].policies
    assert (breaker.name, breaker.shared) == ("vendor", store)
    assert limit.name == "vendor"


def test_a_store_that_was_not_handed_over_is_an_error():
    """The message says how to do it."""
    with pytest.raises(ValueError, match="hand the store over as names="):
        guards_from_toml(TOML)
