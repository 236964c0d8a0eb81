"""What errors about parameters say, and a check that texts share."""

import reprlib
from typing import Any


def shown(value: Any) -> str:
    """A short text for an error. What may be large, or have any ``repr``, is named by its type."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a very large integer"
    return reprlib.repr(value) if isinstance(value, (int, float, str, type(None))) else f"a {type(value).__name__}"


def check_text(name: str, text: str) -> None:
    """Refuse what no tokenizer takes.

    Raises:
        ValueError: the text has a surrogate without its other half.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has a lone surrogate at character {error.start}: it is not valid text, or was not UTF-8"
        ) from None
