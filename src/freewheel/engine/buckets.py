"""Numbers of rows for which steps are captured."""

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
    """Numbers of rows that steps of so many sequences have, each of which may have drafts of so many nodes.

    The first has none to spare: it is for those who have yet to learn what became of their drafts.
    """
    most = max(min(sequences * (1 + nodes), MAX_DRAFT_ROWS, most_rows), sequences)
    return [rows for rows in (*BUCKETS, MAX_DRAFT_ROWS) if sequences <= rows < 2 * most]


def chunk_sizes(most_rows: int) -> list[int]:
    """Numbers of rows for which chunks are captured, where steps have so many at most."""
    return [rows for rows in CHUNKS if rows < 2 * max(most_rows, CHUNKS[0])]
