"""How large the key-value cache gets, and what is refused with numbers."""

from typing import Any

import pytest
import torch

from freewheel.cache.pool import KVPool, PoolSize, available_memory, size_pool
from freewheel.config import EngineConfig

MIB = 1 << 20


def size(*, available: int = 1 << 30, context: int = 1024, **options: Any) -> PoolSize:
    config = EngineConfig(max_num_seqs=4, page_size=16, **options)
    return size_pool(config, context_length=context, bytes_per_token=1024, available=available)


def test_every_slot_gets_its_whole_context_when_memory_allows() -> None:
    assert size() == PoolSize(num_pages=4 * 64, max_model_len=1024)
    assert size(max_model_len=100) == PoolSize(num_pages=4 * 7, max_model_len=100)


def test_a_third_of_the_free_memory_is_the_most_by_default() -> None:
    assert size(available=6 * MIB) == PoolSize(num_pages=128, max_model_len=1024)


def test_an_open_context_shrinks_to_what_the_cache_holds() -> None:
    assert size(kv_cache_memory=MIB // 2) == PoolSize(num_pages=32, max_model_len=512)


def test_a_demanded_context_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"1024 tokens needs 0.00 GiB.*kv_cache_memory"):
        size(kv_cache_memory=MIB // 2, max_model_len=1024)
    with pytest.raises(ValueError, match="raise kv_cache_memory"):
        size(kv_cache_memory=1)


def test_impossible_demands_are_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len is 2048, but the model's context holds 1024"):
        size(max_model_len=2048)
    with pytest.raises(ValueError, match=r"kv_cache_memory asks for 2.00 GiB, 1.00 GiB are free"):
        size(kv_cache_memory=2 << 30)


def test_slots_that_do_not_fit_beside_the_cache_are_refused_with_numbers() -> None:
    config = EngineConfig(max_num_seqs=10**6, max_num_batched_tokens=10**6)
    sizes: dict[str, Any] = {"context_length": 1024, "bytes_per_token": 1024}
    with pytest.raises(
        ValueError, match=r"max_num_seqs: 1000000 slots for 1024 tokens need 8.11 GiB.* 6.67 GiB are free"
    ):
        size_pool(config, **sizes, available=10 << 30)
    assert size_pool(config, **sizes, available=20 << 30).max_model_len == 1024
    with pytest.raises(ValueError, match=r"need 46.2. GiB.* 13.33 GiB are free"):
        size_pool(config, **sizes, available=20 << 30, speculates=True)


def test_the_free_memory_of_this_machine_is_known() -> None:
    assert MIB < available_memory(torch.device("cpu")) < 1 << 50


def test_page_tables_are_written_from_an_entry_on() -> None:
    pool = KVPool(torch.zeros(1, 2, 1, 8, 4, 1), slots=2)
    pages = pool.page_table[1]
    pool.set_pages(1, 0, [5, 6])
    pool.set_pages(1, 2, [7])
    assert pool.page_table == [[], [5, 6, 7]]
    assert pool.written == {1: 0}
    pool.written.clear()
    pool.set_pages(1, 2, [4, 3])
    pool.set_pages(1, 1, [2])
    assert pool.page_table == [[], [5, 2]]
    assert pool.page_table[1] is pages
    assert pool.written == {1: 1}
    assert (pool.num_pages, pool.page_size) == (8, 4)


def test_cleared_pages_hold_nothing_of_their_last_holder_and_others_are_left() -> None:
    pool = KVPool(torch.full((3, 2, 2, 8, 4, 5), torch.nan), slots=2)
    pool.clear([6, 1])
    for layer in pool.layers:
        assert not layer[:, :, [1, 6]].any()
        assert layer[:, :, [0, 2, 3, 4, 5, 7]].isnan().all()


def test_pages_that_only_kernels_read_stay_as_they_are() -> None:
    pool = KVPool(torch.full((1, 2, 1, 8, 4, 5), torch.nan), slots=2, clears=False)
    pool.clear([6, 1])
    assert pool.layers[0].isnan().all()


def test_places_are_moved_at_once_and_cleared_in_all_layers() -> None:
    content = torch.randn(3, 2, 2, 8, 4, 5)
    pool = KVPool(content.clone(), slots=2)
    before, after = content.flatten(3, 4), torch.stack(pool.layers).flatten(3, 4)
    assert torch.equal(before, after)
    pool.move([9, 10, 31], [8, 9, 10])  # a target may be a source
    pool.clear_places([31, 0])
    after = torch.stack(pool.layers).flatten(3, 4)
    assert torch.equal(after[:, :, :, 8:11], before[:, :, :, [9, 10, 31]])
    assert not after[:, :, :, [0, 31]].any()
    untouched = [place for place in range(1, 31) if place not in (8, 9, 10)]
    assert torch.equal(after[:, :, :, untouched], before[:, :, :, untouched])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("page_size", -1),
        ("max_num_batched_tokens", 8),
        ("max_model_len", 0),
        ("kv_cache_memory", 1.5),
        ("enable_prefix_caching", "false"),
        ("enable_prefix_caching", 1),
        ("lookahead", -1),
        ("lookahead", True),
        ("draw", "argmax"),
        ("seed", "x"),
    ],
)
def test_a_wrong_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: value})
