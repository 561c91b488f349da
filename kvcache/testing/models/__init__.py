"""Models of the caches as plain dicts and lists, which share no code with them."""
