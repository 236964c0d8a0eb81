"""From a model's name to something that can run."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from freewheel.models.errors import ModelError
from freewheel.models.spec import ModelSpec

if TYPE_CHECKING:
    from freewheel.models.decoder import Decoder
    from freewheel.models.tokenizer import Tokenizer
    from freewheel.models.weights import Weights

DType = Literal["auto", "int8", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class LoadedModel:
    """A model, ready to run, and the file or folder that it came from."""

    path: Path
    spec: ModelSpec
    decoder: "Decoder"
    tokenizer: "Tokenizer"


def load(name_or_path: str | Path, *, dtype: DType = "auto", device: torch.device | str = "cpu") -> LoadedModel:
    """Finds a model (see :func:`freewheel.models.store.resolve`) and loads it.

    Args:
        dtype: "auto" keeps quantised weights small, with float32 activations, and runs others in their own type if
            the device is good at it; on CUDA devices it expands quantised weights to bfloat16. "int8", for CPUs, is the
            same with all quantised weights in int8: slower alone, faster with many rows. Any other value expands
            quantised weights to that type; "float32" is the exact mode.
        device: "cpu", or a CUDA device that torch sees.

    Raises:
        ModelError: the model cannot be found, read or run.
        ValueError: ``dtype`` or ``device`` is not one of the above.
    """
    if dtype not in get_args(DType):
        raise ValueError(f"dtype must be one of {', '.join(get_args(DType))}, not {dtype!r}")
    device = _usable(device)
    if dtype == "int8" and device.type != "cpu":
        raise ValueError(
            "dtype: int8 products are made for CPUs; choose auto, float32, bfloat16 or float16 on CUDA devices"
        )
    from freewheel.models.decoder import Decoder
    from freewheel.models.store import resolve

    path = resolve(name_or_path)
    with _naming(path):
        config, weights, tokenizer = _read_folder(path) if path.is_dir() else _read_gguf(path)
        spec = ModelSpec.from_config(config)
        natural = dtype in ("auto", "int8")
        quantize = dtype if natural and device.type == "cpu" else "none"
        activations = _natural_dtype(weights, device) if natural else getattr(torch, dtype)
        decoder = Decoder(spec, weights, dtype=activations, device=device, quantize=quantize)
    return LoadedModel(path, spec, decoder, tokenizer)


def load_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of a model whose file or folder is known, without its weights.

    Raises:
        ModelError: it cannot be read.
    """
    from freewheel.models.gguf import read_gguf
    from freewheel.models.tokenizer import Tokenizer

    with _naming(path):
        return Tokenizer.from_folder(path) if path.is_dir() else Tokenizer.from_gguf(read_gguf(path).metadata)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors begin with the path."""
    try:
        yield
    except ModelError as error:
        if str(error).startswith(str(path)):
            raise
        raise ModelError(f"{path}: {error}") from error


def _usable(device: torch.device | str) -> torch.device:
    name = re.fullmatch(r"cpu|cuda(?::([0-9]{1,3}))?", str(device))
    if name is None:
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', not {str(device)!r}")
    if name[0] != "cpu" and int(name[1] or 0) >= (found := torch.cuda.device_count()):
        raise ValueError(f"device is {name[0]!r}, but the number of CUDA devices that torch can use is {found}")
    return torch.device(name[0])


def _read_gguf(path: Path) -> "tuple[dict[str, Any], Weights, Tokenizer]":
    from freewheel.models.gguf import GGUFWeights, gguf_config, read_gguf
    from freewheel.models.tokenizer import Tokenizer

    file = read_gguf(path)
    return gguf_config(file), GGUFWeights(file), Tokenizer.from_gguf(file.metadata)


def _read_folder(path: Path) -> "tuple[dict[str, Any], Weights, Tokenizer]":
    from freewheel.models.tokenizer import Tokenizer
    from freewheel.models.weights import SafetensorsWeights, folder_config

    return folder_config(path), SafetensorsWeights(path), Tokenizer.from_folder(path)


def _natural_dtype(weights: "Weights", device: torch.device) -> torch.dtype:
    """Their own, but bfloat16, which is safe, for float16; for quantised weights float32 on CPUs, else bfloat16."""
    weight = weights["model.layers.0.mlp.down_proj.weight"]
    if isinstance(weight, torch.Tensor) and weight.dtype == torch.float32:
        return torch.float32
    if not isinstance(weight, torch.Tensor) and device.type == "cpu":
        return torch.float32
    slow = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.float32 if slow else torch.bfloat16
