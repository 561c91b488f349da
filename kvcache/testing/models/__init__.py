"""What caches hold, answer and refuse, as plain dicts and lists that share no code with them."""
