"""Speculation by n-gram lookup, usable on its own: it needs torch and NumPy, and no engine.

index = NgramIndex(max_length=4096)
index.extend(prompt_ids)
tree = draft(index, width=2, depth=8, nodes=12) or DraftTree()
accepted = walk(tree, sampled)  # the token sampled at each row: the last token's, and one for each node of the tree
index.extend(accepted.tokens)
"""

from freewheel.speculative.budget import Acceptance, Budget, best_nodes, step_times
from freewheel.speculative.draft import draft
from freewheel.speculative.index import SEPARATOR, Match, NgramIndex
from freewheel.speculative.metrics import SpeculationMetrics
from freewheel.speculative.tree import (
    MAX_ROWS,
    DraftTree,
    Links,
    ancestors,
    links_from_ancestors,
    links_from_parents,
    parents_from_ancestors,
)
from freewheel.speculative.walk import TreeBatch, Walk, Walks, batch_trees, walk, walk_batch

__all__ = [
    "MAX_ROWS",
    "SEPARATOR",
    "Acceptance",
    "Budget",
    "DraftTree",
    "Links",
    "Match",
    "NgramIndex",
    "SpeculationMetrics",
    "TreeBatch",
    "Walk",
    "Walks",
    "ancestors",
    "batch_trees",
    "best_nodes",
    "draft",
    "links_from_ancestors",
    "links_from_parents",
    "parents_from_ancestors",
    "step_times",
    "walk",
    "walk_batch",
]
