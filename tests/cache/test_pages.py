"""The page allocator: every page is free, held or idle, and the counts say which."""

import pytest

from freewheel.cache.pages import PageAllocator


def test_low_pages_come_first_and_released_ones_come_back() -> None:
    pages = PageAllocator(4)
    first = pages.allocate(2)
    assert first == [0, 1]
    pages.release(first)
    assert pages.allocate(4) == [0, 1, 2, 3]
    pages.check([[0, 1, 2, 3]])


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(2)
    with pytest.raises(RuntimeError, match="2 pages asked of the cache, 1 are free"):
        pages.allocate(2)
    pages.check([held])


def test_a_shared_page_is_free_after_its_last_holder_left() -> None:
    pages = PageAllocator(2)
    held = pages.allocate(1)
    pages.retain(held)
    pages.check([held, held])
    pages.release(held)
    assert pages.free == 1
    pages.release(held)
    assert pages.free == 2


def test_a_kept_page_is_idle_until_it_is_shared_again_or_evicted() -> None:
    pages = PageAllocator(2)
    (page,) = pages.allocate(1)
    pages.keep(page)
    pages.release([page])
    assert (pages.free, pages.idle) == (1, 1)
    pages.retain([page])
    assert pages.idle == 0
    pages.release([page])
    assert pages.evict() == page
    assert (pages.free, pages.idle) == (2, 0)
    pages.check([])


def test_continuations_are_evicted_before_what_they_continue() -> None:
    pages = PageAllocator(3)
    path = pages.allocate(3)
    for page in path:
        pages.keep(page)
    pages.release(path)
    assert [pages.evict() for _ in path] == path[::-1]


@pytest.mark.parametrize(
    ("holders", "message"), [([[0]], "reference counts"), ([[0, 1, 1]], "reference counts"), ([], "reference counts")]
)
def test_check_finds_wrong_page_tables(holders: list[list[int]], message: str) -> None:
    pages = PageAllocator(3)
    pages.allocate(2)
    with pytest.raises(AssertionError, match=message):
        pages.check(holders)


def test_check_finds_a_page_that_is_both_free_and_referenced() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(1)
    pages._free.append(held[0])
    with pytest.raises(AssertionError, match="two states"):
        pages.check([held])
