"""Rate limits: rates, buckets and windows; settled estimates, batches and splits."""
