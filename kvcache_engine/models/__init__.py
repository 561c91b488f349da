"""Model families: one decoder, and what differs.

Others use ``families``: the family of a configuration, its cache, its shapes.
"""
