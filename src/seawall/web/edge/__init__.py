"""The edge of a service: the checks that every request passes before and after its handler."""

from seawall.web.edge.edge import Edge, default_concurrency

__all__ = ["Edge", "default_concurrency"]
