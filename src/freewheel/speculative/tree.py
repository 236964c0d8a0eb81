"""A draft tree and its links.

Rows of a verification step: row 0 is the root, the sequence's last known token, and row i + 1 is node i. A row's token
stands at the root's position plus the row's depth; what is sampled there is the token of the position after.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

MAX_ROWS = 64  # bits of an ancestor mask


class Links(NamedTuple):
    """How to go through a tree; an entry for each row, the root first, and -1 for none.

    Attributes:
        first_child, next_sibling: rows. Siblings come in the order of their rows.
        depths: 0 for the root.
    """

    first_child: list[int]
    next_sibling: list[int]
    depths: list[int]


@dataclass(frozen=True)
class DraftTree:
    """Tokens that may follow, as a trie: equal beginnings of several guesses are one path.

    Attributes:
        tokens: of each node.
        parents: the node that each follows, an earlier one; -1 for the root.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def merge(cls, continuations: Iterable[Sequence[int]], max_nodes: int, max_depth: int, width: int) -> "DraftTree":
        """Merge guesses, the best first, as far as there is room.

        A continuation is followed along the tree, and what is left of it added there: first come, first served. Nodes
        are numbered as they are added, so siblings stand in the order of the continuations that brought them.

        Args:
            continuations: tokens that may follow the root.
            max_nodes: most nodes, at most 63.
            max_depth: what is deeper is cut off.
            width: most leaves; 1 makes a chain. A continuation that would add one more ends where it would branch off.

        Raises:
            ValueError: ``max_nodes`` exceeds what ancestor masks can tell apart.
        """
        if max_nodes >= MAX_ROWS:
            raise ValueError(f"max_nodes must be below {MAX_ROWS}, not {max_nodes}")
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}  # by parent and token
        inner, leaves = set(), 0
        for continuation in continuations:
            if len(parents) >= max_nodes:
                break
            node = -1
            for token in continuation[:max_depth]:
                child = children.get((node, token))
                if child is None:
                    branches = node in inner or not parents
                    if len(parents) >= max_nodes or (branches and leaves >= width):
                        break
                    leaves += branches
                    inner.add(node)
                    child = children[node, token] = len(parents)
                    parents.append(node)
                node = child
        return cls(tuple(token for _, token in children), tuple(parents))

    @property
    def rows(self) -> int:
        """Of a verification step: the nodes and the root."""
        return len(self.tokens) + 1

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def depths(self) -> list[int]:
        """Of each node, from 1."""
        return self.links.depths[1:]

    @cached_property
    def links(self) -> Links:
        """From the parents."""
        return links_from_parents(self.parents)

    @property
    def paths(self) -> np.ndarray:
        """The tokens on each row's way from the root, its own last: int64 [rows, depth], -1 before the first."""
        paths = np.full((self.rows, max(self.links.depths)), -1, np.int64)
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents), 1):
            paths[row, :-1] = paths[parent + 1, 1:]
            paths[row, -1] = token
        return paths

    @property
    def ancestors(self) -> np.ndarray:
        """Masks of the rows; see :func:`ancestors`."""
        return ancestors(self.parents)


def links_from_parents(parents: Sequence[int]) -> Links:
    """The links of a tree.

    Args:
        parents: of each node, as in :class:`DraftTree`.

    Raises:
        ValueError: a node's parent does not come before it; names its row.
    """
    rows = len(parents) + 1
    depths = [0] * rows
    for row, parent in enumerate(parents, 1):
        if not -1 <= parent < row - 1:
            raise ValueError(f"row {row}: the parent must be an earlier node or -1, not {parent}")
        depths[row] = depths[parent + 1] + 1
    first_child, next_sibling = [-1] * rows, [-1] * rows
    for row in range(rows - 1, 0, -1):
        parent_row = parents[row - 1] + 1
        next_sibling[row], first_child[parent_row] = first_child[parent_row], row
    return Links(first_child, next_sibling, depths)


def links_from_ancestors(masks: Sequence[int] | np.ndarray) -> Links:
    """The links of a tree of which only the attention mask is known; see :func:`parents_from_ancestors`."""
    return links_from_parents(parents_from_ancestors(masks))


def parents_from_ancestors(masks: Sequence[int] | np.ndarray) -> list[int]:
    """The nodes' parents. A row's parent is the last row that it sees, besides itself.

    Args:
        masks: int64 [rows], from :func:`ancestors`.

    Raises:
        ValueError: masks that no tree has; names the first row that is wrong.
    """
    if not 1 <= len(masks) <= MAX_ROWS:
        raise ValueError(f"there must be 1 to {MAX_ROWS} rows, not {len(masks)}")
    bits = np.asarray(masks, np.int64).view(np.uint64).tolist()
    if bits[0] != 1:
        raise ValueError("row 0: the root must see itself alone")
    parents = []
    for row, mask in enumerate(bits[1:], 1):
        parent_row = (mask & ~(1 << row)).bit_length() - 1
        if not 0 <= parent_row < row or mask != bits[parent_row] | 1 << row:
            raise ValueError(f"row {row}: it must see itself, an earlier row and what that one sees, not {mask:#x}")
        parents.append(parent_row - 1)
    return parents


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """What each row sees of its step, as ``ops.attention_gpu.attend_chunks`` takes it.

    Args:
        parents: of each node, as in :class:`DraftTree`; at most 63.

    Returns:
        int64 [rows], the root first; bit j: sees row j, which is the row itself or lies on its path.

    Raises:
        ValueError: too many nodes, or a parent that does not come first.
    """
    if len(parents) >= MAX_ROWS:
        raise ValueError(f"row {MAX_ROWS}: an ancestor mask has {MAX_ROWS} bits")
    links_from_parents(parents)  # checks them
    masks = [1]
    for row, parent in enumerate(parents, 1):
        masks.append(masks[parent + 1] | 1 << row)
    return np.array(masks, np.uint64).view(np.int64)
