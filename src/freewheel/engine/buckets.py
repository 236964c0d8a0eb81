"""Numbers of rows for which steps are captured."""

from freewheel.config import EngineConfig

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS = (16, 32, 64, 128, 256, 512, 1024)
MAX_DRAFT_ROWS = 512  # of a step whose drafts the device makes


def bucket_for(sequences: int) -> int:
    """The number of rows of the step that so many sequences go through, ``BUCKETS[-1]`` at most."""
    return next(rows for rows in BUCKETS if rows >= sequences)


def buckets(slots: int) -> list[int]:
    """Numbers of rows that steps of so many sequences have."""
    return [rows for rows in BUCKETS if rows < 2 * slots]


def draft_rows(sequences: int, nodes: int, most_rows: int) -> list[int]:
    """Numbers of rows that steps of so many sequences have, each of which may have drafts of so many nodes."""
    most = max(min(sequences * (1 + nodes), MAX_DRAFT_ROWS, most_rows), sequences + 1)
    return [rows for rows in (*BUCKETS, MAX_DRAFT_ROWS) if sequences < rows < 2 * most]


def most_drawn(config: EngineConfig) -> int:
    """Rows from which tokens are drawn at once at most, on CUDA devices, those for drafts that are not needed too."""
    sizes = buckets(config.max_num_seqs)
    if not config.speculation:
        return sizes[-1]
    most_rows = config.most_rows("cuda")
    return max(draft_rows(size, config.draft_nodes, most_rows)[-1] for size in sizes)


def draft_step(sequences: int, drafted: int, nodes: int, most_rows: int) -> tuple[int, int]:
    """Of the step for so many sequences with so many drafted rows in all: for how many sequences and rows it is made.

    The other two as for :func:`draft_rows`. Without drafted rows, it is for those who have yet to learn how long they
    are, and each has one row.
    """
    size = bucket_for(sequences)
    if not drafted:
        return size, size
    return size, next(rows for rows in draft_rows(size, nodes, most_rows) if rows >= sequences + drafted)


def chunk_sizes(most_rows: int) -> list[int]:
    """Numbers of rows for which chunks are captured, where steps have so many at most."""
    return [rows for rows in CHUNKS if rows < 2 * max(most_rows, CHUNKS[0])]
