"""The one batch of a step: rows of prefill chunks, decode steps and draft trees side by side.

A row is one token of one sequence. The rows of a sequence are consecutive and in position order, those of a tree with
each parent before its children; sequence ``s`` owns ``row_counts[s]`` of them. Each row first writes its key and value
into the paged cache and then attends to what its sequence has cached up to and including itself::

    rows          0  1  2 | 3 | 4 | 5  6          sequences 0 (chunk of 3), 1, 2 (decode), 3 (chunk of 2)
    row_counts    3        1   1   2
    kv_lengths    3        9   40  18              cached tokens once the rows are written
    positions     0  1  2 | 8 | 39| 16 17          the last rows of a sequence: position = kv_length - 1
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowBatch:
    """Rows of one forward pass.

    Attributes:
        token_ids: int64 [rows].
        positions: int64 [rows], the absolute position of each token in its sequence.
        kv_slots: int64 [rows], where the row's key and value go: ``page * page_size + offset``.
        page_table: page numbers of each sequence in position order; what lies behind its last page is never read (host
            side).
        logit_rows: int64 [m], the rows whose logits are wanted.
        row_counts: rows of each sequence (host side; their sum is the number of rows).
        kv_lengths: cached tokens of each sequence after this pass has written its rows (host side).
        ancestors: of each sequence whose rows are a draft tree, for each row its mask, 0 or more: bit j says whether it
            sees row j of its sequence, which is the row itself or lies on its path. None for the other sequences; or
            for all. The first row is the root, and a row's position is the root's plus its depth; but its key and value
            go to the place of its number (host side).
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    page_table: Sequence[Sequence[int]]
    logit_rows: Tensor
    row_counts: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    ancestors: Sequence[Sequence[int] | None] | None = None
