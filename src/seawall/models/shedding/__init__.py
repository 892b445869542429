"""Which calls are refused when not all can be served."""
