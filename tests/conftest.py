"""Fixtures that several parts share."""

from pathlib import Path

import pytest
from tiny import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama (see tests/tiny.py)."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
