"""An engine for a loaded model."""

from collections.abc import Callable
from typing import Any

import torch

from freewheel.cache.pool import KVPool, available_memory, size_pool
from freewheel.config import EngineConfig
from freewheel.engine.engine import Engine
from freewheel.engine.runner import Runner
from freewheel.models.decoder import kv_bytes_per_token, kv_cache_shape
from freewheel.models.load import LoadedModel
from freewheel.sampling import Sampler


def build_engine(model: LoadedModel, config: EngineConfig) -> Engine:
    """Size and allocate the key-value cache, and put the engine together.

    Raises:
        ValueError: the cache cannot be as the configuration asks; the message gives the numbers.
    """
    spec, decoder = model.spec, model.decoder
    size = size_pool(
        config,
        context_length=spec.max_positions,
        bytes_per_token=kv_bytes_per_token(spec, decoder.dtype),
        available=available_memory(decoder.device),
    )
    shape = kv_cache_shape(spec, size.num_pages, config.page_size)
    # Not initialised: a page takes memory when it is first used.
    storage = torch.empty(spec.num_layers, *shape, dtype=decoder.dtype, device=decoder.device)
    return Engine(
        decoder,
        KVPool(storage, slots=config.max_num_seqs),
        config,
        max_model_len=size.max_model_len,
        vocab_size=spec.vocab_size,
        valid_vocab_size=model.tokenizer.vocab_size,
        eos_token_ids=model.tokenizer.eos_token_ids,
        runner=runner_for(decoder.device.type),
    )


def runner_for(device: str) -> Callable[[Any, KVPool, Sampler], Runner]:
    """What runs the steps on this type of device."""
    if device != "cuda":
        return Runner
    from freewheel.engine.device_runner import DeviceRunner  # only here: it imports Triton

    return DeviceRunner
