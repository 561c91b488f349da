"""Model families: one decoder, and the parts in which families differ.

Used by other packages: ``families``, which has the family of a configuration, its cache and its shapes.
"""
