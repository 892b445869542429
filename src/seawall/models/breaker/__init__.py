"""Circuit breakers: the state machine, its settings, its probes, and reports between pods."""
