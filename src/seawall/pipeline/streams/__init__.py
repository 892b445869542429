"""Streams that several processes read together: Redis or Valkey, NATS JetStream."""
