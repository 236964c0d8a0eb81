"""Structured output: which tokens may follow, by a grammar.

A grammar is compiled once (:class:`Compiler`). Each sequence has its own place in it (:class:`Matcher`), which gives
the mask of the next token, those of a whole draft tree, and the tokens that can be foreseen. The library is llguidance;
``docs/grammar.md`` says why, and what it is not left to decide.
"""

from freewheel.grammar.compiler import CompiledGrammar, Compiler
from freewheel.grammar.matcher import Matcher

__all__ = ["CompiledGrammar", "Compiler", "Matcher"]
