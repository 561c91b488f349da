"""What the ``kvcache`` command exits with beside 0, 1 for an error and 2 for wrong usage."""

INTERRUPTED = 130
"""For Ctrl-C, as shells have it: 128 + SIGINT."""
