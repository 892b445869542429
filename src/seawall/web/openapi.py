"""OpenAPI descriptions of the responses that Seawall sends.

429, 503 and 504 on every operation behind an edge; the header Idempotency-Key with its 400, 409 and
422 where requests are idempotent by key; the routes of a `JobsApi`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import deepcopy
from typing import Any, Final

from seawall.wire.idempotency import IDEMPOTENCY_HEADER

METHODS: Final = frozenset({"get", "put", "post", "delete", "options", "head", "patch", "trace"})

MEANINGS: Final = {
    429: "Over the caller's own rate limit",
    503: "Too busy, or a dependency is unavailable: try again later",
    504: "The deadline has passed",
}
OF_A_KEY: Final = {
    400: "The Idempotency-Key is missing or malformed",
    409: "The first request with this Idempotency-Key is still being processed: try again later",
    422: "This Idempotency-Key was used with another payload",
}

_RETRY_AFTER: Final = {
    "Retry-After": {
        "description": "Seconds after which a retry may help",
        "schema": {"type": "integer", "minimum": 0},
    }
}
_LIMITS: Final = {
    "RateLimit-Policy": {
        "description": "The limits that apply, as a structured field",
        "schema": {"type": "string"},
    },
    "RateLimit": {
        "description": "What is left of them, as a structured field",
        "schema": {"type": "string"},
    },
}
_KEY: Final[dict[str, Any]] = {
    "name": IDEMPOTENCY_HEADER,
    "in": "header",
    "description": "Names the effect of this request: a fresh key for each effect, the same key"
    " whenever the request is sent again. 1 to 255 visible ASCII characters, such as a UUID.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 257},
}
PROBLEM: Final = {
    "title": "Problem",
    "description": "Problem details, RFC 9457",
    "type": "object",
    "required": ["type", "title", "status"],
    "properties": {
        "type": {"type": "string", "format": "uri-reference", "default": "about:blank"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "reason": {"type": "string"},
        "violated-policies": {"type": "array", "items": {"type": "string"}},
    },
}
NAME: Final = "SeawallProblem"


def answer(status: int, meaning: str) -> dict[str, Any]:
    """Return the OpenAPI description of one refusal."""
    headers: dict[str, Any] = dict(_RETRY_AFTER) if status in (409, 429, 503) else {}
    if status == 429:  # noqa: PLR2004
        headers |= _LIMITS
    schema = {"$ref": f"#/components/schemas/{NAME}"}
    described: dict[str, Any] = {
        "description": meaning,
        "content": {"application/problem+json": {"schema": schema}},
    }
    return {**described, "headers": deepcopy(headers)} if headers else described


def describe(schema: dict[str, Any]) -> None:
    """Add the refusals to every operation of `schema` that does not describe its own."""
    for item in schema.get("paths", {}).values():
        for method, operation in item.items():
            if method in METHODS:
                responses = operation.setdefault("responses", {})
                for status, meaning in MEANINGS.items():
                    responses.setdefault(str(status), answer(status, meaning))


def operations(
    schema: dict[str, Any], templates: Iterable[str], methods: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield the operations of `schema` with these path templates and methods."""
    wanted = [_unnamed(template) for template in templates]
    for path, item in schema.get("paths", {}).items():
        shape = _unnamed(path)
        if any(
            shape.startswith(each[:-1]) if each.endswith("/*") else shape == each for each in wanted
        ):
            for method, operation in item.items():
                if method in METHODS and method.upper() in methods:
                    yield operation


def _unnamed(path: str) -> str:
    return re.sub(r"{[^}]*}", "{}", path)


def describe_key(
    operation: dict[str, Any], *, required: bool, statuses: Collection[int] = tuple(OF_A_KEY)
) -> None:
    """Add the header Idempotency-Key to an operation, and the responses that result from it.

    A response that the operation already describes, as FastAPI does for 422, gets both
    descriptions.
    """
    parameters = operation.setdefault("parameters", [])
    if not any(each.get("name", "").lower() == _KEY["name"].lower() for each in parameters):
        parameters.append({**deepcopy(_KEY), "required": required})
    responses = operation.setdefault("responses", {})
    for status, meaning in OF_A_KEY.items():
        if status in statuses:
            usual = answer(status, meaning)
            own = responses.setdefault(str(status), usual)
            if own is not usual:
                own["description"] = f"{own.get('description') or status}, or: {meaning}"
                own["content"] = {**usual["content"], **own.get("content", {})}
                own["headers"] = {**usual.get("headers", {}), **own.get("headers", {})}


def describing(
    openapi: Callable[[], dict[str, Any]], add: Callable[[dict[str, Any]], None] = describe
) -> Callable[[], dict[str, Any]]:
    """Return `openapi`, extended by `add`; a cached description is extended only once."""
    described: dict[str, Any] | None = None

    def openapi_with_refusals() -> dict[str, Any]:
        nonlocal described
        schema = openapi()
        if schema is not described:
            # Copies, so that a change of one description does not affect others.
            known = schema.setdefault("components", {}).setdefault("schemas", {})
            known.setdefault(NAME, deepcopy(PROBLEM))
            add(schema)
            described = schema
        return described

    return openapi_with_refusals
