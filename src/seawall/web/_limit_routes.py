"""Which of a few known routes a path belongs to: cheap, and never more names than were given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

OTHER: Final = "other"
"""What every path is called that belongs to none of the routes."""

_MOST: Final = 1000
_END: Final = ""
"""Under this name a node keeps the template that ends there; no segment of a path is empty."""


class Routes:
    """Templates such as "/search", "/orders/{id}" or "/files/*", and which one a path matches.

    `{...}` stands for one segment, a last `*` for one or more; a last `{...:path}`, as FastAPI
    writes it, is read as `*`. A literal segment comes before `{...}`. A path that matches none is
    `OTHER`, so whoever makes up paths makes up no names.
    """

    def __init__(self, templates: Iterable[str]) -> None:
        """Know these routes."""
        self.templates = tuple(templates)
        if len(self.templates) > _MOST:
            raise ValueError(f"{len(self.templates)} routes: give {_MOST} at most")
        self._tree: dict[str, Any] = {}
        self._deepest = 0
        for template in self.templates:
            self._add(template)

    def __repr__(self) -> str:
        return f"Routes({', '.join(map(repr, self.templates))})"

    def _add(self, template: str) -> None:
        if not isinstance(template, str) or not template.startswith("/"):
            raise ValueError(f"route {template!r}: write a path, such as '/orders/{{id}}'")
        segments = [_read(segment, template) for segment in template.split("/")[1:] if segment]
        if "*" in segments[:-1]:
            raise ValueError(
                f"route {template!r}: a * stands at the end, such as '/files/*', and so does"
                " {...:path}"
            )
        node = self._tree
        for segment in segments:
            node = node.setdefault(segment, {})
        if _END in node:
            raise ValueError(f"route {template!r}: {node[_END]!r} matches the same paths")
        node[_END] = template
        self._deepest = max(self._deepest, len(segments))

    def of(self, path: str) -> str:
        """Return the template that `path` matches, or `OTHER`."""
        begin, *segments = path.split("/", self._deepest + 2)
        if begin or not segments:
            return OTHER
        if not segments[-1]:
            segments.pop()  # "/orders/" is "/orders"
        found = self._find(self._tree, segments, 0)
        return OTHER if found is None else found

    def _find(self, node: dict[str, Any], segments: list[str], at: int) -> str | None:
        """Look below `node`, as deep as the templates go: never deeper."""
        if at == len(segments):
            ended: str | None = node.get(_END)
            return ended
        segment = segments[at]
        for name in (segment, "{}"):
            # An empty segment is none, and what is written like a template is not one.
            if segment and (name == "{}" or segment not in ("{}", "*")):
                below = node.get(name)
                found = None if below is None else self._find(below, segments, at + 1)
                if found is not None:
                    return found
        rest = node.get("*")
        # The rest may begin with an empty segment: else "/files//a" went past the limit.
        return None if rest is None else rest.get(_END)


def _read(segment: str, template: str) -> str:
    """Return what a segment of a template stands for: "{}" for any one, "*" for the rest."""
    if "{" not in segment and "}" not in segment:
        return segment
    inside = segment[1:-1]
    if segment != f"{{{inside}}}" or "{" in inside or "}" in inside:
        raise ValueError(
            f"route {template!r}: {segment!r} is only partly a {{name}}, and would match no path;"
            " write {name} for the whole segment, such as '/orders/{id}'"
        )
    return "*" if inside.endswith(":path") else "{}"
