"""Fixtures that several parts share."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers are the parallelism: more threads only wait
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import random
import shutil
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file, save_file
from tiny import make_tiny_llama

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported


def hasten_interpreter() -> None:
    """Let Triton's interpreter do once what it does again and again, which takes it half of its time.

    It changes Triton's language for each launch and for each call of a device function: as nothing is compiled in the
    process of the tests, the changes may stay. And it makes its table of types whenever it looks one up.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[str]()
    np_dtype, np_dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def patch_lang(fn: Callable[..., Any]) -> SimpleNamespace:
        if fn.__module__ not in patched:
            patch(fn)
            patched.add(fn.__module__)
        return SimpleNamespace(restore=lambda: None)

    def get_np_dtype(type: Any) -> Any:
        name = type.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(type)
        return np_dtypes[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, get_np_dtype


if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    hasten_interpreter()

# The same cases every time, and no clock: the machine may be busy.
settings.register_profile("freewheel", derandomize=True, deadline=None, database=None)
settings.load_profile("freewheel")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama (see tests/tiny.py)."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def copying_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in which a token depends above all on the one before it, so that the same ones come again and again."""
    folder = tmp_path_factory.mktemp("models") / "copying"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.mul_(0.1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def many_drafts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as may be, or shorter, or none, whether or not they pay."""
    if "real_drafting" in request.fixturenames:
        return
    from freewheel.engine.drafting import DeviceDrafting

    rng = random.Random(1)

    def nodes(drafting: DeviceDrafting, sequences: list[Any], most: Callable[[Any], int]) -> list[int]:
        room = [min(most(sequence), drafting._most_nodes) for sequence in sequences]
        wanted = [count and rng.choice([0, 1, 1, rng.randint(1, count), count]) for count in room]
        drafting.guessing = not any(wanted)
        return wanted

    monkeypatch.setattr(DeviceDrafting, "nodes", nodes)


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
