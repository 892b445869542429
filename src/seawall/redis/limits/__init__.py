"""Rate limits that all pods share, on Redis or Valkey: exact, leased in batches, or split."""
