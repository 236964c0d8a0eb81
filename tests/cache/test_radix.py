"""The prefix tree: what is matched, shared, taken over, kept and evicted."""

import random

import pytest

from freewheel.cache.radix import Node, PrefixCache

SIZE = 4


def fill(cache: PrefixCache, tokens: list[int]) -> tuple[Node, list[int]]:
    """A sequence that computed all of ``tokens`` by itself."""
    pages = cache.allocate(-(-len(tokens) // SIZE))
    node, _ = cache.advance(cache.root, tokens, pages, computed=len(tokens), limit=0)
    return node, pages


def test_only_full_pages_match_and_only_within_the_limit() -> None:
    cache = PrefixCache(8, SIZE)
    tokens = list(range(11))
    _, pages = fill(cache, tokens)
    assert cache.path(cache.match(tokens, limit=11)) == pages[:2]
    assert cache.match(tokens, limit=8).depth == 2
    assert cache.match(tokens, limit=7).depth == 1
    assert cache.match([0, 1, 2, 9, 4], limit=5).depth == 0
    assert cache.match([*range(4), 9, 9, 9, 9], limit=8).depth == 1
    cache.check([pages])


def test_an_unfinished_sequence_shares_its_pages() -> None:
    cache = PrefixCache(8, SIZE)
    _, first = fill(cache, list(range(8)))
    second = cache.path(cache.match(list(range(9)), limit=8))
    cache.retain(second)
    assert second == first
    cache.check([first, second])
    cache.release(first)
    cache.check([second])
    assert cache.pages.idle == 0


def test_a_duplicate_is_replaced_before_it_is_freed() -> None:
    cache = PrefixCache(8, SIZE)
    tokens = list(range(8))
    _, first = fill(cache, tokens)
    second = cache.allocate(2)
    node, replaced = cache.advance(cache.root, tokens, second, computed=8, limit=0)
    assert second == first
    assert replaced == [0, 1]
    assert node.depth == 2
    cache.check([first, second])
    assert cache.pages.free == 6


def test_a_running_sequence_takes_over_what_another_one_computed_meanwhile() -> None:
    cache = PrefixCache(8, SIZE)
    tokens = list(range(13))
    late = cache.allocate(4)
    node, replaced = cache.advance(cache.root, tokens, late, computed=2, limit=12)
    assert (node, replaced) == (cache.root, [])
    _, early = fill(cache, [*tokens[:8], 99])
    node, replaced = cache.advance(node, tokens, late, computed=2, limit=12)
    assert late[:2] == early[:2]
    assert node.depth == 2
    cache.check([early, late])


def test_the_limit_holds_back_a_takeover() -> None:
    cache = PrefixCache(8, SIZE)
    tokens = list(range(8))
    _, early = fill(cache, tokens)
    late = cache.allocate(2)
    node, replaced = cache.advance(cache.root, tokens, late, computed=0, limit=7)
    assert (node.depth, replaced) == (1, [0])
    cache.check([early, late])


def test_the_least_recently_used_end_goes_first_and_shared_beginnings_last() -> None:
    cache = PrefixCache(6, SIZE)
    base = [0, 1, 2, 3]
    _, old = fill(cache, [*base, 4, 5, 6, 7])
    cache.release(old)
    young = cache.path(cache.match(base, limit=4)) + cache.allocate(1)
    cache.retain(young[:1])
    cache.advance(cache.match(base, 4), [*base, 8, 8, 8, 8], young, computed=8, limit=0)
    cache.release(young)
    cache.check([])
    taken = cache.allocate(4)  # three are free: the older branch has to go
    assert cache.match([*base, 4, 5, 6, 7], 8).depth == 1
    assert cache.match([*base, 8, 8, 8, 8], 8).depth == 2
    cache.check([taken])
    taken += cache.allocate(1)
    assert cache.match([*base, 8, 8, 8, 8], 8).depth == 1
    taken += cache.allocate(1)
    assert cache.match(base, 4).depth == 0
    cache.check([taken])


def test_pages_in_use_are_never_evicted() -> None:
    cache = PrefixCache(4, SIZE)
    _, pages = fill(cache, list(range(12)))
    assert cache.available == 1
    with pytest.raises(RuntimeError):
        cache.allocate(2)
    assert cache.match(list(range(12)), 12).depth == 3
    cache.check([pages])


@pytest.mark.parametrize("seed", range(20))
def test_random_life_keeps_every_invariant(seed: int) -> None:
    """Sequences over a tiny alphabet join, advance and leave; contents are modelled beside the tree."""
    rng = random.Random(seed)
    cache = PrefixCache(12, SIZE)
    written: dict[int, tuple[int, ...]] = {}  # page -> the whole beginning that it stands for
    live: list[dict] = []
    for _ in range(300):
        if rng.random() < 0.4:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
            node = cache.match(tokens, len(tokens) - 1)
            shared = cache.path(node)
            for index, page in enumerate(shared):
                assert written[page] == tuple(tokens[: (index + 1) * SIZE])
            idle = sum(cache.pages.is_idle(page) for page in shared)
            need = -(-len(tokens) // SIZE) - len(shared)
            if need + idle <= cache.available:
                cache.retain(shared)
                pages = shared + cache.allocate(need)
                live.append({"tokens": tokens, "node": node, "pages": pages, "computed": len(shared) * SIZE})
        elif live:
            sequence = rng.choice(live)
            tokens, pages = sequence["tokens"], sequence["pages"]
            if rng.random() < 0.3:
                cache.release(pages)
                live.remove(sequence)
            else:
                start = sequence["computed"]
                stop = min(len(tokens), start + rng.randint(0, 6))
                for index in range(start // SIZE, -(-stop // SIZE)):
                    written[pages[index]] = tuple(tokens[: (index + 1) * SIZE])
                limit = len(tokens) - 1
                node, _ = cache.advance(sequence["node"], tokens, pages, stop, limit)
                sequence |= {"node": node, "computed": max(stop, node.depth * SIZE)}
                for index in range(sequence["computed"] // SIZE):
                    assert written[pages[index]] == tuple(tokens[: (index + 1) * SIZE])
        cache.check([sequence["pages"] for sequence in live])
    for sequence in live:
        cache.release(sequence["pages"])
    cache.check([])
    assert cache.available == 12
