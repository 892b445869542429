"""A bounded queue between producers and consumers."""

from seawall.resources.channel.channel import Channel

__all__ = ["Channel"]
