"""The edge of a service: the checks that every request passes before and after its handler."""

from seawall.web.edge.edge import Edge

__all__ = ["Edge"]
