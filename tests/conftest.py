"""Fixtures that several parts share."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers are the parallelism: more threads only wait
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from pathlib import Path

import pytest
from hypothesis import settings
from tiny import make_tiny_llama

# The same cases every time, and no clock: the machine may be busy.
settings.register_profile("freewheel", derandomize=True, deadline=None, database=None)
settings.load_profile("freewheel")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama (see tests/tiny.py)."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
