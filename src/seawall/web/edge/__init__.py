"""The edge of a service: what every request passes before and after its handler."""

from seawall.web.edge.edge import Edge

__all__ = ["Edge"]
