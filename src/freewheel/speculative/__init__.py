"""Speculation by n-gram lookup, usable on its own: it needs torch and NumPy, and no engine."""

from freewheel.speculative.index import SEPARATOR, Match, NgramIndex

__all__ = [
    "SEPARATOR",
    "Match",
    "NgramIndex",
]
