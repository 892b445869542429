"""One HTTP exchange under a guard, and the adapters for each library."""
