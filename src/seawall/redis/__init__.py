"""State that all pods share, on Redis or Valkey: the store, and what is kept in it."""
