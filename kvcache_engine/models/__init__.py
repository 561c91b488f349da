"""Model families: one decoder, and the parts in which families differ.

Other packages use ``families``: the family of a configuration, its cache and its shapes.
"""
