"""The backends that ship with this library; each is found through its entry point.

This folder is never put on ``sys.path`` itself: ``backends/torch`` would shadow the real torch.

PYTEST_DONT_REWRITE
"""
