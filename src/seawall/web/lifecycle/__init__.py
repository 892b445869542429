"""Starting, serving, draining and stopping."""

from seawall.web.lifecycle.lifecycle import Drained, Lifecycle

__all__ = ["Drained", "Lifecycle"]
