"""Public names that are loaded on first use."""

from __future__ import annotations

TYPE_CHECKING = False  # as in `seawall` itself: importing typing costs more than this saves
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazily(
    package: str, homes: Mapping[str, str], namespace: dict[str, Any]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package; `homes` has the names by their modules."""

    def load(name: str) -> Any:
        for home, names in homes.items():
            if name in names.split():
                from importlib import import_module

                value = getattr(import_module(f"seawall.{home}"), name)
                namespace[name] = value
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def known() -> list[str]:
        return sorted({*namespace, *namespace["__all__"]})

    return load, known
