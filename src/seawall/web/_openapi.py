"""What a service's own description says about refusals: 429, 503 and 504 on every operation."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

METHODS: Final = frozenset({"get", "put", "post", "delete", "options", "head", "patch", "trace"})

MEANINGS: Final = {
    429: "Over the caller's own rate limit",
    503: "Too busy, or a dependency is away: ask again later",
    504: "The time for the answer is over",
}

_RETRY_AFTER: Final = {
    "Retry-After": {
        "description": "Seconds after which asking again may help",
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


def answer(status: int) -> dict[str, Any]:
    """Return what OpenAPI says of one of our refusals."""
    headers: dict[str, Any] = {} if status == 504 else dict(_RETRY_AFTER)  # noqa: PLR2004
    if status == 429:  # noqa: PLR2004
        headers |= _LIMITS
    schema = {"$ref": f"#/components/schemas/{NAME}"}
    described: dict[str, Any] = {
        "description": MEANINGS[status],
        "content": {"application/problem+json": {"schema": schema}},
    }
    return {**described, "headers": deepcopy(headers)} if headers else described


def describe(schema: dict[str, Any]) -> dict[str, Any]:
    """Add our answers to every operation of `schema` that does not describe its own."""
    # Copies: whoever changes a description changes that one only.
    known = schema.setdefault("components", {}).setdefault("schemas", {})
    known.setdefault(NAME, deepcopy(PROBLEM))
    for item in schema.get("paths", {}).values():
        for method, operation in item.items():
            if method in METHODS:
                responses = operation.setdefault("responses", {})
                for status in MEANINGS:
                    responses.setdefault(str(status), answer(status))
    return schema


def describing(openapi: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Return `openapi`, which tells of our answers too; a description that it keeps, once."""
    described: dict[str, Any] | None = None

    def openapi_with_refusals() -> dict[str, Any]:
        nonlocal described
        schema = openapi()
        if schema is not described:
            described = describe(schema)
        return described

    return openapi_with_refusals
