"""The rules for source code, one module for each family."""
