"""Draft trees: how guesses are merged, and what a tree's mask says about it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trees import parent_lists, path

from freewheel.speculative import (
    DraftTree,
    NgramIndex,
    ancestors,
    draft,
    links_from_ancestors,
    links_from_parents,
    parents_from_ancestors,
)

guesses = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12)


def leaves(tree: DraftTree) -> int:
    return len(tree.tokens) - len(set(tree.parents) - {-1})


def naive_merge(continuations: list[list[int]], max_nodes: int, max_depth: int, width: int) -> list[list[int]]:
    """The nodes' paths: each beginning of a guess that still fits, token by token."""
    kept: list[list[int]] = []
    for continuation in continuations:
        for length in range(1, min(len(continuation), max_depth) + 1):
            beginning = continuation[:length]
            if beginning in kept:
                continue
            extended = [*kept, beginning]
            inner = [one[:-1] for one in extended]
            if len(extended) > max_nodes or sum(one not in inner for one in extended) > width:
                break
            kept = extended
    return kept


@given(guesses, st.integers(0, 20), st.integers(0, 6), st.integers(1, 6))
def test_guesses_are_merged_best_first_as_far_as_there_is_room(
    continuations: list[list[int]], max_nodes: int, max_depth: int, width: int
) -> None:
    tree = DraftTree.merge(continuations, max_nodes, max_depth, width)
    assert [path(tree, node) for node in range(len(tree.tokens))] == naive_merge(
        continuations, max_nodes, max_depth, width
    )
    assert len(tree.tokens) <= max_nodes
    assert max(tree.depths, default=0) <= max_depth
    assert leaves(tree) <= width


def test_common_beginnings_are_one_path_and_siblings_come_by_rank() -> None:
    tree = DraftTree.merge([[1, 2, 3], [1, 4], [5], [1, 2, 3, 6]], 63, 8, 4)
    assert tree.tokens == (1, 2, 3, 4, 5, 6)
    assert tree.parents == (-1, 0, 1, 0, -1, 2)
    assert tree.depths == [1, 2, 3, 2, 1, 4]
    assert tree.links.first_child == [1, 2, 3, 6, -1, -1, -1]
    assert tree.links.next_sibling == [-1, 5, 4, -1, -1, -1, -1]
    assert tree.ancestors.tolist() == [1, 0b11, 0b111, 0b1111, 0b10011, 0b100001, 0b1001111]


def test_width_one_makes_a_chain() -> None:
    tree = DraftTree.merge([[1, 2], [1, 3, 4], [1, 2, 5]], 8, 8, 1)
    assert (tree.tokens, tree.parents) == ((1, 2, 5), (-1, 0, 1))


def test_masks_have_room_for_63_nodes() -> None:
    chain = DraftTree.merge([[7] * 99], 63, 99, 1)
    assert chain.rows == 64
    assert chain.ancestors[63] == -1
    assert links_from_ancestors(chain.ancestors) == chain.links
    with pytest.raises(ValueError, match="max_nodes"):
        DraftTree.merge([], 64, 8, 1)
    with pytest.raises(ValueError, match="row 64"):
        ancestors([-1] * 64)
    with pytest.raises(ValueError, match="1 to 64 rows"):
        links_from_ancestors([1] * 65)
    with pytest.raises(ValueError, match="1 to 64 rows"):
        links_from_ancestors([])


@given(parent_lists())
def test_links_come_from_the_mask_alone(parents: list[int]) -> None:
    masks = ancestors(parents)
    assert masks.dtype == np.int64
    assert parents_from_ancestors(masks) == parents
    links = links_from_parents(parents)
    assert links_from_ancestors(masks) == links
    assert links_from_ancestors(masks.tolist()) == links
    for row in range(len(masks)):
        seen = [other for other in range(64) if masks[row] >> other & 1]
        assert links.depths[row] == len(seen) - 1
        assert max(seen) == row
        children = [other + 1 for other, parent in enumerate(parents) if parent == row - 1]
        found = [links.first_child[row]]
        while found[-1] >= 0:
            found.append(links.next_sibling[found[-1]])
        assert found == [*children, -1]


@given(parent_lists(20))
def test_a_mask_hides_what_is_not_on_the_path_as_attention_reads_it(parents: list[int]) -> None:
    masks = torch.from_numpy(ancestors(parents))
    rows = torch.arange(len(masks))
    visible = (masks[:, None] >> rows) & 1 == 1
    for row in rows.tolist():
        on_path, at = {0}, row
        while at:
            on_path.add(at)
            at = parents[at - 1] + 1
        assert set(visible[row].nonzero().flatten().tolist()) == on_path


@pytest.mark.parametrize(
    ("masks", "row"),
    [
        ([0], 0),
        ([3], 0),
        ([-1], 0),
        ([1, 1], 1),
        ([1, 2], 1),
        ([1, 3, 6], 2),  # a parent without the root
        ([1, 3, 7, 13], 3),  # a parent of the first level without what it sees: row 2 sees row 1
        ([1, 3, 5, 15], 3),  # two parents
        ([1, 7, 7], 1),  # a later row
        ([1, 3, -1], 2),
    ],
)
def test_masks_that_no_tree_has_are_refused(masks: list[int], row: int) -> None:
    with pytest.raises(ValueError, match=f"row {row}:"):
        links_from_ancestors(masks)


@given(parent_lists(12).filter(len), st.data())
def test_a_wrong_bit_is_refused_or_makes_another_tree(parents: list[int], data: st.DataObject) -> None:
    masks = ancestors(parents)
    row, bit = data.draw(st.integers(0, len(parents))), data.draw(st.integers(0, 62))
    masks[row] ^= 1 << bit
    try:
        others = parents_from_ancestors(masks)
    except ValueError:
        return
    assert others != parents
    assert ancestors(others).tolist() == masks.tolist()


@pytest.mark.parametrize(("parents", "row"), [([0], 1), ([-2], 1), ([-1, 1], 2), ([-1, 0, 5], 3)])
def test_parents_must_come_first(parents: list[int], row: int) -> None:
    for derive in (links_from_parents, ancestors):
        with pytest.raises(ValueError, match=f"row {row}:"):
            derive(parents)


def extended(tokens: list[int]) -> NgramIndex:
    index = NgramIndex(64)
    index.extend(tokens)
    return index


def test_a_draft_is_what_followed_before() -> None:
    index = extended([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3])
    tree = draft(index, width=2, depth=3, nodes=8)
    assert tree is not None
    assert [path(tree, node) for node in range(6)] == [[5], [5, 8], [5, 8, 1], [4], [4, 9], [4, 9, 1]]
    chain = draft(index, width=1, depth=2, nodes=8)
    assert chain == DraftTree((5, 8), (-1, 0))
    assert draft(index, width=2, depth=3, nodes=1) == DraftTree((5,), (-1,))


def test_no_match_is_no_draft() -> None:
    assert draft(extended([1, 2, 3]), width=4, depth=4, nodes=8) is None
    assert draft(extended([1, 1, 1, 1]), width=4, depth=4, nodes=0) is None
    assert draft(extended([]), width=4, depth=4, nodes=8, corpus=extended([])) is None
    ends = NgramIndex.corpus([[7, 1, 2]])
    assert draft(extended([1, 2]), width=4, depth=4, nodes=8, corpus=ends) is None


def test_a_corpus_comes_after_own_matches_of_equal_length() -> None:
    corpus = NgramIndex.corpus([[9, 1, 2, 7], [8, 1, 2, 6]])
    index = extended([1, 2, 5, 0, 9, 1, 2])
    tree = draft(index, width=4, depth=1, nodes=8, corpus=corpus)
    assert tree is not None
    assert tree.tokens == (7, 5, 6)  # three tokens in the corpus, two of its own, two in the corpus
    assert tree.parents == (-1, -1, -1)


def test_the_end_of_a_corpus_is_not_that_of_the_sequence() -> None:
    assert draft(extended([7, 8]), width=1, depth=6, nodes=6, corpus=extended([7, 8, 1, 2])) == DraftTree(
        (1, 2), (-1, 0)
    )


def test_repetition_is_drafted_to_the_full_depth() -> None:
    tree = draft(extended([3, 4, 3, 4, 3, 4]), width=1, depth=7, nodes=7)
    assert tree is not None
    assert tree.tokens == (3, 4, 3, 4, 3, 4, 3)


def test_a_chain_has_no_branch() -> None:
    assert DraftTree().is_chain
    assert DraftTree((5, 6, 5), (-1, 0, 1)).is_chain
    assert not DraftTree((5, 6, 5), (-1, 0, 0)).is_chain
    assert not DraftTree((5, 6), (-1, -1)).is_chain
