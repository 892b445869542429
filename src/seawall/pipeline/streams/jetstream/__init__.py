"""NATS JetStream as a source and as a sink of pipelines."""

from seawall.pipeline.streams.jetstream.connection import JetStreamMessage
from seawall.pipeline.streams.jetstream.sink import JetStreamSink
from seawall.pipeline.streams.jetstream.source import JetStreamSource

__all__ = ["JetStreamMessage", "JetStreamSink", "JetStreamSource"]
