"""Caches beside their models, driven together: every call is checked against what the model says."""
