"""The server's edge: what a request passes before any work is done, and what it is told."""
