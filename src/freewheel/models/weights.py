"""Weights by the names of Hugging Face checkpoints, whatever file they lie in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from freewheel.models.errors import ModelError
from freewheel.models.files import read_json
from freewheel.ops.quantize import GroupQuantized

_DTYPES = ("F32", "F16", "BF16")
_LANGUAGE_MODEL = "language_model."


class Weights(Protocol):
    """Tensors by name (``model.layers.0.self_attn.q_proj.weight``), each read when it is asked for.

    ``weights[name]`` raises :class:`ModelError` if there is no such tensor. Tensors may be views of a mapped file: they
    are not to be written to.

    Attributes:
        norm_offset_applied: whether the 1 that Gemma adds to its norm weights is in them already.
    """

    @property
    def norm_offset_applied(self) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> Tensor | GroupQuantized: ...


class SafetensorsWeights:
    """The tensors of a folder: ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names.

    Of a multimodal checkpoint, the tensors of its language model, under the names that they have in a text model.

    Raises:
        ModelError: a file is missing, truncated or damaged, or lacks a tensor that the index promises.
    """

    norm_offset_applied = False

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        index_path, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index_path.is_file():
            index = read_json(index_path).get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
                raise ModelError(f"{index_path}: has no 'weight_map' from tensor names to files")
            shards = {shard: _open(folder / shard) for shard in sorted(set(index.values()))}
        elif single.is_file():
            index, shards = {}, {single.name: _open(single)}
        else:
            raise ModelError(f"{folder}: holds neither model.safetensors nor model.safetensors.index.json")
        self._folder = folder
        self._shards = shards
        self._shard_of = {name: shard for shard, file in shards.items() for name in file.keys()}  # noqa: SIM118
        for name, shard in index.items():
            if name not in shards[shard].keys():  # noqa: SIM118
                raise ModelError(f"{folder / shard}: lacks the tensor {name!r} that {index_path.name} places there")
        self._shard_of |= index
        multimodal = any(name.startswith(_LANGUAGE_MODEL) for name in self._shard_of)
        self._prefix = _LANGUAGE_MODEL if multimodal else ""

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._shard_of if name.startswith(self._prefix))

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as stored, a view of the mapped file."""
        name = self._prefix + name
        if name not in self._shard_of:
            raise ModelError(f"{self._folder}: has no tensor {name!r}")
        shard = self._shard_of[name]
        dtype = self._shards[shard].get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ModelError(f"{self._folder / shard}: {name!r} is of type {dtype}; supported are {', '.join(_DTYPES)}")
        return self._shards[shard].get_tensor(name)


def folder_config(folder: str | Path) -> dict[str, Any]:
    """A folder's ``config.json``; :class:`ModelError` if it is missing or not a JSON object."""
    return read_json(Path(folder) / "config.json")


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: is truncated or damaged: {error}") from error
