"""Freewheel: a small, exact and fast serving engine for language models.

The names below are imported on first use, so that ``import freewheel`` costs nothing.
"""

__version__ = "0.1.0"
TYPE_CHECKING = False  # without the import of typing, which takes longer than all else here
__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from freewheel.llm import LLM
    from freewheel.sampling import Grammar, SamplingParams


def __getattr__(name: str) -> object:
    if name == "LLM":
        from freewheel.llm import LLM

        return LLM
    if name in ("Grammar", "SamplingParams"):
        from freewheel import sampling

        return getattr(sampling, name)
    raise AttributeError(f"module 'freewheel' has no attribute {name!r}")
