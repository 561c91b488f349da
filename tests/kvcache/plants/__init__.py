"""Bugs that mutmut cannot plant (benchmarks/mutation.py): each makes the test named beside it fail.

The tool changes an operator, a constant or an argument. Here stand the faults between functions: a step left
out, done for the wrong part or in the wrong order, a view where a copy belongs, a copy where nothing moves.
"""

from .caches import BUGS as CACHES
from .engine_and_stores import BUGS as ENGINE_AND_STORES
from .prefix import BUGS as PREFIX

__all__ = ["BUGS"]

BUGS = CACHES | PREFIX | ENGINE_AND_STORES
"""By the file (or class) of the tests that notice them."""
