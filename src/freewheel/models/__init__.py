"""Models: the specification, one decoder, and what reads weights, tokenizers and configurations."""

from freewheel.models.errors import ModelError

__all__ = ["ModelError"]
