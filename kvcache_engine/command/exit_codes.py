"""Exit codes of the ``kvcache`` command other than 0, 1 for an error and 2 for wrong usage."""

INTERRUPTED = 130
"""For Ctrl-C, as in shells: 128 + SIGINT."""
