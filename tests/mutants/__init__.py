"""Deliberate bugs, each planted in its own copy of the NumPy backend. See test_conformance_mutations.py.

A mutant is a function that is given a fresh copy of the module ``backends.numpy.backend`` (its
classes are its own) and breaks one thing in it.
"""

from . import extras, numbers, rules, storage  # noqa: F401  (each adds its own)
from .planting import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant"]
