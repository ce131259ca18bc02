"""`saccade check-data`, checks and warnings about rows and rewards, and the cache of token lengths."""
