"""Hosts that share a store, each in a process of its own, and a network between them."""
