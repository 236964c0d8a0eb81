"""Small text files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from freewheel.models.errors import ModelError


def read_text(path: Path) -> str:
    """A UTF-8 file's content; :class:`ModelError` if it is missing or something else."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; :class:`ModelError` if it is missing or holds something else."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return value
