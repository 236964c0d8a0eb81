"""Fixtures that several parts share."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers are the parallelism: more threads only wait
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tiny import make_tiny_llama

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

# The same cases every time, and no clock: the machine may be busy.
settings.register_profile("freewheel", derandomize=True, deadline=None, database=None)
settings.load_profile("freewheel")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama (see tests/tiny.py)."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of decoders with few programs, by which the interpreter's time goes."""
    if not torch.cuda.is_available():
        from freewheel.ops import attention_gpu, products

        chosen = products.tile_for
        monkeypatch.setattr(products, "tile_for", lambda *sizes: chosen(*sizes)._replace(outputs=64))
        monkeypatch.setattr(attention_gpu, "default_splits", lambda rows, kv_heads: 2 if rows < 3 else 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a CUDA device where there is none."""
    if not torch.cuda.is_available():
        elsewhere = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
