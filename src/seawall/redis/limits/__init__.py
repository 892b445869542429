"""Rate limits that all pods share, on Redis or Valkey: exact, leased in batches, or split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seawall.models.rate.rule import RateRule
    from seawall.redis.store import StoreCore
    from seawall.runtime.store import LimitShare


def shared_limits(
    store: StoreCore,
    name: str,
    rules: Sequence[RateRule[Any]],
    *,
    sharing: str,
    batch: int | None,
    rerule: Callable[[Iterable[RateRule[Any]]], None],
    **options: Any,
) -> LimitShare:
    """Return the limits kept under `name`, with that kind of sharing; see `LimitStore`."""
    if sharing == "exact":
        from seawall.redis.limits.exact import ExactLimits

        return ExactLimits(store, name, rules, **options)
    if sharing == "leased":
        from seawall.redis.limits.leased import LeasedLimits

        return LeasedLimits(store, name, rules, batch=batch, **options)
    from seawall.redis.limits.split import SplitLimits

    return SplitLimits(store, name, rules, rerule=rerule, **options)
