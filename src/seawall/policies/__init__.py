"""Policies that a user can put into a guard, one module or package each."""
