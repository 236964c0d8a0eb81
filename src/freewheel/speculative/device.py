"""Drafts on the device: a step with speculation needs no host. Needs Triton."""

from collections.abc import Sequence

import torch
from torch import Tensor

from freewheel.ops.launch import launch, power
from freewheel.speculative import draft_kernels as kernels
from freewheel.speculative.draft import GUESSES
from freewheel.speculative.draft_kernels import Paths, Tables, Trees
from freewheel.speculative.index import NgramIndex
from freewheel.speculative.tree import MAX_ROWS

MOST_WIDTH = 4  # of trees: all pairs of guesses are compared, in registers
FEW_TOKENS, MANY_TOKENS = 16, 128  # that are indexed at a time: after a step, and of a prompt
CLEARED = 1024  # buckets at a time


class DeviceIndex:
    """An ``NgramIndex`` for each slot, over tokens that lie on the device; all drafts are those that it would give.

    Nothing here waits for the device, and what is launched depends on the sizes of its arguments alone.
    """

    def __init__(
        self, tokens: Tensor, lengths: Tensor, *, orders: Sequence[int] = (8, 4, 2), chain: int = 16, cap: int = 32
    ) -> None:
        """Make room: with three orders 24 to 36 bytes for each of the tokens there is room for.

        Args:
            tokens: int64 [slots, max_length], which others write; not negative where they are known.
            lengths: int64 [slots], how many are known, which others write as well.
            orders, chain, cap: see :class:`NgramIndex`.

        Raises:
            ValueError: naming the argument that is out of range.
        """
        slots, max_length = tokens.shape
        if max_length < 2:
            raise ValueError(f"tokens must have room for 2 of each slot at least, not {max_length}")
        like = NgramIndex(1, orders=orders, chain=chain, cap=cap)
        self.chain, self.cap = like.chain, like.cap
        buckets, levels, device = power(max_length), len(like.orders), tokens.device
        self._shift = 33 - buckets.bit_length()
        powers = [number - (number >> 31 << 32) for number in like.powers]  # as int32

        def empty(*shape: int) -> Tensor:
            return torch.full((slots, levels, *shape), -1, dtype=torch.int32, device=device)

        self.tables = Tables(
            tokens=tokens,
            lengths=lengths,
            heads=empty(buckets),
            previous=empty(max_length),
            indexed=torch.zeros(slots, levels, dtype=torch.int32, device=device),
            orders=torch.tensor(like.orders, dtype=torch.int32, device=device),
            powers=torch.tensor(powers, dtype=torch.int32, device=device),
            max_length=max_length,
            buckets=buckets,
        )

    def clear(self, slots: Tensor) -> None:
        """Forget the tokens of these slots, int32 or int64 [rows], -1 for none: others are to come."""
        launch(kernels.clear, (len(slots), len(self.tables.orders)), 4, self.tables, slots, CLEARED)

    def extend(self, slots: Tensor, *, told: Tensor | None = None, many: bool = False) -> None:
        """Index new tokens.

        Args:
            slots: int32 or int64 [rows], all different; -1 for none.
            told: int64 [rows], how many tokens are known, which is written to ``lengths``; -1 where these are right.
            many: they are more than a few.
        """
        grid = len(slots), len(self.tables.orders)
        tile, warps = (MANY_TOKENS, 8) if many else (FEW_TOKENS, 1)
        launch(kernels.extend, grid, warps, self.tables, slots, told, self._shift, tile)

    def draft(self, slots: Tensor, most_nodes: Tensor, most_depths: Tensor, out: Trees, *, width: int) -> None:
        """Draft what may follow the tokens in slots, which have been indexed.

        Args:
            slots: as for :meth:`extend`.
            most_nodes, most_depths: int32 or int64 [rows], see :func:`~freewheel.speculative.draft`; 0 nodes for none,
                and never more than there is room for behind the tokens.
            out: from :func:`make_trees`, of as many nodes and steps as there may be.
            width: most leaves, at most ``MOST_WIDTH``.

        Raises:
            ValueError: a width out of range.
        """
        if not 1 <= width <= MOST_WIDTH:
            raise ValueError(f"width must be from 1 to {MOST_WIDTH}, not {width}")
        nodes, limit = out.tokens.shape[1], GUESSES * width
        levels = len(self.tables.orders)
        launch(
            kernels.draft, (len(slots),), 4,
            self.tables, slots, most_nodes, most_depths, out, width, self.chain, limit, self.cap,
            levels, power(levels), power(self.chain), power(self.cap), power(limit), power(nodes), nodes,
        )  # fmt: skip


def make_trees(rows: int, nodes: int, device: torch.device | str) -> Trees:
    """Room for the trees of a batch.

    Raises:
        ValueError: more nodes than ancestor masks can tell apart.
    """
    if not 1 <= nodes < MAX_ROWS:
        raise ValueError(f"nodes must be from 1 to {MAX_ROWS - 1}, not {nodes}")

    def room(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(rows, *shape, dtype=dtype, device=device)

    return Trees(
        tokens=room(torch.int64, nodes),
        parents=room(torch.int32, nodes),
        depths=room(torch.int32, nodes),
        ancestors=room(torch.int64, nodes),
        counts=room(torch.int32),
    )


def make_paths(rows: int, nodes: int, device: torch.device | str) -> Paths:
    """Room for the accepted paths of a batch."""
    return Paths(
        rows=torch.zeros(rows, nodes + 1, dtype=torch.int32, device=device),
        tokens=torch.zeros(rows, nodes + 1, dtype=torch.int64, device=device),
        counts=torch.zeros(rows, dtype=torch.int32, device=device),
    )


def walk_trees(trees: Trees, starts: Tensor, sampled: Tensor, out: Paths) -> None:
    """Verify the drafts of a batch; see :func:`~freewheel.speculative.walk`.

    Args:
        trees: of the batch.
        starts: int32 or int64 [rows], where each root's sample stands.
        sampled: int64, the token drawn at each row; those of a tree follow each other.
        out: from :func:`make_paths`.
    """
    nodes = trees.tokens.shape[1]
    launch(kernels.walk, (len(starts),), 1, trees, starts, sampled, out, nodes, power(nodes))
