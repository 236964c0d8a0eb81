"""Earlier occurrences of a sequence's end, beside a naive search."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.speculative import SEPARATOR, Match, NgramIndex

SMALL: dict[str, Any] = {"orders": (4, 2, 1), "cap": 6}

texts = st.lists(st.integers(0, 2), max_size=80)


def indexed(tokens: Sequence[int], max_length: int = 4096, **options: Any) -> NgramIndex:
    index = NgramIndex(max_length, **options)
    index.extend(tokens)
    return index


def common(text: Sequence[int], position: int, suffix: Sequence[int], cap: int) -> int:
    """How many tokens that end at the position equal the last of the suffix."""
    length = 0
    while length < min(cap, position + 1, len(suffix)) and text[position - length] == suffix[-1 - length] >= 0:
        length += 1
    return length


def bucket(ngram: Sequence[int], bits: int) -> int:
    total = sum(token * 0x9E3779B1 ** (distance + 1) for distance, token in enumerate(reversed(ngram)))
    return total % 2**32 >> (32 - bits)


def naive(
    text: Sequence[int], suffix: Sequence[int], before: int, *, orders: Sequence[int], cap: int,
    chain: int | None = None, bits: int = 12,
) -> list[Match]:  # fmt: skip
    """All matches that end before a position; or of each order those among the ``chain`` latest of its bucket."""
    found = []
    for order, longer in zip(orders, (cap + 1, *orders)):
        if len(suffix) < order:
            continue
        ends = list(range(before - 1, order - 2, -1))
        if chain is not None:
            wanted = bucket(suffix[-order:], bits)
            ends = [end for end in ends if bucket(text[end - order + 1 : end + 1], bits) == wanted][:chain]
        lengths = {end: common(text, end, suffix, cap) for end in ends}
        found += [Match(length, end) for end, length in lengths.items() if order <= length < longer]
    return sorted(found, key=lambda match: (-match.length, -match.position))


@given(texts)
def test_all_earlier_occurrences_are_found_where_chains_are_long_enough(text: list[int]) -> None:
    matches = indexed(text, chain=len(text) + 1, **SMALL).matches()
    assert matches == naive(text, text, len(text) - 1, **SMALL)
    longest = max((common(text, end, text, 6) for end in range(len(text) - 1)), default=0)
    assert (matches[0].length if matches else 0) == longest


@given(texts, st.integers(1, 5), st.integers(0, 12))
def test_a_chain_gives_the_latest_of_its_bucket(text: list[int], chain: int, bits: int) -> None:
    bits = max(bits, (len(text) - 1).bit_length() if text else 0)
    index = indexed(text, 2**bits, chain=chain, **SMALL)
    assert index.matches() == naive(text, text, len(text) - 1, chain=chain, bits=bits, **SMALL)
    for limit in range(4):
        assert index.matches(limit=limit) == index.matches()[:limit]


@given(texts, st.lists(st.integers(0, 2), max_size=10))
def test_a_suffix_that_is_not_in_the_index_is_looked_up_in_all_of_it(text: list[int], suffix: list[int]) -> None:
    assert indexed(text, chain=99, **SMALL).matches(suffix) == naive(text, suffix, len(text), **SMALL)


@given(texts, st.data())
def test_tokens_may_come_in_any_pieces(text: list[int], data: st.DataObject) -> None:
    whole, pieces = indexed(text * 3), NgramIndex(4096)
    rest = text * 3
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        pieces.extend(rest[:count])
        rest = rest[count:]
    assert_equal(whole, pieces)


@given(texts, st.integers(0, 80), texts)
def test_truncating_leaves_no_trace(text: list[int], length: int, other: list[int]) -> None:
    """Faults, 22: what a cancelled or corrected run left behind must not steer what comes after."""
    length = min(length, len(text))
    index = indexed(text)
    index.truncate(length)
    assert_equal(index, indexed(text[:length]))
    index.extend(other)
    assert_equal(index, indexed(text[:length] + other))
    assert index.matches() == indexed(text[:length] + other).matches()


def assert_equal(a: NgramIndex, b: NgramIndex) -> None:
    assert len(a) == len(b)
    assert np.array_equal(a.tokens[: len(a)], b.tokens[: len(b)])
    assert np.array_equal(a.heads, b.heads)
    assert np.array_equal(a.previous[:, : len(a)], b.previous[:, : len(b)])


@pytest.mark.parametrize("pieces", [1, 2_000])
def test_large_vocabularies_and_long_texts(pieces: int) -> None:
    rng = np.random.default_rng(0)
    passage = rng.integers(0, 2**31, 300)
    text = np.concatenate([rng.integers(0, 2**31, 1_000), passage, rng.integers(0, 2**31, 700), passage[:200]])
    index = NgramIndex(131_072)
    for piece in np.array_split(text, pieces):
        index.extend(piece)
    assert index.matches() == [Match(32, 1_199)]
    assert index.continuation(1_199, 100) == passage[200:].tolist()


def test_the_end_is_not_its_own_match() -> None:
    assert indexed([1, 2, 3, 4]).matches() == []
    assert indexed([1, 2]).matches([1, 2]) == [Match(2, 1)]


def test_short_texts_match_nothing() -> None:
    for text in ([], [1]):
        assert indexed(text).matches() == []
        assert indexed(text).matches([1]) == []
    assert indexed([1, 1, 1]).matches() == [Match(2, 1)]


def test_longer_matches_come_first_and_then_later_ones() -> None:
    text = [9, 1, 2, 3, 5, 8, 1, 2, 3, 6, 7, 2, 3, 4, 8, 1, 2, 3]
    assert indexed(text).matches() == [Match(4, 8), Match(3, 3), Match(2, 12)]


def test_a_continuation_overlaps_the_end_as_in_lz77() -> None:
    index = indexed([5, 1, 2, 1, 2])
    assert index.matches() == [Match(2, 2)]
    assert index.continuation(2, 5) == [1, 2]
    assert index.continuation(2, 5, overlap=True) == [1, 2, 1, 2, 1]
    assert index.continuation(4, 5, overlap=True) == []


def test_nothing_reaches_over_a_separator() -> None:
    corpus = NgramIndex.corpus([[1, 2, 3], [4, 5, 1, 2], [], [7, 1, 2, 6]])
    assert corpus.matches([3, 4]) == []
    assert corpus.matches([1, SEPARATOR]) == []
    assert corpus.matches([2, SEPARATOR, 1, 2]) == [Match(2, 12), Match(2, 7), Match(2, 1)]
    assert [corpus.continuation(match.position, 3) for match in corpus.matches([1, 2])] == [[6], [], [3]]
    assert indexed([1, 2, SEPARATOR, 3, 1, 2, SEPARATOR]).matches() == []
    assert len(NgramIndex.corpus([])) == 0


def test_looking_up_changes_nothing() -> None:
    corpus = NgramIndex.corpus([[1, 2, 3], [1, 2, 4]])
    before = corpus.heads.copy(), corpus.previous.copy()
    corpus.matches([1, 2])
    assert np.array_equal(before[0], corpus.heads)
    assert np.array_equal(before[1], corpus.previous)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("max_length", {"max_length": 0}),
        ("max_length", {"max_length": 2**31}),
        ("orders", {"orders": ()}),
        ("orders", {"orders": (2, 4)}),
        ("orders", {"orders": (2, 0)}),
        ("chain", {"chain": 0}),
        ("cap", {"cap": 7}),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=name):
        NgramIndex(**{"max_length": 8, **options})


def test_lengths_are_checked() -> None:
    index = indexed([1, 2, 3], max_length=4)
    with pytest.raises(ValueError, match="4 tokens, not 5"):
        index.extend([1, 2])
    assert len(index) == 3
    for length in (-1, 4):
        with pytest.raises(ValueError, match="0 to 3"):
            index.truncate(length)
    index.extend([])
    index.truncate(0)
    assert index.tail(3) == []
