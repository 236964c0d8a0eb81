"""Verification: from samples to the accepted path."""

from random import Random

import pytest
import torch
from torch import Tensor
from trees import path, random_tree

from freewheel.engine.stopping import cut
from freewheel.request import FinishReason
from freewheel.speculative import DraftTree, TreeBatch, Walk, batch_trees, walk, walk_batch


def naive_walk(tree: DraftTree, sampled: list[int]) -> list[int]:
    """The emitted tokens: those of the longest path on which every token is what its parent's row sampled."""
    best: list[int] = []
    for node in range(len(tree.tokens)):
        nodes, at = [], node
        while at >= 0:
            nodes.append(at)
            at = tree.parents[at]
        if all(tree.tokens[at] == sampled[tree.parents[at] + 1] for at in nodes) and len(nodes) > len(best):
            best = nodes[::-1]
    last = best[-1] + 1 if best else 0
    return [*(tree.tokens[node] for node in best), sampled[last]]


def cases(count: int) -> tuple[list[DraftTree], list[list[int]]]:
    random = Random(count)
    trees = [random_tree(random, random.choice([2, 8, 20, 63]), 3 + 20 * (n % 2)) for n in range(count)]
    trees += [DraftTree(), DraftTree((1,) * 63, tuple(range(-1, 62)))]
    sampled = [[random.randrange(3) for _ in range(tree.rows)] for tree in trees]
    sampled[-1] = [1] * 64
    return trees, sampled


def test_the_walk_follows_the_samples() -> None:
    for tree, sampled in zip(*cases(200)):
        rows, tokens = walk(tree, sampled)
        assert tokens == naive_walk(tree, sampled)
        assert len(rows) == len(tokens)
        assert path(tree, rows[-1] - 1) == tokens[:-1]


def test_a_batch_of_walks_equals_each_walk() -> None:
    trees, sampled = cases(200)
    padded = torch.tensor([[*row, *[Random(0).randrange(3)] * (64 - len(row))] for row in sampled])
    found = walk_batch(batch_trees(trees, 64), padded)
    assert found.counts.max() == 64
    for tree, samples, rows, tokens, count in zip(trees, sampled, *map(Tensor.tolist, found)):
        assert Walk(rows[:count], tokens[:count]) == walk(tree, samples)
        assert rows[count:] == tokens[count:] == [-1] * (64 - count)


def test_a_batch_of_walks_takes_narrow_integers() -> None:
    trees, sampled = cases(20)
    batch = batch_trees(trees, 64)
    padded = torch.tensor([[*row, *[0] * (64 - len(row))] for row in sampled])
    narrow = walk_batch(TreeBatch(*(part.int() for part in batch)), padded.int())
    for a, b in zip(narrow, walk_batch(batch, padded)):
        assert torch.equal(a, b)


def test_accepted_rows_need_not_be_neighbours() -> None:
    """Faults, 24: root, its second child, that one's third child; rows come in path order."""
    tree = DraftTree((10, 11, 12, 20, 21, 22, 23, 30), (-1, -1, -1, 1, 1, 1, 0, 5))
    assert walk(tree, [11, 0, 22, 0, 0, 0, 99, 0, 0]) == Walk([0, 2, 6], [11, 22, 99])
    assert walk(tree, [11, 0, 22, 0, 0, 0, 30, 0, 7]) == Walk([0, 2, 6, 8], [11, 22, 30, 7])
    assert walk(tree, [10, 23, 0, 0, 0, 0, 0, 5, 0]) == Walk([0, 1, 7], [10, 23, 5])
    found = walk_batch(batch_trees([tree, DraftTree()], 9), torch.tensor([[11, 0, 22, 0, 0, 0, 99, 0, 0], [5] * 9]))
    assert found.rows[:, :4].tolist() == [[0, 2, 6, -1], [0, -1, -1, -1]]
    assert found.tokens[:, :4].tolist() == [[11, 22, 99, -1], [5, -1, -1, -1]]


def test_without_a_draft_there_is_one_plain_token() -> None:
    assert walk(DraftTree(), [5]) == Walk([0], [5])


def test_a_row_without_a_token_ends_the_walk_and_is_seen() -> None:
    tree = DraftTree((4, 5), (-1, 0))
    assert walk(tree, [4, -1, 6]) == Walk([0, 1], [4, -1])
    found = walk_batch(batch_trees([tree], 3), torch.tensor([[4, -1, 6]]))
    assert found.rows.tolist() == [[0, 1, -1]]
    assert found.counts.tolist() == [2]


def test_every_row_needs_a_sample() -> None:
    for sampled in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="2 samples"):
            walk(DraftTree((1,), (-1,)), sampled)


@pytest.mark.parametrize("stop_at", range(1, 8))
@pytest.mark.parametrize("cap", range(1, 8))
def test_a_run_is_cut_where_the_first_of_its_ends_is(stop_at: int, cap: int) -> None:
    """Faults, 18: six tokens in one step, a stop among them, and the length's limit: as if they came one by one."""
    sampled = [10, 11, 12, 13, 14, 15]
    tree = DraftTree(tuple(sampled[:-1]), tuple(range(-1, 4)))
    stops = {9 + stop_at: None}
    rows, tokens = walk(tree, sampled)
    kept, reason = cut(tokens, stops, cap)
    one_by_one, end = 0, None
    while end is None and one_by_one < len(tokens):
        _, end = cut(tokens[one_by_one : one_by_one + 1], stops, cap - one_by_one)
        one_by_one += 1
    assert (kept, reason) == (one_by_one, end)
    assert reason is not FinishReason.LENGTH or stop_at > cap
    assert rows[:kept] == list(range(kept))
