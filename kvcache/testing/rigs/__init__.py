"""Caches and their models, driven together: every call is checked against the model."""
