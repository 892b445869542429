"""One HTTP exchange under a guard, and what it needs of each library."""
