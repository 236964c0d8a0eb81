"""An engine for a loaded model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from freewheel.cache.pool import KVPool, available_memory, size_pool
from freewheel.config import EngineConfig
from freewheel.engine.buckets import most_drawn
from freewheel.engine.corpus import load_corpus
from freewheel.engine.engine import Engine
from freewheel.engine.runner import Runner
from freewheel.grammar import Compiler
from freewheel.models.decoder import kv_bytes_per_token, kv_cache_shape
from freewheel.models.load import LoadedModel
from freewheel.sampling import Sampler
from freewheel.sampling.tables import most_bytes


def build_engine(
    model: LoadedModel, config: EngineConfig, runner: Callable[[Any, KVPool, Sampler], Runner] | None = None
) -> Engine:
    """Size and allocate the key-value cache, and put the engine together.

    Args:
        model: what it runs.
        config: its options.
        runner: makes what runs the steps; None: :func:`runner_for`.

    Raises:
        ValueError: the cache cannot be as the configuration asks, and the message gives the numbers; or the device has
            no kernels, or drafts nothing, but the configuration asks for it; or the corpus cannot be read.
    """
    spec, decoder = model.spec, model.decoder
    cuda, fused = decoder.device.type == "cuda", config.uses_kernels(decoder.device.type)
    if fused and not cuda:
        raise ValueError(f"fused must not be True on device {str(decoder.device)!r}: the kernels are for CUDA devices")
    if config.graphs and not cuda:
        raise ValueError(f"graphs must not be True on device {str(decoder.device)!r}: only CUDA devices have them")
    if config.draft_corpus is not None and fused:
        raise ValueError(
            f"draft_corpus must be None on device {str(decoder.device)!r}, which drafts from no corpus yet"
        )
    available = available_memory(decoder.device)
    if fused:
        from freewheel.engine.device_runner import working_memory  # only here: these import Triton
        from freewheel.speculative.device import MOST_WIDTH

        if config.speculation and config.draft_width > MOST_WIDTH:
            raise ValueError(f"draft_width must be at most {MOST_WIDTH} on CUDA devices, not {config.draft_width}")
        beside = working_memory(decoder, config) + most_bytes(config.max_num_seqs, most_drawn(config), spec.vocab_size)
        available = max(0, available - beside)
    size = size_pool(
        config,
        context_length=spec.max_positions,
        bytes_per_token=kv_bytes_per_token(spec, decoder.dtype),
        available=available,
        share=0.9 if cuda else 1 / 3,
        speculates=config.speculation,
    )
    shape = kv_cache_shape(spec, size.num_pages, config.page_size)
    # Not initialised: a page takes memory when it is first used.
    storage = torch.empty(spec.num_layers, *shape, dtype=decoder.dtype, device=decoder.device)
    return Engine(
        decoder,
        KVPool(storage, slots=config.max_num_seqs, clears=not fused),
        config,
        max_model_len=size.max_model_len,
        vocab_size=spec.vocab_size,
        valid_vocab_size=model.tokenizer.vocab_size,
        eos_token_ids=model.tokenizer.eos_token_ids,
        corpus=None if config.draft_corpus is None else load_corpus(config.draft_corpus, model.tokenizer),
        runner=runner or runner_for(config, decoder.device.type),
        grammars=Compiler(model.tokenizer, spec.vocab_size),
    )


def runner_for(config: EngineConfig, device: str) -> Callable[[Any, KVPool, Sampler], Runner]:
    """What runs the steps on this type of device."""
    if not config.uses_kernels(device):
        return Runner
    from freewheel.engine.device_runner import DeviceRunner  # only here: it imports Triton

    drafts = {}
    if config.speculation:
        nodes = config.draft_nodes
        drafts = {
            "draft_nodes": nodes,
            "draft_width": config.draft_width,
            "draft_depth": min(config.draft_depth, nodes),
        }
    return partial(DeviceRunner, graphs=config.graphs, most_rows=config.most_rows(device), **drafts)


def prepare(engine: Engine) -> None:
    """Do before the first request what would hold it up, with a progress bar where there is a terminal."""
    if steps := engine.preparations():
        from tqdm import tqdm

        with tqdm(steps, desc="Preparing", dynamic_ncols=True, disable=None) as bar:
            for name, run in bar:
                bar.set_postfix_str(name)
                run()
