"""Load shedding: which calls are refused when not all can be served."""
