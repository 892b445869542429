"""One file for each policy that a user can put into a guard."""
