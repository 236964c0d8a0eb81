"""Verification: which drafted tokens are what sampling gives.

An n-gram draft is deterministic, so it needs no rejection sampler. A token is sampled at every row, with the noise of
its absolute position, and the walk goes from the root to the child that equals the sample, as long as there is one.
Every emitted token is then a plain sample: the same as without a draft, whatever was drafted.

A run of emitted tokens can go beyond the end of the sequence. Whoever owns the rules of ending cuts it, as any run of
new tokens: in the engine ``freewheel.engine.stopping.cut``. The first ``kept`` rows of the walk are then those that
count.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freewheel.speculative.tree import DraftTree


class Walk(NamedTuple):
    """The accepted path.

    Attributes:
        rows: the root and the rows that were accepted, in path order: those whose keys and values are kept.
        tokens: what was sampled at each of these rows: the accepted tokens, and one more, which was not drafted.
    """

    rows: list[int]
    tokens: list[int]


class Walks(NamedTuple):
    """The accepted paths of a batch; row b holds :class:`Walk` b.

    Attributes:
        rows, tokens: int64 [batch, rows], -1 after the end.
        counts: int64 [batch], how many there are, 1 or more.
    """

    rows: Tensor
    tokens: Tensor
    counts: Tensor


class TreeBatch(NamedTuple):
    """Trees of different shapes, padded; see :class:`~freewheel.speculative.tree.Links`.

    All are int32 or int64 [batch, rows].

    Attributes:
        first_child, next_sibling: -1 for none, and where there is no row.
        tokens: of each row; those of the root and where there is no row are not looked at.
    """

    first_child: Tensor
    next_sibling: Tensor
    tokens: Tensor


def walk(tree: DraftTree, sampled: Sequence[int]) -> Walk:
    """Verify a draft.

    Args:
        tree: the draft. Of siblings with the same token, which :meth:`DraftTree.merge` never makes, the first counts.
        sampled: the token drawn at each row. -1, where nothing could be drawn, equals no child: it ends the walk and is
            emitted, so that the sequence's owner sees it.

    Raises:
        ValueError: not one sample for each row.
    """
    if len(sampled) != tree.rows:
        raise ValueError(f"there must be {tree.rows} samples, one for each row, not {len(sampled)}")
    first_child, next_sibling, _ = tree.links
    rows, child = [0], first_child[0]
    while child >= 0:
        if tree.tokens[child - 1] == sampled[rows[-1]]:
            rows.append(child)
            child = first_child[child]
        else:
            child = next_sibling[child]
    return Walk(rows, [sampled[row] for row in rows])


def batch_trees(trees: Sequence[DraftTree], rows: int, device: torch.device | str = "cpu") -> TreeBatch:
    """Pad trees to ``rows`` each."""

    def padded(lists: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([[*row, *[-1] * (rows - len(row))] for row in lists], dtype=torch.int64, device=device)

    return TreeBatch(
        padded([tree.links.first_child for tree in trees]),
        padded([tree.links.next_sibling for tree in trees]),
        padded([(-1, *tree.tokens) for tree in trees]),
    )


def walk_batch(trees: TreeBatch, sampled: Tensor) -> Walks:
    """The same for a batch, on its device and without waiting for it.

    Each turn looks at one row and goes to its child or sibling. No row is met twice, so ``rows - 1`` turns are enough.

    Args:
        trees: of the batch.
        sampled: int32 or int64 [batch, rows], the token drawn at each row.
    """
    first_child, next_sibling, tokens = (part.long() for part in trees)
    batch, rows = tokens.shape
    path = torch.full((batch, rows), -1, dtype=torch.int64, device=tokens.device)
    path[:, 0] = 0
    row, counts = torch.zeros_like(path[:, :1]), torch.ones_like(path[:, :1])
    child = first_child[:, :1]
    for _ in range(rows - 1):
        at = child.clamp(min=0)  # the root has no sibling, so a walk that has ended stays ended
        hit = (child >= 0) & (tokens.gather(1, at) == sampled.gather(1, row))
        row = torch.where(hit, at, row)
        path.scatter_(1, counts, torch.where(hit, at, -1))
        counts = counts + hit
        child = torch.where(hit, first_child.gather(1, at), next_sibling.gather(1, at))
    drawn = sampled.long().gather(1, path.clamp(min=0))
    return Walks(path, torch.where(path >= 0, drawn, -1), counts[:, 0])
