"""The memory of the key-value cache: its size, its tensors, and the page table of each slot."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from freewheel.config import EngineConfig

_GIB = 1 << 30

# Beside its pages a slot takes a token id for each position, and about this much for its other numbers and lists.
_SLOT_BYTES = 512
_TOKEN_ID_BYTES = 8
_NGRAM_BYTES = 40  # a token, where drafts are looked up; at most


class PoolSize(NamedTuple):
    """How many pages there are, and the longest sequence that they allow."""

    num_pages: int
    max_model_len: int


def size_pool(
    config: EngineConfig,
    *,
    context_length: int,
    bytes_per_token: int,
    available: int,
    share: float = 1 / 3,
    speculates: bool = False,
) -> PoolSize:
    """Choose the number of pages, so that at least one sequence of the greatest length fits, and all slots beside them.

    Args:
        config: ``max_model_len``, ``max_num_seqs``, ``page_size`` and ``kv_cache_memory`` decide.
        context_length: tokens that the model can attend to.
        bytes_per_token: keys and values of all layers.
        available: bytes that are free.
        share: how much of them the cache may take where the configuration does not say.
        speculates: whether each slot has an index of its tokens beside them.

    Raises:
        ValueError: the request cannot be met; the message gives the numbers.
    """
    length = context_length if config.max_model_len is None else config.max_model_len
    if length > context_length:
        raise ValueError(f"max_model_len is {length}, but the model's context holds {context_length} tokens")
    page_bytes = config.page_size * bytes_per_token
    pages_each = -(-length // config.page_size)
    if config.kv_cache_memory is not None:
        memory, source = config.kv_cache_memory, "kv_cache_memory"
        if memory > available:
            raise ValueError(f"kv_cache_memory asks for {_gib(memory)}, {_gib(available)} are free")
    else:
        memory = min(config.max_num_seqs * pages_each * page_bytes, int(available * share))
        source = f"{share:.0%} of the free memory"
    num_pages = memory // page_bytes
    if num_pages < pages_each:
        if config.max_model_len is not None or num_pages == 0:
            raise ValueError(
                f"the key-value cache of one sequence of {length} tokens needs {_gib(pages_each * page_bytes)}, "
                f"{source} is {_gib(memory)}: lower max_model_len or raise kv_cache_memory"
            )
        length = num_pages * config.page_size
    token_bytes = _TOKEN_ID_BYTES + speculates * _NGRAM_BYTES
    slot_memory = config.max_num_seqs * (_SLOT_BYTES + length * token_bytes)
    left = available - num_pages * page_bytes
    if slot_memory > left:
        raise ValueError(
            f"max_num_seqs: {config.max_num_seqs} slots for {length} tokens need {_gib(slot_memory)}, beside the "
            f"key-value cache {_gib(left)} are free: lower max_num_seqs or max_model_len"
        )
    return PoolSize(num_pages, length)


def available_memory(device: torch.device) -> int:
    """Free bytes on a device; for the CPU what the kernel can give without swapping, within the control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or one without a limit
        return free
    cached_files = int(statistics["active_file"]) + int(statistics["inactive_file"])
    return max(0, min(free, limit - used + cached_files))


class KVPool:
    """Keys and values of all layers in pages, and which pages each slot has.

    Args:
        storage: [layers, 2 (keys, values), kv_heads, num_pages, page_size, head_dim]; need not be initialised.
        slots: sequences that can run at once.
        clears: whether pages are zeroed for a new holder; False where only kernels read them.

    Attributes:
        layers: each layer's part of the storage.
        device: where the storage is.
        page_table: for each slot its page numbers in position order, on the host, where steps are planned. A slot keeps
            its list, which the sequence that has the slot holds as its own.
        written: slots whose pages were written, and from which entry on. Whoever keeps a copy elsewhere empties it.
    """

    def __init__(self, storage: Tensor, *, slots: int, clears: bool = True) -> None:
        self._storage = storage
        self._clears = clears
        self.layers = list(storage)
        self.num_pages, self.page_size = storage.shape[3:5]
        self.device = storage.device
        self.page_table: list[list[int]] = [[] for _ in range(slots)]
        self.written: dict[int, int] = {}

    @property
    def planes(self) -> Tensor:
        """[planes, num_pages, page_size, head_dim]: of each layer the keys of each head, then the values of each."""
        return self._storage.flatten(0, 2)

    def set_pages(self, slot: int, first: int, pages: Iterable[int]) -> None:
        """Write a slot's pages from entry ``first`` to the last."""
        self.page_table[slot][first:] = pages
        if first < self.written.setdefault(slot, first):
            self.written[slot] = first

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy keys and values from places to others, all at once; a place is ``page * page_size + offset``."""
        places = self._storage.view(-1, self.num_pages * self.page_size, self._storage.shape[-1])
        kept = places.index_select(1, torch.tensor(sources, device=self.device))
        places.index_copy_(1, torch.tensor(targets, device=self.device), kept)

    def clear_places(self, places: Sequence[int]) -> None:
        """Zero single places; see :meth:`clear`."""
        flat = self._storage.view(-1, self.num_pages * self.page_size, self._storage.shape[-1])
        flat.index_fill_(1, torch.tensor(places, device=self.device), 0)

    def is_finite(self, pages: Sequence[int]) -> bool:
        """Whether all in these pages is finite. False if one would have to wait for a device to know."""
        return self.device.type == "cpu" and all(bool(self._storage[:, :, :, page].isfinite().all()) for page in pages)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages for a new holder.

        Torch's attention may read the rest of a last page with weight zero, and zero times a NaN left there would be
        NaN. Kernels read no such place.
        """
        if not self._clears:
            return
        for page in pages:  # on the CPU several times faster than one indexed fill
            self._storage[:, :, :, page].zero_()


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
