"""Actions of operators: on guards, on idempotency keys, and on jobs, dead letters and events."""
