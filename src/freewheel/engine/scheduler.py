"""What the next step does: a pure function of who runs, who waits, and what is left.

Sequences are ranked by priority (smaller is more urgent), then by arrival. The rules:

- Single rows that complete a sequence's known tokens (decoding) come first: decoding never stalls on prefill.
- What is left of the token budget goes to prefill by rank, running and waiting sequences alike, in chunks.
- A waiting sequence is admitted when all its known tokens fit and one page remains for each sequence that runs, so that
  it does not push out, or get pushed out, in the next steps. Nobody overtakes a waiting sequence of better rank.
- Rows whose logits score the prompt have a budget of their own.
- Preemption happens only for want of a page or a slot, takes the worst rank first, and never for a sequence of worse
  rank. A waiting sequence preempts strictly lower priorities only, and only if that suffices. A sequence that finds no
  page and nobody behind it keeps its own and sits the step out.

So the best-ranked running sequence always advances, and with a pool that holds the longest sequence nobody starves
within a priority.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from operator import attrgetter
from typing import NamedTuple

Rank = tuple[int, int]
"""(priority, arrival): sorts the most deserving first; unique."""


class Entry(NamedTuple):
    """A sequence as the scheduler sees it.

    Attributes:
        key: names the sequence in the plan.
        rank: its place in every queue.
        length: tokens known, prompt and output.
        computed: tokens whose keys and values are cached, fewer than ``length``; of a waiting sequence, those that the
            prefix cache offers.
        pages: pages held, or offered.
        private: those of the pages that have exactly one holder, so that they become idle when it is preempted.
        idle: of a waiting sequence: offered pages that nobody holds, which admission therefore makes unavailable.
        scoring: whether its rows in prefill have logits that are wanted.
    """

    key: int
    rank: Rank
    length: int
    computed: int
    pages: int
    private: int = 0
    idle: int = 0
    scoring: bool = False


class Capacity(NamedTuple):
    """What a step may use: rows, free slots, available pages (free or evictable), tokens in a page, scored rows."""

    rows: int
    slots: int
    pages: int
    page_size: int
    scored_rows: int


@dataclass
class Plan:
    """What to do.

    Attributes:
        preempt: a running sequence to send back to the queue before planning again; the rest is then void.
        rows: sequence and its number of rows, in batch order. Waiting sequences named here are admitted.
    """

    preempt: int | None = None
    rows: list[tuple[int, int]] = field(default_factory=list)


_by_rank = attrgetter("rank")


def plan(running: Sequence[Entry], waiting: Iterable[Entry], capacity: Capacity) -> Plan:
    """Plan a step.

    Args:
        running: sequences that hold a slot, in any order.
        waiting: the others, by rank. Read one by one, and no further than they can be admitted.
        capacity: what is left for them.
    """
    rows_left, slots, pages, page_size, scored_left = capacity
    result = Plan()
    decoding = sorted((entry for entry in running if entry.length - entry.computed == 1), key=_by_rank)
    prefilling = sorted((entry for entry in running if entry.length - entry.computed > 1), key=_by_rank)
    worst = max(running, key=_by_rank, default=None)
    stalled = False

    for entry in decoding:
        if rows_left == 0:
            break
        missing = pages_for(entry.computed + 1, page_size) - entry.pages
        if missing > pages:
            assert worst is not None
            if worst is not entry:
                return Plan(preempt=worst.key)
            stalled = True
            continue
        pages -= max(missing, 0)
        rows_left -= 1
        result.rows.append((entry.key, 1))

    def candidates() -> Iterator[Entry]:
        if not stalled:
            for entry in waiting:
                yield entry
                if stalled:
                    return

    admitted = 0
    holders = {entry.key for entry in prefilling}
    for entry in merge(prefilling, candidates(), key=_by_rank):
        if rows_left == 0:
            break
        count = min(entry.length - entry.computed, rows_left, scored_left if entry.scoring else rows_left)
        if count == 0:  # a waiting one is not overtaken
            stalled = stalled or entry.key not in holders
            continue
        if entry.key not in holders:
            missing = pages_for(entry.length, page_size) - entry.pages + entry.idle
            headroom = len(running) + admitted
            if slots == 0 or missing + headroom > pages:
                if worst and worst.rank[0] > entry.rank[0]:
                    lower = [other for other in running if other.rank[0] > entry.rank[0]]
                    # At least so many. What is offered may become idle with its holder, and is then taken again.
                    attainable = pages + sum(other.private for other in lower) - entry.private
                    if missing + headroom - len(lower) <= attainable:
                        return Plan(preempt=worst.key)
                stalled = True
                continue
            pages -= missing
            slots -= 1
            admitted += 1
        rows_left -= count
        if entry.scoring:
            scored_left -= count
        result.rows.append((entry.key, count))
    return result


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)
