"""What a type checker makes of `protect` for frameworks: checked by mypy, never run."""

from __future__ import annotations

from typing import assert_type

from litestar import Litestar
from quart import Quart

from seawall import Bulkhead
from seawall.web import Edge, RequestLimit
from seawall.web.litestar import protect as protect_litestar
from seawall.web.quart import protect as protect_quart

limit = RequestLimit("600/min", by="address")
assert_type(protect_quart(Quart("shop"), timeout=10.0, limits=[limit]), Edge)
assert_type(protect_litestar(Litestar([]), concurrency=Bulkhead(5), health=None), Edge)
protect_quart(Quart("shop"), timeout="10 s")  # type: ignore[arg-type]
protect_quart(Quart("shop"), timeot=10.0)  # type: ignore[call-arg]
protect_litestar(Quart("shop"))  # type: ignore[arg-type]
