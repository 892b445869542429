"""Rate limits: rates, buckets, windows, and what was estimated, granted or divided."""
